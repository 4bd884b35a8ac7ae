"""The tiny model of notebook 10: its task, its training, and what each fault of its rotation does to it."""

import pytest
import tiny
import torch

import rope_kernels as rk

EVENS_THEN_ODDS = torch.tensor([*range(0, tiny.R, 2), *range(1, tiny.R, 2), *range(tiny.R, tiny.D)])


def largest(a, b):
    return (a - b).abs().max().item()


@pytest.fixture(scope="module")
def trained():
    model, losses = tiny.train(tiny.rotation())
    assert len(losses) == 300 and losses[0] > 2.5
    return model


def test_the_task_is_what_the_notebook_says():
    texts, answers = tiny.batch(5, torch.Generator().manual_seed(0))
    assert texts.shape == answers.shape == (5, tiny.LENGTH)
    for text, answer in zip(texts.tolist(), answers.tolist(), strict=True):
        for place, letter in enumerate(text):
            back = place - (letter + 1)
            assert answer[place] == (text[back] if back >= 0 else -1)
    assert set(texts.flatten().tolist()) == set(range(tiny.LETTERS))


def test_no_answer_depends_on_what_follows(trained):
    """The mask holds: a change at the end leaves earlier outputs as they were."""
    texts, _ = tiny.batch(2, torch.Generator().manual_seed(0))
    changed = texts.clone()
    changed[:, -1] = (changed[:, -1] + 1) % tiny.LETTERS
    with torch.no_grad():
        a, b = (trained(t, tiny.rotation()) for t in (texts, changed))
    assert largest(a[:, :-1], b[:, :-1]) <= 1e-5 and largest(a[:, -1], b[:, -1]) > 0.1


BOUNDS = {  # loss at least and at most, right answers at least and at most: well within the notebook's classes
    "neox pairs": (4.0, 20.0, 0.0, 0.15),
    "sign flipped": (4.0, 20.0, 0.0, 0.15),
    "trailing channels": (4.0, 20.0, 0.0, 0.15),
    "base 500000": (3.5, 10.0, 0.25, 0.5),
    "no attention factor": (0.1, 1.0, 0.85, 0.97),
    "positions + 1000": (0.0, 0.003, 0.995, 1.0),
}


@pytest.mark.parametrize("name", ["as trained", *tiny.FAULTS])
def test_every_run_is_far_from_the_borders_of_its_class(trained, name):
    loss, accuracy, confidence = tiny.evaluate(trained, tiny.rotation(**tiny.FAULTS.get(name, {})))
    least, most, low, high = BOUNDS.get(name, BOUNDS["positions + 1000"])
    assert least <= loss <= most and low <= accuracy <= high
    assert confidence > 0.62


def test_a_few_steps_through_the_kernel_through_it_again_and_through_torch_give_the_same_losses():
    cos, sin = tiny.table()

    def reference(q, k, ids):
        rows = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
        return [rk.torch_partial_rope(x, *rows, mode="interleaved", start=0) for x in (q, k)]

    ours, again, theirs = (
        tiny.train(rotate_qk, steps=20, count=8)[1] for rotate_qk in (tiny.rotation(), tiny.rotation(), reference)
    )
    assert ours == pytest.approx(again, abs=1e-5) and ours == pytest.approx(theirs, abs=1e-3)


def test_permuted_weights_repair_the_convention(trained):
    right = tiny.evaluate(trained, tiny.rotation())
    repaired = tiny.evaluate(tiny.convert(trained, EVENS_THEN_ODDS), tiny.rotation(mode="neox"))
    assert repaired == pytest.approx(right, rel=1e-2)
    for wrong in (EVENS_THEN_ODDS.argsort(), EVENS_THEN_ODDS[EVENS_THEN_ODDS], EVENS_THEN_ODDS.flip(0)):
        assert tiny.evaluate(tiny.convert(trained, wrong), tiny.rotation(mode="neox"))[1] < 0.5
    assert tiny.evaluate(trained, tiny.rotation()) == right, "convert works on a copy"


def test_attention_maps_show_the_right_key(trained):
    for head in range(tiny.HEADS):
        weights = tiny.attention_map(trained, tiny.rotation(), head)
        assert weights.shape == (tiny.LETTERS, 24) and weights.sum(1).max() <= 1 + 1e-5
        assert torch.equal(weights.argmax(1), torch.arange(1, tiny.LETTERS + 1))


def test_in_words():
    for result, words in (
        ((0.001, 1.0, 1.0), "loss below 0.01      right answers above 99 %"),
        ((0.5, 0.95, 0.9), "loss 0.01 … 2.77     right answers 80 … 99 %"),
        ((3.0, 0.5, 0.9), "loss above guessing  right answers 20 … 80 %"),
        ((9.0, 0.1, 0.9), "loss above guessing  right answers below 20 %"),
    ):
        assert tiny.in_words(result) == words


def test_each_change_from_outside_undoes_its_fault_only(trained):
    _, factor = rk.rope_frequencies(tiny.R, scaling=tiny.CONFIG)
    scale = torch.where(torch.arange(tiny.D) < tiny.R, factor, 1.0)
    changes = {
        "positions + 1000": (trained, None),
        "sign flipped": (trained, torch.arange(tiny.LENGTH - 1, -1, -1, device=tiny.chapter.DEVICE)),
        "neox pairs": (tiny.convert(trained, EVENS_THEN_ODDS), None),
        "trailing channels": (tiny.convert(trained, torch.arange(tiny.D).roll(-tiny.R)), None),
        "no attention factor": (tiny.convert(trained, scale=scale), None),
    }
    right = tiny.evaluate(trained, tiny.rotation())[0]
    for fault, options in tiny.FAULTS.items():
        for name, (model, ids) in changes.items():
            loss = tiny.evaluate(model, tiny.rotation(**options), ids)[0]
            assert abs(loss / right - 1) < 0.05 if name == fault else loss > 2 * right, (fault, name)
