"""A check for the reader's own RoPE, wrong implementations to try it on, and weaker checks to compare it with.

A candidate takes one of two lists of arguments, and check() sees which:

    candidate(x, cos, sin) -> y               a kernel: x, y (rows, R); cos, sin (rows, R/2), one row for each row of x
    candidate(x, cos, sin, positions) -> y    an op: x, y (tokens, heads, R); cos, sin the whole table (P, R/2);
                                              positions (tokens,) says which of its rows a token takes
"""

import contextlib
import functools
import inspect
import traceback

import chapter  # adds the folder of rope_kernels.py to the path
import kernel_checks
import torch

import rope_kernels as rk

# 27 tokens, 7 heads, 189 rows, 128 channels, 64 pairs: no two alike, so that no exchanged pair of axes fits by
# chance, and an odd number of rows, so that the last block of a kernel isn't full. The positions are distinct and out
# of order. None is 0, where every rotation is the identity; some are odd and past 256, where bfloat16 holds no odd
# integers. The base is that of no model, so that an op which builds its own angles instead of reading the table does
# not pass.
TOKENS, HEADS, ROPE_DIM, BASE, TABLE_ROWS = 27, 7, 128, 12000.0, 510
POSITIONS = tuple(1 + 211 * i % 499 for i in range(TOKENS))  # 1, 212, 423, 135, 346, 58, … (499 is prime)


def pairs(convention, R):
    """List the channels (a, b) of each pair p: neox (p, p + R/2), interleaved (2p, 2p + 1)."""
    return [(p, p + R // 2) if convention == "neox" else (2 * p, 2 * p + 1) for p in range(R // 2)]


def right_value(x, cos, sin, convention):
    """Rotate pair by pair in float64, written from the definition and from nothing else.

    y[a] = x[a]·cos[p] − x[b]·sin[p]        y[b] = x[b]·cos[p] + x[a]·sin[p]        (a, b) = pair p
    """
    x, cos, sin = x.double(), cos.double(), sin.double()
    y = torch.full_like(x, torch.nan)
    for p, (a, b) in enumerate(pairs(convention, x.shape[-1])):
        y[..., a] = x[..., a] * cos[..., p] - x[..., b] * sin[..., p]
        y[..., b] = x[..., b] * cos[..., p] + x[..., a] * sin[..., p]
    return y


# ------------------------------------------------------------------------------------------- the data and the call


@functools.cache
def table(R, base):
    """Return cos and sin (P, R/2) in float64, of angle[m, p] = m·base^(−2p/R)."""
    frequency = base ** (-2 * torch.arange(R // 2, dtype=torch.float64) / R)
    angle = torch.arange(TABLE_ROWS, dtype=torch.float64)[:, None] * frequency
    return angle.cos(), angle.sin()


def data(R=ROPE_DIM, dtype=torch.float32, seed=0):
    """Return x (tokens, heads, R) in [−2, 2) and the table cos, sin (P, R/2); both differ from seed to seed."""
    x = 4 * torch.rand(TOKENS, HEADS, R, generator=torch.Generator().manual_seed(seed)) - 2
    return [tensor.to(dtype, copy=True) for tensor in (x, *table(R, BASE * (1 + seed)))]


def takes_positions(candidate):
    """Tell an op (x, cos, sin, positions) from a kernel (x, cos, sin)."""
    try:
        inspect.signature(candidate).bind("x", "cos", "sin")
    except TypeError:
        return True
    except ValueError:  # a built-in function, which has no signature to look at
        return False
    return False


@contextlib.contextmanager
def poisoned_memory():
    """Let torch.empty, from where outputs come, hold NaN: memory left unwritten can't hold an earlier right result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(candidate, x, cos, sin, positions=POSITIONS):
    """Call the candidate on copies of the arguments, in the shapes that it takes.

    Return what it returned, the arguments as it left them, and the arguments as they were, each by name.
    """
    positions = torch.tensor(positions)
    if takes_positions(candidate):
        given = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    else:
        rows = positions.repeat_interleave(x.shape[1])  # the heads of a token share its position
        given = {"x": x.flatten(0, 1), "cos": cos.index_select(0, rows), "sin": sin.index_select(0, rows)}
    given = {name: tensor.to(chapter.DEVICE) for name, tensor in given.items()}
    passed = {name: tensor.clone() for name, tensor in given.items()}
    with poisoned_memory():
        y = candidate(*passed.values())
    return y, passed, given


class Fault(Exception):
    """A sentence that says why a candidate is rejected."""


def run_and_look(candidate, x, cos, sin, positions=POSITIONS):
    """Run the candidate, and raise a Fault unless what it returned is like x."""
    y, passed, given = run(candidate, x, cos, sin, positions)
    if not isinstance(y, torch.Tensor):
        raise Fault(f"it returned {type(y).__name__}, not a tensor")
    for what in ("shape", "dtype", "device", "layout"):
        got, wanted = getattr(y, what), getattr(given["x"], what)
        if got != wanted:
            raise Fault(f"it returned {what} {got}, x has {wanted}".replace("torch.Size([", "(").replace("])", ")"))
    return y, passed, given


def output(candidate, x, cos, sin, positions=POSITIONS):
    """Run the candidate and return y on the CPU in float64, as (tokens, heads, R)."""
    y = run(candidate, x, cos, sin, positions)[0]
    return y.detach().cpu().double().reshape(x.shape)


# ------------------------------------------------------------------------------------------------------- the check


def pairing_shown(candidate, R, dtype):
    """Say which channels the candidate pairs: a single 1 in a row comes out in its own channel and in its partner's.

    Neither the right value nor the numbers in the tables matter here, only where the output is not zero.
    """
    hot = torch.arange(TOKENS * HEADS) % R  # the channel that holds the 1, row by row
    x = torch.nn.functional.one_hot(hot, R).view(TOKENS, HEADS, R).to(dtype)
    _, cos, sin = data(R, dtype)
    touched = (output(candidate, x, cos, sin) != 0).view(-1, R).scatter(1, hot[:, None], False)
    partner = {"neox": (hot + R // 2) % R, "interleaved": hot ^ 1}
    only = {name: torch.nn.functional.one_hot(channel, R).bool() for name, channel in partner.items()}
    rows = {name: int((touched == channels).all(1).sum()) for name, channels in only.items()}
    for name, count in rows.items():
        if count == len(hot):
            return name
    return f"neither: neox in {rows['neox']} of {len(hot)} rows, interleaved in {rows['interleaved']}"


def named(y, x, cos, sin, convention):
    """Say which known mistake gives this y, or return None; it decides nothing, the verdict has fallen."""
    R = x.shape[-1]

    def near(left, right):
        return (left - right).abs() <= 2e-2

    a, b = (list(channels) for channels in zip(*pairs(convention, R), strict=True))
    c, s = (table[list(POSITIONS)].unsqueeze(1).double() for table in (cos, sin))
    overwritten = torch.empty_like(y)
    overwritten[..., a] = x[..., a] * c - x[..., b] * s
    overwritten[..., b] = x[..., b] * c + overwritten[..., a] * s
    if near(y, overwritten).all():
        return "the second channels of the pairs are computed from the first ones' results, not from x"
    rows = [p for p in POSITIONS for _ in range(HEADS)]
    case = kernel_checks.Case(sizes={}, lead=(TOKENS, HEADS), D=R, R=R, rows=rows, mode=convention, ids=POSITIONS)
    flat = (tensor.double().view(-1, tensor.shape[-1]) for tensor in (y, x, cos, sin))
    return kernel_checks.named(case, *flat, near)


def compare(candidate, convention, R, dtype):
    """Return the largest error, and what is wrong unless each element is the right value rounded once (else None).

    |y − right| ≤ 1e-5 + eps/2·|right|        eps/2: the largest relative error of one rounding to the dtype
    """
    x, cos, sin = data(R, dtype)
    y, passed, given = run_and_look(candidate, x, cos, sin)
    rows = list(POSITIONS)
    right = right_value(x, cos[rows].unsqueeze(1), sin[rows].unsqueeze(1), convention)
    y = y.detach().cpu().double().view(x.shape)
    error = (y - right).abs()
    allowed = 1e-5 + torch.finfo(dtype).eps / 2 * right.abs()
    excess = error - allowed
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))  # NaN counts as the largest
    largest, off = error.max().item(), error[worst].item()
    place = f"at token {worst[0]} (position {POSITIONS[worst[0]]}), head {worst[1]}, channel {worst[2]}"
    name = str(dtype).removeprefix("torch.")
    if off != off:
        return largest, f"{name}: NaN {place}, as in memory that was never written"
    if excess[worst] > 0:
        mistake = named(y, x, cos, sin, convention) if largest > 0.05 else None
        advice = f", where one rounding allows {allowed[worst]:.2g}: work in float32, round last"
        said = f"off by {off:.2g} {place}" + (advice if largest < 1e-2 else "")
        return largest, f"{name}: " + (f"{mistake}; {said}" if mistake else said)
    for name, before in given.items():
        if passed[name].dtype != before.dtype or not torch.equal(passed[name], before):
            return largest, f"the values are right, but it wrote into {name}"
    return largest, None


def examine(candidate, convention, rope_dim=ROPE_DIM, dtypes=(torch.float32, torch.float16)):
    """Return what check() prints: lines about the output, and why the candidate is rejected (None if it is not)."""
    lines = []
    try:
        if convention not in ("neox", "interleaved") or rope_dim not in range(8, TOKENS * HEADS, 2) or not dtypes:
            # at R = 4 the permutation between the conventions is its own inverse, which hides a fault
            raise Fault("check takes 'neox' or 'interleaved', an even rope_dim of 8 to 188, and one or more dtypes")
        for dtype in dtypes:
            # not what compare() will ask: a result or a table kept from this call is out of date in that one
            y = run_and_look(candidate, *data(rope_dim, dtype, seed=1), POSITIONS[::-1])[0]
        lines.append(f"shape          {tuple(y.shape)}, as x")
        shown = pairing_shown(candidate, rope_dim, dtypes[0])
        lines.append(f"pairing        {shown}")
        found = {str(dtype)[6:]: compare(candidate, convention, rope_dim, dtype) for dtype in dtypes}
        errors = (f"{name} " + ("below 1e-5" if e <= 1e-5 else f"{e:.2g}") for name, (e, _) in found.items())
        lines.append("largest error  " + ", ".join(errors))
        if {shown, convention} == {"neox", "interleaved"}:
            raise Fault(f"its pairs are {shown}, and {convention} was asked for")
        fault = next((fault for _, fault in found.values() if fault), None)
        return lines, fault or (None if shown == convention else "the values are right, the pairs are not")
    except Fault as fault:
        return lines, str(fault)
    except (Exception, SystemExit) as error:
        return lines, "it raised " + traceback.format_exception_only(error)[0].splitlines()[0][:200]


def check(candidate, convention, *, rope_dim=ROPE_DIM, dtypes=(torch.float32, torch.float16)):
    """Print what the candidate's output shows, and whether it is the rotation of that convention: a Verdict.

    Every element is compared with right_value(), at 27 positions from 1 on, in 7 heads and in each dtype asked for;
    the arguments must come back unchanged. It never raises: whatever the candidate does is reported in a sentence.
    """
    lines, fault = examine(candidate, convention, rope_dim, dtypes)
    for line in lines:
        print(line)
    return chapter.Verdict(fault)


# ---------------------------------------------------------------------------------------------- the weaker checks


def close(a, b):
    """Compare loosely: a fault below shows as more than 1 or, to a check that is blind to it, as less than 1e-5."""
    return bool(((a - b).abs() <= 1e-3).all())


def keeps_identity(candidate, convention):
    """Ask for c = 1, s = 0 everywhere: y = x."""
    x, cos, _ = data()
    return close(output(candidate, x, torch.ones_like(cos), torch.zeros_like(cos)), x.double())


def turns_a_quarter(candidate, convention):
    """Ask for c = 0, s = 1 everywhere: y[a] = −x[b], y[b] = x[a]."""
    x, cos, _ = data()
    right = torch.empty_like(x)
    for a, b in pairs(convention, ROPE_DIM):
        right[..., a], right[..., b] = -x[..., b], x[..., a]
    return close(output(candidate, x, torch.zeros_like(cos), torch.ones_like(cos)), right.double())


def keeps_norm(candidate, convention):
    """Ask for the length of every row: ‖y‖ = ‖x‖."""
    x, cos, sin = data()
    return close(output(candidate, x, cos, sin).norm(dim=-1), x.double().norm(dim=-1))


def depends_on_distance(candidate, convention, shift=100):
    """Ask for ⟨f(q, m), f(k, n)⟩ = ⟨f(q, m + shift), f(k, n + shift)⟩ where m + n = 28."""
    (q, cos, sin), (k, _, _) = data(), data(seed=1)

    def scores(first):
        m = list(range(first, first + TOKENS))
        turned = output(candidate, q, cos, sin, m), output(candidate, k, cos, sin, m[::-1])
        return (turned[0] * turned[1]).sum(-1)

    return close(scores(1), scores(1 + shift))


def agrees(candidate, convention):
    """Ask check(), without printing."""
    return examine(candidate, convention)[1] is None


CHECKS = {
    "identity": keeps_identity,
    "quarter turn": turns_a_quarter,
    "norm": keeps_norm,
    "relative position": depends_on_distance,
    "agreement": agrees,
}

# --------------------------------------------------------------------------------------- the wrong implementations

WRONG = {}  # name: function; function.claims is the convention that it claims to implement


def wrong(name, claims="neox"):
    """Enter a wrong implementation into WRONG."""

    def enter(function):
        function.claims = claims
        WRONG[name] = function
        return function

    return enter


@wrong("swapped convention")
def swapped_convention(x, cos, sin):
    return rk.torch_rope_interleaved(x, cos, sin)


@wrong("sign of sin flipped")
def sign_flipped(x, cos, sin):
    return rk.torch_rope_neox(x, cos, -sin)


@wrong("cos and sin exchanged")
def cos_and_sin_exchanged(x, cos, sin):
    return rk.torch_rope_neox(x, sin, cos)


@wrong("rotated twice")
def rotated_twice(x, cos, sin):
    return rk.torch_rope_neox(rk.torch_rope_neox(x, cos, sin), cos, sin)


@wrong("table transposed")
def table_transposed(x, cos, sin):
    rows, columns = cos.shape  # the same memory, read as if it held one row a pair
    return rk.torch_rope_neox(x, cos.reshape(columns, rows).T, sin.reshape(columns, rows).T)


@wrong("table row above")
def table_row_above(x, cos, sin):
    return rk.torch_rope_neox(x, cos.roll(1, 0), sin.roll(1, 0))


@wrong("first column for all pairs")
def first_column_for_all_pairs(x, cos, sin):
    return rk.torch_rope_neox(x, cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin))


@wrong("frequencies in reverse")
def frequencies_in_reverse(x, cos, sin):
    return rk.torch_rope_neox(x, cos.flip(-1), sin.flip(-1))


@wrong("[c, c] table, adjacent pairs", claims="interleaved")
def full_width_table(x, cos, sin):
    c, s = (torch.cat((table, table), -1).float() for table in (cos, sin))  # for half-split pairs
    partner = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return (x * c + partner * s).to(x.dtype)


@wrong("output de-interleaved", claims="interleaved")
def output_deinterleaved(x, cos, sin):
    y = rk.torch_rope_interleaved(x, cos, sin)
    return torch.cat((y[..., 0::2], y[..., 1::2]), -1)


@wrong("second half dropped")
def second_half_dropped(x, cos, sin):
    y, half = x.clone(), x.shape[-1] // 2
    y[:, :half] = rk.torch_rope_neox(x, cos, sin)[:, :half]
    return y


@wrong("second half reads the first's result")
def reads_overwritten_half(x, cos, sin):
    y, half = x.clone(), x.shape[-1] // 2
    y[:, :half] = y[:, :half] * cos - y[:, half:] * sin
    y[:, half:] = y[:, half:] * cos + y[:, :half] * sin  # y[:, :half] is no longer x[:, :half]
    return y


@wrong("last row left out")
def last_row_left_out(x, cos, sin):
    y = x.clone()
    y[:-1] = rk.torch_rope_neox(x[:-1], cos[:-1], sin[:-1])
    return y


@wrong("x overwritten")
def x_overwritten(x, cos, sin):
    return x.copy_(rk.torch_rope_neox(x, cos, sin))


@wrong("arithmetic in x's dtype")
def arithmetic_in_x_dtype(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def gathered(x, cos, sin, rows):
    """Rotate each token of x by its row of the table: rows (tokens,), or (tokens, heads)."""
    rows = rows.view(x.shape[0], -1)
    return rk.torch_rope_neox(x, cos[rows], sin[rows])


@wrong("only head 0 rotated")
def only_head_0(x, cos, sin, positions):
    y = x.clone()
    y[:, :1] = gathered(x[:, :1], cos, sin, positions)
    return y


@wrong("position off by one")
def position_off_by_one(x, cos, sin, positions):
    return gathered(x, cos, sin, positions + 1)


@wrong("position halved (m // 2)")
def position_halved(x, cos, sin, positions):
    return gathered(x, cos, sin, positions // 2)  # as when a row's position comes from counting twice the heads


@wrong("position in bfloat16")
def position_in_bfloat16(x, cos, sin, positions):
    return gathered(x, cos, sin, positions.to(torch.bfloat16).long())


@wrong("positions ignored")
def positions_ignored(x, cos, sin, positions):
    return gathered(x, cos, sin, torch.arange(x.shape[0], device=x.device))


@wrong("head index as position")
def head_index_as_position(x, cos, sin, positions):
    heads = torch.arange(x.shape[1], device=x.device)
    return gathered(x, cos, sin, heads.expand(x.shape[:2]))
