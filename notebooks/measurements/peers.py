"""Public implementations of RoPE that measure.py times beside kernel ④, each behind the same signature.

A peer is made for one case and returns a function of the case's tensors. q is (tokens, heads, D) as a model's
projection leaves it, k likewise; each library is handed the view and the table layout that its own documentation asks
for, made before the clock starts. What is not installed is not measured: its maker raises ImportError. flash-attn,
FlashInfer and vLLM are called as their documentation says; the machine of the recorded run did not have them.
"""

import functools

import torch


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
        return lambda q, k: apply_rotary_pos_emb(_batch_first(q), _batch_first(k), full_cos, full_sin)
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    half_cos, half_sin = (table.to(dtype)[None] for table in (cos, sin))
    return lambda q, k: tuple(apply_rotary_pos_emb(x[None], half_sin, half_cos) for x in (q, k))


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
    return lambda q, k: getattr(rope, function)(_batch_first(q), _batch_first(k), full_cos, full_sin)[:2]


def tileops(pairing, cos, sin, dtype):
    """TileOPs' op, which makes its own table for positions 0 … tokens−1; one call a tensor."""
    from tileops.rope import RoPEFwdOp

    op = RoPEFwdOp(pairing, "2d")
    return lambda q, k: [op.forward(x if x.dim() == 4 else x[None]) for x in (q, k) if x is not None]


def flash_attn(pairing, cos, sin, dtype):
    """flash-attn's Triton kernel, out of place; one call a tensor."""
    from flash_attn.layers.rotary import apply_rotary_emb

    rotate = functools.partial(apply_rotary_emb, interleaved=pairing == "interleaved")
    return lambda q, k: tuple(rotate(x[None], cos.to(dtype), sin.to(dtype)) for x in (q, k))


def flashinfer(pairing, cos, sin, dtype):
    """FlashInfer's kernel with a float32 cache, in place."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    cache, ids = torch.cat((cos, sin), -1), torch.arange(len(cos), device=cos.device)

    def rotate(q, k):
        apply_rope_with_cos_sin_cache_inplace(ids, q.flatten(1), k.flatten(1), q.shape[-1], cache, pairing == "neox")
        return q, k

    return rotate


def vllm(pairing, cos, sin, dtype):
    """vLLM's CUDA kernel with a cache in q's dtype, in place."""
    from vllm import _custom_ops

    cache, ids = torch.cat((cos, sin), -1).to(dtype), torch.arange(len(cos), device=cos.device)

    def rotate(q, k):
        _custom_ops.rotary_embedding(ids, q.flatten(1), k.flatten(1), q.shape[-1], cache, pairing == "neox")
        return q, k

    return rotate


FORWARD = {
    "transformers, eager": transformers,
    "transformers, torch.compile": compiled,
    "Liger-Kernel": liger,
    "TileOPs": tileops,
    "flash-attn": flash_attn,
    "FlashInfer": flashinfer,
    "vLLM": vllm,
}
BACKWARD = {"Liger-Kernel": functools.partial(liger, function="rope_backward")}
