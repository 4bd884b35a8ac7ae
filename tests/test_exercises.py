"""The checks of the exercises: planted wrong answers are rejected, with a sentence; other right ones are accepted."""

import itertools
import math
import re

import chapter
import exercises as ex
import find_the_fault as finder
import pytest
import self_checks as sc
import tiny
import torch
from books import NOTEBOOKS, prose

import rope_kernels as rk

CHECKS = {name: check for name, check in vars(ex).items() if name.startswith("check_")}
KERNELS = ("03_4", "03_5", "04_5", "04_6", "05_4", "05_5", "09_4")  # held in test_kernel_checks.py


def move(order):
    """A way to convert weights that reorders the rows of each head."""
    return lambda W, b, heads: tuple(
        t.view(heads, -1, *t.shape[1:])[:, order(t.shape[0] // heads)].reshape(t.shape) for t in (W, b)
    )


def evens_first(n):
    return torch.cat((torch.arange(0, n, 2), torch.arange(1, n, 2)))


def halves_dealt(n):
    return evens_first(n).argsort()


def by_neox(before, after):
    return lambda x, cos, sin: rk.torch_rope_neox(x[..., before(x.shape[-1])], cos, sin)[..., after(x.shape[-1])]


def which_from(channel, kinds):
    def which(rope, R):
        x = torch.zeros(R, dtype=torch.float64)
        x[channel] = 1
        angle = torch.full((R // 2,), 1.0, dtype=torch.float64)
        touched = tuple(rope(x, angle.cos(), angle.sin()).nonzero().flatten().tolist())
        return kinds(R).get(touched, "neox")

    return which


def three_kinds(R):
    return {(0, 1): "interleaved", (1, 1 + R // 2): "neox", (0, R // 2): "interleaved in, neox out"}


def asks_twice(rope, R):
    answer = which_from(1, three_kinds)
    return [answer(rope, R), answer(rope, R)][0]


def rows_equal(*, tokens=slice(None), heads=slice(None)):
    def equal_rows(candidate):
        x, cos, sin = sc.data()
        positions = [300 if t % 2 else 5 for t in range(sc.TOKENS)]
        y = sc.output(candidate, x[:1, :1].expand_as(x), cos, sin, positions)[:, heads]
        return all(torch.equal(y[i::2][tokens], y[i, :1].expand_as(y[i::2][tokens])) for i in (0, 1))

    return equal_rows


def one_position(candidate):
    x, cos, sin = sc.data()
    y = sc.output(candidate, x[:1, :1].expand_as(x), cos, sin, [5] * sc.TOKENS)
    return torch.equal(y, y[:1, :1].expand_as(y))


def guard_of(R, threads=256):
    return re.search(r"threadIdx\.x\) < (\d+)", chapter.cuda_source(rk.rope_neox_naive, 8, R, threads=threads))


def gathers(spread, rows):
    """Wrap a kernel over flattened heads: how positions find their rows, and how rows are spread over heads."""

    def rotate(q, cos, sin, positions):
        tokens, heads, R = q.shape
        cos, sin = (spread(table[rows(positions)], heads) for table in (cos, sin))
        return rk.torch_rope_neox(q.flatten(0, 1), cos, sin).view_as(q)

    return rotate


def each(table, heads):
    return table.repeat_interleave(heads, dim=0)


def through(x_dtype, table_dtype, result=torch.float16):
    return lambda x, cos, sin: rk.torch_rope_neox(
        x.to(x_dtype), *(t.to(table_dtype).to(x_dtype) for t in (cos, sin))
    ).to(result)


def by_kernel(x, cos, sin, factory=rk.rope_neox_naive):
    """Rotate in float32, from kernel ①, which the worked answer doesn't use."""
    return factory(*x.shape, dtype="float32")(*(t.float().to(chapter.DEVICE) for t in (x, cos, sin))).half()


def misrounded_at_times(x, cos, sin):
    y = by_kernel(x, cos, sin)
    y.view(-1)[::100] = torch.nextafter(y.view(-1)[::100], torch.tensor(9, dtype=y.dtype, device=y.device))
    return y


def by_op(x, cos, sin):
    x, cos, sin = (t.to(chapter.DEVICE) for t in (x[:, None], cos.float(), sin.float()))
    return rk.apply_rope(x, None, cos, sin)[0][:, 0]


def width(head_dim, share, *, rounds=round, even=True, least=2, most=1, whole=True):
    R = rounds(head_dim * share)
    if (even and R % 2) or not least <= R <= most * head_dim or (whole and abs(head_dim * share - R) > 1e-6):
        raise ValueError
    return R


def gemma(index):
    def rope(x, cos, sin):
        y = x.clone()
        y[..., index] = rk.torch_rope_neox(x[..., index], cos, sin)
        return y

    return rope


def gemma_then(change):
    return lambda x, cos, sin: change(gemma([*range(64), *range(256, 320)])(x, cos, sin))


def gemma_full(x, cos, sin):
    one, zero = torch.ones(*cos.shape[:-1], 192).to(cos), torch.zeros(*cos.shape[:-1], 192).to(cos)
    return rk.torch_rope_neox(x, torch.cat((cos, one), -1), torch.cat((sin, zero), -1))


def glm(order):
    return lambda W, heads, R: W.view(heads, W.shape[0] // heads, -1)[:, order(R, W.shape[0] // heads)].reshape(W.shape)


def turn(keys, angle):
    return rk.torch_rope_neox(keys, angle.cos(), angle.sin())


def elements(compare):
    def misrounded(x, dtype, rope=rk.torch_rope_neox, positions=4096):
        inv_freq, _ = rk.rope_frequencies(128)
        exact = rope(x.double(), *rk.rope_table(inv_freq, positions, dtype=torch.float64))
        return compare(rope(x, *rk.rope_table(inv_freq, positions, dtype=dtype)), exact)

    return misrounded


MISROUNDED = elements(lambda y, exact: y != exact.bfloat16())


def as_in_transformers(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)


def cached(mode="neox", rows=slice(None), which=0, ids=lambda positions: positions):
    def rotate_new(cache, new, positions, cos, sin):
        rk.apply_rope(cache[new, which][rows], None, cos, sin, ids(positions)[rows], mode=mode, inplace=True)

    return rotate_new


def all_of_the_cache(cache, new, positions, cos, sin):
    everywhere = torch.zeros(len(cache), dtype=torch.int64, device=cache.device)
    everywhere[new] = positions
    everywhere[everywhere == 0] = 1
    rk.apply_rope(cache[:, 0], None, cos, sin, everywhere, inplace=True)


def a_copy(cache, new, positions, cos, sin):
    rk.apply_rope(cache[new, 0].clone(), None, cos, sin, positions, inplace=True)


def nudged(cache, new, positions, cos, sin):
    cached()(cache, new, positions, cos, sin)
    cache[new, 0] += 1e-3


def neighbours_swapped(rows):
    return [row ^ 1 if row < rows else row for row in range(32)]


def lost_by(same):
    """Answer exercise 08.1 by the first of four readings of the file that is the same as the engine's."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    readings = {
        None: rk.rope_frequencies(128, 500000.0, llama3)[0],
        "rope_theta": rk.rope_frequencies(128, 10000.0, llama3)[0],
        "rope_scaling": rk.rope_frequencies(128, 500000.0)[0],
    }
    return lambda inv_freq: next(
        (key for key, f in readings.items() if same(f, inv_freq)), "original_max_position_embeddings"
    )


def lost_by_three_pairs(inv_freq):
    plain = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    if inv_freq[1] < 0.99 * plain[1] or inv_freq[1] > 1.01 * plain[1]:
        return "rope_theta"
    if inv_freq[63] > 0.5 * plain[63]:
        return "rope_scaling"
    return "original_max_position_embeddings" if inv_freq[32] > 0.9 * plain[32] else None


def base_from(formula):
    return lambda kernel: formula(finder.read(kernel)["inv_freq"])


ENTRY = {
    "pairs": "neox pairs",
    "sign": "sign flipped",
    "channels": "trailing channels",
    "inv_freq": "base 500000",
    "attention factor": "no attention factor",
    "position 0": "positions + 1000",
}


def faults_read(entries):
    """Diagnose from these entries of the card alone."""
    wanted = finder.read(tiny.rotation())
    return lambda kernel: [entries[e] for e in finder.differing(finder.read(kernel), wanted) if e in entries]


def faults_tried(kernel):
    """Try each two of the faults on random heads."""
    given = *torch.randn(2, 40, tiny.HEADS, tiny.D, device=chapter.DEVICE), torch.arange(40, device=chapter.DEVICE)
    for two in itertools.combinations(tiny.FAULTS.items(), 2):
        tried = tiny.rotation(**two[0][1], **two[1][1])(*given)
        if all(map(torch.equal, tried, kernel(*given))):
            return {name for name, _ in two}


WRONG = {
    "01_1": {
        "neox itself": rk.torch_rope_neox,
        "not undone": by_neox(evens_first, torch.arange),
        "the other permutation": by_neox(halves_dealt, evens_first),
        "undone by itself": by_neox(evens_first, evens_first),
        "rows indexed": lambda x, cos, sin: rk.torch_rope_neox(x[evens_first(x.shape[-1])], cos, sin),
        "angle flipped": lambda x, cos, sin: rk.torch_rope_interleaved(x, cos, -sin),
    },
    "01_2": {
        "nothing": lambda W, b, heads: (W, b),
        "the other direction": move(evens_first),
        "bias forgotten": lambda W, b, heads: (move(halves_dealt)(W, b, heads)[0], b),
        "heads ignored": lambda W, b, heads: move(halves_dealt)(W, b, 1),
        "two heads": lambda W, b, heads: move(halves_dealt)(W, b, 2),
        "columns": lambda W, b, heads: (W[:, halves_dealt(W.shape[1])], b),
        "weight alone": lambda W, b, heads: move(halves_dealt)(W, b, heads)[0],
        "nothing returned": lambda W, b, heads: None,
        "bias as a row": lambda W, b, heads: (lambda W, b: (W, b[None]))(*move(halves_dealt)(W, b, heads)),
    },
    "01_3": {
        "always interleaved": which_from(1, lambda R: dict.fromkeys(three_kinds(R), "interleaved")),
        "channel 0": which_from(0, lambda R: {(0, 1): "interleaved", (0, R // 2): "neox"}),
        "R = 8 only": which_from(1, lambda R: three_kinds(8)),
        "two calls": asks_twice,
    },
    "02_2": {
        "right": rk.torch_rope_neox,
        "sign": lambda x, cos, sin: rk.torch_rope_neox(x, cos, -sin),
        "norm": lambda x, cos, sin: 2 * rk.torch_rope_neox(x, cos, sin),
        "one of the 21": sc.WRONG["frequencies in reverse"],
        "seen by the quarter turn": rk.torch_rope_interleaved,
        "nothing returned": lambda x, cos, sin: None,
    },
    "02_3": {
        "yes": lambda candidate: True,
        "no": lambda candidate: False,
        "heads alone": rows_equal(tokens=slice(0, 1)),
        "two tokens": rows_equal(tokens=slice(0, 1), heads=slice(0, 1)),
        "every second token": rows_equal(tokens=slice(0, None, 2)),
        "head 0 alone": rows_equal(heads=slice(0, 1)),
        "one position": one_position,
        "first and last head": rows_equal(heads=slice(0, None, sc.HEADS - 1)),
        "agreement": lambda candidate: sc.CHECKS["agreement"](candidate, "neox"),
    },
    "03_1": {
        "all": lambda R, threads=256: threads,
        "a thread a channel": lambda R, threads=256: min(R, threads),
        "R/2": lambda R, threads=256: R // 2,
        "of 256": lambda R, threads=256: min(R // 2, 256),
        "computed": lambda R, threads=256: min(R // 2, threads),
        "threads ignored": lambda R, threads=256: guard_of(R) and int(guard_of(R)[1]) or threads,
        "no if": lambda R, threads=256: int(guard_of(R, threads)[1]),
    },
    "03_2": {
        "a row for each head": lambda S, R, e, heads=1: 3 * S * R * e,
        "no tables": lambda S, R, e, heads=1: 2 * S * R * e,
        "full width": lambda S, R, e, heads=1: 2 * S * R * e + 2 * (S // heads) * R * e,
        "y forgotten": lambda S, R, e, heads=1: S * R * e + S // heads * R * e,
        "all divided": lambda S, R, e, heads=1: 3 * S // heads * R * e,
    },
    "03_3": {
        "repeat": gathers(lambda table, heads: table.repeat(heads, 1), lambda positions: positions),
        "positions ignored": gathers(each, lambda positions: torch.arange(len(positions), device=positions.device)),
        "off by one": gathers(each, lambda positions: (positions + 1) % 9),
        "interleaved": lambda q, cos, sin, ids: rk.torch_rope_interleaved(q, cos[ids][:, None], sin[ids][:, None]),
        "5 heads": gathers(lambda table, heads: each(table, 5).repeat(2, 1)[: len(table) * heads], lambda ids: ids),
        "times NaN": lambda q, cos, sin, ids: rk.apply_rope(q, None, cos, sin, ids)[0] * float("nan"),
        "one more axis": lambda q, cos, sin, ids: rk.apply_rope(q, None, cos, sin, ids)[0][None],
        "float32 back": lambda q, cos, sin, ids: rk.apply_rope(q, None, cos, sin, ids)[0].float(),
    },
    "04_1": {
        "16": lambda S, R, e: 16,
        "memory ignored": lambda S, R, e: next(B for B in (16, 8, 4, 2, 1) if S % B == 0),
        "divisibility ignored": lambda S, R, e: next(B for B in (16, 8, 4, 2, 1) if 2 * B * R * e <= 49152),
        "x alone": lambda S, R, e: next(B for B in (16, 8, 4, 2, 1) if S % B == 0 and B * R * e <= 49152),
        "below 48 KiB": lambda S, R, e: next(B for B in (16, 8, 4, 2, 1) if S % B == 0 and 2 * B * R * e < 49152),
    },
    "04_2": {
        "once": lambda heads: [1],
        "as often as rows": lambda heads: [16],
        "rows over heads": lambda heads: [16 // heads],
        "one too many": lambda heads: [heads + 1],
        "heads": lambda heads: [heads],
        "whole tokens alone": lambda heads: [min(heads, 16)],
        "every count": lambda heads: [min(heads, 16)] * 1024,
    },
    "04_3": {
        "blocks alone": lambda blocks, block_us, copy_us: blocks * block_us,
        "the copy's time": lambda blocks, block_us, copy_us: max(blocks * block_us, copy_us),
        "the sum": lambda blocks, block_us, copy_us: blocks * block_us + 1.5 * copy_us,
        "twice the block": lambda blocks, block_us, copy_us: max(2 * blocks * block_us, 1.5 * copy_us),
    },
    "04_4": {
        "blocks alone": lambda gb_s, ns: 16.0,
        "the H200's": lambda gb_s, ns: 524288 * ns / max(32768 * ns, 402653184 / 4026),
        "no limit for ①": lambda gb_s, ns: 524288 * ns / max(32768 * ns, 402653184 / gb_s),
        "no blocks for ②": lambda gb_s, ns: max(524288 * ns, 402653184 / gb_s) / (402653184 / gb_s),
        "the copy's bytes": lambda gb_s, ns: max(524288 * ns, 268435456 / gb_s) / max(32768 * ns, 268435456 / gb_s),
        "NaN": lambda gb_s, ns: float("nan"),
    },
    "05_1": {
        "equal": (256, 256),
        "a warp": (32, 64),
        "exchanged": (512, 256),
        "float16": (128, 256),
        "2 bytes": (160, 256),
        "requests": (16, 64),
        "one request": (16, 8),
    },
    "05_2": {
        "equal": {"neox": 4, "interleaved": 4},
        "all": {"neox": 8, "interleaved": 8},
        "float32": {"neox": 8, "interleaved": 16},
        "exchanged": {"neox": 8, "interleaved": 4},
        "one name": {"neox": 4},
    },
    "05_3": {
        "nothing": lambda y, cos, sin, partner, mask, column: y,
        "again": lambda y, c, s, partner, mask, column: y * c[..., column] + y[..., partner] * (mask * s[..., column]),
        "1 / mask": lambda y, c, s, partner, mask, col: y * c[..., col] + y[..., partner] * (1 / mask * s[..., col]),
        "cos flipped": lambda y, c, s, partner, mask, col: -y * c[..., col] + y[..., partner] * (mask * s[..., col]),
        "no mask": lambda y, c, s, partner, mask, column: y * c[..., column] - y[..., partner] * s[..., column],
        "neox only": lambda y, c, s, *how: rk.torch_rope_neox(y, c, -s),
    },
    "06_1": {
        "held": lambda dtype: int(2 / torch.finfo(dtype).eps),
        "a float": lambda dtype: 2 / torch.finfo(dtype).eps + 1,
        "1 / eps": lambda dtype: int(1 / torch.finfo(dtype).eps) + 1,
        "the largest": lambda dtype: int(torch.finfo(dtype).max),
        "float16's": lambda dtype: 2049,
    },
    "06_2": {"half": 8192, "twice": 32768, "no power": 16777, "no integer": 16384.5, "zero": 0},
    "06_3": {
        "fp16 tables": through(torch.float32, torch.float16),
        "fp16 throughout": through(torch.float16, torch.float16),
        "not rounded": through(torch.float32, torch.float32, torch.float32),
        "bf16 on the way": through(torch.bfloat16, torch.bfloat16),
        "interleaved": lambda x, c, s: rk.torch_rope_interleaved(x.float(), c.float(), s.float()).half(),
        "without a kernel": through(torch.float32, torch.float32),
        "one in a hundred misrounded": misrounded_at_times,
        "rounded, then wider": lambda x, c, s: by_kernel(x, c, s).float(),
        "times NaN": lambda x, c, s: by_kernel(x, c, s) * float("nan"),
        "one more axis": lambda x, c, s: by_kernel(x, c, s)[None],
    },
    "07_1": {
        "int": lambda head_dim, share: width(head_dim, share, rounds=int, even=False, whole=False),
        "odd widths": lambda head_dim, share: width(head_dim, share, even=False),
        "broken shares": lambda head_dim, share: width(head_dim, share, whole=False),
        "nothing rotated": lambda head_dim, share: width(head_dim, share, least=0),
        "wider than the head": lambda head_dim, share: width(head_dim, share, most=2),
        "always whole": lambda head_dim, share: head_dim,
        "refuses a right share": lambda head_dim, share: width(head_dim, share, rounds=int),
    },
    "07_2": {
        "the first 128": gemma(torch.arange(128)),
        "one half": gemma(torch.arange(64, 192)),
        "the other order": gemma(torch.cat((torch.arange(256, 320), torch.arange(64)))),
        "idle pairs multiplied": gemma_full,
        "zero added": gemma_then(lambda y: y + 0.0),
        "NaN made anew": gemma_then(lambda y: torch.where(y.isnan(), torch.nan, y)),
        "neighbours": lambda x, cos, sin: rk.torch_partial_rope(x, cos, sin, "interleaved", start=0),
        "nothing": lambda x, cos, sin: x,
    },
    "07_3": {
        "nothing": lambda W, heads, R: W,
        "whole heads": glm(lambda R, D: evens_first(D)),
        "the other direction": glm(lambda R, D: torch.cat((halves_dealt(R), torch.arange(R, D)))),
        "the tail": glm(lambda R, D: torch.cat((torch.arange(D - R), D - R + evens_first(R)))),
        "one head": lambda W, heads, R: glm(lambda R, D: torch.cat((evens_first(R), torch.arange(R, D))))(W, 1, R),
        "a head too few": lambda W, heads, R: W[W.shape[0] // 2 :],
    },
    "08_1": {
        "nothing": lambda inv_freq: None,
        "bit for bit": lost_by(lambda f, found: torch.equal(f, found.double())),
        "absolutely": lost_by(lambda f, found: torch.allclose(f.float(), found, atol=1e-2)),
        "by the base alone": lambda inv_freq: None if inv_freq[1] < 0.83 else "rope_theta",
        "always a key": lambda inv_freq: lost_by_three_pairs(inv_freq) or "rope_scaling",
    },
    "08_2": {
        "nothing": lambda keys, at, short, long: keys,
        "not undone": lambda keys, at, short, long: turn(keys, at[:, None] * long),
        "undone only": lambda keys, at, short, long: turn(keys, -at[:, None] * short),
        "the other way": lambda keys, at, short, long: turn(keys, at[:, None] * (short - long)),
        "in float32": lambda keys, at, short, long: turn(keys, (at[:, None] * (long - short)).float()),
        "interleaved": lambda keys, at, short, long: rk.torch_rope_interleaved(
            keys, (at[:, None] * (long - short)).cos(), (at[:, None] * (long - short)).sin()
        ),
        "rows 0, 1, 2": lambda keys, at, short, long: turn(keys, torch.arange(len(keys))[:, None] * (long - short)),
        "the factor again": lambda keys, at, short, long: 1.19 * turn(keys, at[:, None] * (long - short)),
        "times NaN": lambda keys, at, short, long: turn(keys, at[:, None] * (long - short)) * float("nan"),
    },
    "08_3": {
        "nothing": lambda s: None,
        "a number": lambda s: sum(s),
        "in sections": lambda s: torch.tensor([0] * s[0] + [1] * s[1] + [2] * s[2]),
        "in turn to the end": lambda s: torch.arange(sum(s)) % 3,
        "height first": lambda s: (torch.arange(sum(s)) + 1) % 3,
        "too short": lambda s: torch.arange(3 * s[1]) % 3,
        "floats": lambda s: torch.tensor([0.0, 1, 2] * s[1] + [0] * (s[0] - s[1])),
        "the rest first": lambda s: torch.tensor([0] * (s[0] - s[1]) + [0, 1, 2] * s[1]),
    },
    "09_1": {
        "two heads": (2, 520),
        "four heads": (4, 520),
        "row bytes": (3, 512),
        "all of them": (1, 520),
        "no more": (3, 0),
    },
    "09_2": {
        "not rounded": elements(lambda y, exact: y.double() != exact),
        "right ones": elements(lambda y, exact: y == exact.bfloat16()),
        "off by much": elements(lambda y, exact: (y - exact).abs() > 0.01),
        "numbers": elements(lambda y, exact: y - exact.bfloat16()),
        "integers": elements(lambda y, exact: (y != exact.bfloat16()).int()),
        "interleaved": lambda x, dtype: MISROUNDED(x, dtype, rk.torch_rope_interleaved),
        "from 1 on": lambda x, dtype: MISROUNDED(x, dtype, positions=torch.arange(1, 4097)),
        "arithmetic in bfloat16": lambda x, dtype: MISROUNDED(x, dtype, as_in_transformers),
        "float32 for exact": lambda x, dtype: MISROUNDED(x, dtype) & (dtype is torch.bfloat16),
    },
    "09_3": {
        "nothing": lambda cache, new, positions, cos, sin: None,
        "a copy": a_copy,
        "interleaved": cached("interleaved"),
        "the values": cached(which=1),
        "keys and values": lambda *arguments: [cached(which=which)(*arguments) for which in (0, 1)],
        "one row": cached(rows=slice(0, 1)),
        "all keys": all_of_the_cache,
        "off by one": cached(ids=lambda positions: positions + 1),
        "nudged": nudged,
    },
    "10_1": {
        "nothing": [*range(32)],
        "evens then odds": [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)],
        "rotated rows in reverse": [*range(15, -1, -1), *range(16, 32)],
        "ends exchanged": [*range(16, 32), *range(16)],
        "all but the slowest pair": neighbours_swapped(14),
        "neox partners": [*range(8, 16), *range(8), *range(16, 32)],
        "a row twice": [1, 1, *neighbours_swapped(16)[2:]],
        "too short": neighbours_swapped(16)[:16],
        "more rows than a head has": [*neighbours_swapped(16), 32, 33],
        "None": None,
    },
    "10_2": {
        "always 10000": lambda kernel: 10000.0,
        "pair 0": base_from(lambda inv_freq: inv_freq[0] ** -len(inv_freq)),
        "R in place of R/2": base_from(lambda inv_freq: inv_freq[1] ** (-2 * len(inv_freq))),
        "without the sign": base_from(lambda inv_freq: inv_freq[1] ** len(inv_freq)),
        "R = 16 for all": base_from(lambda inv_freq: inv_freq[1] ** -8),
        "the last pair": base_from(lambda inv_freq: 1 / inv_freq[-1]),
        "NaN": lambda kernel: math.nan,
        "solved for pair 0": base_from(lambda inv_freq: inv_freq[0] ** (-len(inv_freq) / 0)),
        "nothing returned": lambda kernel: None,
    },
    "10_3": {
        "nothing returned": lambda kernel: None,
        "nothing": lambda kernel: [],
        "all of them": lambda kernel: list(tiny.FAULTS),
        "the first alone": lambda kernel: faults_read(ENTRY)(kernel)[:1],
        "position 0 not looked at": faults_read({e: fault for e, fault in ENTRY.items() if e != "position 0"}),
        "sign and pairs exchanged": faults_read(ENTRY | {"pairs": ENTRY["sign"], "sign": ENTRY["pairs"]}),
        "the entries": lambda kernel: finder.differing(finder.read(kernel), finder.read(tiny.rotation())),
        "one string": lambda kernel: " and ".join(faults_read(ENTRY)(kernel)),
    },
}  # fmt: skip
PLANTED = [
    pytest.param(name, answer, id=f"{name}-{what}") for name, wrong in WRONG.items() for what, answer in wrong.items()
]


def test_every_exercise_names_its_check_and_has_planted_wrong_answers():
    named = {}
    for path in NOTEBOOKS:
        text = prose(path)
        named[path.stem[:2]] = re.findall(r"`ex\.check_(\w+)\(", text)
        exercises = len(re.findall(r"<summary>[^<]*nswer", text))
        first = 2 if path.stem.startswith("02") else 1  # the first exercise of notebook 02 is checked by check()
        assert named[path.stem[:2]] == [f"{path.stem[:2]}_{n}" for n in range(first, exercises + 1)]
    assert [f"check_{name}" for names in named.values() for name in names] == list(CHECKS)
    assert [*WRONG, *KERNELS] == sorted([name.removeprefix("check_") for name in CHECKS], key=lambda n: n in KERNELS)
    assert min(len(wrong) for wrong in WRONG.values()) >= 3


@pytest.mark.parametrize(("name", "answer"), PLANTED)
def test_planted_wrong_answers_are_rejected(name, answer, capsys):
    assert not CHECKS[f"check_{name}"](answer)
    said = capsys.readouterr().out
    assert said.startswith("Wrong: ") and said.count("\n") == 1
    if callable(answer):
        assert not said.startswith("Wrong: it raised"), said


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_never_raises(name, capsys):
    def raises(*arguments, **options):
        raise SystemExit

    def gives_nothing(*arguments, **options):
        return None

    for answer in (None, raises, gives_nothing, "words"):
        assert not CHECKS[name](answer)
        assert capsys.readouterr().out.startswith("Wrong: ")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("01_1", by_neox(evens_first, halves_dealt)),
        ("01_2", lambda W, b, n: [t.view(n, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape) for t in (W, b)]),
        ("01_3", which_from(1, three_kinds)),
        ("02_2", lambda x, cos, sin: rk.torch_rope_neox(x, cos.roll(3, -1), sin.roll(3, -1))),
        ("03_1", lambda R, threads=256: int(chapter.cuda_source(rk.rope_neox_naive, 8, R, threads=threads).partition(
            "threadIdx.x) < ")[2].partition(")")[0] or threads)),
        ("03_3", lambda q, cos, sin, ids: rk.apply_rope(q, None, cos, sin, ids)[0]),
        ("05_3", lambda y, c, s, partner, mask, col: y * c[..., col] + y[..., partner] * (-mask * s[..., col])),
        ("06_3", by_kernel),
        ("06_3", by_op),
        ("07_2", gemma(torch.arange(512).view(2, 256)[:, :64].flatten())),
        ("07_3", lambda W, heads, R: torch.cat(
            [torch.cat((h[:R].view(R // 2, 2, -1).transpose(0, 1).flatten(0, 1), h[R:])) for h in W.chunk(heads)])),
        ("08_1", lost_by_three_pairs),
        ("08_2", lambda keys, at, short, long: turn(turn(keys, -at[:, None] * short), at[:, None] * long)),
        ("08_3", lambda s: [0, 1, 2] * s[1] + [0] * (s[0] - s[1])),
        ("09_3", cached()),
        ("10_1", torch.tensor(neighbours_swapped(16))),
        ("10_1", [*neighbours_swapped(16)[:16], *range(31, 15, -1)]),  # the rest may lie anyhow, q and k alike
        ("10_2", base_from(lambda inv_freq: inv_freq[2] ** (-len(inv_freq) / 2))),
        ("10_3", faults_read(ENTRY)),
        ("10_3", faults_tried),
    ],
)  # fmt: skip
def test_other_right_answers_are_accepted(name, answer, capsys):
    assert CHECKS[f"check_{name}"](answer)
    assert capsys.readouterr().out == "Right.\n"


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("03_1", "threads ignored", "R = 256 with 64 threads gave 128, right is 64"),
        ("03_1", "no if", "R = 512 with 256 threads raised TypeError: where no thread is idle, the CUDA has no `if`"),
        ("03_2", "no tables", "ledger(524288, 128, 2, 32) gave 268435456, right is 272629760"),
        ("03_2", "all divided", "gave 12582912, right is 272629760: x and y don't shrink"),
        ("04_1", "16", "choose_blk_s(100, 128, 2) gave 16, right is 4"),
        ("04_2", "heads", "uses(32) gave [32], right is [16]"),
        ("04_2", "whole tokens alone", "uses(3) gave [3], right is [1, 3]"),
        ("04_2", "every count", "uses(1) has 1024 numbers"),
        ("04_3", "the copy's time", "float32_us(32768, 0.0006, "),
        ("04_4", "the copy's bytes", "gain(4000, 0.6) gave 4.69, right is 3.12"),
        ("05_1", "2 bytes", "pass bytes_an_element=4"),
        ("05_1", "exchanged", "② and ③ are exchanged"),
        ("05_1", "requests", "these are requests"),
        ("05_1", "one request", "of one request"),
        ("05_1", "a warp", "of one warp"),
        ("05_3", "again", "it turns on instead of back"),
        ("05_3", "1 / mask", "it turns on instead of back"),
        ("06_1", "a float", "return an int"),
        ("06_2", "half", "at 16384 the bound holds as well"),
        ("06_2", "twice", "at 32768 two roundings may add up to 0.002 rad"),
        ("06_3", "fp16 tables", "misrounded, those of tables rounded to fp16"),
        ("06_3", "without a kernel", "no kernel ran"),
        ("06_3", "one in a hundred misrounded", "% of the elements are misrounded"),
        ("06_3", "rounded, then wider", "the result has dtype float32, not float16"),
        ("06_3", "interleaved", "it pairs the channels 2p and 2p + 1"),
        ("07_1", "int", "rope_width(180, 0.7) gives 125, right is 126"),
        ("07_1", "refuses a right share", "rope_width(180, 0.7) gives a ValueError, right is 126"),
        ("07_2", "the first 128", "channel 0 was paired with 64, its partner is 256"),
        ("07_2", "neighbours", "channel 0 was paired with 1, its partner is 256"),
        ("07_2", "the other order", "it turns the other way"),
        ("07_2", "idle pairs multiplied", "inf in them doesn't keep its bits"),
        ("07_2", "zero added", "−0.0 in them doesn't keep its bits"),
        ("07_2", "NaN made anew", "a NaN with a mark in them doesn't keep its bits"),
        ("07_2", "nothing", "x comes back as it was"),
        ("07_3", "nothing", "the rows are still where they were"),
        ("07_3", "whole heads", "the channels that pass were reordered too"),
        ("07_3", "the other direction", "the rows went the other way"),
        ("07_3", "one head", "only head 0's rows moved"),
        ("07_3", "the tail", "of the scores (head, query, key) "),
        ("07_3", "a head too few", "it returned the shape (16, 32), right is (32, 32)"),
        (
            "08_1",
            "bit for bit",
            "of frequencies read without rope_theta, in float32, it says 'original_max_position_emb",
        ),
        ("08_1", "absolutely", "of frequencies read without rope_scaling, in float32, it says None"),
        ("08_1", "always a key", "of frequencies read rightly, in float32, it says 'rope_scaling'"),
        ("08_2", "rows 0, 1, 2", "takes the positions 0, 1, 2"),
        ("08_2", "the factor again", "but for a factor of 1.190"),
        ("08_3", "in turn to the end", "in [24, 20, 20] pair 61 has axis 1, right is 0"),
        ("08_3", "floats", "its entries are floats"),
        ("08_3", "too short", "[24, 20, 20] gives 60 pairs, right is 64"),
        ("08_3", "nothing", "interleaved_axes returned NoneType, not one axis for each pair"),
        ("08_3", "a number", "interleaved_axes returned int, not one axis for each pair"),
        ("08_2", "nothing", "the keys come back as they were"),
        ("08_2", "not undone", "the short rotation is not undone"),
        ("08_2", "undone only", "the long one is missing"),
        ("08_2", "the other way", "it turns the other way"),
        ("08_2", "in float32", "the angles belong in float64"),
        ("08_2", "interleaved", "its pairs are interleaved"),
        ("08_2", "times NaN", "got nan"),
        ("09_1", "two heads", "② reads 512 bytes for 2 heads, ④ 520 with its id"),
        ("09_1", "four heads", "② reads 768 bytes for 3 heads, ④ 520 with its id"),
        ("09_1", "row bytes", "it isn't 512 bytes more"),
        ("09_2", "arithmetic in bfloat16", "the arithmetic is in bfloat16, too"),
        ("09_2", "float32 for exact", "it finds none, and there are some"),
    ],
)
def test_a_known_mistake_is_named(name, answer, said):
    assert said in CHECKS[f"check_{name}"].fault(WRONG[name][answer])


def test_02_3_lists_what_a_right_answer_catches(capsys):
    assert ex.check_02_3(rows_equal())
    caught = "table transposed, table row above, positions ignored, head index as position"
    assert capsys.readouterr().out == f"It catches 4 of the 11: {caught}.\nRight.\n"


def test_check_09_2_tells_the_shares_that_it_found(capsys):
    assert ex.check_09_2(MISROUNDED)
    said = r"misrounded: 2\d\.\d+% with a table in torch\.bfloat16, 0\.0\d+% with a table in torch\.float32\nRight\.\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_a_difference_is_told_by_shape_or_by_the_first_wrong_element():
    right = torch.tensor([[1.0, 2.0], [3.0, float("inf")]])
    assert ex.difference(right.clone(), right) is None
    assert ex.difference(right + 1e-6, right, 1e-5) is None
    assert ex.difference(right[None], right) == "it returned the shape (1, 2, 2), right is (2, 2)"
    assert ex.difference(None, right) == "it returned NoneType in place of a tensor"
    nan = ex.difference(right * float("nan"), right, 1e9)
    assert nan == "4 of 4 elements are wrong, first [0, 0]: got nan, right is 1"
    close = ex.difference(torch.tensor([1.0, 2.00001]), torch.tensor([1.0, 2.0]), 1e-6)
    assert close == "1 of 2 elements are wrong, first [1]: got 2.00001, right is 2"


def test_a_check_tells_a_test_its_fault(capsys):
    assert ex.check_06_2.fault(16384) is None and "no power of two" in ex.check_06_2.fault(16777)
    assert capsys.readouterr().out == ""  # only check(…) itself prints; nbval holds that a cell shows one line


SAID = {
    ("01_1", "neox itself"): "this is neox",
    ("01_1", "not undone"): "isn't undone",
    ("01_1", "the other permutation"): "changed places",
    ("01_1", "undone by itself"): "applied once more",
    ("01_1", "rows indexed"): "index the last dimension",
    ("01_2", "nothing"): "the weight is as it was",
    ("01_2", "the other direction"): "the direction is the other one",
    ("01_2", "bias forgotten"): "the bias is as it was",
    ("01_2", "heads ignored"): "permuted as one",
    ("01_2", "weight alone"): "return two tensors, W and b",
    ("01_2", "nothing returned"): "return two tensors, W and b",
    ("01_2", "bias as a row"): "the bias has the shape (1, 96), right is (96,)",
    ("01_3", "channel 0"): "both return the same",
    ("03_3", "repeat"): "it is `repeat_interleave`, not `repeat`",
    ("03_3", "positions ignored"): "the positions are ignored",
    ("02_2", "nothing returned"): "it returned NoneType, not a tensor",
    ("02_3", "head 0 alone"): "token 22, head 5: compare all heads",
    ("02_3", "one position"): "use two",
    ("10_1", "None"): "it is a list of the 32 rows, not None",
    ("10_1", "nothing"): "no row that is rotated has moved",
    ("10_1", "evens then odds"): "changes the pairs",
    ("10_1", "all but the slowest pair"): "pair 7 still turns wrongly",
    ("10_1", "neox partners"): "partners of neox pairs",
    ("10_2", "pair 0"): "whatever the base is",
    ("10_2", "R in place of R/2"): "the exponent is R/2",
    ("10_2", "without the sign"): "the exponent is negative",
    ("10_2", "solved for pair 0"): "it divides by 0: pair 0",
    ("10_2", "nothing returned"): "it returned NoneType in place of a number",
    ("10_3", "nothing returned"): "it returned NoneType in place of a list of names",
    ("10_3", "one string"): "it returned str in place of a list of names",
    ("10_1", "rotated rows in reverse"): "the pairs have changed places",
    ("10_3", "nothing"): "of a kernel with neox pairs and sign flipped it says: nothing",
    ("10_3", "position 0 not looked at"): "of a kernel with neox pairs and positions + 1000 it says: neox pairs",
}  # fmt: skip


@pytest.mark.parametrize(("name", "what"), SAID, ids=lambda part: part)
def test_a_mistake_of_01_02_or_10_is_named(name, what):
    assert SAID[name, what] in CHECKS[f"check_{name}"].fault(WRONG[name][what])
