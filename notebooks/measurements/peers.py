"""Public implementations of RoPE that measure.py times beside kernel ④.

A peer is made for one case, before the clock starts, and returns a function of q (tokens, heads, D) as a model's
projection leaves it, of k likewise, and of position ids. Those in FORWARD and BACKWARD are handed the rows of cos and
sin, in the view and the layout that each library's documentation asks for, and ignore the ids. Those in GATHERED get
the ids and a float32 cache (P, D) of which a row is cos beside sin, write into q and k, and return None. What is not
there is not measured: its maker raises ImportError.

GATHERED has two kernels without the host side of their packages, from sources in released wheels. For an H200 they are
built by `nvcc -O3 -shared -Xcompiler -fPIC -gencode arch=compute_90a,code=sm_90a`, with TVM FFI's headers on the path
(`include` beside tvm_ffi's `__init__.py`; it comes with TileLang), to these files:

rope_fi.so: from flashinfer-python 0.7.4, csrc/rope.cu and csrc/flashinfer_rope_binding.cu of its flashinfer/data, whose
    include, csrc, cutlass/include, spdlog/include, cccl/libcudacxx/include, cccl/cub and cccl/thrust are on the path;
    -std=c++17 -use_fast_math -DFLASHINFER_ENABLE_F16 and likewise _BF16, _FP8_E4M3, _FP8_E5M2
sglang_neox.so, sglang_interleaved.so: from sglang 0.5.23, a file that includes sgl_kernel/tensor.h, tvm/ffi/function.h
    and sglang/kernels/jit/csrc/elementwise/rope.cuh and says TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_rope,
    (sglang::FusedRopeKernel<NEOX, 128, true, sglang::bf16_t, sglang::bf16_t>::run)); NEOX is true or false, the other
    true starts early; on the path sglang/kernels/jit/include and the wheel's root;
    -std=c++20 --expt-relaxed-constexpr -DSGL_CUDA_ARCH=900
"""

import functools

import torch

RELEASES = {"flashinfer-python": "0.7.4", "sglang": "0.5.23"}  # those of GATHERED


def _batch_first(x):
    """(tokens, heads, D) as the view (1, heads, tokens, D) that transformers and Liger take."""
    return x.transpose(0, 1)[None]


def _full(table, pairing):
    """One column a pair -> one column a channel."""
    return torch.cat((table, table), -1) if pairing == "neox" else table.repeat_interleave(2, -1)


def transformers(pairing, cos, sin, dtype):
    """The function of the Llama (neox) or GPT-J (interleaved) model, with tables in q's dtype."""
    if pairing == "neox":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        full_cos, full_sin = (_full(table, pairing).to(dtype)[None] for table in (cos, sin))
        return lambda q, k, _: apply_rotary_pos_emb(_batch_first(q), _batch_first(k), full_cos, full_sin)
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    half_cos, half_sin = (table.to(dtype)[None] for table in (cos, sin))
    return lambda q, k, _: tuple(apply_rotary_pos_emb(x[None], half_sin, half_cos) for x in (q, k))


def compiled(pairing, cos, sin, dtype):
    """The same under torch.compile, compiled for this shape."""
    torch._dynamo.reset()
    return torch.compile(transformers(pairing, cos, sin, dtype), dynamic=False)


def liger(pairing, cos, sin, dtype, function="rope_forward"):
    """Liger-Kernel's Triton kernel; it writes into q and k where their memory allows."""
    from liger_kernel.ops import rope

    if pairing != "neox":
        raise ImportError("Liger-Kernel has half-split pairs only")
    full_cos, full_sin = (_full(table, pairing).to(dtype)[None] for table in (cos, sin))
    return lambda q, k, _: getattr(rope, function)(_batch_first(q), _batch_first(k), full_cos, full_sin)[:2]


def tileops(pairing, cos, sin, dtype):
    """TileOPs' op, which makes its own table for positions 0 … tokens−1; one call a tensor."""
    from tileops.rope import RoPEFwdOp

    op = RoPEFwdOp(pairing, "2d")
    return lambda q, k, _: [op.forward(x if x.dim() == 4 else x[None]) for x in (q, k) if x is not None]


def _built(folder, name):
    """Load a library from the folder that measure.py was given, or None."""
    import tvm_ffi

    if folder is None or not (folder / name).is_file():
        raise ModuleNotFoundError(f"--peers names no folder with {name}")
    return tvm_ffi.load_module(folder / name)


def sglang(pairing, cache, folder):
    """SGLang's kernel, which takes heads of 128 channels in bfloat16 here."""
    rotate = _built(folder, f"sglang_{pairing}.so")["run_rope"]
    return lambda q, k, ids: rotate(q, k, cache, ids)


def flashinfer(pairing, cache, folder):
    """FlashInfer's kernel, whose results may lie where q and k do."""
    rotate = _built(folder, "rope_fi.so")["apply_rope_pos_ids_cos_sin_cache"]
    return lambda q, k, ids: rotate(q, k, q, k, cache, ids, pairing == "interleaved")


FORWARD = {
    "transformers, eager": transformers,
    "transformers, torch.compile": compiled,
    "Liger-Kernel": liger,
    "TileOPs": tileops,
}
BACKWARD = {"Liger-Kernel": functools.partial(liger, function="rope_backward")}
GATHERED = {"SGLang": sglang, "FlashInfer": flashinfer}
