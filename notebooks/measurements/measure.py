"""Measure the chapter's kernels on a CUDA GPU and write one JSON file that the notebooks and the README quote.

    python notebooks/measurements/measure.py --out notebooks/measurements/h200.json

Each time is the median over replays of a CUDA graph that walks through several sets of buffers, together larger
than the L2 cache, filled with random data; each kernel is checked against its reference before it is timed. A copy
of x in the same run is the yardstick: it moves 2·S·R·e bytes, with e the bytes of an element. Hardware counters
come from Nsight Compute (`ncu`), which runs this file once for each kernel; without it that part stays empty.

The variants of the kernels that differ in one thing, which the notebooks compare, are declared here.
"""

import argparse
import csv
import datetime
import json
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tilelang  # noqa: E402
import tilelang.language as T  # noqa: E402
import torch  # noqa: E402

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


def graph_times(launch, buffer_sets, replays=40):
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


def record(implementation, shape, dtype, times, ledger_bytes, copy=None):
    """Make one record and print it as a line of progress."""
    deciles = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    rate = ledger_bytes / median / 1000
    made = {
        "implementation": implementation,
        "shape": list(shape),
        "dtype": dtype,
        "median_us": round(median, 3),
        "p10_us": round(deciles[0], 3),
        "p90_us": round(deciles[-1], 3),
        "ledger_bytes": ledger_bytes,
        "gb_s": round(rate, 1),
        "fraction_of_copy": round(rate / copy["gb_s"], 4) if copy else 1.0,
    }
    print(f"{implementation:36} {shape!s:14} {dtype:9} {median:9.2f} µs  {rate:7.0f} GB/s", flush=True)
    return made


def measure_ladder(shape, dtype):
    """Check and time a copy and every kernel of the ladder; return their records."""
    S, R = shape
    size = 4 if dtype == "float32" else 2
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(3, -(-2 * l2_bytes // (3 * S * R * size)))
    sets = {}
    for columns in (R // 2, R) if (shape, dtype) == (LARGE, "float16") else (R // 2,):
        sets[columns] = [inputs(shape, dtype, columns) for _ in range(count)]
    copy = record("copy", shape, dtype, graph_times(torch.clone, [b[:1] for b in sets[R // 2]]), 2 * S * R * size)
    records = [copy]
    for implementation, build, reference, columns in ladder(shape, dtype):
        kernel = build()
        x, cos, sin = sets[columns][0]
        torch.testing.assert_close(
            kernel(x, cos, sin), reference(x, cos[:, : R // 2], sin[:, : R // 2]), rtol=tolerance, atol=tolerance
        )
        ledger_bytes = 2 * S * (R + columns) * size
        times = graph_times(kernel, sets[columns])
        records.append(record(implementation, shape, dtype, times, ledger_bytes, copy))
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


def count(implementation):
    """Run one launch under ncu and return its counters."""
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", "rope_kernel", "--launch-count", "1", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, __file__, "--launch", implementation]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = output[output.index('"ID"') :]
    row = list(csv.DictReader(table.splitlines()))[1]  # the first row holds the units
    values = {name: int(float(row[metric].replace(",", ""))) for name, metric in METRICS.items()}
    print(f"{implementation:36} counters {values}", flush=True)
    return {"implementation": implementation, "shape": list(LARGE), "dtype": "float16", **values}


def launch_once(implementation):
    """Launch one kernel of the ladder once: what ncu looks at."""
    for name, build, _, columns in ladder(LARGE, "float16"):
        if name == implementation:
            build()(*inputs(LARGE, "float16", columns))
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
    }


def head_commit():
    """Return the commit of this checkout, or "unknown" outside one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return result.stdout.strip() if result and result.returncode == 0 else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="the JSON file to write")
    parser.add_argument("--commit", help="the commit measured, where the history is not at hand")
    parser.add_argument("--launch", metavar="NAME", help="only launch this kernel once (for ncu)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No CUDA device: times of the C backend would say nothing about the kernels.")
    tilelang.set_log_level("WARNING")
    if options.launch:
        launch_once(options.launch)
        return
    if options.out is None:
        parser.error("--out takes the path of the JSON file to write")
    result = {"provenance": provenance(options.commit or head_commit()), "records": [], "counters": []}
    for shape, dtype in ((LARGE, "float16"), (SMALL, "float16"), (LARGE, "bfloat16"), (LARGE, "float32")):
        result["records"] += measure_ladder(shape, dtype)
        torch.cuda.empty_cache()
    if shutil.which("ncu"):
        result["counters"] = [count(implementation) for implementation in COUNTED]
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
