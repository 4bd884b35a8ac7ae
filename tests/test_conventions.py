"""conventions.json is what the models of transformers do, and README's table is what the file says."""

import json
import re

import pytest
from conftest import ROOT

transformers = pytest.importorskip("transformers")
from measurements import conventions  # noqa: E402

FILE = json.loads((ROOT / "notebooks" / "conventions.json").read_text(encoding="utf-8"))
MODELS = FILE["models"]
TYPES = conventions.types()
PINNED = transformers.__version__ == FILE["provenance"]["transformers"]
SPREAD = ["llama", "llama4", "smollm3", "cohere2", "gptj", "gpt_neox", "phi", "stablelm", "glm4", "glm4_moe"]
SPREAD += ["deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma3", "gemma4", "qwen3", "qwen3_next", "olmo2", "gpt_oss"]
SPREAD += ["nanochat"]
README = {  # name in the table: key in the file
    "Llama 1–3": "llama",
    "Llama 4": "llama4",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3-Next": "qwen3_next",
    "Gemma 3": "gemma3",
    "GPT-OSS": "gpt_oss",
    "OpenAI Privacy Filter": "openai_privacy_filter",
    "SmolLM3": "smollm3",
    "Cohere 2": "cohere2",
    "Cohere Compass": "cohere_compass",
    "GPT-J": "gptj",
    "GPT-NeoX": "gpt_neox",
    "Phi-1, Phi-2": "phi",
    "Phi-3": "phi3",
    "GLM-4": "glm4",
    "GLM-4.5": "glm4_moe",
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3": "deepseek_v3",
    "DeepSeek-V4": "deepseek_v4",
    "nanochat": "nanochat",
}


@pytest.mark.parametrize("model_type", SPREAD)
def test_the_file_is_what_the_models_do(model_type):
    if model_type not in TYPES:
        pytest.skip(f"transformers {transformers.__version__} has no rotary type {model_type}")
    try:
        rows = conventions.read(TYPES[model_type], model_type)
    except ValueError as reason:
        if PINNED:
            raise
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
    said = {key: row for key, row in MODELS.items() if key.split(":")[0] == model_type}
    if PINNED:
        assert rows == said
    else:  # another version may have other default widths
        decided = ("pairing", "order", "sign", "qk_norm", "layers")
        assert [[row[k] for k in decided] for row in rows.values()] == [
            [row[k] for k in decided] for row in said.values()
        ]


def test_the_file_is_of_the_pinned_transformers():
    assert f"transformers=={FILE['provenance']['transformers']}\n" in (ROOT / "requirements.txt").read_text()


def test_nearly_every_type_is_read_and_every_other_has_a_reason():
    read = {key.split(":")[0] for key in MODELS}
    assert len(read) >= 190
    assert not read & set(FILE["not_read"]) and all(len(reason) > 20 for reason in FILE["not_read"].values())
    if PINNED:
        assert read | set(FILE["not_read"]) == set(TYPES)
    schema = {"pairing", "order", "D", "R", "start", "sign", "qk_norm", "layers", "call", "class"}
    assert all(schema <= set(row) and row["start"] + row["R"] <= row["D"] for row in MODELS.values())


@pytest.mark.skipif(not PINNED, reason="another version may have other default widths")
def test_heads_are_as_wide_as_by_default():
    for key, row in MODELS.items():
        config = transformers.CONFIG_MAPPING[key.split(":")[0]]().get_text_config(decoder=True)
        layers = config.per_layer_config if config.is_heterogeneous else [config]
        widths = {conventions.get(layer, "head_dim") for layer in layers} - {None, 0}  # GLM-5-Next says 0
        if widths and row["R"] == row["D"] and row["class"] != "CsmDepthDecoderModel":  # another configuration's
            assert row["D"] in widths, key


def line(name, key):
    """The line of README's table for a family."""
    row = MODELS[key]
    pairs = {"neox": "half-split", "interleaved": "interleaved"}[row["pairing"]]
    channels = "all" if row["R"] == row["D"] else f"{row['R']} of {row['D']}, from {row['start']} on"
    remarks = ["written as halves"] * (row["order"] == "halves") + ["turns backwards"] * (row["sign"] == -1)
    remarks += ["QK-norm"] * row["qk_norm"] + [row["layers"].replace("have no rope", "don't rotate")] * (
        row["layers"] != "all"
    )
    return f"| {name} | `{key}` | {pairs} | {channels} | {'; '.join(remarks)} |"


def test_the_readme_s_table_is_made_from_the_file(monkeypatch, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Which convention is mine?") :].split("\n## ")[0]
    assert re.findall(r"^\| .*`.*", section, re.M)[1:] == [line(*family) for family in README.items()]
    assert f"transformers {FILE['provenance']['transformers']}" in section
    assert f"{len({key.split(':')[0] for key in MODELS})} model types" in section
    monkeypatch.chdir(ROOT)
    exec(re.search(r"```python\n(.*?)```", section, re.S)[1], {})
    assert "start=0" in capsys.readouterr().out
