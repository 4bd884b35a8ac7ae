"""Notebook 10: apply_rope inside transformers models, the trained model's faults, and the checks of the exercises."""

import inspect
import math

import in_a_model as lab
import pytest
import torch
from books import worked_answers
from conftest import ROOT

import rope_kernels as rk

pytestmark = pytest.mark.usefixtures("one_thread")

NOTEBOOK = ROOT / "notebooks" / "10_in_a_model.ipynb"
DEVICE = lab.chapter.DEVICE
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
    "llama, tied embeddings": ("llama", dict(tie_word_embeddings=True)),
    "llama, llama3 frequencies": ("llama", dict(rope_parameters=LLAMA3)),
    "llama, yarn": ("llama", dict(rope_parameters=YARN)),
    "llama, linear": ("llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "llama, dynamic": ("llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
    "gptj, half of the head": ("gptj", {}),
    "gptj, whole head": ("gptj", dict(rotary_dim=16)),
    "gptj, tied embeddings": ("gptj", dict(tie_word_embeddings=True)),
    "glm, half of the head": ("glm", {}),
    "glm, a quarter": ("glm", dict(rope_parameters=PLAIN | {"partial_rotary_factor": 0.25})),
    "glm, whole head": ("glm", dict(rope_parameters=PLAIN | {"partial_rotary_factor": 1.0})),
    "glm, one key head, tied": ("glm", dict(num_key_value_heads=1, tie_word_embeddings=True)),
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
    return "neox" if split else lab.REPLACED[model.config.model_type][2]


# ------------------------------------------------------------------------------------------------ part 1: drop-in


@every_config
def test_logits_gradients_and_text_agree_in_float32(family, changes, tokens):
    model = lab.small_model(family, **changes)
    logits, gradients = run(model, tokens)
    text = model.generate(tokens, max_new_tokens=12, do_sample=False)
    with lab.through_apply_rope(model):
        ours, our_gradients = run(model, tokens)
        ours_text = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert largest(ours, logits) <= 1e-4 and relative(our_gradients, gradients) <= 1e-4
    assert torch.equal(ours_text, text) and text.shape == (2, 52)

    with lab.through_apply_rope(model, mode=OTHER[convention(model)]), torch.no_grad():
        assert largest(model(tokens).logits, logits) > 0.5, "a comparison that accepts the other pairs says nothing"
    assert largest(run(model, tokens)[0], logits) <= 1e-6, "the model is as it was"


@every_config
def test_bfloat16_is_as_close_to_float32_as_before(family, changes, tokens):
    model = lab.small_model(family, torch.bfloat16, **changes)
    exact = lab.small_model(family, **changes)
    exact.load_state_dict(model.state_dict())
    right, right_gradients = run(exact, tokens)
    theirs, their_gradients = run(model, tokens)
    with lab.through_apply_rope(model):
        ours, our_gradients = run(model, tokens)
    assert (ours - right).norm() <= 1.2 * (theirs - right).norm()
    assert relative(our_gradients, right_gradients) <= 2 * relative(their_gradients, right_gradients)


@pytest.mark.parametrize("family", lab.REPLACED)
def test_given_position_ids_are_followed(family, tokens):
    """A batch with ids of its own, as left padding makes them: gaps, repetitions, two different rows."""
    model = lab.small_model(family)
    ids = torch.stack((torch.arange(40) + 7, torch.arange(40).sub(9).clamp(min=0))).to(DEVICE)
    logits, gradients = run(model, tokens, position_ids=ids)
    with lab.through_apply_rope(model):
        ours, our_gradients = run(model, tokens, position_ids=ids)
    assert largest(ours, logits) <= 1e-4 and relative(our_gradients, gradients) <= 1e-4
    assert largest(logits, run(model, tokens)[0]) > 1e-2, "the ids play a part"


@pytest.mark.parametrize("family", lab.REPLACED)
def test_cached_steps_give_the_logits_of_one_run(family, tokens):
    model = lab.small_model(family)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad(), lab.through_apply_rope(model):
        whole = model(tokens).logits
        first = model(tokens[:, :-3], use_cache=True)
        cache, steps = first.past_key_values, [first.logits]
        for place in range(37, 40):
            steps.append(model(tokens[:, place : place + 1], **{argument: cache}, use_cache=True).logits)
    assert largest(torch.cat(steps, 1), whole) <= 1e-4


def test_the_judge_is_the_unmodified_model(tokens, monkeypatch):
    """Spoilt kernels must show, so the right values do not come through apply_rope."""
    model = lab.small_model("llama")
    logits, _ = run(model, tokens)
    monkeypatch.setattr(rk, "apply_rope", lambda q, k, *given, **options: (q, k))
    assert torch.equal(run(model, tokens)[0], logits)
    with lab.through_apply_rope(model), torch.no_grad():
        assert largest(model(tokens).logits, logits) > 0.5


def test_one_stand_in_without_the_other_raises(tokens, monkeypatch):
    for count in (1, 2, 3):  # a batch of two could be taken for cos and sin
        batch = tokens[:1].expand(count, -1)
        model = lab.small_model("llama")
        with monkeypatch.context() as patch:
            patch.setattr(lab.modeling_llama, "apply_rotary_pos_emb", lab.rotate)
            with pytest.raises((TypeError, ValueError)):
                model(batch)
        model.model.rotary_emb = lab.Table(model.config, model.config.head_dim, model.device)
        with pytest.raises((TypeError, AttributeError)):
            model(batch)


def test_everything_is_put_back_even_after_an_error(tokens):
    for family, (module, name, _) in lab.REPLACED.items():
        model = lab.small_model(family)
        before = getattr(module, name), run(model, tokens)[0]
        with pytest.raises(RuntimeError, match="on purpose"), lab.through_apply_rope(model):
            raise RuntimeError("on purpose")
        assert getattr(module, name) is before[0]
        assert largest(run(model, tokens)[0], before[1]) <= 1e-6


def test_table_refuses_longrope():
    config = lab.small_model("llama").config
    config.rope_parameters = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    with pytest.raises(ValueError, match="longrope"):
        lab.Table(config, 16)


@pytest.mark.skipif(DEVICE == "cuda", reason="looking at the ids would synchronise: their rows are NaN on CUDA")
def test_positions_past_the_table_are_refused(tokens):
    model = lab.small_model("llama")
    with lab.through_apply_rope(model), pytest.raises(IndexError, match="0 … 127"):
        model(tokens, position_ids=torch.arange(40)[None] + 100)


def test_the_stand_ins_are_few_lines_that_work_alone(tokens):
    """What an engineer takes: Table and rotate, under two imports."""
    text = inspect.getsource(lab.Table) + "\n\n" + inspect.getsource(lab.rotate)
    code = [line for line in text.splitlines() if line.strip() and '"""' not in line]
    assert len(code) <= 15
    names = {"torch": torch, "rk": rk}
    exec(text, names)
    model = lab.small_model("llama")
    with torch.no_grad():
        right = model(tokens).logits
        model.model.rotary_emb = names["Table"](model.config, model.config.head_dim, model.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lab.modeling_llama, "apply_rotary_pos_emb", names["rotate"])
            assert largest(model(tokens).logits, right) <= 1e-4


# ------------------------------------------------------------------------------------------------- part 2: silence


@pytest.fixture(scope="module")
def trained():
    model, losses = lab.train(lab.rotation())
    assert len(losses) == 300 and losses[0] > 2.5
    return model


def test_the_task_is_what_the_notebook_says():
    texts, answers = lab.batch(5, torch.Generator().manual_seed(0))
    assert texts.shape == answers.shape == (5, lab.LENGTH)
    for text, answer in zip(texts.tolist(), answers.tolist(), strict=True):
        for place, letter in enumerate(text):
            back = place - (letter + 1)
            assert answer[place] == (text[back] if back >= 0 else -1)
    assert set(texts.flatten().tolist()) == set(range(lab.LETTERS))


def test_no_answer_depends_on_what_follows(trained):
    """The mask holds: a change at the end leaves earlier outputs as they were."""
    texts, _ = lab.batch(2, torch.Generator().manual_seed(0))
    changed = texts.clone()
    changed[:, -1] = (changed[:, -1] + 1) % lab.LETTERS
    with torch.no_grad():
        a, b = (trained(t, lab.rotation()) for t in (texts, changed))
    assert largest(a[:, :-1], b[:, :-1]) <= 1e-5 and largest(a[:, -1], b[:, -1]) > 0.1


def test_training_is_repeatable(trained):
    again, _ = lab.train(lab.rotation())
    for (loss, accuracy, _), (same_loss, same_accuracy, _) in (
        [lab.evaluate(m, lab.rotation(**change)) for m in (trained, again)] for change in ({}, lab.FAULTS["neox pairs"])
    ):
        assert math.isclose(loss, same_loss, rel_tol=1e-2) and abs(accuracy - same_accuracy) <= 0.005


BOUNDS = {  # loss at least and at most, right answers at least and at most: well within the notebook's classes
    "neox pairs": (4.0, 20.0, 0.0, 0.15),
    "sign flipped": (4.0, 20.0, 0.0, 0.15),
    "trailing channels": (4.0, 20.0, 0.0, 0.15),
    "base 500000": (3.5, 10.0, 0.25, 0.5),
    "no attention factor": (0.1, 1.0, 0.85, 0.97),
    "positions + 1000": (0.0, 0.003, 0.995, 1.0),
}


@pytest.mark.parametrize("name", ["as trained", *lab.FAULTS])
def test_every_run_is_far_from_the_borders_of_its_class(trained, name):
    loss, accuracy, confidence = lab.evaluate(trained, lab.rotation(**lab.FAULTS.get(name, {})))
    least, most, low, high = BOUNDS.get(name, BOUNDS["positions + 1000"])
    assert least <= loss <= most and low <= accuracy <= high
    assert confidence > 0.62


def test_a_shift_changes_nothing(trained):
    texts, _ = lab.batch(8, torch.Generator().manual_seed(0))
    with torch.no_grad():
        right, moved = (trained(texts, lab.rotation(shift=shift)) for shift in (0, 1000))
    assert largest(right, moved) <= 1e-2 * right.abs().max().item()


def test_apply_rope_and_the_reference_train_alike():
    """A few steps through the kernel and through torch give the same losses."""
    cos, sin = lab.table()

    def reference(q, k, ids):
        rows = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
        return [rk.torch_partial_rope(x, *rows, mode="interleaved", start=0) for x in (q, k)]

    _, ours = lab.train(lab.rotation(), steps=20, count=8)
    _, theirs = lab.train(reference, steps=20, count=8)
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-3)


def test_permuted_weights_repair_the_convention(trained):
    order = torch.tensor([*range(0, lab.R, 2), *range(1, lab.R, 2), *range(lab.R, lab.D)])
    right = lab.evaluate(trained, lab.rotation())
    repaired = lab.evaluate(lab.convert(trained, order), lab.rotation(mode="neox"))
    assert repaired == pytest.approx(right, rel=1e-2)
    for wrong in (order.argsort(), order[order], order.flip(0)):
        assert lab.evaluate(lab.convert(trained, wrong), lab.rotation(mode="neox"))[1] < 0.5
    assert lab.evaluate(trained, lab.rotation()) == right, "convert works on a copy"


def test_attention_maps_show_the_right_key(trained):
    for head in range(lab.HEADS):
        weights = lab.attention_map(trained, lab.rotation(), head)
        assert weights.shape == (lab.LETTERS, 24) and weights.sum(1).max() <= 1 + 1e-5
        assert torch.equal(weights.argmax(1), torch.arange(1, lab.LETTERS + 1))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((0.001, 1.0, 1.0), "loss below 0.01      right answers above 99 %"),
        ((0.5, 0.95, 0.9), "loss 0.01 … 2.77     right answers 80 … 99 %"),
        ((3.0, 0.5, 0.9), "loss above guessing  right answers 20 … 80 %"),
        ((9.0, 0.1, 0.9), "loss above guessing  right answers below 20 %"),
    ],
)
def test_in_words(result, words):
    assert lab.in_words(result) == words


# ------------------------------------------------------------------------------------------- part 3: finding a fault


def differing(kernel):
    wanted, found = lab.read(lab.rotation()), lab.read(kernel)
    return [entry for entry in wanted if lab.written(found.get(entry)) != lab.written(wanted[entry])]


ENTRY = {
    "neox pairs": "pairs",
    "sign flipped": "sign",
    "trailing channels": "channels",
    "base 500000": "inv_freq",
    "no attention factor": "attention factor",
}


def test_one_call_names_every_single_fault():
    assert differing(lab.rotation()) == []
    for name, entry in ENTRY.items():
        assert differing(lab.rotation(**lab.FAULTS[name])) == [entry]
    assert differing(lab.rotation(**lab.FAULTS["positions + 1000"]))[0] == "turns at position 0"


def test_one_call_names_two_faults():
    for a in ENTRY:
        for b in ENTRY:
            if a < b:
                found = differing(lab.rotation(**lab.FAULTS[a], **lab.FAULTS[b]))
                assert sorted(found) == sorted((ENTRY[a], ENTRY[b])), (a, b)


def test_read_calls_the_rotation_once():
    calls = []

    def counted(q, k, ids):
        calls.append(ids)
        return lab.rotation()(q, k, ids)

    lab.read(counted)
    assert len(calls) == 1


def test_read_gives_the_numbers():
    inv_freq, factor = rk.rope_frequencies(lab.R, scaling=lab.CONFIG)
    found = lab.read(lab.rotation())
    assert found["inv_freq"] == pytest.approx(inv_freq.tolist(), rel=1e-5)
    assert found["attention factor"] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@pytest.mark.parametrize("start", [0, 10, 24])
def test_read_judges_the_torch_reference_alike(mode, start):
    cos, sin = rk.rope_table(rk.rope_frequencies(8)[0], 4, device=DEVICE)

    def reference(q, k, ids):
        rows = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
        return [rk.torch_partial_rope(x, *rows, mode=mode, start=start) for x in (q, k)]

    found = lab.read(reference)
    assert (found["pairs"], found["channels"], found["sign"]) == (mode, f"{start} … {start + 7} of 32", "+")
    assert not found["turns at position 0"]


def test_read_says_so_when_nothing_or_something_else_is_rotated():
    assert lab.read(lambda q, k, ids: (q, k)) == {"channels": "none"}
    cos, sin = rk.rope_table(rk.rope_frequencies(8)[0], 4, device=DEVICE)
    order = torch.tensor([0, 3, 1, 2, 5, 6, 7, 4, *range(8, 32)])

    def odd(q, k, ids):
        rows = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
        return [rk.torch_partial_rope(x[..., order], *rows, start=0)[..., order.argsort()] for x in (q, k)]

    assert lab.read(odd)["pairs"] not in ("neox", "interleaved")


def test_hidden_kernels_cover_every_fault_and_tell_nothing():
    names = [lab.reveal(number) for number in range(7)]
    assert set(lab.FAULTS) <= set(names) and any(" and " in name for name in names)
    for number in range(7):
        assert not set(lab.FAULTS) & set(str(lab.hidden(number)).split("'"))
    with pytest.raises(IndexError):
        lab.hidden(7)


def test_each_change_from_outside_undoes_its_fault_only(trained):
    factor = lab.read(lab.rotation())["attention factor"]
    scale = torch.where(torch.arange(lab.D) < lab.R, factor, 1.0)
    order = torch.tensor([*range(0, lab.R, 2), *range(1, lab.R, 2), *range(lab.R, lab.D)])
    changes = {
        "positions + 1000": (trained, None),
        "sign flipped": (trained, torch.arange(lab.LENGTH - 1, -1, -1, device=DEVICE)),
        "neox pairs": (lab.convert(trained, order), None),
        "trailing channels": (lab.convert(trained, torch.arange(lab.D).roll(lab.R)), None),
        "no attention factor": (lab.convert(trained, scale=scale), None),
        "base 500000": None,
    }
    right = lab.evaluate(trained, lab.rotation())[0]
    for fault, options in lab.FAULTS.items():
        for name, change in changes.items():
            if change is not None:
                loss = lab.evaluate(change[0], lab.rotation(**options), change[1])[0]
                assert (abs(loss / right - 1) < 0.05) == (name == fault), (fault, name)
                assert name == fault or loss > 2 * right


# --------------------------------------------------------------------------------------------------- the exercises


CHECKS = (lab.check_exercise_1, lab.check_exercise_2, lab.check_exercise_3)
ANSWERS = ("order", "base_of", "convert")  # the names that the exercises ask for


def test_worked_answers_are_accepted(capsys):
    blocks = worked_answers(NOTEBOOK)
    assert len(blocks) == len(CHECKS)
    for block, check, name in zip(blocks, CHECKS, ANSWERS, strict=True):
        namespace = {"torch": torch, "lab": lab, "rk": rk}
        exec(block, namespace)
        assert check(namespace[name]) is True
    assert capsys.readouterr().out.splitlines() == ["Right."] * 6  # each once in its block, once here


def swapped(channels):
    return [c ^ 1 if c in channels else c for c in range(32)]


def evens(k):
    return torch.cat((k[..., 0::2], k[..., 1::2]), -1)


def only_8(k):
    out = k.clone()
    out[..., :8] = torch.stack(k[..., :8].chunk(2, -1), -1).flatten(-2)
    return out


def inv_freq(kernel):
    return lab.read(kernel)["inv_freq"]


WRONG_ANSWERS = [
    *[(lab.check_exercise_1, name, order) for name, order in {
        "nothing": list(range(32)),
        "evens then odds": [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)],
        "rotated rows in reverse": [*range(15, -1, -1), *range(16, 32)],
        "ends exchanged": [*range(16, 32), *range(16)],
        "only some pairs": swapped(range(12)),
        "all but the slowest pair": swapped(range(14)),
        "neox partners": [*range(8, 16), *range(8), *range(16, 32)],
        "a row twice": [1, 1, *swapped(range(16))[2:]],
        "too short": swapped(range(16))[:16],
        "16 rows of each head": swapped(range(16)) + [32, 33],
        "no list": 5,
        "words": ["one", "two"],
        "nothing at all": None,
    }.items()],
    *[(lab.check_exercise_2, name, answer) for name, answer in {
        "always 10000": lambda kernel: 10000.0,
        "pair 0": lambda kernel: inv_freq(kernel)[0] ** -len(inv_freq(kernel)),
        "R in place of R/2": lambda kernel: inv_freq(kernel)[1] ** (-2 * len(inv_freq(kernel))),
        "without the sign": lambda kernel: inv_freq(kernel)[1] ** len(inv_freq(kernel)),
        "R = 16 for all": lambda kernel: inv_freq(kernel)[1] ** -8,
        "the head's width": lambda kernel: inv_freq(kernel)[1] ** -16,
        "the last pair": lambda kernel: 1 / inv_freq(kernel)[-1],
        "NaN": lambda kernel: math.nan,
        "None": lambda kernel: None,
        "raises": lambda kernel: 1 / 0,
        "exits": lambda kernel: exit(),
        "no function": 10000.0,
    }.items()],
    *[(lab.check_exercise_3, name, answer) for name, answer in {
        "nothing": lambda k: k,
        "the other way": evens,
        "in reverse": lambda k: k.flip(-1),
        "halves exchanged": lambda k: k.roll(k.shape[-1] // 2, -1),
        "R = 8 only": only_8,
        "odds first": lambda k: torch.stack(k.chunk(2, -1)[::-1], -1).flatten(-2),
        "not flattened": lambda k: torch.stack(k.chunk(2, -1), -1),
        "another axis": lambda k: torch.stack(k.chunk(2, -1), -1).flatten(-2).transpose(0, 1),
        "NaN": lambda k: k * math.nan,
        "None": lambda k: None,
        "raises": lambda k: k[99],
    }.items()],
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "answer"),
    [pytest.param(check, answer, id=f"{check.__name__[-1]}-{name}") for check, name, answer in WRONG_ANSWERS],
)
def test_planted_wrong_answers_are_rejected(check, answer, capsys):
    assert check(answer) is False
    assert capsys.readouterr().out.startswith("Wrong: ")


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lab.check_exercise_1, torch.tensor(swapped(range(16)))),
        (
            lab.check_exercise_1,
            [*swapped(range(16))[:16], *range(31, 15, -1)],
        ),  # the rest may lie anyhow, q and k alike
        (lab.check_exercise_2, lambda kernel: inv_freq(kernel)[2] ** (-len(inv_freq(kernel)) / 2)),
        (lab.check_exercise_3, lambda k: k[..., torch.arange(k.shape[-1]).view(2, -1).T.flatten()]),
    ],
)
def test_other_right_answers_are_accepted(check, answer):
    assert check(answer) is True
