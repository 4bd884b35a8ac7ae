"""Rotary position embedding (RoPE) in TileLang: references in torch, and kernels judged by them.

Four rooms: references (what is right), tables (which angles a model's config asks for), kernels, and the op.
The kernels are a ladder, one idea a rung:

    ① rope_neox_naive           one row a block, as the formula says it
    ② rope_neox_blocked         16 rows a block: fewer blocks to start
    ③ rope_interleaved_blocked  the same for the other pairing
    ④ rope_per_token            one table row, gathered by position id, for all heads of a token; `apply_rope` runs it

Run `python rope_kernels.py` to check every kernel on the device of this machine.
TileLang reads annotations when a kernel is built, so `from __future__ import annotations`
must not stand in a file that holds these factories.
"""

import collections
import copy
import functools
import inspect
import itertools
import math
import os
import sys
import tempfile
import warnings

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA's own answer would keep it from forked children

import tilelang
import tilelang.language as T
import torch
from tilelang.contrib.cc import get_cplus_compiler

# ------------------------------------------------------------------------------------------- references


def _checked(x, cos, sin):
    """Refuse what torch would broadcast or truncate silently; return all three in the arithmetic's dtype."""
    R = x.shape[-1]
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} takes a floating dtype, got {tensor.dtype}")
    if R % 2:
        raise ValueError(f"rope dim must be even, got R={R}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape[-1] != R // 2:
            raise ValueError(f"{name} takes one column a pair, {R // 2} for R={R}, got {tuple(table.shape)}")
        rows = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        if table.dim() > x.dim() or any(size not in (1, there) for size, there in rows):
            raise ValueError(f"{name} does not broadcast over x's rows: {tuple(table.shape)} for x {tuple(x.shape)}")
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(compute), cos.to(compute), sin.to(compute)


def torch_rope_interleaved(x, cos, sin):
    """Rotate the adjacent pairs (x[2p], x[2p+1]) of the last dimension.

        y[2p]   = x[2p]·cos[p] − x[2p+1]·sin[p]
        y[2p+1] = x[2p]·sin[p] + x[2p+1]·cos[p]        p = 0 … R/2−1

    Shapes: x, y (..., R); cos, sin broadcastable to (..., R/2), as (tokens, 1, R/2) for x (tokens, heads, R).
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

    Shapes, dtypes, errors: as torch_rope_interleaved.
    Source: GPT-NeoX, arXiv:2204.06745; the layout of Llama 1–3 and Qwen checkpoints in transformers.
    """
    work, cos, sin = _checked(x, cos, sin)
    first, second = work.tensor_split(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def torch_partial_rope(x, cos, sin, mode="neox", start=None):
    """Rotate R channels of each head and pass the others through bit for bit.

        y[start:start+R] = rope_mode(x[start:start+R]),  y[j] = x[j] elsewhere       R = 2·cos.shape[-1]

    start=None takes the trailing R channels (MLA's decoupled RoPE, DeepSeek-V4), 0 the leading ones (GPT-NeoX, GPT-J,
    Phi, GLM, GLM-4). R = width is the full rotation, R = 0 the identity.
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
    start = width - rope_dim if start is None else start
    if not 0 <= start <= width - rope_dim:
        raise ValueError(f"start takes 0 … {width - rope_dim} for R={rope_dim} of {width} channels, got start={start}")
    y = x.clone()
    y[..., start : start + rope_dim] = rotations[mode](x[..., start : start + rope_dim], cos, sin)
    return y


# ----------------------------------------------------------------------------------------------- tables

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_SPELLINGS = {"mrope": "default", "su": "longrope", "deepseek_yarn": "yarn"}
_LENGTH = "original_max_position_embeddings"
_KEYS = {"rope_type", "type", "rope_theta", "factor", "alpha", "low_freq_factor", "high_freq_factor", _LENGTH}
_KEYS |= {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor", "short_factor"}
_KEYS |= {"long_factor", "short_mscale", "long_mscale", "mrope_section", "mrope_interleaved", "max_position_embeddings"}
_ELSEWHERE = {  # keys that change the model, but not here
    "llama_4_scaling_beta": "it belongs to q, which it scales by position",
    "attn_factor": "it belongs to engines that multiply the attention factor by it",
    "partial_rotary_factor": "it belongs to rope_dim, where rope_settings puts it",
    **dict.fromkeys(["rope_interleave", "indexer_rope_interleave"], "it belongs to the choice of mode"),
    **dict.fromkeys(["no_rope_layers", "no_rope_layer_interval"], "it belongs to the choice of layers: not all rotate"),
}


def _integer(name, value, least, most=2**31 - 1):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} takes an integer, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be at least {least}, got {name}={value}; up to {most} is served")
    return value


def _number(given, key, default=None, above=0.0, or_zero=False):
    value = default if given.get(key) is None else given[key]
    if value is None:
        raise ValueError(f"{key} is missing: it takes a number above {above:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{key} takes a number, got {value!r}")
    if not (above < value <= 1e12 and value >= 1e-12 or or_zero and value == 0):  # beyond, powers overflow
        raise ValueError(f"{key} takes a finite number above {above:g}, got {key}={value!r}; 1e-12 … 1e12 are served")
    return float(value)


def _given(dictionary, name="config"):
    if not isinstance(dictionary, (dict, type(None))):
        raise TypeError(f"{name} takes a dictionary or None, got {dictionary!r}")
    given = {key: value for key, value in (dictionary or {}).items() if value is not None}
    return {"truncate": False} | given if "truncate" in (dictionary or {}) else given  # transformers reads null so


def _kind(given):
    kinds = [_SPELLINGS.get(str(given[key]), given[key]) for key in ("rope_type", "type") if key in given]
    if not kinds and given.keys() & {"factor", "long_factor", "alpha"}:
        raise ValueError(f"rope_type is missing beside the factors: it takes {', '.join(_TYPES)}")
    for kind in kinds:
        if kind not in _TYPES:
            raise ValueError(f"rope_type takes {', '.join((*_SPELLINGS, *_TYPES))}, got {kind!r}")
    if kinds and kinds[0] != kinds[-1]:
        raise ValueError(f"rope_type and type must agree, got {' and '.join(kinds)}")
    return kinds[0] if kinds else "default"


def _warn_of(keys):
    for key in sorted(keys):
        warnings.warn(f"{key} is not applied here: {_ELSEWHERE.get(key, 'it is unknown')}", stacklevel=3)


def _yarn(theta, base, given, max_position):
    length, rope_dim = _number(given, _LENGTH, max_position), 2 * len(theta)
    s = _number(given, "factor", max_position and max_position / length)
    fast, slow = _number(given, "beta_fast", 32), _number(given, "beta_slow", 1)
    if fast < slow:
        raise ValueError(f"beta_fast takes at least beta_slow={slow:g}, got beta_fast={fast:g}")
    a, b = (rope_dim * math.log(length / (math.tau * turns)) / (2 * math.log(base)) for turns in (fast, slow))
    if not isinstance(truncate := given.get("truncate", True), bool):
        raise TypeError(f"truncate takes true or false, got {truncate!r}")
    if truncate:
        a, b = math.floor(a), math.ceil(b)
    a, b = max(a, 0), min(b, rope_dim - 1)
    b += 0.001 * (a == b)  # a steep ramp instead of 0/0
    ramp = ((torch.arange(len(theta), dtype=torch.float64, device="cpu") - a) / (b - a)).clamp(0, 1)
    # as in transformers, zero counts as absent, and one mscale without the other plays no part
    k, k_all = (_number(given, key, 0, or_zero=True) for key in ("mscale", "mscale_all_dim"))
    growth = 0.1 * math.log(max(s, 1.0))
    factor = (k * growth + 1) / (k_all * growth + 1) if k and k_all else growth + 1
    return theta / s * ramp + theta * (1 - ramp), _number(given, "attention_factor", factor)


def _longrope(theta, given, seq_len, max_position):
    length = _number(given, _LENGTH, above=1.0)
    for name in ("short_factor", "long_factor"):
        if not isinstance(divisors := given.get(name, []), (list, tuple)):
            raise TypeError(f"{name} takes a list of numbers, got {divisors!r}")
        if len(divisors) != len(theta):
            raise ValueError(f"{name} takes R/2={len(theta)} numbers, got {len(divisors)}")
        for entry in divisors:
            _number({name: entry}, name)
    reach = "long" if seq_len is not None and seq_len > length else "short"
    theta = theta / torch.tensor(given[f"{reach}_factor"], dtype=torch.float64, device="cpu")
    key = f"{reach}_mscale" if f"{reach}_mscale" in given else "attention_factor"
    s = _number(given, "factor", 1.0 if key in given else max_position and max_position / length)
    return theta, _number(given, key, math.sqrt(1 + math.log(max(s, 1.0)) / math.log(length)))


def rope_frequencies(rope_dim, base=10000.0, scaling=None, *, seq_len=None, max_position=None):
    """Return the inverse frequencies that a model's config.json asks for, and the factor for its cos and sin.

        θ[i] = base^(−2i/R)    i = 0 … R/2−1,  R = rope_dim,  s = factor,  M = max_position,  S = max(seq_len, M),
                               L = original_max_position_embeddings

        type          inv_freq[i]                                                                attention factor
        default       θ[i]                                                                       1
        linear        θ[i]/s                                                                     1
        dynamic       θ[i] of base·(s·S/M − (s−1))^(R/(R−2)), with alpha of base·alpha^(R/(R−2)) 1
        llama3        (1−t)·θ[i]/s + t·θ[i],  t = clamp((L·θ[i]/2π − low)/(high − low), 0, 1)    1
        yarn          γ·θ[i]/s + (1−γ)·θ[i],  γ = clamp((i − a)/(b − a), 0, 1)                   m(k)/m(k_all) or m(1)
        longrope      θ[i]/long_factor[i] if seq_len > L, else θ[i]/short_factor[i]              √(1 + ln s / ln L)
        proportional  θ[i]/s for i < partial_rotary_factor·R/2, else 0; R is the whole head      1

        yarn: c(r) = R·ln(L/2πr)/(2·ln base), a = max(⌊c(beta_fast)⌋, 0), b = min(⌈c(beta_slow)⌉, R−1), without ⌊⌋ and
        ⌈⌉ if `truncate` is false, b + 0.001 if a = b; m(k) = 0.1·k·ln s + 1, k = mscale, k_all = mscale_all_dim, m(1)
        unless both are nonzero; ln s is 0 for s < 1. `attention_factor`, or `long_mscale` or `short_mscale`, wins.

    scaling is config.json's `rope_parameters` or `rope_scaling`: its `rope_theta` wins over base, null counts as absent
    (as false for truncate), keys of other types are ignored, those not applied are warned about. If absent, s is M/L in
    yarn and longrope, 1 in proportional, and L is M in yarn. mrope is default (its sections choose position ids), su
    longrope, deepseek_yarn yarn. The attention factor multiplies cos and sin, transformers' value: the rest of
    DeepSeek-style models, m(mscale_all_dim)² in the softmax scale, is not done here.
    Shapes: inv_freq (R/2,). Dtypes: float64, on the CPU; a float. Equal arguments give equal bits.
    Errors: ValueError for an odd rope_dim, unknown type, a key missing, senseless or nested; TypeError for wrong types.
    Source: RoFormer, arXiv:2104.09864; YaRN (dynamic too), arXiv:2309.00071; LongRoPE, arXiv:2402.13753; Llama 3,
    arXiv:2407.21783; the values are those of transformers' ROPE_INIT_FUNCTIONS.
    """
    if _integer("rope_dim", rope_dim, least=2, most=2**16) % 2:
        raise ValueError(f"rope dim must be even, got R={rope_dim}")
    for name, value, least in (("seq_len", seq_len, 0), ("max_position", max_position, 1)):
        _integer(name, least if value is None else value, least)
    given = _given(scaling, "scaling")
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise ValueError(f"scaling takes the dictionary of one layer type, got several: {nested}")
    kind = _kind(given)
    _warn_of(given.keys() - _KEYS - ({"partial_rotary_factor"} if kind == "proportional" else set()))
    name = "rope_theta" if "rope_theta" in given else "base"
    base = _number({**given, "base": base}, name, above=1.0 if kind == "yarn" else 0.0)  # yarn divides by ln base
    if kind == "dynamic":
        if rope_dim < 4:
            raise ValueError(f"dynamic takes a rope_dim of at least 4, its exponent is R/(R−2), got R={rope_dim}")
        if "alpha" in given:
            stretch = _number(given, "alpha")
        else:
            s, trained = _number(given, "factor"), _number({"max_position": max_position}, "max_position")
            stretch = s * max(seq_len or 0, trained) / trained - (s - 1)
        base *= stretch ** (rope_dim / (rope_dim - 2))
    theta = base ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64, device="cpu") / rope_dim)
    if kind == "yarn":
        return _yarn(theta, base, given, max_position)
    if kind == "longrope":
        return _longrope(theta, given, seq_len, max_position)
    if kind == "linear":
        theta = theta / _number(given, "factor")
    elif kind == "llama3":
        low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor takes less than high_freq_factor={high:g}, got low_freq_factor={low:g}")
        t = ((_number(given, _LENGTH) * theta / math.tau - low) / (high - low)).clamp(0, 1)
        theta = (1 - t) * (theta / _number(given, "factor")) + t * theta
    elif kind == "proportional":
        share = _number(given, "partial_rotary_factor", 1.0)
        pairs = round(share * len(theta))  # not cut: 0.7 · 90 is 62.99… in floating point
        if share > 1 or pairs < 1 or abs(share * len(theta) - pairs) > 1e-6:
            raise ValueError(f"partial_rotary_factor takes whole pairs of R/2={len(theta)} in (0, 1], got {share!r}")
        theta = theta * (torch.arange(len(theta), device="cpu") < pairs) / _number(given, "factor", 1.0)
    return theta, 1.0


_BY_TYPE = {  # keys for one type of layers, and what they stand for there
    "full_attention": {"global_rope_theta": "rope_theta", "global_head_dim": "head_dim"},
    "sliding_attention": dict.fromkeys(["local_rope_theta", "rope_local_base_freq", "swa_rope_theta"], "rope_theta"),
}
_LEFT_OUT = {  # what files of these types of models may leave to their class in transformers
    "codegen falcon gptj llama mistral": {"base": 10000.0},
    "chatglm": {"base": 10000.0, "share": 0.5},
    "glm glm4 glm4_moe nemotron persimmon phi recurrent_gemma": {"share": 0.5},
    "gpt_neox qwen3_5_text qwen3_5_moe_text qwen3_next stablelm": {"share": 0.25},
    "gemma3_text gemma3n_text t5gemma2_text": {"base": 1e6, "rope_local_base_freq": 10000.0, "head width": 256},
    "modernbert modernbert-decoder": {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
    "olmo3": {"rope_local_base_freq": 500000.0},
}
_OTHERWISE = {"ernie4_5_vl_moe_text", "minimax_m3_vl_text"}  # their classes make another table than their files say
_ROTATED = {"rotary": True, "use_rotary_pos_emb": True, "use_mem_rope": True, "alibi": False}
_KNOWN = {"rope_parameters", "rope_scaling", "rope_ratio", "original_rope", *_ELSEWHERE, *_ROTATED}


def _of_layer(config, layer):
    """Return what config says of one type of layers, and its dictionary of scaling."""
    types = config.get("layer_types", [])
    first = types.index(layer) if layer in types else 0
    config |= next((own for i, own in config.get("per_layer_config", {}).items() if int(i) == first), {})

    old, new = (_given(config.get(key), key) for key in ("rope_scaling", "rope_parameters"))
    beside = {key: new.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    plain = [beside | own | {"rope_type": _kind(own), "type": None} for own in (old, new)]
    if old and new and plain[0] != plain[1]:
        raise ValueError(f"rope_scaling and rope_parameters disagree: {old} and {new}")
    scaling = new or old
    nested = any(isinstance(value, dict) for value in scaling.values())
    by_type = any(key in config for keys in _BY_TYPE.values() for key in keys)
    names = list(scaling) if nested else list(_BY_TYPE) if by_type else [None, *types]
    if layer not in names:
        raise ValueError(f"layer_type takes one of {sorted(set(names), key=str)}, got {layer!r}")
    if nested:
        config.pop("compress_rope_theta", None)  # DeepSeek-V4's, in the dictionary too
        scaling = _given(scaling[layer])
    elif layer == "sliding_attention" and "rope_local_base_freq" in config:
        scaling = {}  # Gemma 3 scales full attention alone
    return config | {name: config[key] for key, name in _BY_TYPE.get(layer, {}).items() if key in config}, scaling


def _take(config, what, keys):
    """Take out what config says under any of the keys, else what its class takes."""
    said = {key: config.pop(key) for key in keys.split() if key in config}
    if any(value != other for value in said.values() for other in said.values()):
        raise ValueError(f"config says {what} more than once, and not alike: {said}")
    return next(iter(said.values()), config.get(what))


def rope_settings(config, layer_type=None):
    """Read a whole config.json: return what rope_frequencies(**settings, seq_len=…) takes.

        R = qk_rope_head_dim or rotary_dim, else ⌊share · head width⌋, in proportional the head width
        head width = head_dim, else hidden size / heads

    config is a dictionary, or an object with to_dict; a text_config in it is entered. layer_type is the name of a type
    of layers, needed where settings differ by it. Returns {"rope_dim", "base", "scaling", "max_position"}; not the
    pairing, which config.json does not settle. Keys that belong elsewhere are warned about.
    Errors: ValueError for what is not settled, naming the keys: no width or base, no layer named, values that disagree,
    no rotation at all, image towers, unknown keys with rope, rotary or theta in them; TypeError for wrong types.
    Source: transformers' configuration classes, which hold what files leave out.
    """
    config = _given(config.to_dict() if hasattr(config, "to_dict") else config)
    about = {key for key in config if any(word in key for word in ("rope", "rotary", "theta", "ntk"))}
    if text := _given(config.get("text_config"), "text_config"):
        if apart := sorted(key for key in about if config[key] != text.get(key)):
            raise ValueError(f"text_config says something else than {apart} beside it")
        return rope_settings(text, layer_type)
    model = config.get("model_type")
    if model in _OTHERWISE or config.keys() & {"patch_size", "image_size"}:
        raise ValueError(f"model_type {model} is an image tower, or its class makes another table than config says")
    off = [key for key, rotated in _ROTATED.items() if bool(config.get(key, rotated)) != rotated]
    if off or config.get("position_embedding_type") in ("nope", "alibi"):
        raise ValueError(f"its layers are not rotated, by {', '.join(off) or 'position_embedding_type'}")
    left_out = next((values for models, values in _LEFT_OUT.items() if model in models.split()), {})
    config, scaling = _of_layer(left_out | config, layer_type)
    R = _take(config, "R", "qk_rope_head_dim rotary_dim")
    width = _take(config, "head width", "head_dim attention_head_dim kv_channels")
    hidden = _take(config, "hidden size", "hidden_size n_embd d_model")
    heads = _take(config, "heads", "num_attention_heads n_head num_heads")
    share = _take(config, "share", "partial_rotary_factor rotary_pct rope_pct")
    base = _take(config, "base", "rope_theta rotary_emb_base rotary_embedding_base")
    max_position = _take(config, "max_position", "max_position_embeddings n_positions")
    if unknown := sorted((about & config.keys()).difference(_KNOWN, *_BY_TYPE.values())):
        raise ValueError(f"config has keys about rotation that are not understood: {unknown}")

    if width is None and heads:
        width = _integer("hidden size", hidden, 1) // _integer("heads", heads, 1)
    if width is None and R is None:
        raise ValueError(f"config has no head width, only {sorted(key for key in config if 'head' in key)}")
    width = _integer("head width", R if width is None else width, 1)
    base, share = scaling.pop("rope_theta", base), scaling.pop("partial_rotary_factor", share)
    share = _number({"partial_rotary_factor": share}, "partial_rotary_factor", 1.0)
    if share > 1 or R is not None and share < 1 and int(width * share) != R:
        raise ValueError(f"config rotates a share of {share:g} and R={R} of {width} channels")
    R = int(width * share) if R is None else R
    if _kind(scaling) == "proportional":
        R, scaling["partial_rotary_factor"] = width, share
    scaling |= {key: config[key] for key in [_LENGTH] if key in config}
    base = _number({"rope_theta": base}, "rope_theta")
    base *= _number(config, "rope_ratio", 1.0)
    _warn_of(config.keys() & _ELSEWHERE)
    return {"rope_dim": R, "base": base, "scaling": scaling, "max_position": max_position}


def _rounded_once(value, dtype):
    if dtype.itemsize >= 4:
        return value.to(dtype)
    # torch goes from float64 to a half type through float32, which rounds twice. So cut the float32 towards zero and
    # set its last bit where it is inexact ("round to odd"): the second step then sees no tie that is none.
    near = value.to(torch.float32)
    cut = torch.where(near.abs() > value.abs(), near.nextafter(torch.zeros_like(near)), near)
    return (cut.view(torch.int32) | (cut != value)).view(torch.float32).to(dtype)


def rope_table(inv_freq, positions, attention_factor=1.0, *, dtype=torch.float32, device=None):
    """Return the tables cos and sin at the given positions, one column a pair.

        cos[…, i] = attention_factor·cos(positions[…]·inv_freq[i])
        sin[…, i] = attention_factor·sin(positions[…]·inv_freq[i])      i = 0 … R/2−1

    Shapes: inv_freq (R/2,); positions an int n for 0 … n−1, or an integer tensor of any shape, negative ids too;
    returns two tables (*positions.shape, R/2), on `device`: by default that of a positions tensor, else of inv_freq.
    Dtypes: inv_freq float64, or float32 as models store it; all is float64 up to one rounding to dtype. No gradient.
    Errors: ValueError for floating positions (bfloat16 cannot hold 257), n < 0, an inv_freq of another shape, an
    attention_factor ≤ 0; TypeError for an inv_freq of another dtype, a dtype that is not floating.
    Source: RoFormer, arXiv:2104.09864, equation 34; the factor: YaRN, arXiv:2309.00071, section 3.4.
    """
    if getattr(inv_freq, "dtype", None) not in (torch.float64, torch.float32):
        raise TypeError(f"inv_freq takes a float64 or float32 tensor, got {getattr(inv_freq, 'dtype', inv_freq)!r}")
    if inv_freq.requires_grad:
        raise ValueError("inv_freq gets no gradient: pass inv_freq.detach()")
    if inv_freq.dim() != 1:
        raise ValueError(f"inv_freq takes one entry a pair, (R/2,), got {tuple(inv_freq.shape)}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype takes a floating dtype, got {dtype!r}")
    attention_factor = _number({"attention_factor": attention_factor}, "attention_factor")
    if not isinstance(positions, torch.Tensor):
        positions = torch.arange(_integer("positions", positions, least=0), device=inv_freq.device)
    elif positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions takes an integer dtype, got {positions.dtype}")
    device = positions.device if device is None else device
    angle = positions.to(device, torch.float64)[..., None] * inv_freq.to(device)
    return tuple(_rounded_once(f(angle) * attention_factor, dtype) for f in (torch.cos, torch.sin))


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


# Moves are of whole vectors at checked ids and heads, so on CUDA TileLang's own bounds checks are left out.
@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})
def rope_per_token(
    heads_q, heads_k, D, R, start=0, mode="neox", dtype="bfloat16", table_dtype="float32", index_dtype="int64",
    inverse=False, inplace=False, batched=False, width=1, per_thread=1, threads=128, trigger=False,
):  # fmt: skip
    """Build kernel ④: a token's table row, gathered by its position id, comes from memory once and serves all heads.

        y[t,h,start:start+R] = rope_mode(q[t,h,start:start+R], cos[positions[t]], ±sin[positions[t]])
        y[t,h,j]             = q[t,h,j] elsewhere, and likewise z from k          − where inverse

    Shapes: kernel(q, k, cos, sin, positions, y, z), or with inplace=True kernel(q, k, cos, sin, positions), which
    writes into q and k. q, y (tokens, heads_q, D); k, z (tokens, heads_k, D), or with heads_k=0 q and y once more;
    cos, sin (P, R/2); positions (tokens,), or with index_dtype=None cos once more, and token t takes row t.
    batched=True puts a batch axis before the tokens, up to 65535 on CUDA. Tokens, batch and P are free in each call.
    Strides: channels side by side; all others are free on CUDA, those of contiguous tensors on the C backend. `width`
    is the widest access in elements: addresses and strides are multiples of it, the tables' in their own elements.
    Dtypes: q float16, bfloat16 (CUDA only) or float32, tables float32 or q's, ids int32 or int64; float32 arithmetic.
    Ids outside 0 … P−1 give NaN in the channels that turn. From sm_90 on the kernel may start before the one ahead
    of it in the stream has ended (programmatic dependent launch), and waits for that end before it reads or writes.
    For speed alone: per_thread heads a thread, about `threads` a block; trigger lets the next one start as early.
    Errors: ValueError naming the argument that is out of range.
    Source: this repository; notebook 09 counts the bytes that it saves.
    """
    for name, value, fits, takes in (
        ("heads_q", heads_q, heads_q > 0, "1 or more"),
        ("heads_k", heads_k, heads_k >= 0, "0 or more"),
        ("R", R, R > 0 and R % 2 == 0, "an even rope dim"),
        ("start", start, 0 <= start <= D - R, f"0 … {D - R} for R={R} of D={D}"),
        ("mode", mode, mode in ("neox", "interleaved"), "neox or interleaved"),
        ("dtype", dtype, dtype in ("float16", "bfloat16", "float32"), "float16, bfloat16 or float32"),
        ("table_dtype", table_dtype, table_dtype in ("float32", dtype), f"float32 or {dtype}"),
        ("index_dtype", index_dtype, index_dtype in ("int32", "int64", None), "int32, int64 or None"),
        ("width", width, width in (1, 2, 4, 8), "1, 2, 4 or 8"),
        ("per_thread", per_thread, per_thread in (1, 2), "1 or 2"),
        ("threads", threads, threads in (32, 64, 128, 256), "32, 64, 128 or 256"),
    ):
        if not fits:
            raise ValueError(f"{name} takes {takes}, got {name}={value!r}")
    target = tilelang.tvm.target.Target.current(allow_none=True)
    if target is None and tilelang.tvm.cuda().exist:
        target = tilelang.backend.target.determine_target("auto", return_object=True)
    on_c = target is not None and target.kind.name == "c"  # there are no threads to bind
    overlapped = target is not None and not on_c and tilelang.contrib.nvcc.have_pdl(target)  # sm_90 and later
    if on_c and dtype == "bfloat16":
        raise ValueError("dtype bfloat16 needs CUDA: the C backend has no such type, it takes float16 or float32")

    # A token's heads, q's and then k's, go to `blocks` blocks. Of a block's threads the first slots·turning turn `vec`
    # pairs of each of their heads, in two vectors R/2 apart: neox pairs across them, interleaved within each (for vec 1
    # two neighbours). The last slots·passing copy what passes, two vectors of `wide` each; in place there are none.
    half, heads, gathered = R // 2, heads_q + heads_k, index_dtype is not None
    size, table_size = (4 if kind == "float32" else 2 for kind in (dtype, table_dtype))
    bits = min(width, 16 // size)  # n & -n: the largest power of two that divides all numbers joined in n
    vec, wide = (n & -n for n in (bits | half | start, bits | D | R | start))
    turning, passing = half // vec, 0 if inplace else -(-(D - R) // (2 * wide))
    blocks = -(-heads // (max(1, threads // (turning + passing)) * per_thread))
    slots = -(-heads // (blocks * per_thread))  # heads side by side in a block, each thread per_thread deep
    threads = slots * (turning + passing)
    if threads > 1024 and not on_c:
        raise ValueError(f"R={R} at start={start} of D={D} takes {threads} threads for width={width}, over 1024")

    # Moves of n bytes between registers and memory; q's address or k's is chosen without a branch. Loads of 16 bytes or
    # multiples are PTX, for two things that TileLang has no word for: the hint that L2 keep the line, which is faster
    # (notebook 09), and `volatile`: x's loads stay behind the wait for the kernel before and ahead of that for the id.
    prelude = """
__device__ __forceinline__ void load(void* to, const void* q, const void* k, bool in_q, int at, int n) {
  const char* from = (const char*)(in_q ? q : k) + at;
#if __CUDA_ARCH__ >= 800
  if (n % 16 == 0) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    for (int i = 0; i < n; i += 16) {
      unsigned* v = (unsigned*)((char*)to + i);
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
          : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from + i), "l"(policy));
    }
  } else
#endif
  memcpy(to, __builtin_assume_aligned(from, n < 16 ? n : 16), n);
}
#define load_row(to, row, at, n) load(to, row, row, true, at, n)
__device__ __forceinline__ void store(const void* from, void* y, void* z, bool in_y, int at, int n) {
  memcpy(__builtin_assume_aligned((char*)(in_y ? y : z) + at, n < 16 ? n : 16), from, n);
}
"""
    if on_c:  # the same three, with the types by which TileLang declares them
        prelude = f"""extern "C" {{
typedef {"float" if size == 4 else "half"} X; typedef {"float" if table_size == 4 else "half"} C;
static void* load(X* x, X* q, X* k, bool in_q, int at, int n) {{ return memcpy(x, (char*)(in_q ? q : k) + at, n); }}
static void* load_row(C* c, C* row, int at, int n) {{ return memcpy(c, (char*)row + at, n); }}
static void* store(X* x, X* y, X* z, bool in_y, int at, int n) {{ return memcpy((char*)(in_y ? y : z) + at, x, n); }}
}}
"""

    S, P = T.dynamic("S"), T.dynamic("P")
    lead = (T.dynamic("B"), S) if batched else (S,)

    def tensor(name, shape, dtype, inner=(1,)):
        free = [T.dynamic(f"{name}_{axis}", "int64") for axis in range(len(shape) - len(inner))]
        return T.Tensor(shape, dtype) if on_c else T.StridedTensor(shape, (*free, *inner), dtype)

    q_type, y_type = (tensor(name, (*lead, heads_q, D), dtype) for name in "qy")
    k_type, z_type = (tensor(name, (*lead, heads_k or heads_q, D), dtype) for name in "kz")
    cos_type, sin_type = (tensor(name, (P, half), table_dtype) for name in ("cos", "sin"))
    id_type = tensor("id", lead, index_dtype, inner=()) if gathered else tensor("id", (P, half), table_dtype)

    apart = mode == "neox" or vec > 1  # vectors of one channel can't hold a pair: then the two are neighbours
    pieces = 2 if apart and mode == "interleaved" else 1  # of a table row that a thread needs

    def turned(lane, part):
        return start + (part * half + lane * vec if apart else 2 * lane + part)

    def passed(lane, part):
        channel = T.min((2 * lane + part) * wide, D - R - wide)  # of an odd number the last is copied twice
        return channel + T.if_then_else(channel < start, 0, R)

    def place(base, thread, lanes):
        thread = T.cast(thread, "uint32")  # unsigned, like t: a sign takes a register, and 32 are few
        values = base + T.cast(thread // lanes, "int32"), T.cast(thread % lanes, "int32")
        return [T.alloc_var("int32", init=value) for value in values]  # variables, as TileLang repeats expressions

    # For a head past a token's last one, the last is read once more and nothing stored: no branch holds up the id. In
    # place that one may be turned already, which spoils nothing: its own thread reads all it turns before it writes.
    @T.macro
    def move(way, x, n, q, k, token, head, lane, channel, count):
        for i in T.unroll(2):  # the two vectors of a head, of q's or, past them, of k's
            # TileLang checks the bounds of both addresses on the C backend, that of the one not meant as well
            at_q, at_k = (T.min(head, heads_q - 1), T.max(head - heads_q, 0)) if on_c else (head, head - heads_q)
            ends = T.address_of(x[n, i * count]), T.address_of(q[(*token, at_q, 0)]), T.address_of(k[(*token, at_k, 0)])
            T.evaluate(T.call_extern("handle", way, *ends, head < heads_q, channel(lane, i) * size, count * size))

    def load_row(vector, table, index, lane, i):
        ends = T.address_of(vector[i * vec // pieces]), T.address_of(table[index, 0])
        at, count = (i * half + lane * vec) // pieces * table_size, vec // pieces * table_size
        T.evaluate(T.call_extern("handle", "load_row", *ends, at, count))

    @T.macro
    def work(q, k, cos, sin, positions, y, z, token, base, thread):
        if thread < slots * turning:
            first, lane = place(base, thread, turning)
            x = T.alloc_local((per_thread, 2 * vec), dtype)
            c = T.alloc_local((vec,), table_dtype)
            s = T.alloc_local((vec,), table_dtype)
            # x first: its loads are under way while the id, then the row that it names, arrive
            for n in T.unroll(per_thread):
                move("load", x, n, q, k, token, T.min(first + n * slots, heads - 1), lane, turned, vec)
            index = positions[token] if gathered else token[-1]
            if (index >= 0) & (index < P):
                for i in T.unroll(pieces):
                    load_row(c, cos, index, lane, i)
                    load_row(s, sin, index, lane, i)
            else:  # outside the table: NaN for cos, which enters both sums below; sin may be anything
                for j in T.unroll(vec):
                    c[j] = T.cast(T.reinterpret(T.uint32(0x7FC00000), "float32"), table_dtype)
            for n in T.unroll(per_thread):
                if first + n * slots < heads:  # asked before the sums: asked after them, it makes registers spill
                    for j in T.unroll(vec):
                        one, two = (j, j + vec) if mode == "neox" else (2 * j, 2 * j + 1)
                        a, b = T.cast(x[n, one], "float32"), T.cast(x[n, two], "float32")
                        cj, sj = T.cast(c[j], "float32"), T.cast(s[j], "float32") * (-1.0 if inverse else 1.0)
                        x[n, one] = T.cast(a * cj - b * sj, dtype)
                        x[n, two] = T.cast(b * cj + a * sj, dtype)
                    move("store", x, n, y, z, token, first + n * slots, lane, turned, vec)
        elif passing:
            first, lane = place(base, thread - slots * turning, passing)
            x = T.alloc_local((per_thread, 2 * wide), dtype)
            for n in T.unroll(per_thread):
                move("load", x, n, q, k, token, T.min(first + n * slots, heads - 1), lane, passed, wide)
            for n in T.unroll(per_thread):
                if first + n * slots < heads:
                    move("store", x, n, y, z, token, first + n * slots, lane, passed, wide)

    @T.macro
    def launch(q, k, cos, sin, positions, y, z):
        with T.Kernel(S * blocks, lead[0] if batched else 1, threads=threads, prelude=prelude) as (block, b):
            if overlapped:
                T.pdl_sync()
                if trigger:
                    T.pdl_trigger()
            t = T.alloc_var("uint32", init=T.cast(block // blocks, "uint32"))
            token = (b, t) if batched else (t,)
            base = block % blocks * slots * per_thread  # the block's first head
            if not on_c:  # so few registers a thread that a multiprocessor holds all the blocks that it can
                T.annotate_min_blocks_per_sm(min(32, 64 // -(-threads // 32)))
            for thread in T.serial(threads) if on_c else [T.get_thread_binding()]:
                work(q, k, cos, sin, positions, y, z, token, base, thread)

    if inplace:

        @T.prim_func
        def rope(q: q_type, k: k_type, cos: cos_type, sin: sin_type, positions: id_type):
            launch(q, k, cos, sin, positions, q, k)

    else:

        @T.prim_func
        def rope(q: q_type, k: k_type, cos: cos_type, sin: sin_type, positions: id_type, y: y_type, z: z_type):
            launch(q, k, cos, sin, positions, y, z)

    return rope


class _Factory(type(rope_per_token)):
    """A factory that tells 16 from 16.0 and True, which its cache does not, and leaves no file of its builds behind."""

    def __call__(self, *args, **kwargs):
        parameters = self.signature.parameters
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            kind = int if parameters[name].default is inspect.Parameter.empty else type(parameters[name].default)
            if type(value) is not kind and not (kind is str and value is None):
                raise TypeError(f"{name} takes {kind.__name__}, got {value!r}")
        return super().__call__(*args, **kwargs)

    def compile(self, *args, **kwargs):
        kernel = super().compile(*args, **kwargs)
        kernel.__class__ = _Kernel
        library = getattr(kernel.adapter, "lib_generator", None)
        for path in (library.srcpath, library.libpath) if library else ():
            if path and os.path.dirname(path) == tempfile.gettempdir():
                os.remove(path)  # it is loaded, and copied into TileLang's cache
        return kernel


class _Kernel(tilelang.JITKernel):
    """A kernel that takes tensors alone: a raw pointer to anything else would end the process."""

    def __call__(self, *tensors):
        for x in tensors:
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_neg():
                raise TypeError(f"a kernel takes dense tensors that are not lazily negated, got {x!r}")
        return super().__call__(*tensors)


# The one choice of backend. Without a CUDA device the same sources go through TileLang's C backend:
# target, because the automatic choice only looks for GPUs; disable_vectorize, because C has no conversion for
# vectors of half; -O3, because no optimisation is on by default. Set once at import: a factory keeps what it
# built without regard to the target.
C_BACKEND = {"target": "c", "pass_configs": {"tirx.disable_vectorize": True}, "compile_flags": ["-O3"]}
for _factory in (rope_neox_naive, rope_neox_blocked, rope_interleaved_blocked, rope_per_token):
    functools.update_wrapper(_factory, _factory.func.orig_func)  # name, docstring and source for readers
    _factory.__class__ = _Factory
    _factory.mode = "lazy"  # what TileLang would find out by a first call; known, `.func` serves any target at once
    _factory.func.set_mode("lazy")
    _factory.cuda_pass_configs = _factory.pass_configs
    if not torch.cuda.is_available():
        vars(_factory).update(C_BACKEND)
_in_c = copy.copy(rope_per_token)  # for tensors on the CPU, also beside a CUDA device
_in_c.func = copy.copy(rope_per_token.func)
for _part in (_in_c, _in_c.func):
    _part.__post_init__()  # each with a cache of its own
vars(_in_c).update(C_BACKEND)


# --------------------------------------------------------------------------------------------------- op


def apply_rope(q, k, cos, sin, positions=None, *, mode="neox", start=None, inverse=False, inplace=False):
    """Rotate q and k by the table rows of their positions, in one launch on CUDA.

        y[t,h,start:start+R] = rope_mode(q[t,h,start:start+R], cos[positions[t]], sin[positions[t]])
        y[t,h,j]             = q[t,h,j] elsewhere                                  R = 2·cos.shape[1]

    and likewise k. inverse=True turns back, by −sin.
    Shapes: q (..., Hq, D), k (..., Hk, D) or None, with leading dimensions (tokens,) or (batch, seq); for
    (B, H, S, D) pass q.transpose(1, 2): strided tensors are read where they lie. cos and sin (P, R/2), halves of one
    cache too. positions: shaped like the leading dimensions, (1, seq) or (seq,); None means 0 … seq−1.
    Returns (q′, k′), or (q′, None); of "meta" tensors the shapes.
    start: the first rotated channel, to be said when R < D. inplace=True writes into q and k and returns them;
    they share no memory with the tables or ids, which is not looked at.
    Dtypes: q, k float16, bfloat16 or float32; tables float32 (advised) or q's; ids int32 or int64.
    float32 arithmetic, one rounding. The gradient (reverse mode) is the same kernel with −sin; tables get none.
    Errors: ValueError, or TypeError for a wrong type, that names the argument; NotImplementedError in forward mode and
    under torch.func; IndexError for an id outside 0 … P−1 on the CPU. On CUDA, where looking would synchronise, such
    tokens come out NaN.
    """
    if mode not in ("neox", "interleaved"):
        raise ValueError(f"mode takes 'neox' or 'interleaved', got {mode!r}")
    if type(inverse) is not bool or type(inplace) is not bool:
        raise TypeError(f"inverse and inplace take True or False, got inverse={inverse!r}, inplace={inplace!r}")
    if start is not None and type(start) is not int:
        raise TypeError(f"start takes an integer, got {start!r}")
    traced, forward = torch.compiler.is_compiling(), torch.autograd.forward_ad
    if not traced and (
        torch._C._are_functorch_transforms_active()
        or forward._current_level >= 0
        and any(isinstance(x, torch.Tensor) and forward.unpack_dual(x).tangent is not None for x in (q, k, cos, sin))
    ):
        raise NotImplementedError("apply_rope knows no forward mode or torch.func: use torch_partial_rope there")
    plain = not traced and type(q) is torch.Tensor  # otherwise torch looks on, and there may be no memory
    run = (_prepared if plain else _prepare)(  # a call that looks like one before it finds its kernel at once
        _form("q", q, plain), _form("k", k, plain), _form("cos", cos, plain), _form("sin", sin, plain),
        _form("positions", positions, plain), k.data_ptr() - q.data_ptr() if inplace and plain and k is not None else 0,
        mode, start, inverse, inplace, torch.is_grad_enabled(), plain,
    )  # fmt: skip
    return run(q, k, cos, sin, positions)


_Form = collections.namedtuple("_Form", "dtype device shape strides address learned")


def _form(name, x, plain):
    """Return what a call is checked and its kernel is chosen by: all of a tensor but its values."""
    if type(x) is not torch.Tensor:
        if x is None and name in ("k", "positions"):
            return None
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} takes a tensor, got {x!r}")
        if hasattr(x, "to_local"):
            raise TypeError(f"{name} takes a tensor on one device, got {type(x).__name__}: pass {name}.to_local()")
    try:
        if plain and not x.is_neg():
            return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16, x.requires_grad
        if not plain and x.layout is torch.strided and not x.is_nested:
            return x.dtype, x.device, x.shape, x.stride(), 0, x.requires_grad
    except RuntimeError:  # not dense, so that it has no address
        pass
    raise TypeError(f"{name} takes a dense tensor, not lazily negated: try .to_dense() or .resolve_neg()")


def _prepare(q, k, cos, sin, positions, apart, mode, start, inverse, inplace, grad, plain):
    """Check a call by the forms of its tensors; return the function of the tensors that carries it out."""
    q, k, cos, sin, positions = (form and _Form(*form) for form in (q, k, cos, sin, positions))
    start = _check(q, k, cos, sin, positions, start)

    def kept(x):
        return x if inplace or x is None else x.clone()

    if not cos.shape[1]:  # nothing turns
        return lambda q, k, *_: (kept(q), kept(k))
    wants_grad = grad and (q.learned or (k is not None and k.learned))
    if inplace and wants_grad:
        raise ValueError("inplace=True would write into a tensor that wants a gradient: leave it out")
    if wants_grad or not plain or q.device.type == "meta":  # torch has to see the op

        def through_torch(q, k, *rest):
            if inplace:
                _inplace_op(q, k, *rest, mode, start, inverse)
                return q, k
            y, z = _op(q, k, *rest, mode, start, inverse)
            return y, None if k is None else z

        return through_torch
    if inplace and (fault := _fault(q, k, apart // q.dtype.itemsize)):
        raise ValueError(f"inplace=True takes {fault}")
    again = functools.partial(apply_rope, mode=mode, start=start, inverse=inverse, inplace=inplace)
    if any(x and 0 in x.shape for x in (q, k)):  # what has elements, alone
        return lambda q, k, *rest: tuple(
            kept(x) if x is None or not x.numel() else again(x, None, *rest)[0] for x in (q, k)
        )
    if q.device.type == "cpu":
        return functools.partial(_rotate_in_c, mode=mode, start=start, inverse=inverse, inplace=inplace)
    return _on_cuda(q, k, cos, sin, positions, mode, start, inverse, inplace, again)


_prepared = functools.lru_cache(maxsize=4096)(_prepare)


def _check(q, k, cos, sin, positions, start):
    """Refuse forms that don't fit each other, by name; return the first rotated channel."""
    for name, x, dtypes in (
        ("q", q, (torch.float16, torch.bfloat16, torch.float32)),
        ("k", k, (q.dtype,)),
        ("cos", cos, (torch.float32, q.dtype)),
        ("sin", sin, (cos.dtype,)),
        ("positions", positions, (torch.int32, torch.int64)),
    ):
        if x is None:
            continue
        if x.dtype not in dtypes:
            raise TypeError(f"{name} takes {' or '.join(map(str, dtypes))}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} takes q's device {q.device}, got {x.device}")
        if x.learned and (x is cos or x is sin):
            raise ValueError(f"{name} gets no gradient: pass {name}.detach()")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q takes a tensor on CPU or CUDA, got one on {q.device}")
    if len(q.shape) not in (3, 4):
        raise ValueError(f"q takes (tokens, heads, D) or (batch, seq, heads, D), got {tuple(q.shape)}")
    *lead, _, D = q.shape
    if k is not None and (len(k.shape) != len(q.shape) or [*k.shape[:-2], k.shape[-1]] != [*lead, D]):
        raise ValueError(f"k takes q's shape {tuple(q.shape)} but for the heads, got {tuple(k.shape)}")
    if len(cos.shape) != 2:
        raise ValueError(f"cos takes (P, R/2), one column a pair, got {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin takes cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    rows, R = cos.shape[0], 2 * cos.shape[1]
    if D < R:
        raise ValueError(f"cos has {cos.shape[1]} columns, so R={R}; q is only D={D} wide")
    seq = lead[-1]
    if positions is None:
        if seq > rows:
            raise IndexError(f"positions 0 … {seq - 1} do not fit a table of {rows} rows")
    elif [*positions.shape] not in ([seq], lead, [1] * (len(lead) - 1) + [seq]):
        raise ValueError(f"positions takes the shape {tuple(lead)} or ({seq},), got {tuple(positions.shape)}")
    if start is None and 0 < R < D:
        raise ValueError(f"start must be said when R={R} < D={D}: 0 for leading, {D - R} for trailing")
    if not 0 <= (start or 0) <= D - R:
        raise ValueError(f"start takes 0 … {D - R} for R={R} of D={D}, got start={start}")
    return start or 0


def _fault(q, k, apart):
    """Say why q, and k `apart` elements behind it, can't be written in place by their forms, or nothing."""
    axes = []
    for name, x in (("q", q), ("k", k)):
        if x is None or 0 in x.shape:
            continue
        if x.strides[-1] != 1:
            return f"{name} with channels side by side, got strides {x.strides}"
        axes.append(sorted((stride, size) for size, stride in zip(x.shape, x.strides, strict=True) if size > 1))
        reach = 1
        for stride, size in axes[-1]:
            if stride < reach:
                return f"{name} without overlap in itself, got strides {x.strides}"
            reach += (size - 1) * stride
    if len(axes) < 2:
        return None
    first, second = axes if apart >= 0 else axes[::-1]
    # the outer axes move both by multiples of a common measure: modulo that, what the inner axes span must lie apart
    for m, n in itertools.product(range(len(first) + 1), range(len(second) + 1)):
        spans = [1 + sum((size - 1) * stride for stride, size in inner) for inner in (first[:m], second[:n])]
        measure = math.gcd(*(stride for stride, _ in first[m:] + second[n:]))
        place = abs(apart) % measure if measure else abs(apart)
        if spans[0] <= place and (not measure or place + spans[1] <= measure):
            return None
    return "q and k that share no element; by their strides these could"


def _on_cuda(q, k, cos, sin, positions, mode, start, inverse, inplace, again):
    """Return the function that runs kernel ④ on tensors of these forms; what it does not take is laid out anew."""
    if cos.strides[1] != 1 or sin.strides[1] != 1:  # rows may lie anywhere, their columns side by side
        clone = functools.partial(torch.clone, memory_format=torch.contiguous_format)
        return lambda q, k, cos, sin, positions: again(q, k, clone(cos), clone(sin), positions)
    metas = [torch.empty_strided(x.shape, x.strides, device="meta") for x in (q, k) if x]
    if not inplace and any(_dense(x) is not x for x in metas):
        return lambda q, k, *rest: again(_dense(q), k if k is None else _dense(k), *rest)
    batched, shape = len(q.shape) == 4, q.shape[:2]
    if batched and shape[0] > 65535:  # what a grid's second axis holds
        raise ValueError(f"q takes a batch of up to 65535 on CUDA, got {shape[0]}: put its tokens into one dimension")
    kernel = _kernel(q, k, cos, sin, positions, mode, start, inverse, inplace)
    spread = batched and positions and positions.shape != shape

    def run(q, k, cos, sin, positions):
        ids = cos if positions is None else positions.expand(shape) if spread else positions
        if inplace:
            kernel(q, q if k is None else k, cos, sin, ids)
            torch.autograd.graph.increment_version([q] if k is None else [q, k])  # so that autograd sees the write
            return q, k
        y = torch.empty_like(q)
        z = y if k is None else torch.empty_like(k)
        kernel(q, q if k is None else k, cos, sin, ids, y, z)
        return y, None if k is None else z

    return run


def _dense(x):
    """Return x, or a contiguous copy unless channels of x and of empty_like(x), its result, lie side by side."""
    return x if x.stride(-1) == torch.empty_like(x, device="meta").stride(-1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=4096)  # in place, `_prepare` is called anew for each distance of q and k
def _kernel(q, k, cos, sin, positions, mode, start, inverse, inplace):
    """Return kernel ④ for tensors of these forms as TileLang's bare executable, which starts fastest."""
    *tokens, heads_q, D = q.shape
    heads_k = k.shape[-2] if k else 0
    # the widest access that every row allows, by the lowest bit in any address or stride; y and z are dense
    bits, table_bits = 16, 16 | cos.address | sin.address | (cos.strides[0] | sin.strides[0]) * cos.dtype.itemsize
    for x in filter(None, (q, k)):
        bits |= x.address
        for count in (D, *x.strides[:-1]):
            bits |= count * x.dtype.itemsize
    width = (bits & -bits) // q.dtype.itemsize
    if table_bits % 16:
        width = min(width, (table_bits & -table_bits) // cos.dtype.itemsize)
    threads = math.prod(tokens) * (heads_q + heads_k) * D * q.dtype.itemsize // 16
    threads //= torch.cuda.get_device_properties(q.device).multi_processor_count
    access, geometry = _geometry(threads, inplace, narrow=cos.shape[1] % 4 or start % 4)
    names = [str(x.dtype)[6:] if x else None for x in (q, cos, positions)]
    with torch.cuda.device(q.device):
        kernel = rope_per_token(
            heads_q, heads_k, D, 2 * cos.shape[1], start, mode, *names, inverse, inplace, len(tokens) == 2,
            min(width, access // q.dtype.itemsize), **geometry
        )  # fmt: skip
    run = kernel.adapter._get_executable()
    if torch.cuda.device_count() == 1:
        return run

    def there(*arguments):
        with torch.cuda.device(q.device):
            run(*arguments)

    return there


def _geometry(threads, inplace, narrow):
    """Return the bytes of an access and ④'s options for speed, as they were measured on an H200.

    threads: what each multiprocessor gets at 16 bytes of q and k a thread; it holds 2,048 at once.
    """
    if threads <= 1024:  # short of work: small threads, all up at once, and room for the next kernel's beside them
        return 8, {"trigger": True}
    if inplace and threads > 2**15:  # lines are read and written back: fewer of them under way
        return 16, {"per_thread": 2, "threads": 32}
    if inplace or narrow:  # by one head a thread has too little under way
        return 8 if inplace else 16, {"per_thread": 2, "threads": 256}
    return 16, {}


def _rotate_in_c(q, k, cos, sin, positions, mode, start, inverse, inplace):
    """Rotate through the C backend, on contiguous copies: one build serves every length, batch and layout."""
    ids = torch.arange(q.shape[-3]) if positions is None else positions
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= cos.shape[0]:
        raise IndexError(f"positions takes ids 0 … {cos.shape[0] - 1}, got {low} … {high}")
    ids = ids.expand(q.shape[:-2]).flatten().long().contiguous()
    wide = torch.float32 if q.dtype == torch.bfloat16 else q.dtype  # C has no bfloat16: float32, then the one rounding
    if cos.dtype == torch.bfloat16 or not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin, ids = cos[ids].float(), sin[ids].float(), torch.arange(len(ids))  # the rows, never the whole table
    pair = [q] if k is None else [q, k]
    turned = [x.to(wide, copy=True, memory_format=torch.contiguous_format).flatten(0, -3) for x in pair]
    (*_, heads_q, D), R = q.shape, 2 * cos.shape[1]
    names = (str(kind)[6:] for kind in (wide, cos.dtype))
    heads_k = 0 if k is None else k.shape[-2]
    kernel = _in_c(heads_q, heads_k, D, R, start, mode, *names, inverse=inverse, inplace=True, width=8)
    kernel(turned[0], turned[-1], cos, sin, ids)
    results = pair if inplace else [_dense(x).clone() for x in pair]
    for out, done in zip(results, turned, strict=True):
        out[..., start : start + R] = done.view(out.shape)[..., start : start + R]
    return results[0], None if k is None else results[1]


def _rotate(q, k, cos, sin, positions, convention, start, inverse, inplace=False):
    """What the ops run: apply_rope on plain tensors, which torch has done with."""
    q, k, cos, sin, positions = (x if x is None else x.as_subclass(torch.Tensor) for x in (q, k, cos, sin, positions))
    options = {"mode": convention, "start": start, "inverse": inverse, "inplace": inplace}
    with torch.no_grad():
        y, z = apply_rope(q, k, cos, sin, positions, **options)
    return None if inplace else (y, q.new_empty(0) if z is None else z)


# not "mode": torch.compile's own wrapper of ops that write has a parameter of that name
_SIGNATURE = "Tensor cos, Tensor sin, Tensor? positions, str convention, int start, bool inverse"
_op = torch.library.custom_op(
    "rope_chapter::rope", _rotate, mutates_args=(), schema=f"(Tensor q, Tensor? k, {_SIGNATURE}) -> (Tensor, Tensor)"
)
_inplace_op = torch.library.custom_op(
    "rope_chapter::rope_", functools.partial(_rotate, inplace=True), mutates_args=("q", "k"),
    schema=f"(Tensor(a!) q, Tensor(b!)? k, {_SIGNATURE}) -> ()",
)  # fmt: skip


@_op.register_fake
def _(q, k, *_):
    return torch.empty_like(_dense(q)), q.new_empty(0) if k is None else torch.empty_like(_dense(k))


def _remember(ctx, inputs, output):
    _, _, cos, sin, positions, *ctx.rest = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx, grad_y, grad_z):
    mode, start, inverse = ctx.rest
    q_too, k_too = ctx.needs_input_grad[:2]
    first, second = (grad_y, grad_z if k_too else None) if q_too else (grad_z, None)
    first, second = _op(first, second, *ctx.saved_tensors, mode, start, not inverse)
    return first if q_too else None, (second if q_too else first) if k_too else None, None, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_remember)


def _self_check():
    """Check every kernel in every dtype of this device against its reference; return the number of failures."""
    on_cuda = torch.cuda.is_available()
    if not on_cuda and get_cplus_compiler() is None:
        sys.exit("No CUDA device and no C++ compiler: install one of them (g++, for instance) to build the kernels.")
    tilelang.set_log_level("WARNING")
    torch.use_deterministic_algorithms(True)  # poison: torch.empty, where outputs come from, fills with NaN
    torch.set_default_device("cuda" if on_cuda else "cpu")
    failures = 0
    for dtype, tolerance in [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-2)][: 3 if on_cuda else 2]:
        like = getattr(torch, dtype)
        x, angle = torch.randn(48, 128).to(like), 1000 * torch.rand(48, 64)
        given = x, angle.cos().to(like), angle.sin().to(like)
        pairs = {  # for each kernel: what it returned, and what is right
            factory.__name__: [(factory(48, 128, dtype=dtype)(*given), reference(*given))]
            for factory, reference in (
                (rope_neox_naive, torch_rope_neox),
                (rope_neox_blocked, torch_rope_neox),
                (rope_interleaved_blocked, torch_rope_interleaved),
            )
        }
        results = pairs[rope_per_token.__name__] = []  # through the op; q and k are packed, part of a head is rotated
        cos, sin = rope_table(rope_frequencies(64)[0].to(x.device), 2000)
        for mode, tokens in itertools.product(("neox", "interleaved"), (9, 2000)):  # 8 bytes an access, and 16
            ids, options = torch.randint(1, 2000, (2, tokens)), {"mode": mode, "start": 32}
            q, k, _ = torch.randn(2, tokens, 5 + 2 + 2, 96).to(like).split((5, 2, 2), dim=2)
            right = [torch_partial_rope(x, cos[ids][:, :, None], sin[ids][:, :, None], **options) for x in (q, k)]
            back = torch_partial_rope(q, cos[:tokens, None], -sin[:tokens, None], **options)
            results.append((apply_rope(q, None, cos, sin, inverse=True, **options)[0], back))
            results += zip(apply_rope(q, k, cos, sin, ids, **options), right, strict=True)
            results += zip(apply_rope(q, k, cos, sin, ids.int(), inplace=True, **options), right, strict=True)
        for name, results in pairs.items():
            wrong = not all(torch.allclose(y.double(), right.double(), tolerance, tolerance) for y, right in results)
            failures += wrong
            largest = torch.stack([(y.double() - right.double()).abs().max() for y, right in results]).max()
            print(f"{name} {dtype}: correctness {f'FAILED, largest error {largest:.3g}' if wrong else 'passed'}")
    print(f"device: {torch.cuda.get_device_name()} (CUDA)" if on_cuda else "device: CPU (TileLang's C backend)")
    return failures


if __name__ == "__main__":
    sys.exit(1 if _self_check() else 0)
