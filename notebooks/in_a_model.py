"""What notebook 10 needs: apply_rope in transformers models, a tiny transformer, its faults, a way to find them."""

import contextlib
import copy
import functools
import importlib.util

import chapter  # adds the folder of rope_kernels.py to the path
import torch
from exercises import checker

import rope_kernels as rk

if importlib.util.find_spec("transformers") is None:
    raise ImportError("This notebook needs transformers: run `pip install -r requirements.txt` first.")

import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm import modeling_glm
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

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
CONFIG = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=1024)
ROWS = 2048  # positions in a table


def table(base=10000.0, factor=None):
    """Return cos and sin (ROWS, R/2) of CONFIG with this base; factor replaces its attention factor."""
    inv_freq, wanted = rk.rope_frequencies(R, base, scaling=CONFIG)
    return rk.rope_table(inv_freq, ROWS, wanted if factor is None else factor, device=chapter.DEVICE)


def rotation(*, base=10000.0, factor=None, mode="interleaved", start=0, inverse=False, shift=0):
    """Return a function (q, k, ids) -> (q′, k′); without arguments it is the one that Tiny is trained with."""
    cos, sin = table(base, factor)

    def rotate_qk(q, k, ids):
        return rk.apply_rope(q, k, cos, sin, ids + shift, mode=mode, start=start, inverse=inverse)

    return rotate_qk


FAULTS = {  # each is one argument of rotation()
    "neox pairs": dict(mode="neox"),
    "sign flipped": dict(inverse=True),
    "trailing channels": dict(start=D - R),
    "base 500000": dict(base=500000.0),
    "no attention factor": dict(factor=1.0),
    "positions + 1000": dict(shift=1000),
}


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
        loss = torch.nn.functional.cross_entropy(
            model(tokens, rotate_qk).flatten(0, 1), answers.flatten(), ignore_index=-1
        )
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


def in_words(result):
    """Say what evaluate() returned in classes so wide that every machine gives the same words."""
    loss, accuracy, _ = result
    of_loss = "below 0.01" if loss < 0.01 else "0.01 … 2.77" if loss < 2.77 else "above guessing"
    limits = {"below 20 %": 0.2, "20 … 80 %": 0.8, "80 … 99 %": 0.99, "above 99 %": torch.inf}
    return f"loss {of_loss:16s}right answers {next(name for name, limit in limits.items() if accuracy < limit)}"


def attention_map(model, rotate_qk, head, reach=24):
    """Return a head's mean weight by letter at the query and by places back to the key (LETTERS, reach)."""
    tokens, _ = batch(128, torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model.attention(model.norms[0](model.embed(tokens)), rotate_qk, None)[:, head]
    back = torch.arange(reach, LENGTH, device=tokens.device)[:, None] - torch.arange(reach, device=tokens.device)
    weights = weights[:, reach:].gather(2, back.expand(len(tokens), -1, -1))  # batch, queries, places back
    return torch.stack([weights[tokens[:, reach:] == letter].mean(0) for letter in range(LETTERS)]).cpu()


def convert(model, order=None, scale=None):
    """Return a copy whose rows of Wq and Wk are permuted and scaled, the D rows of each head alike."""
    model = copy.deepcopy(model)
    for projection in (model.q, model.k):
        rows = projection.weight.data.view(HEADS, D, -1)
        rows = rows if order is None else rows[:, order]
        projection.weight.data = (rows if scale is None else rows * scale.to(rows)[:, None]).flatten(0, 1)
    return model


# ---------------------------------------------------------------------------------------------- finding a fault

_HIDDEN = (
    ("base 500000",),
    ("sign flipped",),
    ("positions + 1000",),
    ("trailing channels",),
    ("no attention factor",),
    ("neox pairs",),
    ("sign flipped", "trailing channels"),
)


def hidden(number):
    """Return a rotation that holds one or two faults; reveal(number) says which."""
    options = {}
    for name in _HIDDEN[number]:
        options |= FAULTS[name]
    rotate_qk = rotation(**options)
    return lambda q, k, ids: rotate_qk(q, k, ids)


def reveal(number):
    """Say what hidden(number) does wrong."""
    return " and ".join(_HIDDEN[number])


def read(rotate_qk, width=D):
    """Read a rotation off what it makes of unit vectors: one call, each channel at positions 0 and 1."""
    unit = torch.eye(width, device=chapter.DEVICE).repeat(2, 1)
    unit = unit.unsqueeze(1).repeat(1, HEADS, 1)  # tokens, heads (all alike), channels
    ids = torch.arange(2, device=chapter.DEVICE).repeat_interleave(width)
    out, _ = rotate_qk(unit, unit, ids)
    still, turned = out[:, 0].cpu().double().view(2, width, width)  # row c: what became of channel c
    mixed = turned - turned.diag().diag()
    channels = mixed.any(1).nonzero().flatten().tolist()
    pairs = [(c, int(mixed[c].abs().argmax())) for c in channels]
    pairs = [(a, b) for a, b in pairs if a < b]
    if not pairs:
        return {"channels": "none"}
    angle = [float(torch.atan2(turned[a, b], turned[a, a])) for a, b in pairs]
    start, half = channels[0], len(pairs)
    names = {
        "interleaved": [(start + 2 * p, start + 2 * p + 1) for p in range(half)],
        "neox": [(start + p, start + p + half) for p in range(half)],
    }
    return {
        "turns at position 0": bool((still - still.diag().diag()).any()),
        "channels": f"{start} … {channels[-1]} of {width}",
        "pairs": next((name for name, wanted in names.items() if wanted == pairs), str(pairs)),
        "sign": {(True, False): "+", (False, True): "−"}.get((max(angle) > 0, min(angle) < 0), "mixed"),
        "attention factor": float(turned[pairs[0][0]].norm()),
        "inv_freq": [abs(a) for a in angle],
    }


def written(value):
    """Write an entry of such a card with four digits: entries that look alike are alike."""
    if isinstance(value, list):
        return "  ".join(map(written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -------------------------------------------------------------------------------------- checks of the exercises


@checker
def check_exercise_1(order):
    """Check an order of the D rows of a head that undoes a flipped sign: converted weights give the same scores."""
    order = [int(row) for row in order]
    if sorted(order) != list(range(D)):
        yield f"it takes each of the rows 0 … {D - 1} once"
    q, k = torch.randn(2, 24, HEADS, D, generator=torch.Generator().manual_seed(4)).to(chapter.DEVICE)
    ids = torch.arange(24, device=chapter.DEVICE) * 83  # up to 1909, where the slow pairs have turned as well
    scores = [
        torch.einsum("mhd,nhd->hmn", *rotation(inverse=flip)(x, y, ids))
        for flip, x, y in ((False, q, k), (True, q[..., order], k[..., order]))
    ]
    if (scores[0] - scores[1]).abs().max() > 1e-3:
        yield "the scores are not those of the right sign"


@checker
def check_exercise_2(base_of):
    """Check a function that finds the base of a plain RoPE kernel."""
    for base, rope_dim, mode, start in (
        (10000.0, 16, "neox", 0),
        (500000.0, 32, "interleaved", 0),
        (1234.0, 8, "neox", 24),
    ):
        cos, sin = rk.rope_table(rk.rope_frequencies(rope_dim, base)[0], 8, device=chapter.DEVICE)

        def kernel(q, k, ids, cos=cos, sin=sin, mode=mode, start=start):
            return rk.apply_rope(q, k, cos, sin, ids, mode=mode, start=start)

        found = float(base_of(kernel))
        if not abs(found / base - 1) < 1e-2:
            yield f"it found {found:.6g} for the base {base:g}, R = {rope_dim}"


@checker
def check_exercise_3(convert):
    """Check a function that carries DeepSeek's cached keys from transformers' order of channels to apply_rope's."""
    for width, batch in ((8, 2), (64, 3)):
        cos, sin = rk.rope_table(rk.rope_frequencies(width)[0], 5)
        k = torch.randn(batch, 1, 5, width, generator=torch.Generator().manual_seed(width))
        twice = (t.repeat(1, 2).unsqueeze(0) for t in (cos, sin))
        _, theirs = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(k, k, *twice)
        ours = rk.torch_rope_interleaved(k, cos, sin)
        found = convert(theirs.clone())
        if found.shape != ours.shape:
            yield f"it returned the shape {tuple(found.shape)} for {tuple(ours.shape)}"
        if not (found - ours).abs().max() <= 1e-5:
            yield f"for R = {width} the keys are not apply_rope's"
