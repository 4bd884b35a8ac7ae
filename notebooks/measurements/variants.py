"""Kernels that differ from ①–④ in one thing, for the notebooks that compare them and for measure.py, which times them.

TileLang reads annotations when a kernel is built: no `from __future__ import annotations` here.
"""

from unittest import mock

import tilelang
import tilelang.language as T
import torch
from tilelang.engine.callback import register_cuda_postproc

import rope_kernels as rk


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


def start_and_hint_variant(tokens, start, hint):
    """Return kernel ④ for rows 0, 1, … of so many tokens as a function of q, k, cos, sin, y and z.

    start: "overlapped", the kernel's own, or "plain", as launches start by default; TileLang then says __restrict__ as
    well, which doesn't touch the loads of 16 bytes: they are PTX. hint: "evict_last", its own, or another.
    """

    def replaced(code, _):
        assert code.count("L2::evict_last") == 1
        return code.replace("L2::evict_last", f"L2::{hint}")

    # the factory asks this function whether the GPU can overlap launches, which takes sm_90 or later
    have_pdl = tilelang.contrib.nvcc.have_pdl
    with mock.patch.object(tilelang.contrib.nvcc, "have_pdl", lambda at: start == "overlapped" and have_pdl(at)):
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        access, geometry = rk._geometry(tokens * 640 // multiprocessors, False, False)  # as apply_rope does
        function = rk.rope_per_token.__wrapped__(32, 8, 128, 128, index_dtype=None, width=access // 2, **geometry)
    tilelang.disable_cache()  # it does not know of the replacement
    register_cuda_postproc(replaced)
    try:
        kernel = tilelang.compile(function, pass_configs=rk.rope_per_token.pass_configs)
    finally:
        register_cuda_postproc(lambda code, _: code)
        tilelang.enable_cache()
    run = kernel.adapter._get_executable()
    return lambda q, k, cos, sin, y, z: run(q, k, cos, sin, cos, y, z)
