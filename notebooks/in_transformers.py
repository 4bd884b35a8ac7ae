"""apply_rope put into models of the transformers library, which are built small and with random weights."""

import contextlib
import functools
import importlib.util
import warnings

import chapter  # adds the folder of rope_kernels.py to the path
import torch

import rope_kernels as rk

if importlib.util.find_spec("transformers") is None:
    raise chapter.NotReady("This notebook needs transformers: run `pip install -r requirements.txt` first.")

import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm import modeling_glm
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

transformers.logging.set_verbosity_error()


class Table(torch.nn.Module):
    """Stand in for a model's rotary_emb: the table of its config, and which row of it each token takes."""

    def __init__(self, config, device=None):
        super().__init__()
        settings = rk.rope_settings(config)
        if settings["scaling"].get("rope_type") == "longrope":
            raise ValueError("longrope changes its table with the sequence length: one table can't serve it")
        inv_freq, factor = rk.rope_frequencies(**settings)
        self.table = rk.rope_table(inv_freq, settings["max_position"], factor, device=device)

    def forward(self, x, position_ids):
        return self.table, position_ids.expand(x.shape[0], -1)


def rotate(q, k, table, ids, mode="neox"):
    """Stand in for apply_rotary_pos_emb: q (B, heads, S, D) and k likewise, rotated from their first channel on."""
    q, k = rk.apply_rope(q.transpose(1, 2), k.transpose(1, 2), *table, ids, mode=mode, start=0)
    return q.transpose(1, 2), k.transpose(1, 2)


def rotate_one(x, sin, cos, mode="interleaved"):
    """Stand in for GPT-J's apply_rotary_pos_emb: x (B, S, heads, R), sin and cos one row of R/2 columns a token."""
    cos, sin = (rows.expand(x.shape[0], -1, -1).flatten(0, 1) for rows in (cos, sin))
    return rk.apply_rope(x.flatten(0, 1), None, cos, sin, mode=mode)[0].view(x.shape)


REPLACED = {  # model_type: the module, and its function with the convention that the family's weights want
    "llama": (modeling_llama, "apply_rotary_pos_emb", "neox"),
    "gptj": (modeling_gptj, "apply_rotary_pos_emb", "interleaved"),
    "glm": (modeling_glm, "apply_rotary_pos_emb", "interleaved"),
    "qwen3": (modeling_qwen3, "apply_rotary_pos_emb", "neox"),
    "deepseek_v3": (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", "interleaved"),
}


@contextlib.contextmanager
def through_apply_rope(model, mode=None):
    """Let the model rotate through apply_rope inside the with block; mode overrides the family's convention."""
    config = model.config
    module, name, convention = REPLACED[config.model_type]
    if config.model_type == "deepseek_v3" and not config.rope_interleave:
        name, convention = "apply_rotary_pos_emb", "neox"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rope_interleave")  # it is the choice just made
        new = Table(config, model.device)
    stand_in, slot = rotate, "rotary_emb"
    if config.model_type == "gptj":
        cos, sin = new.table
        stand_in, slot, new = rotate_one, "embed_positions", torch.cat((sin, cos), dim=-1)
    homes = [(home, getattr(home, slot)) for home in model.modules() if hasattr(home, slot)]
    original = getattr(module, name)
    try:
        setattr(module, name, functools.partial(stand_in, mode=mode or convention))
        for home, _ in homes:
            setattr(home, slot, new)
        yield model
    finally:
        setattr(module, name, original)
        for home, old in homes:
            setattr(home, slot, old)


SMALL = dict(vocab_size=64, max_position_embeddings=128, initializer_range=0.2)  # far from 0, so that scores matter
LAYERS = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
QUIET = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)


def small_model(family, dtype=torch.float32, seed=0, **changes):
    """Return a small randomly initialised model of the family, in evaluation mode on chapter.DEVICE."""
    options = SMALL | QUIET
    if family == "gptj":
        options |= dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8)
        options.pop("max_position_embeddings")
    elif family == "deepseek_v3":
        options |= LAYERS | dict(num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, v_head_dim=16)
        options |= dict(qk_nope_head_dim=16, qk_rope_head_dim=8, first_k_dense_replace=2)
    else:
        options |= LAYERS | dict(num_key_value_heads=2, head_dim=16)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **options | changes)
    return transformers.AutoModelForCausalLM.from_config(config).to(chapter.DEVICE, dtype).eval()
