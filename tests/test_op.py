"""Kernel ④ and apply_rope against float64, on TileLang's C backend and, where there is one, on a CUDA device.

Docstrings name the public reports in which other implementations went wrong in the way that a test looks for.
"""

import importlib.util
import itertools
import math
import operator
import random
import re
import shutil
import subprocess
import sys

import chapter
import pytest
import tilelang
import tilelang.language as T
import torch
from conftest import BACKENDS, ROOT, build, copied_alone, needs_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import angles, rotate
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import rope_kernels as rk
from rope_kernels import apply_rope

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    """Where apply_rope runs: tensors on the CPU go through the C backend also beside a GPU."""
    return request.param


def draw(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape).to(dtype).to(device)


def draw_qk(tokens=9, dtype=torch.float32, device="cpu"):
    """The heads and width that most tests share, so that few kernels are built."""
    return draw(tokens, 5, 64, dtype=dtype, device=device), draw(tokens, 2, 64, dtype=dtype, device=device)


def tables(P, R=64, dtype=torch.float32, device="cpu", scale=1.0):
    """cos and sin of the positions 0 … P−1, with NaN before and after: a read past either end shows."""
    both = []
    for table in (angles(range(P), R).cos(), angles(range(P), R).sin()):
        buffer = torch.full((8 + P + 8, R // 2), math.nan, dtype=dtype, device=device)
        buffer[8:-8] = scale * table
        both.append(buffer[8:-8])
    return both


def right(x, cos, sin, ids, mode="neox", start=0, inverse=False):
    """float64: each token's own row for all of its heads; ids shaped like the leading dimensions, or (seq,)."""
    x, stop = x.double().cpu(), start + 2 * cos.shape[1]
    c, s = (table.double().cpu()[ids.cpu().long()][..., None, :] for table in (cos, sin))
    y = x.clone()
    y[..., start:stop] = rotate(x[..., start:stop], c, -s if inverse else s, mode)
    return y


def assert_rounded_once(y, value):
    """Half types: at most 2 elements in 1000 differ from the correctly rounded value, and those by one step."""
    y, value = y.detach().cpu(), value.detach()
    if y.dtype == torch.float32:
        torch.testing.assert_close(y.double(), value, rtol=0, atol=2e-6)
        return
    assert (y != value.to(y.dtype)).sum() <= math.ceil(0.002 * y.numel())
    assert ((y.double() - value).abs() <= torch.finfo(y.dtype).eps * value.abs() + 1e-6).all()


# --------------------------------------------------------------------------------------------- kernel ④


def between_guards(x, pad, more=0):
    """Return a view that equals x amid 7.0: tokens, heads and channels around it, strides multiples of `pad`."""
    tokens, heads, D = x.shape
    buffer = torch.full((tokens + 2, heads + 2 + more, (2 + -(-D // pad)) * pad), 7.0, dtype=x.dtype, device=x.device)
    view = buffer[1:-1, 1 : heads + 1, pad : pad + D]
    view.copy_(x)
    return view, buffer


def check_kernel(backend, heads_q, heads_k, D, R, start=0, mode="neox", dtype="float16", table_dtype="float32",
                 ids="int64", inverse=False, inplace=False, pad=1, per_thread=2):  # fmt: skip
    """Build once and run for several numbers of tokens, table lengths and, on CUDA, strides."""
    device = "cpu" if backend == "c" else "cuda"
    x_dtype, t_dtype = getattr(torch, dtype), getattr(torch, table_dtype)
    if backend == "c":
        row = (2 + -(-D // pad)) * pad
        options = {"strides": (*(((n + 2) * row, row) for n in (heads_q, heads_k or heads_q) * 2), (1,))}
    else:
        options = {"width": min(pad, 16 // x_dtype.itemsize)}  # strides and addresses are multiples of it
    options["per_thread"] = per_thread
    kernel = build(
        rk.rope_per_token,
        backend,
        heads_q,
        heads_k,
        D,
        R,
        start,
        mode,
        dtype,
        table_dtype,
        ids,
        inverse,
        inplace,
        **options,
    )
    for call, (tokens, P) in enumerate(((heads_q, 40), (1, 3), (9, 17))):
        cos, sin = tables(P, R, t_dtype, device)
        rows = torch.randint(0, P, (tokens,)) if ids else torch.arange(tokens)
        outside = torch.zeros(tokens, dtype=torch.bool)
        given = rows.clone()
        if ids and tokens > 4:
            outside[1:4] = True
            given[1:4] = torch.tensor([-1, P, 2**32 if ids == "int64" else 2**31 - 1])
        positions = given.to(getattr(torch, ids)).to(device) if ids else cos
        x = [draw(tokens, heads, D, dtype=x_dtype) for heads in ((heads_q, heads_k) if heads_k else (heads_q,))]
        more = 0 if backend == "c" else call
        sources = [between_guards(a.to(device), pad, more) for a in x]
        targets = sources if inplace else [between_guards(a.to(device) * math.nan, pad, more) for a in x]
        q, k, y, z = (pair[0] for pair in (sources[0], sources[-1], targets[0], targets[-1]))
        kernel(q, k, cos, sin, positions, *(() if inplace else (y, z)))
        for before, (after, buffer) in zip(x, targets, strict=True):
            value = right(before, cos, sin, rows, mode, start, inverse)
            assert_rounded_once(after[~outside], value[~outside])
            passed = [*range(start), *range(start + R, D)]
            assert torch.equal(after[..., passed].cpu(), before[..., passed])
            assert after[outside][..., start : start + R].isnan().all()
            after.fill_(7.0)
            assert (buffer == 7.0).all()  # what lies around it is untouched
        if not inplace:
            for before, (source, buffer) in zip(x, sources, strict=True):
                assert torch.equal(source.cpu(), before)
                source.fill_(7.0)
                assert (buffer == 7.0).all()


# head counts free: grouped, one kv head, none, not powers of two; widths R ≤ D at a start, not powers of two either
KERNELS = [
    dict(heads_q=24, heads_k=8, D=80, R=80, dtype="float32", inverse=True),
    dict(heads_q=37, heads_k=3, D=77, R=72, start=3, mode="interleaved", table_dtype="own", ids="int32"),
    dict(heads_q=5, heads_k=5, D=96, R=96, mode="interleaved", dtype="float32", inplace=True),
    dict(heads_q=12, heads_k=0, D=192, R=64, start=128, inplace=True, inverse=True),
    dict(heads_q=2, heads_k=1, D=8, R=6, start=0, dtype="float32", ids=None),
    dict(heads_q=3, heads_k=1, D=256, R=16, start=64),  # more pieces pass than a thread takes at once
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: "-".join(map(str, case.values())))
def test_kernel_skips_heads_or_touches_what_lies_around_them(backend, case):
    """sgl-project/sglang#20559, NVIDIA/Megatron-LM#7103, paiml/aprender#2079: heads left out, or written past.

    vllm-project/vllm-ascend#12723, ModelTC/LightLLM#1459, sgl-project/sglang#35096: widths that are no power of two.
    """
    half = case.get("dtype", "float16") == "float16"
    for dtype in ("float16", "bfloat16") if half and backend == "cuda" else (case.get("dtype", "float16"),):
        table_dtype = dtype if case.get("table_dtype") == "own" else "float32"
        for pad, per_thread in ((1, 1), (1, 2)) if backend == "c" else ((1, 2), (8, 1), (8, 2)):
            options = {"dtype": dtype, "table_dtype": table_dtype, "pad": pad, "per_thread": per_thread}
            check_kernel(backend, **case | options)


def accesses(*args, **kwargs):
    """The bytes by which each tensor is reached in CUDA generated for sm_90, without a GPU; 0 is a single element."""
    found = {}
    sizes = {"uint4": 16, "float4": 16, "uint2": 8, "uint1": 4}
    for line in chapter.cuda_source(rk.rope_per_token, *args, **kwargs).splitlines()[1:]:
        for kind, name in re.findall(r"\*\((\w+)\*\)\((q|k|y|z|cos|sin)(?:_1)? \+", line):
            found.setdefault(name, set()).add(sizes[kind])
        for name in re.findall(r"\b(q|k|y|z|cos|sin)(?:_1)?\[", line):
            found.setdefault(name, set()).add(16 if "load_16" in line or "condval" in line else 0)
    return found


@pytest.mark.parametrize("per_thread", [1, 2])
@pytest.mark.parametrize("heads_q", [32, 14])  # with 14 a block has heads of both q and k
@pytest.mark.parametrize(("width", "access"), [(8, 16), (4, 8), (2, 4), (1, 0)])
def test_accesses_are_narrower_or_wider_than_the_strides_allow(width, access, heads_q, per_thread):
    found = accesses(heads_q, 8, 128, 128, width=width, per_thread=per_thread)
    assert found == {**dict.fromkeys("qkyz", {access}), "cos": {16}, "sin": {16}}


def test_accesses_are_narrow_in_place_for_trailing_channels_or_in_float32():
    in_place = accesses(32, 8, 128, 128, mode="interleaved", inplace=True, batched=True, width=8)
    assert in_place == dict.fromkeys(["q", "k", "cos", "sin"], {16})
    everything = dict.fromkeys(["q", "k", "y", "z", "cos", "sin"], {16})
    assert accesses(32, 8, 192, 64, 128, "interleaved", width=8) == everything
    assert accesses(14, 2, 128, 64, 32, width=8) == everything  # channels pass on both sides
    assert accesses(32, 8, 128, 128, dtype="float32", width=4) == everything


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler, nvcc")
@pytest.mark.parametrize(
    "options",
    [
        {"arch": "sm_90", "width": 8},
        {"arch": "sm_90", "width": 8, "mode": "interleaved", "index_dtype": None, "per_thread": 1},
        {"arch": "sm_80", "width": 8, "inplace": True, "batched": True, "table_dtype": "bfloat16"},
        {"arch": "sm_80", "width": 1, "dtype": "float32", "mode": "interleaved", "inverse": True},
        {"arch": "sm_75", "width": 8, "dtype": "float16"},  # before PTX knew cache hints
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_cuda_does_not_compile(options):
    """Types and PTX that only nvcc looks at, on machines without a GPU as well."""
    target = {"kind": "cuda", "arch": options["arch"]}
    rest = {name: value for name, value in options.items() if name != "arch"}
    with tilelang.tvm.target.Target(target):
        function = rk.rope_per_token.__wrapped__(5, 2, 128, 64, 64, **rest)
        tilelang.compile(function, target=target, pass_configs=rk.rope_per_token.cuda_pass_configs)


OVERLAPPED = {
    "gathered": {"width": 8},
    "narrow": {"width": 1, "mode": "interleaved"},
    "in place": {"width": 8, "inplace": True, "index_dtype": None},
}


def lowered(arch, options):
    """The whole CUDA text of kernel ④ for this GPU, with a part of each head passed on."""
    return chapter.cuda_text(rk.rope_per_token, 5, 2, 128, 64, 64, arch=arch, **options)


@pytest.mark.parametrize("options", OVERLAPPED.values(), ids=OVERLAPPED)
def test_overlapped_start_reads_before_it_waits(options):
    """From sm_90 on blocks come up before the kernel ahead of them has ended."""
    wait = "cudaGridDependencySynchronize();"
    source = lowered("sm_90", options)
    body = source[source.rindex('extern "C"') :]
    accesses = [body.index(text) for text in ("&(q[" if options["width"] == 8 else "q[", "cos_1[")]
    assert body.index(wait) < min(accesses) and source.count(wait) == 1
    assert "__restrict__" not in source  # it lets nvcc move a load above anything
    assert 'asm volatile("ld.global.L2' in source and source.count("asm volatile") == 1
    assert wait not in lowered("sm_80", options)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler, nvcc")
@pytest.mark.parametrize("options", OVERLAPPED.values(), ids=OVERLAPPED)
def test_nvcc_moves_a_read_above_the_wait(options):
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90"}):
        ptx = tilelang.contrib.nvcc.get_ptx_from_source(lowered("sm_90", options))
    body = ptx[ptx.index(".entry rope_kernel") :]
    assert body.index("griddepcontrol.wait") < min(body.index("ld.global"), body.index("st.global"))
    assert "ld.global.nc" not in body


def test_threads_without_a_head_read_past_the_last_one():
    """5 + 2 heads don't fill a block; what passes a head by is loaded before the id is asked for."""
    source = lowered("sm_90", {"width": 8, "per_thread": 1})
    loads = [line for line in source.splitlines() if re.search(r"&\([qk]\[", line)]
    assert len(loads) == 4 and all("min(" in line for line in loads if "&(k[" in line)  # q's are inside "< 5"
    assert max(source.rindex("&(q["), source.rindex("&(k[")) < source.index("positions[")


def test_widths_that_layout_inference_has_rejected():
    """tile-ai/tilelang#2398 and #2394, tile-ai/TileOPs#1269; also 64-bit offsets, for more than 2³¹ elements."""
    for R, mode, dtype in (
        (6, "neox", "float16"),
        (192, "neox", "float32"),
        (72, "interleaved", "bfloat16"),
    ):
        source = chapter.cuda_source(rk.rope_per_token, 5, 3, R + 2, R, 2, mode, dtype, width=2)
        offsets = re.findall(r"\b[qkyz](?:_1)?(?: \+ |\[)(.*)", "\n".join(source.splitlines()[1:]))
        assert offsets and all("int64_t" in offset for offset in offsets)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernel_copied_alone(backend, tmp_path, monkeypatch):
    factory = copied_alone(rk.rope_per_token, backend, tmp_path, monkeypatch)
    on_c = {"strides": ((320, 64), (128, 64), (320, 64), (128, 64), (1,))}
    kernel = factory(5, 2, 64, 64, dtype="float16", **(on_c if backend == "c" else {}))
    device = "cpu" if backend == "c" else "cuda"
    (q, k), (cos, sin) = draw_qk(dtype=torch.float16, device=device), tables(20, device=device)
    y, z, ids = torch.empty_like(q), torch.empty_like(k), torch.arange(9, device=device) + 4
    kernel(q, k, cos, sin, ids, y, z)
    assert_rounded_once(y, right(q, cos, sin, ids))
    assert_rounded_once(z, right(k, cos, sin, ids))
    with pytest.raises((ValueError, RuntimeError)):  # Dao-AILab/flash-attention#45: R columns are not R/2
        kernel(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), ids, y, z)


def test_what_the_factory_refuses():
    good = dict(heads_q=4, heads_k=2, D=64, R=32)
    for name, value, least in (("heads_q", 0, 1), ("heads_k", -1, 0), ("D", 0, 1), ("R", 0, 1), ("start", -1, 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {name}={value}"):
            rk.rope_per_token(**good | {name: value})
        with pytest.raises(TypeError, match=f"{name} takes an integer, got 2.0"):
            rk.rope_per_token(**good | {name: 2.0})
    for changes, message in (
        ({"R": 7}, "rope dim must be even, got R=7"),
        ({"start": 33}, "start takes 0 … 32 for R=32 of D=64, got start=33"),
        ({"width": 3}, "width takes .*1, 2, 4.* 8.*, got .*3"),
        ({"per_thread": 4}, "per_thread takes .*1, 2.*, got .*4"),
        ({"mode": "gptj"}, r"mode takes one of \('neox', 'interleaved'\), got 'gptj'"),
        ({"dtype": "float64"}, "dtype takes one of .*, got 'float64'"),
        ({"dtype": "float16", "table_dtype": "bfloat16"}, "table_dtype takes one of .*, got 'bfloat16'"),
        ({"index_dtype": "int16"}, "index_dtype takes one of .*, got 'int16'"),
        (
            {"D": 4098, "R": 4096, "start": 1},
            "R=4096 at start=1 of D=4098 needs 2048 threads a head .*over 1024",
        ),
    ):
        with tilelang.tvm.target.Target("cuda"), pytest.raises(ValueError, match=message):
            rk.rope_per_token.func(**good | changes)


def test_half_types_on_the_c_backend_end_in_compiler_noise():
    """tile-ai/tilelang#3201 and #2385: what the C backend lacks is refused by name; float16 runs elsewhere here."""
    strides = ((256, 64), (128, 64), (256, 64), (128, 64), (1,))
    with tilelang.tvm.target.Target("c"):
        for dtypes in (("bfloat16", "float32"), ("bfloat16", "bfloat16")):
            with pytest.raises(ValueError, match="dtype bfloat16 needs CUDA: the C backend has no such type"):
                rk.rope_per_token.func(4, 2, 64, 64, 0, "neox", *dtypes, strides=strides)
        for options in ({}, {"strides": strides, "batched": True}):
            with pytest.raises(ValueError, match="the C backend takes strides as constants, and no batch axis"):
                rk.rope_per_token.func(4, 2, 64, 64, dtype="float16", **options)


def test_postponed_annotations_build_a_wrong_kernel(tmp_path):
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
        for factory in (rk.rope_neox_naive, rk.rope_neox_blocked, rk.rope_interleaved_blocked, rk.rope_per_token):
            arguments = (4, 2, 64, 64) if factory is rk.rope_per_token else (16, 64)
            copy = getattr(postponed, factory.__name__)
            try:
                built = copy.func(*arguments)
            except NameError:
                fails.append(factory)
            else:
                tilelang.tvm.ir.assert_structural_equal(built, factory.func(*arguments))
    assert fails == [rk.rope_neox_naive, rk.rope_per_token]


# -------------------------------------------------------------------------------- apply_rope: the values


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "mode"),
    [
        (torch.float32, torch.float32, "neox"),
        (torch.float16, torch.float16, "interleaved"),
        (torch.bfloat16, torch.float32, "neox"),
        (torch.bfloat16, torch.bfloat16, "neox"),
    ],
    ids=str,
)
def test_in_place_reads_what_it_has_already_written(device, dtype, table_dtype, mode):
    """flagos-ai/FlagGems#5142, kvcache-ai/sglang#31: in place must equal out of place, and be written back."""
    (q, k), (cos, sin) = draw_qk(dtype=dtype, device=device), tables(99, dtype=table_dtype, device=device)
    ids = torch.randint(0, 99, (9,), device=device)
    before = q.clone(), k.clone()
    y, z = apply_rope(q, k, cos, sin, ids, mode=mode)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    for x, out in ((q, y), (k, z)):
        assert out.dtype == dtype and out.shape == x.shape and out.device == x.device
        assert_rounded_once(out, right(x, cos, sin, ids, mode))
        if table_dtype in HALVES:  # exact products: equal to the reference, whatever a compiler fuses
            assert torch.equal(out, rk.torch_partial_rope(x, cos[ids][:, None], sin[ids][:, None], mode))
    if dtype == torch.bfloat16 and device == "cpu":  # the float32 kernel, then one rounding
        wide = apply_rope(q.float(), k.float(), cos.float(), sin.float(), ids, mode=mode)
        assert torch.equal(y, wide[0].to(dtype)) and torch.equal(z, wide[1].to(dtype))
    same_q, same_k = apply_rope(q, k, cos, sin, ids, mode=mode, inplace=True)
    assert same_q is q and same_k is k
    assert torch.equal(q, y) and torch.equal(k, z)


def test_position_ids_are_ignored(device):
    """NVIDIA/Megatron-LM#453, linkedin/Liger-Kernel#477, huggingface/transformers#22161."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(40, device=device)
    packed = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3], device=device)
    numbers = torch.arange(40, device=device)
    descending, strided, expanded = numbers.flip(0)[:9], numbers[3::4][:9], numbers[7].expand(9)
    for ids in (packed, descending, strided, expanded, torch.randint(0, 40, (9,), device=device)):
        y, z = apply_rope(q, k, cos, sin, ids)
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))
    none = apply_rope(q, k, cos, sin)
    assert torch.equal(none[0], apply_rope(q, k, cos, sin, numbers[:9])[0])
    assert torch.equal(none[1], apply_rope(q, k, cos, sin, numbers[:9].int())[1])
    same = q[:1].repeat(9, 1, 1)
    y = apply_rope(same, k, cos, sin, packed)[0]
    assert torch.equal(y[0], y[3]) and torch.equal(y[0], y[5]) and not torch.equal(y[0], y[1])
    order = torch.randperm(9, device=device)
    y, z = apply_rope(q, k, cos, sin, packed)
    moved = apply_rope(q[order], k[order], cos, sin, packed[order])
    assert torch.equal(moved[0], y[order]) and torch.equal(moved[1], z[order])


def test_positions_of_one_sequence_are_used_for_the_whole_batch(device):
    """linkedin/Liger-Kernel#477: left padding gives each sequence ids of its own; (seq,) ids are shared."""
    cos, sin = tables(10, device=device)
    own = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]], device=device)
    shared = torch.tensor([3, 1, 9, 0], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (draw(2, 4, heads, 64, dtype=dtype, device=device) for heads in (5, 2))
        for ids in (own, own.T.contiguous().T, shared, shared.expand(2, 4), None):
            y, z = apply_rope(q, k, cos, sin, ids)
            in_place = apply_rope(q.clone(), k.clone(), cos, sin, ids, inplace=True)
            assert torch.equal(y, in_place[0]) and torch.equal(z, in_place[1])
            ids = torch.arange(4) if ids is None else ids
            assert_rounded_once(y, right(q, cos, sin, ids))
            assert_rounded_once(z, right(k, cos, sin, ids))


def test_k_is_needed(device):
    q, (cos, sin) = draw(9, 5, 64, dtype=torch.bfloat16, device=device), tables(9, device=device)
    y, none = apply_rope(q, None, cos, sin)
    assert none is None
    assert_rounded_once(y, right(q, cos, sin, torch.arange(9)))


def test_tokens_and_heads_swap_roles_where_their_numbers_agree(device):
    """vukrosic/leo-optimizer#2: with as many tokens as heads, a table along the wrong axis raises nothing."""
    cos, sin = tables(20, device=device)
    ids = torch.tensor([3, 1, 4, 15, 9], device=device)
    q, k = draw_qk(5, device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[0], right(q, cos, sin, ids))
    _, q, k = heads_before_tokens(torch.float32, device)  # (B, H, S, D) with H = S, transposed
    y = apply_rope(q, k, cos, sin, ids)[0]
    for h in range(5):
        assert_rounded_once(y[:, :, h], right(q[:, :, h : h + 1], cos, sin, ids)[:, :, 0])


def test_position_passes_through_a_half_type(device):
    """tile-ai/tilelang#2483: in bfloat16, 259 is 260 and 33000 is 33024."""
    q, k = draw_qk(2, dtype=torch.bfloat16, device=device)
    cos, sin = tables(33025, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([259, 33000], device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[0], right(q, cos, sin, ids))


def test_full_width_tables_are_read_as_one_column_a_pair(device):
    """Dao-AILab/flash-attention#45, facebookresearch/xformers#779, Tencent/ncnn#6833: any other width is refused."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    for layout in (lambda t: torch.cat((t, t), -1), lambda t: t.repeat_interleave(2, -1)):
        with pytest.raises(ValueError, match="cos has 64 columns, so R=128; q is only D=64 wide"):
            apply_rope(q, k, layout(cos), layout(sin))
    y = apply_rope(q, k, torch.cat((cos, cos), -1)[:, :32], torch.cat((sin, sin), -1)[:, 32:])[0]  # strided tables
    assert torch.equal(y, apply_rope(q, k, cos, sin)[0])
    both = torch.cat((cos.new_zeros(1), cos.flatten(), sin.flatten()))[1:].view(2, 9, 32)  # neither is on 16 bytes
    assert torch.equal(y, apply_rope(q, k, *both)[0])


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_leading_shapes(device, mode, data):
    """float64's values; turning back gives x; norms stay; scores depend on distance alone."""
    lead = data.draw(st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 3), st.integers(0, 9))))
    shared = data.draw(st.booleans())
    q, k = draw(*lead, 5, 64, device=device), draw(*lead, 2, 64, device=device)
    cos, sin = tables(200, device=device)
    ids = torch.randint(0, 100, lead[-1:] if shared else lead, device=device)
    y, z = apply_rope(q, k, cos, sin, ids, mode=mode)
    assert y.shape == q.shape and z.shape == k.shape
    assert_rounded_once(y, right(q, cos, sin, ids, mode))
    assert_rounded_once(z, right(k, cos, sin, ids, mode))
    back = apply_rope(y, z, cos, sin, ids, mode=mode, inverse=True)
    torch.testing.assert_close(back, (q, k), rtol=0, atol=4e-6)
    torch.testing.assert_close(y.norm(dim=-1), q.norm(dim=-1), rtol=2e-6, atol=0)
    far = apply_rope(q, k, cos, sin, ids + 100, mode=mode)
    scores = ((a[..., :2, :].double() * b.double()).sum(-1) for a, b in ((y, z), far))
    torch.testing.assert_close(*scores, rtol=0, atol=3e-4)  # cos and sin are rounded to float32


# ------------------------------------------------------------------------- apply_rope: where tensors lie


def packed(dtype, device):
    base = draw(9, 9, 64, dtype=dtype, device=device)
    return base, *base.split([5, 2, 2], dim=1)[:2]


def packed_by_head(dtype, device):
    base = draw(9, 5, 192, dtype=dtype, device=device)
    return base, *base.chunk(3, dim=-1)[:2]


def mla_tails(dtype, device):
    """DeepSeek's: q's heads end in 64 rotated channels, k's are the tail of one latent row."""
    base = draw(9, 5 * 192 + 576, dtype=dtype, device=device)
    return base, base[:, :960].view(9, 5, 192)[..., 128:], base[:, 960:][:, 512:].unsqueeze(1)


def heads_before_tokens(dtype, device):
    base = draw(7, 2 * 5 * 64, dtype=dtype, device=device)
    return base, *(part.view(2, -1, 5, 64).transpose(1, 2) for part in base.split([5, 2]))


def one_element_off(dtype, device):
    base = draw(1 + 9 * 7 * 64, dtype=dtype, device=device)
    return base, base[1 : 1 + 9 * 5 * 64].view(9, 5, 64), base[1 + 9 * 5 * 64 :].view(9, 2, 64)


def odd_strides(dtype, device):
    """Every other token, at element strides that no vector divides."""
    base = draw(18, 7, 67, dtype=dtype, device=device)
    return base, base[::2, :5, 1:65], base[::2, 5:, 3:]


def expanded(dtype, device):
    base = draw(14, 64, dtype=dtype, device=device)
    return base, base[:5].expand(9, 5, 64), base[5:, None].expand(9, 2, 64)


def channels_apart(dtype, device):
    base = draw(9, 64, 7, dtype=dtype, device=device)
    return base, base[..., :5].transpose(1, 2), base[..., 5:].transpose(1, 2)


IN_PLACE = [packed, packed_by_head, mla_tails, heads_before_tokens, one_element_off, odd_strides]


@pytest.mark.parametrize("view", [*IN_PLACE, expanded, channels_apart], ids=lambda view: view.__name__)
def test_strides_are_taken_for_those_of_a_contiguous_tensor(device, view):
    """vllm-project/vllm#16658, ROCm/aiter#3841: the value is that of a contiguous copy, neighbours stay."""
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, *HALVES):
        (base, q, k), (cos, sin) = view(dtype, device), tables(30, device=device)
        before, ids = base.clone(), torch.randint(0, 30, q.shape[-3:-2], device=device)
        y, z = apply_rope(q, k, cos, sin, ids)
        assert torch.equal(base, before)
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))
        if view in IN_PLACE:
            apply_rope(q, k, cos, sin, ids, inplace=True)
            assert torch.equal(q, y) and torch.equal(k, z)
            q.fill_(7.0), k.fill_(7.0)
            assert torch.equal(base[base != 7.0], before[base != 7.0])
        else:
            with pytest.raises(ValueError, match="inplace=True takes q with|inplace=True takes q without overlap"):
                apply_rope(q, k, cos, sin, ids, inplace=True)
            assert torch.equal(base, before)


def test_single_head_cut_from_expanded_ones_is_not_written_back(device):
    """kvcache-ai/sglang#31. Its stride over the heads is 0, and no element is reached twice."""
    cos, sin = tables(9, device=device)
    k = draw(9, 1, 128, device=device).expand(9, 5, 128)[:, :1, 64:]
    value = right(k, cos, sin, torch.arange(9))
    apply_rope(k, None, cos, sin, inplace=True)
    assert_rounded_once(k, value)


def test_tensors_that_overlap_are_written_in_place(device):
    """kvcache-ai/sglang#31, flagos-ai/FlagGems#5142: an element that is reached twice would be turned twice."""
    base, (cos, sin) = draw(10, 7, 64, device=device), tables(30, device=device)
    before, x = base.clone(), base[:9]
    windows = base.flatten().as_strided((9, 5, 64), (64, 64, 1))
    for message, q, k in (
        ("q and k that share no element", x, x),
        ("q and k that share no element", x, base[1:]),
        ("q and k that share no element", x[:, :5], x[:, 4:6]),
        ("q without overlap in itself", windows, None),
        ("q without overlap in itself", x[:, :1].expand(9, 5, 64), None),
        ("k without overlap in itself", x[:, :5], x[:1, 5:].expand(9, 2, 64)),
        ("k with channels side by side", x[:, :5], draw(9, 64, 2, device=device).transpose(1, 2)),
    ):
        with pytest.raises(ValueError, match=f"inplace=True takes {message}"):
            apply_rope(q, k, cos, sin, inplace=True)
    assert torch.equal(base, before)


def test_slices_that_share_elements_pass_for_interleaved(device):
    """Tokens of two slices lie 10 apart, texts 15: what interleaves by token meets in the next text."""
    buffer, (cos, sin) = draw(40, device=device), tables(9, 4, device=device)
    before = buffer.clone()
    q, k = (part.view(2, 3, 5)[:, ::2, :4] for part in (buffer[:30], buffer[5:35]))
    with pytest.raises(ValueError, match="inplace=True takes q and k that share no element"):
        apply_rope(q, k, cos, sin, inplace=True)
    assert torch.equal(buffer, before)


def test_alternate_heads_ahead_of_the_tokens_are_refused(device):
    x, (cos, sin) = draw(6, 2, 64, device=device).transpose(0, 1), tables(9, device=device)
    value = right(x, cos, sin, torch.arange(2))
    apply_rope(x[:, 0::2], x[:, 1::2], cos, sin, inplace=True)
    assert_rounded_once(x, value)


def test_layouts_that_share_an_element_are_taken_for_disjoint():
    """Against the sets of all addresses, over small layouts drawn at random."""
    draws, accepted = random.Random(0), 0
    for _ in range(5000):
        shapes = [tuple(draws.randint(1, 3) for _ in range(3)) for _ in range(2)]
        strides = [(*(draws.choice((1, 2, 3, 4, 6, 8, 9, 12, 18, 20)) for _ in range(2)), 1) for _ in range(2)]
        strides[1] = draws.choice(strides)
        apart = draws.randint(0, 30)
        reached = [
            {first + sum(map(operator.mul, index, stride)) for index in itertools.product(*map(range, shape))}
            for shape, stride, first in zip(shapes, strides, (0, apart), strict=True)
        ]
        disjoint = rk._disjoint(shapes[0], strides[0], shapes[1], strides[1], apart)
        accepted += disjoint
        assert not (disjoint and reached[0] & reached[1])
    assert accepted > 500


@pytest.mark.parametrize("strides", [(1, 40, 1), (0, 1, 1), (4, 40, 1)])
def test_sliding_windows_are_refused_or_mixed_up(device, strides):
    """Channels that are reached by the tokens as well: out of place they are read like any others."""
    cos, sin = tables(9, 8, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        q = draw(400, dtype=dtype, device=device).as_strided((4, 2, 8), strides)
        assert_rounded_once(apply_rope(q, q, cos, sin)[1], right(q, cos, sin, torch.arange(4)))


def test_partial_rotation_takes_other_channels(device):
    q, k = draw(9, 3, 64, device=device), draw(9, 1, 64, device=device)
    cos, sin = tables(9, 32, device=device)
    y, z = apply_rope(q, k, cos, sin, mode="interleaved", start=7)
    others = [*range(7), *range(7 + 32, 64)]
    for x, out in ((q, y), (k, z)):
        assert_rounded_once(out, right(x, cos, sin, torch.arange(9), "interleaved", 7))
        assert torch.equal(out[..., others], x[..., others])


def test_more_tokens_than_a_grid_axis_holds(device):
    """131 072 tokens on the second axis of a grid failed to launch."""
    (q, k), (cos, sin) = draw_qk(70_000, device=device), tables(30, device=device)
    ids = torch.arange(70_000, device=device) % 30
    for x, y in zip((q, k), apply_rope(q, k, cos, sin, ids), strict=True):
        assert_rounded_once(y[-2000:], right(x[-2000:], cos, sin, ids[-2000:]))


@needs_cuda
def test_more_sequences_than_a_grid_axis_holds():
    q, k = draw(65_537, 3, 2, 8, device="cuda"), draw(65_537, 3, 1, 8, device="cuda")
    cos, sin = tables(30, 8, device="cuda")
    for ids in (None, torch.tensor([4, 29, 0], device="cuda"), torch.randint(0, 30, (65_537, 3), device="cuda")):
        y, z = apply_rope(q, k, cos, sin, ids)
        ids = torch.arange(3) if ids is None else ids
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))


def test_offsets_past_2_to_the_31_elements_wrap(device):
    """Three tokens, 2³⁰ elements apart: 4 GiB, of which a CPU touches three pages."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    try:
        q = torch.empty(2**31 + 64, dtype=torch.float16, device=device).as_strided((3, 1, 64), (2**30, 64, 1))
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    q.copy_(draw(3, 1, 64))
    before, (cos, sin), ids = q.clone(), tables(30, device=device), torch.tensor([7, 29, 11], device=device)
    apply_rope(q, None, cos, sin, ids, inplace=True)
    assert_rounded_once(q, right(before, cos, sin, ids))


# ------------------------------------------------------------------------------ apply_rope: what it refuses


def ones(*shape, dtype=torch.float32, device=None):
    return torch.ones(shape, dtype=dtype, device=device or chapter.DEVICE)


META = {"device": "meta"}
REFUSALS = [
    ({"cos": ones(16, 16), "sin": ones(16, 16)}, ValueError,
     "start must be said when R=32 < D=64: 0 for leading, 32 for trailing"),
    ({"cos": ones(16, 16), "sin": ones(16, 16), "start": 33}, ValueError, "start takes 0 … 32 for .*, got start=33"),
    ({"start": -1}, ValueError, "start takes 0 … 0 for R=64 of D=64, got start=-1"),
    ({"mode": "gptj"}, ValueError, "mode takes 'neox' or 'interleaved', got 'gptj'"),
    *(({"q": ones(4, 5, 64, dtype=dtype)}, TypeError, f"q takes float16, bfloat16 or float32, got {dtype}")
      for dtype in (torch.float64, torch.int16, torch.int32, torch.int64, torch.complex64, torch.bool)),
    ({"q": ones(4, 64)}, ValueError, r"q takes \(tokens, heads, D\) or \(batch, seq, heads, D\), got \(4, 64\)"),
    ({"q": ones(1, 1, 4, 5, 64)}, ValueError, r"q takes .*, got \(1, 1, 4, 5, 64\)"),
    ({"k": ones(4, 2, 64, dtype=torch.float16)}, TypeError, "k takes q's dtype torch.float32, got torch.float16"),
    ({"k": ones(3, 2, 64)}, ValueError, r"k takes q's shape \(4, 5, 64\) but for the heads, got \(3, 2, 64\)"),
    ({"k": ones(4, 2, 32)}, ValueError, r"k takes q's shape .*, got \(4, 2, 32\)"),
    ({"k": ones(1, 4, 2, 64)}, ValueError, r"k takes q's shape .*, got \(1, 4, 2, 64\)"),
    ({"k": ones(4, 2, 64, **META)}, ValueError, "k takes q's device .*, got meta"),
    ({"cos": ones(16, 64), "sin": ones(16, 64)}, ValueError, "cos has 64 columns, so R=128; q is only D=64 wide"),
    ({"sin": ones(16, 31)}, ValueError, r"sin takes cos's shape \(16, 32\), got \(16, 31\)"),
    ({"sin": ones(15, 32)}, ValueError, r"sin takes cos's shape .*, got \(15, 32\)"),
    ({"cos": ones(32)}, ValueError, r"cos takes \(P, R/2\), .*, got \(32,\)"),
    ({"cos": ones(1, 16, 32), "sin": ones(1, 16, 32)}, ValueError, r"cos takes \(P, R/2\), .*, got \(1, 16, 32\)"),
    ({"cos": ones(16, 32, **META)}, ValueError, "cos takes q's device .*, got meta"),
    ({"sin": ones(16, 32, **META)}, ValueError, "sin takes q's device .*, got meta"),
    ({"cos": ones(16, 32, dtype=torch.float64)}, TypeError, "cos takes float32 or q's dtype .*, got torch.float64"),
    ({"sin": ones(16, 32, dtype=torch.bfloat16)}, TypeError, "sin takes cos's dtype .*, got torch.bfloat16"),
    ({"q": ones(4, 5, 64, dtype=torch.float16), "k": None, "cos": ones(16, 32, dtype=torch.float16)}, TypeError,
     "sin takes cos's dtype torch.float16, got torch.float32"),
    ({"cos": ones(16, 32).requires_grad_()}, ValueError, r"cos gets no gradient: pass cos.detach\(\)"),
    ({"sin": ones(16, 32).requires_grad_()}, ValueError, r"sin gets no gradient: pass sin.detach\(\)"),
    *(({"positions": ones(4, dtype=dtype)}, ValueError, f"positions takes int32 or int64, got {dtype}")
      for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16)),
    *(({"positions": ones(*shape, dtype=torch.int64)}, ValueError, r"positions takes the shape \(4,\) or \(4,\), got")
      for shape in ((3,), (4, 1), (1, 4), (5,), ())),
    ({"positions": ones(4, dtype=torch.int64, **META)}, ValueError, "positions takes q's device .*, got meta"),
    ({"positions": None, "cos": ones(3, 32), "sin": ones(3, 32)}, IndexError,
     "positions 0 … 3 do not fit a table of 3 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_bad_input_is_launched_or_named_wrongly(changes, error, message):
    arguments = {
        "q": ones(4, 5, 64),
        "k": ones(4, 2, 64),
        "cos": ones(16, 32),
        "sin": 0.5 * ones(16, 32),
        "positions": torch.arange(4, device=chapter.DEVICE),
        **changes,
    }
    for inplace in (False, True):
        with pytest.raises(error, match=message):
            apply_rope(**arguments, inplace=inplace)
    for x in (arguments["q"], arguments["k"]):
        assert x is None or x.is_meta or (x == 1).all()


def test_tensor_that_wants_a_gradient_is_written_in_place(device):
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    before = q.clone(), k.clone()
    for x in (q, k):
        x.requires_grad_()
        with pytest.raises(ValueError, match="inplace=True would write into a tensor that wants a gradient: leave it"):
            apply_rope(q, k, cos, sin, inplace=True)
        x.requires_grad_(False)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_id_outside_the_table_gives_zeros_or_another_row(device, index_dtype):
    """microsoft/onnxruntime#27597, vllm-project/vllm#56446, nntrainer/nntrainer#4144.

    The CPU refuses such ids before it writes; on CUDA, where looking would synchronise, their tokens come out NaN.
    """
    (q, k), (cos, sin) = draw_qk(4, device=device), tables(16, device=device)
    before, valid = q.clone(), torch.tensor([0, 15, 7, 3], dtype=index_dtype, device=device)
    for far in (16, -1, 2**31 - 1) + ((2**31, 2**32, -(2**32)) if index_dtype == torch.int64 else ()):
        ids = torch.tensor([0, 15, far, 3], dtype=index_dtype, device=device)
        for inplace in (False, True):
            if device == "cpu":
                span = f"{min(far, 0)} … {max(far, 15)}"
                with pytest.raises(IndexError, match=f"positions takes ids 0 … 15, got {span}"):
                    apply_rope(q, k, cos, sin, ids, inplace=inplace)
                assert torch.equal(q, before)
            else:
                y = apply_rope(q.clone(), k.clone(), cos, sin, ids, inplace=inplace)[0]
                assert y[2].isnan().all()
                assert_rounded_once(y[[0, 1, 3]], right(q, cos, sin, valid)[[0, 1, 3]])
        assert_rounded_once(apply_rope(q, k, cos, sin, valid)[0], right(q, cos, sin, valid))


EMPTY = {
    "no tokens": ((0, 5, 64), (0, 2, 64), (16, 32)),
    "no sequences": ((0, 4, 5, 64), (0, 4, 2, 64), (16, 32)),
    "sequences without tokens": ((2, 0, 5, 64), (2, 0, 2, 64), (16, 32)),
    "neither tokens nor rows": ((0, 5, 64), None, (0, 32)),
    "no heads of q": ((4, 0, 64), (4, 5, 64), (16, 32)),
    "no heads of k": ((4, 5, 64), (4, 0, 64), (16, 32)),
    "no heads": ((4, 0, 64), (4, 0, 64), (16, 32)),
    "no rotated channels": ((4, 5, 64), (4, 2, 64), (16, 0)),
}


@pytest.mark.parametrize(("q_shape", "k_shape", "table_shape"), EMPTY.values(), ids=EMPTY)
def test_empty_input_is_launched(device, q_shape, k_shape, table_shape):
    """tile-ai/tilelang#1697, vllm-project/vllm-gaudi#1795: an empty grid is an error that stays; then a normal call."""
    cos, sin = (table[: table_shape[0], : table_shape[1]] for table in tables(16, device=device))
    xs = [draw(*shape, dtype=torch.bfloat16, device=device) for shape in (q_shape, k_shape) if shape]
    values = [right(x, cos, sin, torch.arange(x.shape[-3])) for x in xs]
    absent = [None] * (2 - len(xs))
    for wants_grad in (False, True):
        inputs = [x.clone().requires_grad_(wants_grad) for x in xs]
        outputs = apply_rope(*inputs, *absent, cos, sin)[: len(xs)]
        for x, y, value in zip(inputs, outputs, values, strict=True):
            assert (y.shape, y.dtype, y.device, y.requires_grad) == (x.shape, x.dtype, x.device, wants_grad)
            assert y is not x
            assert_rounded_once(y, value)
        if wants_grad:
            sum(y.sum() for y in outputs).backward()
            for x in inputs:
                assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
                one = torch.ones_like(x.detach())
                assert_rounded_once(x.grad, right(one, cos, sin, torch.arange(x.shape[-3]), inverse=True))
    apply_rope(*xs, *absent, cos, sin, inplace=True)
    for x, value in zip(xs, values, strict=True):
        assert_rounded_once(x, value)
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[1], right(k, cos, sin, ids))


# ------------------------------------------------------------------------------------ apply_rope: gradients


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@pytest.mark.parametrize("scale", [1.0, 1.190238])
def test_gradient_has_the_wrong_sign_or_scale(device, mode, scale):
    """huggingface/candle#3612: right at position 0 alone; the scale of the tables belongs into the gradient too."""
    (q, k), (cos, sin) = draw_qk(3, device=device), tables(1001, device=device, scale=scale)
    ids = torch.tensor([0, 5, 1000], device=device)
    inputs = q.requires_grad_(), k.requires_grad_()
    incoming = [draw(*x.shape, device=device) for x in inputs]
    untouched = [g.clone() for g in incoming]
    gradients = torch.autograd.grad(apply_rope(*inputs, cos, sin, ids, mode=mode), inputs, incoming)
    for x, g, kept, gradient in zip(inputs, incoming, untouched, gradients, strict=True):
        wide = x.detach().double().cpu().requires_grad_()
        (value,) = torch.autograd.grad(right(wide, cos, sin, ids, mode), wide, g.double().cpu())
        assert_rounded_once(gradient, value)
        assert torch.equal(g, kept)
    inverse = apply_rope(*apply_rope(*inputs, cos, sin, ids, mode=mode), cos, sin, ids, mode=mode, inverse=True)[0]
    # ggml-org/llama.cpp#24162: turning back by −sin leaves the square of the scale
    torch.testing.assert_close(inverse.double().cpu(), scale**2 * q.double().cpu(), rtol=0, atol=4e-6)


def test_gradient_of_one_input_or_output_alone(device):
    """Gradients that autograd leaves out, expands or strides; channels that pass through."""
    cos, sin = tables(9, 32, device=device)
    ids = torch.arange(9)
    for wanted in ("q", "k"):
        q, k = (
            draw(9, heads, 64, device=device).requires_grad_(name == wanted) for name, heads in (("q", 3), ("k", 1))
        )
        y, z = apply_rope(q, k, cos, sin, mode="interleaved", start=7)
        assert y.requires_grad and z.requires_grad
        (y if wanted == "q" else z).sum().backward()
        x, other = (q, k) if wanted == "q" else (k, q)
        assert other.grad is None
        assert_rounded_once(x.grad, right(torch.ones_like(x), cos, sin, ids, "interleaved", 7, inverse=True))
    q, k = draw(9, 3, 64, device=device).requires_grad_(), draw(9, 1, 64, device=device)
    g = draw(3, 64, 9, device=device).permute(2, 0, 1)
    apply_rope(q, k, cos, sin, mode="interleaved", start=7)[0].backward(g)
    assert_rounded_once(q.grad, right(g, cos, sin, ids, "interleaved", 7, inverse=True))
    with torch.no_grad():
        assert not apply_rope(q, k, cos, sin, mode="interleaved", start=7)[0].requires_grad


def test_second_gradient_is_missing(device):
    """huggingface/candle#3612. The op is linear: differentiating the gradient turns forward again."""
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)
    inputs = q.requires_grad_(), k.requires_grad_()
    first = [draw(*x.shape, device=device).requires_grad_() for x in inputs]
    second = [draw(*x.shape, device=device) for x in inputs]
    gradients = torch.autograd.grad(apply_rope(*inputs, cos, sin, ids), inputs, first, create_graph=True)
    for v, twice in zip(second, torch.autograd.grad(gradients, first, second), strict=True):
        assert_rounded_once(twice, right(v, cos, sin, ids))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_computes_again_from_changed_tensors(device, use_reentrant):
    """unslothai/unsloth#5001."""
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)

    def layer(q, k):
        y, z = apply_rope(torch.sin(q), torch.sin(k), cos, sin, ids)
        return (y**2 + z.sum(1, keepdim=True) ** 3).sum()

    plain, saved = ([x.clone().requires_grad_() for x in (q, k)] for _ in range(2))
    layer(*plain).backward()
    checkpoint(layer, *saved, use_reentrant=use_reentrant).backward()
    for a, b, x in zip(plain, saved, (q, k), strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(b, x)


def test_writing_in_place_corrupts_gradients_silently(device):
    """unslothai/unsloth#5001: autograd must notice that a tensor which it saved was written over."""
    cos, sin = tables(9, device=device)
    leaf = draw(9, 5, 64, device=device).requires_grad_()
    saved = leaf * 1.0
    loss = (saved**2).sum()
    with torch.no_grad():
        apply_rope(saved, None, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------- apply_rope: compilers, graphs, processes


def test_op_breaks_the_rules_of_torch_library(device):
    (q, k), (cos, sin) = draw_qk(device=device), tables(20, device=device)
    ids = torch.randint(0, 20, (9,), device=device)
    _, heads_first, k_first = heads_before_tokens(torch.float32, device)
    for x, other, positions in (
        (q.clone().requires_grad_(), k.clone().requires_grad_(), ids),
        (q, k, None),
        (q.bfloat16(), None, None),
        (heads_first, k_first, ids[:5].expand(2, 5)),
    ):
        torch.library.opcheck(rk._op, (x, other, cos, sin, positions, "neox", 0, False))
    for x, other, positions in ((q, k, ids), (q, None, None)):
        torch.library.opcheck(rk._inplace_op, (x, other, cos, sin, positions, "neox", 0, False))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_graph_breaks_or_is_built_again_for_each_position_or_length(device, inplace):
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
def test_graph_replay_repeats_the_captured_positions(inplace):
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
def test_overlapped_start_reads_what_is_not_written_yet(inplace):
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
def test_graph_with_several_streams_is_captured_wrongly():
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


def test_sharded_sequence_is_rotated_by_local_positions(tmp_path):
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
