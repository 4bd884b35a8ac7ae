"""Right values from the index form in float64, written without the product's code."""

import math

import torch

INTEGER_VIEW = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def by_hand(R, scaling, base=10000.0, seq_len=None, max_position=None):
    """The formulas of the papers in plain Python, pair by pair."""
    kind = scaling.get("rope_type") or scaling.get("type")
    base = scaling.get("rope_theta") or base
    s, L = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if kind == "dynamic":
        length = max_position if seq_len is None or seq_len < max_position else seq_len
        base = base * math.exp(R / (R - 2) * math.log(s * length / max_position - s + 1))
    theta = [math.exp(-2 * i / R * math.log(base)) for i in range(R // 2)]
    if kind in ("default", "dynamic"):
        return theta, 1.0
    if kind == "linear":
        return [t / s for t in theta], 1.0
    if kind == "proportional":
        kept = scaling.get("partial_rotary_factor", 1.0) * R / 2
        return [t / (s or 1.0) if i < kept else 0.0 for i, t in enumerate(theta)], 1.0
    if kind == "llama3":
        low, high, result = scaling["low_freq_factor"], scaling["high_freq_factor"], []
        for t in theta:
            wavelength = 2 * math.pi / t
            if wavelength < L / high:
                result.append(t)
            elif wavelength > L / low:
                result.append(t / s)
            else:
                blend = (L / wavelength - low) / (high - low)
                result.append((1 - blend) * t / s + blend * t)
        return result, 1.0
    if kind == "longrope":
        s = s or max_position / L
        divide = scaling["long_factor"] if seq_len is not None and seq_len > L else scaling["short_factor"]
        factor = 1.0 if s <= 1 else math.sqrt(1 + math.log(s) / math.log(L))
        given_factor = scaling.get("attention_factor")
        return [t / d for t, d in zip(theta, divide, strict=True)], factor if given_factor is None else given_factor
    assert kind == "yarn"
    L = L or max_position
    s = s or max_position / L

    def pair_that_turns(times):
        return R * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    if first == last:
        last += 0.001
    result = []
    for i, t in enumerate(theta):
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        result.append(t / s * share + t * (1 - share))

    def m(k):
        return 1.0 if s <= 1 else 0.1 * k * math.log(s) + 1

    factor = scaling.get("attention_factor")
    if factor is None:
        k, k_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        factor = m(k) / m(k_all) if k and k_all else m(1)
    return result, factor


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_rope(x, position, mode, base=10000.0, R=None, start=0):
    """Rotate one row, a list of numbers, by the definition."""
    R = len(x) if R is None else R
    y = [float(v) for v in x]
    for i in range(R // 2):
        a = position * base ** (-2 * i / R)
        first, second = (start + i, start + i + R // 2) if mode == "neox" else (start + 2 * i, start + 2 * i + 1)
        y[first] = float(x[first]) * math.cos(a) - float(x[second]) * math.sin(a)
        y[second] = float(x[first]) * math.sin(a) + float(x[second]) * math.cos(a)
    return torch.tensor(y, dtype=torch.float64)


def bits(x):
    """The bit patterns, so that NaN payloads and the sign of zero count."""
    return x.contiguous().view(INTEGER_VIEW[x.dtype.itemsize])
