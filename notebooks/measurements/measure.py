"""Measure the chapter's kernels on a CUDA GPU and write one JSON file that the notebooks and the README quote.

    python notebooks/measurements/measure.py --out notebooks/measurements/h200.json [--peers DIR]

Each time is the median over replays of a CUDA graph that walks through several sets of buffers, together larger
than the L2 cache, filled with random data; kernels ①–④ and the peers are checked against the references before that.
What works in place rotates the same data again and again, which keeps every norm, up to rounding.
Where results lie in memory moves a time by percents, so every graph is captured anew in each of several rounds, the
implementations in turn. A copy of x in the same run is the yardstick: it moves 2·S·R·e bytes, with e the bytes of an
element. Hardware counters come from Nsight Compute (`ncu`), which runs this file once; without it that part stays
empty. The file is written after every part: one that was cut short lacks the later parts.

What is timed stands beside this file: variants.py has the kernels that differ from ①–④ in one thing, peers.py other
libraries' functions and how those in DIR are built.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import tilelang  # noqa: E402
import torch  # noqa: E402
from measurements import peers, variants  # noqa: E402

import rope_kernels as rk  # noqa: E402

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
            yield f"unstaged, blk_s={blk_s}", lambda b=blk_s: variants.neox_unstaged(S, R, b, dtype), neox, R // 2
        yield "naive, 256 threads, half arithmetic", lambda: variants.neox_naive_half(S, R, dtype), neox, R // 2
        yield "blocked, half arithmetic", lambda: variants.neox_blocked_half(S, R, 16, dtype), neox, R // 2
        yield "blocked, 2-byte accesses", lambda: variants.neox_narrow(S, R, 16, dtype), neox, R // 2
        yield "interleaved, vector stores", lambda: variants.interleaved_vector(S, R, 16, dtype), interleaved, R // 2
        yield "full-width tables", lambda: variants.neox_full_width(S, R, 16, dtype), neox, R


COUNTED = ["naive, 256 threads", "blocked, blk_s=16", "unstaged, blk_s=16"]
COUNTED += ["interleaved, blk_s=16", "interleaved, vector stores"]


def inputs(shape, dtype, columns):
    """Return random x, cos and sin; a full-width table repeats its half."""
    S, R = shape
    dtype = getattr(torch, dtype)
    angle = 1000 * torch.rand(S, R // 2, device="cuda")
    tables = (table.to(dtype).repeat(1, 2 * columns // R) for table in (angle.cos(), angle.sin()))
    return torch.randn(S, R, device="cuda").to(dtype), *tables


# ------------------------------------------------------------------------------------------------ timing


def rotation(reads):
    """Return how many sets of buffers a graph walks through, for launches that read so many bytes each."""
    # before one comes round again 16 times the L2 cache has been read, 4 times where that would take many launches
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return min(3072, max(3, -(-(16 if reads > 1e6 else 4) * l2_bytes // reads)))


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
    size, tolerance = (4, 1e-5) if dtype == "float32" else (2, 1e-2)
    widths = (R // 2, R) if (shape, dtype) == (LARGE, "float16") else (R // 2,)
    sets = [
        ({columns: inputs(shape, dtype, columns) for columns in widths},) for _ in range(rotation(2 * S * R * size))
    ]
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
        records.append(record(implementation, shape, dtype, times, ledgers[implementation], *records[:1]))
    return records


# ----------------------------------------------------------------------- kernel ④, its peers and its variants

TABLE_ROWS = 131072


@dataclasses.dataclass
class Case:
    """One shape of the op: q (tokens, heads_q, D), with a batch axis before the tokens where batch > 1."""

    tokens: int
    heads_q: int = 32
    heads_k: int = 8
    D: int = 128
    dtype: str = "bfloat16"
    tail_of: int = 0  # q is a view of the last D of so many channels
    batch: int = 1
    R: int = 0  # channels rotated, from start on; left out, all
    start: int = 0

    def __post_init__(self):
        self.R = self.R or self.D

    def bytes(self):
        """q and k."""
        elements = self.batch * self.tokens * (self.heads_q + self.heads_k) * self.D
        return elements * getattr(torch, self.dtype).itemsize

    def ledger(self):
        """q and k in and out; for each token a float32 table row and an int64 id."""
        return 2 * self.bytes() + self.batch * self.tokens * (4 * self.R + 8)

    def tensors(self):
        """Return fresh random q, k (or None) and position ids."""
        lead, dtype = (self.batch, self.tokens) if self.batch > 1 else (self.tokens,), getattr(torch, self.dtype)
        q = torch.randn(*lead, self.heads_q, self.tail_of or self.D, device="cuda").to(dtype)[..., -self.D :]
        k = torch.randn(*lead, self.heads_k, self.D, device="cuda").to(dtype) if self.heads_k else None
        return q, k, torch.randint(0, TABLE_ROWS, lead, device="cuda")


LLAMA = [Case(tokens) for tokens in (1, 4, 16, 64, 128, 512, 1024, 2048, 16384, 131072)]
FULL = [case for case in LLAMA if case.tokens not in (4, 64, 512, 1024)]  # with every peer, and backward
COUNTED_OP, COUNTED_MODES = Case(16384), {"apply_rope, neox": "neox", "apply_rope, interleaved": "interleaved"}
TILEOPS_CLAIM = Case(2048, heads_k=0, dtype="float16", batch=2)
OTHER_SHAPES = [Case(tokens, 128, 1, 64, tail_of=192) for tokens in (2048, 16384)]
OTHER_SHAPES += [Case(16384, D=D) for D in (64, 80, 96, 256)]
OTHER_SHAPES += [Case(16384, dtype=dtype) for dtype in ("float16", "float32")]
PARTIAL = [Case(16384, D=192, R=64, start=128), Case(4096, 128, 1, 192, R=64, start=128)]
PARTIAL += [Case(16384, D=D, R=R) for D, R in ((80, 32), (80, 20), (128, 64))]
CASES = [*LLAMA, TILEOPS_CLAIM, *OTHER_SHAPES, *PARTIAL]  # the partial ones last: who asks for D alone finds the whole


def variants_of(case):
    """Name the calls of apply_rope: rows gathered by random ids, or rows 0, 1, … without ids, as many peers do."""
    if case in PARTIAL:
        return ["apply_rope"]
    names = ["apply_rope", "apply_rope, no ids"]
    if case in LLAMA:
        names += ["apply_rope, no ids, in place", "apply_rope, in place"]
    if case == TILEOPS_CLAIM:
        names.append("apply_rope, no ids, table in q's dtype")
    return names


def peers_of(case):
    """Name the peers measured at this case; TileOPs builds for each shape, so it is timed at few."""
    if case == TILEOPS_CLAIM:
        return ["TileOPs"]
    if case in FULL:
        return [name for name in peers.FORWARD if name != "TileOPs" or case.tokens in (1, 2048, 16384)]
    return ["transformers, eager", "Liger-Kernel"] if case in OTHER_SHAPES and case.dtype == "bfloat16" else []


def op_record(implementation, pairing, direction, case, times, ledger_bytes, copy=None):
    """Make one record of the op; every implementation is held to the same ledger."""
    shape = (case.batch, case.tokens, case.heads_q, case.heads_k, case.D)
    made = record(f"{implementation} {pairing} {direction}", shape, case.dtype, times, ledger_bytes, copy)
    about = {"implementation": implementation, "pairing": pairing, "direction": direction}
    return {**made, **about, **dataclasses.asdict(case)}


@functools.cache
def cache(R):
    """One float32 row a position, as the peers that gather take it: R/2 cosines, then R/2 sines."""
    return torch.cat(rk.rope_table(rk.rope_frequencies(R)[0].cuda(), TABLE_ROWS), -1)


@functools.cache
def tables(R):
    return cache(R).chunk(2, -1)


def check(got, case, q, k, cos, sin, pairing, tolerance):
    """Compare with the reference in float64, whatever order of heads and tokens a library returns."""
    cos, sin = (table.double().unsqueeze(-2) for table in (cos, sin))
    for y, x in zip(got, (q, k), strict=False):
        if x is not None:
            y = y.reshape(x.shape) if y.shape[-3:] == x.shape[-3:] else y[0].transpose(0, 1)
            right = rk.torch_partial_rope(x.double(), cos, sin, pairing, case.start)
            torch.testing.assert_close(y.double(), right, rtol=tolerance, atol=tolerance)


def ours(name, case, pairing, inverse):
    """Return the call of apply_rope that goes by this name, as a function of q, k and ids."""
    cos, sin = tables(case.R)
    if "q's dtype" in name:
        cos, sin = (table.to(getattr(torch, case.dtype)) for table in (cos, sin))
    options = {"mode": pairing, "start": case.start, "inverse": inverse, "inplace": "in place" in name}
    return lambda q, k, ids: rk.apply_rope(q, k, cos, sin, None if "no ids" in name else ids, **options)


def prepare(case, pairing, direction, q, k, ids, built):
    """Check apply_rope and its peers at this case; return those that run, as launches, and the ones skipped."""
    cos, sin = tables(case.R)
    row = torch.arange(case.tokens, device="cuda")
    inverse = direction == "backward"
    makers = {}  # of each implementation: what makes it, the table rows that it takes, the tolerance
    for name in variants_of(case):
        make = functools.partial(ours, name, case, pairing, inverse)
        makers[name] = make, row if "no ids" in name else ids, 2e-2
    for name, maker in (peers.BACKWARD if inverse else peers.FORWARD).items():
        if name in peers_of(case):
            makers[name] = functools.partial(maker, pairing, cos[row], sin[row], q.dtype), row, 6e-2
    if case in LLAMA and not inverse:
        for name, maker in peers.GATHERED.items():
            makers[name] = functools.partial(maker, pairing, cache(case.R), built), ids, 2e-2
    launches, skipped = {}, []
    for name, (make, at, tolerance) in makers.items():
        try:
            launch, given = make(), (q.clone(), None if k is None else k.clone())
            got = launch(*given, ids) or given
            check(got, case, q, k, cos[at], -sin[at] if inverse else sin[at], pairing, tolerance)
            graph_times(launch, [(*given, ids)], 0)  # what can't be captured is skipped as well
            launches[name] = launch
        except Exception as error:  # the run goes on without a peer, and the file names what it lacks and why
            if name in variants_of(case):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            about = {"implementation": name, "pairing": pairing, "direction": direction, "tokens": case.tokens}
            skipped.append({**about, "reason": reason})
            print(f"{name:36} {pairing} {direction} tokens={case.tokens} skipped: {reason}", flush=True)
    return launches, skipped


def measure_op(case, built):
    """Time a copy, apply_rope and its peers; return their records and the peers that were skipped."""
    count = rotation(case.bytes())
    sets = [case.tensors() for _ in range(count)]
    elements, dtype = sum(x.numel() for x in sets[0][:2] if x is not None), sets[0][0].dtype
    flat = [[torch.randn(elements, device="cuda").to(dtype) for _ in range(2)] for _ in sets]
    ways = {"driver": lambda x, y: y.copy_(x), "kernel": lambda x, y: torch.neg(x, out=y)}
    times = min(rounds(ways, flat, 2).values(), key=statistics.median)  # the faster of the two is the yardstick
    copy = op_record("copy", "", "", case, times, 2 * case.bytes())
    del flat
    records, skipped = [copy], []
    directions = ("forward", "backward") if case in FULL else ("forward",)
    for pairing, direction in itertools.product(("neox", "interleaved"), directions):
        torch.cuda.empty_cache()
        launches, left_out = prepare(case, pairing, direction, *sets[0], built)
        skipped += left_out
        for name, times in rounds(launches, sets, 2 if count > 1000 else 3).items():
            records.append(op_record(name, pairing, direction, case, times, case.ledger(), copy))
    return records, skipped


def warm_up():
    """Build, side by side, the kernels that apply_rope and TileOPs need for all cases."""
    tasks = []
    for case, pairing in itertools.product(CASES, ("neox", "interleaved")):
        given = case.tensors()
        for inverse, name in itertools.product((False, True) if case in FULL else (False,), variants_of(case)):
            tasks.append(functools.partial(ours(name, case, pairing, inverse), *given))
        if "TileOPs" in peers_of(case):
            tasks.append(lambda of=pairing, given=given: peers.tileops(of, None, None, None)(*given))
    build_all(tasks)
    torch.cuda.empty_cache()


def measure_variants(case):
    """Time variants of kernel ④: alone, and between a kernel that writes its input and one that reads its result."""
    chosen = [("overlapped", "evict_last"), ("plain", "evict_last")]  # the first is the kernel's own
    if case.tokens >= 2048:
        chosen += [("overlapped", "evict_normal"), ("overlapped", "evict_first")]
    cos, sin = (table[: case.tokens] for table in tables(case.R))
    pairs = [case.tensors()[:2] for _ in range(rotation(case.bytes()))]
    sets = [(q, k, torch.empty_like(q), torch.empty_like(k)) for q, k in pairs]
    written, rotated = ([torch.empty_like(x) for x in sets[0][:2]] for _ in range(2))

    def negate(tensors, results):
        for x, y in zip(tensors, results, strict=True):
            torch.neg(x, out=y)

    launches = {}
    for start, hint in chosen:
        kernel = variants.start_and_hint_variant(case.tokens, start, hint)

        def between(q, k, y, z, kernel=kernel):
            negate((q, k), written)
            kernel(*written, cos, sin, *rotated)
            negate(rotated, (y, z))

        launches[hint, start, "alone"] = lambda q, k, y, z, kernel=kernel: kernel(q, k, cos, sin, y, z)
        launches[hint, start, "between two kernels"] = between
    records = []
    for (hint, start, place), times in rounds(launches, sets, 2 if len(sets) > 1000 else 6).items():
        about = {"hint": hint, "start": start, "place": place, "tokens": case.tokens}
        records.append({**about, **summary("rope_per_token", times)})
        print(f"{hint:14} {start:12} {place:20} tokens={case.tokens} {records[-1]['median_us']:9.2f} µs", flush=True)
    return records


# ------------------------------------------------------------------------------------------- the caller's side


def bare_kernel(q, k, cos, sin, ids):
    """Return the launch of kernel ④ alone, in half-split pairs into tensors made once: what apply_rope ends with."""
    named = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": ids}
    forms = [rk._Form(*rk._form(name, x, True)) for name, x in named.items()]
    run = rk._kernel(*forms, "neox", 0, False, False)
    y, z = torch.empty_like(q), torch.empty_like(k)
    return lambda: run(q, k, cos, sin, ids, y, z)


def bare_kernel_in_c(x, cos, sin, ids, y):
    """Return the launch of kernel ④ alone, from x into y through the C backend, in half-split pairs."""
    heads, D = x.shape[1:]
    kernel = rk._in_c(heads, 0, D, D, dtype="float32", width=8)
    return lambda: kernel(x, x, cos, sin, ids, y, y)


@torch.no_grad()
def measure_host(case, built):
    """Time the issuing of one eager call without gradients: apply_rope, its peers, and kernels alone."""
    q, k, ids = case.tensors()
    cos, sin = tables(case.R)
    given = "neox", cos[: case.tokens], sin[: case.tokens], q.dtype
    makers = {name: functools.partial(maker, *given) for name, maker in peers.FORWARD.items()}
    for name, maker in peers.GATHERED.items():
        makers[f"{name}, bare kernel"] = functools.partial(maker, "neox", cache(case.R), built)
    calls = {
        "apply_rope": lambda: rk.apply_rope(q, k, cos, sin, ids),
        "apply_rope, in place": lambda: rk.apply_rope(q, k, cos, sin, ids, inplace=True),
        "bare kernel": bare_kernel(q, k, cos, sin, ids),
    }
    for name, make in makers.items():
        try:
            call = functools.partial(make(), q, k, ids)
            call()
            calls[name] = call
        except Exception as error:
            print(f"{name:36} host time skipped: {error}".splitlines()[0][:200], flush=True)
    times = {name: [] for name in calls}
    for _ in range(5):  # in turn, since the host has faster and slower moments
        for name, call in calls.items():
            repeats = []
            for _ in range(7):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):  # few enough that the host need not wait for the device
                    call()
                repeats.append(1e6 * (time.perf_counter() - start) / 200)
            times[name] += repeats[2:]
    for name in calls:
        print(f"{name:36} host {statistics.median(times[name]):8.1f} µs a call", flush=True)
    return [summary(name, times[name], digits=2) for name in calls]


def measure_cpu():
    """Time kernel ④ through the C backend against the torch reference, on one thread of this machine's CPU."""
    tokens, heads, D = 4096, 32, 128
    x, ids = torch.randn(tokens, heads, D), torch.randint(0, TABLE_ROWS, (tokens,))
    cos, sin = rk.rope_table(rk.rope_frequencies(D)[0], TABLE_ROWS)
    y = torch.empty_like(x)
    calls = {
        "rope_per_token, C backend": bare_kernel_in_c(x, cos, sin, ids, y),
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
    builds = {name: build for name, build, *_ in ladder(LARGE, "float16")}
    for name in COUNTED:
        builds[name]()(*inputs(LARGE, "float16", LARGE[1] // 2))
    for mode in COUNTED_MODES.values():
        q, k, _ = COUNTED_OP.tensors()
        rk.apply_rope(q, k, *tables(COUNTED_OP.R), mode=mode)
    torch.cuda.synchronize()


def provenance(commit, built):
    """Say what ran where: enough to run it again."""
    driver = "nvidia-smi --query-gpu=driver_version --format=csv,noheader --id=0"
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "driver": subprocess.check_output(driver.split(), text=True).strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "tilelang": tilelang.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "l2_bytes": properties.L2_cache_size,
        "sm_count": properties.multi_processor_count,
        "cpu": cpu_name(),
        "peers": {name: version(name) for name in ("transformers", "triton", "liger-kernel", "tileops")}
        | (peers.RELEASES if built else {}),
    }


def version(package):
    """Return the version of an installed package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


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
    parser.add_argument("--peers", type=pathlib.Path, help="the folder of SGLang's and FlashInfer's kernels (peers.py)")
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
    result = {"provenance": provenance(options.commit or head_commit(), options.peers)}

    def write(**parts):
        for name, part in parts.items():
            result[name] = result.get(name, []) + part
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()

    for shape, dtype in ((LARGE, "float16"), (SMALL, "float16"), (LARGE, "bfloat16"), (LARGE, "float32")):
        write(records=measure_ladder(shape, dtype))
    warm_up()
    write(host_records=measure_host(Case(16), options.peers), cpu_records=measure_cpu())
    for case in CASES:
        records, skipped = measure_op(case, options.peers)
        write(op_records=records, op_skipped=skipped)
    for tokens in (1, 16, 128, 2048, 16384):
        write(variant_records=measure_variants(Case(tokens)))
    write(counters=measure_counters() if shutil.which("ncu") else [])
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
