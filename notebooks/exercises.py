"""Checks of the exercises in notebooks 01 to 10: each prints a verdict and never raises.

What is right comes from a formula in float64 or from the references, never from a worked answer.
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
import unittest.mock

import chapter
import self_checks as sc
import tiny
import torch
from kernel_checks import Case, faults, written_by, written_twice
from tilelang.jit import JITKernel

import rope_kernels as rk


def unwritten(answer):
    """Tell whether an answer still has a gap: three dots as a line of a function, or among its values."""
    values = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple) else (answer,)
    if any(value is ... for value in values):
        return True
    try:
        text = ast.parse(textwrap.dedent(inspect.getsource(written_by(answer))))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Expr) and getattr(node.value, "value", 0) is ... for node in ast.walk(text))


def checker(find_faults):
    """Make a check of an answer from a generator of what is wrong with it, or None; the first fault is told.

    `check(answer)` prints the verdict; `check.fault(answer)` returns the fault, or None for a right answer.
    """

    def fault(answer):
        if unwritten(answer):
            return chapter.UNWRITTEN
        try:
            return next((fault for fault in find_faults(answer) if fault is not None), None)
        except (Exception, SystemExit) as error:
            return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"

    @functools.wraps(find_faults)
    def check(answer):
        return chapter.Verdict(fault(answer))

    check.fault = fault
    return check


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(positions, R, base=10000.0):
    """Return cos and sin in float64, one column a pair, for a list of positions."""
    angle = torch.as_tensor(positions)[:, None] * base ** (-2 * torch.arange(R // 2, dtype=torch.float64) / R)
    return angle.cos(), angle.sin()


def difference(found, right, tolerance=0.0):
    """Say where a tensor first differs from the right one by more than the tolerance, or return None."""
    if not isinstance(found, torch.Tensor):
        return f"it returned {type(found).__name__} in place of a tensor"
    if found.shape != right.shape:
        return f"it returned the shape {tuple(found.shape)}, right is {tuple(right.shape)}"
    found, right = found.detach().double().cpu(), right.detach().double().cpu()
    wrong = ~((found == right) | ((found - right).abs() <= tolerance))  # so NaN is wrong
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    pairs = ((f"{found[at]:.{digits}g}", f"{right[at]:.{digits}g}") for digits in (4, 8, 17))
    got, wanted = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, first {list(at)}: got {got}, right is {wanted}"


def value(name, found, right):
    return None if found == right else f"{name} is not {found!r}"


def got(name, found, right):
    return None if found == right else f"{name} gave {found!r}, right is {right!r}"


# ------------------------------------------------------------------------------------------ 01 two conventions


def evens_first(n):
    return torch.cat((torch.arange(0, n, 2), torch.arange(1, n, 2)))


def recognised(found, mistakes, tolerance=0.0):
    """Say which of the mistakes, {sentence: what it makes}, was made, or return None."""
    return next((mistake for mistake, made in mistakes.items() if difference(found, made, tolerance) is None), None)


@checker
def check_01_1(interleaved_by_neox):
    for lead, R in (((5, 3), 64), ((4,), 8), ((2, 2, 7), 16)):
        x, (cos, sin) = draw(*lead, R), tables(range(3, 3 + lead[-1]), R)
        try:
            found, perm = interleaved_by_neox(x.clone(), cos, sin), evens_first(R)
        except IndexError:  # x[perm] takes rows, of which there are fewer
            yield "x[perm] asks for rows (IndexError): index the last dimension, x[..., perm]"
            return
        fault = difference(found, rk.torch_rope_interleaved(x, cos, sin))
        mistakes = {
            "the permutation isn't undone: the result still lies evens first": (perm, torch.arange(R)),
            "perm is applied once more where it must be undone, by its inverse": (perm, perm),
            "the permutation and its inverse have changed places": (perm.argsort(), perm),
            "nothing is permuted, this is neox": (torch.arange(R), torch.arange(R)),
        }
        for mistake, (before, after) in mistakes.items():
            mistakes[mistake] = rk.torch_rope_neox(x[..., before], cos, sin)[..., after]
        yield fault and (recognised(found, mistakes) or fault)


def head_scores(h, query, key, rope, D):
    """Return the scores of every head; query and key are a weight and a bias."""
    cos, sin = (table[:, None] for table in tables(range(1, 1 + len(h)), D))
    q, k = (rope((h @ weight.T + bias).view(len(h), -1, D), cos, sin) for weight, bias in (query, key))
    return torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))


@checker
def check_01_2(to_interleaved):
    for D, heads_q, heads_k in ((16, 6, 2), (8, 4, 1)):
        h = draw(7, 48, seed=D)
        query, key = ((draw(n * D, 48, seed=n), draw(n * D, seed=9 + n)) for n in (heads_q, heads_k))
        moved = [to_interleaved(*(t.clone() for t in layer), n) for layer, n in ((query, heads_q), (key, heads_k))]
        for layer, result in ((query, moved[0]), (key, moved[1])):
            if not isinstance(result, tuple | list) or [isinstance(t, torch.Tensor) for t in result] != [True, True]:
                yield "return two tensors, W and b"
            for name, tensor, kept in zip(("weight", "bias"), result, layer, strict=True):
                if tensor.shape != kept.shape:
                    yield f"the {name} has the shape {tuple(tensor.shape)}, right is {tuple(kept.shape)}"
        trained = head_scores(h, query, key, rk.torch_rope_neox, D)
        fault = difference(head_scores(h, *moved, rk.torch_rope_interleaved, D), trained, 1e-9)
        weight, bias = query
        mistakes = {
            "the direction is the other one, from interleaved to neox": weight.view(heads_q, D, -1)[:, evens_first(D)],
            "all rows are permuted as one: each head has an order of its own": weight.view(2, -1, 48).transpose(0, 1),
            "the weight is as it was": weight,
        }
        mistakes = {mistake: made.reshape(weight.shape) for mistake, made in mistakes.items()}
        if fault and torch.equal(moved[0][1], bias):
            mistakes["the bias is as it was: it has an entry for each row, which moves with the row"] = moved[0][0]
        yield fault and (recognised(moved[0][0], mistakes) or fault)


@checker
def check_01_3(which):
    kinds = {
        "interleaved": rk.torch_rope_interleaved,
        "neox": rk.torch_rope_neox,
        "interleaved in, neox out": sc.WRONG["output de-interleaved"],
    }
    for R in (4, 8, 128):
        for name, kind in kinds.items():
            rope = unittest.mock.Mock(side_effect=kind)
            found = which(rope, R)
            if found != name:
                hint = ""
                if rope.called and found in kinds:
                    args, kwargs = rope.call_args
                    if torch.equal(kinds[found](*args, **kwargs), kind(*args, **kwargs)):
                        hint = ": for what you passed to rope both return the same"
                yield f"for R = {R} it says {found!r}, right is {name!r}{hint}"
            if rope.call_count != 1:
                yield f"it called rope {rope.call_count} times"


# ------------------------------------------------------------------------------------------ 02 self-checks


@checker
def check_02_2(my_fault):
    try:
        sc.run_and_look(my_fault, *sc.data())
    except sc.Fault as fault:
        yield str(fault)
    verdicts = {name: passes(my_fault, "neox") for name, passes in sc.CHECKS.items()}
    caught = [name for name, passed in verdicts.items() if not passed and name != "agreement"]
    if caught:
        yield f"it is caught by {', '.join(caught)}"
    if verdicts["agreement"]:
        yield "it is a right rotation"
    mine = sc.output(my_fault, *sc.data())
    for name, wrong in sc.WRONG.items():
        if torch.allclose(sc.output(wrong, *sc.data()), mine, atol=1e-3):
            yield f"it is {name!r} of the 21"


@checker
def check_02_3(equal_rows):
    for reference in (rk.torch_rope_neox, rk.torch_rope_interleaved):
        if not equal_rows(reference):
            yield f"it rejects {reference.__name__}"
    for token, head in ((3, 0), (22, 0), (22, 5)):

        def one_row_off(x, cos, sin, row=token * sc.HEADS + head):
            y = rk.torch_rope_neox(x, cos, sin)
            y[row] *= -1
            return y

        if equal_rows(one_row_off):
            yield f"it misses a wrong row at token {token}, head {head}" + (": compare all heads" if head else "")
    asked = set()

    def notes_positions(x, cos, sin, positions):
        asked.update(positions.tolist())
        return sc.gathered(x, cos, sin, positions)

    equal_rows(notes_positions)
    if len(asked) == 1:
        yield "all tokens are at one position, where every table row read is the same: use two"
    weaker = [passes for name, passes in sc.CHECKS.items() if name != "agreement"]
    unseen = [name for name, wrong in sc.WRONG.items() if all(passes(wrong, wrong.claims) for passes in weaker)]
    place_matters = ("table transposed", "table row above", "positions ignored", "head index as position")
    for name in unseen:
        if bool(equal_rows(sc.WRONG[name])) == (name in place_matters):
            yield f"it {'misses' if name in place_matters else 'catches'} {name!r}"
    print(f"It catches {len(place_matters)} of the {len(unseen)}: {', '.join(place_matters)}.")


# ------------------------------------------------------------------------------------------ 03 the naive kernel


@checker
def check_03_1(working_threads):
    for R, threads in ((64, 256), (96, 256), (256, 256), (512, 256), (64, 32), (64, 64), (512, 128), (256, 64)):
        which = f"R = {R} with {threads} threads"
        try:
            yield got(which, working_threads(R, threads), min(R // 2, threads))
        except Exception as error:
            yield f"{which} raised {type(error).__name__}: where no thread is idle, the CUDA has no `if`"
    with unittest.mock.patch.object(chapter, "cuda_source", return_value="if (((int)threadIdx.x) < 23) {"):
        yield None if working_threads(64, 256) == 23 else "it computes the number, and the task is to read it"


@checker
def check_03_2(ledger):
    for S, R, e, heads in ((524288, 128, 2, 32), (96, 64, 4, 8), (12, 80, 2, 1)):
        numbers = 2 * S * R + S // heads * R  # x, y; a table row for each token: R/2 of cos, R/2 of sin
        found = ledger(S, R, e, heads)
        fault = got(f"ledger{S, R, e, heads}", found, numbers * e)
        yield fault + ": x and y don't shrink" if fault and found == 3 * S * R * e // heads else fault
        if heads == 1:  # what it takes when nothing is said
            yield got(f"ledger{S, R, e}", ledger(S, R, e), numbers * e)


@checker
def check_03_3(rotate):
    for tokens, heads, dtype in ((3, 4, torch.float16), (5, 5, torch.float32), (4, 7, torch.float16)):
        q, positions = draw(tokens, heads, 32, dtype=dtype), torch.tensor([7, 1, 2, 2, 8])[:tokens]
        cos, sin = (table.to(dtype) for table in tables(range(9), 32))
        found = rotate(*(t.clone().to(chapter.DEVICE) for t in (q, cos, sin, positions)))
        rows = (table[positions][:, None].double() for table in (cos, sin))
        fault = difference(found, rk.torch_rope_neox(q.double(), *rows), 1e-5 if dtype == torch.float32 else 2e-3)
        mistakes = {
            "a row's heads are not side by side: it is `repeat_interleave`, not `repeat`": positions.repeat(heads),
            "the positions are ignored": torch.arange(tokens).repeat_interleave(heads),
        }
        for mistake, ids in mistakes.items():
            rows = (table[ids].view(tokens, heads, -1).double() for table in (cos, sin))
            mistakes[mistake] = rk.torch_rope_neox(q.double(), *rows)
        yield fault and (recognised(found, mistakes, 2e-3) or fault)
        yield value("the result's dtype", found.dtype, dtype)


@checker
def check_03_4(my_rope):
    yield from faults(my_rope, [Case({"S": S, "R": R}, (S,), R, R, list(range(S))) for S, R in ((5, 64), (50, 96))])


@checker
def check_03_5(my_rope):
    cases = []
    for S, D, R, start, inverse in ((5, 96, 64, 16, False), (7, 64, 32, 32, True)):
        sizes = {"S": S, "D": D, "R": R, "start": start, "inverse": inverse}
        cases.append(Case(sizes, (S,), D, R, list(range(S)), start=start, inverse=inverse))
    yield from faults(my_rope, cases)
    yield written_twice(my_rope, cases[0])


# ------------------------------------------------------------------------------------------ 04 the blocked kernel


def blocked(S, R, blk_s, mode="neox"):
    return Case({"S": S, "R": R, "blk_s": blk_s}, (S,), R, R, list(range(S)), mode)


def staged(my_rope):
    """Say what is not staged: all that a thread loads from global memory goes to shared memory."""
    cuda = chapter.cuda_source(my_rope, 64, 128, blk_s=16)
    tiles = re.findall(r"__shared__.* (\w+)\[", cuda)
    if len(tiles) < 3:
        return f"x, cos and sin should lie in shared memory: it has {len(tiles)} arrays there"
    cuda = re.sub(".*cp_async.*", "", cuda)  # goes there by itself
    loaded = sum(width for _, kind, width, _ in chapter.accesses(cuda, ("x", "cos", "sin")) if kind == "load")
    stored = sum(width for _, kind, width, _ in chapter.accesses(cuda, tiles) if kind == "store")
    if loaded > stored:
        return f"a thread loads {loaded} bytes, {stored} of them into shared memory: let the loop read from there alone"
    return None


@checker
def check_04_1(choose_blk_s):
    for S, R, e in (
        (524288, 128, 2),
        (100, 128, 2),
        (10**6 + 1, 128, 2),
        (32, 768, 2),
        (524288, 2048, 4),
        (24, 1024, 4),
        (8, 64, 2),
    ):
        fit = [B for B in (1, 2, 4, 8, 16) if S % B == 0 and 2 * B * R * e <= 49152]
        yield got(f"choose_blk_s{S, R, e}", choose_blk_s(S, R, e), max(fit))


@checker
def check_04_2(uses):
    for heads, right in ((1, [1]), (2, [2]), (4, [4]), (8, [8]), (16, [16]), (32, [16]), (3, [1, 3])):
        found = sorted(uses(heads))
        if len(found) > len(set(found)):
            yield f"uses({heads}) has {len(found)} numbers: each count that occurs belongs there once"
        yield got(f"uses({heads})", found, right)


@checker
def check_04_3(predicted_us):
    find = chapter.Recorded().find
    copy_us = find(implementation="copy", shape=[524288, 128], dtype="float32")["median_us"]
    for blocks, block_us in ((524288, 6e-4), (32768, 6e-4), (524288, 0.0), (1, 1000.0)):
        by_bytes = 3 / 2 * copy_us  # x, y and as many bytes of tables as of x, where a copy has x and y
        right, found = max(blocks * block_us, by_bytes), predicted_us(blocks, block_us, copy_us)
        if not abs(found / right - 1) < 1e-6:
            yield f"float32_us({blocks}, {block_us}, {copy_us:.1f}) gave {found:.1f}, right is {right:.1f}"


@checker
def check_04_4(gain):
    S, ledger = 524288, 3 * 524288 * 128 * 2
    for gb_s, ns in ((4000, 0.6), (1000, 0.6), (2000, 0.3), (500, 2.0), (8000, 0.01), (4000, 8.0)):
        by_bytes = ledger / gb_s  # at 1 GB/s a byte takes 1 ns
        right, found = max(S * ns, by_bytes) / max(S / 16 * ns, by_bytes), gain(gb_s, ns)
        yield None if abs(found / right - 1) < 1e-3 else f"gain({gb_s}, {ns}) gave {found:.3g}, right is {right:.3g}"


@checker
def check_04_5(my_rope):
    yield from faults(my_rope, [blocked(32, 64, 16), blocked(27, 128, 9)])
    yield staged(my_rope)


@checker
def check_04_6(my_rope):
    yield from faults(my_rope, [blocked(50, 64, 16), blocked(5, 128, 8)])
    yield staged(my_rope)


# ------------------------------------------------------------------------------------------ 05 access patterns


def sectors(addresses, width):
    return len({byte // 32 for address in addresses for byte in range(address, address + width)})


@checker
def check_05_1(counts):
    mistakes = {
        (160, 256): "these are sectors of 2-byte elements: pass bytes_an_element=4 for float32",
        (512, 256): "② and ③ are exchanged",
        (128, 256): "these are float16's: a text in float32 has other accesses",
        (16, 64): "these are requests, and each touches several sectors",
        (16, 8): "these are the sectors of one request: add up all those of a block",
        (32, 64): "these are the sectors of one warp, and a block has eight",
    }
    yield mistakes.get(tuple(counts))
    blocked, interleaved = counts
    warps, row = 8, 512  # bytes of a float32 row
    half_rows = [lane // 16 * row + lane % 16 * 16 for lane in range(32)]
    right = warps * 2 * sectors(half_rows, 16)
    yield value("the count of ②", blocked, right)
    every_second = sum(sectors([8 * lane + odd for lane in range(32)], 4) for odd in (0, 4))
    yield value("the count of ③", interleaved, warps * 4 * every_second)


@checker
def check_05_2(touched):
    needed = {"neox": range(64), "interleaved": range(0, 128, 2)}
    for name, columns in needed.items():
        yield value(f"the count for {name}", touched[name], sectors([2 * column for column in columns], 2))


@checker
def check_05_3(undo):
    for R in (8, 64):
        channel, half = torch.arange(R), R // 2
        conventions = {
            "neox": ((channel + half) % R, torch.where(channel < half, -1, 1), channel % half),
            "interleaved": (channel ^ 1, torch.where(channel % 2 == 0, -1, 1), channel // 2),
        }
        x, (cos, sin) = draw(5, R), tables(range(2, 7), R)
        for mode, how in conventions.items():
            y = rk.torch_partial_rope(x, cos, sin, mode)
            found = undo(y.clone(), cos, sin, *how)
            fault = difference(found, x, 1e-12)
            mistakes = {"it turns on instead of back": rk.torch_partial_rope(y, cos, sin, mode)}
            yield fault and (recognised(found, mistakes, 1e-12) or fault)


@checker
def check_05_4(my_rope):
    yield from faults(my_rope, [blocked(32, 64, 16, "interleaved"), blocked(27, 128, 9, "interleaved")])


@checker
def check_05_5(my_rope):
    yield from faults(my_rope, [blocked(32, 128, 16, "interleaved"), blocked(16, 64, 8, "interleaved")])
    cuda = chapter.cuda_source(my_rope, 64, 128, blk_s=16)
    stores = list(chapter.global_accesses(cuda).get(("y", "store"), ()))
    if stores != [16] and "tma_store" not in cuda:  # the latter stores a whole tile
        yield f"right, but in its CUDA a store moves {' or '.join(map(str, stores))} bytes, not 16"


# ------------------------------------------------------------------------------------------ 06 precision


@checker
def check_06_1(first_lost):
    bits = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53, "float8_e4m3fn": 4, "float8_e5m2": 3}
    for name, p in bits.items():
        found = first_lost(getattr(torch, name))
        if isinstance(found, float):
            yield f"first_lost(torch.{name}) is a float, which can't hold every such integer: return an int"
        yield value(f"first_lost(torch.{name})", found, 2**p + 1)


@checker
def check_06_2(position):
    if position < 1 or position != int(position) or int(position) & (int(position) - 1):
        yield f"{position} is no power of two"
    bound = 2 * 2.0**-25  # for each position: half a step of a frequency below 1, and of a product below the position
    if position * bound > 1e-3:
        yield f"at {position} two roundings may add up to {position * bound:.2g} rad"
    if 2 * position * bound <= 1e-3:
        yield f"at {2 * position} the bound holds as well: below 1, rounding to fp32 errs by at most 2⁻²⁵"


@checker
def check_06_3(rotate):
    x, (cos, sin) = draw(256, 128, seed=1, dtype=torch.float16), tables(range(1, 257), 128)
    exact = rk.torch_rope_neox(x.double(), cos, sin)
    with (
        unittest.mock.patch.object(JITKernel, "__call__", autospec=True, side_effect=JITKernel.__call__) as kernel,
        unittest.mock.patch.object(rk, "apply_rope", wraps=rk.apply_rope) as op,
    ):
        found = rotate(x.clone(), cos.clone(), sin.clone())
    fault = difference(found, exact, 0.05)
    if fault and difference(found, rk.torch_rope_interleaved(x.double(), cos, sin), 0.05) is None:
        yield "it pairs the channels 2p and 2p + 1, the other convention"
    yield fault
    if found.dtype != x.dtype:
        yield f"the result has dtype {str(found.dtype)[6:]}, not float16"
    best = torch.from_numpy(exact.numpy().astype("float16"))  # numpy rounds float64 to float16 once
    share = (found.cpu() != best).double().mean().item()
    if share >= 1e-3:
        narrow = torch.equal(found.cpu(), rk.torch_rope_neox(x, cos.half(), sin.half()))
        yield f"{share:.2%} of the elements are misrounded" + (", those of tables rounded to fp16" if narrow else "")
    yield None if kernel.called or op.called else "no kernel ran, and the task is to use one"


# ------------------------------------------------------------------------------------------ 07 partial rotation


@checker
def check_07_1(rope_width):
    for head_dim, share, R in ((180, 0.7, 126), (80, 0.4, 32), (96, 0.25, 24), (128, 1.0, 128), (4, 0.5, 2)):
        try:
            found = rope_width(head_dim, share)
        except ValueError:
            found = "a ValueError"
        yield None if found == R else f"rope_width({head_dim}, {share}) gives {found}, right is {R}"
    for head_dim, share in (
        (90, 0.7),
        (66, 0.5),
        (65, 1.0),
        (80, 0.33),
        (100, 0.6001),
        (64, 0.0),
        (64, -0.5),
        (64, 1.5),
    ):
        try:
            found = rope_width(head_dim, share)
        except ValueError:
            continue
        yield f"rope_width({head_dim}, {share}) returned {found}, where {head_dim * share:g} channels can't be rotated"


@checker
def check_07_2(gemma_rope):
    cos, sin = tables(range(1, 10), 512, base=1e6)
    cos[:, 64:], sin[:, 64:] = 1, 0  # the idle pairs
    turning = cos[:, :64], sin[:, :64]
    for x in (draw(9, 512), draw(2, 9, 512)):
        found, right = gemma_rope(x.clone(), *turning), rk.torch_rope_neox(x, cos, sin)
        mistakes = {
            "x comes back as it was": x,
            "channel 0 was paired with 64, its partner is 256": rk.torch_partial_rope(x, *turning, "neox", 0),
            "channel 0 was paired with 1, its partner is 256": rk.torch_partial_rope(x, *turning, "interleaved", 0),
            "it turns the other way": rk.torch_rope_neox(x, cos, -sin),
        }
        fault = difference(found, right, 1e-12)
        yield fault and (recognised(found, mistakes) or fault)
    idle = [*range(64, 256), *range(320, 512)]
    for name, bits in (("inf", 0x7FF0 << 48), ("−0.0", -1 << 63), ("a NaN with a mark", 0x7FF8 << 48 | 5)):
        x[..., idle] = torch.tensor(bits).view(torch.float64)
        kept = gemma_rope(x.clone(), *turning)[..., idle].view(torch.int64) == bits
        fault = f"the channels that don't turn take part in the arithmetic: {name} in them doesn't keep its bits"
        yield None if kept.all() else fault


@checker
def check_07_3(for_neox):
    def scores(weights, mode, heads, R):
        cos, sin = (table[:, None] for table in tables(range(1, 7), R))
        h = draw(6, 32, seed=5)
        q, k = (rk.torch_partial_rope((h @ W.T).view(6, heads, -1), cos, sin, mode, start=0) for W in weights)
        return torch.einsum("mhd,nhd->hmn", q, k)

    for heads, D, R in ((2, 16, 8), (3, 32, 16), (1, 24, 24)):
        weights = [draw(heads * D, 32, seed=seed) for seed in (1, 2)]
        moved = [for_neox(W.clone(), heads, R) for W in weights]
        yield difference(moved[0], weights[0], float("inf"))  # a tensor of another shape, or none
        rows, passing = torch.arange(heads * D).view(heads, D), [*range(R, D)]
        mistakes = {
            "the rows are still where they were": rows,
            "the rows went the other way: neighbours come from the halves": rows[
                :, [*evens_first(R).argsort(), *passing]
            ],
            "the channels that pass were reordered too": rows[:, evens_first(D)],
            "only head 0's rows moved": torch.cat((rows[:1, [*evens_first(R), *passing]], rows[1:])),
        }
        mistakes = {mistake: weights[0][order.flatten()] for mistake, order in mistakes.items()}
        fault = difference(scores(moved, "neox", heads, R), scores(weights, "interleaved", heads, R), 1e-9)
        yield fault and (recognised(moved[0], mistakes) or f"of the scores (head, query, key) {fault}")


# ------------------------------------------------------------------------------------------ 08 frequency tables


@checker
def check_08_1(lost):
    def llama(base=500000.0, s=8.0, L=8192):
        plain = base ** (-2 * torch.arange(64, dtype=torch.float64) / 128)
        t = ((L * plain / (2 * torch.pi) - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        return ((1 - t) * plain / s + t * plain).float()

    for key, inv_freq in (
        ("rope_theta", llama(base=10000.0)),
        ("rope_scaling", llama(s=1.0)),
        ("original_max_position_embeddings", llama(L=131072)),
        (None, llama()),
    ):
        found, read = lost(inv_freq.clone()), f"without {key}" if key else "rightly"
        yield None if found == key else f"of frequencies read {read}, in float32, it says {found!r}"


@checker
def check_08_2(move):
    for R in (96, 64):
        pair = torch.arange(R // 2, dtype=torch.float64)
        plain = 10000.0 ** (-2 * pair / R)
        short, long = plain / (1 + 0.02 * pair), plain / (1.05 + 1.3 * pair)
        at, k = torch.tensor([0, 10, 1000, 4000]), draw(4, R, seed=R)

        def turned(keys, frequencies, rope=rk.torch_rope_neox, at=at):
            return rope(keys, *(f(at[:, None] * frequencies) for f in (torch.cos, torch.sin)))

        cached, right = turned(k, short), turned(k, long)
        known = {
            "the keys come back as they were": cached,
            "the short rotation is not undone": turned(cached, long),
            "the short rotation is undone, and the long one is missing": k,
            "it turns the other way, by short − long": turned(cached, short - long),
            "its pairs are interleaved, those of the cache are neox": turned(
                cached, long - short, rk.torch_rope_interleaved
            ),
            "it takes the positions 0, 1, 2 … for those in `positions`": turned(
                cached, long - short, at=torch.arange(4)
            ),
            "the values are right to 1e-3 only: the angles belong in float64": right,
        }
        found = move(cached.clone(), at.clone(), short.clone(), long.clone())
        if wrong := difference(found, right, 1e-5):
            if difference(found, right, float("inf")) is None:  # a tensor of this shape
                scale = ((found * right).sum() / (right * right).sum()).item()
                known[f"the keys are right but for a factor of {scale:.3f}: theirs is in them already"] = scale * right
            yield next((name for name, result in known.items() if difference(found, result, 1e-3) is None), wrong)


@checker
def check_08_3(interleaved_axes):
    for sections in ([24, 20, 20], [6, 5, 5], [8, 4, 4]):
        left, right = list(sections), []
        while any(left):
            for axis in (0, 1, 2):
                if left[axis]:
                    left[axis] -= 1
                    right.append(axis)
        made = interleaved_axes(list(sections))
        if made is None or (axes := torch.as_tensor(made)).ndim != 1:
            yield f"interleaved_axes returned {type(made).__name__}, not one axis for each pair"
        if axes.is_floating_point():
            yield "its entries are floats, and an axis is a whole number: dtype=torch.int64"
        found = axes.tolist()
        yield None if len(found) == len(right) else f"{sections} gives {len(found)} pairs, right is {len(right)}"
        wrong = (
            f"pair {p} has axis {a}, right is {b}" for p, (a, b) in enumerate(zip(found, right, strict=True)) if a != b
        )
        yield next((f"in {sections} {fault}" for fault in wrong), None)


# ------------------------------------------------------------------------------------------ 09 to the roofline


@checker
def check_09_1(answer):
    heads, more = answer
    by_row, by_token = (lambda n: n * 128 * 2), (lambda n: 128 * 4 + 8)  # bytes of tables and ids for n heads
    fewer = next(n for n in range(1, 100) if by_token(n) < by_row(n))
    if heads != fewer:
        n = heads if heads < fewer else heads - 1
        yield f"the count isn't {heads}: of tables ② reads {by_row(n)} bytes for {n} heads, ④ {by_token(n)} with its id"
    if more != by_token(32) + by_token(8) - by_token(40):
        yield f"it isn't {more} bytes more: a second launch reads again what the heads share, two table rows and an id"


@checker
def check_09_2(misrounded):
    x = draw(4096, 128, dtype=torch.bfloat16)
    cos, sin = tables(range(4096), 128)
    best, shares = rk.torch_rope_neox(x.double(), cos, sin).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        right = rk.torch_rope_neox(x, *(table.to(dtype) for table in (cos, sin))) != best
        found = misrounded(x.clone(), dtype)
        if found.dtype != torch.bool or found.shape != right.shape:
            yield f"it returned {found.dtype} in the shape {tuple(found.shape)}"
        wrong = (found != right).double().mean().item()
        if wrong > 1e-3:  # a table rounded twice, through float32, differs in a few elements
            a, b = x.chunk(2, -1)
            c, s = (table.bfloat16() for table in (cos, sin))
            in_bfloat16 = torch.cat((a * c - b * s, b * c + a * s), -1) != best
            why = ": the arithmetic is in bfloat16, too" if (found != in_bfloat16).double().mean() < 1e-2 else ""
            yield f"with a table in {dtype} it is wrong about {wrong:.2%} of the elements{why}"
        if not found.any():
            yield f"with a table in {dtype} it finds none, and there are some: its exact result must be in float64"
        shares.append(f"{found.double().mean().item():.3%} with a table in {dtype}")
    print(f"misrounded: {', '.join(shares)}")


@checker
def check_09_3(rotate_new):
    cos, sin = (table.half() for table in tables(range(64), 64))
    for new in (slice(5, 8), slice(0, 3)):
        before, ids = draw(8, 2, 2, 64, dtype=torch.float16), torch.tensor([40, 41, 7])
        cache = before.clone().to(chapter.DEVICE)
        rotate_new(cache, new, *(t.to(chapter.DEVICE) for t in (ids, cos, sin)))
        cache = cache.cpu()
        if torch.equal(cache, before):
            yield "the cache is as it was, perhaps since a new tensor was rotated"
        rest = cache.clone()
        rest[new, 0] = before[new, 0]
        yield None if torch.equal(rest, before) else "more than the new keys has changed"
        rows = (table[ids][:, None].double() for table in (cos, sin))
        right = rk.torch_rope_neox(before[new, 0].double(), *rows)
        yield difference(cache[new, 0], right, 4e-3)
        off = (cache[new, 0] != right.half()).double().mean().item()
        yield None if off < 0.02 else f"{off:.0%} of the new keys are rounded otherwise than once"


@checker
def check_09_4(my_rope):
    yield from faults(
        my_rope,
        [
            Case(
                {"tokens": tokens, "heads": heads, "R": R, "P": 20},
                (tokens, heads),
                R,
                R,
                [i for i in ids for _ in range(heads)],
                ids=ids,
                inplace=True,
            )
            for tokens, heads, R, ids in ((3, 4, 64, [19, 7, 7]), (5, 2, 128, [1, 4, 3, 18, 2]))
        ],
    )


# ------------------------------------------------------------------------------------------ 10 in a model


@checker
def check_10_1(order):
    if not isinstance(order, (list, tuple, torch.Tensor)):
        yield f"it is a list of the {tiny.D} rows, not {order!r}"
    order = [int(row) for row in order]
    if sorted(order) != list(range(tiny.D)):
        yield f"it doesn't take each of the rows 0 … {tiny.D - 1} once"
    q, k = draw(2, 24, tiny.HEADS, tiny.D, dtype=torch.float32).to(chapter.DEVICE)
    ids = torch.arange(24, device=chapter.DEVICE) * 83  # up to 1909, where the slow pairs have turned as well
    right, found = (
        torch.einsum("mhd,nhd->hmn", *tiny.rotation(inverse=flip)(x, y, ids))
        for flip, x, y in ((False, q, k), (True, q[..., order], k[..., order]))
    )
    if not (right - found).abs().max() <= 1e-3:
        rows, half = order[: tiny.R], tiny.R // 2
        first = next(p for p in range(half) if rows[2 * p : 2 * p + 2] != [2 * p + 1, 2 * p])
        mistakes = {
            "no row that is rotated has moved": list(range(tiny.R)),
            "this order changes the pairs, not the sign": evens_first(tiny.R).tolist(),
            "these are the partners of neox pairs": [*range(half, tiny.R), *range(half)],
        }
        pairs = [rows[2 * p] // 2 for p in range(half) if rows[2 * p] ^ 1 == rows[2 * p + 1]]
        if pairs != [*range(half)] and sorted(pairs) == [*range(half)]:
            mistakes["the pairs have changed places, and each has an angle of its own"] = rows
        yield next((mistake for mistake, made in mistakes.items() if made == rows), f"pair {first} still turns wrongly")


@checker
def check_10_2(base_of):
    for base, R, mode, start in ((1e4, 16, "neox", 0), (5e5, 32, "interleaved", 0), (1234.0, 8, "neox", 24)):
        cos, sin = rk.rope_table(rk.rope_frequencies(R, base)[0], 2048, device=chapter.DEVICE)

        def kernel(q, k, ids, cos=cos, sin=sin, mode=mode, start=start):
            return rk.apply_rope(q, k, cos, sin, ids, mode=mode, start=start)

        try:
            found = base_of(kernel)
        except ZeroDivisionError:
            yield "it divides by 0: pair 0 turns by 1 whatever the base is, so solve for another pair"
        try:
            found = float(found)
        except (TypeError, ValueError):
            yield f"it returned {type(found).__name__} in place of a number"
        mistakes = {
            "pair 0 turns by 1 whatever the base is": 1.0,
            "its square: the exponent is R/2, the number of pairs": base**2,
            "its inverse: the exponent is negative": 1 / base,
        }
        if not abs(found / base - 1) < 1e-2:
            why = next((f", {why}" for why, made in mistakes.items() if abs(found / made - 1) < 1e-2), "")
            yield f"it found {found:.6g} for the base {base:g}, R = {R}{why}"


@checker
def check_10_3(diagnose):
    for two in itertools.combinations(tiny.FAULTS, 2):
        found = diagnose(tiny.rotation(**tiny.FAULTS[two[0]], **tiny.FAULTS[two[1]]))
        if isinstance(found, str) or not hasattr(found, "__iter__"):
            yield f"it returned {type(found).__name__} in place of a list of names"
        found = {str(name) for name in found}
        if found != set(two):
            yield f"of a kernel with {' and '.join(two)} it says: {', '.join(sorted(found)) or 'nothing'}"
