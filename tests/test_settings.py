"""rope_settings: whole config.json files, against float64 formulas and against transformers' own classes."""

import collections
import contextlib
import copy
import importlib
import inspect
import pathlib
import re
import warnings

import pytest
import torch
import transformers
from conftest import ROOT
from oracle import by_hand

from rope_kernels import _LEFT_OUT, rope_frequencies, rope_settings, rope_table

SHORT, LONG = [1 + 0.02 * i for i in range(48)], [1.05 + 1.3 * i for i in range(48)]
LENGTH = "original_max_position_embeddings"
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192, "rope_type": "llama3"}
GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, LENGTH: 4096, "rope_type": "yarn", "truncate": False}
DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, LENGTH: 4096}
HUNYUAN = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
FILES = {  # as found in public repositories, by what bears on rotation (Phi's lists are made up)
    "Llama 3.1 8B": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA31,
    },
    "Phi-3 mini 128k": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072,
        LENGTH: 4096, "rope_theta": 10000.0, "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
    },
    "Qwen2-VL 7B": {
        "model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14},
    },
    "Qwen3-Next 80B": {
        "model_type": "qwen3_next", "head_dim": 256, "hidden_size": 2048, "num_attention_heads": 16,
        "max_position_embeddings": 262144, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {**DEEPSEEK, "type": "yarn"},
    },
    "gpt-oss 20B": {
        "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
        "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": GPT_OSS,
    },
    "Gemma 3 12B": {  # the rest is left to its class
        "model_type": "gemma3", "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_hidden_layers": 48, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "ModernBERT base": {
        "model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
        "position_embedding_type": "absolute",
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "head_dim": 128, "hidden_size": 5120, "num_attention_heads": 96,
        "max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000,
    },
    "Hunyuan 7B": {
        "model_type": "hunyuan_v1_dense", "attention_head_dim": 128, "head_dim": 128, "hidden_size": 4096,
        "num_attention_heads": 32, "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "rope_scaling": {**HUNYUAN, "type": "dynamic"}, "use_rotary_pos_emb": True,
    },
    "GPT-NeoX 20B": {
        "model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "max_position_embeddings": 2048,
        "rotary_emb_base": 10000, "rotary_pct": 0.25,
    },
    "Falcon 7B": {  # has no base at all
        "model_type": "falcon", "alibi": False, "hidden_size": 4544, "multi_query": True, "num_attention_heads": 71,
    },
}  # fmt: skip
PHI = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, LENGTH: 4096}
RIGHT = [  # file, layers, sequence length, and what the formulas are to take: R, base, scaling, longest position
    ("Llama 3.1 8B", None, None, 128, 5e5, LLAMA31, 131072),
    ("Phi-3 mini 128k", None, 4096, 96, 1e4, PHI, 131072),
    ("Phi-3 mini 128k", None, 4097, 96, 1e4, PHI, 131072),
    ("Qwen2-VL 7B", None, None, 128, 1e6, {}, 32768),
    ("Qwen3-Next 80B", None, None, 64, 1e7, {}, 262144),
    ("DeepSeek-V3", None, None, 64, 1e4, {**DEEPSEEK, "rope_type": "yarn"}, 163840),
    ("gpt-oss 20B", None, None, 64, 150000.0, GPT_OSS, 131072),
    ("gpt-oss 20B", "sliding_attention", None, 64, 150000.0, GPT_OSS, 131072),
    ("Gemma 3 12B", "full_attention", None, 256, 1e6, {"rope_type": "linear", "factor": 8.0}, None),
    ("Gemma 3 12B", "sliding_attention", None, 256, 1e4, {}, None),
    ("ModernBERT base", "full_attention", None, 64, 160000.0, {}, 8192),
    ("ModernBERT base", "sliding_attention", None, 64, 1e4, {}, 8192),
    ("GLM-4.5", None, None, 64, 1e6, {}, 131072),
    ("Hunyuan 7B", None, None, 128, 1e4 * 1000 ** (128 / 126), {}, 32768),
    ("Hunyuan 7B", None, 200_000, 128, 1e4 * 1000 ** (128 / 126), {}, 32768),
    ("GPT-NeoX 20B", None, None, 24, 1e4, {}, 2048),
    ("Falcon 7B", None, None, 64, 1e4, {}, None),
]


@pytest.mark.parametrize("name, layer_type, seq_len, R, base, scaling, longest", RIGHT)
def test_table_of_a_config_file(name, layer_type, seq_len, R, base, scaling, longest):
    file = copy.deepcopy(FILES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = rope_settings(file, layer_type)
        inv_freq, factor = rope_frequencies(**settings, seq_len=seq_len)
    assert file == FILES[name] and settings["rope_dim"] == R and settings["max_position"] == longest
    expected, expected_factor = by_hand(R, {"rope_type": "default", **scaling}, base, seq_len, longest)
    positions = torch.tensor([1, 7, 4097, 100_003])
    angle = positions[:, None].double() * torch.tensor(expected, dtype=torch.float64)
    tables = rope_table(inv_freq, positions, factor, dtype=torch.float64)
    for table, exact in zip(tables, (angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(table, exact * expected_factor, rtol=0, atol=1e-8)


# ------------------------------------------------------------------------------------- all of transformers' classes


def rotary_classes():
    """Yield every class of transformers' models that makes frequencies of a configuration, with that configuration."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        if "inv_freq" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name, cls in list(vars(module).items()):
            if not (
                inspect.isclass(cls) and cls.__module__ == module.__name__ and re.search("Rotary|R[oO]P[eE]", name)
            ):
                continue
            parameters = [p.annotation for p in inspect.signature(cls).parameters.values()]
            config = next(
                (p for p in parameters if inspect.isclass(p) and issubclass(p, transformers.PreTrainedConfig)), 0
            )
            if config and (inspected := built(config)):
                parts = [getattr(inspected, part, None) for part in inspected.sub_configs]
                for part in (inspected, *parts, inspected.get_text_config()):
                    if frequencies(cls, part):
                        yield cls, part
                        break


def built(config):
    """Return a default configuration, or None where it needs a library that is not installed."""
    with contextlib.suppress(ImportError):
        return config()


def frequencies(cls, config):
    """Return {type of layers: (frequencies, factor)} as the class makes them; nothing where it does not take this."""
    try:
        module = cls(config)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return {}
    return {
        name.removesuffix("inv_freq").removesuffix("_") or None: (
            buffer.double(), getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0),
        )
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1
    }  # fmt: skip


LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALED = [
    LINEAR,
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **{**LLAMA31, LENGTH: 512}},
    {"rope_type": "yarn", "factor": 4.0, LENGTH: 512},
]


def settings_of(cls, config):
    """Yield (kind, configuration, what the class makes of it): as it is, scaled, and scaled in the older spelling."""
    yield "as it is", config, frequencies(cls, config)
    plain = config.to_dict()
    old = plain.get("rope_parameters")
    if not old or old.get("rope_type") == "axial":
        return
    layered = any(isinstance(own, dict) for own in old.values())
    for scaling in SCALED:
        base = {"rope_theta": 54321.0}
        new, spelled = copy.deepcopy(plain), copy.deepcopy(plain)
        dictionaries = {
            name: own and base | scaling | {key: own[key] for key in own if key == "partial_rotary_factor"}
            for name, own in (old if layered else {"": old}).items()
        }
        new["rope_parameters"] = dictionaries if layered else dictionaries[""]
        del spelled["rope_parameters"]
        spelled.pop("layer_rope_theta", None)  # made from rope_parameters
        spelled |= {key: old[key] for key in old if key == "partial_rotary_factor"}
        spelled |= {"rotary_emb_base": 54321.0} if "neox" in config.model_type else base
        spelled["rope_scaling"] = scaling
        for kind, file in (("rope_parameters", new), ("rope_scaling", spelled)):
            if kind == "rope_scaling" and config.model_type == "cohere2_moe":
                continue  # its class drops rope_scaling
            try:
                theirs = frequencies(cls, type(config)(**copy.deepcopy(file)))
            except Exception:  # the class of the configuration refuses it itself
                continue
            yield f"{scaling['rope_type']} in {kind}", file, theirs


REASONS = {  # why classes of transformers are refused
    "is an image tower, or its class makes another table": r".*",
    "rope_type takes .*got 'axial'": r".*",
    "config has no head width": "DbrxRotary|MoonshineRotary",  # under attn_config; two widths, of encoder and decoder
    "must be even, got R=(21|73)": "Glm4|Qwen3OmniMoe",  # their default configuration, no released one
    "rotates a share of 4 and": "EfficientLoFTR",  # two axes
    r"not understood: \['layer_rope_theta'\]": "Granite|Muse",
    r"not understood: \['rope_scaling_layers'\]": "Molmo2",
    "text_config says something else than": "MusicFlamingo",
    "its layers are not rotated": "Zamba2",
    "max_position is missing": "BailingHybrid",
    "layer_type takes one of .*got '(main|compress)'": "DeepseekV4",  # rope_scaling and compress_rope_theta: see below
}


def test_every_rotary_class_of_transformers_gets_its_table_or_a_reason():
    counts, different, unexplained, classes = collections.Counter(), [], [], set()
    for cls, config in rotary_classes():
        classes.add(cls)
        for kind, file, theirs in settings_of(cls, config):
            for layer_type, (right, right_factor) in theirs.items():
                case = (cls.__name__, kind, layer_type)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        inv_freq, factor = rope_frequencies(**rope_settings(file, layer_type))
                except ValueError as error:
                    counts["refused"] += 1
                    if not any(re.search(why, str(error)) and re.match(who, case[0]) for why, who in REASONS.items()):
                        unexplained.append((*case, str(error)))
                    continue
                same = inv_freq.shape == right.shape and torch.allclose(inv_freq, right, rtol=3e-6, atol=0)
                if not same or abs(factor - right_factor) > 1e-9:
                    different.append(case)
                counts["same"] += 1
    assert not different and not unexplained
    if f"transformers=={transformers.__version__}\n" in (ROOT / "requirements.txt").read_text():
        assert len(classes) >= 220 and counts["same"] >= 1500 and counts["refused"] <= 155, (len(classes), counts)


# --------------------------------------------------------------------------------------- what the files say otherwise

PLAIN = {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e6, "max_position_embeddings": 32768}
SHARE = {"head_dim": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 32768}
V4 = {"head_dim": 512, "qk_rope_head_dim": 64, "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": YARN}
NESTED = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
REFUSED = {  # name: configuration, layers, error, message
    "no width": ({"rope_theta": 1e4, "num_key_value_heads": 2}, None, ValueError, "no head width, only .'num_key"),
    "no base": ({"head_dim": 64}, None, ValueError, "rope_theta is missing"),
    "no base of an unknown model": ({"head_dim": 64, "model_type": "new"}, None, ValueError, "rope_theta is missing"),
    "layers nested": ({**PLAIN, "rope_parameters": NESTED}, None, ValueError, "one of .'full_attention', 'sliding_att"),
    "another layer": ({**PLAIN, "rope_parameters": NESTED}, "full", ValueError, "one of .'full_att.*got 'full'"),
    "two bases": ({**PLAIN, "global_rope_theta": 1e5}, None, ValueError, "layer_type takes one of .'full_attention'"),
    "a type without rotation": (
        {**PLAIN, "rope_parameters": {**NESTED, "full_attention": None}}, "full_attention",
        ValueError, "layer_type takes one of .'sliding_attention'., got 'full_attention'",
    ),
    "two bases, one with YaRN": (V4, None, ValueError, "not understood: .'compress_rope_theta'"),
    "two dictionaries": (
        {**PLAIN, "rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, None,
        ValueError, "rope_scaling and rope_parameters disagree",
    ),
    "a layer by its number": (PLAIN, 0, ValueError, "layer_type takes one of .None., got 0"),
    "a base for each layer": ({**PLAIN, "layer_rope_theta": [1e4, 0]}, None, ValueError, "stood: .'layer_rope_theta'"),
    "beside text_config": ({"rope_theta": 1e4, "text_config": PLAIN}, None, ValueError, "text_config .*'rope_theta'"),
    "unknown": ({**PLAIN, "rope_twist": 3, "a_theta": 0}, None, ValueError, "understood: .'a_theta', 'rope_twist'"),
    "dynamic NTK": ({**PLAIN, "use_dynamic_ntk": True}, None, ValueError, "not understood: .'use_dynamic_ntk'"),
    "said twice": ({**PLAIN, "rotary_emb_base": 1e4}, None, ValueError, "says base more than once"),
    "share beside R": ({**PLAIN, "rotary_dim": 64, "rotary_pct": 0.25}, None, ValueError, "share of 0.25 and R=64 of"),
    "share above 1": ({**PLAIN, "rotary_pct": 2}, None, ValueError, "share of 2 "),
    "flag": ({**PLAIN, "rotary": False}, None, ValueError, "layers are not rotated, by .*rotary"),
    "ALiBi": ({**PLAIN, "alibi": True}, None, ValueError, "layers are not rotated, by alibi"),
    "no positions": ({**PLAIN, "position_embedding_type": "nope"}, None, ValueError, "layers are not rotated"),
    "alibi so": ({**PLAIN, "position_embedding_type": "alibi"}, None, ValueError, "layers are not rotated"),
    "image tower": ({**PLAIN, "patch_size": 14}, None, ValueError, "image tower"),
    "no dictionary": ("config.json", None, TypeError, "config takes a dictionary"),
    "no dictionary inside": ({**PLAIN, "rope_scaling": "yarn"}, None, TypeError, "rope_scaling takes a dictionary"),
    "huge base": ({**PLAIN, "rope_theta": 10**400}, None, ValueError, "rope_theta takes a finite number"),
    "false base": ({**PLAIN, "rope_theta": False}, None, TypeError, "rope_theta takes a number, got False"),
    "text for a width": ({**PLAIN, "head_dim": ""}, None, TypeError, "head width takes an integer, got ''"),
    "false share": ({**PLAIN, "rotary_pct": False}, None, TypeError, "partial_rotary_factor takes a number, got Fal"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_does_not_settle_is_refused(name):
    config, layer_type, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        rope_settings(config, layer_type)


GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "rotary": True}
CHATGLM = {"model_type": "chatglm", "kv_channels": 128, "rope_ratio": 50, "original_rope": True}
PROPORTIONAL = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "rope_parameters": {**NESTED, "full_attention": PROPORTIONAL}}
BOTH = {**PLAIN, "rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {**YARN, "type": "yarn"}}
OLMO3 = {**PLAIN, "model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN}
SERVED = {  # name: configuration, layers, and R, base, type
    "share inside": (SHARE, None, 64, 1e7, "default"),
    "share of an older file": ({**PLAIN, "rope_pct": 0.5}, None, 64, 1e6, None),
    "GPT-J": (GPTJ, None, 64, 1e4, None),
    "ChatGLM": (CHATGLM, None, 64, 5e5, None),
    "text_config": ({"text_config": PLAIN, "vision_config": {"patch_size": 14}}, None, 128, 1e6, None),
    "nested": ({**PLAIN, "rope_parameters": NESTED}, "sliding_attention", 128, 1e4, None),
    "one of its types of layers": ({**PLAIN, "layer_types": ["a", "b"]}, "b", 128, 1e6, None),
    "Gemma 4": (GEMMA4, "full_attention", 512, 1e6, "proportional"),
    "both dictionaries alike": (BOTH, None, 128, 1e6, "yarn"),
    "OLMo 3, full": (OLMO3, "full_attention", 128, 5e5, "yarn"),
    "OLMo 3, sliding": (OLMO3, "sliding_attention", 128, 5e5, None),
}


@pytest.mark.parametrize("name", SERVED)
def test_spellings_and_places_of_settings(name):
    config, layer_type, R, base, kind = SERVED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = rope_settings(config, layer_type)
        rope_frequencies(**settings)
    assert (settings["rope_dim"], settings["base"], settings["scaling"].get("rope_type")) == (R, base, kind)
    assert ("partial_rotary_factor" in settings["scaling"]) == (kind == "proportional")


def test_keys_of_other_parts_of_a_model_are_warned_about():
    for config, message in (
        ({**PLAIN, "rope_interleave": True}, "rope_interleave is not applied here: it belongs to the choice of mode"),
        ({**PLAIN, "no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers is not applied .*choice of layers: not all"),
        ({**PLAIN, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is not applied here"),
        ({**PLAIN, "rope_scaling": {**YARN, "attn_factor": 2.0}}, "attn_factor is not applied here"),
    ):
        with pytest.warns(UserWarning, match=message):
            rope_frequencies(**rope_settings(config))


@pytest.mark.parametrize("model_type", " ".join(_LEFT_OUT).split())
def test_what_a_file_leaves_out_is_what_its_class_takes(model_type):
    if model_type in ("chatglm", "gptj", "codegen"):
        pytest.skip("transformers has no configuration of this type with a base or a share")
    whole = transformers.AutoConfig.for_model(model_type).to_dict()
    left_out = next(values for models, values in _LEFT_OUT.items() if model_type in models.split())
    layers = ("full_attention", "sliding_attention") if "rope" in str(left_out) else (None,)
    for layer_type in layers:
        right = rope_settings(whole, layer_type)
        sparse = {key: value for key, value in whole.items() if key not in ("rope_parameters", "head_dim")}
        if "base" not in left_out and layers == (None,) or model_type == "olmo3":
            sparse["rope_theta"] = right["base"]
        if "head width" not in left_out:
            sparse["head_dim"] = whole.get("head_dim")
        got = rope_settings(sparse, layer_type)
        assert (got["rope_dim"], got["base"]) == (right["rope_dim"], right["base"])
