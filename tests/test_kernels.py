"""Kernels ①–③ against float64, on TileLang's C backend and, where there is one, on a CUDA device."""

import inspect
import pathlib
import re
import subprocess
import sys

import chapter
import pytest
import tilelang
import torch
from conftest import BACKENDS, build, copied_alone, needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import angles, rotate

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


def draw(S, R, dtype, device):
    x, angle = torch.randn(S, R), angles(range(1, S + 1), R)
    return [tensor.to(dtype).to(device) for tensor in (x, angle.cos(), angle.sin())]


def check(factory, backend, dtype, S, R, *rest, threads=256):
    """Run between guards over poison and compare with float64 and with the torch reference."""
    torch_dtype = getattr(torch, dtype)
    device = "cpu" if backend == "c" else "cuda"
    kernel = build(factory, backend, S, R, *rest, dtype=dtype, threads=threads)
    x, cos, sin = (between_guards(tensor, float("nan"))[0] for tensor in draw(S, R, torch_dtype, device))
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
    x, cos, sin = draw(48, 64, torch.float16, "cpu" if backend == "c" else "cuda")
    y = copied_alone(factory, backend, tmp_path, monkeypatch)(48, 64)(x, cos, sin)
    assert torch.equal(y, REFERENCE[CONVENTION[factory.__name__]](x, cos, sin))


@every_factory
def test_what_the_factories_refuse(factory):
    blocked = factory is not NAIVE
    integers = {"S": 16, "R": 64, "threads": 256} | ({"blk_s": 16} if blocked else {})
    for name in integers:
        for value in (0, -2):
            with pytest.raises(ValueError, match=f"{name} must be at least 1, got {name}={value}"):
                factory(**integers | {name: value})
        with pytest.raises(TypeError, match=f"{name} takes an integer, got 8.0"):
            factory(**integers | {name: 8.0})
    with pytest.raises(ValueError, match="rope dim must be even, got R=7"):
        factory(16, 7)
    with pytest.raises(ValueError, match="threads takes at most 1024, got threads=2048"):
        factory(16, 64, threads=2048)
    with pytest.raises(ValueError, match="dtype takes float16, bfloat16 or float32, got 'float64'"):
        factory(16, 64, dtype="float64")
    with tilelang.tvm.target.Target("c"), pytest.raises(ValueError, match="dtype bfloat16 needs CUDA: the C backend"):
        factory.func(16, 64, dtype="bfloat16")
    if blocked:
        with pytest.raises(ValueError, match="needs S % blk_s == 0, got S=20, blk_s=16"):
            factory(20, 64)
        with pytest.raises(ValueError, match="blk_s=32, R=256, float32 takes 65536 bytes of shared memory, over 49152"):
            factory(32, 256, 32, "float32")


@every_factory
def test_kernels_refuse_tensors_of_another_shape_or_dtype(factory):
    """Dao-AILab/flash-attention#45: a table of R columns must not be read as one of R/2."""
    kernel = factory(16, 64, dtype="float16")
    x, cos, sin = draw(16, 64, torch.float16, chapter.DEVICE)
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
    right = [f"{name} {dtype}: correctness passed" for name in [*CONVENTION, "rope_per_token"] for dtype in dtypes]
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
