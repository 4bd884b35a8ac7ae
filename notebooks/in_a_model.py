"""Notebook 10: apply_rope inside transformers models, a tiny transformer, faults for it, and checks of the exercises."""

import contextlib
import functools
import importlib.util

import chapter  # adds the folder of rope_kernels.py to the path
import torch

import rope_kernels as rk

if importlib.util.find_spec("transformers") is None:
    raise ImportError("This notebook needs transformers: run `pip install -r requirements.txt` first.")

import transformers  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.glm import modeling_glm  # noqa: E402
from transformers.models.gptj import modeling_gptj  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

transformers.logging.set_verbosity_error()

# ------------------------------------------------------------------------------- apply_rope in transformers models


class Table(torch.nn.Module):
    """Stand in for a model's rotary_emb: the table of its config, and which row of it each token takes."""

    def __init__(self, config, rope_dim, device=None):
        super().__init__()
        if config.rope_parameters["rope_type"] == "longrope":
            raise ValueError("longrope changes its table with the sequence length: one table can't serve it")
        limit = config.max_position_embeddings
        inv_freq, factor = rk.rope_frequencies(rope_dim, scaling=config.rope_parameters, max_position=limit)
        self.table = rk.rope_table(inv_freq, limit, factor, device=device)

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
    "deepseek_v3": (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", "interleaved"),
}


@contextlib.contextmanager
def through_apply_rope(model, mode=None):
    """Let the model rotate through apply_rope inside the with block; mode overrides the family's convention."""
    config = model.config
    module, name, convention = REPLACED[config.model_type]
    if config.model_type == "deepseek_v3" and not config.rope_interleave:
        name, convention = "apply_rotary_pos_emb", "neox"
    if config.model_type == "gptj":
        stand_in, slot = rotate_one, "embed_positions"
        cos, sin = rk.rope_table(
            rk.rope_frequencies(config.rotary_dim or config.n_embd)[0], config.n_positions, device=model.device
        )
        new = torch.cat((sin, cos), dim=-1)
    else:
        stand_in, slot = rotate, "rotary_emb"
        width = config.qk_rope_head_dim if config.model_type == "deepseek_v3" else config.head_dim
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        new = Table(config, round(share * width), model.device)
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


# --------------------------------------------------------------------------------- a tiny transformer and its task

LETTERS, LENGTH = 16, 64  # a … p; tokens in a sequence
HEADS, D, R = 2, 32, 16  # of the D channels of a head, R are rotated: the leading ones, in interleaved pairs
CONFIG = dict(rope_type="yarn", rope_theta=10000.0, factor=32.0, original_max_position_embeddings=1024)
ROWS = 2048  # positions in a table


def table(config=CONFIG, factor=None):
    """Return cos and sin (ROWS, R/2) of a config; factor replaces the attention factor that it asks for."""
    inv_freq, wanted = rk.rope_frequencies(R, scaling=config)
    return rk.rope_table(inv_freq, ROWS, wanted if factor is None else factor, device=chapter.DEVICE)


def rotation(cos_sin=None, *, mode="interleaved", start=0, inverse=False, shift=0):
    """Return a function (q, k, ids) -> (q′, k′), the one that Tiny is trained with unless told otherwise."""
    cos, sin = table() if cos_sin is None else cos_sin

    def rotate_qk(q, k, ids):
        return rk.apply_rope(q, k, cos, sin, ids + shift, mode=mode, start=start, inverse=inverse)

    return rotate_qk


def batch(count, generator):
    """Return sequences of letters, and the answers: letter n asks for the letter n + 1 places back (−1: none there)."""
    tokens = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    place = torch.arange(LENGTH) - 1 - tokens
    answers = torch.where(place >= 0, tokens.gather(1, place.clamp(min=0)), -1)
    return tokens.to(chapter.DEVICE), answers.to(chapter.DEVICE)


class Tiny(torch.nn.Module):
    """A transformer of one layer; the rotation is an argument of the call, so that it can be exchanged."""

    def __init__(self):
        super().__init__()
        width = HEADS * D
        self.embed = torch.nn.Embedding(LETTERS, width)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(3))
        self.read = torch.nn.Linear(width, LETTERS, bias=False)

    def attention(self, x, rotate_qk, ids):
        """Return the weights (batch, heads, queries, keys), 0 for keys after the query."""
        B, S, _ = x.shape
        ids = torch.arange(S, device=x.device) if ids is None else ids
        q, k = rotate_qk(self.q(x).view(B * S, HEADS, D), self.k(x).view(B * S, HEADS, D), ids.repeat(B))
        q, k = (tensor.view(B, S, HEADS, D).transpose(1, 2) for tensor in (q, k))
        later = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        return (q @ k.transpose(2, 3) / D**0.5).masked_fill(later, -torch.inf).softmax(-1)

    def forward(self, tokens, rotate_qk, ids=None):
        h = self.embed(tokens)
        x = self.norms[0](h)
        v = self.v(x).unflatten(-1, (HEADS, D)).transpose(1, 2)
        h = h + self.o((self.attention(x, rotate_qk, ids) @ v).transpose(1, 2).flatten(2))
        h = h + self.mlp(self.norms[1](h))
        return self.read(self.norms[2](h))


def train(rotate_qk, steps=300, count=48, seed=0):
    """Return a Tiny trained from scratch, and its loss step by step."""
    torch.manual_seed(seed)
    model, generator = Tiny().to(chapter.DEVICE), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        tokens, answers = batch(count, generator)
        loss = torch.nn.functional.cross_entropy(model(tokens, rotate_qk).flatten(0, 1), answers.flatten(), ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def evaluate(model, rotate_qk, ids=None):
    """Return loss, accuracy and mean confidence (the probability of the chosen letter) on 128 new sequences."""
    tokens, answers = batch(128, torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens, rotate_qk, ids)[answers >= 0]
    answers = answers[answers >= 0]
    loss = torch.nn.functional.cross_entropy(logits, answers).item()
    confidence, chosen = logits.softmax(-1).max(-1)
    return loss, (chosen == answers).float().mean().item(), confidence.mean().item()
