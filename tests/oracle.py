"""Right values from the index form in float64, written without the product's code."""

import torch


def pairs(R, convention):
    """Return the channels (first, second) of each pair."""
    if convention == "neox":
        return [(p, p + R // 2) for p in range(R // 2)]
    return [(2 * p, 2 * p + 1) for p in range(R // 2)]


def rotate(x, cos, sin, convention):
    """Rotate the last dimension in float64, pair by pair."""
    x, cos, sin = x.double().cpu(), cos.double().cpu(), sin.double().cpu()
    y = torch.full_like(x, float("nan"))
    for p, (first, second) in enumerate(pairs(x.shape[-1], convention)):
        y[..., first] = x[..., first] * cos[..., p] - x[..., second] * sin[..., p]
        y[..., second] = x[..., second] * cos[..., p] + x[..., first] * sin[..., p]
    return y


def angles(positions, R, base=10000.0):
    """Return the float64 angles (len(positions), R/2)."""
    inv_freq = torch.tensor([base ** (-2 * p / R) for p in range(R // 2)], dtype=torch.float64)
    return torch.tensor(positions, dtype=torch.float64)[:, None] * inv_freq
