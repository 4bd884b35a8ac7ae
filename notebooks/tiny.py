"""A transformer of one layer, small enough to be trained in a cell, its task and its rotation, right and wrong."""

import copy

import chapter  # adds the folder of rope_kernels.py to the path
import torch

import rope_kernels as rk

LETTERS, LENGTH = 16, 64  # a … p; tokens in a sequence
HEADS, D, R = 2, 32, 16  # of the D channels of a head, R are rotated: the leading ones, in interleaved pairs
CONFIG = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=1024)
ROWS = 2048  # positions in a table


def table(base=10000.0, factor=None):
    """Return cos and sin (ROWS, R/2) of CONFIG with this base; factor replaces its attention factor."""
    inv_freq, wanted = rk.rope_frequencies(R, base, scaling=CONFIG)
    return rk.rope_table(inv_freq, ROWS, wanted if factor is None else factor, device=chapter.DEVICE)


def rotation(*, base=10000.0, factor=None, mode="interleaved", start=0, inverse=False, shift=0):
    """Return a function (q, k, ids) -> (q′, k′); without arguments, that of the training."""
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
    """Return a copy with the D rows of each head of Wq and Wk permuted and scaled."""
    model = copy.deepcopy(model)
    for projection in (model.q, model.k):
        rows = projection.weight.data.view(HEADS, D, -1)
        rows = rows if order is None else rows[:, order]
        rows = rows if scale is None else rows * scale.to(rows)[:, None]
        projection.weight.data = rows.flatten(0, 1)
    return model
