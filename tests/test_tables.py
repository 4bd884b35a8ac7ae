"""The tables section of rope_kernels.py: frequencies and cos/sin tables against transformers and against float64
formulas written here, public reports of faults (cited in each docstring), partial rotation
against the models' own code. No expected value comes from the product."""

import contextlib
import copy
import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import by_hand, plain_rope, randn
from transformers import DeepseekV3Config, DeepseekV4Config, GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

from rope_kernels import rope_frequencies, rope_table, torch_partial_rope, torch_rope_interleaved, torch_rope_neox

ONE_TO_EIGHT = torch.arange(1, 9, dtype=torch.float64)
ROTATIONS = {"neox": torch_rope_neox, "interleaved": torch_rope_interleaved}


def plain_table(positions, R, base=10000.0, scale=1.0):
    """cos and sin by the definition, one float64 number at a time."""
    angles = [[p * base ** (-2 * i / R) for i in range(R // 2)] for p in positions]
    return tuple(
        torch.tensor([[scale * f(a) for a in row] for row in angles], dtype=torch.float64).reshape(len(angles), R // 2)
        for f in (math.cos, math.sin)
    )


# ----------------------------------------------------------------------------- frequencies, by hand and by transformers


def by_transformers(R, scaling, base=10000.0, seq_len=None, max_position=None):
    parameters = {"rope_theta": base, **copy.deepcopy(scaling)}
    parameters["rope_type"] = kind = scaling.get("rope_type") or scaling.get("type")
    config = LlamaConfig(
        hidden_size=2 * R,
        num_attention_heads=2,
        head_dim=R,
        max_position_embeddings=max_position or 2048,
        rope_parameters=parameters,
    )
    if kind == "default":  # not among ROPE_INIT_FUNCTIONS: every model brings its own copy of the formula
        return modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


SHORT, LONG = [1.0 + 0.02 * i for i in range(48)], [1.05 + 1.3 * i for i in range(48)]
LLAMA31 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA31["original_max_position_embeddings"] = 8192
LLAMA32 = {**LLAMA31, "factor": 32.0}
DEEPSEEK = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0)
DEEPSEEK["mscale_all_dim"] = 1.0
GPT_OSS = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
GPT_OSS["truncate"] = False
QWEN25 = dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)
PHI35 = dict(type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=4096)
GEMMA4 = dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0)
YARN_64 = dict(rope_type="yarn", original_max_position_embeddings=4096)

EQUAL = dict(beta_fast=8, beta_slow=8, truncate=False)

GRID = {  # name: R, scaling, base, max_position, sequence lengths
    "default": (128, dict(rope_type="default"), 1e4, 2048, (None,)),
    "default in rope_parameters": (128, dict(rope_type="default", rope_theta=5e5), 1e4, 2048, (None,)),
    "Vicuna 16k, linear": (128, dict(type="linear", factor=4.0), 1e4, 4096, (None, 16384)),
    "dynamic": (128, dict(type="dynamic", factor=2.0), 1e4, 2048, (None, 16, 2047, 2048, 2049, 4096, 8192)),
    "dynamic, InternLM2": (128, dict(type="dynamic", factor=2.0), 1e6, 32768, (None, 32769, 200_000)),
    "dynamic, factor 1": (64, dict(rope_type="dynamic", factor=1.0), 1e4, 2048, (None, 5000)),
    "Llama-3.1-8B": (128, LLAMA31, 5e5, 131072, (None,)),
    "Llama-3.2-1B": (64, LLAMA32, 5e5, 131072, (None,)),
    "Qwen2.5, YaRN 4x": (128, QWEN25, 1e6, 131072, (None,)),
    "YaRN without original length": (64, dict(rope_type="yarn", factor=4.0), 1e4, 4096, (None,)),
    "YaRN without factor": (64, {**YARN_64, "factor": None}, 1e4, 65536, (None,)),
    "DeepSeek-V3": (64, DEEPSEEK, 1e4, 163840, (None,)),
    "gpt-oss": (64, GPT_OSS, 150000.0, 131072, (None,)),
    "gpt-oss, truncated": (64, {**GPT_OSS, "truncate": True}, 150000.0, 131072, (None,)),
    "YaRN, low bound 0": (64, {**YARN_64, "factor": 4.0, "original_max_position_embeddings": 128}, 1e4, 512, (None,)),
    "YaRN, below range": (64, {**YARN_64, "factor": 4.0, "original_max_position_embeddings": 4}, 1e4, 16, (None,)),
    "YaRN, equal bounds": (64, {**YARN_64, "factor": 4.0, "original_max_position_embeddings": 6}, 1e4, 24, (None,)),
    "YaRN, equal betas": (64, {**YARN_64, "factor": 4.0, **EQUAL}, 1e4, 16384, (None,)),
    "YaRN, betas": (128, {**YARN_64, "factor": 8.0, "beta_fast": 64, "beta_slow": 2}, 1e4, 32768, (None,)),
    "Phi-3.5": (96, PHI35, 1e4, 131072, (None, 1, 4096, 4097, 131072)),
    "LongRoPE, factor": (96, {**PHI35, "factor": 2.0}, 1e4, 131072, (None, 5000)),
    "LongRoPE, attention_factor": (96, {**PHI35, "attention_factor": 1.19}, 1e4, 131072, (None, 5000)),
    "LongRoPE, not stretched": (96, PHI35, 1e4, 4096, (None, 4097)),
    "Gemma-4, full attention": (512, GEMMA4, 1e4, 131072, (None,)),
    "proportional, whole head": (64, dict(rope_type="proportional"), 1e4, 2048, (None,)),
    "proportional with factor": (64, {**GEMMA4, "factor": 8.0}, 1e4, 2048, (None,)),
}
CALLS = [
    pytest.param(R, scaling, base, max_position, seq_len, id=f"{name}, {seq_len}")
    for name, (R, scaling, base, max_position, seq_lens) in GRID.items()
    for seq_len in seq_lens
]


@pytest.mark.parametrize("R, scaling, base, max_position, seq_len", CALLS)
def test_frequencies_of_model_configs(R, scaling, base, max_position, seq_len):
    before = copy.deepcopy(scaling)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inv_freq, factor = rope_frequencies(R, base, scaling, seq_len=seq_len, max_position=max_position)
    assert scaling == before
    assert inv_freq.dtype == torch.float64 and inv_freq.shape == (R // 2,) and type(factor) is float
    expected, expected_factor = by_hand(R, scaling, base, seq_len, max_position)
    np.testing.assert_allclose(inv_freq.numpy(), expected, rtol=1e-12, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-14)
    theirs, their_factor = by_transformers(R, scaling, base, seq_len, max_position)
    np.testing.assert_allclose(inv_freq.numpy(), theirs.double().numpy(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(float(their_factor), rel=1e-12)


positive = dict(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    half=st.integers(1, 128),
    base=st.floats(2.0, 1e7, **positive),
    factor=st.floats(0.5, 64.0, **positive),
    low=st.floats(0.5, 2.0, **positive),
    width=st.floats(0.5, 30.0, **positive),
    length=st.integers(2, 1 << 20),
    truncate=st.booleans(),
    seq_len=st.integers(0, 1 << 21),
)
def test_frequencies_by_formula(half, base, factor, low, width, length, truncate, seq_len):
    common = dict(factor=factor, original_max_position_embeddings=length)
    lists = [1 + i / half for i in range(half)], [3 + i * 0.7 for i in range(half)]
    for scaling in (
        dict(rope_type="default"),
        dict(rope_type="linear", factor=factor),
        dict(rope_type="dynamic", factor=factor),
        dict(rope_type="llama3", low_freq_factor=low, high_freq_factor=low + width, **common),
        dict(rope_type="yarn", beta_slow=low, beta_fast=low + width, truncate=truncate, **common),
        dict(rope_type="longrope", short_factor=lists[0], long_factor=lists[1], **common),
    ):
        if scaling["rope_type"] == "dynamic" and half == 1:
            continue
        inv_freq, m = rope_frequencies(2 * half, base, scaling, seq_len=seq_len, max_position=length)
        expected, expected_m = by_hand(2 * half, scaling, base, seq_len, length)
        np.testing.assert_allclose(inv_freq.numpy(), expected, rtol=1e-11, atol=0, err_msg=scaling["rope_type"])
        assert m == pytest.approx(expected_m, rel=1e-13)


def test_gemma4_takes_its_frequencies_from_the_global_head():
    """Full-attention layers have a head of 512, 64 of its 256 pairs rotate; sliding ones 256, all pairs."""
    config = Gemma4TextConfig(num_hidden_layers=6)
    theirs = modeling_gemma4.Gemma4TextRotaryEmbedding(config)
    head = config.per_layer_config["full_attention"].head_dim
    assert config.per_layer_config["sliding_attention"].head_dim == 256
    full, _ = rope_frequencies(head, scaling=config.rope_parameters["full_attention"])
    assert head == 512 and int((full > 0).sum()) == 64 and bool((full[64:] == 0).all())
    np.testing.assert_allclose(full, theirs.full_attention_inv_freq.double(), rtol=2e-6)
    sliding, _ = rope_frequencies(256, scaling=config.rope_parameters["sliding_attention"])
    np.testing.assert_allclose(sliding, theirs.sliding_attention_inv_freq.double(), rtol=2e-6)
    with pytest.raises(ValueError, match="one layer type, got several: .*full_attention"):
        rope_frequencies(head, scaling=config.rope_parameters)


def test_spellings_nulls_and_precedence_of_the_dictionary():
    new = {"rope_theta": 5e5, **LLAMA31}
    old = {key: value for key, value in LLAMA31.items() if key != "rope_type"} | {"type": "llama3"}
    expected, _ = rope_frequencies(128, scaling=new)
    assert torch.equal(rope_frequencies(128, 5e5, old)[0], expected)
    assert torch.equal(rope_frequencies(128, 123.0, new)[0], expected)  # rope_theta wins over base
    assert torch.equal(rope_frequencies(128, 5e5, {**old, "rope_type": "llama3", "rope_theta": None})[0], expected)
    nulls = "attention_factor beta_fast beta_slow mscale mscale_all_dim type rope_theta low_freq_factor alpha"
    yarn = {**YARN_64, "factor": 4.0}
    inv_freq, factor = rope_frequencies(64, 1e4, yarn | dict.fromkeys(nulls.split(" ")))
    assert torch.equal(inv_freq, rope_frequencies(64, 1e4, yarn)[0]) and factor == 0.1 * math.log(4) + 1
    for empty in (None, {}, {"rope_type": None}, {"rope_type": "default"}, {"rope_theta": 10000}):
        assert torch.equal(rope_frequencies(64, 10000, empty)[0], rope_frequencies(64)[0])


def test_key_of_another_type_is_ignored_and_unknown_key_warns():
    plain = rope_frequencies(128, 1e6)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrope = {"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24], "mrope_interleaved": True}
        assert torch.equal(rope_frequencies(128, 1e6, mrope)[0], plain)  # they choose position ids: no warning
        assert torch.equal(rope_frequencies(128, 1e6, {"type": "linear", "factor": 1.0, "beta_fast": -3})[0], plain)
        assert rope_frequencies(128, 1e6, {"type": "linear", "factor": 2.0, "attention_factor": 7.0})[1] == 1.0
    for key, message in (
        ("beta_quick", "beta_quick is not applied here: it is unknown"),
        ("max_position", "max_position is not applied here: it is unknown"),
        ("partial_rotary_factor", "partial_rotary_factor is not applied here: it belongs to rope_dim"),
        ("llama_4_scaling_beta", "llama_4_scaling_beta is not applied here: it belongs to q"),
        ("attn_factor", "attn_factor is not applied here: it belongs to engines"),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            inv_freq, factor = rope_frequencies(128, 1e6, {"rope_type": "default", key: 0.5})
        assert torch.equal(inv_freq, plain) and factor == 1.0 and len(caught) == 1 and caught[0].filename == __file__


def call(R=64, base=10000.0, seq_len=None, max_position=None, **scaling):
    return lambda: rope_frequencies(R, base, scaling or None, seq_len=seq_len, max_position=max_position)


def changed(scaling, **changes):
    R = {"longrope": 96}.get(scaling.get("rope_type", scaling.get("type")), 64)
    kept = {key: value for key, value in {**scaling, **changes}.items() if value is not ...}
    return call(R, **kept)


NAN, INF = float("nan"), float("inf")
REFUSED = [
    (call(7), ValueError, "rope dim must be even, got R=7"),
    (call(0), ValueError, "rope_dim must be at least 2, got rope_dim=0"),
    (call(-4), ValueError, "rope_dim must be at least 2, got rope_dim=-4"),
    (call(True), TypeError, "rope_dim takes an integer, got True"),
    (call(64.0), TypeError, "rope_dim takes an integer, got 64.0"),
    (call(base=0), ValueError, "base takes a finite number above 0, got base=0"),
    (call(base=-1e4), ValueError, "base takes a finite number above 0"),
    (call(base=NAN), ValueError, "base takes a finite number above 0, got base=nan"),
    (call(base=INF), ValueError, "base takes a finite number above 0, got base=inf"),
    (call(base="1e4"), TypeError, "base takes a number, got '1e4'"),
    (call(base=True), TypeError, "base takes a number, got True"),
    (call(base=None), ValueError, "base is missing"),
    (call(rope_type="default", rope_theta=0.0), ValueError, "rope_theta takes a finite number above 0"),
    (call(base=1.0, rope_type="yarn", factor=2.0), ValueError, "base takes a finite number above 1, got base=1.0"),
    (changed(GPT_OSS, rope_theta=0.5), ValueError, "rope_theta takes a finite number above 1"),
    (lambda: rope_frequencies(64, 1e4, "yarn"), TypeError, "scaling takes a dictionary or None, got 'yarn'"),
    (lambda: rope_frequencies(64, 1e4, [("factor", 2)]), TypeError, "scaling takes a dictionary or None"),
    (call(rope_type="ntk", factor=2.0), ValueError, "rope_type takes mrope, .*linear, .*, got 'ntk'"),
    (call(type="xdrope"), ValueError, "rope_type takes .*got 'xdrope'"),
    (call(type=["yarn"]), ValueError, "rope_type takes .*got "),
    (call(type="linear", rope_type="yarn", factor=2.0), ValueError, "agree, got yarn and linear"),
    (call(factor=2.0), ValueError, "rope_type is missing"),
    (call(long_factor=LONG, short_factor=SHORT), ValueError, "rope_type is missing"),
    (call(rope_type="linear"), ValueError, "factor is missing: it takes a number above 0"),
    (call(rope_type="linear", factor=None), ValueError, "factor is missing"),
    *[
        (changed(scaling, factor=bad), error, message)
        for scaling in (dict(type="linear"), dict(type="dynamic", max_position=2048), LLAMA31, DEEPSEEK, PHI35)
        for bad, error, message in (
            (0, ValueError, "factor takes a finite number above 0, got factor=0"),
            (-2.0, ValueError, "factor takes a finite number above 0, got factor=-2.0"),
            (NAN, ValueError, "got factor=nan"),
            (INF, ValueError, "got factor=inf"),
            ("8", TypeError, "factor takes a number, got '8'"),
            (True, TypeError, "factor takes a number, got True"),
            ([8.0], TypeError, "factor takes a number, got"),
        )
    ],
    (changed(GEMMA4, factor=0), ValueError, "factor takes a finite number above 0"),
    (call(rope_type="dynamic", factor=2.0), ValueError, "max_position is missing"),
    (
        call(rope_type="dynamic", factor=2.0, original_max_position_embeddings=2048),
        ValueError, "max_position is missing",
    ),
    (call(2, rope_type="dynamic", factor=2.0, max_position=8), ValueError, "dynamic takes a rope_dim of at least 4"),
    (call(max_position=0), ValueError, "max_position must be at least 1, got max_position=0"),
    (call(max_position=2048.0), TypeError, "max_position takes an integer, got 2048.0"),
    (call(seq_len=-1), ValueError, "seq_len must be at least 0, got seq_len=-1"),
    (call(seq_len=True), TypeError, "seq_len takes an integer, got True"),
    (call(seq_len=torch.tensor(5)), TypeError, "seq_len takes an integer"),
    (changed(LLAMA31, factor=...), ValueError, "factor is missing"),
    (changed(LLAMA31, low_freq_factor=...), ValueError, "low_freq_factor is missing"),
    (changed(LLAMA31, high_freq_factor=None), ValueError, "high_freq_factor is missing"),
    (changed(LLAMA31, original_max_position_embeddings=...), ValueError, "original_max_position_embeddings is missing"),
    (changed(LLAMA31, low_freq_factor=0), ValueError, "low_freq_factor takes a finite number above 0"),
    (changed(LLAMA31, low_freq_factor=4.0), ValueError, "low_freq_factor takes less than high_freq_factor=4, got"),
    (changed(LLAMA31, low_freq_factor=5.0), ValueError, "low_freq_factor takes less than high_freq_factor=4, got"),
    (changed(LLAMA31, high_freq_factor=NAN), ValueError, "high_freq_factor takes a finite number"),
    (changed(DEEPSEEK, factor=...), ValueError, "factor is missing"),
    (changed(DEEPSEEK, original_max_position_embeddings=...), ValueError, "original_max_position_embeddings is m"),
    (changed(DEEPSEEK, original_max_position_embeddings=-1), ValueError, "original_max_position_embeddings takes"),
    (changed(DEEPSEEK, original_max_position_embeddings="4k"), TypeError, "original_max_position_embeddings takes"),
    (changed(DEEPSEEK, attention_factor=0.0), ValueError, "attention_factor takes a finite number above 0"),
    (changed(DEEPSEEK, attention_factor="1"), TypeError, "attention_factor takes a number"),
    (changed(DEEPSEEK, mscale=-1.0), ValueError, "mscale takes a finite number above 0"),
    (changed(DEEPSEEK, mscale_all_dim=NAN), ValueError, "mscale_all_dim takes a finite number above 0"),
    (changed(DEEPSEEK, beta_fast=0), ValueError, "beta_fast takes a finite number above 0"),
    (changed(DEEPSEEK, beta_slow=True), TypeError, "beta_slow takes a number"),
    (changed(DEEPSEEK, beta_fast=1, beta_slow=32), ValueError, "beta_fast takes at least beta_slow=32, got .*=1"),
    (changed(DEEPSEEK, truncate=0), TypeError, "truncate takes true or false, got 0"),
    (changed(DEEPSEEK, truncate="no"), TypeError, "truncate takes true or false, got 'no'"),
    (changed(PHI35, short_factor=...), ValueError, "short_factor takes R/2=48 numbers, got 0"),
    (changed(PHI35, long_factor=LONG[:47]), ValueError, "long_factor takes R/2=48 numbers, got 47"),
    (changed(PHI35, long_factor=4.0), TypeError, "long_factor takes a list of numbers, got 4.0"),
    (changed(PHI35, short_factor=[0.0, *SHORT[1:]]), ValueError, "short_factor takes a finite number above 0"),
    (changed(PHI35, long_factor=[-1.0, *LONG[1:]]), ValueError, "long_factor takes a finite number above 0"),
    (changed(PHI35, long_factor=["1", *LONG[1:]]), TypeError, "long_factor takes a number, got '1'"),
    (changed(PHI35, long_factor=[True, *LONG[1:]]), TypeError, "long_factor takes a number, got True"),
    (changed(PHI35, factor=...), ValueError, "factor is missing"),
    (changed(PHI35, original_max_position_embeddings=1), ValueError, "original_max_position_embeddings takes a finite"),
    (
        changed(PHI35, original_max_position_embeddings=..., max_position=131072),
        ValueError, "original_max_position_embeddings is missing",
    ),
    *[
        (changed(GEMMA4, partial_rotary_factor=share), ValueError, "partial_rotary_factor takes")
        for share in (0, 0.0, -0.25, 1.25, NAN, 1e-9, 0.3, 0.314)
    ],
    *[
        (changed({"type": "dynamic", "max_position": 2048}, factor=huge), ValueError, "factor takes a finite number")
        for huge in (10**400, 1e200)
    ],
    (changed(DEEPSEEK, beta_slow=5e-324), ValueError, "beta_slow takes a finite number"),
    (call(2**70), ValueError, "rope_dim must be at least 2, got rope_dim=1180591620717411303424; up to 65536"),
    *[
        (changed(DEEPSEEK, **{key: falsy}), TypeError, f"{key} takes a number")
        for key in ("mscale", "mscale_all_dim") for falsy in (False, "", [])
    ],
    (changed(GEMMA4, partial_rotary_factor="0.25"), TypeError, "partial_rotary_factor takes a number"),
    (changed(GEMMA4, partial_rotary_factor=True), TypeError, "partial_rotary_factor takes a number"),
]  # fmt: skip


@pytest.mark.parametrize("refused, error, message", REFUSED)
def test_refusal_names_the_key(refused, error, message):
    with pytest.raises(error, match=message):
        refused()


# --------------------------------------------------------------------------------------------------------------- tables


def test_table_shapes_devices_dtypes():
    inv_freq, _ = rope_frequencies(8)
    ids = torch.tensor([[3, 0, 2], [5, 5, 1]])
    for integer in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        cos, sin = rope_table(inv_freq, ids.to(integer))
        assert cos.shape == sin.shape == (2, 3, 4) and cos.dtype == torch.float32
        expected = plain_table(ids.flatten().tolist(), 8)
        assert torch.equal(cos.reshape(6, 4), expected[0].float())
        assert torch.equal(sin.reshape(6, 4), expected[1].float())
    assert torch.equal(rope_table(inv_freq, 6)[0], rope_table(inv_freq, torch.arange(6))[0])
    assert rope_table(inv_freq, torch.tensor(3))[0].shape == (4,)
    assert rope_table(inv_freq, 0)[0].shape == (0, 4) and rope_table(inv_freq, ids[:0])[1].shape == (0, 3, 4)
    assert rope_table(inv_freq[:0], 5)[0].shape == (5, 0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert all(table.dtype == dtype for table in rope_table(inv_freq, 3, dtype=dtype))
    assert rope_table(inv_freq, 3, device="meta")[0].device.type == "meta"
    assert rope_table(inv_freq, ids.to("meta"))[0].device.type == "meta"
    assert rope_table(inv_freq.to("meta"), 3)[0].device.type == "meta"
    assert rope_table(inv_freq.to("meta"), ids.to("meta"))[0].shape == (2, 3, 4)
    model_buffer = inv_freq.float()
    assert torch.equal(rope_table(model_buffer, 9)[0], rope_table(model_buffer.double(), 9)[0])


TABLE_REFUSED = [
    (dict(positions=torch.tensor([1.0])), ValueError, "positions takes an integer dtype, got torch.float32"),
    (dict(positions=torch.ones(3, dtype=torch.bfloat16)), ValueError, "positions takes an integer dtype"),
    (dict(positions=torch.ones(3, dtype=torch.bool)), ValueError, "positions takes an integer dtype, got torch.bool"),
    (dict(positions=torch.ones(3, dtype=torch.complex64)), ValueError, "positions takes an integer dtype"),
    (dict(positions=3.0), TypeError, "positions takes an integer, got 3.0"),
    (dict(positions=True), TypeError, "positions takes an integer, got True"),
    (dict(positions=[0, 1]), TypeError, r"positions takes an integer, got \[0, 1\]"),
    (dict(positions=-1), ValueError, "positions must be at least 0, got positions=-1"),
    (dict(attention_factor=0.0), ValueError, "attention_factor takes a finite number above 0"),
    (dict(attention_factor=NAN), ValueError, "attention_factor takes a finite number above 0"),
    (dict(attention_factor=None), ValueError, "attention_factor is missing"),
    (dict(attention_factor=torch.tensor(1.0)), TypeError, "attention_factor takes a number"),
    (dict(dtype=torch.int32), TypeError, "dtype takes a floating dtype, got torch.int32"),
    (dict(dtype="float32"), TypeError, "dtype takes a floating dtype, got 'float32'"),
    (dict(inv_freq=torch.ones(4, dtype=torch.bfloat16)), TypeError, "inv_freq takes a float64 or float32 tensor, got"),
    (dict(inv_freq=torch.ones(4, dtype=torch.int64)), TypeError, "inv_freq takes a float64 or float32 tensor, got"),
    (dict(inv_freq=[1.0, 0.1]), TypeError, r"inv_freq takes a float64 or float32 tensor, got \[1.0"),
    (dict(inv_freq=torch.nn.Parameter(torch.ones(4))), ValueError, r"inv_freq gets no gradient: pass inv_freq.detach"),
    (dict(inv_freq=torch.ones(2, 4)), ValueError, r"inv_freq takes one entry a pair, \(R/2,\), got \(2, 4\)"),
]


@pytest.mark.parametrize("changes, error, message", TABLE_REFUSED)
def test_table_refusal_names_the_argument(changes, error, message):
    arguments = {"inv_freq": torch.ones(4, dtype=torch.float64), "positions": 3, "attention_factor": 1.0, **changes}
    with pytest.raises(error, match=message):
        rope_table(**arguments)


def test_position_beyond_31_bits_or_negative():
    inv_freq, _ = rope_frequencies(8)
    far = [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 7, 2**53]
    cos, sin = rope_table(inv_freq, torch.tensor(far), dtype=torch.float64)
    for row, p in enumerate(far):
        for i in range(4):
            assert cos[row, i].item() == pytest.approx(math.cos(p * inv_freq[i].item()), abs=1e-14)
            assert sin[row, i].item() == pytest.approx(math.sin(p * inv_freq[i].item()), abs=1e-14)
    assert len(torch.unique(cos[:, 0])) == len(far)
    ids = torch.tensor([1, 2, 700, 2**31 + 5])
    (cos, sin), (cos_back, sin_back) = rope_table(inv_freq, ids), rope_table(inv_freq, -ids)
    assert torch.equal(cos, cos_back) and torch.equal(sin, -sin_back)
    expected = [4.747657, 2.589009, 3.069849, 4.007998, 1.860041, 5.770358, 6.969651, 7.995996]
    y = torch_rope_neox(ONE_TO_EIGHT, *rope_table(inv_freq, torch.tensor(-1), dtype=torch.float64))
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_table_rounded_twice_on_the_way_to_half_types():
    """float64 → float32 → half meets false ties; one rounding must equal numpy's direct one, bit for bit."""
    inv_freq, _ = rope_frequencies(128)
    angle = np.arange(4096)[:, None] * inv_freq.numpy()
    for ours, exact in zip(rope_table(inv_freq, 4096, 1.25, dtype=torch.float16), (np.cos, np.sin), strict=True):
        value = exact(angle) * 1.25
        assert np.array_equal(ours.numpy(), value.astype(np.float16))
        assert not np.array_equal(value.astype(np.float32).astype(np.float16), value.astype(np.float16))
    for ours, exact in zip(rope_table(inv_freq, 4096, 1.25, dtype=torch.bfloat16), (np.cos, np.sin), strict=True):
        mantissa, exponent = np.frexp(exact(angle) * 1.25)
        assert np.array_equal(ours.double().numpy(), np.ldexp(np.rint(mantissa * 256), exponent - 8))
    tiny = rope_table(inv_freq * 1e-7, 300, dtype=torch.float16)[1]  # subnormal halves
    assert np.array_equal(tiny.numpy(), np.sin(np.arange(300)[:, None] * (inv_freq.numpy() * 1e-7)).astype(np.float16))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_follows_autocast_or_default_dtype(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine; the same test runs on the CPU")
    ids = torch.tensor([0, 1, 255, 256, 257, 4095, 70000], device=device)

    def build():
        inv_freq, factor = rope_frequencies(64, 1e4, {**YARN_64, "factor": 4.0})
        return inv_freq, *rope_table(inv_freq, ids, factor), *rope_table(inv_freq, 5, dtype=torch.bfloat16)

    def default_dtype(dtype):
        stack = contextlib.ExitStack()
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        return stack

    expected = build()
    assert expected[1].device.type == device and expected[3].device.type == "cpu"
    for inv_freq, tables in [(expected[0].numpy(), expected[1:3])]:
        angle = ids.cpu().numpy()[:, None] * inv_freq
        for table, exact in zip(tables, (np.cos, np.sin), strict=True):
            np.testing.assert_allclose(table.cpu(), exact(angle) * (0.1 * math.log(4) + 1), rtol=0, atol=1e-7)
    surroundings = [
        lambda: torch.autocast(device, torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: default_dtype(torch.bfloat16),
        lambda: default_dtype(torch.float64),
        lambda: torch.device("meta"),
        torch.inference_mode,
    ]
    for surrounding in surroundings:
        with surrounding():
            result = build()
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(result, expected, strict=True))


# ------------------------------------------------------------------------------------------- the reported faults


def test_partial_frequencies_taken_from_head_dim():
    """pie-project/pie#602: The denominator and the pair distance are those of the 64 rotated channels, not of the
    head's 256."""
    inv_freq, _ = rope_frequencies(64)
    np.testing.assert_allclose(inv_freq[[0, 1, 2, 31]], [1, 0.7498942, 0.5623413, 1.333521e-4], rtol=1e-6)
    x = randn(256)
    cos, sin = rope_table(inv_freq, torch.tensor(700), dtype=torch.float64)
    y = torch_partial_rope(x, cos, sin, start=0)
    np.testing.assert_allclose(y, plain_rope(x, 700, "neox", R=64), atol=1e-12)
    assert torch.equal(y[64:], x[64:])
    wide = rope_frequencies(256)[0]
    np.testing.assert_allclose(wide[[1, 2, 31]], [0.9305720, 0.8659643, 0.1074608], rtol=1e-6)
    wrong = torch_partial_rope(x, *rope_table(wide[:32], torch.tensor(700), dtype=torch.float64), start=0)
    assert (wrong - y).abs().max() > 1
    full = torch.cat((cos, cos))[None, None], torch.cat((sin, sin))[None, None]
    theirs, _ = modeling_gpt_neox.apply_rotary_pos_emb(x[None, None, None], x[None, None, None], *full)
    assert torch.equal(y, theirs.flatten())


def test_positions_and_frequencies_in_low_precision():
    """EleutherAI/gpt-neox#1003: The angle of position 1857, pair 1 is 1044.27; in half precision it is 1045 and its
    cos off by 0.78."""
    inv_freq, _ = rope_frequencies(32)
    assert 1857 * inv_freq[1].item() == pytest.approx(1044.2678409, abs=1e-6)
    cos, sin = rope_table(inv_freq, 2048)
    assert cos[1857, 1].item() == pytest.approx(0.3066928, abs=1e-6)
    for table, exact in zip((cos, sin), plain_table(range(2048), 32), strict=True):
        assert (table.double() - exact).abs().max() <= 3e-8
    cos, sin = rope_table(inv_freq, torch.arange(65536, 65664))
    assert len(torch.unique(torch.cat((cos, sin), -1), dim=0)) == 128
    assert [cos[3, 0].item(), sin[3, 0].item()] == pytest.approx([0.616946705, -0.787004932], abs=3e-8)
    for dtype in (torch.bfloat16, torch.float16):
        cos, sin = rope_table(inv_freq, torch.arange(250, 271), dtype=dtype)
        assert len(torch.unique(torch.cat((cos, sin), -1), dim=0)) == 21  # 256 and 257 among them
        exact = plain_table(range(250, 271), 32)
        assert torch.equal(cos, exact[0].to(dtype)) and torch.equal(sin, exact[1].to(dtype))
    with pytest.raises(ValueError, match="positions takes an integer dtype"):
        rope_table(inv_freq, torch.arange(250.0, 271.0))


def test_half_precision_tables_or_upcast_result():
    """Dao-AILab/flash-attention#823: With float32 tables bf16 rows are rounded once; bf16 tables would miss 147 248 of
    524 288 elements."""
    x = randn(4096, 128, dtype=torch.bfloat16)
    inv_freq, _ = rope_frequencies(128)
    cos, sin = rope_table(inv_freq, 4096)
    exact_table = rope_table(inv_freq, 4096, dtype=torch.float64)
    for rotate in ROTATIONS.values():
        y, exact = rotate(x, cos, sin), rotate(x.double(), *exact_table)
        assert y.dtype == torch.bfloat16
        assert int((y != exact.bfloat16()).sum()) <= 40  # the products nearly cancel, or nearly a tie
        assert bool(((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())
        coarse = rotate(x, cos.bfloat16(), sin.bfloat16())
        assert coarse.dtype == torch.bfloat16 and int((coarse != exact.bfloat16()).sum()) > 100_000
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch_partial_rope(x[:3].to(dtype), cos[:3, :32], sin[:3, :32]).dtype == dtype


@pytest.mark.parametrize(
    "R, scaling, kept, blended, values",
    [
        (
            128, LLAMA31, 29, 35,
            {28: 3.211445995e-3, 29: 2.166570764e-3, 34: 1.785078128e-4, 35: 9.556212354e-5, 63: 3.068925989e-7},
        ),
        (64, LLAMA32, 15, 18, {15: 1.290547928e-3, 17: 9.708287803e-5, 18: 1.946163818e-5, 31: 9.418306725e-8}),
    ],
)  # fmt: skip
def test_llama3_smooth_band_lost_or_divided_twice(R, scaling, kept, blended, values):
    """huggingface/transformers#32330: Three bands: unchanged, blended from the original frequencies, divided by the
    factor."""
    inv_freq, factor = rope_frequencies(R, 5e5, scaling)
    plain, _ = rope_frequencies(R, 5e5)
    for i, value in values.items():
        assert inv_freq[i].item() == pytest.approx(value, rel=1e-9)
    assert torch.equal(inv_freq[:kept], plain[:kept]) and factor == 1.0
    assert torch.equal(inv_freq[blended:], plain[blended:] / scaling["factor"])
    band = inv_freq[kept:blended]
    assert bool(((band < plain[kept:blended]) & (band > plain[kept:blended] / scaling["factor"])).all())


def test_yarn_range_ignores_truncate():
    """vllm-project/vllm#27722: gpt-oss asks for no rounding of the range (8.09, 17.40); rounding it is 43 % off at
    pair 17."""
    for truncate, values in (
        (False, {12: 6.794959490e-3, 17: 1.293187012e-4}),
        (True, {12: 7.015713911e-3, 17: 2.279477958e-4}),
    ):
        inv_freq, factor = rope_frequencies(64, 150000.0, {**GPT_OSS, "truncate": truncate})
        for i, value in values.items():
            assert inv_freq[i].item() == pytest.approx(value, rel=1e-9)
        assert factor == pytest.approx(0.1 * math.log(32) + 1)
    cos, _ = rope_table(rope_frequencies(64, 150000.0, GPT_OSS)[0], torch.tensor([4000]), factor)
    assert cos[0, 17].item() == pytest.approx(1.1704, abs=5e-5)


@pytest.mark.parametrize(
    "keys, expected",
    [
        (dict(factor=64), 1.415888308),
        (dict(factor=64, attention_factor=1.0), 1.0),
        (dict(factor=128, attention_factor=1.485203), 1.485203),
        (dict(factor=128), 1.485203026),
        (dict(factor=16, mscale=1, mscale_all_dim=1), 1.0),
        (dict(factor=40, mscale=0.707, mscale_all_dim=0.707), 1.0),
        (dict(factor=40, mscale=1, mscale_all_dim=0.707), 1.085726399),
        (dict(factor=40, mscale=1, mscale_all_dim=0), 1.368887945),
        (dict(factor=40, mscale=0.707), 1.368887945),
        (dict(factor=1), 1.0),
        (dict(factor=0.5), 1.0),
        (dict(factor=64, attention_factor=None), 1.415888308),
    ],
)
def test_yarn_attention_factor_applied_twice_or_lost(keys, expected):
    """sgl-project/sglang#22711: The factor multiplies cos and sin once, at every position: row 0 is the factor, q·k
    grows by its square."""
    inv_freq, factor = rope_frequencies(64, 1e4, {**YARN_64, **keys})
    assert factor == pytest.approx(expected, rel=1e-9)
    cos, sin = rope_table(inv_freq, 6, factor, dtype=torch.float64)
    assert torch.equal(cos[0], torch.full((32,), factor, dtype=torch.float64)) and not sin[0].any()
    np.testing.assert_allclose(torch.hypot(cos, sin), np.full((6, 32), factor), rtol=1e-14)
    q, k = randn(64, seed=1), randn(64, seed=2)
    score = torch_rope_neox(q, cos[5], sin[5]) @ torch_rope_neox(k, cos[5], sin[5])
    assert score.item() == pytest.approx(factor**2 * (q @ k).item())


def test_dynamic_sticks_to_the_longest_sequence():
    """huggingface/transformers#46624: The base follows the length of each call, whatever was called before."""
    scaling = dict(type="dynamic", factor=2.0)
    expected = {2048: 10000.0, 2049: 10009.920712, 4096: 30527.736749, 8192: 72195.860087, 16: 10000.0}
    fresh = rope_frequencies(128, 1e4, scaling, seq_len=16, max_position=2048)[0]
    for seq_len in (8192, 16, 2049, 4096, 16, 2048, 8192):
        inv_freq, _ = rope_frequencies(128, 1e4, scaling, seq_len=seq_len, max_position=2048)
        assert inv_freq[1].item() ** -64 == pytest.approx(expected[seq_len], rel=1e-10)
        assert seq_len != 16 or torch.equal(inv_freq, fresh)
    assert torch.equal(fresh, rope_frequencies(128)[0])


def test_call_depends_on_the_calls_before():
    """huggingface/transformers#46624: Llama 3 then YaRN of the same width, in any order, with results written over:
    the same bits as at first."""
    calls = [(R, s, base, m, n) for R, s, base, m, lengths in GRID.values() for n in lengths]
    calls += [(64, LLAMA32, 1e4, 4096, None), (64, {**YARN_64, "factor": 32.0}, 1e4, 4096, None)]
    first = {}
    generator = random.Random(0)
    for _ in range(3):
        for index in generator.sample(range(len(calls)), len(calls)):
            R, scaling, base, max_position, seq_len = calls[index]
            inv_freq, factor = rope_frequencies(R, base, scaling, seq_len=seq_len, max_position=max_position)
            kept, kept_factor = first.setdefault(index, (inv_freq.clone(), factor))
            assert torch.equal(inv_freq, kept) and factor == kept_factor
            inv_freq.fill_(NAN)


def test_table_of_another_layout_is_broadcast():
    """Dao-AILab/flash-attention#45: One column a pair is the contract; doubled tables, of either order, are refused by
    both conventions."""
    x = randn(8)
    cos, sin = rope_table(rope_frequencies(8)[0], torch.tensor([3]), dtype=torch.float64)
    assert cos.shape == (1, 4)
    for rotate in ROTATIONS.values():
        for doubled in (torch.cat((cos, cos), -1), cos.repeat_interleave(2, -1), cos[:, :1], cos[:, :3]):
            with pytest.raises(ValueError, match="one column a pair, 4 for R=8"):
                rotate(x[None], doubled, sin)
            with pytest.raises(ValueError, match="one column a pair, 4 for R=8"):
                rotate(x[None], cos, doubled)
    # each doubled layout is right with its own pairing, and equals the result from the R/2 columns exactly
    half_turn = torch.cat((-x[4:], x[:4]))
    doubled = x * torch.cat((cos, cos), -1) + half_turn * torch.cat((sin, sin), -1)
    assert torch.equal(torch_rope_neox(x[None], cos, sin), doubled)
    quarter_turn = torch.stack((-x[1::2], x[0::2]), -1).flatten()
    repeated = x * cos.repeat_interleave(2, -1) + quarter_turn * sin.repeat_interleave(2, -1)
    assert torch.equal(torch_rope_interleaved(x[None], cos, sin), repeated)


@pytest.mark.parametrize("mode", ROTATIONS)
def test_score_depends_on_absolute_position(mode):
    """Dao-AILab/flash-attention#45: dot(f(q, 5), f(k, 3)) = dot(f(q, 105), f(k, 103)), for every scaling."""
    q, k = randn(64, seed=1), randn(64, seed=2)
    for scaling in (None, LLAMA32, GPT_OSS, DEEPSEEK, {**GEMMA4, "factor": 2.0}):
        inv_freq, factor = rope_frequencies(64, 1e4, scaling)
        cos, sin = rope_table(inv_freq, torch.tensor([5, 3, 105, 103]), factor, dtype=torch.float64)
        f = [ROTATIONS[mode](x, c, s) for x, c, s in zip((q, k, q, k), cos, sin, strict=True)]
        assert (f[0] @ f[1]).item() == pytest.approx((f[2] @ f[3]).item(), abs=1e-10)


def test_partial_share_cut_instead_of_checked():
    """ohdearquant/lattice#401: 180 · 0.7 is 126 channels, though int() of it is 125; 90 · 0.7 is 63, odd, though int()
    gives 62."""
    assert int(180 * 0.7) == 125 and int(90 * 0.7) == 62
    inv_freq, _ = rope_frequencies(180, scaling=dict(rope_type="proportional", partial_rotary_factor=0.7))
    assert int((inv_freq > 0).sum()) == 63
    with pytest.raises(ValueError, match="partial_rotary_factor takes whole pairs of R/2=45 in .*got 0.7"):
        rope_frequencies(90, scaling=dict(rope_type="proportional", partial_rotary_factor=0.7))


@pytest.mark.parametrize("mode", ROTATIONS)
@pytest.mark.parametrize("scale", [1.0, 1.190238])
def test_gradient_with_the_wrong_sign(mode, scale):
    """huggingface/candle#3612: The gradient is the rotation with −sin and the same scaled tables; the inverse is that
    over scale²."""
    rotate = ROTATIONS[mode]
    cos, sin = rope_table(rope_frequencies(64)[0], torch.tensor([0, 5, 1000]), scale, dtype=torch.float64)
    x, g = randn(3, 64, seed=1).requires_grad_(), randn(3, 64, seed=2)
    y = rotate(x, cos, sin)
    for _ in range(2):  # a second backward gives the same
        (grad,) = torch.autograd.grad(y, x, g, retain_graph=True)
        assert torch.equal(grad, rotate(g, cos, -sin))
    assert torch.equal(grad[0], g[0] * scale)
    np.testing.assert_allclose(rotate(y.detach(), cos, -sin) / scale**2, x.detach(), atol=1e-12)
    assert (rotate(g, cos, sin) - grad)[1:].abs().max() > 1 and torch.equal(rotate(g, cos, sin)[0], grad[0])
    assert torch.autograd.gradcheck(lambda v: rotate(v, cos, sin), x)
    partial = torch_partial_rope(x, cos[:, :8], sin[:, :8], mode)
    (grad,) = torch.autograd.grad(partial, x, g)
    assert torch.equal(grad, torch_partial_rope(g, cos[:, :8], -sin[:, :8], mode))
    half = randn(3, 64, dtype=torch.bfloat16).requires_grad_()
    tables = cos.float(), sin.float()
    (grad,) = torch.autograd.grad(rotate(half, *tables), half, g.bfloat16())
    assert grad.dtype == torch.bfloat16 and not any(table.requires_grad for table in tables)
    exact = rotate(g.bfloat16().double(), cos, -sin)
    np.testing.assert_allclose(grad.double(), exact, rtol=2**-7, atol=2**-8)


def test_frequencies_and_tables_of_models():
    """What models' own rotary modules give at the first 200 positions; test_settings holds the frequencies of all."""
    ids = torch.arange(200)[None]
    deepseek = DeepseekV3Config(rope_scaling=copy.deepcopy(DEEPSEEK), max_position_embeddings=163840)
    for config, module, R, scaling, layer_type in (
        (GPTNeoXConfig(), modeling_gpt_neox.GPTNeoXRotaryEmbedding, 24, None, ()),
        (deepseek, modeling_deepseek_v3.DeepseekV3RotaryEmbedding, 64, DEEPSEEK, ()),
        (DeepseekV4Config(), modeling_deepseek_v4.DeepseekV4RotaryEmbedding, 64, None, ("main",)),
        (Gemma4TextConfig(), modeling_gemma4.Gemma4TextRotaryEmbedding, 512, GEMMA4, ("full_attention",)),
    ):
        theirs = module(config)(torch.zeros(1), ids, *layer_type)
        inv_freq, factor = rope_frequencies(R, 1e4, scaling)
        for ours, their in zip(rope_table(inv_freq, 200, factor), theirs, strict=True):
            assert their.shape[-1] == (R // 2 if layer_type == ("main",) else R), module.__name__
            np.testing.assert_allclose(ours, their[0, :, : R // 2], rtol=0, atol=5e-5, err_msg=module.__name__)
    sin_then_cos = modeling_gptj.create_sinusoidal_positions(200, 64)
    ours = rope_table(rope_frequencies(64)[0], 200)
    np.testing.assert_allclose(torch.cat(ours[::-1], -1), sin_then_cos, rtol=0, atol=5e-5)


def test_multi_axis_positions_of_qwen2_vl():
    """Sections of pairs take their positions from time, height and width: three lines over rope_table."""
    config = Qwen2VLTextConfig(hidden_size=1536, num_attention_heads=12, rope_theta=1e6)
    sections = [16, 24, 24]
    positions = torch.randint(0, 60, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    inv_freq, _ = rope_frequencies(128, 1e6, {"rope_type": "default", "mrope_section": sections})

    axis = torch.arange(3).repeat_interleave(torch.tensor(sections))  # of each pair
    per_axis = rope_table(inv_freq, positions)  # two tables (3, batch, tokens, 64)
    cos, sin = (table.gather(0, axis.expand_as(table[:1]))[0] for table in per_axis)

    x = randn(2, 12, 9, 128, dtype=torch.float32)
    theirs = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(x, positions)
    for ours, their in zip((cos, sin), theirs, strict=True):
        np.testing.assert_allclose(ours, their[..., :64], rtol=0, atol=1e-5)
        assert (ours - rope_table(inv_freq, positions[0])[0]).abs().max() > 0.1
    full = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    rotated, _ = modeling_qwen2_vl.apply_rotary_pos_emb(x, x, *full)
    assert torch.equal(torch_rope_neox(x, cos[:, None], sin[:, None]), rotated)


@pytest.mark.parametrize(
    "R, scaling, same",
    [
        (64, {**GPT_OSS, "truncate": None}, GPT_OSS),  # transformers reads null as false
        (64, {**YARN_64, "factor": 40.0, "mscale_all_dim": 0.7}, {**YARN_64, "factor": 40.0}),
        (64, {**YARN_64, "factor": 2, "attention_factor": 1}, {**YARN_64, "factor": 2, "attention_factor": 1.0}),
        (96, {**PHI35, "attention_factor": 1}, {**PHI35, "factor": 2.0, "attention_factor": 1.0}),
        (96, {**PHI35, "factor": 2.0, "long_factor": tuple(LONG)}, {**PHI35, "factor": 2.0}),
        (96, {**PHI35, "factor": 2.0, "type": "su"}, {**PHI35, "factor": 2.0}),
        (96, {**PHI35, "factor": 2.0, "type": "su", "rope_type": "longrope"}, {**PHI35, "factor": 2.0}),
        (64, {**DEEPSEEK, "type": "deepseek_yarn"}, DEEPSEEK),
        (128, {"type": "mrope", "mrope_section": [16, 24, 24], "rope_type": "default"}, None),
    ],
)
def test_spelled_otherwise_and_the_same(R, scaling, same):
    (got, factor), (right, right_factor) = (rope_frequencies(R, 1e5, keys, seq_len=5000) for keys in (scaling, same))
    assert torch.equal(got, right) and factor == right_factor and type(factor) is float


def test_alpha_stretches_the_base_at_any_length():
    """onnxruntime/mobius#293: Hunyuan's alpha, beside a factor that plays no part."""
    for seq_len in (None, 16, 10**6):
        scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
        inv_freq, factor = rope_frequencies(128, 1e4, scaling, seq_len=seq_len, max_position=2048)
        np.testing.assert_allclose(inv_freq[[0, 1, 31, 63]], [1, 0.7760344, 3.857532e-4, 1.154782e-7], rtol=1e-6)
        assert factor == 1.0


def test_mscale_of_phi_moe_wins_over_the_formula():
    """lablup/mlxcel#1358: short_mscale up to the original length, long_mscale beyond."""
    scaling = {**PHI35, "short_mscale": 1.25, "long_mscale": 1.243163121}
    for seq_len, right in ((None, 1.25), (4096, 1.25), (4097, 1.243163121)):
        assert rope_frequencies(96, 1e4, scaling, seq_len=seq_len, max_position=131072)[1] == right


@pytest.mark.parametrize("R, scaling", [(96, {**PHI35, "factor": 2.0}), (64, GEMMA4)])
def test_frequencies_under_another_default_device(R, scaling):
    right, _ = rope_frequencies(R, 1e4, scaling)
    with torch.device("meta"):
        got, _ = rope_frequencies(R, 1e4, scaling)
    assert torch.equal(got, right)


def test_docstrings_say_which_factor_is_returned():
    assert re.search(r"transformers' value.*softmax\s+scale", rope_frequencies.__doc__, re.S)
    for paper in ("2104.09864", "2309.00071", "2402.13753", "2407.21783"):
        assert paper in rope_frequencies.__doc__
