"""Reading a rotation: every fault of the notebook, and others, are told from the right one."""

import find_the_fault as finder
import pytest
import tiny
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import rope_kernels as rk

DEVICE = finder.chapter.DEVICE
RIGHT = tiny.rotation()
ENTRY = {
    "neox pairs": "pairs",
    "sign flipped": "sign",
    "trailing channels": "channels",
    "base 500000": "inv_freq",
    "no attention factor": "attention factor",
    "positions + 1000": "position 0",
}


def differing(rotate_qk):
    return finder.differing(finder.read(rotate_qk), finder.read(RIGHT))


def by_reference(mode="interleaved", R=8, start=0, order=None, change=lambda cos, sin: (cos, sin)):
    """A rotation by torch; its pairs may lie in another order of the channels."""
    cos, sin = change(*rk.rope_table(rk.rope_frequencies(R)[0], finder.LATER + 1, device=DEVICE))
    order = torch.arange(tiny.D) if order is None else torch.tensor(order)

    def rotate_qk(q, k, ids):
        rows = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
        return [rk.torch_partial_rope(x[..., order], *rows, mode, start)[..., order.argsort()] for x in (q, k)]

    return rotate_qk


def deepseek(q, k, ids):
    rows = [torch.cat((table[ids], table[ids]), -1).unsqueeze(0) for table in tiny.table()]
    turned = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(*(x.transpose(0, 1)[None] for x in (q, k)), *rows)
    return [x[0].transpose(0, 1) for x in turned]


def test_one_call_names_every_fault():
    assert differing(RIGHT) == []
    for name, entry in ENTRY.items():
        assert differing(tiny.rotation(**tiny.FAULTS[name])) == [entry]


def test_one_call_names_two_faults():
    for a in ENTRY:
        for b in ENTRY:
            if a < b:
                found = differing(tiny.rotation(**tiny.FAULTS[a], **tiny.FAULTS[b]))
                assert sorted(found) == sorted((ENTRY[a], ENTRY[b])), (a, b)


@pytest.mark.parametrize("number", range(7))
def test_a_hidden_kernel_holds_the_faults_that_are_revealed(number):
    faults = finder.reveal(number).split(" and ")
    assert sorted(differing(finder.hidden(number))) == sorted(ENTRY[name] for name in faults)
    assert not set(tiny.FAULTS) & set(str(finder.hidden(number)).split("'"))


def test_the_hidden_kernels_cover_every_fault_and_one_pair_of_them():
    revealed = [finder.reveal(number) for number in range(7)]
    assert {*tiny.FAULTS, "sign flipped and trailing channels"} == set(revealed)
    with pytest.raises(IndexError):
        finder.hidden(7)


def k_through(other):
    return lambda q, k, ids: (RIGHT(q, k, ids)[0], other(q, k, ids)[1])


def only_head(head):
    def rotate_qk(q, k, ids):
        return [torch.where(torch.arange(tiny.HEADS, device=DEVICE)[:, None] == head, *pair)
                for pair in zip(RIGHT(q, k, ids), (q, k), strict=True)]  # fmt: skip

    return rotate_qk


def reflected(q, k, ids):
    """A wrong formula: the second channel of each pair gets its sine with the wrong sign."""
    return [torch.where(torch.arange(tiny.D, device=DEVICE) % 2 == 1, *pair)
            for pair in zip(tiny.rotation(inverse=True)(q, k, ids), RIGHT(q, k, ids), strict=True)]  # fmt: skip


UNSEEN_ONCE = {  # a rotation, and what its card says in the one entry that differs
    "k as it came": (k_through(lambda q, k, ids: (q, k)), "other heads", "k, head 0: channels none; k, head 1"),
    "k by the other pairs": (k_through(tiny.rotation(mode="neox")), "other heads", "k, head 0: pairs neox; k, head 1"),
    "k backwards": (k_through(tiny.rotation(inverse=True)), "other heads", "k, head 0: sign −; k, head 1: sign −"),
    "head 0 only": (only_head(0), "other heads", "q, head 1: channels none; k, head 1: channels none"),
    "ids above 1 read as 1": (lambda q, k, ids: RIGHT(q, k, ids.clamp(max=1)), "position 1001", "other angles"),
    "ids in bfloat16": (lambda q, k, ids: RIGHT(q, k, ids.bfloat16().long()), "position 1001", "other angles"),
    "a reflection": (reflected, "pairs", "no rotation"),
    "q and k from different numbers on": (
        lambda q, k, ids: (RIGHT(q, k, ids + 1)[0], RIGHT(q, k, ids + 2)[1]),
        "other heads",
        "k, head 0: position 0 turns otherwise; k, head 1: position 0 turns otherwise",
    ),
    "halved far out": (
        lambda q, k, ids: [x * torch.where(ids > 500, 0.5, 1.0)[:, None, None] for x in RIGHT(q, k, ids)],
        "attention factor",
        "mixed",
    ),
    "every channel scaled": (lambda q, k, ids: [1.1 * x for x in RIGHT(q, k, ids)], "attention factor", "mixed"),
}


@pytest.mark.parametrize(("rotate_qk", "entry", "said"), UNSEEN_ONCE.values(), ids=UNSEEN_ONCE)
def test_a_fault_outside_q_s_first_head_or_position_1_is_read(rotate_qk, entry, said):
    assert entry in differing(rotate_qk)
    assert finder.read(rotate_qk)[entry].startswith(said)


def test_read_calls_the_rotation_once_and_an_in_place_one_reads_alike():
    calls = []

    def in_place(q, k, ids):
        calls.append(ids)
        cos, sin = tiny.table()
        return rk.apply_rope(q, k, cos, sin, ids, mode="interleaved", start=0, inplace=True)

    assert differing(in_place) == [] and len(calls) == 1


def test_read_gives_the_numbers():
    inv_freq, factor = rk.rope_frequencies(tiny.R, scaling=tiny.CONFIG)
    found = finder.read(RIGHT)
    assert found["inv_freq"] == pytest.approx(inv_freq.tolist(), rel=1e-5)
    assert found["attention factor"] == pytest.approx(factor, rel=1e-6)
    assert (found["position 0"], found["position 1001"], found["other heads"]) == ("unchanged", "1001 steps", "alike")


@pytest.mark.parametrize("mode", ["neox", "interleaved"])
@pytest.mark.parametrize("start", [0, 10, 24])
def test_read_judges_the_torch_reference_alike(mode, start):
    found = finder.read(by_reference(mode, start=start))
    assert (found["pairs"], found["channels"], found["sign"]) == (mode, f"{start} … {start + 7} of 32", "+")


def test_mixed_signs_and_mixed_lengths_read_mixed():
    flip = torch.tensor([1.0, -1.0, 1.0, 1.0], device=DEVICE)
    assert finder.read(by_reference(change=lambda cos, sin: (cos, sin * flip)))["sign"] == "mixed"
    longer = flip.abs() + torch.arange(4, device=DEVICE)
    assert (
        finder.read(by_reference(change=lambda cos, sin: (cos * longer, sin * longer)))["attention factor"] == "mixed"
    )


def test_a_function_that_also_reorders_is_read_as_the_rotation_that_it_holds():
    """DeepSeek-V3's of transformers: interleaved in, halves out."""
    found, wanted = finder.read(deepseek, tiny.R), finder.read(RIGHT)
    assert found == wanted | {
        "position 0": "evens, then odds",
        "channels": "0 … 15 of 16",
        "inv_freq": found["inv_freq"],
    }
    assert found["inv_freq"] == pytest.approx(wanted["inv_freq"], rel=1e-5)
    backwards = finder.read(lambda q, k, ids: [x.flip(-1) for x in RIGHT(q, k, ids)])
    assert backwards == wanted | {"position 0": f"order {[*range(31, -1, -1)]}"}
    reordered = finder.read(k_through(lambda q, k, ids: [x.flip(-1) for x in RIGHT(q, k, ids)]))
    assert reordered["other heads"].startswith("k, head 0: position 0 order [31")


def test_read_says_so_when_nothing_or_something_else_is_rotated():
    assert finder.read(lambda q, k, ids: (q, k)) == {"channels": "none", "other heads": "alike"}
    order = [0, 3, 1, 2, 5, 6, 7, 4, *range(8, 32)]
    assert finder.read(by_reference(order=order))["pairs"] == "[(0, 3), (1, 2), (4, 7), (5, 6)]"
    apart = finder.read(by_reference("neox", order=[0, 1, 2, 3, 16, 17, 18, 19, *range(4, 16), *range(20, 32)]))
    assert apart["channels"] == "[0, 1, 2, 3, 16, 17, 18, 19]"


def test_numbers_are_alike_to_four_digits_or_to_where_float32_ends():
    assert finder.alike([1.0, 1e-7], [1.00001, 2e-7])
    assert not finder.alike(1.0, 1.001) and not finder.alike(1e-5, 2e-5) and not finder.alike([1.0], [1.0, 1.0])
