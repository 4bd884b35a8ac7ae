"""Notebook 02's check(): it accepts what is right, rejects what is wrong, and never raises."""

import re

import pytest
import self_checks as sc
import torch
from books import cells, execute, worked_answers
from conftest import ROOT

import rope_kernels as rk

NOTEBOOK = ROOT / "notebooks" / "02_self_checks.ipynb"
REFERENCES = {"neox": rk.torch_rope_neox, "interleaved": rk.torch_rope_interleaved}
OTHER = {"neox": "interleaved", "interleaved": "neox"}


# ------------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("convention", REFERENCES)
def test_right_value_is_the_published_formula(convention):
    known = {  # x = 1 … 8 at position 1, base 10000; float64, from the definition and checked against transformers
        "neox": [-3.667053, 1.391008, 2.929851, 3.991998, 3.542983, 6.169692, 7.029650, 8.003996],
        "interleaved": [-1.142640, 1.922076, 2.585679, 4.279517, 4.939751, 6.049699, 6.991997, 8.006996],
    }
    angle = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    y = sc.right_value(torch.arange(1.0, 9.0), angle.cos(), angle.sin(), convention)
    torch.testing.assert_close(y, torch.tensor(known[convention], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("convention", REFERENCES)
@pytest.mark.parametrize("rope_dim, dtypes", [(128, (torch.float32, torch.float16)), (8, (torch.bfloat16,))])
def test_references_pass_under_their_own_convention_only(convention, rope_dim, dtypes, capsys):
    assert sc.check(REFERENCES[convention], convention, rope_dim=rope_dim, dtypes=dtypes)
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == [f"shape          (189, {rope_dim}), as x", f"pairing        {convention}"]
    assert "largest error" in printed and printed.endswith("\nRight.\n")

    assert not sc.check(REFERENCES[convention], OTHER[convention], rope_dim=rope_dim, dtypes=dtypes)
    assert f"its pairs are {convention}, and {OTHER[convention]} was asked for" in capsys.readouterr().out


@pytest.mark.parametrize("convention", REFERENCES)
def test_an_op_that_gathers_its_rows_passes(convention):
    def op(x, cos, sin, positions):
        return REFERENCES[convention](x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))

    assert sc.check(op, convention)
    assert not sc.check(op, OTHER[convention])


def test_a_tilelang_kernel_passes():
    def kernel(x, cos, sin):
        return rk.rope_interleaved_blocked(*x.shape, blk_s=9, dtype="float16")(x, cos, sin)

    assert sc.check(kernel, "interleaved", dtypes=(torch.float16,))
    assert not sc.check(kernel, "neox", dtypes=(torch.float16,))


def test_gradients_do_not_matter():
    assert sc.check(lambda x, cos, sin: rk.torch_rope_neox(x.requires_grad_(), cos, sin), "neox")


def test_the_judge_is_independent_of_rope_kernels(monkeypatch):
    right = rk.torch_rope_neox
    monkeypatch.setattr(rk, "torch_rope_neox", lambda x, cos, sin: x)
    monkeypatch.setattr(rk, "torch_rope_interleaved", lambda x, cos, sin: x)
    assert sc.check(right, "neox")


def test_the_inputs_leave_nothing_to_chance():
    sizes = (sc.TOKENS, sc.HEADS, sc.TOKENS * sc.HEADS, sc.ROPE_DIM, sc.ROPE_DIM // 2, sc.TABLE_ROWS)
    assert len(set(sizes)) == len(sizes)
    assert sc.TOKENS * sc.HEADS % 2  # so no power of two divides the rows
    assert sc.HEADS > 1 and sc.ROPE_DIM >= 8
    assert len(set(sc.POSITIONS)) == sc.TOKENS and min(sc.POSITIONS) >= 1
    assert any(p > 256 and p % 2 for p in sc.POSITIONS)
    assert sorted(sc.POSITIONS) != list(sc.POSITIONS)


# ------------------------------------------------------------------------------------------------- what is wrong


def test_the_table_of_faults_is_complete():
    assert len(sc.WRONG) >= 12
    assert {
        "swapped convention",
        "sign of sin flipped",
        "table transposed",
        "position off by one",
        "[c, c] table, adjacent pairs",
        "only head 0 rotated",
        "position in bfloat16",
        "second half dropped",
        "rotated twice",
        "position halved (m // 2)",
    } <= set(sc.WRONG)


@pytest.mark.parametrize("rope_dim", [8, 128])
@pytest.mark.parametrize("name", sc.WRONG)
def test_every_wrong_implementation_is_rejected_for_what_it_returns(name, rope_dim):
    function = sc.WRONG[name]
    _, fault = sc.examine(function, function.claims, rope_dim)
    assert fault and not fault.startswith(("it raised", "it returned"))
    assert not sc.check(function, function.claims, rope_dim=rope_dim)


@pytest.mark.parametrize("name", [name for name in sc.WRONG if name != "swapped convention"])
def test_wrong_implementations_are_wrong_under_the_other_name_too(name):
    assert not sc.check(sc.WRONG[name], OTHER[sc.WRONG[name].claims])


def test_wrong_elements_are_seen_wherever_they_are():
    for row in (0, 1, 6, 7, 100, 188):
        for channel in (0, 63, 64, 127):

            def off_in_one_element(x, cos, sin, row=row, channel=channel):
                y = rk.torch_rope_neox(x, cos, sin)
                y[row, channel] += 0.01
                return y

            fault = sc.examine(off_in_one_element, "neox")[1]
            assert fault and f"token {row // 7} (" in fault and f"head {row % 7}, channel {channel}" in fault


def in_float16(spoilt):
    """A candidate that is right in float32 and spoilt in float16."""
    return lambda x, cos, sin: spoilt(x, cos, sin) if x.dtype == torch.float16 else rk.torch_rope_neox(x, cos, sin)


def towards_zero(x, cos, sin):
    exact = rk.torch_rope_neox(x.double(), cos.double(), sin.double())
    y = exact.half()
    past = y.double().abs() > exact.abs()
    return torch.where(past, torch.nextafter(y, torch.zeros_like(y)), y)


def dropped(x, cos, sin):
    rk.torch_rope_neox(x, cos, sin)  # its memory is free again, and may be what the next line gets
    return torch.empty_like(x)


def one_hot_unrotated(x, cos, sin):
    return x if (x != 0).sum() == len(x) else rk.torch_rope_neox(x, cos, sin)


def a_third_channel(x, cos, sin):
    y = rk.torch_rope_neox(x, cos, sin)
    return y + 0.5 * x.roll(3, -1) if (x != 0).sum() == len(x) else y


def full_blocks_of_64(x, cos, sin):
    y, rows = torch.empty_like(x), len(x) // 64 * 64
    y[:rows] = rk.torch_rope_neox(x[:rows], cos[:rows], sin[:rows])
    return y


def first_overwritten(mode, x, cos, sin):
    """Rotate in a copy that float32 doesn't make: the first channels are written, then read again."""
    y, c, s = x.float(), cos.float(), sin.float()
    a, b = (y[:, 0::2], y[:, 1::2]) if mode == "interleaved" else y.chunk(2, -1)
    a[:] = a * c - b * s
    b[:] = b * c + a * s
    return y.to(x.dtype)


def later_with_an_axis_more(calls):
    """A candidate whose first `calls` results are right, and all others have one more axis."""
    count = iter(range(100))
    return lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin)[None if next(count) >= calls else ...]


NEARLY_RIGHT = {
    "NaN in float16 only": (in_float16(lambda x, cos, sin: torch.full_like(x, torch.nan)), "float16: NaN at token"),
    "times NaN": (lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin) * torch.nan, "float32: NaN at token"),
    "rows after the last full block of 64 not written": (full_blocks_of_64, "as in memory that was never written"),
    "one more axis": (lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin)[None], "it returned shape (1, 189, 128)"),
    "one more axis from the fourth call on": (later_with_an_axis_more(3), "it returned shape (1, 189, 128)"),
    "float16 rounded towards zero": (in_float16(towards_zero), "where one rounding allows"),
    "float32 off by 3e-5": (lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin) + 3e-5 * (x.dtype == torch.float32),
        "where one rounding allows 1e-05: work in float32"),
    "right result dropped": (dropped, "as in memory that was never written"),
    "one-hot input returned": (one_hot_unrotated, "the values are right, the pairs are not"),
    "a third channel touched": (a_third_channel, "the values are right, the pairs are not"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEARLY_RIGHT)
def test_what_is_nearly_right_is_rejected_for_its_fault(name):
    candidate, said = NEARLY_RIGHT[name]
    assert said in sc.examine(candidate, "neox")[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sign of sin flipped", "float32: it turns the other way: the sign of sin; off by"),
        ("cos and sin exchanged", "cos and sin are exchanged"),
        ("second half reads the first's result", "from the first ones' results, not from x; off by"),
        ("output de-interleaved", "it reads pairs 2p and 2p + 1, and writes them to p and p + R/2"),
        ("second half dropped", "in the second channels of the pairs x comes back as it was"),
        ("position off by one", "token 0, head 0 of x is turned by row 2 of the table, right is row 1"),
    ],
)
def test_a_known_mistake_is_named(name, said):
    assert said in sc.examine(sc.WRONG[name], sc.WRONG[name].claims)[1]


@pytest.mark.parametrize("mode", REFERENCES)
def test_a_first_half_that_was_overwritten_is_named(mode):
    fault = sc.examine(lambda *arguments: first_overwritten(mode, *arguments), mode)[1]
    assert "from the first ones' results, not from x" in fault


@pytest.mark.parametrize("kept", ["y", "table", "positions"])
def test_what_is_kept_from_the_first_call_is_seen(kept):
    first = {}

    def op(x, cos, sin, positions):
        if kept == "table":
            cos, sin = first.setdefault(x.dtype, (cos, sin))
        if kept == "positions":
            positions = first.setdefault(x.dtype, positions)
        y = rk.torch_rope_neox(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
        return first.setdefault(x.dtype, y) if kept == "y" else y

    assert not sc.check(op, "neox")


# --------------------------------------------------------------------------------------------------- never raises


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises(error):
    def candidate(x, cos, sin):
        raise error

    return candidate


def endless(x, cos, sin):
    return endless(x, cos, sin)


def shrinks_x(x, cos, sin):
    y = rk.torch_rope_neox(x, cos, sin)
    x.resize_(1, 1)
    return y


def changes_x_dtype(x, cos, sin):
    y = rk.torch_rope_neox(x, cos, sin)
    x.data = x.data.double()
    return y


def overwrites_cos(x, cos, sin):
    y = rk.torch_rope_neox(x, cos, sin)
    cos.zero_()
    return y


def no_rows_left(x, cos, sin):
    return rk.torch_rope_neox(x, cos, sin)[:0]


HOSTILE = {
    "NotImplementedError": raises(NotImplementedError("write me")),
    "SystemExit": raises(SystemExit(3)),
    "unprintable error": raises(Unprintable()),
    "error of many lines": raises(ValueError("\n".join("line" for _ in range(1000)))),
    "error without a text": raises(AssertionError()),
    "endless recursion": endless,
    "None": lambda x, cos, sin: None,
    "number": lambda x, cos, sin: 0.0,
    "list": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).tolist(),
    "numpy": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).cpu().numpy(),
    "tuple": lambda x, cos, sin: (rk.torch_rope_neox(x, cos, sin),),
    "x": lambda x, cos, sin: x,
    "scalar tensor": lambda x, cos, sin: x.sum(),
    "broadcastable row": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin)[:1],
    "transposed": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).T,
    "no rows": no_rows_left,
    "float64": lambda x, cos, sin: rk.torch_rope_neox(x.double(), cos, sin),
    "float32 always": lambda x, cos, sin: rk.torch_rope_neox(x.float(), cos, sin),
    "complex": lambda x, cos, sin: rk.torch_rope_neox(x.float(), cos, sin) + 0j,
    "integers": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).long(),
    "sparse": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).to_sparse(),
    "meta device": lambda x, cos, sin: rk.torch_rope_neox(x, cos, sin).to("meta"),
    "NaN": lambda x, cos, sin: torch.full_like(x, torch.nan),
    "infinite": lambda x, cos, sin: torch.full_like(x, torch.inf),
    "zeros": lambda x, cos, sin: torch.zeros_like(x),
    "uninitialised": lambda x, cos, sin: torch.empty_like(x),
    "shrinks x": shrinks_x,
    "changes x's dtype": changes_x_dtype,
    "overwrites cos": overwrites_cos,
    "takes one argument": lambda x: x,
    "takes five arguments": lambda a, b, c, d, e: a,
    "generator": lambda x, cos, sin: (yield x),
    "class": dict,
    "built-in without a signature": max,
    "not callable": 3,
    "nothing": None,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("convention", REFERENCES)
def test_hostile_candidates_are_rejected_in_a_sentence(name, convention, capsys):
    assert not sc.check(HOSTILE[name], convention)
    assert re.fullmatch(r"Wrong: .{10,230}\.", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "convention, options",
    [
        ("half", {}),
        (None, {}),
        ([], {}),
        (torch.ones(2), {}),
        ("neox", {"rope_dim": 4}),
        ("neox", {"rope_dim": 9}),
        ("neox", {"rope_dim": 4096}),
        ("neox", {"rope_dim": "8"}),
        ("neox", {"dtypes": ()}),
        ("neox", {"dtypes": ("float32",)}),
        ("neox", {"dtypes": torch.float32}),
    ],
)
def test_a_check_that_would_be_none_is_refused(convention, options, capsys):
    assert not sc.check(rk.torch_rope_neox, convention, **options)
    assert capsys.readouterr().out.startswith("Wrong: ")


def test_the_state_of_torch_is_restored():
    sc.check(HOSTILE["NotImplementedError"], "neox")
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        sc.check(rk.torch_rope_neox, "neox")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------------------------------- the notebook


def test_the_stubs_of_exercise_1_are_rejected():
    stubs = next(cell.source for cell in cells(NOTEBOOK, "code") if "def my_rope_neox" in cell.source)
    names = execute(NOTEBOOK, stubs)
    for name, convention in (("my_rope_neox", "neox"), ("my_rope_interleaved", "interleaved")):
        with pytest.raises(NotImplementedError):
            names[name](None, None, None)
        assert not sc.check(names[name], convention)


def test_worked_answer_1_passes_under_its_own_convention_only():
    names = execute(NOTEBOOK, worked_answers(NOTEBOOK)[0])
    for name, convention in (("my_rope_neox", "neox"), ("my_rope_interleaved", "interleaved")):
        assert sc.check(names[name], convention)
        assert not sc.check(names[name], OTHER[convention])


def test_every_worked_answer_runs():
    answers = worked_answers(NOTEBOOK)
    assert len(answers) == 3
    for answer in answers[1:]:
        assert "\nassert " in answer
        execute(NOTEBOOK, answer)


def test_the_printed_counts_are_what_the_checks_say():
    (text,) = [cell.outputs[0].text for cell in cells(NOTEBOOK, "code") if "faults that pass" in cell.source]
    grid = {name: [passes(f, f.claims) for passes in sc.CHECKS.values()] for name, f in sc.WRONG.items()}
    passing = [sum(column) for column in zip(*grid.values(), strict=True)]
    rights = [all(passes(f, name) for name, f in REFERENCES.items()) for passes in sc.CHECKS.values()]
    lines = [
        f"{check:18s}accepts what is right: {right}; faults that pass: {count:2d}"
        for check, right, count in zip(sc.CHECKS, rights, passing, strict=True)
    ]
    together = sum(all(passed[:-1]) for passed in grid.values())
    assert text.splitlines() == [*lines, f"{together} of {len(grid)} faults pass the first four together"]
