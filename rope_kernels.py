"""Rotary position embedding (RoPE) in TileLang: references in torch, and kernels judged by them.

Run `python rope_kernels.py` to check every kernel on the device of this machine.
TileLang reads annotations when a kernel is built, so `from __future__ import annotations`
must not stand in a file that holds these factories.
"""

import functools
import sys

import tilelang
import tilelang.language as T
import torch
from tilelang.contrib.cc import get_cplus_compiler

# ------------------------------------------------------------------------------------------- references


def _checked(x, cos, sin):
    """Refuse what torch would broadcast or truncate silently; return all three in the arithmetic's dtype."""
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} takes a floating dtype, got {tensor.dtype}")
    if x.shape[-1] % 2:
        raise ValueError(f"rope dim must be even, got R={x.shape[-1]}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape[-1] != x.shape[-1] // 2:
            raise ValueError(
                f"{name} takes one column a pair, {x.shape[-1] // 2} for R={x.shape[-1]}, got {tuple(table.shape)}"
            )
        rows = list(zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False))
        if table.dim() > x.dim() or any(size not in (1, there) for size, there in rows):
            raise ValueError(f"{name} does not broadcast over x's rows: {tuple(table.shape)} for x {tuple(x.shape)}")
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(compute), cos.to(compute), sin.to(compute)


def torch_rope_interleaved(x, cos, sin):
    """Rotate the adjacent pairs (x[2p], x[2p+1]) of the last dimension.

        y[2p]   = x[2p]·cos[p] − x[2p+1]·sin[p]
        y[2p+1] = x[2p]·sin[p] + x[2p+1]·cos[p]        p = 0 … R/2−1

    Shapes: x (..., R); cos and sin broadcastable to (..., R/2), one column a pair; returns x's shape.
    Torch aligns shapes from the right: for x (tokens, heads, R) pass a table (tokens, 1, R/2).
    Dtypes: any floating; the arithmetic is float32 (float64 for float64 x), rounded once to x's dtype.
    Errors: ValueError for an odd R, a table of another width or with more rows than x; TypeError for integers.
    Source: RoFormer, arXiv:2104.09864, equation 34; the layout of GPT-J and GLM.
    """
    work, cos, sin = _checked(x, cos, sin)
    even, odd = work[..., 0::2], work[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def torch_rope_neox(x, cos, sin):
    """Rotate the half-split pairs (x[p], x[p+R/2]) of the last dimension.

        y[p]     = x[p]·cos[p]     − x[p+R/2]·sin[p]
        y[p+R/2] = x[p+R/2]·cos[p] + x[p]·sin[p]       p = 0 … R/2−1

    Shapes: x (..., R); cos and sin broadcastable to (..., R/2), one column a pair; returns x's shape.
    Torch aligns shapes from the right: for x (tokens, heads, R) pass a table (tokens, 1, R/2).
    Dtypes: any floating; the arithmetic is float32 (float64 for float64 x), rounded once to x's dtype.
    Errors: ValueError for an odd R, a table of another width or with more rows than x; TypeError for integers.
    Source: GPT-NeoX, arXiv:2204.06745; the layout of Llama and Qwen checkpoints in transformers.
    """
    work, cos, sin = _checked(x, cos, sin)
    first, second = work.tensor_split(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def torch_partial_rope(x, cos, sin, mode="neox", start=None):
    """Rotate R channels of each head and pass the others through bit for bit.

        y[start:start+R] = rope_mode(x[start:start+R]),  y[j] = x[j] elsewhere       R = 2·cos.shape[-1]

    start=None takes the trailing R channels (MLA's decoupled RoPE, DeepSeek-V4); start=0 the leading ones
    (GPT-NeoX, GPT-J, Phi, GLM, GLM-4). R = width is the full rotation, R = 0 the identity.
    Shapes: x (..., width); cos and sin broadcastable to (..., R/2). Dtypes: as the full rotations.
    Errors: ValueError for an unknown mode, R > width, or a start that does not fit; else as the full rotations.
    Source: GPT-J's `rotary_dim`, GPT-NeoX's `rotary_pct`; DeepSeek-V2, arXiv:2405.04434, section 2.1.3.
    """
    rotations = {"neox": torch_rope_neox, "interleaved": torch_rope_interleaved}
    if mode not in rotations:
        raise ValueError(f"mode takes 'neox' or 'interleaved', got {mode!r}")
    width, rope_dim = x.shape[-1], 2 * cos.shape[-1]
    if rope_dim > width:
        raise ValueError(f"cos has {cos.shape[-1]} columns, so R={rope_dim}; x is only {width} wide")
    if start is None:
        start = width - rope_dim
    if not 0 <= start <= width - rope_dim:
        raise ValueError(f"start takes 0 … {width - rope_dim} for R={rope_dim} of {width} channels, got start={start}")
    stop = start + rope_dim
    return torch.cat((x[..., :start], rotations[mode](x[..., start:stop], cos, sin), x[..., stop:]), dim=-1)


# ---------------------------------------------------------------------------------------------- kernels


@tilelang.jit(out_idx=[3])
def rope_neox_naive(S, R, dtype="float16", threads=256):
    """Build kernel ①: half-split pairs, one row a block, straight from global memory.

        y[i,p]     = x[i,p]·cos[i,p]     − x[i,p+R/2]·sin[i,p]
        y[i,p+R/2] = x[i,p+R/2]·cos[i,p] + x[i,p]·sin[i,p]       p = 0 … R/2−1

    Shapes: kernel(x, cos, sin) -> y with x, y (S, R) and cos, sin (S, R/2): one table row for each row of x.
    Dtypes: float16, bfloat16 (CUDA only) or float32, all four tensors alike; float32 arithmetic, one rounding.
    Errors: ValueError for S, R or threads out of range, an odd R, a dtype the device lacks; TypeError for non-integers.
    Source: the chapter's first kernel, section 13.04.
    """
    for name, value in (("S", S), ("R", R), ("threads", threads)):
        if not isinstance(value, int):
            raise TypeError(f"{name} takes an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")
    if R % 2:
        raise ValueError(f"rope dim must be even, got R={R}")
    if threads > 1024:
        raise ValueError(f"threads takes at most 1024, got threads={threads}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype takes float16, bfloat16 or float32, got {dtype!r}")
    target = tilelang.tvm.target.Target.current(allow_none=True)
    if dtype == "bfloat16" and target is not None and target.kind.name == "c":
        raise ValueError("dtype bfloat16 needs CUDA: the C backend has no such type, it takes float16 or float32")
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
                a = T.cast(x[i, p], "float32")
                b = T.cast(x[i, p + half], "float32")
                c = T.cast(cos[i, p], "float32")
                s = T.cast(sin[i, p], "float32")
                y[i, p] = T.cast(a * c - b * s, dtype)
                y[i, p + half] = T.cast(b * c + a * s, dtype)

    return rope


@tilelang.jit(out_idx=[3])
def rope_neox_blocked(S, R, blk_s=16, dtype="float16", threads=256):
    """Build kernel ②: half-split pairs, blk_s rows a block, x and the tables staged in shared memory.

        y[i,p]     = x[i,p]·cos[i,p]     − x[i,p+R/2]·sin[i,p]
        y[i,p+R/2] = x[i,p+R/2]·cos[i,p] + x[i,p]·sin[i,p]       p = 0 … R/2−1

    Shapes: kernel(x, cos, sin) -> y with x, y (S, R) and cos, sin (S, R/2): one table row for each row of x.
    Dtypes: float16, bfloat16 (CUDA only) or float32, all four tensors alike; float32 arithmetic, one rounding.
    Errors: ValueError for S, R, blk_s or threads out of range, an odd R, S not a multiple of blk_s, a tile over
    48 KiB, or a dtype the device lacks; TypeError for non-integers.
    Source: the chapter's second kernel, section 13.04.
    """
    for name, value in (("S", S), ("R", R), ("blk_s", blk_s), ("threads", threads)):
        if not isinstance(value, int):
            raise TypeError(f"{name} takes an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")
    if R % 2:
        raise ValueError(f"rope dim must be even, got R={R}")
    if S % blk_s:
        raise ValueError(f"needs S % blk_s == 0, got S={S}, blk_s={blk_s}")
    if threads > 1024:
        raise ValueError(f"threads takes at most 1024, got threads={threads}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype takes float16, bfloat16 or float32, got {dtype!r}")
    tile = 2 * blk_s * R * (4 if dtype == "float32" else 2)
    if tile > 48 * 1024:  # what CUDA grants a block unasked; half of the tile is x, a quarter each table
        raise ValueError(f"a tile of blk_s={blk_s}, R={R}, {dtype} takes {tile} bytes of shared memory, over 49152")
    target = tilelang.tvm.target.Target.current(allow_none=True)
    if dtype == "bfloat16" and target is not None and target.kind.name == "c":
        raise ValueError("dtype bfloat16 needs CUDA: the C backend has no such type, it takes float16 or float32")
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            # static shared memory: with the default scope a second buffer fails on the C backend
            x_tile = T.alloc_shared((blk_s, R), dtype, scope="shared")
            cos_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            sin_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            T.copy(x[block * blk_s, 0], x_tile)
            T.copy(cos[block * blk_s, 0], cos_tile)
            T.copy(sin[block * blk_s, 0], sin_tile)
            for i, p in T.Parallel(blk_s, half):
                a = T.cast(x_tile[i, p], "float32")
                b = T.cast(x_tile[i, p + half], "float32")
                c = T.cast(cos_tile[i, p], "float32")
                s = T.cast(sin_tile[i, p], "float32")
                y[block * blk_s + i, p] = T.cast(a * c - b * s, dtype)
                y[block * blk_s + i, p + half] = T.cast(b * c + a * s, dtype)

    return rope


@tilelang.jit(out_idx=[3])
def rope_interleaved_blocked(S, R, blk_s=16, dtype="float16", threads=256):
    """Build kernel ③: adjacent pairs, blk_s rows a block, x and the tables staged in shared memory.

        y[i,2p]   = x[i,2p]·cos[i,p] − x[i,2p+1]·sin[i,p]
        y[i,2p+1] = x[i,2p]·sin[i,p] + x[i,2p+1]·cos[i,p]        p = 0 … R/2−1

    Shapes: kernel(x, cos, sin) -> y with x, y (S, R) and cos, sin (S, R/2): one table row for each row of x.
    Dtypes: float16, bfloat16 (CUDA only) or float32, all four tensors alike; float32 arithmetic, one rounding.
    Errors: ValueError for S, R, blk_s or threads out of range, an odd R, S not a multiple of blk_s, a tile over
    48 KiB, or a dtype the device lacks; TypeError for non-integers.
    Source: the chapter's third kernel, section 13.04.
    """
    for name, value in (("S", S), ("R", R), ("blk_s", blk_s), ("threads", threads)):
        if not isinstance(value, int):
            raise TypeError(f"{name} takes an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {name}={value}")
    if R % 2:
        raise ValueError(f"rope dim must be even, got R={R}")
    if S % blk_s:
        raise ValueError(f"needs S % blk_s == 0, got S={S}, blk_s={blk_s}")
    if threads > 1024:
        raise ValueError(f"threads takes at most 1024, got threads={threads}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype takes float16, bfloat16 or float32, got {dtype!r}")
    tile = 2 * blk_s * R * (4 if dtype == "float32" else 2)
    if tile > 48 * 1024:  # what CUDA grants a block unasked; half of the tile is x, a quarter each table
        raise ValueError(f"a tile of blk_s={blk_s}, R={R}, {dtype} takes {tile} bytes of shared memory, over 49152")
    target = tilelang.tvm.target.Target.current(allow_none=True)
    if dtype == "bfloat16" and target is not None and target.kind.name == "c":
        raise ValueError("dtype bfloat16 needs CUDA: the C backend has no such type, it takes float16 or float32")
    half = R // 2

    @T.prim_func
    def rope(
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),
    ):
        with T.Kernel(S // blk_s, threads=threads) as block:
            # static shared memory: with the default scope a second buffer fails on the C backend
            x_tile = T.alloc_shared((blk_s, R), dtype, scope="shared")
            cos_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            sin_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
            T.copy(x[block * blk_s, 0], x_tile)
            T.copy(cos[block * blk_s, 0], cos_tile)
            T.copy(sin[block * blk_s, 0], sin_tile)
            for i, p in T.Parallel(blk_s, half):
                a = T.cast(x_tile[i, 2 * p], "float32")
                b = T.cast(x_tile[i, 2 * p + 1], "float32")
                c = T.cast(cos_tile[i, p], "float32")
                s = T.cast(sin_tile[i, p], "float32")
                y[block * blk_s + i, 2 * p] = T.cast(a * c - b * s, dtype)
                y[block * blk_s + i, 2 * p + 1] = T.cast(a * s + b * c, dtype)

    return rope


# The one choice of backend. Without a CUDA device the same sources go through TileLang's C backend:
# target, because the automatic choice only looks for GPUs; disable_vectorize, because C has no conversion for
# vectors of half; -O3, because no optimisation is on by default. Set once at import: a factory keeps what it
# built without regard to the target.
C_BACKEND = {"target": "c", "pass_configs": {"tirx.disable_vectorize": True}, "compile_flags": ["-O3"]}
for _factory in (rope_neox_naive, rope_neox_blocked, rope_interleaved_blocked):
    functools.update_wrapper(_factory, _factory.func.orig_func)  # name, docstring and source for readers
    if not torch.cuda.is_available():
        vars(_factory).update(C_BACKEND)


def _self_check():
    """Check every kernel in every dtype of this device against its reference; return the number of failures."""
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    if not on_cuda and get_cplus_compiler() is None:
        sys.exit("No CUDA device and no C++ compiler: install one of them (g++, for instance) to build the kernels.")
    tilelang.set_log_level("WARNING")
    torch.use_deterministic_algorithms(True)  # poison: torch.empty, where outputs come from, fills with NaN
    S, R, failures = 48, 128, 0
    for factory, reference in (
        (rope_neox_naive, torch_rope_neox),
        (rope_neox_blocked, torch_rope_neox),
        (rope_interleaved_blocked, torch_rope_interleaved),
    ):
        for dtype in ("float32", "float16", "bfloat16") if on_cuda else ("float32", "float16"):
            torch_dtype = getattr(torch, dtype)
            x = torch.randn(S, R, device=device).to(torch_dtype)
            angle = 1000 * torch.rand(S, R // 2, device=device)
            cos, sin = angle.cos().to(torch_dtype), angle.sin().to(torch_dtype)
            y = factory(S, R, dtype=dtype)(x, cos, sin)
            error = (y.double() - reference(x, cos, sin).double()).abs()
            tolerance = 1e-5 if dtype == "float32" else 1e-2
            passed = bool((error <= tolerance + tolerance * reference(x, cos, sin).double().abs()).all())
            failures += not passed
            verdict = "passed" if passed else f"FAILED, largest error {error.max().item():.3g}"
            print(f"{factory.__name__} {dtype}: correctness {verdict}")
    print(f"device: {torch.cuda.get_device_name()} (CUDA)" if on_cuda else "device: CPU (TileLang's C backend)")
    return failures


if __name__ == "__main__":
    sys.exit(1 if _self_check() else 0)
