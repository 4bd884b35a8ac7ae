"""Kernels ①–④ against float64, on TileLang's C backend and, where there is one, on a CUDA device."""

import importlib.util
import inspect
import math
import pathlib
import re
import shutil
import subprocess
import sys

import chapter
import pytest
import tilelang
import torch
from conftest import BACKENDS, ROOT, build, copied_alone, needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import angles, assert_rounded_once, draw, draw_qk, right, rotate, tables

import rope_kernels as rk

NAIVE, NEOX, INTERLEAVED = rk.rope_neox_naive, rk.rope_neox_blocked, rk.rope_interleaved_blocked
CONVENTION = {"rope_neox_naive": "neox", "rope_neox_blocked": "neox", "rope_interleaved_blocked": "interleaved"}
REFERENCE = {"neox": rk.torch_rope_neox, "interleaved": rk.torch_rope_interleaved}
every_factory = pytest.mark.parametrize("factory", [NAIVE, NEOX, INTERLEAVED], ids=lambda f: f.__name__)

BACKEND_DTYPES = [
    ("c", "float32"),
    ("c", "float16"),
    *(pytest.param("cuda", dtype, marks=needs_cuda) for dtype in ("float32", "float16", "bfloat16")),
]
# widths with and without powers of two, one row and many, each blk_s
SHAPES = [(1, 2, 1), (5, 6, 1), (12, 10, 4), (64, 64, 32), (8, 72, 4), (16, 72, 16), (4, 80, 1), (24, 80, 8)]
SHAPES += [(32, 96, 32), (8, 96, 4), (16, 128, 16), (6, 192, 2), (32, 256, 16)]


def between_guards(tensor, guard):
    """Return a view that equals `tensor`, with a row of `guard` before and after it, and the whole buffer."""
    buffer = torch.full((tensor.shape[0] + 2, tensor.shape[1]), guard, dtype=tensor.dtype, device=tensor.device)
    buffer[1:-1] = tensor
    return buffer[1:-1], buffer


def draw_rows(S, R, dtype, device):
    x, angle = torch.randn(S, R), angles(range(1, S + 1), R)
    return [tensor.to(dtype).to(device) for tensor in (x, angle.cos(), angle.sin())]


def check(factory, backend, dtype, S, R, *rest, threads=256):
    """Run between guards over poison and compare with float64 and with the torch reference."""
    torch_dtype = getattr(torch, dtype)
    device = "cpu" if backend == "c" else "cuda"
    kernel = build(factory, backend, S, R, *rest, dtype=dtype, threads=threads)
    x, cos, sin = (between_guards(tensor, float("nan"))[0] for tensor in draw_rows(S, R, torch_dtype, device))
    before = x.clone()
    y, buffer = between_guards(torch.full_like(x, float("nan")), 7.0)
    kernel(x, cos, sin, y)
    convention = CONVENTION[factory.__name__]
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    right = rotate(x, cos, sin, convention)
    torch.testing.assert_close(y.double().cpu(), right, rtol=tolerance, atol=tolerance)
    reference = REFERENCE[convention](x, cos, sin)
    if dtype == "float32":
        torch.testing.assert_close(y, reference, rtol=0, atol=2e-6)
    else:  # products of 2-byte floats are exact in float32, so no compiler can round them differently
        assert torch.equal(y, reference)
    assert torch.equal(x, before)
    assert (buffer[[0, -1]] == 7.0).all()


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize(("S", "R", "blk_s"), SHAPES)
@pytest.mark.parametrize("factory", [NEOX, INTERLEAVED], ids=lambda f: f.__name__)
def test_blocked_kernels_over_shapes(factory, backend, dtype, S, R, blk_s):
    check(factory, backend, dtype, S, R, blk_s)


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize(
    ("S", "R"), [(1, 2), (5, 6), (37, 64), (3, 72), (1, 80), (5, 96), (16, 128), (2, 192), (9, 256)]
)
def test_naive_kernel_over_shapes(backend, dtype, S, R):
    check(NAIVE, backend, dtype, S, R)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factory", [NEOX, INTERLEAVED], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("S", "R", "blk_s"), [(32, 256, 32), (16, 768, 16)])
def test_tiles_of_32_kib_and_of_the_whole_48_build(factory, backend, S, R, blk_s):
    check(factory, backend, "float16", S, R, blk_s)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    name=st.sampled_from(list(CONVENTION)),
    half=st.integers(1, 128),
    blk_s=st.integers(1, 32),
    blocks=st.integers(1, 3),
    threads=st.sampled_from([32, 64, 100, 256, 1024]),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_drawn_shapes_and_thread_counts(backend, name, half, blk_s, blocks, threads):
    factory = getattr(rk, name)
    rest = () if factory is NAIVE else (blk_s,)
    check(factory, backend, "float16", blk_s * blocks, 2 * half, *rest, threads=threads)


@every_factory
def test_tiles_of_every_width_lower_for_cuda(factory):
    """Layout inference has rejected widths before; building CUDA text needs no GPU."""
    for R in (2, 6, 62, 64, 72, 80, 96, 128, 160, 192, 256):
        for blk_s in (1, 4) if factory is not NAIVE else (None,):
            for dtype in ("float16", "float32"):
                rest = () if blk_s is None else (blk_s,)
                assert "__global__" in chapter.cuda_source(factory, 48, R, *rest, dtype=dtype)


def test_widths_of_accesses_in_generated_cuda():
    def widths(factory):
        return chapter.global_accesses(chapter.cuda_source(factory, 64, 128))

    staged = {("x", "load"): {16: 1}, ("cos", "load"): {8: 1}, ("sin", "load"): {8: 1}}
    single = {("x", "load"): {2: 2}, ("cos", "load"): {2: 1}, ("sin", "load"): {2: 1}, ("y", "store"): {2: 2}}
    assert widths(NAIVE) == single
    assert widths(NEOX) == {**staged, ("y", "store"): {8: 2}}
    assert widths(INTERLEAVED) == {**staged, ("y", "store"): {2: 2}}
    assert "if (((int)threadIdx.x) < 64)" in chapter.cuda_source(NAIVE, 64, 128)


def test_more_than_2_to_the_31_elements_are_addressed_in_64_bits():
    for factory in (NAIVE, NEOX, INTERLEAVED):
        stores = [
            line for line in chapter.cuda_source(factory, 2**24, 256).splitlines() if re.search(r"\by( \+|\[)", line)
        ]
        assert stores and all("(int64_t)" in line for line in stores)


@every_factory
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factory_works_when_copied_alone(factory, backend, tmp_path, monkeypatch):
    """On CUDA the bare text is enough; elsewhere it takes the file's one backend setting beside it."""
    x, cos, sin = draw_rows(48, 64, torch.float16, "cpu" if backend == "c" else "cuda")
    y = copied_alone(factory, backend, tmp_path, monkeypatch)(48, 64)(x, cos, sin)
    assert torch.equal(y, REFERENCE[CONVENTION[factory.__name__]](x, cos, sin))


@every_factory
def test_bad_arguments_are_refused(factory):
    blocked = factory is not NAIVE
    integers = {"S": 16, "R": 64, "threads": 256} | ({"blk_s": 16} if blocked else {})
    for name in integers:
        for value in (0, -2):
            with pytest.raises(ValueError, match=f"{name} must be at least 1, got {name}={value}"):
                factory(**integers | {name: value})
    with pytest.raises(ValueError, match="rope dim must be even, got R=7"):
        factory(16, 7)
    with pytest.raises(ValueError, match="threads takes at most 1024, got threads=2048"):
        factory(16, 64, threads=2048)
    with pytest.raises(ValueError, match="dtype takes float16, bfloat16 or float32, got 'float64'"):
        factory(16, 64, dtype="float64")
    with tilelang.tvm.target.Target("c"), pytest.raises(ValueError, match="dtype bfloat16 needs CUDA: the C backend"):
        factory.func(16, 64, dtype="bfloat16")
    factory.func(16, 64, dtype="bfloat16")  # no target named: for whichever builds it
    factory.func(16, 64, threads=1024)
    if blocked:
        with pytest.raises(ValueError, match="needs S % blk_s == 0, got S=20, blk_s=16"):
            factory(20, 64)
        with pytest.raises(ValueError, match="blk_s=32, R=256, float32 takes 65536 bytes of shared memory, over 49152"):
            factory(32, 256, 32, "float32")
        with pytest.raises(ValueError, match="blk_s=4, R=3074, float16 takes 49184 bytes of shared memory, over 49152"):
            factory(4, 3074, 4)


@every_factory
def test_kernels_refuse_tensors_of_another_shape_or_dtype(factory):
    """Dao-AILab/flash-attention#45: a table of R columns must not be read as one of R/2."""
    kernel = factory(16, 64, dtype="float16")
    x, cos, sin = draw_rows(16, 64, torch.float16, chapter.DEVICE)
    wrong = [
        (x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
        (x, cos[:8], sin),
        (x[:8], cos, sin),
        (x.float(), cos, sin),
        (x.T.contiguous().T, cos, sin),
    ]
    for arguments in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            kernel(*arguments)


def test_factories_show_their_own_name_docstring_and_source():
    for name in CONVENTION:
        factory = getattr(rk, name)
        assert factory.__name__ == name
        assert "p = 0 … R/2−1" in factory.__doc__
        assert inspect.getsource(factory).startswith("@tilelang.jit(out_idx=[3])")


# --------------------------------------------------------------------------------------------- kernel ④


def amid(guard, x, contiguous, pad, more):
    """Return a view that equals x amid guards: at both ends, or around every axis at strides divided by `pad`."""
    if contiguous:
        buffer = torch.full((x.numel() + 128,), guard, dtype=x.dtype)
        view = buffer[64:-64].view(x.shape)
    else:
        *lead, heads, D = x.shape
        sizes = (*(n + 2 for n in lead), heads + 2 + more, (2 + -(-D // pad)) * pad)
        buffer = torch.full(sizes, guard, dtype=x.dtype, device=x.device)
        view = buffer[(*(slice(1, -1) for _ in lead), slice(1, heads + 1), slice(pad, pad + D))]
    view.copy_(x)
    return view, buffer


def check_kernel(backend, heads_q, heads_k, D, R, start=0, mode="neox", dtype="float16", table_dtype="float32",
                 ids="int64", inverse=False, inplace=False, batched=False, **geometry):  # fmt: skip
    """Build once and run for several numbers of tokens, table lengths and, on CUDA, strides of all tensors."""
    on_c, device = backend == "c", "cpu" if backend == "c" else "cuda"
    x_dtype, t_dtype = getattr(torch, dtype), getattr(torch, table_dtype)
    pad = max(geometry["width"], 16 // x_dtype.itemsize)
    names = mode, dtype, table_dtype, ids, inverse, inplace, batched
    kernel = build(rk.rope_per_token, backend, heads_q, heads_k, D, R, start, *names, **geometry)
    for call, (tokens, P) in enumerate(((heads_q, 40), (1, 3), (9, 17))):
        lead = (2, tokens) if batched else (tokens,)
        cos, sin = tables(P, R, t_dtype, device)
        if not on_c and call:  # halves of one cache: rows lie R apart
            cos, sin = torch.cat((cos, sin), 1).chunk(2, 1)
        rows = torch.randint(0, P, lead) if ids else torch.arange(tokens)
        outside = torch.zeros(lead, dtype=torch.bool)
        given = rows.clone()
        if ids and tokens > 4:
            outside[..., 1:4] = True
            given[..., 1:4] = torch.tensor([-1, P, 2**32 if ids == "int64" else 2**31 - 1])
        positions = given.to(getattr(torch, ids)).to(device) if ids else cos
        if ids and not on_c:
            positions = torch.stack((positions, positions * 0 - 1), -1)[..., 0]
        x = [draw(*lead, heads, D, dtype=x_dtype) for heads in ((heads_q, heads_k) if heads_k else (heads_q,))]
        sources = [amid(5.0, a.to(device), on_c, pad, call) for a in x]
        targets = sources if inplace else [amid(7.0, a.to(device) * math.nan, on_c, pad, call) for a in x]
        q, k, y, z = (pair[0] for pair in (sources[0], sources[-1], targets[0], targets[-1]))
        kernel(q, k, cos, sin, positions, *(() if inplace else (y, z)))
        for before, (after, buffer) in zip(x, targets, strict=True):
            value = right(before, cos, sin, rows, mode, start, inverse)
            assert_rounded_once(after[~outside], value[~outside])
            passed = [*range(start), *range(start + R, D)]
            assert torch.equal(after[..., passed].cpu(), before[..., passed])
            assert after[outside][..., start : start + R].isnan().all()
            guard = 5.0 if inplace else 7.0
            after.fill_(guard)
            assert (buffer == guard).all()  # what lies around it is untouched
        if not inplace:
            for before, (source, buffer) in zip(x, sources, strict=True):
                assert torch.equal(source.cpu(), before)
                source.fill_(5.0)
                assert (buffer == 5.0).all()


# head counts free: grouped, one kv head, none, not powers of two; widths R ≤ D at a start, not powers of two either
KERNELS = [
    dict(heads_q=24, heads_k=8, D=80, R=80, dtype="float32", inverse=True),
    dict(heads_q=37, heads_k=3, D=77, R=72, start=3, mode="interleaved", table_dtype="own", ids="int32"),
    dict(heads_q=5, heads_k=5, D=96, R=96, mode="interleaved", dtype="float32", inplace=True),
    dict(heads_q=12, heads_k=0, D=192, R=64, start=128, inplace=True, inverse=True),
    dict(heads_q=2, heads_k=1, D=8, R=6, dtype="float32", ids=None),
    dict(heads_q=3, heads_k=1, D=256, R=16, start=64, batched=True),  # more channels pass than turn
    dict(heads_q=5, heads_k=2, D=66, R=64, table_dtype="own"),  # the last two channels pass
    dict(heads_q=3, heads_k=2, D=72, R=72, mode="interleaved"),  # R/2 is no multiple of 8
    dict(heads_q=3, heads_k=0, D=8, R=8, mode="interleaved", batched=True, ids=None),
    dict(heads_q=6, heads_k=2, D=80, R=20, batched=True),  # moves of other widths for what passes
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: "-".join(map(str, case.values())))
def test_every_head_is_rotated_and_nothing_around_it_touched(backend, case):
    """sgl-project/sglang#20559, NVIDIA/Megatron-LM#7103, paiml/aprender#2079: heads left out, or written past.

    vllm-project/vllm-ascend#12723, ModelTC/LightLLM#1459, sgl-project/sglang#35096: widths that are no power of two.
    """
    half = case.get("dtype", "float16") == "float16"
    for dtype in ("float16", "bfloat16") if half and backend == "cuda" else (case.get("dtype", "float16"),):
        table_dtype = dtype if case.get("table_dtype") == "own" else "float32"
        widest = 8 if half else 4
        for width, per_thread in ((1, 1), (widest, 2), *[(widest, 1)] * (backend == "cuda")):
            geometry = {"width": width, "per_thread": per_thread}
            check_kernel(backend, **case | {"dtype": dtype, "table_dtype": table_dtype} | geometry)


def test_heads_of_more_than_1024_lanes_are_served_on_c():
    check_kernel("c", 2, 1, 4098, 4096, 1, width=1)


def accesses(*args, **kwargs):
    """The bytes by which x is loaded and stored, and the tables read, in CUDA for sm_90; no GPU is needed."""
    source = chapter.cuda_source(rk.rope_per_token, *args, **kwargs).split("\n", 1)[1]
    assert not re.findall(r"(?<!&\()\b(?:q|k|y|z|cos_1|sin_1)\[", source)  # reached by these moves alone
    found = {}
    for way, name, size in re.findall(r"\b(load|store|load_row)\(\(&\((x|c|s)(?:_\d)?\[.*, (\d+)\);", source):
        found.setdefault("y" if way == "store" else name, set()).add(int(size))
    assert found["c"] == found["s"]
    return found["x"], found["y"], found["c"]


@pytest.mark.parametrize("per_thread", [1, 2])
@pytest.mark.parametrize("heads_q", [32, 14])  # with 14 a block has heads of both q and k
@pytest.mark.parametrize("width", [8, 4, 2, 1])
def test_accesses_are_as_wide_as_the_strides_allow(width, heads_q, per_thread):
    found = accesses(heads_q, 8, 128, 128, width=width, per_thread=per_thread)
    assert found == ({2 * width}, {2 * width}, {4 * width})


def test_accesses_are_wide_in_place_for_trailing_channels_and_in_float32():
    assert accesses(32, 8, 128, 128, mode="interleaved", inplace=True, batched=True, width=8) == ({16}, {16}, {16})
    assert accesses(32, 8, 192, 64, 128, "interleaved", width=8) == ({16}, {16}, {16})
    assert accesses(14, 2, 128, 64, 32, width=8, table_dtype="bfloat16") == ({16}, {16}, {16})  # passed on both sides
    assert accesses(32, 8, 128, 128, dtype="float32", width=8) == ({16}, {16}, {16})
    assert accesses(32, 8, 80, 20, width=8) == ({4, 8}, {4, 8}, {8})  # what passes moves by more than what turns


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler, nvcc")


@needs_nvcc
@pytest.mark.parametrize(
    "options",
    [
        {"arch": "sm_90", "width": 8, "trigger": True},
        {"arch": "sm_90", "width": 8, "mode": "interleaved", "index_dtype": None, "per_thread": 2},
        {"arch": "sm_80", "width": 8, "inplace": True, "batched": True, "table_dtype": "bfloat16"},
        {"arch": "sm_80", "width": 1, "dtype": "float32", "mode": "interleaved", "inverse": True},
        {"arch": "sm_75", "width": 8, "dtype": "float16"},  # before PTX knew cache hints
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_cuda_compiles(options):
    """Types and PTX that only nvcc looks at, on machines without a GPU as well."""
    target = {"kind": "cuda", "arch": options["arch"]}
    rest = {name: value for name, value in options.items() if name != "arch"}
    with tilelang.tvm.target.Target(target):
        function = rk.rope_per_token.func.orig_func(5, 2, 128, 64, 64, **rest)
        tilelang.compile(function, target=target, pass_configs=rk.rope_per_token.cuda_pass_configs)


def test_what_was_made_for_the_cpu_is_not_taken_on_cuda():
    """TileLang keeps a function by its arguments alone."""
    sizes = 11, 3, 88, 88
    rk._in_c(*sizes, dtype="float16")
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90"}):
        assert "q_0" in rk.rope_per_token.func(*sizes, dtype="float16").script()


OVERLAPPED = {
    "gathered": {"width": 8},
    "narrow": {"width": 1, "mode": "interleaved"},
    "in place": {"width": 8, "inplace": True, "index_dtype": None, "trigger": True},
}


def lowered(arch, options):
    """The whole CUDA text of kernel ④ for this GPU, with a part of each head passed on."""
    return chapter.cuda_text(rk.rope_per_token, 5, 2, 128, 64, 64, arch=arch, **options)


@pytest.mark.parametrize("options", OVERLAPPED.values(), ids=OVERLAPPED)
def test_an_overlapped_start_waits_before_it_reads(options):
    """From sm_90 on blocks come up before the kernel ahead of them has ended."""
    wait, leave = "cudaGridDependencySynchronize();", "cudaTriggerProgrammaticLaunchCompletion();"
    source = lowered("sm_90", options)
    body = source[source.rindex('extern "C"') :]
    assert body.index(wait) < re.search(r"\b(q|k|cos_1|sin_1|positions)\[", body).start() and source.count(wait) == 1
    assert source.count(leave) == options.get("trigger", 0) and body.find(leave) < body.index("&(q[")
    assert not options.get("trigger") or body.index(wait) < body.index(leave)
    assert "__restrict__" not in source  # it lets nvcc move a load above anything
    assert 'asm volatile("ld.global.L2' in source and source.count("asm volatile") == 1
    older = lowered("sm_80", options)
    assert wait not in older and leave not in older


@needs_nvcc
@pytest.mark.parametrize("options", OVERLAPPED.values(), ids=OVERLAPPED)
def test_nvcc_moves_no_read_above_the_wait(options):
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90"}):
        ptx = tilelang.contrib.nvcc.get_ptx_from_source(lowered("sm_90", options))
    body = ptx[ptx.index(".entry rope_kernel") :]
    assert body.index("griddepcontrol.wait") < min(body.index("ld.global"), body.index("st.global"))
    assert "ld.global.nc" not in body


@needs_nvcc
def test_nvcc_keeps_the_order_of_x_id_and_row():
    """Two vectors of x, then the id, then four vectors of the tables."""
    text = chapter.cuda_text(rk.rope_per_token, 5, 2, 64, 64, arch="sm_90", width=8)
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90"}):
        ptx = tilelang.contrib.nvcc.get_ptx_from_source(text)
    before, after = re.split(r"ld\.global\.[usb]64", ptx[ptx.index(".entry rope_kernel") :])
    vectors = "ld.global.L2::cache_hint.v4.u32"
    assert (before.count(vectors), after.count(vectors)) == (2, 4)


def test_threads_without_a_head_read_the_last_one():
    """5 + 2 heads don't fill four threads that take two each; all of x is asked for before the id is."""
    source = chapter.cuda_source(rk.rope_per_token, 5, 2, 128, 64, 64, width=8, per_thread=2)
    clamped = re.findall(r"int at_q\w* = min\(\(\(n\w* \* 4\) \+ first\w*\), 6\);", source)
    assert len(clamped) == 2 == source.count("load((&(x")
    first, second = (source.index(text) for text in ("load((&(x", "load_row((&(c"))
    assert first < source.index("= positions[") < second  # x, the id, its row
    assert len(re.findall(r"if \(.* < 7\) \{\n.*\n.*\n *store\(", source)) == 2 == source.count("store(")


def test_the_last_vector_that_passes_ends_where_the_head_ends():
    """Five channels in three threads of two: the C backend would hide it behind bounds checks."""
    source = chapter.cuda_source(rk.rope_per_token, 5, 2, 77, 72, 3, width=1)
    carried = [line for line in source.splitlines() if "&(x_1[" in line]
    assert len(carried) == 2 and all(re.search(r"min\(\(\(lane_\d \* 2\) \+ i_\d\), 4\)", line) for line in carried)


def test_every_width_lowers_with_64_bit_offsets():
    """tile-ai/tilelang#2398 and #2394, tile-ai/TileOPs#1269; offsets for more than 2³¹ elements."""
    for R, mode, dtype in ((6, "neox", "float16"), (192, "neox", "float32"), (72, "interleaved", "bfloat16")):
        source = chapter.cuda_source(rk.rope_per_token, 5, 3, R + 2, R, 2, mode, dtype, width=2, batched=R == 72)
        offsets = re.findall(r"&\((?:[qkyz]|cos_1|sin_1)\[(.*)|\bpositions\[(.*)", "\n".join(source.splitlines()[1:]))
        assert len(offsets) >= 7
        for offset in map("".join, offsets):
            assert "int64_t" in offset or offset.startswith("(index * ")  # an int64 by an int64


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernel_4_works_when_copied_alone(backend, tmp_path, monkeypatch):
    factory = copied_alone(rk.rope_per_token, backend, tmp_path, monkeypatch)
    kernel = factory(5, 2, 64, 64, dtype="float16", width=8)
    device = "cpu" if backend == "c" else "cuda"
    (q, k), (cos, sin) = draw_qk(dtype=torch.float16, device=device), tables(20, device=device)
    y, z, ids = torch.empty_like(q), torch.empty_like(k), torch.arange(9, device=device) + 4
    kernel(q, k, cos, sin, ids, y, z)
    assert_rounded_once(y, right(q, cos, sin, ids))
    assert_rounded_once(z, right(k, cos, sin, ids))
    with pytest.raises((ValueError, RuntimeError)):  # Dao-AILab/flash-attention#45: R columns are not R/2
        kernel(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), ids, y, z)


def test_bad_arguments_of_kernel_4_are_refused():
    good = dict(heads_q=4, heads_k=2, D=64, R=32)
    for changes, message in (
        ({"heads_q": 0}, "heads_q takes 1 or more, got heads_q=0"),
        ({"heads_k": -1}, "heads_k takes 0 or more, got heads_k=-1"),
        ({"R": 0}, "R takes an even rope dim, got R=0"),
        ({"R": 7}, "R takes an even rope dim, got R=7"),
        ({"start": -1}, "start takes 0 … 32 for R=32 of D=64, got start=-1"),
        ({"start": 33}, "start takes 0 … 32 for R=32 of D=64, got start=33"),
        ({"width": 3}, "width takes 1, 2, 4 or 8, got width=3"),
        ({"per_thread": 3}, "per_thread takes 1 or 2, got per_thread=3"),
        ({"threads": 48}, "threads takes 32, 64, 128 or 256, got threads=48"),
        ({"D": 0, "R": 2}, "start takes .* for R=2 of D=0"),
        ({"mode": "gptj"}, "mode takes neox or interleaved, got mode='gptj'"),
        ({"dtype": "float64"}, "dtype takes .*, got dtype='float64'"),
        ({"dtype": "float16", "table_dtype": "bfloat16"}, "table_dtype takes .*, got table_dtype='bfloat16'"),
        ({"index_dtype": "int16"}, "index_dtype takes .*, got index_dtype='int16'"),
        ({"D": 4098, "R": 4096, "start": 1}, "R=4096 at start=1 of D=4098 takes 2049 threads .*over 1024"),
    ):
        with tilelang.tvm.target.Target("cuda"), pytest.raises(ValueError, match=message):
            rk.rope_per_token.func(**good | changes)
    for dtypes in (("bfloat16", "float32"), ("bfloat16", "bfloat16")):  # tile-ai/tilelang#3201 and #2385
        with tilelang.tvm.target.Target("c"), pytest.raises(ValueError, match="bfloat16 needs CUDA: the C backend has"):
            rk.rope_per_token.func(4, 2, 64, 64, 0, "neox", *dtypes)


def test_values_of_another_type_are_refused_before_the_cache_answers():
    """16 == 16.0 and 1 == True: a cache that has built the one would serve the other."""
    rk.rope_neox_naive(1, 8)
    rk.rope_neox_blocked(16, 8)
    rk.rope_interleaved_blocked(16, 8)
    rk.rope_per_token(1, 1, 8, 8, 0, dtype="float16")
    for factory, good, wrong in (
        (NAIVE, {"S": 1, "R": 8}, {"S": (1.0, True, "1", None), "R": (8.0,), "threads": (256.0, True), "dtype": (2,)}),
        (NEOX, {"S": 16, "R": 8}, {"S": (16.0,), "blk_s": (16.0, True)}),
        (INTERLEAVED, {"S": 16, "R": 8}, {"S": (16.0,), "blk_s": (16.0, True)}),
        (
            rk.rope_per_token,
            {"heads_q": 1, "heads_k": 1, "D": 8, "R": 8, "start": 0, "dtype": "float16"},
            {
                **dict.fromkeys(("heads_q", "heads_k", "width", "per_thread"), (1.0, True)),
                **dict.fromkeys(("D", "R"), (8.0,)),
                "start": (0.0, False),
                **dict.fromkeys(("inverse", "inplace", "batched", "trigger"), (0, "false", None)),
            },
        ),
    ):
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(TypeError, match=f"^{name} takes (int|bool|str), got {value!r}"):
                    factory(**good | {name: value})


@pytest.mark.parametrize("factory", [NAIVE, NEOX, INTERLEAVED, rk.rope_per_token], ids=lambda f: f.__name__)
def test_what_a_raw_pointer_does_not_carry_is_refused(factory):
    """A pointer to nothing ends the process; one to a lazily negated or sparse tensor loses what it is."""
    x, cos, sin = draw_rows(16, 8, torch.float16, chapter.DEVICE)
    if factory is rk.rope_per_token:
        arguments = [*(x[:, None].clone() for _ in "qk"), cos.float(), sin.float(), torch.arange(16).to(x.device)]
        kernel = factory(1, 1, 8, 8, dtype="float16", inplace=True)
    else:
        arguments, kernel = [x, cos, sin], factory(16, 8)
    before = arguments[0].clone()
    for i, good in enumerate(arguments):
        wrong = [None, 0, 5, [1.0], "x", good.cpu().numpy(), good.to_sparse()]
        for value in wrong + [torch._neg_view(good)] * good.is_floating_point():
            with pytest.raises(TypeError, match="takes dense tensors that are not lazily negated"):
                kernel(*arguments[:i], value, *arguments[i + 1 :])
    assert torch.equal(arguments[0], before)
    kernel(*arguments)


def test_postponed_annotations_are_warned_of(tmp_path):
    """tile-ai/tilelang#1079: a factory whose annotations name what its body doesn't fails; the file warns of it."""
    assert "`from __future__ import annotations`\nmust not stand in a file" in rk.__doc__
    text = (ROOT / "rope_kernels.py").read_text()
    path = tmp_path / "postponed.py"
    path.write_text("from __future__ import annotations\n" + text[: text.index("\ndef apply_rope(")])
    spec = importlib.util.spec_from_file_location("postponed", path)
    postponed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(postponed)
    fails = []
    with tilelang.tvm.target.Target("cuda"):
        for factory in (NAIVE, NEOX, INTERLEAVED, rk.rope_per_token):
            arguments = (4, 2, 64, 64) if factory is rk.rope_per_token else (16, 64)
            try:
                built = getattr(postponed, factory.__name__).func(*arguments)
            except NameError:
                fails.append(factory)
            else:
                tilelang.tvm.ir.assert_structural_equal(built, factory.func(*arguments))
    assert fails == [NAIVE, rk.rope_per_token]


# ----------------------------------------------------------------------- python rope_kernels.py


def self_check(*prelude, env=None):
    """Run `python rope_kernels.py`, after lines that plant something."""
    path = pathlib.Path(rk.__file__)
    command = [sys.executable, str(path)]
    if prelude:
        command = [sys.executable, "-c", "\n".join(["import sys, torch, tilelang", *prelude])]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=env)


def test_the_self_check_passes_in_every_dtype_of_this_device():
    run = self_check()
    dtypes = ["float32", "float16"] + ["bfloat16"] * torch.cuda.is_available()
    right = [f"{name} {dtype}: correctness passed" for dtype in dtypes for name in [*CONVENTION, "rope_per_token"]]
    assert run.stdout.splitlines()[:-1] == right
    assert run.stdout.splitlines()[-1].startswith("device: ")
    assert run.returncode == 0


def test_the_self_check_reports_a_wrong_kernel_and_an_output_left_unwritten():
    run = self_check(
        "import rope_kernels as rk",
        "right = rk.torch_rope_interleaved",
        "rk.torch_rope_interleaved = lambda x, cos, sin: right(x, cos, -sin)",
        "def rope_neox_blocked(S, R, dtype):",
        "    return lambda x, cos, sin: torch.empty_like(x)",
        "rk.rope_neox_blocked = rope_neox_blocked",
        "sys.exit(1 if rk._self_check() else 0)",
    )
    assert run.returncode == 1
    assert "rope_neox_naive float16: correctness passed" in run.stdout
    assert "rope_neox_blocked float16: correctness FAILED, largest error nan" in run.stdout
    assert re.search(r"rope_interleaved_blocked float16: correctness FAILED, largest error \d", run.stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the C++ compiler matters only where there is no CUDA device")
def test_the_self_check_names_a_missing_compiler(tmp_path):
    run = self_check(env={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("No CUDA device and no C++ compiler")
