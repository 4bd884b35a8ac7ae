"""The torch references against float64, against transformers, and against published cases."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import INTEGER_VIEW, angles, bits, plain_rope, randn, rotate
from transformers import DeepseekV3Config, GPTJConfig, PhiConfig, StableLmConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm import modeling_glm
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.stablelm import modeling_stablelm

import rope_kernels as rk
from rope_kernels import rope_frequencies, rope_table, torch_partial_rope, torch_rope_interleaved, torch_rope_neox

ONE_TO_EIGHT = torch.arange(1, 9, dtype=torch.float64)
NAN, INF = float("nan"), float("inf")
GEMMA4 = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
REFERENCES = {"neox": rk.torch_rope_neox, "interleaved": rk.torch_rope_interleaved}


def close(got, right, atol):
    torch.testing.assert_close(got, torch.as_tensor(right, dtype=got.dtype), rtol=0, atol=atol)


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
def test_tables_in_float64_are_rounded_to_the_arithmetic_of_x(convention):
    x, angle = torch.randn(64, 32), torch.rand(64, 16, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    assert torch.equal(REFERENCES[convention](x, cos, sin), REFERENCES[convention](x, cos.float(), sin.float()))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_reference(convention, dtype):
    x, angle = torch.randn(3, 16).half(), torch.rand(3, 4)
    cos, sin = angle.cos(), angle.sin()
    right = rk.torch_partial_rope(x, cos, sin, convention, 4), REFERENCES[convention](x[:, :8], cos, sin)
    with torch.autocast("cpu", dtype):
        got = rk.torch_partial_rope(x, cos, sin, convention, 4), REFERENCES[convention](x[:, :8], cos, sin)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, right, strict=True))


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
    with pytest.raises(ValueError, match=r"cos does not broadcast over x's rows: \(1, 3, 4\) for x \(3, 8\)"):
        reference(x, table[None], table)
    for name, arguments in (("cos", (table.long(), table)), ("sin", (table, table.long()))):
        with pytest.raises(TypeError, match=f"{name} takes a floating dtype, got torch.int64"):
            reference(x, *arguments)


def test_what_partial_rotation_refuses():
    x, table = torch.randn(3, 8), torch.rand(3, 2)
    with pytest.raises(ValueError, match="mode takes 'neox' or 'interleaved', got 'gptj'"):
        rk.torch_partial_rope(x, table, table, mode="gptj")
    with pytest.raises(ValueError, match="so R=10; x is only 8 wide"):
        rk.torch_partial_rope(x, torch.rand(3, 5), torch.rand(3, 5))
    for start in (-1, 5):
        with pytest.raises(ValueError, match=f"start takes 0 … 4 for R=4 of 8 channels, got start={start}"):
            rk.torch_partial_rope(x, table, table, start=start)


def test_wrong_convention_after_weight_conversion():
    """huggingface/transformers#25199: The permutation that turns Meta's weights into Hugging Face's swaps one
    convention for the other."""
    cos, sin = rope_table(rope_frequencies(8)[0], torch.tensor(1), dtype=torch.float64)
    neox, interleaved = torch_rope_neox(ONE_TO_EIGHT, cos, sin), torch_rope_interleaved(ONE_TO_EIGHT, cos, sin)
    expected = [-3.667053, 1.391008, 2.929851, 3.991998, 3.542983, 6.169692, 7.029650, 8.003996]
    close(neox, expected, atol=1e-6)
    expected = [-1.142640, 1.922076, 2.585679, 4.279517, 4.939751, 6.049699, 6.991997, 8.006996]
    close(interleaved, expected, atol=1e-6)
    perm = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    assert torch.equal(torch_rope_neox(ONE_TO_EIGHT[perm], cos, sin), interleaved[perm])
    assert not torch.equal(perm[perm], torch.arange(8))
    # projections of 4 query and 2 key heads: the permutation is one for each head; whole numbers, so sums are exact
    h = randn(5, 32).mul(8).round()
    cos, sin = (table[:, None] for table in rope_table(rope_frequencies(8)[0], 5, dtype=torch.float64))
    for heads in (4, 2):
        meta = randn(heads, 8, 32, seed=heads).mul(8).round()
        q_meta, q_hf = (torch.einsum("hrd,td->thr", w, h) for w in (meta, meta[:, perm]))
        assert torch.equal(torch_rope_neox(q_hf, cos, sin), torch_rope_interleaved(q_meta, cos, sin)[..., perm])
        twice = torch_rope_neox(q_hf[..., perm], cos, sin)
        never = torch_rope_neox(q_meta, cos, sin)
        for wrong in (twice, never):
            assert (wrong[1:] - torch_rope_interleaved(q_meta, cos, sin)[1:][..., perm]).abs().max() > 0.5
    full = torch.cat((cos, cos), -1).transpose(0, 1), torch.cat((sin, sin), -1).transpose(0, 1)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(q_meta[None], q_meta[None], *full, unsqueeze_dim=2)
    assert torch.equal(torch_rope_neox(q_meta, cos, sin), theirs[0])
    paired = tuple(table.repeat_interleave(2, -1).transpose(0, 1) for table in (cos, sin))
    x = q_meta.float()[None]
    theirs, _ = modeling_cohere.apply_rotary_pos_emb(x, x, paired[0].float(), paired[1].float(), unsqueeze_dim=2)
    assert torch.equal(torch_rope_interleaved(x[0], cos.float(), sin.float()), theirs[0])


def test_gptj_taken_for_neox():
    """vllm-project/vllm#747: GPT-J rotates adjacent pairs of the first 64 of 256 channels; at position 5 a mistake is
    of order 1."""
    table = rope_table(rope_frequencies(8)[0], torch.tensor(5), dtype=torch.float64)
    close(torch_rope_neox(ONE_TO_EIGHT, *table)[:2], [5.078284, -1.121388], atol=1e-6)
    close(torch_rope_interleaved(ONE_TO_EIGHT, *table)[:2], [2.201511, -0.391600], atol=1e-6)
    x = randn(256)
    cos, sin = rope_table(rope_frequencies(64)[0], torch.tensor(5), dtype=torch.float64)
    y = torch_partial_rope(x, cos, sin, "interleaved", 0)
    close(y, plain_rope(x, 5, "interleaved", R=64), atol=1e-13)
    assert torch.equal(y[64:], x[64:])


def test_one_convention_for_attention_and_indexer():
    """vllm-project/vllm#747: DeepSeek-V3.2's attention takes adjacent pairs and its indexer half-split ones, from the
    same table."""
    q = randn(6, 64)
    cos, sin = rope_table(rope_frequencies(64)[0], torch.arange(5, 11), dtype=torch.float64)
    for mode, reference in REFERENCES.items():
        expected = torch.stack([plain_rope(row, 5 + t, mode) for t, row in enumerate(q)])
        close(reference(q, cos, sin), expected, atol=1e-12)
    assert (torch_rope_neox(q, cos, sin) - torch_rope_interleaved(q, cos, sin)).abs().max() > 1


def test_interleaved_input_comes_out_half_split():
    """huggingface/transformers#39687: transformers' DeepSeek-V3 helper returns the even channels, then the odd: scores
    agree, layouts do not."""
    ids = torch.tensor([0, 1, 7, 300, 4097])
    q, k = randn(5, 64, seed=1), randn(5, 64, seed=2)
    cos, sin = rope_table(rope_frequencies(64)[0], ids, dtype=torch.float64)
    full = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    theirs = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q[None, None], k[None, None], *full)
    evens_then_odds = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    ours = [torch_rope_interleaved(x, cos, sin) for x in (q, k)]
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(mine[:, evens_then_odds], their[0, 0])
        assert (mine - their[0, 0]).abs().max() > 1 and not torch.equal(mine[0], their[0, 0, 0])
    close(ours[0] @ ours[1].T, theirs[0][0, 0] @ theirs[1][0, 0].T, atol=1e-11)
    expected = torch.stack([plain_rope(row, p, "interleaved") for row, p in zip(q, ids.tolist(), strict=True)])
    close(ours[0], expected, atol=1e-12)


@pytest.mark.parametrize(
    "mode, start, expected",
    [
        ("neox", 0, [-1.217058, 1.715331, 2.918693, 4.130090, 5, 6, 7, 8]),
        ("neox", None, [1, 2, 3, 4, -0.829395, 5.425763, 8.562249, 8.400065]),
        ("interleaved", 0, [-0.560071, 2.164791, 2.712882, 4.200033, 5, 6, 7, 8]),
        ("interleaved", None, [1, 2, 3, 4, -0.172408, 7.808347, 6.423314, 8.470008]),
    ],
)
def test_partial_rotates_the_wrong_channels(mode, start, expected):
    """ml-explore/mlx-lm#1698: Norms agree for all four choices: only the values tell."""
    cos, sin = rope_table(rope_frequencies(4)[0], torch.tensor(7), dtype=torch.float64)
    close(torch_partial_rope(ONE_TO_EIGHT, cos, sin, mode, start), expected, atol=1e-6)
    for width, R in ((128, 64), (192, 64)):  # GLM-4's head; 128 + 64 channels of MLA
        x = randn(3, width)
        table = rope_table(rope_frequencies(R)[0], 3, dtype=torch.float64)
        first = width - R if start is None else start
        rows = [plain_rope(row, p, mode, R=R, start=first) for p, row in enumerate(x)]
        close(torch_partial_rope(x, *table, mode, start), torch.stack(rows), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", REFERENCES)
def test_untouched_channels_lose_bits(mode, dtype):
    """ml-explore/mlx-lm#1698: NaN payloads, −0.0, infinities, subnormals of the other channels survive to the bit."""
    generator = torch.Generator().manual_seed(3)
    integer = INTEGER_VIEW[dtype.itemsize]
    limits = torch.iinfo(integer)
    x = torch.randint(limits.min, limits.max, (5, 4, 96), generator=generator, dtype=integer).view(dtype)
    infinity = torch.tensor(INF, dtype=dtype)
    payload = (bits(infinity) + 5).view(dtype)  # a NaN that is not the default one
    assert payload.isnan() and not torch.equal(bits(payload), bits(torch.tensor(NAN, dtype=dtype)))
    special = torch.stack((payload, infinity, -infinity, torch.tensor(-0.0, dtype=dtype)))
    cos, sin = (table[:, None] for table in rope_table(rope_frequencies(32)[0], 5))
    for start in (0, 20, 64, None):
        first = 64 if start is None else start
        x[..., first : first + 32] = randn(5, 4, 32, dtype=dtype)
        others = torch.cat((torch.arange(first), torch.arange(first + 32, 96)))
        x[..., others[[0, 5, -7, -1]]] = special
        before = bits(x).clone()
        y = torch_partial_rope(x, cos, sin, mode, start)
        assert torch.equal(bits(y)[..., others], before[..., others]) and torch.equal(bits(x), before)
        assert y[..., first : first + 32].isfinite().all()
        rotated = REFERENCES[mode](x[..., first : first + 32], cos, sin)
        assert torch.equal(bits(y[..., first : first + 32]), bits(rotated))
        assert not torch.equal(bits(rotated)[1:], before[1:, :, first : first + 32])


@pytest.mark.parametrize("mode", REFERENCES)
def test_partial_of_full_or_zero_width(mode):
    """ml-explore/mlx-lm#1698, ohdearquant/lattice#401: R = width is the full rotation and R = 0 the identity, down to
    NaN payloads."""
    x = randn(5, 64)
    cos, sin = rope_table(rope_frequencies(64)[0], 5, dtype=torch.float64)
    for start in (None, 0):
        assert torch.equal(torch_partial_rope(x, cos, sin, mode, start), REFERENCES[mode](x, cos, sin))
    x[0, :3] = torch.tensor([NAN, -INF, -0.0])
    empty = rope_table(torch.empty(0, dtype=torch.float64), 5)
    for start in (None, 0, 7, 64):
        assert torch.equal(bits(torch_partial_rope(x, *empty, mode, start)), bits(x))


# ----------------------------------------------------------------------------- partial rotation in transformers' models


def doubled(table):
    """The layout that most models take: both halves the same, with a batch axis."""
    return torch.cat((table, table), -1)[None]


def gpt_neox(x, cos, sin):
    return modeling_gpt_neox.apply_rotary_pos_emb(x, x, doubled(cos), doubled(sin))[0]


def glm(x, cos, sin):
    return modeling_glm.apply_rotary_pos_emb(x, x, doubled(cos), doubled(sin))[0]


def glm4(x, cos, sin):
    return modeling_glm4.apply_rotary_pos_emb(x, x, doubled(cos), doubled(sin))[0]


def deepseek_v4(x, cos, sin):
    return modeling_deepseek_v4.apply_rotary_pos_emb(x, cos[None], sin[None])


def gemma4(x, cos, sin):
    return modeling_gemma4.apply_rotary_pos_emb(x, doubled(cos), doubled(sin))


def through_attention(attention, x, monkeypatch, **arguments):
    """Run a whole attention layer whose query projection yields x, and return the query that reaches the scores."""
    seen, matmul = [], torch.matmul

    def noted(query, *rest):
        seen.append(query)
        return matmul(query, *rest)

    monkeypatch.setattr(torch, "matmul", noted)  # the scores are the first product that the layer takes
    batch, heads, length, width = x.shape
    rows = x.transpose(1, 2).reshape(batch, length, heads * width)
    attention.q_proj.forward = lambda hidden: rows
    attention(torch.zeros(batch, length, attention.config.hidden_size), **arguments)
    return seen[0]


def phi(x, cos, sin, monkeypatch):
    config = PhiConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager")
    attention = modeling_phi.PhiAttention(config, layer_idx=0)
    return through_attention(
        attention, x, monkeypatch, position_embeddings=(doubled(cos), doubled(sin)), attention_mask=None
    )


def stablelm(x, cos, sin, monkeypatch):
    config = StableLmConfig(hidden_size=160, num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager")
    attention = modeling_stablelm.StableLmAttention(config, layer_idx=0)
    return through_attention(
        attention, x, monkeypatch, position_embeddings=(doubled(cos), doubled(sin)), attention_mask=None
    )


def gptj(x, cos, sin, monkeypatch):
    config = GPTJConfig(n_embd=512, n_head=2, rotary_dim=64, attn_implementation="eager")
    attention = modeling_gptj.GPTJAttention(config, layer_idx=0)
    if "position_embeddings" in inspect.signature(attention.forward).parameters:
        return through_attention(attention, x, monkeypatch, position_embeddings=(sin[None], cos[None]))
    attention.embed_positions = torch.cat((sin, cos), -1)  # older releases gather the rows themselves
    return through_attention(attention, x, monkeypatch, position_ids=torch.arange(len(sin))[None])


MODELS = {  # head width, R, the call that reproduces the model, the model's own code
    "GPT-NeoX": (96, 24, dict(mode="neox", start=0), gpt_neox),
    "GPT-J": (256, 64, dict(mode="interleaved", start=0), gptj),
    "GLM": (128, 64, dict(mode="interleaved", start=0), glm),
    "GLM-4": (128, 64, dict(mode="interleaved", start=0), glm4),
    "Phi": (64, 32, dict(mode="neox", start=0), phi),
    "StableLM": (80, 20, dict(mode="neox", start=0), stablelm),
    "DeepSeek-V4": (512, 64, dict(mode="interleaved", start=None), deepseek_v4),
    "Gemma-4": (512, 512, dict(mode="neox", start=0), gemma4),
}


@pytest.mark.parametrize("name", MODELS)
def test_partial_rotation_of_models(name, monkeypatch):
    """Bit for bit the same, from the same float32 tables, and no other choice of pairs and channels gives that."""
    width, R, choice, model = MODELS[name]
    inv_freq, _ = rope_frequencies(R, scaling=GEMMA4 if name == "Gemma-4" else None)
    cos, sin = rope_table(inv_freq, torch.tensor([1, 2, 7, 300, 4097]))
    x = randn(2, 2, 5, width, dtype=torch.float32)
    theirs = model(x, cos, sin, monkeypatch) if model in (phi, stablelm, gptj) else model(x, cos, sin)
    assert torch.equal(torch_partial_rope(x, cos, sin, **choice), theirs)
    for mode, start in itertools.product(REFERENCES, {0, width - R}):
        same = mode == choice["mode"] and start in (choice["start"], width - R if choice["start"] is None else 0)
        assert torch.equal(torch_partial_rope(x, cos, sin, mode, start), theirs) == same
    if name == "DeepSeek-V4":  # the one that computes in float32 whatever x is
        half = x.bfloat16()
        assert torch.equal(torch_partial_rope(half, cos, sin, **choice), model(half, cos, sin))
    if name == "Gemma-4":  # its untouched channels lie in both halves: pairs of frequency zero
        untouched = torch.cat((torch.arange(64, 256), torch.arange(320, 512)))
        assert torch.equal(theirs[..., untouched], x[..., untouched])
        assert not torch.isclose(theirs[..., :64], x[..., :64]).all() and int((inv_freq > 0).sum()) == 64


def test_partial_rotation_of_deepseek_v3(monkeypatch):
    """The last 64 of 128 + 64 channels, adjacent pairs; its helper then stores evens before odds."""
    small = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, q_lora_rank=None)
    config = DeepseekV3Config(**small, attn_implementation="eager")
    attention = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)
    cos, sin = rope_table(rope_frequencies(64)[0], torch.tensor([1, 2, 7, 300, 4097]))
    x = randn(2, 2, 5, 192, dtype=torch.float32)
    theirs = through_attention(
        attention, x, monkeypatch, position_embeddings=(doubled(cos), doubled(sin)), attention_mask=None
    )
    order = torch.cat((torch.arange(128), torch.arange(128, 192, 2), torch.arange(129, 192, 2)))
    assert torch.equal(torch_partial_rope(x, cos, sin, "interleaved")[..., order], theirs)
