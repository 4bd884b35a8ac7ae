"""Right values from the index form in float64, written without the product's code."""

import math

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


def draw(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape).to(dtype).to(device)


def draw_qk(tokens=9, dtype=torch.float32, device="cpu"):
    """The heads and width that most tests share, so that few kernels are built."""
    return draw(tokens, 5, 64, dtype=dtype, device=device), draw(tokens, 2, 64, dtype=dtype, device=device)


def tables(P, R=64, dtype=torch.float32, device="cpu", scale=1.0):
    """cos and sin of the positions 0 … P−1, with NaN before and after: a read past either end shows."""
    both = []
    for table in (angles(range(P), R).cos(), angles(range(P), R).sin()):
        buffer = torch.full((8 + P + 8, R // 2), math.nan, dtype=dtype, device=device)
        buffer[8:-8] = scale * table
        both.append(buffer[8:-8])
    return both


def right(x, cos, sin, ids, mode="neox", start=0, inverse=False):
    """float64: each token's own row for all of its heads; ids shaped like the leading dimensions, or (seq,)."""
    x, stop = x.double().cpu(), start + 2 * cos.shape[1]
    c, s = (table.double().cpu()[ids.cpu().long()][..., None, :] for table in (cos, sin))
    y = x.clone()
    y[..., start:stop] = rotate(x[..., start:stop], c, -s if inverse else s, mode)
    return y


def assert_rounded_once(y, value):
    """Half types: at most 2 elements in 1000 differ from the correctly rounded value, and those by one step."""
    y, value = y.detach().cpu(), value.detach()
    if y.dtype == torch.float32:
        torch.testing.assert_close(y.double(), value, rtol=0, atol=2e-6)
        return
    assert (y != value.to(y.dtype)).sum() <= math.ceil(0.002 * y.numel())
    assert ((y.double() - value).abs() <= torch.finfo(y.dtype).eps * value.abs() + 1e-6).all()
