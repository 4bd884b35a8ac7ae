"""The torch references against float64, against transformers, and against published cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import angles, rotate
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

import rope_kernels as rk

REFERENCES = {"neox": rk.torch_rope_neox, "interleaved": rk.torch_rope_interleaved}
both = pytest.mark.parametrize("convention", REFERENCES)


def test_quarter_turn_and_identity_by_hand():
    x, one, zero = torch.arange(8.0).reshape(1, 8), torch.ones(1, 4), torch.zeros(1, 4)
    for reference in REFERENCES.values():
        assert torch.equal(reference(x, one, zero), x)
    assert rk.torch_rope_neox(x, zero, one).tolist() == [[-4, -5, -6, -7, 0, 1, 2, 3]]
    assert rk.torch_rope_interleaved(x, zero, one).tolist() == [[-1, 0, -3, 2, -5, 4, -7, 6]]


@both
@given(
    rows=st.lists(st.integers(0, 4), max_size=3),
    half=st.integers(0, 65),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_against_float64(convention, rows, half, dtype):
    x = torch.randn(*rows, 2 * half, dtype=torch.float64).to(dtype)
    angle = 1000 * torch.rand(*rows, half, dtype=torch.float64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    y = REFERENCES[convention](x, cos, sin)
    right = rotate(x, cos, sin, convention)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), right, rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_rounding_with_float32_tables(convention, dtype):
    """Dao-AILab/flash-attention#823: roundings are counted, since rtol = 1e-2 passes sloppier arithmetic."""
    x = torch.randn(4096, 128).to(dtype)
    angle = angles(range(4096), 128)
    cos, sin = angle.cos().float(), angle.sin().float()
    y = REFERENCES[convention](x, cos, sin)
    once_rounded = rotate(x, angle.cos(), angle.sin(), convention).to(dtype)
    assert y.dtype == dtype
    assert (y != once_rounded).sum() <= x.numel() * 2e-3
    sloppy = REFERENCES[convention](x, cos.bfloat16(), sin.bfloat16())
    assert (sloppy != once_rounded).float().mean() > 0.1


@both
def test_broadcast_tables_match_expanded_ones(convention):
    x = torch.randn(2, 3, 5, 8)
    angle = torch.rand(5, 4)
    expanded = angle.expand(2, 3, 5, 4)
    reference = REFERENCES[convention]
    assert torch.equal(reference(x, angle.cos(), angle.sin()), reference(x, expanded.cos(), expanded.sin()))


def test_neox_is_transformers_llama():
    q, k = torch.randn(2, 4, 6, 64), torch.randn(2, 2, 6, 64)
    angle = angles([1, 2, 5, 9, 300, 4097], 64).float()
    full = torch.cat((angle, angle), dim=-1)[None]
    right_q, right_k = modeling_llama.apply_rotary_pos_emb(q, k, full.cos(), full.sin())
    torch.testing.assert_close(rk.torch_rope_neox(q, angle.cos(), angle.sin()), right_q, rtol=0, atol=1e-6)
    torch.testing.assert_close(rk.torch_rope_neox(k, angle.cos(), angle.sin()), right_k, rtol=0, atol=1e-6)


def test_interleaved_is_transformers_gptj():
    x = torch.randn(2, 6, 4, 64)
    angle = angles([1, 2, 5, 9, 300, 4097], 64).float()
    cos, sin = angle.cos(), angle.sin()
    right = modeling_gptj.apply_rotary_pos_emb(x, sin[None], cos[None])
    torch.testing.assert_close(rk.torch_rope_interleaved(x, cos[:, None], sin[:, None]), right, rtol=0, atol=1e-6)


def test_permutation_carries_one_convention_into_the_other():
    """huggingface/transformers#25199, at widths where the permutation is not its own inverse."""
    for R in (8, 16, 128):
        permutation = torch.cat((torch.arange(0, R, 2), torch.arange(1, R, 2)))
        x, angle = torch.randn(7, R, dtype=torch.float64), angles(range(1, 8), R)
        cos, sin = angle.cos(), angle.sin()
        right = rk.torch_rope_interleaved(x, cos, sin)[:, permutation]
        assert torch.equal(rk.torch_rope_neox(x[:, permutation], cos, sin), right)
        assert not torch.equal(rk.torch_rope_neox(x[:, permutation][:, permutation], cos, sin), right)
        assert not torch.equal(rk.torch_rope_neox(x, cos, sin), right)


@pytest.mark.parametrize(
    ("mode", "start", "right"),
    [
        ("neox", 0, [-1.217058, 1.715331, 2.918693, 4.130090, 5, 6, 7, 8]),
        ("neox", None, [1, 2, 3, 4, -0.829395, 5.425763, 8.562249, 8.400065]),
        ("interleaved", 0, [-0.560071, 2.164791, 2.712882, 4.200033, 5, 6, 7, 8]),
        ("interleaved", None, [1, 2, 3, 4, -0.172408, 7.808347, 6.423314, 8.470008]),
    ],
)
def test_partial_rotation_moves_the_right_channels(mode, start, right):
    """ml-explore/mlx-lm#1698: position 7, R = 4 of 8 channels."""
    x = torch.arange(1.0, 9.0, dtype=torch.float64)[None]
    angle = angles([7], 4)
    y = rk.torch_partial_rope(x, angle.cos(), angle.sin(), mode, start)
    torch.testing.assert_close(y, torch.tensor([right], dtype=torch.float64), rtol=0, atol=5e-7)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_partial_rotation_passes_other_channels_bit_for_bit(convention, dtype):
    x = torch.randn(3, 16).to(dtype)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    x.view(integer)[1, 0] |= 0x7FC1 if dtype != torch.float32 else 0x7FC12345  # a NaN with a payload
    angle = torch.rand(3, 4)
    y = rk.torch_partial_rope(x, angle.cos(), angle.sin(), convention)
    assert torch.equal(y.view(integer)[:, :8], x.view(integer)[:, :8])
    assert torch.equal(y[:, 8:], REFERENCES[convention](x[:, 8:], angle.cos(), angle.sin()))


@both
def test_partial_rotation_of_all_and_of_no_channels(convention):
    x, angle = torch.randn(3, 8), torch.rand(3, 4)
    cos, sin = angle.cos(), angle.sin()
    assert torch.equal(rk.torch_partial_rope(x, cos, sin, convention), REFERENCES[convention](x, cos, sin))
    assert torch.equal(rk.torch_partial_rope(x, cos[:, :0], sin[:, :0], convention), x)


@both
def test_references_leave_x_alone_and_pass_gradients(convention):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    before, angle = x.detach().clone(), angles([1, 5, 1000], 8)
    cos, sin = 1.19 * angle.cos(), 1.19 * angle.sin()
    upstream = torch.randn(3, 8, dtype=torch.float64)
    REFERENCES[convention](x, cos, sin).backward(upstream)
    assert torch.equal(x.detach(), before)
    torch.testing.assert_close(x.grad, rotate(upstream, cos, -sin, convention), rtol=0, atol=1e-15)


@both
def test_what_the_references_refuse(convention):
    reference = REFERENCES[convention]
    x, table = torch.randn(3, 8), torch.rand(3, 4)
    with pytest.raises(ValueError, match="rope dim must be even, got R=7"):
        reference(x[:, :7], table, table)
    for name, arguments in (("cos", (x, torch.rand(3, 8), table)), ("sin", (x, table, torch.rand(3, 1)))):
        with pytest.raises(ValueError, match=f"{name} takes one column a pair, 4 for R=8"):
            reference(*arguments)
    with pytest.raises(ValueError, match="cos does not broadcast over x's rows"):
        reference(x[:1], table, table)
    with pytest.raises(TypeError, match="x takes a floating dtype, got torch.int64"):
        reference(x.long(), table, table)
    with pytest.raises(TypeError, match="sin takes a floating dtype"):
        reference(x, table, table.long())


def test_what_partial_rotation_refuses():
    x, table = torch.randn(3, 8), torch.rand(3, 2)
    with pytest.raises(ValueError, match="mode takes 'neox' or 'interleaved', got 'gptj'"):
        rk.torch_partial_rope(x, table, table, mode="gptj")
    with pytest.raises(ValueError, match="so R=10; x is only 8 wide"):
        rk.torch_partial_rope(x, torch.rand(3, 5), torch.rand(3, 5))
    for start in (-1, 5):
        with pytest.raises(ValueError, match=f"start takes 0 … 4 for R=4 of 8 channels, got start={start}"):
            rk.torch_partial_rope(x, table, table, start=start)
