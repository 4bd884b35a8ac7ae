"""Rotary position embedding (RoPE) in TileLang: references in torch, and kernels judged by them.

Run `python rope_kernels.py` to check every kernel on the device of this machine.
TileLang reads annotations when a kernel is built, so `from __future__ import annotations`
must not stand in a file that holds these factories.
"""

import functools
import itertools
import math
import sys
import warnings

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

    Shapes, dtypes, errors: as torch_rope_interleaved. Source: GPT-NeoX, arXiv:2204.06745; the layout of Llama 1–3 and
    Qwen checkpoints in transformers.
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
    y = x.clone()
    y[..., start : start + rope_dim] = rotations[mode](x[..., start : start + rope_dim], cos, sin)
    return y


# ----------------------------------------------------------------------------------------------- tables

_LENGTH = "original_max_position_embeddings"
_KEYS = {  # what each type reads, beside the keys of them all
    "default": "rope_type type rope_theta mrope_section mrope_interleaved max_position_embeddings",
    "linear": "factor",
    "dynamic": "factor alpha",
    "llama3": f"factor {_LENGTH} low_freq_factor high_freq_factor",
    "yarn": f"factor {_LENGTH} beta_fast beta_slow truncate attention_factor mscale mscale_all_dim",
    "longrope": f"factor {_LENGTH} short_factor long_factor attention_factor short_mscale long_mscale",
    "proportional": "factor partial_rotary_factor",
}
_SPELLINGS = {"mrope": "default", "su": "longrope", "deepseek_yarn": "yarn"}
_ELSEWHERE = {  # keys that change the model, but not here
    "llama_4_scaling_beta": "it belongs to q, which it scales by position",
    "attn_factor": "it belongs to engines that multiply the attention factor by it",
    "partial_rotary_factor": "it belongs to rope_dim, where rope_settings puts it",
    "rope_interleave": "it belongs to the choice of mode",
    "indexer_rope_interleave": "it belongs to the choice of the indexer's mode",
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


def _llama3(theta, given):
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor takes less than high_freq_factor={high:g}, got low_freq_factor={low:g}")
    t = ((_number(given, _LENGTH) * theta / math.tau - low) / (high - low)).clamp(0, 1)
    return (1 - t) * (theta / _number(given, "factor")) + t * theta


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
    divisors = torch.tensor(given[f"{reach}_factor"], dtype=torch.float64, device="cpu")
    if f"{reach}_mscale" in given:
        return theta / divisors, _number(given, f"{reach}_mscale")
    s = _number(given, "factor", 1.0 if "attention_factor" in given else max_position and max_position / length)
    factor = _number(given, "attention_factor", math.sqrt(1 + math.log(max(s, 1.0)) / math.log(length)))
    return theta / divisors, factor


def _proportional(theta, given):
    share = _number(given, "partial_rotary_factor", 1.0)
    pairs = round(share * len(theta))  # not cut: 0.7 · 90 is 62.99… in floating point
    if share > 1 or pairs < 1 or abs(share * len(theta) - pairs) > 1e-6:
        raise ValueError(f"partial_rotary_factor takes whole pairs of R/2={len(theta)} in (0, 1], got {share!r}")
    return theta * (torch.arange(len(theta), device="cpu") < pairs) / _number(given, "factor", 1.0)


def _kind(given):
    kinds = [_SPELLINGS.get(str(given[key]), given[key]) for key in ("rope_type", "type") if key in given]
    if not kinds and given.keys() & {"factor", "long_factor", "alpha"}:
        raise ValueError(f"rope_type is missing beside the factors: it takes {', '.join(_KEYS)}")
    for kind in kinds:
        if kind not in list(_KEYS):  # a list, for kinds that do not hash
            raise ValueError(f"rope_type takes {', '.join((*_SPELLINGS, *_KEYS))}, got {kind!r}")
        if kind != kinds[0]:
            raise ValueError(f"rope_type and type must agree, got {' and '.join(kinds)}")
    return kinds[0] if kinds else "default"


def _warn_of(keys):
    for key in sorted(keys):
        warnings.warn(f"{key} is not applied here: {_ELSEWHERE.get(key, 'it is unknown')}", stacklevel=3)


def rope_frequencies(rope_dim, base=10000.0, scaling=None, *, seq_len=None, max_position=None):
    """Return the inverse frequencies that a model's config.json asks for, and the factor for its cos and sin.

        θ[i] = base^(−2i/R)     i = 0 … R/2−1,  R = rope_dim,  s = factor,  L = original_max_position_embeddings,
                                M = max_position

        type          inv_freq[i]                                                                attention factor
        default       θ[i]                                                                       1
        linear        θ[i]/s                                                                     1
        dynamic       θ[i] of base·(s·S/M − (s−1))^(R/(R−2)),  S = max(seq_len, M)               1
        llama3        (1−t)·θ[i]/s + t·θ[i],  t = clamp((L·θ[i]/2π − low)/(high − low), 0, 1)    1
        yarn          γ·θ[i]/s + (1−γ)·θ[i],  γ = clamp((i − a)/(b − a), 0, 1)                   m(k)/m(k_all) or m(1)
        longrope      θ[i]/long_factor[i] if seq_len > L, else θ[i]/short_factor[i]              √(1 + ln s / ln L)
        proportional  θ[i]/s for i < partial_rotary_factor·R/2, else 0; R is the whole head      1

        yarn: c(r) = R·ln(L/2πr)/(2·ln base), a = max(⌊c(beta_fast)⌋, 0), b = min(⌈c(beta_slow)⌉, R−1), without ⌊⌋ and
        ⌈⌉ if `truncate` is false, b + 0.001 if a = b; m(k) = 0.1·k·ln s + 1, k = mscale, k_all = mscale_all_dim, m(1)
        unless both are nonzero. In both factors ln s is 0 for s < 1, and `attention_factor` wins over the formula.

    With `alpha` dynamic takes base·alpha^(R/(R−2)) at any length; longrope's factor is `long_mscale` or `short_mscale`
    where given. mrope is default (its sections choose position ids), su is longrope, deepseek_yarn yarn.
    scaling is the dictionary `rope_parameters` or `rope_scaling` of config.json: its `rope_theta` wins over base, null
    counts as absent (but as false for truncate), keys of other types are ignored, those not applied are warned about.
    If absent, s is M/L in yarn and longrope, 1 in proportional, and L is M in yarn.
    The attention factor is the one that multiplies cos and sin, transformers' value. DeepSeek-style models put the
    rest, m(mscale_all_dim)², into the softmax scale; that is not done here.
    Shapes: inv_freq (R/2,). Dtypes: float64, on the CPU; a float. Equal arguments give equal bits.
    Errors: ValueError for an odd rope_dim, an unknown type, a key missing or senseless, a dictionary nested by layer
    type; TypeError for wrong types.
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
    known = {key for name in _KEYS if name != "proportional" or kind == name for key in _KEYS[name].split()}
    _warn_of(given.keys() - known)
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
    if kind in ("llama3", "proportional"):
        return (_llama3 if kind == "llama3" else _proportional)(theta, given), 1.0
    return theta / _number(given, "factor") if kind == "linear" else theta, 1.0


_CALLED = {  # what files call it
    "R": "qk_rope_head_dim rotary_dim",
    "head width": "head_dim attention_head_dim kv_channels",
    "hidden size": "hidden_size n_embd d_model",
    "heads": "num_attention_heads n_head num_heads",
    "share": "partial_rotary_factor rotary_pct rope_pct",
    "base": "rope_theta rotary_emb_base rotary_embedding_base",
    "max_position": "max_position_embeddings n_positions",
}
_BY_TYPE = {  # keys for one type of layers, and what they stand for there
    "full_attention": {"global_rope_theta": "rope_theta", "global_head_dim": "head_dim"},
    "sliding_attention": dict.fromkeys(["local_rope_theta", "rope_local_base_freq", "swa_rope_theta"], "rope_theta"),
}
_BY_LAYER = {"no_rope_layers": "rotary", "layer_rope_theta": "rope_theta"}  # lists; where they say 0: no rotation
_LEFT_OUT = {  # what files of these types of models may leave to their class in transformers
    "codegen falcon gptj llama mistral": {"base": 10000.0},
    "chatglm": {"base": 10000.0, "share": 0.5},
    "glm glm4 glm4_moe nemotron persimmon phi recurrent_gemma": {"share": 0.5},
    "gpt_neox qwen3_5_text qwen3_5_moe_text qwen3_next stablelm": {"share": 0.25},
    "gemma3_text gemma3n_text t5gemma2_text": {"base": 1e6, "rope_local_base_freq": 10000.0, "head width": 256},
    "modernbert modernbert-decoder": {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
    "olmo3": {"rope_local_base_freq": 500000.0},
}
_UNSETTLED = {  # types of models whose class makes another table than their file says
    "ernie4_5_vl_moe_text": "its frequencies are sorted by axis",
    "minimax_m3_vl_text": "its class rotates whole heads, whatever rotary_dim says",
}
_FLAGS = {"rotary", "use_rotary_pos_emb", "use_mem_rope"}  # false: not rotated
_KNOWN = " ".join(["rope_parameters rope_scaling rope_ratio original_rope", *_CALLED.values(), *_ELSEWHERE, *_FLAGS])
_KNOWN = set(_KNOWN.split()).union(*_BY_TYPE.values())


def _said(config, what):
    said = {key: config[key] for key in _CALLED[what].split() if key in config}
    if any(value != other for value in said.values() for other in said.values()):
        raise ValueError(f"config says {what} more than once, and not alike: {said}")
    return next(iter(said.values()), config.get(what))


def _of_layer(config, layer):
    """Return what config says of one type of layers, or of one layer by its number, and its dictionary of scaling."""
    types, numbered = config.get("layer_types", []), layer is not None and not isinstance(layer, str)
    if numbered:
        number = _integer("layer_type", layer, 0, config.get("num_hidden_layers", len(types)) - 1)
        layer = types[number] if types else None
    else:
        number = types.index(layer) if layer in types else 0
    if (interval := config.pop("no_rope_layer_interval", None)) and not config.get("no_rope_layers"):
        config["no_rope_layers"] = [(i + 1) % interval for i in range(config["num_hidden_layers"])]
    for key, name in _BY_LAYER.items():
        if entries := config.pop(key, None):
            if not numbered and any(entry != entries[0] for entry in entries):
                raise ValueError(f"{key} differs by layer: layer_type takes a layer's number, got {layer!r}")
            if not entries[number]:
                raise ValueError(f"layer {number} is not rotated, by {key}")
            config[name] = entries[number]
    config |= next((own for i, own in config.get("per_layer_config", {}).items() if int(i) == number), {})

    old, new = (_given(config.get(key), key) for key in ("rope_scaling", "rope_parameters"))
    apart = (old | new).keys() - {"type", "rope_type", *({"rope_theta", "partial_rotary_factor"} - old.keys())}
    if old and new and (_kind(old) != _kind(new) or any(old.get(key) != new.get(key) for key in apart)):
        raise ValueError(f"rope_scaling and rope_parameters disagree: {old} and {new}")
    scaling = new or old
    by_type = any(key in config for keys in _BY_TYPE.values() for key in keys)
    nested = any(isinstance(value, dict) for value in scaling.values())
    names = list(config["rope_parameters"]) if nested else list(_BY_TYPE) if by_type else types or [layer]
    if layer not in names and (nested or by_type or layer is not None):
        raise ValueError(f"layer_type takes one of {sorted(set(names))}, got {layer!r}")
    if nested:
        if layer not in scaling:
            raise ValueError(f"layers of the type {layer} are not rotated, by rope_parameters")
        config.pop("compress_rope_theta", None)  # DeepSeek-V4's, in the dictionary too
        scaling = _given(scaling[layer])
    elif layer == "sliding_attention" and "rope_local_base_freq" in config:
        scaling = {}  # Gemma 3 scales full attention alone
    return config | {name: config[key] for key, name in _BY_TYPE.get(layer, {}).items() if key in config}, scaling


def rope_settings(config, layer_type=None):
    """Read a whole config.json: return what rope_frequencies(**settings, seq_len=…) takes.

        R = qk_rope_head_dim or rotary_dim, else ⌊share · head width⌋, in proportional the head width
        head width = head_dim, else hidden size / heads

    config is a dictionary, or an object with to_dict; a text_config in it is entered. layer_type is the name of a type
    of layers or the number of a layer, needed where settings differ by layer. Returns {"rope_dim", "base", "scaling",
    "max_position"}; not the pairing, which config.json does not settle. Keys that belong elsewhere are warned about.
    Errors: ValueError for what is not settled, naming the keys: no width or base, no layer named, values that disagree,
    layers without rotation, image towers, unknown keys with rope, rotary or theta in them; TypeError for wrong types.
    Source: transformers' configuration classes, which hold what files leave out.
    """
    config = _given(config.to_dict() if hasattr(config, "to_dict") else config)
    about = {key for key in config if any(word in key for word in ("rope", "rotary", "theta", "ntk"))}
    if "text_config" in config:
        text = _given(config["text_config"])
        if apart := sorted(key for key in about if config[key] != text.get(key)):
            raise ValueError(f"text_config says something else than {apart} beside it")
        return rope_settings(text, layer_type)
    model = config.get("model_type")
    if reason := _UNSETTLED.get(model) or (config.keys() & {"patch_size", "image_size"} and "it is an image tower"):
        raise ValueError(f"config does not settle the table of model_type {model}: {reason}")
    left_out = next((values for models, values in _LEFT_OUT.items() if model in models.split()), {})
    config, scaling = _of_layer(left_out | config, layer_type)
    if unknown := sorted(about & config.keys() - _KNOWN):
        raise ValueError(f"config has keys about rotation that are not understood: {unknown}")
    if (
        config.get("alibi")
        or config.get("position_embedding_type") == "nope"
        or not all(map(config.get, about & _FLAGS))
    ):
        raise ValueError(f"its layers are not rotated, by alibi, position_embedding_type or one of {sorted(_FLAGS)}")
    _warn_of(config.keys() & _ELSEWHERE.keys() - {"partial_rotary_factor"})

    share = _number({"partial_rotary_factor": _said(config, "share")} | scaling, "partial_rotary_factor", 1.0)
    rope_dim, width = _said(config, "R"), _said(config, "head width")
    if width is None and (heads := _said(config, "heads")):
        width = _integer("hidden size", _said(config, "hidden size"), 1) // _integer("heads", heads, 1)
    if width is None and rope_dim is None:
        raise ValueError(f"config has no head width, only {sorted(key for key in config if 'head' in key)}")
    kind, width = _kind(scaling), _integer("head width", rope_dim if width is None else width, 1)
    if share > 1 or rope_dim is not None and share < 1 and int(width * share) != rope_dim:
        raise ValueError(f"config rotates a share of {share:g} and R={rope_dim} of {width} channels")
    rope_dim = int(width * share) if rope_dim is None else rope_dim
    base = scaling.pop("rope_theta", _said(config, "base"))
    if base is None and model is not None:
        raise ValueError(f"config has no rope_theta, and what model_type {model} takes without it is not known here")
    base = _number({"rope_theta": base}, "rope_theta", 10000.0) * _number(config, "rope_ratio", 1.0)
    scaling |= {key: config[key] for key in [_LENGTH] if key in config}
    scaling.pop("partial_rotary_factor", None)
    if kind == "proportional":
        rope_dim, scaling["partial_rotary_factor"] = width, share
    return {"rope_dim": rope_dim, "base": base, "scaling": scaling, "max_position": _said(config, "max_position")}


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
    Dtypes: inv_freq float64, or float32 as models store it; all is float64 up to the one rounding to dtype,
    whatever autocast or the default dtype say. No gradient.
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
    cos, sin = angle.cos() * attention_factor, angle.sin() * attention_factor
    return _rounded_once(cos, dtype), _rounded_once(sin, dtype)


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


# on CUDA without TileLang's own bounds checks: what is read lies inside by construction, and ids are compared
@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})
def rope_per_token(
    heads_q,
    heads_k,
    D,
    R,
    start=0,
    mode="neox",
    dtype="bfloat16",
    table_dtype="float32",
    index_dtype="int64",
    inverse=False,
    inplace=False,
    batched=False,
    width=1,
    per_thread=2,
    strides=None,
):
    """Build kernel ④: a token's table row is read once, by its position id, and used by all heads of q and k.

        y[t,h,start:start+R] = rope_mode(q[t,h,start:start+R], cos[positions[t]], ±sin[positions[t]])
        y[t,h,j]             = q[t,h,j] elsewhere, and likewise z from k          − where inverse

    Shapes: kernel(q, k, cos, sin, positions, y, z), or with inplace=True kernel(q, k, cos, sin, positions), which
    writes into q and k. q, y (tokens, heads_q, D); k, z (tokens, heads_k, D), or with heads_k=0 any tensors shaped
    like q, which are left alone; cos, sin (P, R/2); positions (tokens,), or with index_dtype=None anything shaped
    like cos, and token t takes row t. batched=True (CUDA only) puts a batch axis before the tokens of all but the
    tables; tokens, batch and P may change from call to call. Ids outside 0 … P−1 give NaN.
    Strides: channels side by side; on CUDA free otherwise, with addresses and strides multiples of `width` elements,
    the widest access taken; on the C backend they are constants, strides=(q's, k's, y's, z's, positions').
    per_thread: heads a thread takes, for speed alone: 2 with many tokens, 1 with few.
    Launch: from sm_90 on its start overlaps the end of the kernel before it in the stream (programmatic dependent
    launch); nothing is read or written before that kernel has ended.
    Dtypes: q float16, bfloat16 (CUDA only) or float32, tables float32 or q's, ids int32 or int64; float32 arithmetic.
    Errors: ValueError naming the argument that is out of range, TypeError for non-integers.
    Source: this repository; notebook 09 counts the bytes that it saves.
    """
    for name, value, least in (
        ("heads_q", heads_q, 1),
        ("heads_k", heads_k, 0),
        ("D", D, 1),
        ("R", R, 1),
        ("start", start, 0),
    ):
        if not isinstance(value, int):
            raise TypeError(f"{name} takes an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {name}={value}")
    if R % 2:
        raise ValueError(f"rope dim must be even, got R={R}")
    if start + R > D:
        raise ValueError(f"start takes 0 … {D - R} for R={R} of D={D}, got start={start}")
    for name, value, allowed in (
        ("mode", mode, ("neox", "interleaved")),
        ("dtype", dtype, ("float16", "bfloat16", "float32")),
        ("table_dtype", table_dtype, ("float32", dtype)),
        ("index_dtype", index_dtype, ("int32", "int64", None)),
        ("width", width, (1, 2, 4, 8)),
        ("per_thread", per_thread, (1, 2)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} takes one of {allowed}, got {value!r}")
    target = tilelang.tvm.target.Target.current(allow_none=True)
    if target is None and tilelang.tvm.cuda().exist:
        target = tilelang.backend.target.determine_target("auto", return_object=True)
    serial = target is not None and target.kind.name == "c"  # there are no threads to bind
    overlapped = target is not None and tilelang.contrib.nvcc.have_pdl(target)  # sm_90 and later
    if serial and "bfloat16" in (dtype, table_dtype):
        raise ValueError("dtype bfloat16 needs CUDA: the C backend has no such type, it takes float16 or float32")
    if serial and (batched or strides is None):
        raise ValueError("the C backend takes strides as constants, and no batch axis")
    half = R // 2
    # Where widths allow, a thread takes two 16-byte vectors of a head, R/2 apart: in neox they are partners,
    # interleaved pairs lie within each. With many tokens it takes two heads, so that more is under way while the id
    # and then its table row arrive; with few tokens one, which is sooner done. A block has about 64 threads, or 32.
    vec = 4 if dtype == "float32" else 8
    reach = half if mode == "neox" else R
    while reach % vec or start % vec or (D - R) % vec:
        vec //= 2
    piece = vec if serial else min(vec, width)  # what one access moves
    if mode == "interleaved":
        vec = max(vec, 2)  # a pair stays in one thread
    elements = T.serial if serial else T.vectorized
    gathered = index_dtype is not None
    parts = 1 if mode == "interleaved" and half % vec else 2
    lanes = R // (parts * vec)
    pairs = parts * vec // 2
    pieces = 1 if mode == "neox" else parts  # of a table row that a thread needs
    piece_pairs = pairs // pieces
    slots = max(1, 64 // per_thread // lanes)  # heads side by side in a block
    groups = -(-(heads_q + heads_k) // (slots * per_thread))
    shared = heads_k > 0 and heads_q % (slots * per_thread) > 0  # a block may have heads of both q and k
    rest = (D - R) // piece  # pieces of a head that pass as they are: a thread takes up to 8 at once
    at_once = max(1, min(8, -(-rest // lanes)))
    rounds = 0 if inplace else -(-rest // (at_once * lanes))
    size, table_size = (4 if kind == "float32" else 2 for kind in (dtype, table_dtype))

    if lanes > 1024 and not serial:
        raise ValueError(f"R={R} at start={start} of D={D} needs {lanes} threads a head in {mode} pairs, over 1024")

    # Loads of 16 bytes in PTX, for two things that TileLang has no word for. They carry the hint that L2 keep the line,
    # which is faster with many tokens and, against no hint, costs the kernels around it nothing (see notebook 09). And
    # nvcc leaves the table's loads in their branch, behind all loads of x; plain ones it predicates and puts before the
    # last of x, which then waits for the id as well. volatile: none may rise above the wait for what ran before.
    prelude = """
static __device__ __forceinline__ void load_16(void* to, const void* from) {
  uint4 v;
#if __CUDA_ARCH__ >= 800
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(policy));
#else
  v = *(const uint4*)from;
#endif
  *(uint4*)to = v;
}
"""

    S, P = T.dynamic("S"), T.dynamic("P")
    B = T.dynamic("B") if batched else 1
    if strides is None:
        axes = ("batch", "token", "head") if batched else ("token", "head")
        strides = [[T.dynamic(f"{name}_{axis}", "int64") for axis in axes] for name in ("q", "k", "y", "z")]
        strides += [[T.dynamic(f"id_{axis}", "int64") for axis in axes[:-1]]]
    q_strides, k_strides, y_strides, z_strides, id_strides = strides
    lead = (B, S) if batched else (S,)
    q_shape, k_shape = (*lead, heads_q, D), (*lead, heads_k or heads_q, D)
    id_shape, id_strides, id_dtype = (
        (lead, id_strides, index_dtype) if gathered else ((P, half), (half, 1), table_dtype)
    )

    def beside(channel):  # the rotated ones, which it counts without
        return channel + T.cast(channel >= start, "int32") * R

    def load_16(to, address):
        T.evaluate(T.call_extern("handle", "load_16", T.address_of(to), address))

    @T.macro
    def load(vector, at, source, index, count, bytes_each):
        if not serial and count * bytes_each % 16 == 0:
            for i in T.unroll(count * bytes_each // 16):
                j = i * (16 // bytes_each)
                load_16(vector[at + j], T.address_of(source[(*index[:-1], index[-1] + j)]))
        else:
            for j in elements(count):
                vector[at + j] = source[(*index[:-1], index[-1] + j)]

    @T.macro
    def load_head(vector, at, x, more, count, token, head, channel):
        if more is None:
            load(vector, at, x, (*token, head, channel), piece, size)
        elif not serial and piece * size == 16:  # a choice of address and no branch
            load_16(
                vector[at],
                T.if_then_else(
                    head < count,
                    T.address_of(x[(*token, head, channel)]),
                    T.address_of(more[(*token, head - count, channel)]),
                ),
            )
        elif head < count:
            load(vector, at, x, (*token, head, channel), piece, size)
        else:
            load(vector, at, more, (*token, head - count, channel), piece, size)

    @T.macro
    def load_rest(vector, n, x, more, count, token, head, m, lane):
        for i in T.unroll(at_once):
            channel = ((m * at_once + i) * lanes + lane) * piece
            if channel < rest * piece:
                load_head(vector, (n * at_once + i) * piece, x, more, count, token, head, beside(channel))

    @T.macro
    def store_head(x_vec, rest_vec, n, x, y, token, head, lane):
        for part in T.unroll(parts):
            for i in T.unroll(vec // piece):
                for j in elements(piece):
                    channel = start + part * half + lane * vec + i * piece + j
                    y[(*token, head, channel)] = x_vec[(n * parts + part) * vec + i * piece + j]
        for m in T.serial(rounds):
            if m > 0:
                load_rest(rest_vec, n, x, None, 0, token, head, m, lane)
            for i in T.unroll(at_once):
                channel = ((m * at_once + i) * lanes + lane) * piece
                if channel < rest * piece:
                    for j in elements(piece):
                        y[(*token, head, beside(channel) + j)] = rest_vec[(n * at_once + i) * piece + j]

    # heads 0 … count−1 are those of x; where there is more, it has the next ones, up to the last
    @T.macro
    def rotate(x, more, y, z, cos, sin, positions, token, first, count, last, lane):
        x_vec = T.alloc_local((per_thread * parts * vec,), dtype)
        cos_vec = T.alloc_local((pairs,), table_dtype)
        sin_vec = T.alloc_local((pairs,), table_dtype)
        rest_vec = T.alloc_local((per_thread * at_once * piece,), dtype)
        for n in T.unroll(per_thread):
            # threads to spare read the last head along, perhaps while it is written, and drop it: a branch around
            # these loads would hold up the id's
            head = T.min(first + n * slots, last)
            for part in T.unroll(parts):
                for i in T.unroll(vec // piece):
                    channel = start + part * half + lane * vec + i * piece
                    load_head(x_vec, (n * parts + part) * vec + i * piece, x, more, count, token, head, channel)
            if rounds:
                load_rest(rest_vec, n, x, more, count, token, head, 0, lane)
        row = positions[token] if gathered else token[-1]  # used after the loads of x, so that the latencies overlap
        if (row >= 0) & (row < cos.shape[0]):
            for part in T.unroll(pieces):
                column = part * (half // 2) + lane * piece_pairs
                load(cos_vec, part * piece_pairs, cos, (row, column), piece_pairs, table_size)
            for part in T.unroll(pieces):
                column = part * (half // 2) + lane * piece_pairs
                load(sin_vec, part * piece_pairs, sin, (row, column), piece_pairs, table_size)
        else:
            for j in T.unroll(pairs):
                cos_vec[j] = T.cast(T.reinterpret(T.uint32(0x7FC00000), "float32"), table_dtype)  # NaN
                sin_vec[j] = cos_vec[j]
        for n in T.unroll(per_thread):
            for j in T.unroll(pairs):
                c = T.cast(cos_vec[j], "float32")
                s = T.cast(sin_vec[j], "float32") * (-1.0 if inverse else 1.0)
                one = n * parts * vec + (j if mode == "neox" else 2 * j)
                other = one + (vec if mode == "neox" else 1)
                a = T.cast(x_vec[one], "float32")
                b = T.cast(x_vec[other], "float32")
                x_vec[one] = T.cast(a * c - b * s, dtype)
                x_vec[other] = T.cast(b * c + a * s, dtype)
            head = first + n * slots
            if head < count:
                store_head(x_vec, rest_vec, n, x, y, token, head, lane)
            elif more is not None:  # noqa: SIM102 - the first is settled when the kernel is built
                if head <= last:
                    store_head(x_vec, rest_vec, n, more, z, token, head - count, lane)

    @T.macro
    def heads(q, k, y, z, cos, sin, positions, token, group, item):
        first = group * slots * per_thread + item // lanes
        lane = item % lanes
        if shared:
            rotate(q, k, y, z, cos, sin, positions, token, first, heads_q, heads_q + heads_k - 1, lane)
        elif group * slots * per_thread < heads_q:
            rotate(q, None, y, None, cos, sin, positions, token, first, heads_q, heads_q - 1, lane)
        elif heads_k:
            rotate(k, None, z, None, cos, sin, positions, token, first - heads_q, heads_k, heads_k - 1, lane)

    @T.macro
    def launch(q, k, y, z, cos, sin, positions):
        with T.Kernel(S * groups, B, threads=slots * lanes, prelude=None if serial else prelude) as (block, b):
            if width > 1 and not serial:
                for tensor_strides in strides[: 2 if inplace else 4]:
                    for stride in tensor_strides:
                        T.assume(stride % width == 0)
            if overlapped:  # this block may be up while the kernel before still runs: wait for its end
                T.pdl_sync()
            at = T.alloc_var("int32", init=block // groups)  # divided once, in 32 bits: offsets are 64 bits wide
            token = (b, at) if batched else (at,)
            if serial:
                for item in T.serial(slots * lanes):
                    heads(q, k, y, z, cos, sin, positions, token, block % groups, item)
            else:
                item = T.get_thread_binding()
                heads(q, k, y, z, cos, sin, positions, token, block % groups, item)

    if inplace:

        @T.prim_func
        def rope(
            q: T.StridedTensor(q_shape, (*q_strides, 1), dtype),
            k: T.StridedTensor(k_shape, (*k_strides, 1), dtype),
            cos: T.Tensor((P, half), table_dtype),
            sin: T.Tensor((P, half), table_dtype),
            positions: T.StridedTensor(id_shape, id_strides, id_dtype),
        ):
            launch(q, k, q, k, cos, sin, positions)

    else:

        @T.prim_func
        def rope(
            q: T.StridedTensor(q_shape, (*q_strides, 1), dtype),
            k: T.StridedTensor(k_shape, (*k_strides, 1), dtype),
            cos: T.Tensor((P, half), table_dtype),
            sin: T.Tensor((P, half), table_dtype),
            positions: T.StridedTensor(id_shape, id_strides, id_dtype),
            y: T.StridedTensor(q_shape, (*y_strides, 1), dtype),
            z: T.StridedTensor(k_shape, (*z_strides, 1), dtype),
        ):
            launch(q, k, y, z, cos, sin, positions)

    return rope


# The one choice of backend. Without a CUDA device the same sources go through TileLang's C backend:
# target, because the automatic choice only looks for GPUs; disable_vectorize, because C has no conversion for
# vectors of half; -O3, because no optimisation is on by default. Set once at import: a factory keeps what it
# built without regard to the target.
C_BACKEND = {"target": "c", "pass_configs": {"tirx.disable_vectorize": True}, "compile_flags": ["-O3"]}
for _factory in (rope_neox_naive, rope_neox_blocked, rope_interleaved_blocked, rope_per_token):
    functools.update_wrapper(_factory, _factory.func.orig_func)  # name, docstring and source for readers
    _factory.mode = "lazy"  # what TileLang would find out by a first call; known, `.func` serves any target at once
    _factory.func.set_mode("lazy")
    _factory.cuda_pass_configs = _factory.pass_configs
    if not torch.cuda.is_available():
        vars(_factory).update(C_BACKEND)


# --------------------------------------------------------------------------------------------------- op


def apply_rope(q, k, cos, sin, positions=None, *, mode="neox", start=None, inverse=False, inplace=False):
    """Rotate q and k by the table rows of their positions, in one launch on CUDA.

        y[t,h,start:start+R] = rope_mode(q[t,h,start:start+R], cos[positions[t]], sin[positions[t]])
        y[t,h,j]             = q[t,h,j] elsewhere                                  R = 2·cos.shape[1]

    and likewise k. inverse=True turns back, by −sin.
    Shapes: q (..., Hq, D), k (..., Hk, D) or None, with leading dimensions (tokens,) or (batch, seq); for
    (B, H, S, D) pass q.transpose(1, 2): strided tensors are read where they lie. cos and sin (P, R/2). positions:
    shaped like the leading dimensions, or (seq,); None means 0 … seq−1. Returns (q′, k′), or (q′, None).
    start: the first rotated channel, to be said when R < D. inplace=True writes into q and k and returns them;
    they share no memory with the tables or ids, which is not looked at.
    Dtypes: q, k float16, bfloat16 or float32; tables float32 (advised) or q's; ids int32 or int64.
    float32 arithmetic, one rounding. The gradient (reverse mode) is the same kernel with −sin; tables get none.
    Errors: ValueError, or TypeError for a wrong type, that names the argument; IndexError for an id outside
    0 … P−1 on the CPU. On CUDA, where looking would synchronise, such tokens come out NaN.
    """
    start = _op_start(q, k, cos, sin, positions, mode, start)
    if not cos.shape[1] or not q.numel() or (k is not None and not k.numel()):
        return _rotate_what_there_is(q, k, cos, sin, positions, mode, start, inverse, inplace)
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    direct = type(q) is torch.Tensor and not torch.compiler.is_compiling()
    if inplace:
        if wants_grad:
            raise ValueError("inplace=True would write into a tensor that wants a gradient: leave it out")
        (_rotate_inplace if direct else _inplace_op)(q, k, cos, sin, positions, mode, start, inverse)
        return q, k
    y, z = (_rotate if direct and not wants_grad else _op)(q, k, cos, sin, positions, mode, start, inverse)
    return y, None if k is None else z


def _op_start(q, k, cos, sin, positions, mode, start):
    """Refuse bad input by name; return the first rotated channel."""
    if mode not in ("neox", "interleaved"):
        raise ValueError(f"mode takes 'neox' or 'interleaved', got {mode!r}")
    dtype, device, shape, table_shape = q.dtype, q.device, q.shape, cos.shape
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"q takes float16, bfloat16 or float32, got {dtype}")
    if len(shape) not in (3, 4):
        raise ValueError(f"q takes (tokens, heads, D) or (batch, seq, heads, D), got {tuple(shape)}")
    seq, width = shape[-3], shape[-1]
    if k is not None:
        if k.dtype != dtype:
            raise TypeError(f"k takes q's dtype {dtype}, got {k.dtype}")
        other = k.shape
        if len(other) != len(shape) or other[0] != shape[0] or other[-3] != seq or other[-1] != width:
            raise ValueError(f"k takes q's shape {tuple(shape)} but for the heads, got {tuple(other)}")
        if k.device != device:
            raise ValueError(f"k takes q's device {device}, got {k.device}")
    table_dtype = cos.dtype
    if table_dtype != torch.float32 and table_dtype != dtype:
        raise TypeError(f"cos takes float32 or q's dtype {dtype}, got {table_dtype}")
    if sin.dtype != table_dtype:
        raise TypeError(f"sin takes cos's dtype {table_dtype}, got {sin.dtype}")
    if len(table_shape) != 2:
        raise ValueError(f"cos takes (P, R/2), one column a pair, got {tuple(table_shape)}")
    if sin.shape != table_shape:
        raise ValueError(f"sin takes cos's shape {tuple(table_shape)}, got {tuple(sin.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.device != device:
            raise ValueError(f"{name} takes q's device {device}, got {table.device}")
        if table.requires_grad:
            raise ValueError(f"{name} gets no gradient: pass {name}.detach()")
    rows, columns = table_shape
    spare = width - 2 * columns
    if spare < 0:
        raise ValueError(f"cos has {columns} columns, so R={2 * columns}; q is only D={width} wide")
    if start is None:
        if spare and columns:
            raise ValueError(
                f"start must be said when R={2 * columns} < D={width}: 0 for leading, {spare} for trailing"
            )
        start = 0
    if not 0 <= start <= spare:
        raise ValueError(f"start takes 0 … {spare} for R={2 * columns} of D={width}, got start={start}")
    if positions is None:
        if seq > rows:
            raise IndexError(f"positions 0 … {seq - 1} do not fit a table of {rows} rows")
    else:
        if positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"positions takes int32 or int64, got {positions.dtype}")
        ids = positions.shape
        if ids != (seq,) and ids != shape[:-2]:
            raise ValueError(f"positions takes the shape {tuple(shape[:-2])} or ({seq},), got {tuple(ids)}")
        if positions.device != device:
            raise ValueError(f"positions takes q's device {device}, got {positions.device}")
    return start


def _rotate_what_there_is(q, k, cos, sin, positions, mode, start, inverse, inplace):
    """Where R is 0, or a tensor has no elements: that one keeps its shape, and the other is rotated alone."""
    options = {"mode": mode, "start": start, "inverse": inverse, "inplace": inplace}
    results = [x if x is None or inplace else x.clone() for x in (q, k)]
    for i, x in enumerate((q, k)):
        if cos.shape[1] and x is not None and x.numel():
            results[i] = apply_rope(x, None, cos, sin, positions, **options)[0]
    return tuple(results)


def _rows(x):
    """Return x and a tensor for its result, both with channels side by side: all the kernel asks of a layout."""
    if x.stride()[-1] == 1:
        y = torch.empty_like(x)
        if y.stride()[-1] == 1:  # torch lays it out by x's strides: not so where channels are reached twice
            return x, y
    x = x.contiguous()
    return x, torch.empty_like(x)


def _rotate(q, k, cos, sin, positions, mode, start, inverse):
    """Out of place; without k the second tensor is empty."""
    q, y = _rows(q)
    if k is None:
        _launch(q, None, cos, sin, positions, mode, start, inverse, y, None)
        return y, q.new_empty(0)
    k, z = _rows(k)
    _launch(q, k, cos, sin, positions, mode, start, inverse, y, z)
    return y, z


@functools.lru_cache(maxsize=4096)
def _overlaps(shape, strides):
    """Tell whether a tensor of this layout may reach an element twice."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


@functools.lru_cache(maxsize=4096)
def _disjoint(a_shape, a_strides, b_shape, b_strides, apart):
    """Tell whether b, which begins `apart` elements after a, surely shares none: it lies behind, or they interleave."""
    axes = [
        sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
        for shape, strides in ((a_shape, a_strides), (b_shape, b_strides))
    ]
    # the outer axes move both by multiples of a common measure: modulo that, what the inner axes span must lie apart
    for inner in itertools.product(*(range(len(x) + 1) for x in axes)):
        spans = [1 + sum((size - 1) * stride for stride, size in x[:n]) for x, n in zip(axes, inner, strict=True)]
        measure = math.gcd(*(stride for x, n in zip(axes, inner, strict=True) for stride, _ in x[n:]))
        place = apart % measure if measure else apart
        if spans[0] <= place and (not measure or place + spans[1] <= measure):
            return True
    return False


def _rotate_inplace(q, k, cos, sin, positions, mode, start, inverse):
    """In place, where no element is reached twice."""
    tensors = [q] if k is None else [q, k]
    for name, x in zip("qk", tensors, strict=False):
        strides = x.stride()
        if strides[-1] != 1:
            raise ValueError(f"inplace=True takes {name} with channels side by side, got strides {strides}")
        if _overlaps(x.shape, strides):
            raise ValueError(f"inplace=True takes {name} without overlap in itself, got strides {strides}")
    if k is not None:
        apart = (k.data_ptr() - q.data_ptr()) // q.element_size()
        a, b = (q, k) if apart >= 0 else (k, q)
        if not _disjoint(a.shape, a.stride(), b.shape, b.stride(), abs(apart)):
            raise ValueError("inplace=True takes q and k that share no element; by their strides these could")
    _launch(q, k, cos, sin, positions, mode, start, inverse, q, k)
    torch.autograd.graph.increment_version(tensors)  # so that autograd sees the write


def _launch(q, k, cos, sin, positions, mode, start, inverse, y, z):
    """Run kernel ④ from q and k into y and z; where y is q, in place."""
    cos, sin = cos.contiguous(), sin.contiguous()
    if q.is_cuda:
        _launch_cuda(q, k, cos, sin, positions, mode, start, inverse, y, z)
        return
    if positions is not None and positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise IndexError(f"positions takes ids 0 … {cos.shape[0] - 1}, got {low} … {high}")
    _launch_cpu(q, k, cos, sin, positions, mode, start, inverse, y, z)


def _launch_cuda(q, k, cos, sin, positions, mode, start, inverse, y, z):
    heads_k = 0 if k is None else k.shape[-2]
    inplace, batched = y is q, q.dim() == 4
    if batched and q.shape[0] > 65535:  # what a grid's second axis holds: let the batch lie on the first
        ids = torch.arange(q.shape[1], device=q.device) if positions is None else positions
        positions = ids.expand(q.shape[:2]).T
        q, k, y, z = (x if x is None else x.transpose(0, 1) for x in (q, k, y, z))
    if batched and positions is not None and positions.dim() == 1:
        positions = positions.expand(q.shape[:2])
    if k is None:
        k, z = q, y
    if (cos.data_ptr() | sin.data_ptr()) % 16:
        cos, sin = cos.clone(), sin.clone()
    ids, id_dtype = (cos, None) if positions is None else (positions, positions.dtype)
    address = (q.data_ptr() | k.data_ptr()) % 16
    run = _prepared(
        q.shape, heads_k, q.stride(), k.stride(), address, q.dtype, cos.shape[1], cos.dtype, id_dtype,
        start, mode, inverse, inplace,
    )  # fmt: skip
    arguments = (q, k, cos, sin, ids) if inplace else (q, k, cos, sin, ids, y, z)
    if _SEVERAL_DEVICES:
        with torch.cuda.device_of(q):
            run(*arguments)
    else:
        run(*arguments)


@functools.lru_cache(maxsize=4096)
def _prepared(
    shape, heads_k, q_strides, k_strides, address, dtype, columns, table_dtype, id_dtype, start, mode, inverse, inplace
):
    """Return kernel ④ for tensors of this description as TileLang's bare executable, which starts fastest."""
    heads_q, D = shape[-2:]
    # the widest access that every row allows: the lowest bit in any address or stride, in bytes; y and z are dense
    bits = 16 | address
    for count in (D, *q_strides[:-1], *k_strides[:-1]):
        bits |= dtype.itemsize * count
    width = max(1, (bits & -bits) // dtype.itemsize)
    names = [None if kind is None else _NAMES[kind] for kind in (dtype, table_dtype, id_dtype)]
    per_thread = 1 if math.prod(shape[:-2]) <= _FEW_TOKENS else 2
    kernel = rope_per_token(
        heads_q, heads_k, D, 2 * columns, start, mode, *names, inverse, inplace, len(shape) == 4, width, per_thread
    )
    return kernel.adapter._get_executable()


def _launch_cpu(q, k, cos, sin, positions, mode, start, inverse, y, z):
    inplace = y is q
    if q.dtype == torch.bfloat16:  # the C backend has no such type: float32 kernel, then the one rounding
        wide = [x if x is None else x.float() for x in (q, k, cos, sin)]
        _launch_cpu(*wide, positions, mode, start, inverse, *wide[:2])
        y.copy_(wide[0])
        if k is not None:
            z.copy_(wide[1])
        return
    if q.dim() == 4:
        for b in range(q.shape[0]):
            ids = positions if positions is None or positions.dim() == 1 else positions[b]
            q_b, k_b = (x if x is None else x[b] for x in (q, k))
            y_b, z_b = (q_b, k_b) if inplace else (x if x is None else x[b] for x in (y, z))
            _launch_cpu(q_b, k_b, cos, sin, ids, mode, start, inverse, y_b, z_b)
        return
    heads_k = 0 if k is None else k.shape[-2]
    if k is None:
        k, z = q, y
    # C takes strides as constants, and none of 0: those over one element mean nothing, so they all become alike
    q, k, y, z = (
        x.as_strided(
            x.shape, [step if size > 1 else x.shape[-1] for size, step in zip(x.shape, x.stride(), strict=True)]
        )
        for x in (q, k, y, z)
    )
    if not inplace:
        q, k = (x.contiguous() if 0 in x.stride() else x for x in (q, k))
    heads_q, D = q.shape[-2:]
    ids = cos if positions is None else positions.contiguous()
    strides = tuple(x.stride()[:2] for x in (q, k, y, z)) + ((1,),)
    run = _prepared_in_c(
        heads_q, heads_k, D, 2 * cos.shape[1], start, mode, _NAMES[q.dtype], _NAMES[cos.dtype],
        None if positions is None else _NAMES[positions.dtype], inverse, inplace, strides,
    )  # fmt: skip
    run(q, k, cos, sin, ids) if inplace else run(q, k, cos, sin, ids, y, z)


@functools.cache
def _prepared_in_c(*arguments):
    """Return kernel ④ through the C backend, for tensors on the CPU also where there is a CUDA device."""
    with tilelang.tvm.target.Target("c"):
        return tilelang.compile(rope_per_token.func(*arguments[:-1], strides=arguments[-1]), **C_BACKEND)


_FEW_TOKENS = 512  # so many at most: a thread of kernel ④ takes one head, with more it takes two
_SEVERAL_DEVICES = torch.cuda.device_count() > 1  # then a launch must say which; asking each time costs more than that
_NAMES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "int32", "int64")}
# not "mode": torch.compile's own wrapper of ops that write has a parameter of that name
_SIGNATURE = "Tensor cos, Tensor sin, Tensor? positions, str convention, int start, bool inverse"
_op = torch.library.custom_op(
    "rope_chapter::rope", _rotate, mutates_args=(), schema=f"(Tensor q, Tensor? k, {_SIGNATURE}) -> (Tensor, Tensor)"
)
_inplace_op = torch.library.custom_op(
    "rope_chapter::rope_", _rotate_inplace, mutates_args=("q", "k"),
    schema=f"(Tensor(a!) q, Tensor(b!)? k, {_SIGNATURE}) -> ()",
)  # fmt: skip


@_op.register_fake
def _(q, k, *_):
    return _rows(q)[1], q.new_empty(0) if k is None else _rows(k)[1]


def _remember(ctx, inputs, output):
    _, k, cos, sin, positions, *ctx.rest = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.has_k = k is not None


def _backward(ctx, grad_y, grad_z):
    mode, start, inverse = ctx.rest
    grads = _op(grad_y, grad_z if ctx.has_k else None, *ctx.saved_tensors, mode, start, not inverse)
    return grads[0], grads[1] if ctx.has_k else None, None, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_remember)


def _self_check():
    """Check every kernel in every dtype of this device against its reference; return the number of failures."""
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    if not on_cuda and get_cplus_compiler() is None:
        sys.exit("No CUDA device and no C++ compiler: install one of them (g++, for instance) to build the kernels.")
    tilelang.set_log_level("WARNING")
    torch.use_deterministic_algorithms(True)  # poison: torch.empty, where outputs come from, fills with NaN
    failures = 0

    def report(name, dtype, pairs):
        nonlocal failures
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        errors = [(got.double() - right.double()).abs() for got, right in pairs]
        bounds = [tolerance + tolerance * right.double().abs() for _, right in pairs]
        passed = all(bool((error <= bound).all()) for error, bound in zip(errors, bounds, strict=True))
        failures += not passed
        largest = torch.stack([error.max() for error in errors]).max().item()
        print(f"{name} {dtype}: correctness " + ("passed" if passed else f"FAILED, largest error {largest:.3g}"))

    S, R = 48, 128
    dtypes = ("float32", "float16", "bfloat16") if on_cuda else ("float32", "float16")
    for factory, reference in (
        (rope_neox_naive, torch_rope_neox),
        (rope_neox_blocked, torch_rope_neox),
        (rope_interleaved_blocked, torch_rope_interleaved),
    ):
        for dtype in dtypes:
            x = torch.randn(S, R, device=device).to(getattr(torch, dtype))
            angle = 1000 * torch.rand(S, R // 2, device=device)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            y = factory(S, R, dtype=dtype)(x, cos, sin)
            report(factory.__name__, dtype, [(y, reference(x, cos, sin))])
    for dtype in dtypes:  # kernel ④ through the op, in its forms; q and k are packed, part of a head is rotated
        cos, sin = (table.to(device) for table in rope_table(rope_frequencies(64)[0], 400))
        pairs = []
        for mode in ("neox", "interleaved"):
            for tokens in (9, 300):  # in each of two texts: with up to 512 in all a thread takes one head, then two
                ids = torch.randint(1, 400, (2, tokens), device=device)
                packed = torch.randn(2, tokens, 5 + 2 + 2, 96, device=device).to(getattr(torch, dtype))
                q, k, _ = packed.split((5, 2, 2), dim=2)
                options = {"mode": mode, "start": 32}
                rows = cos[ids][:, :, None], sin[ids][:, :, None]
                right = [torch_partial_rope(x, *rows, **options) for x in (q, k)]
                if tokens > 9:
                    pairs += zip(apply_rope(q, k, cos, sin, ids, **options), right, strict=True)
                    continue
                back = torch_partial_rope(q, cos[:tokens, None], -sin[:tokens, None], **options)
                pairs.append((apply_rope(q, None, cos, sin, inverse=True, **options)[0], back))
                apply_rope(q, k, cos, sin, ids.int(), inplace=True, **options)
                pairs += zip((q, k), right, strict=True)
        report(rope_per_token.__name__, dtype, pairs)
    print(f"device: {torch.cuda.get_device_name()} (CUDA)" if on_cuda else "device: CPU (TileLang's C backend)")
    return failures


if __name__ == "__main__":
    sys.exit(1 if _self_check() else 0)
