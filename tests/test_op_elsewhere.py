"""apply_rope under compilers, graphs and streams, in several processes and on several devices.

Docstrings name the public reports in which other implementations went wrong in the way that a test looks for.
"""

import os
import subprocess
import sys

import chapter
import pytest
import tilelang
import tilelang.language as T
import torch
from conftest import ROOT, needs_cuda
from oracle import assert_rounded_once, draw, draw_qk, right, tables
from torch._dynamo.testing import CompileCounterWithBackend

import rope_kernels as rk
from rope_kernels import apply_rope


def test_op_keeps_the_rules_of_torch_library(device):
    (q, k), (cos, sin) = draw_qk(device=device), tables(20, device=device)
    ids = torch.randint(0, 20, (9,), device=device)
    heads_first, k_first = (draw(2, heads, 5, 64, device=device).transpose(1, 2) for heads in (5, 2))
    for x, other, positions in (
        (q.clone().requires_grad_(), k.clone().requires_grad_(), ids),
        (q, k, None),
        (q.bfloat16(), None, None),
        (heads_first, k_first, ids[:5].expand(2, 5)),
        (draw(9, 64, 5, device=device).mT, draw(9, 64, 2, device=device).mT, ids),
    ):
        torch.library.opcheck(rk._op, (x, other, cos, sin, positions, "neox", 0, False))
    for x, other, positions in ((q, k, ids), (q, None, None)):
        torch.library.opcheck(rk._inplace_op, (x, other, cos, sin, positions, "neox", 0, False))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_graph_is_whole_and_serves_every_length(device, inplace):
    """vllm-project/vllm#22453, huggingface/transformers#35716."""
    cos, sin = tables(99, device=device)

    def layer(qkv, ids):
        q, k, _ = qkv.split([5, 2, 2], dim=1)
        return apply_rope(q, k, cos, sin, ids, inplace=inplace)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    builds = {}
    for call, tokens in enumerate((7, 64, 33, 33, 1, 12, 1)):
        qkv = draw(tokens, 9, 64, device=device)
        inputs = [qkv.clone().requires_grad_(not inplace) for _ in range(2)]
        ids = torch.randint(1, 99, (tokens,), device=device)
        outputs = layer(inputs[0], ids), compiled(inputs[1], ids)
        assert all(map(torch.equal, *outputs))
        if inplace:
            assert torch.equal(*inputs) and not torch.equal(inputs[1], qkv)
        else:
            for y, z in outputs:
                (y.pow(2).sum() + z.pow(3).sum()).backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad)
        builds[call] = counter.frame_count
    # one build for the first length, one for any length, one for a single token, which torch always treats apart
    assert builds[3] <= 2 and builds[6] <= 3


@needs_cuda
@pytest.mark.parametrize("inplace", [False, True])
def test_graph_replay_reads_new_positions(inplace):
    """huggingface/candle#3728. Capture would also fail on anything that makes the host wait."""
    (q, k), (cos, sin) = draw_qk(dtype=torch.bfloat16, device="cuda"), tables(99, device="cuda")
    static_q, static_k, ids = q.clone(), k.clone(), torch.full((9,), 5, device="cuda")

    def step():
        return apply_rope(static_q, static_k, cos, sin, ids, inplace=inplace)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = step()
    for new in (torch.full((9,), 6), torch.arange(98, 89, -1), torch.full((9,), 5)):
        ids.copy_(new)
        static_q.copy_(q), static_k.copy_(k)
        graph.replay()
        torch.cuda.synchronize()
        eager = apply_rope(q, k, cos, sin, ids)
        assert torch.equal(y, eager[0]) and torch.equal(z, eager[1])
        assert_rounded_once(y, right(q, cos, sin, ids))


@tilelang.jit
def late_writer(n, dtype):
    """Give the next kernel leave to start, then sleep, and only then write."""

    @T.prim_func
    def write(x: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype)):
        with T.Kernel(1, threads=128):
            T.pdl_trigger()
            T.evaluate(T.call_extern("void", "__nanosleep", T.uint32(50000)))
            for i in T.serial(-(-n // 128)):
                at = i * 128 + T.get_thread_binding()
                if at < n:
                    y[at] = x[at]

    return write


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9,), reason="needs a GPU of sm_90 or later"
)
@pytest.mark.parametrize("inplace", [False, True])
def test_overlapped_start_waits_for_what_is_written_late(inplace):
    """q, k and the ids come from kernels that let their successor start long before they write."""
    (q, k), (cos, sin) = draw_qk(dtype=torch.bfloat16, device="cuda"), tables(99, device="cuda")
    ids = torch.randint(1, 99, (9,), device="cuda")
    given = [torch.zeros_like(x) for x in (q, k, ids)]
    writers = [late_writer(x.numel(), str(x.dtype).split(".")[1]) for x in (q, k, ids)]

    def steps(last):
        for i in sorted(range(3), key=lambda i: i == last):
            writers[i]((q, k, ids)[i].view(-1), given[i].view(-1))
        results = apply_rope(*given[:2], cos, sin, given[2], inplace=inplace)
        return given[:2] if inplace else results

    for last in range(3):  # the wait is for the kernel just before
        steps(last)
        for x in given:
            x.zero_()
        torch.cuda.synchronize()
        for got, x in zip(steps(last), (q, k), strict=True):
            assert_rounded_once(got, right(x, cos, sin, ids))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = steps(last)
        for x in given:
            x.zero_()
        graph.replay()
        for got, x in zip(captured, (q, k), strict=True):
            assert_rounded_once(got, right(x, cos, sin, ids))


@needs_cuda
def test_graph_with_several_streams_is_captured():
    """q is written on a second stream, which joins before the rotation."""
    (q, k), (cos, sin) = draw_qk(700, torch.bfloat16, "cuda"), tables(999, device="cuda")
    ids = torch.arange(700, device="cuda") + 1
    work, side = [torch.zeros_like(x) for x in (q, k)], torch.cuda.Stream()
    apply_rope(*work, cos, sin, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                torch.neg(q, out=work[0])
            torch.neg(work[0], out=work[0])
        torch.neg(k, out=work[1])
        torch.neg(work[1], out=work[1])
        torch.cuda.current_stream().wait_stream(side)
        y, z = apply_rope(*work, cos, sin, ids)
    for _ in range(3):
        graph.replay()
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))
        for x in (*work, y, z):
            x.zero_()


SHARDED = """
import sys, datetime, tilelang, torch, torch.distributed as dist
from rope_kernels import apply_rope

tilelang.set_log_level("WARNING")
rank, store, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=120))
torch.manual_seed(0)
q, k = torch.randn(16, 5, 64).to(device), torch.randn(16, 2, 64).to(device)
angle = torch.arange(50.0)[:, None] * torch.logspace(0, -4, 32)
cos, sin = angle.cos().to(device), angle.sin().to(device)
quarters = torch.arange(16).chunk(4)
halves = torch.cat((quarters[0], quarters[3])), torch.cat((quarters[1], quarters[2]))

ids = torch.cat((torch.arange(11), torch.arange(30, 35)))  # two packed sequences, known to rank 0 alone
mine = torch.empty(8, dtype=torch.int64)
dist.scatter(mine, [ids[half] for half in halves] if rank == 0 else None)
half = halves[rank].to(device)
local = torch.cat(apply_rope(q[half], k[half], cos, sin, mine.to(device)), dim=1).cpu()
parts = [torch.empty_like(local) for _ in halves]
dist.all_gather(parts, local)
if rank == 0:
    together = torch.empty(16, 7, 64)
    for half, part in zip(halves, parts):
        together[half] = part
    alone = torch.cat(apply_rope(q, k, cos, sin, ids.to(device)), dim=1).cpu()
    print("equal" if torch.equal(together, alone) else "different")
dist.destroy_process_group()
"""


def test_sharded_sequence_needs_position_ids_alone(tmp_path):
    """Two processes with a zigzag half each: only position ids need to travel."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "store"), chapter.DEVICE],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (said, errors), (_, more) = (process.communicate(timeout=300) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert said.split()[-1:] == ["equal"], errors + more


FORKED = """
import os, torch, rope_kernels as rk
assert not torch.cuda.is_initialized()
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
q = torch.randn(9, 5, 64, device="cuda")
cos, sin = (t.cuda() for t in rk.rope_table(rk.rope_frequencies(64)[0], 9))
y = rk.apply_rope(q, None, cos, sin)[0]
right = rk.torch_rope_neox(q, cos[:, None], sin[:, None])
os._exit(not torch.allclose(y, right, atol=1e-5))
"""


@needs_cuda
def test_a_process_forked_after_the_import_uses_the_gpu():
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_is_served_while_the_first_is_current():
    for number in (1, 0, 1):
        place = f"cuda:{number}"
        (q, k), (cos, sin), ids = draw_qk(device=place), tables(99, device=place), torch.arange(9, device=place) + 3
        value = right(q, cos, sin, ids)
        y, z = apply_rope(q, k, cos, sin, ids)
        assert y.device == q.device and torch.cuda.current_device() == 0
        assert_rounded_once(y, value)
        assert_rounded_once(z, right(k, cos, sin, ids))
        apply_rope(q, None, cos, sin, ids, inplace=True)
        assert_rounded_once(q, value)
    with pytest.raises(ValueError, match="cos takes q's device cuda:1, got cuda:0"):
        apply_rope(q, k, cos.to("cuda:0"), sin, ids)


def test_nothing_is_left_in_the_temporary_directory(tmp_path):
    """With an empty kernel cache, where each build goes through files of its own."""
    for name in ("cache", "tmp"):
        (tmp_path / name).mkdir()
    code = "import torch, rope_kernels as rk; x = torch.ones(4, 2, 8); c = torch.ones(4, 4); y = torch.ones(4, 8)"
    code += (
        "; rk.apply_rope(x, x, c, c); rk.rope_neox_blocked(4, 8, 4, 'float32')(*(a.to(rk_device) for a in (y, c, c)))"
    )
    code = f"rk_device = {chapter.DEVICE!r}; {code}"
    places = {"TILELANG_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | places
    )
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "cache").iterdir()) and not list((tmp_path / "tmp").iterdir())
