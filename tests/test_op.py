"""apply_rope against float64, on TileLang's C backend and, where there is one, on a CUDA device.

Docstrings name the public reports in which other implementations went wrong in the way that a test looks for.
"""

import itertools
import operator
import random
import types

import chapter
import pytest
import torch
import torch.distributed as dist
from conftest import needs_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_rounded_once, draw, draw_qk, right, tables
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rope_kernels as rk
from rope_kernels import apply_rope

HALVES = (torch.float16, torch.bfloat16)


class Calls(TorchDispatchMode):
    """Keep, of every torch operation that makes a tensor, its elements; of ours, the arguments."""

    def __init__(self):
        super().__init__()
        self.made, self.ours = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if "rope_chapter" in str(function):
            self.ours.append(args)
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.made.append(result.numel())
        return result


# -------------------------------------------------------------------------------- apply_rope: the values


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "mode"),
    [
        (torch.float32, torch.float32, "neox"),
        (torch.float16, torch.float16, "interleaved"),
        (torch.bfloat16, torch.float32, "neox"),
        (torch.bfloat16, torch.bfloat16, "neox"),
        (torch.bfloat16, torch.float32, "interleaved"),
        (torch.float16, torch.float32, "neox"),
    ],
    ids=str,
)
def test_in_place_equals_out_of_place(device, dtype, table_dtype, mode):
    """flagos-ai/FlagGems#5142, kvcache-ai/sglang#31: in place must equal out of place, and be written back."""
    (q, k), (cos, sin) = draw_qk(dtype=dtype, device=device), tables(99, dtype=table_dtype, device=device)
    ids = torch.randint(0, 99, (9,), device=device)
    before = q.clone(), k.clone()
    y, z = apply_rope(q, k, cos, sin, ids, mode=mode)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    for x, out in ((q, y), (k, z)):
        assert out.dtype == dtype and out.shape == x.shape and out.device == x.device
        assert_rounded_once(out, right(x, cos, sin, ids, mode))
        if table_dtype in HALVES:  # exact products: equal to the reference, whatever a compiler fuses
            assert torch.equal(out, rk.torch_partial_rope(x, cos[ids][:, None], sin[ids][:, None], mode))
    if dtype == torch.bfloat16 and device == "cpu":  # the float32 kernel, then one rounding
        wide = apply_rope(q.float(), k.float(), cos.float(), sin.float(), ids, mode=mode)
        assert torch.equal(y, wide[0].to(dtype)) and torch.equal(z, wide[1].to(dtype))
    same_q, same_k = apply_rope(q, k, cos, sin, ids, mode=mode, inplace=True)
    assert same_q is q and same_k is k
    assert torch.equal(q, y) and torch.equal(k, z)


def test_position_ids_choose_the_rows(device):
    """NVIDIA/Megatron-LM#453, linkedin/Liger-Kernel#477, huggingface/transformers#22161."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(40, device=device)
    packed = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3], device=device)
    numbers = torch.arange(40, device=device)
    descending, strided, expanded = numbers.flip(0)[:9], numbers[3::4][:9], numbers[7].expand(9)
    for ids in (packed, descending, strided, expanded, torch.randint(0, 40, (9,), device=device)):
        y, z = apply_rope(q, k, cos, sin, ids)
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))
    none = apply_rope(q, k, cos, sin)
    assert torch.equal(none[0], apply_rope(q, k, cos, sin, numbers[:9])[0])
    assert torch.equal(none[1], apply_rope(q, k, cos, sin, numbers[:9].int())[1])
    same = q[:1].repeat(9, 1, 1)
    y = apply_rope(same, k, cos, sin, packed)[0]
    assert torch.equal(y[0], y[3]) and torch.equal(y[0], y[5]) and not torch.equal(y[0], y[1])
    order = torch.randperm(9, device=device)
    y, z = apply_rope(q, k, cos, sin, packed)
    moved = apply_rope(q[order], k[order], cos, sin, packed[order])
    assert torch.equal(moved[0], y[order]) and torch.equal(moved[1], z[order])


def test_positions_serve_each_sequence_or_the_whole_batch(device):
    """linkedin/Liger-Kernel#477, microsoft/onnxruntime#29618: left padding gives each sequence ids of its own."""
    cos, sin = tables(10, device=device)
    own = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]], device=device)
    shared = torch.tensor([3, 1, 9, 0], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (draw(2, 4, heads, 64, dtype=dtype, device=device) for heads in (5, 2))
        for ids in (own, own.T.contiguous().T, shared, shared[None], shared.expand(2, 4), None):
            y, z = apply_rope(q, k, cos, sin, ids)
            in_place = apply_rope(q.clone(), k.clone(), cos, sin, ids, inplace=True)
            assert torch.equal(y, in_place[0]) and torch.equal(z, in_place[1])
            ids = torch.arange(4) if ids is None else ids
            assert_rounded_once(y, right(q, cos, sin, ids))
            assert_rounded_once(z, right(k, cos, sin, ids))


def test_k_may_be_left_out(device):
    q, (cos, sin) = draw(9, 5, 64, dtype=torch.bfloat16, device=device), tables(9, device=device)
    y, none = apply_rope(q, None, cos, sin)
    assert none is None
    assert_rounded_once(y, right(q, cos, sin, torch.arange(9)))


def test_tokens_and_heads_are_told_apart_where_their_numbers_agree(device):
    """vukrosic/leo-optimizer#2: with as many tokens as heads, a table along the wrong axis raises nothing."""
    cos, sin = tables(20, device=device)
    ids = torch.tensor([3, 1, 4, 15, 9], device=device)
    q, k = draw_qk(5, device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[0], right(q, cos, sin, ids))
    _, q, k = heads_before_tokens(torch.float32, device)  # (B, H, S, D) with H = S, transposed
    y = apply_rope(q, k, cos, sin, ids)[0]
    for h in range(5):
        assert_rounded_once(y[:, :, h], right(q[:, :, h : h + 1], cos, sin, ids)[:, :, 0])


def test_positions_are_exact_beside_half_types(device):
    """tile-ai/tilelang#2483: in bfloat16, 259 is 260 and 33000 is 33024."""
    q, k = draw_qk(2, dtype=torch.bfloat16, device=device)
    cos, sin = tables(33025, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([259, 33000], device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[0], right(q, cos, sin, ids))


def test_full_width_tables_are_refused_and_halves_of_them_served(device):
    """Dao-AILab/flash-attention#45, facebookresearch/xformers#779, Tencent/ncnn#6833: any other width is refused."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    for layout in (lambda t: torch.cat((t, t), -1), lambda t: t.repeat_interleave(2, -1)):
        with pytest.raises(ValueError, match="cos has 64 columns, so R=128; q is only D=64 wide"):
            apply_rope(q, k, layout(cos), layout(sin))
    strided = torch.cat((cos, cos), -1)[:, :32], torch.cat((sin, sin), -1)[:, 32:]
    off = torch.cat((cos.new_zeros(1), cos.flatten(), sin.flatten()))[1:].view(2, 9, 32)  # neither is on 16 bytes
    for halves in (strided, off):
        assert_rounded_once(apply_rope(q, k, *halves)[0], right(q, cos, sin, torch.arange(9, device=device)))


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_leading_shapes_are_rotated_back_and_kept_in_norm(device, mode, data):
    """float64's values; turning back gives x; norms stay; scores depend on distance alone."""
    lead = data.draw(st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 3), st.integers(0, 9))))
    shared = data.draw(st.booleans())
    q, k = draw(*lead, 5, 64, device=device), draw(*lead, 2, 64, device=device)
    cos, sin = tables(200, device=device)
    ids = torch.randint(0, 100, lead[-1:] if shared else lead, device=device)
    y, z = apply_rope(q, k, cos, sin, ids, mode=mode)
    assert y.shape == q.shape and z.shape == k.shape
    assert_rounded_once(y, right(q, cos, sin, ids, mode))
    assert_rounded_once(z, right(k, cos, sin, ids, mode))
    back = apply_rope(y, z, cos, sin, ids, mode=mode, inverse=True)
    torch.testing.assert_close(back, (q, k), rtol=0, atol=4e-6)
    torch.testing.assert_close(y.norm(dim=-1), q.norm(dim=-1), rtol=2e-6, atol=0)
    far = apply_rope(q, k, cos, sin, ids + 100, mode=mode)
    scores = ((a[..., :2, :].double() * b.double()).sum(-1) for a, b in ((y, z), far))
    torch.testing.assert_close(*scores, rtol=0, atol=3e-4)  # cos and sin are rounded to float32


# ------------------------------------------------------------------------- apply_rope: where tensors lie


def packed(dtype, device):
    base = draw(9, 9, 64, dtype=dtype, device=device)
    return base, *base.split([5, 2, 2], dim=1)[:2]


def packed_by_head(dtype, device):
    base = draw(9, 5, 192, dtype=dtype, device=device)
    return base, *base.chunk(3, dim=-1)[:2]


def mla_tails(dtype, device):
    """DeepSeek's: q's heads end in 64 rotated channels, k's are the tail of one latent row."""
    base = draw(9, 5 * 192 + 576, dtype=dtype, device=device)
    return base, base[:, :960].view(9, 5, 192)[..., 128:], base[:, 960:][:, 512:].unsqueeze(1)


def heads_before_tokens(dtype, device):
    base = draw(7, 2 * 5 * 64, dtype=dtype, device=device)
    return base, *(part.view(2, -1, 5, 64).transpose(1, 2) for part in base.split([5, 2]))


def one_element_off(dtype, device):
    base = draw(1 + 9 * 7 * 64, dtype=dtype, device=device)
    return base, base[1 : 1 + 9 * 5 * 64].view(9, 5, 64), base[1 + 9 * 5 * 64 :].view(9, 2, 64)


def odd_strides(dtype, device):
    """Every other token, at element strides that no vector divides."""
    base = draw(18, 7, 67, dtype=dtype, device=device)
    return base, base[::2, :5, 1:65], base[::2, 5:, 3:]


def expanded(dtype, device):
    base = draw(14, 64, dtype=dtype, device=device)
    return base, base[:5].expand(9, 5, 64), base[5:, None].expand(9, 2, 64)


def channels_apart(dtype, device):
    base = draw(9, 64, 7, dtype=dtype, device=device)
    return base, base[..., :5].transpose(1, 2), base[..., 5:].transpose(1, 2)


def every_other_channel(dtype, device):
    base = draw(9, 7, 128, dtype=dtype, device=device)
    return base, base[:, :5, ::2], base[:, 5:, ::2]


IN_PLACE = [packed, packed_by_head, mla_tails, heads_before_tokens, one_element_off, odd_strides]


@pytest.mark.parametrize(
    "view", [*IN_PLACE, expanded, channels_apart, every_other_channel], ids=lambda view: view.__name__
)
def test_any_layout_is_read_where_it_lies(device, view):
    """vllm-project/vllm#16658, ROCm/aiter#3841: the value is that of a contiguous copy, neighbours stay."""
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, *HALVES):
        (base, q, k), (cos, sin) = view(dtype, device), tables(30, device=device)
        before, ids = base.clone(), torch.randint(0, 30, q.shape[-3:-2], device=device)
        y, z = apply_rope(q, k, cos, sin, ids)
        assert torch.equal(base, before)
        assert_rounded_once(y, right(q, cos, sin, ids))
        assert_rounded_once(z, right(k, cos, sin, ids))
        if view in IN_PLACE:
            apply_rope(q, k, cos, sin, ids, inplace=True)
            assert torch.equal(q, y) and torch.equal(k, z)
            q.fill_(7.0), k.fill_(7.0)
            assert torch.equal(base[base != 7.0], before[base != 7.0])
        else:
            with pytest.raises(ValueError, match="inplace=True takes q with|inplace=True takes q without overlap"):
                apply_rope(q, k, cos, sin, ids, inplace=True)
            assert torch.equal(base, before)


def test_single_head_cut_from_expanded_ones_is_written_in_place(device):
    """kvcache-ai/sglang#31. Its stride over the heads is 0, and no element is reached twice."""
    cos, sin = tables(9, device=device)
    k = draw(9, 1, 128, device=device).expand(9, 5, 128)[:, :1, 64:]
    value = right(k, cos, sin, torch.arange(9))
    apply_rope(k, None, cos, sin, inplace=True)
    assert_rounded_once(k, value)


def test_overlap_in_place_is_refused(device):
    """kvcache-ai/sglang#31, flagos-ai/FlagGems#5142: an element that is reached twice would be turned twice."""
    base, (cos, sin) = draw(10, 7, 64, device=device), tables(30, device=device)
    before, x = base.clone(), base[:9]
    windows = base.flatten().as_strided((9, 5, 64), (64, 64, 1))
    apply_rope(windows[:, :1], None, cos, sin, inplace=True)  # (9, 1, 64) of these strides is no overlap
    base.copy_(before)
    for message, q, k in (
        ("q and k that share no element", x, x),
        ("q and k that share no element", x, base[1:]),
        ("q and k that share no element", x[:, :5], x[:, 4:6]),
        ("q without overlap in itself", windows, None),
        ("q without overlap in itself", x[:, :1].expand(9, 5, 64), None),
        ("k without overlap in itself", x[:, :5], x[:1, 5:].expand(9, 2, 64)),
        ("k with channels side by side", x[:, :5], draw(9, 64, 2, device=device).transpose(1, 2)),
    ):
        with pytest.raises(ValueError, match=f"inplace=True takes {message}"):
            apply_rope(q, k, cos, sin, inplace=True)
    assert torch.equal(base, before)


def test_slices_that_meet_in_the_next_text_are_refused(device):
    """Tokens of two slices lie 10 apart, texts 15: what interleaves by token meets in the next text."""
    buffer, (cos, sin) = draw(40, device=device), tables(9, 4, device=device)
    before = buffer.clone()
    q, k = (part.view(2, 3, 5)[:, ::2, :4] for part in (buffer[:30], buffer[5:35]))
    with pytest.raises(ValueError, match="inplace=True takes q and k that share no element"):
        apply_rope(q, k, cos, sin, inplace=True)
    assert torch.equal(buffer, before)


def test_tensors_that_interleave_or_follow_are_written_in_place(device):
    """Heads by turns, ahead of the tokens or not, of one token too; k in front of q in one buffer."""
    cos, sin = tables(9, device=device)
    heads_first, one, buffer = draw(6, 2, 64), draw(1, 4, 64), draw(9 * 7, 64)
    for base, cut in (
        (heads_first, lambda x: (x.transpose(0, 1)[:, 0::2], x.transpose(0, 1)[:, 1::2])),
        (one, lambda x: (x[:, 0:4:2], x[:, 1:4:2])),
        (buffer, lambda x: (x[18:].view(9, 5, 64), x[:18].view(9, 2, 64))),
    ):
        base = base.to(device)
        q, k = cut(base)
        values = [right(x, cos, sin, torch.arange(len(x))) for x in (q, k)]
        apply_rope(q, k, cos, sin, inplace=True)
        for x, value in zip((q, k), values, strict=True):
            assert_rounded_once(x, value)


def test_layouts_taken_for_disjoint_share_no_element():
    """Against the sets of all addresses, over small layouts drawn at random."""
    draws, accepted = random.Random(0), 0
    for _ in range(5000):
        shapes = [tuple(draws.randint(1, 3) for _ in range(3)) for _ in range(2)]
        strides = [(*(draws.choice((1, 2, 3, 4, 6, 8, 9, 12, 18, 20)) for _ in range(2)), 1) for _ in range(2)]
        strides[1] = draws.choice(strides)
        apart = draws.randint(0, 30)
        reached = [
            {first + sum(map(operator.mul, index, stride)) for index in itertools.product(*map(range, shape))}
            for shape, stride, first in zip(shapes, strides, (0, apart), strict=True)
        ]
        forms = (types.SimpleNamespace(shape=x, strides=y) for x, y in zip(shapes, strides, strict=True))
        disjoint = rk._fault(*forms, apart) is None
        accepted += disjoint
        assert not (disjoint and reached[0] & reached[1])
    assert accepted > 200


@pytest.mark.parametrize("strides", [(1, 40, 1), (0, 1, 1), (4, 40, 1)])
def test_sliding_windows_are_read(device, strides):
    """Channels that are reached by the tokens as well: out of place they are read like any others."""
    cos, sin = tables(9, 8, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        q = draw(400, dtype=dtype, device=device).as_strided((4, 2, 8), strides)
        assert_rounded_once(apply_rope(q, q, cos, sin)[1], right(q, cos, sin, torch.arange(4)))


def test_partial_rotation_leaves_other_channels(device):
    cos, sin = tables(9, 32, device=device)
    for dtype, mode, start in itertools.product((torch.float32, torch.bfloat16), ("interleaved", "neox"), (7, 0)):
        q, k = draw(9, 3, 64, dtype=dtype, device=device), draw(9, 1, 64, dtype=dtype, device=device)
        y, z = apply_rope(q, k, cos, sin, mode=mode, start=start)
        others = [*range(start), *range(start + 32, 64)]
        for x, out in ((q, y), (k, z)):
            assert_rounded_once(out, right(x, cos, sin, torch.arange(9), mode, start))
            assert torch.equal(out[..., others], x[..., others])
        apply_rope(q, k, cos, sin, mode=mode, start=start, inplace=True)
        assert torch.equal(q, y) and torch.equal(k, z)


def test_nan_keeps_its_bits_in_channels_that_pass(device):
    """0x7F81 is a NaN that a way through float32 would make 0xFFFF of."""
    cos, sin = tables(1, 4, device=device)
    for start, inplace in itertools.product((0, 2), (False, True)):
        q = torch.ones(1, 1, 6, dtype=torch.bfloat16, device=device)
        q[..., 5 if start == 0 else 1].view(torch.int16).fill_(0x7F81)
        y = apply_rope(q, None, cos, sin, start=start, inplace=inplace)[0]
        assert y[0, 0, 5 if start == 0 else 1].view(torch.int16) == 0x7F81


def test_calls_that_differ_in_one_thing_alone_are_told_apart(device):
    """A cache whose key leaves out a part serves the kernel of the call before."""
    base = {"heads": (5, 2), "D": 64, "R": 32, "start": 0, "mode": "neox", "inverse": False, "dtype": torch.float16,
            "table": torch.float32, "ids": torch.int64, "inplace": False}  # fmt: skip
    other = {"heads": (5, 3), "D": 96, "R": 16, "start": 32, "mode": "interleaved", "inverse": True,
             "dtype": torch.float32, "table": torch.float16, "ids": None, "inplace": True}  # fmt: skip
    for change in ({}, *({name: value} for name, value in other.items()), {"heads": (4, 2)}, {"ids": torch.int32}):
        case = base | change
        cos, sin = tables(30, case["R"], case["table"], device)
        q, k = (draw(9, n, case["D"], dtype=case["dtype"], device=device) for n in case["heads"])
        ids = torch.arange(9) if case["ids"] is None else torch.randint(1, 30, (9,), dtype=case["ids"])
        options = case["mode"], case["start"], case["inverse"]
        values = [right(x, cos, sin, ids, *options) for x in (q, k)]
        given = None if case["ids"] is None else ids.to(device)
        words = {name: case[name] for name in ("mode", "start", "inverse", "inplace")}
        for y, value in zip(apply_rope(q, k, cos, sin, given, **words), values, strict=True):
            assert_rounded_once(y, value)


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
def test_twenty_rotations_there_and_twenty_back_stay_near_x(device, mode):
    (q, k), (cos, sin) = draw_qk(device=device), tables(99, device=device)
    ids = [torch.randint(1, 99, (9,), device=device) for _ in range(20)]
    values = q.double().cpu(), k.double().cpu()
    before = values
    for inverse, order in ((False, ids), (True, ids[::-1])):
        for row in order:
            apply_rope(q, k, cos, sin, row, mode=mode, inverse=inverse, inplace=True)
            values = [right(x, cos, sin, row, mode, inverse=inverse) for x in values]
        for x, value in zip((q, k), values, strict=True):
            torch.testing.assert_close(x.double().cpu(), value, rtol=0, atol=2e-5)
    torch.testing.assert_close(q.double().cpu(), before[0], rtol=0, atol=2e-5)


def test_halves_of_one_cache_are_read_where_they_lie(device):
    """flashinfer-ai/flashinfer#754 and #530: what a call makes has no more elements than q, k and their rows."""
    (q, k), P = draw_qk(device=device), 70_000
    cos, sin = tables(P, device=device)
    cache = torch.cat((cos, sin), 1)
    ids = torch.tensor([P - 1, 0, 1, 2, 3, 4, 69_000, 6, 7], device=device)
    for x, table in ((q, torch.float32), (q.bfloat16(), torch.float32), (q.bfloat16(), torch.bfloat16)):
        halves = cache.to(table).chunk(2, -1)
        with Calls() as calls:
            y, z = apply_rope(x, k.to(x.dtype), *halves, ids)
            apply_rope(x.clone(), None, *halves, ids, inplace=True)
            apply_rope(x, None, *halves)
        assert calls.made and max(calls.made) <= 9 * 5 * 64
        assert_rounded_once(y, right(x, *halves, ids))
        assert_rounded_once(z, right(k.to(x.dtype), *halves, ids))


def test_tables_of_any_row_stride_are_read(device):
    """One row of a larger tensor, rows apart, rows that are one, columns apart, an element off."""
    wide = torch.rand(40, 80, device=device)
    buffer = torch.rand(2 * 40 * 32 + 1, device=device)
    for tables_ in (
        (wide[7:8, :32], wide[9:10, 40:72]),
        (wide[::2, 1:33], wide[::2, 33:65]),
        (wide[:1, :32].expand(40, 32), wide[1:2, :32].expand(40, 32)),
        (wide.T[:40, :32], wide.T[40:, :32]),
        buffer[1:].view(2, 40, 32).unbind(),
        (wide[:, :64:2], wide[:, 1:65:2]),
        (wide[:, :32], buffer[1:1281].view(40, 32)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            q, k = draw_qk(dtype=dtype, device=device)
            ids = torch.randint(0, len(tables_[0]), (9,), device=device)
            for kind in {torch.float32, dtype}:
                cos, sin = (
                    (torch.empty_like(t, dtype=kind).copy_(t) for t in tables_) if kind != torch.float32 else tables_
                )
                y, z = apply_rope(q, k, cos, sin, ids)
                assert_rounded_once(y, right(q, cos, sin, ids))
                assert_rounded_once(z, right(k, cos, sin, ids))


def test_one_build_serves_every_length_batch_and_layout_on_the_cpu():
    """Counted where factories build, in a head configuration that no other test has."""
    cos, sin = tables(40, 6)
    cache, built = torch.cat((cos, sin), 1), len(rk._in_c._kernel_cache)
    for lead in ((1,), (9,), (30,), (2, 4), (3, 1)):
        base = draw(*lead, 20, 12)
        for q, k in ((base[..., :13, :6], base[..., 13:18, 6:]), (base[..., :13, ::2], base[..., 15:, ::2])):
            for ids in (None, torch.randint(0, 40, lead), torch.randint(0, 40, lead, dtype=torch.int32)):
                for table in ((cos, sin), cache.chunk(2, 1)):
                    y, z = apply_rope(q.to(torch.bfloat16), k.to(torch.bfloat16), *table, ids)
                    y, z = apply_rope(q, k, *table, ids)
        assert_rounded_once(z, right(k, cos, sin, ids))
        apply_rope(base[..., :13, :6], base[..., 13:18, 6:], cos, sin, inplace=True)
    assert len(rk._in_c._kernel_cache) == built + 1


def test_more_tokens_than_a_grid_axis_holds_are_served(device):
    """131 072 tokens on the second axis of a grid failed to launch."""
    (q, k), (cos, sin) = draw_qk(70_000, device=device), tables(30, device=device)
    ids = torch.arange(70_000, device=device) % 30
    for x, y in zip((q, k), apply_rope(q, k, cos, sin, ids), strict=True):
        assert_rounded_once(y[-2000:], right(x[-2000:], cos, sin, ids[-2000:]))


@needs_cuda
def test_more_sequences_than_a_grid_axis_holds_are_refused():
    q, (cos, sin) = draw(65_537, 3, 2, 8, device="cuda"), tables(30, 8, device="cuda")
    with pytest.raises(ValueError, match="q takes a batch of up to 65535 on CUDA, got 65537: put its tokens into one"):
        apply_rope(q, None, cos, sin)
    y, _ = apply_rope(q[2:], None, cos, sin)
    assert_rounded_once(y[-9:], right(q[-9:], cos, sin, torch.arange(3)))


def test_offsets_past_2_to_the_31_elements_are_reached(device):
    """Three tokens, 2³⁰ elements apart: 4 GiB, of which a CPU touches three pages."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    try:
        q = torch.empty(2**31 + 64, dtype=torch.float16, device=device).as_strided((3, 1, 64), (2**30, 64, 1))
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    q.copy_(draw(3, 1, 64))
    before, (cos, sin), ids = q.clone(), tables(30, device=device), torch.tensor([7, 29, 11], device=device)
    apply_rope(q, None, cos, sin, ids, inplace=True)
    assert_rounded_once(q, right(before, cos, sin, ids))


# ------------------------------------------------------------------------------ apply_rope: what it refuses


def ones(*shape, dtype=torch.float32, device=None):
    return torch.ones(shape, dtype=dtype, device=device or chapter.DEVICE)


META = {"device": "meta"}
REFUSALS = [
    ({"cos": ones(16, 16), "sin": ones(16, 16)}, ValueError,
     "start must be said when R=32 < D=64: 0 for leading, 32 for trailing"),
    ({"cos": ones(16, 16), "sin": ones(16, 16), "start": 33}, ValueError, "start takes 0 … 32 for .*, got start=33"),
    ({"start": -1}, ValueError, "start takes 0 … 0 for R=64 of D=64, got start=-1"),
    ({"mode": "gptj"}, ValueError, "mode takes 'neox' or 'interleaved', got 'gptj'"),
    *(({"q": ones(4, 5, 64, dtype=dtype)}, TypeError, f"q takes torch.float16 or .* or torch.float32, got {dtype}")
      for dtype in (torch.float64, torch.int16, torch.int32, torch.int64, torch.complex64, torch.bool)),
    ({"q": ones(4, 64)}, ValueError, r"q takes \(tokens, heads, D\) or \(batch, seq, heads, D\), got \(4, 64\)"),
    ({"q": ones(1, 1, 4, 5, 64)}, ValueError, r"q takes .*, got \(1, 1, 4, 5, 64\)"),
    ({"k": ones(4, 2, 64, dtype=torch.float16)}, TypeError, "k takes torch.float32, got torch.float16"),
    ({"k": ones(3, 2, 64)}, ValueError, r"k takes q's shape \(4, 5, 64\) but for the heads, got \(3, 2, 64\)"),
    ({"k": ones(4, 2, 32)}, ValueError, r"k takes q's shape .*, got \(4, 2, 32\)"),
    ({"k": ones(1, 4, 2, 64)}, ValueError, r"k takes q's shape .*, got \(1, 4, 2, 64\)"),
    ({"k": ones(4, 2, 64, **META)}, ValueError, "k takes q's device .*, got meta"),
    ({"cos": ones(16, 64), "sin": ones(16, 64)}, ValueError, "cos has 64 columns, so R=128; q is only D=64 wide"),
    ({"sin": ones(16, 31)}, ValueError, r"sin takes cos's shape \(16, 32\), got \(16, 31\)"),
    ({"sin": ones(15, 32)}, ValueError, r"sin takes cos's shape .*, got \(15, 32\)"),
    ({"cos": ones(32)}, ValueError, r"cos takes \(P, R/2\), .*, got \(32,\)"),
    ({"cos": ones(1, 16, 32), "sin": ones(1, 16, 32)}, ValueError, r"cos takes \(P, R/2\), .*, got \(1, 16, 32\)"),
    ({"cos": ones(16, 32, **META)}, ValueError, "cos takes q's device .*, got meta"),
    ({"sin": ones(16, 32, **META)}, ValueError, "sin takes q's device .*, got meta"),
    ({"cos": ones(16, 32, dtype=torch.float64)}, TypeError, "cos takes torch.float32 or .*, got torch.float64"),
    ({"sin": ones(16, 32, dtype=torch.bfloat16)}, TypeError, "sin takes torch.float32, got torch.bfloat16"),
    ({"q": ones(4, 5, 64, dtype=torch.float16), "k": None, "cos": ones(16, 32, dtype=torch.float16)}, TypeError,
     "sin takes torch.float16, got torch.float32"),
    ({"cos": ones(16, 32).requires_grad_()}, ValueError, r"cos gets no gradient: pass cos.detach\(\)"),
    ({"sin": ones(16, 32).requires_grad_()}, ValueError, r"sin gets no gradient: pass sin.detach\(\)"),
    *(({"positions": ones(4, dtype=dtype)}, TypeError, f"positions takes torch.int32 or torch.int64, got {dtype}")
      for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16)),
    *(({"positions": ones(*shape, dtype=torch.int64)}, ValueError, r"positions takes the shape \(4,\) or \(4,\), got")
      for shape in ((3,), (4, 1), (1, 4), (5,), ())),
    ({"positions": ones(4, dtype=torch.int64, **META)}, ValueError, "positions takes q's device .*, got meta"),
    ({"positions": None, "cos": ones(3, 32), "sin": ones(3, 32)}, IndexError,
     "positions 0 … 3 do not fit a table of 3 rows"),
    *(({name: value}, TypeError, f"{name} takes a tensor, got ")
      for name, values in {"q": (None, 3, [[1.0]]), "k": (3, [[1.0]]), "cos": (None, 1.0), "sin": (None, (1,)),
                           "positions": (3, [0, 1, 2, 3], 2.5, True)}.items() for value in values),
    *(({"start": start}, TypeError, "start takes an integer, got ")
      for start in ("leading", 0.0, 1.5, False, (0,), [0])),
    *(({"inverse": flag}, TypeError, "inverse and inplace take True or False, got inverse=")
      for flag in ("false", [], 0, 1, None)),
    *(({name: torch._neg_view(ones(*shape))}, TypeError, f"{name} takes a dense tensor, not lazily negated")
      for name, shape in {"q": (4, 5, 64), "k": (4, 2, 64), "cos": (16, 32), "sin": (16, 32)}.items()),
    *(({name: ones(*shape).to_sparse()}, TypeError, f"{name} takes a dense tensor")
      for name, shape in {"q": (4, 5, 64), "k": (4, 2, 64), "cos": (16, 32), "sin": (16, 32)}.items()),
    ({"q": torch.nested.nested_tensor([ones(4, 64), ones(3, 64)])}, TypeError, "q takes a dense tensor"),
    ({"k": ones(2, 2, 2, 64), "q": ones(3, 2, 5, 64), "positions": None}, ValueError, r"k takes q's shape"),
    ({"k": ones(2, 3, 2, 64), "q": ones(2, 2, 5, 64), "positions": None}, ValueError, r"k takes q's shape"),
    ({"q": ones(4, 5, 64), "cos": ones(16, 32, dtype=torch.float16)}, TypeError, "cos takes torch.float32 or .*16"),
    ({"q": ones(0, 5, 64), "k": None, "positions": None, "mode": "gptj"}, ValueError, "mode takes 'neox' or"),
    ({"q": ones(0, 5, 64), "k": None, "positions": None, "cos": ones(16, 64), "sin": ones(16, 64)}, ValueError,
     "cos has 64 columns"),
    ({"cos": ones(16, 0), "sin": ones(16, 0), "start": 65}, ValueError, "start takes 0 … 64 for R=0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_bad_input_is_refused_by_name(changes, error, message):
    good = {
        "q": ones(4, 5, 64),
        "k": ones(4, 2, 64),
        "cos": ones(16, 32),
        "sin": 0.5 * ones(16, 32),
        "positions": torch.arange(4, device=chapter.DEVICE),
    }
    for inplace in (False, True):
        with pytest.raises(error, match=message):
            apply_rope(**good | changes, inplace=inplace)
    assert (good["q"] == 1).all() and (good["k"] == 1).all()


@pytest.mark.parametrize("flag", ["false", [], 0, 1, None])
def test_inplace_that_is_no_flag_is_refused(flag):
    (q, k), (cos, sin) = draw_qk(device=chapter.DEVICE), tables(9, device=chapter.DEVICE)
    with pytest.raises(TypeError, match="inverse and inplace take True or False, got .*inplace="):
        apply_rope(q, k, cos, sin, inplace=flag)


def test_start_of_another_type_is_refused_after_its_equal_was_served(device):
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, 32, device=device)
    apply_rope(q, k, cos, sin, start=2)
    for x, start in ((q, 2.0), (q, True), (q.clone().requires_grad_(), 1.5), (q, torch.tensor(2))):
        with pytest.raises(TypeError, match="start takes an integer, got"):
            apply_rope(x, k, cos, sin, start=start)


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dtensor_is_refused_by_name(one_process_group):
    """pytorch/torchtitan#3645: heads are sharded; the ranks' own parts are what can be rotated."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    (q, k), (cos, sin) = draw_qk(), tables(9)
    mesh = init_device_mesh("cpu", (1,))
    sharded = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k)]
    for arguments, name in (((sharded[0], k), "q"), ((q, sharded[1]), "k"), (sharded, "q")):
        for inplace in (False, True):
            with pytest.raises(TypeError, match=rf"{name} takes .* got DTensor: pass {name}.to_local\(\)"):
                apply_rope(*arguments, cos, sin, inplace=inplace)
    y = apply_rope(*(x.to_local() for x in sharded), cos, sin)[0]
    assert_rounded_once(y, right(q, cos, sin, torch.arange(9)))


def test_forward_mode_and_functorch_are_refused_by_name(device):
    """SHI-Labs/NATTEN#224, facebookresearch/xformers#552: a tangent is never lost in silence."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    before, refusal = q.clone(), pytest.raises(NotImplementedError, match="apply_rope knows no forward mode or torch.f")
    with forward_ad.dual_level():
        for dual in ("q", "k", "cos", "sin"):
            given = {"q": q, "k": k, "cos": cos, "sin": sin}
            given[dual] = forward_ad.make_dual(given[dual], torch.ones_like(given[dual]))
            for inplace in (False, True):
                with refusal:
                    apply_rope(**given, inplace=inplace)
        apply_rope(q, k, cos, sin)  # without tangents it runs
    for inplace in (False, True):

        def turn(x, inplace=inplace):
            return apply_rope(x, None, cos, sin, inplace=inplace)[0]

        for call in (
            lambda: torch.func.jvp(turn, (q,), (q,)),
            lambda: torch.func.grad(lambda x: turn(x).sum())(q),
            lambda: torch.func.vmap(turn)(q[None]),
            lambda: torch.func.vmap(lambda c: apply_rope(q, None, c, sin)[0])(cos[None]),
        ):
            with refusal:
                call()
    assert torch.equal(q, before)
    tangent = torch.func.jvp(lambda x: rk.torch_rope_neox(x, cos[:9, None], sin[:9, None]), (q,), (q,))[1]
    assert_rounded_once(tangent, right(q, cos, sin, torch.arange(9)))  # the reference that the message names


def test_meta_and_fake_tensors_give_shapes(device):
    shapes = ((9, 5, 64), (9, 2, 64), (20, 32), (20, 32))
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            place = "meta" if isinstance(mode, torch.device) else device
            q, k, cos, sin = (torch.empty(shape, device=place) for shape in shapes)
            ids = torch.zeros(9, dtype=torch.int64, device=place)
            for positions in (None, ids):
                y, z = apply_rope(q, k, cos, sin, positions)
                alone, none = apply_rope(q.transpose(0, 1)[:, :9], None, cos, sin)
                same = apply_rope(q, k, cos, sin, positions, inplace=True)
            assert same[0] is q and same[1] is k and none is None
            assert (y.shape, z.shape, alone.shape) == (q.shape, k.shape, (5, 9, 64))
            assert (y.device.type, y.dtype) == (place, torch.float32) and type(y) is type(q)
            with pytest.raises(ValueError, match="mode takes"):
                apply_rope(q, k, cos, sin, mode="gptj")


def test_other_devices_are_refused_by_name():
    """A device that torch knows and nobody has: its tensors are of the right kind, and nowhere."""
    fake, meta = FakeTensorMode(), [torch.empty(shape, device="meta") for shape in ((9, 5, 64), (9, 32), (9, 32))]
    q, cos, sin = (torch._subclasses.FakeTensor(fake, x, torch.device("xla:0")) for x in meta)
    with pytest.raises(ValueError, match="q takes a tensor on CPU or CUDA, got one on xla"):
        apply_rope(q, None, cos, sin)


def test_in_place_on_what_wants_a_gradient_is_refused(device):
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    before = q.clone(), k.clone()
    for x in (q, k):
        x.requires_grad_()
        with pytest.raises(ValueError, match="inplace=True would write into a tensor that wants a gradient: leave it"):
            apply_rope(q, k, cos, sin, inplace=True)
        x.requires_grad_(False)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_id_outside_the_table_is_refused_or_gives_nan(device, index_dtype):
    """microsoft/onnxruntime#27597, vllm-project/vllm#56446, nntrainer/nntrainer#4144.

    The CPU refuses such ids before it writes; on CUDA, where looking would synchronise, their tokens come out NaN.
    """
    (q, k), (cos, sin) = draw_qk(4, device=device), tables(16, device=device)
    before, valid = q.clone(), torch.tensor([0, 15, 7, 3], dtype=index_dtype, device=device)
    for far in (16, -1, 2**31 - 1) + ((2**31, 2**32, -(2**32)) if index_dtype == torch.int64 else ()):
        ids = torch.tensor([0, 15, far, 3], dtype=index_dtype, device=device)
        for inplace in (False, True):
            if device == "cpu":
                span = f"{min(far, 0)} … {max(far, 15)}"
                with pytest.raises(IndexError, match=f"positions takes ids 0 … 15, got {span}"):
                    apply_rope(q, k, cos, sin, ids, inplace=inplace)
                assert torch.equal(q, before)
            else:
                y = apply_rope(q.clone(), k.clone(), cos, sin, ids, inplace=inplace)[0]
                assert y[2].isnan().all()
                assert_rounded_once(y[[0, 1, 3]], right(q, cos, sin, valid)[[0, 1, 3]])
        assert_rounded_once(apply_rope(q, k, cos, sin, valid)[0], right(q, cos, sin, valid))


EMPTY = {
    "no tokens": ((0, 5, 64), (0, 2, 64), (16, 32)),
    "no sequences": ((0, 4, 5, 64), (0, 4, 2, 64), (16, 32)),
    "sequences without tokens": ((2, 0, 5, 64), (2, 0, 2, 64), (16, 32)),
    "neither tokens nor rows": ((0, 5, 64), None, (0, 32)),
    "no heads of q": ((4, 0, 64), (4, 5, 64), (16, 32)),
    "no heads of k": ((4, 5, 64), (4, 0, 64), (16, 32)),
    "no heads": ((4, 0, 64), (4, 0, 64), (16, 32)),
    "no rotated channels": ((4, 5, 64), (4, 2, 64), (16, 0)),
}


@pytest.mark.parametrize(("q_shape", "k_shape", "table_shape"), EMPTY.values(), ids=EMPTY)
def test_empty_input_keeps_its_shape(device, q_shape, k_shape, table_shape):
    """tile-ai/tilelang#1697, vllm-project/vllm-gaudi#1795: an empty grid is an error that stays; then a normal call."""
    cos, sin = (table[: table_shape[0], : table_shape[1]] for table in tables(16, device=device))
    xs = [draw(*shape, dtype=torch.bfloat16, device=device) for shape in (q_shape, k_shape) if shape]
    values = [right(x, cos, sin, torch.arange(x.shape[-3])) for x in xs]
    absent = [None] * (2 - len(xs))
    for wants_grad in (False, True):
        inputs = [x.clone().requires_grad_(wants_grad) for x in xs]
        outputs = apply_rope(*inputs, *absent, cos, sin)[: len(xs)]
        for x, y, value in zip(inputs, outputs, values, strict=True):
            assert (y.shape, y.dtype, y.device, y.requires_grad) == (x.shape, x.dtype, x.device, wants_grad)
            assert y is not x
            assert_rounded_once(y, value)
        if wants_grad:
            sum(y.sum() for y in outputs).backward()
            for x in inputs:
                assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
                one = torch.ones_like(x.detach())
                assert_rounded_once(x.grad, right(one, cos, sin, torch.arange(x.shape[-3]), inverse=True))
    apply_rope(*xs, *absent, cos, sin, inplace=True)
    for x, value in zip(xs, values, strict=True):
        assert_rounded_once(x, value)
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)
    assert_rounded_once(apply_rope(q, k, cos, sin, ids)[1], right(k, cos, sin, ids))


@pytest.mark.parametrize("empty", ["q", "k"])
def test_options_are_kept_beside_an_empty_tensor(device, empty):
    """The other one is rotated as it was asked for: turned back, interleaved, from a start, by its ids."""
    cos, sin = tables(30, 32, device=device)
    ids = torch.tensor([4, 29, 7, 11], device=device)
    cases = ("interleaved", 16, True), ("neox", 0, True), ("interleaved", 0, False)
    for (mode, start, inverse), inplace in itertools.product(cases, (False, True)):
        full, none = draw(4, 5, 64, device=device), draw(4, 0, 64, device=device)
        value = right(full, cos, sin, ids, mode, start, inverse)
        given = (none, full) if empty == "q" else (full, none)
        results = apply_rope(*given, cos, sin, ids, mode=mode, start=start, inverse=inverse, inplace=inplace)
        assert_rounded_once(results[empty == "q"], value)
        assert results[empty == "k"].shape == (4, 0, 64)


# ------------------------------------------------------------------------------------ apply_rope: gradients


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@pytest.mark.parametrize("scale", [1.0, 1.190238])
def test_gradient_has_sign_and_scale(device, mode, scale):
    """huggingface/candle#3612: right at position 0 alone; the scale of the tables belongs into the gradient too."""
    (q, k), (cos, sin) = draw_qk(3, device=device), tables(1001, device=device, scale=scale)
    ids = torch.tensor([0, 5, 1000], device=device)
    inputs = q.requires_grad_(), k.requires_grad_()
    incoming = [draw(*x.shape, device=device) for x in inputs]
    untouched = [g.clone() for g in incoming]
    gradients = torch.autograd.grad(apply_rope(*inputs, cos, sin, ids, mode=mode), inputs, incoming)
    for x, g, kept, gradient in zip(inputs, incoming, untouched, gradients, strict=True):
        wide = x.detach().double().cpu().requires_grad_()
        (value,) = torch.autograd.grad(right(wide, cos, sin, ids, mode), wide, g.double().cpu())
        assert_rounded_once(gradient, value)
        assert torch.equal(g, kept)
    inverse = apply_rope(*apply_rope(*inputs, cos, sin, ids, mode=mode), cos, sin, ids, mode=mode, inverse=True)[0]
    # ggml-org/llama.cpp#24162: turning back by −sin leaves the square of the scale
    torch.testing.assert_close(inverse.double().cpu(), scale**2 * q.double().cpu(), rtol=0, atol=4e-6)


def test_gradient_of_one_input_or_output_alone_is_served(device):
    """Gradients that autograd leaves out, expands or strides; channels that pass through."""
    cos, sin = tables(9, 32, device=device)
    ids = torch.arange(9)
    for wanted in ("q", "k"):
        q, k = (
            draw(9, heads, 64, device=device).requires_grad_(name == wanted) for name, heads in (("q", 3), ("k", 1))
        )
        y, z = apply_rope(q, k, cos, sin, mode="interleaved", start=7)
        assert y.requires_grad and z.requires_grad
        (y if wanted == "q" else z).sum().backward()
        x, other = (q, k) if wanted == "q" else (k, q)
        assert other.grad is None
        assert_rounded_once(x.grad, right(torch.ones_like(x), cos, sin, ids, "interleaved", 7, inverse=True))
    q, k = draw(9, 3, 64, device=device).requires_grad_(), draw(9, 1, 64, device=device)
    g = draw(3, 64, 9, device=device).permute(2, 0, 1)
    apply_rope(q, k, cos, sin, mode="interleaved", start=7)[0].backward(g)
    assert_rounded_once(q.grad, right(g, cos, sin, ids, "interleaved", 7, inverse=True))
    with torch.no_grad():
        assert not apply_rope(q, k, cos, sin, mode="interleaved", start=7)[0].requires_grad


def test_backward_computes_what_is_asked_for_alone(device):
    """What the backward hands to the kernel are the gradients that something wants."""
    (q, k), (cos, sin) = draw_qk(device=device), tables(9, device=device)
    for wants in ((True, True), (True, False), (False, True)):
        inputs = [x.clone().requires_grad_(want) for x, want in zip((q, k), wants, strict=True)]
        y, z = apply_rope(*inputs, cos, sin)
        with Calls() as calls:
            (y.sum() + z.sum()).backward()
        heads = [None if x is None else x.shape[1] for arguments in calls.ours for x in arguments[:2]]
        assert [n for n in heads if n] == [n for n, want in zip((5, 2), wants, strict=True) if want]
        for x, want in zip(inputs, wants, strict=True):
            assert (x.grad is not None) == want


def test_rotating_twice_in_place_under_autograd_is_an_error_or_right(device):
    """On tensors between leaf and loss, on views of one leaf, and where only k wants a gradient."""
    cos, sin = tables(9, device=device)
    for wants in ("qk", "k"):
        leaves = [x.requires_grad_(name in wants) for name, x in zip("qk", draw_qk(device=device), strict=True)]
        inputs = [x * 1.0 for x in leaves]
        kept = [x.detach().clone() for x in inputs]
        for _ in range(2):
            with pytest.raises(ValueError, match="inplace=True would write into a tensor that wants a gradient"):
                apply_rope(*inputs, cos, sin, inplace=True)
        for x, before in zip(inputs, kept, strict=True):
            assert torch.equal(x, before)
        twice = apply_rope(*apply_rope(*inputs, cos, sin), cos, sin)
        sum(y.sum() for y in twice).backward()
        one = torch.ones_like(kept[1])
        value = right(right(one, cos, sin, torch.arange(9), inverse=True), cos, sin, torch.arange(9), inverse=True)
        torch.testing.assert_close(leaves[1].grad.double().cpu(), value, rtol=0, atol=4e-6)


def test_second_gradient_turns_forward_again(device):
    """huggingface/candle#3612. The op is linear: differentiating the gradient turns forward again."""
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)
    inputs = q.requires_grad_(), k.requires_grad_()
    first = [draw(*x.shape, device=device).requires_grad_() for x in inputs]
    second = [draw(*x.shape, device=device) for x in inputs]
    gradients = torch.autograd.grad(apply_rope(*inputs, cos, sin, ids), inputs, first, create_graph=True)
    for v, twice in zip(second, torch.autograd.grad(gradients, first, second), strict=True):
        assert_rounded_once(twice, right(v, cos, sin, ids))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(device, use_reentrant):
    """unslothai/unsloth#5001."""
    (q, k), (cos, sin), ids = draw_qk(device=device), tables(9, device=device), torch.arange(9, device=device)

    def layer(q, k):
        y, z = apply_rope(torch.sin(q), torch.sin(k), cos, sin, ids)
        return (y**2 + z.sum(1, keepdim=True) ** 3).sum()

    plain, saved = ([x.clone().requires_grad_() for x in (q, k)] for _ in range(2))
    layer(*plain).backward()
    checkpoint(layer, *saved, use_reentrant=use_reentrant).backward()
    for a, b, x in zip(plain, saved, (q, k), strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(b, x)


def test_writing_over_what_autograd_saved_is_an_error(device):
    """unslothai/unsloth#5001: autograd must notice that q or k, which it saved, was written over."""
    cos, sin = tables(9, device=device)
    for written in "qk":
        leaf = draw(9, 2, 64, device=device).requires_grad_()
        saved = leaf * 1.0
        loss = (saved**2).sum()
        with torch.no_grad():
            apply_rope(*((saved, None) if written == "q" else (draw(9, 5, 64, device=device), saved)), cos, sin,
                       inplace=True)  # fmt: skip
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
