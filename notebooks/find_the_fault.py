"""Reading channels, pairs, sign and frequencies off a rotation, and seven rotations with faults to find.

A rotation is a function (q, k, ids) -> (q′, k′) over tensors (tokens, HEADS, channels).
"""

import math

import chapter
import torch
from tiny import FAULTS, HEADS, D, rotation

LATER = 1001  # a position that 16-bit floats don't hold: bfloat16 makes it 1000


def matrices(rotate_qk, width=D):
    """Return a rotation as float64 matrices: q or k, head, position, channel in, channel out."""
    unit = torch.eye(width, device=chapter.DEVICE).repeat(3, 1)  # three times a token a channel
    q = unit.unsqueeze(1).repeat(1, HEADS, 1)
    ids = torch.tensor([0, 1, LATER], device=chapter.DEVICE).repeat_interleave(width)
    turned = torch.stack(tuple(rotate_qk(q, q.clone(), ids)))
    return turned.double().cpu().view(2, 3, width, HEADS, width).permute(0, 3, 1, 2, 4)


def order(still):
    """Say what position 0 does, where nothing turns."""
    width = len(still)
    origin = still.argmax(0).tolist()  # which channel comes out at each place
    if not torch.allclose(still[origin], torch.eye(width).double()):
        return "turns"
    names = {"unchanged": [*range(width)], "evens, then odds": [*range(0, width, 2), *range(1, width, 2)]}
    return next((name for name, known in names.items() if known == origin), f"order {origin}")


def card(*at):
    """Say in words what the matrices of one head at positions 0, 1 and LATER do."""
    still, once, later = (torch.nn.functional.normalize(matrix) for matrix in at)
    step, leap = once @ still.T, later @ still.T  # what position 0 does is divided out, be it an order or an angle
    mixed = step - step.diag().diag()
    channels = mixed.any(1).nonzero().flatten().tolist()
    pairs = [(c, int(mixed[c].abs().argmax())) for c in channels]
    pairs = [(a, b) for a, b in pairs if a < b]
    if not pairs:
        return {"channels": "none"}
    start, half, width = channels[0], len(pairs), len(step)
    names = {
        "interleaved": [(start + 2 * p, start + 2 * p + 1) for p in range(half)],
        "neox": [(start + p, start + p + half) for p in range(half)],
    }
    name = next((name for name, known in names.items() if known == pairs), str(pairs))
    rotates = torch.allclose(step @ step.T, torch.eye(width).double(), atol=1e-4)
    side_by_side = channels == [*range(start, channels[-1] + 1)]
    angle = [math.atan2(step[a, b], step[a, a]) for a, b in pairs]
    length = torch.stack(at).norm(dim=2)  # at each position, of each channel's row
    factor = torch.ones(width).double().index_fill(0, torch.tensor(channels), float(length[1, start]))
    steps = torch.allclose(leap, torch.linalg.matrix_power(step, LATER), atol=1e-2)
    return {
        "position 0": order(still),
        "channels": f"{start} … {channels[-1]} of {width}" if side_by_side else str(channels),
        "pairs": name if rotates else "no rotation",
        "sign": {(True, False): "+", (False, True): "−"}.get((max(angle) > 0, min(angle) < 0), "mixed"),
        "attention factor": float(factor[start]) if torch.allclose(length, factor, atol=1e-4) else "mixed",
        "inv_freq": [abs(a) for a in angle],
        f"position {LATER}": f"{LATER} steps" if steps else "other angles",
    }


def read(rotate_qk, width=D):
    """Read a rotation off one call: the card of q's first head, and in what the other heads of q and k differ from it.

    It can't see other positions than the three, a pair that doesn't turn at position 1, heads taken for one another,
    nor anything that depends on the values, their dtype, their layout or how many tokens there are.
    """
    q, k = matrices(rotate_qk, width)
    first, *rest = (card(*at) for at in (*q, *k))
    names = [f"{name}, head {head}" for name in "qk" for head in range(HEADS)]
    others = [
        f"{name}: {entry} {written(value)}"
        for name, found in zip(names[1:], rest, strict=True)
        for entry, value in found.items()
        if not alike(value, first.get(entry))
    ]
    for name, found, at in zip(names[1:], rest, (*q[1:], *k), strict=True):
        both = found.get("position 0") == first.get("position 0") == "turns"
        if both and not torch.allclose(at[0], q[0, 0], atol=1e-4):
            others.append(f"{name}: position 0 turns otherwise")
    return first | {"other heads": "; ".join(others) or "alike"}


def alike(a, b):
    """Compare two entries of a card; numbers to four digits, and to 1e-6, where float32 ends."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
    return a == b


def differing(found, wanted):
    """Return the entries in which a card differs from the one that is wanted."""
    return [entry for entry, value in wanted.items() if not alike(found.get(entry), value)]


def written(value):
    """Write an entry of a card, numbers with four digits."""
    if isinstance(value, list):
        return "  ".join(map(written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
