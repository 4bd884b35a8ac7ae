"""Measure the chapter's kernels on a CUDA GPU and write one JSON file that the notebooks and the README quote.

    python notebooks/measurements/measure.py --out notebooks/measurements/h200.json

Each time is the median over replays of a CUDA graph that walks through several sets of buffers, together larger
than the L2 cache, filled with random data; kernels ①–④ and the peers are checked against the references before that.
Where results lie in memory moves a time by percents, so every graph is captured anew in each of several rounds, the
implementations in turn. A copy of x in the same run is the yardstick: it moves 2·S·R·e bytes, with e the bytes of an
element. Hardware counters come from Nsight Compute (`ncu`), which runs this file once; without it that part stays
empty. The file is written after every part: one that was cut short lacks the later parts.

The variants of the kernels that differ in one thing, which the notebooks compare, are declared here.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import tilelang  # noqa: E402
import tilelang.language as T  # noqa: E402
import torch  # noqa: E402
from measurements import peers  # noqa: E402
from tilelang.engine.callback import register_cuda_postproc  # noqa: E402

import rope_kernels as rk  # noqa: E402

# ------------------------------------------------------------------- variants, each different in one thing


@tilelang.jit(out_idx=[3])
def neox_unstaged(S, R, blk_s=16, dtype="float16", threads=256):
    """Kernel ② without shared memory: the same tile, read straight from global memory."""
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            for i, p in T.Parallel(blk_s, half):
                row = block * blk_s + i
                a = T.cast(x[row, p], "float32")
                b = T.cast(x[row, p + half], "float32")
                c = T.cast(cos[row, p], "float32")
                s = T.cast(sin[row, p], "float32")
                y[row, p] = T.cast(a * c - b * s, dtype)
                y[row, p + half] = T.cast(b * c + a * s, dtype)

    return rope


@tilelang.jit(out_idx=[3])
def neox_narrow(S, R, blk_s=16, dtype="float16", threads=256):
    """`neox_unstaged` with one element an access: neighbouring lanes take neighbouring pairs, none takes four."""
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            lane = T.get_thread_binding()
            for step in T.unroll(blk_s * half // threads):
                row = block * blk_s + (step * threads + lane) // half
                p = lane % half
                a = T.cast(x[row, p], "float32")
                b = T.cast(x[row, p + half], "float32")
                c = T.cast(cos[row, p], "float32")
                s = T.cast(sin[row, p], "float32")
                y[row, p] = T.cast(a * c - b * s, dtype)
                y[row, p + half] = T.cast(b * c + a * s, dtype)

    return rope


@tilelang.jit(out_idx=[3])
def neox_naive_half(S, R, dtype="float16", threads=256):
    """Kernel ① with its arithmetic in x's dtype instead of float32."""
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S, threads=threads) as i:
            for p in T.Parallel(half):
                a, b, c, s = x[i, p], x[i, p + half], cos[i, p], sin[i, p]
                y[i, p] = a * c - b * s
                y[i, p + half] = b * c + a * s

    return rope


@tilelang.jit(out_idx=[3])
def neox_blocked_half(S, R, blk_s=16, dtype="float16", threads=256):
    """Kernel ② with its arithmetic in x's dtype instead of float32."""
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            x_tile = T.alloc_shared((blk_s, R), dtype, scope="shared")
            cos_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            sin_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            T.copy(x[block * blk_s, 0], x_tile)
            T.copy(cos[block * blk_s, 0], cos_tile)
            T.copy(sin[block * blk_s, 0], sin_tile)
            for i, p in T.Parallel(blk_s, half):
                a, b, c, s = x_tile[i, p], x_tile[i, p + half], cos_tile[i, p], sin_tile[i, p]
                y[block * blk_s + i, p] = a * c - b * s
                y[block * blk_s + i, p + half] = b * c + a * s

    return rope


@tilelang.jit(out_idx=[3])
def interleaved_vector(S, R, blk_s=16, dtype="float16", threads=256):
    """Kernel ③ with 16-byte accesses: a thread takes eight neighbouring channels, both elements of four pairs."""
    half = R // 2
    wide = 8

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            for i, v in T.Parallel(blk_s, R // wide):
                row = block * blk_s + i
                x_vec = T.alloc_local((wide,), dtype)
                y_vec = T.alloc_local((wide,), dtype)
                cos_vec = T.alloc_local((wide // 2,), dtype)
                sin_vec = T.alloc_local((wide // 2,), dtype)
                for k in T.vectorized(wide):
                    x_vec[k] = x[row, v * wide + k]
                for k in T.vectorized(wide // 2):
                    cos_vec[k] = cos[row, v * wide // 2 + k]
                for k in T.vectorized(wide // 2):
                    sin_vec[k] = sin[row, v * wide // 2 + k]
                for k in T.unroll(wide // 2):
                    a = T.cast(x_vec[2 * k], "float32")
                    b = T.cast(x_vec[2 * k + 1], "float32")
                    c = T.cast(cos_vec[k], "float32")
                    s = T.cast(sin_vec[k], "float32")
                    y_vec[2 * k] = T.cast(a * c - b * s, dtype)
                    y_vec[2 * k + 1] = T.cast(a * s + b * c, dtype)
                for k in T.vectorized(wide):
                    y[row, v * wide + k] = y_vec[k]

    return rope


@tilelang.jit(out_idx=[3])
def neox_full_width(S, R, blk_s=16, dtype="float16", threads=256):
    """`neox_unstaged` with tables of R columns, as models pass them: each half of the table is read as well."""
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, R), dtype),
        sin: T.Tensor((S, R), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            for i, p in T.Parallel(blk_s, half):
                row = block * blk_s + i
                a = T.cast(x[row, p], "float32")
                b = T.cast(x[row, p + half], "float32")
                c_a = T.cast(cos[row, p], "float32")
                s_a = T.cast(sin[row, p], "float32")
                c_b = T.cast(cos[row, p + half], "float32")
                s_b = T.cast(sin[row, p + half], "float32")
                y[row, p] = T.cast(a * c_a - b * s_a, dtype)
                y[row, p + half] = T.cast(b * c_b + a * s_b, dtype)

    return rope


# ------------------------------------------------------------------------------------------------ cases

LARGE, SMALL = (524288, 128), (512, 128)  # rows of 16 384 and of 16 tokens with 32 heads each


def ladder(shape, dtype):
    """Yield (implementation, build, reference, table columns a row) for every kernel timed at this shape."""
    S, R = shape
    blocks = (1, 2, 4, 8, 16, 32)
    neox, interleaved = rk.torch_rope_neox, rk.torch_rope_interleaved
    if shape == LARGE:
        yield "naive, 256 threads", lambda: rk.rope_neox_naive(S, R, dtype), neox, R // 2
        yield "interleaved, blk_s=16", lambda: rk.rope_interleaved_blocked(S, R, 16, dtype), interleaved, R // 2
    for blk_s in blocks if dtype == "float16" else (16,):
        yield f"blocked, blk_s={blk_s}", lambda b=blk_s: rk.rope_neox_blocked(S, R, b, dtype), neox, R // 2
    if shape == LARGE and dtype == "float16":
        yield "naive, 64 threads", lambda: rk.rope_neox_naive(S, R, dtype, 64), neox, R // 2
        for blk_s in blocks:
            yield f"unstaged, blk_s={blk_s}", lambda b=blk_s: neox_unstaged(S, R, b, dtype), neox, R // 2
        yield "naive, 256 threads, half arithmetic", lambda: neox_naive_half(S, R, dtype), neox, R // 2
        yield "blocked, half arithmetic", lambda: neox_blocked_half(S, R, 16, dtype), neox, R // 2
        yield "blocked, 2-byte accesses", lambda: neox_narrow(S, R, 16, dtype), neox, R // 2
        yield "interleaved, vector stores", lambda: interleaved_vector(S, R, 16, dtype), interleaved, R // 2
        yield "full-width tables", lambda: neox_full_width(S, R, 16, dtype), neox, R


COUNTED = (
    "naive, 256 threads",
    "blocked, blk_s=16",
    "unstaged, blk_s=16",
    "interleaved, blk_s=16",
    "interleaved, vector stores",
)


def inputs(shape, dtype, columns):
    """Return random x, cos and sin; a full-width table repeats its half."""
    S, R = shape
    dtype = getattr(torch, dtype)
    angle = 1000 * torch.rand(S, R // 2, device="cuda")
    repeats = 2 * columns // R
    return (
        torch.randn(S, R, device="cuda").to(dtype),
        angle.cos().to(dtype).repeat(1, repeats),
        angle.sin().to(dtype).repeat(1, repeats),
    )


# ------------------------------------------------------------------------------------------------ timing


def graph_times(launch, buffer_sets, replays=24):
    """Return one time in µs a launch for each replay of a graph that launches once on every set of buffers."""
    outputs = [launch(*buffers) for buffers in buffer_sets]  # kept alive, so that each launch writes its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch(*buffers) for buffers in buffer_sets]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays + 3):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(outputs))
    return times[3:]


def rounds(launches, buffer_sets, count=3, replays=8):
    """Time each launch of a dictionary in several rounds, each beginning with another; return all their times."""
    names, times = list(launches), {name: [] for name in launches}
    for i in range(count):
        turn = i * len(names) // count
        for name in names[turn:] + names[:turn]:
            times[name] += graph_times(launches[name], buffer_sets, replays)
    return times


def build_all(builds):
    """Run functions that build kernels side by side; what fails here fails again, and is told of, where it is used."""

    def attempt(build):
        with contextlib.suppress(Exception):
            build()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(attempt, builds))


def summary(implementation, times, digits=3):
    """Return what every record says of its times, in µs."""
    deciles = statistics.quantiles(times, n=10)
    values = {"median_us": statistics.median(times), "p10_us": deciles[0], "p90_us": deciles[-1]}
    return {"implementation": implementation, **{key: round(value, digits) for key, value in values.items()}}


def record(implementation, shape, dtype, times, ledger_bytes, copy=None):
    """Make one record and print it as a line of progress."""
    median = statistics.median(times)
    rate = ledger_bytes / median / 1000
    print(f"{implementation:36} {shape!s:14} {dtype:9} {median:9.2f} µs  {rate:7.0f} GB/s", flush=True)
    return {
        **summary(implementation, times),
        "shape": list(shape),
        "dtype": dtype,
        "ledger_bytes": ledger_bytes,
        "gb_s": round(rate, 1),
        "fraction_of_copy": round(rate / copy["gb_s"], 4) if copy else 1.0,
    }


def measure_ladder(shape, dtype):
    """Check and time a copy and every kernel of the ladder; return their records."""
    S, R = shape
    size = 4 if dtype == "float32" else 2
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(3, -(-2 * l2_bytes // (3 * S * R * size)))
    widths = (R // 2, R) if (shape, dtype) == (LARGE, "float16") else (R // 2,)
    sets = [({columns: inputs(shape, dtype, columns) for columns in widths},) for _ in range(count)]
    launches, ledgers = {"copy": lambda given: given[R // 2][0].clone()}, {"copy": 2 * S * R * size}
    build_all(build for _, build, _, _ in ladder(shape, dtype))
    for implementation, build, reference, columns in ladder(shape, dtype):
        kernel = build()
        x, cos, sin = sets[0][0][columns]
        torch.testing.assert_close(
            kernel(x, cos, sin), reference(x, cos[:, : R // 2], sin[:, : R // 2]), rtol=tolerance, atol=tolerance
        )
        launches[implementation] = lambda given, kernel=kernel, columns=columns: kernel(*given[columns])
        ledgers[implementation] = 2 * S * (R + columns) * size
    records = []
    for implementation, times in rounds(launches, sets).items():
        copy = records[0] if records else None
        records.append(record(implementation, shape, dtype, times, ledgers[implementation], copy))
    return records


# ------------------------------------------------------------------------------------- kernel ④ and its peers

TABLE_ROWS = 131072


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of the op: q (tokens, heads_q, D), with a batch axis before the tokens where batch > 1."""

    tokens: int
    heads_q: int = 32
    heads_k: int = 8
    D: int = 128
    dtype: str = "bfloat16"
    tail_of: int = 0  # q is a view of the last D of so many channels
    batch: int = 1

    def elements(self):
        return self.batch * self.tokens * (self.heads_q + self.heads_k) * self.D

    def bytes(self):
        """q and k."""
        return self.elements() * getattr(torch, self.dtype).itemsize

    def ledger(self):
        """q and k in and out; for each token a float32 table row and an int64 id."""
        return 2 * self.bytes() + self.batch * self.tokens * (4 * self.D + 8)

    def tensors(self):
        """Return fresh random q, k (or None) and position ids."""
        lead, dtype = (self.batch, self.tokens) if self.batch > 1 else (self.tokens,), getattr(torch, self.dtype)
        q = torch.randn(*lead, self.heads_q, self.tail_of or self.D, device="cuda").to(dtype)[..., -self.D :]
        k = torch.randn(*lead, self.heads_k, self.D, device="cuda").to(dtype) if self.heads_k else None
        return q, k, torch.randint(0, TABLE_ROWS, lead, device="cuda")


LLAMA = [Case(tokens) for tokens in (1, 16, 128, 2048, 16384, 131072)]
COUNTED_OP, COUNTED_MODES = LLAMA[4], {"apply_rope, neox": "neox", "apply_rope, interleaved": "interleaved"}
TILEOPS_CLAIM = Case(2048, heads_k=0, dtype="float16", batch=2)
OTHER_SHAPES = [Case(tokens, 128, 1, 64, tail_of=192) for tokens in (2048, 16384)]
OTHER_SHAPES += [Case(16384, D=D) for D in (64, 80, 96, 256)]
OTHER_SHAPES += [Case(16384, dtype=dtype) for dtype in ("float16", "float32")]


def variants_of(case):
    """Name the calls of apply_rope: rows gathered by random ids, or rows 0, 1, … without ids, as peers take them."""
    names = ["apply_rope", "apply_rope, no ids"]
    if case in LLAMA:
        names.append("apply_rope, no ids, in place")
    if case == TILEOPS_CLAIM:
        names.append("apply_rope, no ids, table in q's dtype")
    return names


def peers_of(case):
    """Name the peers measured at this case; TileOPs builds for each shape, so it is timed at few."""
    if case == TILEOPS_CLAIM:
        return ["TileOPs"]
    if case in LLAMA:
        return [name for name in peers.FORWARD if name != "TileOPs" or case.tokens in (1, 2048, 16384)]
    return ["transformers, eager", "Liger-Kernel"] if case.dtype == "bfloat16" else []


def op_record(implementation, pairing, direction, case, times, ledger_bytes, copy=None):
    """Make one record of the op; every implementation is held to the same ledger."""
    shape = (case.batch, case.tokens, case.heads_q, case.heads_k, case.D)
    made = record(f"{implementation} {pairing} {direction}", shape, case.dtype, times, ledger_bytes, copy)
    about = {"implementation": implementation, "pairing": pairing, "direction": direction}
    return {**made, **about, **dataclasses.asdict(case)}


@functools.cache
def tables(D):
    return rk.rope_table(rk.rope_frequencies(D)[0].cuda(), TABLE_ROWS)


def rotation(reads):
    """Return how many sets of buffers a graph walks through, for launches that read so many bytes each."""
    # before one comes round again 16 times the L2 cache has been read, 4 times where that would take many launches
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return min(3072, max(3, -(-(16 if reads > 1e6 else 4) * l2_bytes // reads)))


def check(got, case, q, k, cos, sin, pairing, tolerance):
    """Compare with the reference, whatever order of heads and tokens a library returns."""
    for y, x in zip(got, (q, k), strict=False):
        if y is None or x is None:
            continue
        y = y.reshape(x.shape) if y.shape[-3:] == x.shape[-3:] else y[0].transpose(0, 1)
        right = rk.torch_partial_rope(x, cos.unsqueeze(-2), sin.unsqueeze(-2), pairing)
        torch.testing.assert_close(y, right, rtol=tolerance, atol=tolerance)


def ours(name, case, pairing, inverse):
    """Return the call of apply_rope that goes by this name, as a function of q, k and ids."""
    cos, sin = tables(case.D)
    if "q's dtype" in name:
        cos, sin = (table.to(getattr(torch, case.dtype)) for table in (cos, sin))
    gathered, options = "no ids" not in name, {"mode": pairing, "inverse": inverse, "inplace": "in place" in name}
    return lambda q, k, ids: rk.apply_rope(q, k, cos, sin, ids if gathered else None, **options)


def prepare(case, pairing, direction, q, k, ids):
    """Check apply_rope and its peers at this case; return those that run, as launches, and the ones skipped."""
    cos, sin = tables(case.D)
    row = torch.arange(case.tokens, device="cuda")
    inverse = direction == "backward"
    sign = -1 if inverse else 1
    launches, skipped = {}, []

    def copies():
        return q.clone(), None if k is None else k.clone()

    for name in variants_of(case):
        launches[name] = ours(name, case, pairing, inverse)
        at = row if "no ids" in name else ids
        check(launches[name](*copies(), ids), case, q, k, cos[at], sign * sin[at], pairing, 2e-2)
    makers = peers.BACKWARD if inverse else peers.FORWARD
    for name in [name for name in peers_of(case) if name in makers]:
        try:
            peer = makers[name](pairing, cos[row], sin[row], q.dtype)
            check(peer(*copies()), case, q, k, cos[row], sign * sin[row], pairing, 6e-2)
            launches[name] = lambda q, k, ids, peer=peer: peer(q, k)
        except Exception as error:  # the run goes on, and the file names what it lacks and why
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            about = {"implementation": name, "pairing": pairing, "direction": direction, "tokens": case.tokens}
            skipped.append({**about, "reason": reason})
            print(f"{name:36} {pairing} {direction} tokens={case.tokens} skipped: {reason}", flush=True)
    return launches, skipped


def measure_op(case):
    """Time a copy, apply_rope and its peers; return their records and the peers that were skipped."""
    count = rotation(case.bytes())
    sets = [case.tensors() for _ in range(count)]
    flat = [[torch.randn(case.elements(), device="cuda").to(sets[0][0].dtype) for _ in range(2)] for _ in sets]
    ways = {"driver": lambda x, y: y.copy_(x), "kernel": lambda x, y: torch.neg(x, out=y)}
    times = min(rounds(ways, flat, 2).values(), key=statistics.median)  # the faster of the two is the yardstick
    copy = op_record("copy", "", "", case, times, 2 * case.bytes())
    del flat
    records, skipped = [copy], []
    for pairing, direction in itertools.product(("neox", "interleaved"), ("forward", "backward")):
        if direction == "backward" and case not in LLAMA:
            continue
        torch.cuda.empty_cache()
        launches, left_out = prepare(case, pairing, direction, *sets[0])
        skipped += left_out
        for name, times in rounds(launches, sets, 2 if count > 1000 else 3).items():
            records.append(op_record(name, pairing, direction, case, times, case.ledger(), copy))
    return records, skipped


def warm_up(cases):
    """Build, side by side, the kernels that apply_rope and TileOPs need for these cases."""

    def build(case, pairing, inverse, name):
        few = dataclasses.replace(case, tokens=min(case.tokens, 2 * rk._FEW_TOKENS))  # beyond one build serves all
        ours(name, few, pairing, inverse)(*few.tensors())

    def build_tileops(case, pairing):
        q, k, _ = case.tensors()
        peers.tileops(pairing, None, None, q.dtype)(q, k)

    tasks = []
    for case, pairing in itertools.product(cases, ("neox", "interleaved")):
        for inverse in (False, True) if case in LLAMA else (False,):
            tasks += [functools.partial(build, case, pairing, inverse, name) for name in variants_of(case)]
        if "TileOPs" in peers_of(case):
            tasks.append(functools.partial(build_tileops, case, pairing))
    build_all(tasks)
    torch.cuda.empty_cache()


# --------------------------------------------------------------- what a cache hint and an overlapped start do

HINTS = ("evict_last", "evict_normal", "evict_first")  # the first is the kernel's own
STARTS = ("overlapped", "plain")  # likewise


def variant(tokens, hint, start):
    """Kernel ④ for rows 0, 1, …, with another hint for its loads or with its start as launches have it by default.

    With the default start TileLang also says __restrict__; all loads are PTX here, which that doesn't touch.
    """

    def replaced(code, _):
        assert code.count("L2::evict_last") == 1
        return code.replace("L2::evict_last", f"L2::{hint}")

    # the factory asks this function whether the GPU can overlap launches, which takes sm_90 or later
    without = mock.patch.object(tilelang.contrib.nvcc, "have_pdl", return_value=False)
    with without if start == "plain" else contextlib.nullcontext():
        per_thread = 1 if tokens <= rk._FEW_TOKENS else 2  # as apply_rope chooses
        function = rk.rope_per_token.__wrapped__(32, 8, 128, 128, index_dtype=None, width=8, per_thread=per_thread)
    tilelang.disable_cache()  # it does not know of the replacement
    register_cuda_postproc(replaced)
    try:
        kernel = tilelang.compile(function, pass_configs=rk.rope_per_token.pass_configs)
    finally:
        register_cuda_postproc(lambda code, _: code)
        tilelang.enable_cache()
    return kernel.adapter._get_executable()


def measure_variants(case, variants):
    """Time variants of kernel ④: alone, and between a kernel that writes its input and one that reads its result."""
    cos, sin = (table[: case.tokens] for table in tables(case.D))
    pairs = [case.tensors()[:2] for _ in range(rotation(case.bytes()))]
    sets = [(q, k, torch.empty_like(q), torch.empty_like(k)) for q, k in pairs]
    written, rotated = ([torch.empty_like(x) for x in sets[0][:2]] for _ in range(2))

    def before(q, k):
        for x, y in zip((q, k), written, strict=True):
            torch.neg(x, out=y)

    def after(y, z):
        for x, out in zip(rotated, (y, z), strict=True):
            torch.neg(x, out=out)

    launches = {}
    for chosen in variants:
        kernel = variant(case.tokens, *chosen)

        def alone(q, k, y, z, kernel=kernel):
            kernel(q, k, cos, sin, cos, y, z)

        def between(q, k, y, z, kernel=kernel):
            before(q, k)
            kernel(*written, cos, sin, cos, *rotated)
            after(y, z)

        launches[*chosen, "alone"], launches[*chosen, "between two kernels"] = alone, between
    records = []
    for (hint, start, place), times in rounds(launches, sets, 2 if len(sets) > 1000 else 6).items():
        about = {"hint": hint, "start": start, "place": place, "tokens": case.tokens}
        records.append({**about, **summary("rope_per_token", times)})
        print(f"{hint:14} {start:12} {place:20} tokens={case.tokens} {records[-1]['median_us']:9.2f} µs", flush=True)
    return records


# ------------------------------------------------------------------------------------------- the caller's side


def host_times(call, calls=200, repeats=5):
    """Return the µs that the caller needs to issue one call, for each repeat; the device never falls far behind."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return times[2:]


def measure_host(case):
    """Time the issuing of one eager call without gradients: apply_rope, its bare kernel, and the peers."""
    q, k, ids = case.tensors()
    cos, sin = tables(case.D)
    y, z, row = torch.empty_like(q), torch.empty_like(k), torch.arange(case.tokens, device="cuda")
    rk.apply_rope(q, k, cos, sin, ids)
    description = (q.shape, case.heads_k, q.stride(), k.stride(), 0, q.dtype, case.D // 2, cos.dtype, ids.dtype)
    bare = rk._prepared(*description, 0, "neox", False, False)
    calls = {
        "apply_rope": lambda: rk.apply_rope(q, k, cos, sin, ids),
        "apply_rope, in place": lambda: rk.apply_rope(q, k, cos, sin, ids, inplace=True),
        "bare kernel": lambda: bare(q, k, cos, sin, ids, y, z),
    }
    for name, maker in peers.FORWARD.items():
        try:
            peer = maker("neox", cos[row], sin[row], q.dtype)
            peer(q, k)
            calls[name] = lambda peer=peer: peer(q, k)
        except Exception as error:
            print(f"{name:36} host time skipped: {error}".splitlines()[0][:200], flush=True)
    times = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(5):  # in turn, since the host has faster and slower moments
            for name, call in calls.items():
                times[name] += host_times(call)
    for name in calls:
        print(f"{name:36} host {statistics.median(times[name]):8.1f} µs a call", flush=True)
    return [summary(name, times[name], digits=2) for name in calls]


def measure_cpu():
    """Time kernel ④ through the C backend against the torch reference, on one thread of this machine's CPU."""
    tokens, heads, D = 4096, 32, 128
    x, ids = torch.randn(tokens, heads, D), torch.randint(0, TABLE_ROWS, (tokens,))
    cos, sin = rk.rope_table(rk.rope_frequencies(D)[0], TABLE_ROWS)
    y = torch.empty_like(x)
    strides = (x.stride()[:2],) * 4 + ((1,),)
    description = (heads, 0, D, D, 0, "neox", "float32", "float32", "int64", False, False)
    kernel = rk._prepared_in_c(*description, strides)
    calls = {
        "rope_per_token, C backend": lambda: kernel(x, x, cos, sin, ids, y, y),
        "torch reference": lambda: rk.torch_rope_neox(x, cos[ids][:, None], sin[ids][:, None]),
    }
    torch.testing.assert_close((calls["rope_per_token, C backend"](), y)[1], calls["torch reference"]())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    records = []
    for name, call in calls.items():
        times = []
        for _ in range(12):
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        records.append(record(name, (tokens, heads, D), "float32", times[2:], 8 * x.numel()))
        del records[-1]["fraction_of_copy"]
    torch.set_num_threads(threads)
    return records


# ---------------------------------------------------------------------------------------------- counters

METRICS = {
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_static",
}


def measure_counters():
    """Run one launch of each kernel under ncu and return their counters."""
    names = [*COUNTED, *COUNTED_MODES]
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", "rope_kernel", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, __file__, "--launch"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = output[output.index('"ID"') :]
    records = []
    for name, row in zip(names, list(csv.DictReader(table.splitlines()))[1:], strict=True):  # the first: the units
        values = {key: int(float(row[metric].replace(",", ""))) for key, metric in METRICS.items()}
        print(f"{name:36} counters {values}", flush=True)
        shape, dtype = (LARGE, "float16") if name in COUNTED else (dataclasses.astuple(COUNTED_OP)[:4], "bfloat16")
        records.append({"implementation": name, "shape": list(shape), "dtype": dtype, **values})
    return records


def launch_each():
    """Launch every counted kernel once, in order: what ncu looks at."""
    kernels = {name: (build, columns) for name, build, _, columns in ladder(LARGE, "float16")}
    for name in COUNTED:
        build, columns = kernels[name]
        build()(*inputs(LARGE, "float16", columns))
    for mode in COUNTED_MODES.values():
        q, k, _ = COUNTED_OP.tensors()
        rk.apply_rope(q, k, *tables(COUNTED_OP.D), mode=mode)
    torch.cuda.synchronize()


def provenance(commit):
    """Say what ran where: enough to run it again."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "tilelang": tilelang.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "l2_bytes": properties.L2_cache_size,
        "sm_count": properties.multi_processor_count,
        "cpu": cpu_name(),
        "peers": {name: version(name) for name in ("transformers", "triton", "liger-kernel", "tileops")},
    }


def version(package):
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name():
    """Return the processor's name as Linux gives it."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def head_commit():
    """Return the commit of this checkout, or "unknown" outside one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return result.stdout.strip() if result and result.returncode == 0 else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="the JSON file to write")
    parser.add_argument("--commit", help="the commit measured, where the history is not at hand")
    parser.add_argument("--launch", action="store_true", help="only launch the counted kernels, once each (for ncu)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No CUDA device: times of the C backend would say nothing about the kernels.")
    tilelang.set_log_level("WARNING")
    if options.launch:
        launch_each()
        return
    if options.out is None:
        parser.error("--out takes the path of the JSON file to write")
    result = {"provenance": provenance(options.commit or head_commit())}

    def write(**parts):
        for name, part in parts.items():
            result[name] = result.get(name, []) + part
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()

    for shape, dtype in ((LARGE, "float16"), (SMALL, "float16"), (LARGE, "bfloat16"), (LARGE, "float32")):
        write(records=measure_ladder(shape, dtype))
    cases = [*LLAMA, TILEOPS_CLAIM, *OTHER_SHAPES]
    warm_up(cases)
    write(host_records=measure_host(LLAMA[1]), cpu_records=measure_cpu())
    for case in LLAMA[:5]:
        variants = [(HINTS[0], start) for start in STARTS]
        if case.tokens >= 2048:
            variants += [(hint, STARTS[0]) for hint in HINTS[1:]]
        write(variant_records=measure_variants(case, variants))
    for case in cases:
        records, skipped = measure_op(case)
        write(op_records=records, op_skipped=skipped)
    write(counters=measure_counters() if shutil.which("ncu") else [])
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
