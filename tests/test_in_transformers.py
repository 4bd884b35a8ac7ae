"""apply_rope inside transformers models: logits, gradients, text and cache beside the unmodified model."""

import inspect

import in_transformers as hf
import pytest
import torch

import rope_kernels as rk

DEVICE = hf.chapter.DEVICE
OTHER = {"neox": "interleaved", "interleaved": "neox"}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {  # family, what is changed in its small config
    "llama, grouped queries": ("llama", {}),
    "llama, one key head": ("llama", dict(num_key_value_heads=1)),
    "llama, as many key heads as query heads": ("llama", dict(num_key_value_heads=4)),
    "llama, wide heads": ("llama", dict(head_dim=48)),
    "llama, llama3 frequencies": ("llama", dict(rope_parameters=LLAMA3)),
    "llama, yarn": ("llama", dict(rope_parameters=YARN)),
    "llama, linear": ("llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "llama, dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
    "gptj, half of the head": ("gptj", {}),
    "gptj, whole head": ("gptj", dict(rotary_dim=16)),
    "glm, half of the head": ("glm", {}),
    "glm, a quarter": ("glm", dict(rope_parameters=PLAIN | {"partial_rotary_factor": 0.25})),
    "glm, whole head": ("glm", dict(rope_parameters=PLAIN | {"partial_rotary_factor": 1.0})),
    "glm, one key head": ("glm", dict(num_key_value_heads=1)),
    "qwen3": ("qwen3", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, half-split": ("deepseek_v3", dict(rope_interleave=False)),
    "deepseek_v3, query not compressed": ("deepseek_v3", dict(q_lora_rank=None)),
    "deepseek_v3, yarn": ("deepseek_v3", dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0))),
}  # fmt: skip
every_config = pytest.mark.parametrize(("family", "changes"), CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def run(model, tokens, **options):
    """Return logits and the gradients of all weights."""
    model.zero_grad()
    result = model(tokens, labels=tokens, **options)
    result.loss.backward()
    return result.logits.detach().float(), {name: p.grad.float() for name, p in model.named_parameters()}


def largest(a, b):
    return (a - b).abs().max().item()


def relative(ours, theirs):
    """Return the largest relative norm of a difference among all weights' gradients."""
    assert ours.keys() == theirs.keys() and all(g.norm() > 0 for g in theirs.values())
    return max(((ours[name] - g).norm() / g.norm()).item() for name, g in theirs.items())


def convention(model):
    split = model.config.model_type == "deepseek_v3" and not model.config.rope_interleave
    return "neox" if split else hf.REPLACED[model.config.model_type][2]


@every_config
def test_logits_gradients_and_text_agree_in_float32(family, changes, tokens):
    model = hf.small_model(family, **changes)
    logits, gradients = run(model, tokens)
    text = model.generate(tokens, max_new_tokens=12, do_sample=False)
    with hf.through_apply_rope(model):
        ours, our_gradients = run(model, tokens)
        ours_text = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert largest(ours, logits) <= 1e-4 and relative(our_gradients, gradients) <= 1e-4
    assert torch.equal(ours_text, text) and text.shape == (2, 52)

    with hf.through_apply_rope(model, mode=OTHER[convention(model)]), torch.no_grad():
        assert largest(model(tokens).logits, logits) > 0.5, "a comparison that accepts the other pairs says nothing"
    assert largest(run(model, tokens)[0], logits) <= 1e-6, "the model is as it was"


@every_config
def test_bfloat16_is_as_close_to_float32_as_before(family, changes, tokens):
    model = hf.small_model(family, torch.bfloat16, **changes)
    exact = hf.small_model(family, **changes)
    exact.load_state_dict(model.state_dict())
    right, right_gradients = run(exact, tokens)
    theirs, their_gradients = run(model, tokens)
    with hf.through_apply_rope(model):
        ours, our_gradients = run(model, tokens)
    assert (ours - right).norm() <= 1.2 * (theirs - right).norm()
    assert relative(our_gradients, right_gradients) <= 2 * relative(their_gradients, right_gradients)


@pytest.mark.parametrize("family", hf.REPLACED)
def test_given_position_ids_are_followed(family, tokens):
    """A batch with ids of its own, as left padding makes them: gaps, repetitions, two different rows."""
    model = hf.small_model(family)
    ids = torch.stack((torch.arange(40) + 7, torch.arange(40).sub(9).clamp(min=0))).to(DEVICE)
    logits, gradients = run(model, tokens, position_ids=ids)
    with hf.through_apply_rope(model):
        ours, our_gradients = run(model, tokens, position_ids=ids)
    assert largest(ours, logits) <= 1e-4 and relative(our_gradients, gradients) <= 1e-4
    assert largest(logits, run(model, tokens)[0]) > 1e-2, "the ids play a part"


@pytest.mark.parametrize("family", hf.REPLACED)
def test_cached_steps_give_the_logits_of_one_run(family, tokens):
    model = hf.small_model(family)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad(), hf.through_apply_rope(model):
        whole = model(tokens).logits
        first = model(tokens[:, :-3], use_cache=True)
        cache, steps = first.past_key_values, [first.logits]
        for place in range(37, 40):
            steps.append(model(tokens[:, place : place + 1], **{argument: cache}, use_cache=True).logits)
    assert largest(torch.cat(steps, 1), whole) <= 1e-4


def test_the_judge_is_the_unmodified_model(tokens, monkeypatch):
    """Spoilt kernels must show, so the right values do not come through apply_rope."""
    model = hf.small_model("llama")
    logits, _ = run(model, tokens)
    monkeypatch.setattr(rk, "apply_rope", lambda q, k, *given, **options: (q, k))
    assert torch.equal(run(model, tokens)[0], logits)
    with hf.through_apply_rope(model), torch.no_grad():
        assert largest(model(tokens).logits, logits) > 0.5


def test_one_stand_in_without_the_other_raises(tokens, monkeypatch):
    for count in (1, 2, 3):  # a batch of two could be taken for cos and sin
        batch = tokens[:1].expand(count, -1)
        model = hf.small_model("llama")
        with monkeypatch.context() as patch:
            patch.setattr(hf.modeling_llama, "apply_rotary_pos_emb", hf.rotate)
            with pytest.raises((TypeError, ValueError)):
                model(batch)
        model.model.rotary_emb = hf.Table(model.config, model.device)
        with pytest.raises((TypeError, AttributeError)):
            model(batch)


def test_everything_is_put_back_even_after_an_error(tokens):
    for family, (module, name, _) in hf.REPLACED.items():
        model = hf.small_model(family)
        before = getattr(module, name), run(model, tokens)[0]
        with pytest.raises(RuntimeError, match="on purpose"), hf.through_apply_rope(model):
            raise RuntimeError("on purpose")
        assert getattr(module, name) is before[0]
        assert largest(run(model, tokens)[0], before[1]) <= 1e-6


def test_table_refuses_longrope():
    config = hf.small_model("llama").config
    config.rope_parameters = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    with pytest.raises(ValueError, match="longrope"):
        hf.Table(config)


@pytest.mark.skipif(DEVICE == "cuda", reason="looking at the ids would synchronise: their rows are NaN on CUDA")
def test_positions_past_the_table_are_refused(tokens):
    model = hf.small_model("llama")
    with hf.through_apply_rope(model), pytest.raises(IndexError, match="0 … 127"):
        model(tokens, position_ids=torch.arange(40)[None] + 100)


def test_the_stand_ins_are_few_lines_that_work_alone(tokens):
    """What an engineer takes: Table and rotate, under two imports."""
    text = inspect.getsource(hf.Table) + "\n\n" + inspect.getsource(hf.rotate)
    code = [line for line in text.splitlines() if line.strip() and '"""' not in line]
    assert len(code) <= 15
    names = {"torch": torch, "rk": rk}
    exec(text, names)
    model = hf.small_model("llama")
    with torch.no_grad():
        right = model(tokens).logits
        model.model.rotary_emb = names["Table"](model.config, model.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf.modeling_llama, "apply_rotary_pos_emb", names["rotate"])
            assert largest(model(tokens).logits, right) <= 1e-4
