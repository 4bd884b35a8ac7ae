"""The checks of kernels that readers write: right ones pass, however written; planted mistakes are called by name."""

import linecache
import os
import textwrap

import exercises as ex
import pytest
import tilelang
import tilelang.language as T
import torch

import rope_kernels as rk

PARAMETERS = """
        x: T.Tensor((S, R), dtype),
        cos: T.Tensor((S, half), dtype),
        sin: T.Tensor((S, half), dtype),
        y: T.Tensor((S, R), dtype),"""
ALL_ROWS = """\
@tilelang.jit(out_idx=[3])
def my_rope({arguments}, dtype="float16", threads=256):
    half = R // 2

    @T.prim_func
    def rope({parameters}
    ):
{body}

    return rope
"""
LAUNCH = {"03_4": "S, R", "03_5": "S, D, R, start=0, inverse=False", "09_4": "tokens, heads, R, P"}
WIDE = PARAMETERS.replace("(S, R)", "(S, D)")
INPLACE = """
        x: T.Tensor((tokens, heads, R), dtype),
        cos: T.Tensor((P, half), "float32"),
        sin: T.Tensor((P, half), "float32"),
        ids: T.Tensor((tokens,), "int32"),"""


def factory(text):
    """Return the factory that a text defines; TileLang reads the text where Python keeps it."""
    name = f"<kernel {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {"tilelang": tilelang, "T": T, "torch": torch, "rk": rk}
    exec(compile(text, name, "exec"), names)
    return names["my_rope"]


def written(name, body):
    parameters = {"03_5": WIDE, "09_4": INPLACE}.get(name, PARAMETERS)
    arguments = LAUNCH.get(name, "S, R, blk_s=16")
    return factory(
        ALL_ROWS.format(arguments=arguments, parameters=parameters, body=textwrap.indent(body.strip("\n"), " " * 8))
    )


def edited(text, *changes):
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


NAIVE = """
with T.Kernel(S, threads=threads) as i:
    for p in T.Parallel(half):
        a = T.cast(x[i, p], "float32")
        b = T.cast(x[i, p + half], "float32")
        c = T.cast(cos[i, p], "float32")
        s = T.cast(sin[i, p], "float32")
        y[i, p] = T.cast(a * c - b * s, dtype)
        y[i, p + half] = T.cast(b * c + a * s, dtype)
"""
BY_CHANNEL = """
with T.Kernel(S, threads=threads) as i:
    for j in T.Parallel(R):
        p = T.if_then_else(j < half, j, j - half)
        turned = T.if_then_else(j < half, -x[i, p + half], x[i, p])
        y[i, j] = T.cast(x[i, j], "float32") * cos[i, p] + T.cast(turned, "float32") * sin[i, p]
"""
PARTIAL = """
with T.Kernel(S, threads=threads) as i:
    for p in T.Parallel(half):
        a = T.cast(x[i, start + p], "float32")
        b = T.cast(x[i, start + p + half], "float32")
        c = T.cast(cos[i, p], "float32")
        s = T.cast(sin[i, p], "float32") * (-1.0 if inverse else 1.0)
        y[i, start + p] = T.cast(a * c - b * s, dtype)
        y[i, start + p + half] = T.cast(b * c + a * s, dtype)
    for j in T.Parallel(D - R):
        k = T.if_then_else(j < start, j, j + R)
        y[i, k] = x[i, k]
"""
COPIED_FIRST = """
with T.Kernel(S, threads=threads) as i:
    for j in T.Parallel(D):
        if j < start or j >= start + R:
            y[i, j] = x[i, j]
    for p in T.Parallel(half):
        a, b = T.cast(x[i, p + start], "float32"), T.cast(x[i, p + start + half], "float32")
        c, s = T.cast(cos[i, p], "float32"), T.cast(sin[i, p], "float32")
        if inverse:
            y[i, p + start] = T.cast(a * c + b * s, dtype)
            y[i, p + start + half] = T.cast(b * c - a * s, dtype)
        else:
            y[i, p + start] = T.cast(a * c - b * s, dtype)
            y[i, p + start + half] = T.cast(b * c + a * s, dtype)
"""
ALL_COPIED = """
with T.Kernel(S, threads=threads) as i:
    for j in T.Parallel(D):
        y[i, j] = x[i, j]
""" + edited(PARTIAL[: PARTIAL.index("    for j")], ("\nwith T.Kernel(S, threads=threads) as i:\n", ""))
BLOCKED = """
with T.Kernel(S // blk_s, threads=threads) as block:
    x_tile = T.alloc_shared((blk_s, R), dtype, scope="shared")
    cos_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
    sin_tile = T.alloc_shared((blk_s, half), dtype, scope="shared")
    T.copy(x[block * blk_s, 0], x_tile)
    T.copy(cos[block * blk_s, 0], cos_tile)
    T.copy(sin[block * blk_s, 0], sin_tile)
    for i, p in T.Parallel(blk_s, half):
        a = T.cast(x_tile[i, p], "float32")
        b = T.cast(x_tile[i, p + half], "float32")
        c = T.cast(cos_tile[i, p], "float32")
        s = T.cast(sin_tile[i, p], "float32")
        y[block * blk_s + i, p] = T.cast(a * c - b * s, dtype)
        y[block * blk_s + i, p + half] = T.cast(b * c + a * s, dtype)
"""
FILLED_BY_HAND = edited(
    BLOCKED,
    ("T.copy(x[block * blk_s, 0], x_tile)", "for i, j in T.Parallel(blk_s, R):"),
    ("    T.copy(cos[block * blk_s, 0], cos_tile)", "        x_tile[i, j] = x[block * blk_s + i, j]"),
    ("T.copy(sin[block * blk_s, 0], sin_tile)", "T.copy(cos[block * blk_s, 0], cos_tile)"),
    ("    for i, p in", "    T.copy(sin[block * blk_s, 0], sin_tile)\n    for i, p in"),
)
UNSTAGED = edited(
    NAIVE,
    ("T.Kernel(S, threads=threads) as i", "T.Kernel(S // blk_s, threads=threads) as block"),
    ("for p in T.Parallel(half)", "for j, p in T.Parallel(blk_s, half)"),
    ("[i,", "[block * blk_s + j,"),
)
TILES_UNREAD = edited(
    BLOCKED,
    ("= T.cast(x_tile[", "= T.cast(x[block * blk_s + "),
    *[(f"{name}_tile[i", f"{name}[block * blk_s + i") for name in ("cos", "sin")],
)
ANY_S = edited(BLOCKED, ("S // blk_s", "T.ceildiv(S, blk_s)"))
GUARDED = edited(
    BLOCKED,
    ("S // blk_s", "(S + blk_s - 1) // blk_s"),
    ("        y[", "        if block * blk_s + i < S:\n            y["),
)
ADJACENT = edited(
    BLOCKED,
    ("x_tile[i, p]", "x_tile[i, 2 * p]"),
    ("x_tile[i, p + half]", "x_tile[i, 2 * p + 1]"),
    ("+ i, p]", "+ i, 2 * p]"),
    ("+ i, p + half]", "+ i, 2 * p + 1]"),
)
BY_LANE = """
with T.Kernel(S // blk_s, threads=threads) as block:
    for i, j in T.Parallel(blk_s, R):
        row, p = block * blk_s + i, j // 2
        partner = T.cast(x[row, j + 1 - 2 * (j % 2)], "float32")
        turned_sin = T.cast(sin[row, p], "float32") * T.cast(2 * (j % 2) - 1, "float32")
        y[row, j] = T.cast(T.cast(x[row, j], "float32") * cos[row, p] + partner * turned_sin, dtype)
"""
VECTOR = """
with T.Kernel(S // blk_s, threads=threads) as block:
    for i, v in T.Parallel(blk_s, R // 8):
        row = block * blk_s + i
        x_vec = T.alloc_local((8,), dtype)
        y_vec = T.alloc_local((8,), dtype)
        for k in T.vectorized(8):
            x_vec[k] = x[row, 8 * v + k]
        for k in T.unroll(4):
            a, b = T.cast(x_vec[2 * k], "float32"), T.cast(x_vec[2 * k + 1], "float32")
            c, s = T.cast(cos[row, 4 * v + k], "float32"), T.cast(sin[row, 4 * v + k], "float32")
            y_vec[2 * k] = T.cast(a * c - b * s, dtype)
            y_vec[2 * k + 1] = T.cast(a * s + b * c, dtype)
        for k in T.vectorized(8):
            y[row, 8 * v + k] = y_vec[k]
"""
THROUGH_A_TILE = (
    edited(
        ADJACENT,
        ("    T.copy(x[", '    y_tile = T.alloc_shared((blk_s, R), dtype, scope="shared")\n    T.copy(x['),
        ("y[block * blk_s + i, ", "y_tile[i, "),
    )
    + "    T.copy(y_tile, y[block * blk_s, 0])\n"
)
BY_TOKEN = """
with T.Kernel(tokens, threads=threads) as t:
    for h, p in T.Parallel(heads, half):
        a = T.cast(x[t, h, p], "float32")
        b = T.cast(x[t, h, p + half], "float32")
        c = cos[ids[t], p]
        s = sin[ids[t], p]
        x[t, h, p] = T.cast(a * c - b * s, dtype)
        x[t, h, p + half] = T.cast(b * c + a * s, dtype)
"""
BY_HEAD = """
with T.Kernel(heads, tokens, threads=threads) as (h, t):
    row = ids[t]
    for p in T.Parallel(half):
        a, b = T.cast(x[t, h, p], "float32"), T.cast(x[t, h, half + p], "float32")
        x[t, h, p] = a * cos[row, p] - b * sin[row, p]
        x[t, h, half + p] = a * sin[row, p] + b * cos[row, p]
"""
RIGHT = {
    "03_4": (NAIVE, BY_CHANNEL),
    "03_5": (PARTIAL, COPIED_FIRST),
    "04_5": (BLOCKED, FILLED_BY_HAND),
    "04_6": (ANY_S, GUARDED),
    "05_4": (ADJACENT, BY_LANE),
    "05_5": (VECTOR, THROUGH_A_TILE),
    "09_4": (BY_TOKEN, BY_HEAD),
}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, bodies in RIGHT.items() for body in bodies])
def test_right_kernels_are_accepted_however_they_are_written(name, body):
    assert getattr(ex, f"check_{name}").fault(written(name, body)) is None


OTHER_SIGN = ("- b * s", "+ b * s"), ("+ a * s", "- a * s")
HALF_ARITHMETIC = [('"float32"', "dtype")]
LAST_LINE = "        y[i, p + half] = T.cast(b * c + a * s, dtype)\n"
only_in_c = pytest.mark.skipif(torch.cuda.is_available(), reason="what the C compiler says")
WRONG = {  # what is planted in a right kernel, and what the check must say
    "03_4": [
        (NAIVE, OTHER_SIGN, "it turns the other way: the sign of sin"),
        (NAIVE, OTHER_SIGN[1:], "in the second channels of the pairs it turns the other way"),
        (NAIVE, [("[i, p]", "[i, 2 * p]"), ("[i, p + half]", "[i, 2 * p + 1]"), ("cos[i, 2 * p]", "cos[i, p]"),
                 ("sin[i, 2 * p]", "sin[i, p]")], "it pairs the channels 2p and 2p + 1, the other convention"),
        (NAIVE, [("y[i, p]", "y[i, 2 * p]"), ("y[i, p + half]", "y[i, 2 * p + 1]")], "writes them to 2p and 2p + 1"),
        (NAIVE, [("cos[i,", "cos[0,"), ("sin[i,", "sin[0,")], "row 1 of x is turned by row 0 of the table"),
        (NAIVE, [("cos[i,", "cos[i + 1,"), ("sin[i,", "sin[i + 1,")], "row 0 of x is turned by row 1 of the table"),
        (NAIVE, [("cos[i", "tmp[i"), ("sin[i", "cos[i"), ("tmp[i", "sin[i")], "cos and sin are exchanged"),
        (NAIVE, [(LAST_LINE, "")], "nothing was written to channels 32 … 63 of 64"),
        (NAIVE, [("T.cast(b * c + a * s, dtype)", "x[i, p + half]")], "second channels of the pairs x comes back"),
        (NAIVE, HALF_ARITHMETIC, "rounded in the wrong place"),
        (NAIVE, [("b * c + a * s", 'T.cast(b * c + a * s, "float16")')], "float32: "),
        (NAIVE, [("Kernel(S,", "Kernel(S - 1,")], "nothing was written to row 4 of 5 (the tail)"),
        (NAIVE, [("Kernel(S,", "Kernel(half,")], "nothing was written to rows 48 … 49 of 50 (the tail)"),
        (NAIVE, [("y[i, p]", "x[i, p]")], "it writes into x"),
        (NAIVE, [("a * c", "a * a")], "only channels 0 … 31 of 64 are wrong, first [0, 0]: got "),
        (NAIVE, [("b = T", "q = T")], "NameError: name 'b' is not defined, in the line `y[i, p] = T.cast(a * c"),
        (NAIVE, [("c = T", "signed = T"), ("c -", "signed -"), ("c +", "signed +")], "a word of C"),
        (NAIVE, [("x[i, p]", "rk.torch_rope_neox(x, cos, sin)[i, p]")], "it uses rk, and the task is to"),
        (NAIVE, [("T.cast(a *", "torch.cos(a *")], "it uses torch, and the task is to write the kernel yourself"),
    ],
    "03_5": [
        (PARTIAL, [("(-1.0 if inverse else 1.0)", "1.0")], "inverse=True, float16: it turns the other way"),
        (PARTIAL, [("start + p", "p"), ("j < start", "j < 0")], "it rotates the channels from 0 on, not from 16"),
        (PARTIAL, [("D - R", "start")], "nothing was written to channels 80 … 95 of 96"),
        (PARTIAL, [("x[i, k]", "0")], "are wrong, first [0, 0]: got 0"),
        (ALL_COPIED, [], "channels 16 … 79 of 96 are written more than once"),
        (ALL_COPIED, [("    for j in T.Parallel(D):\n        y[i, j] = x[i, j]", "    T.copy(x[i, 0:D], y[i, 0:D])")],
         "channels 16 … 79 of 96 are written more than once"),
    ],
    "04_5": [
        (UNSTAGED, [], "x, cos and sin should lie in shared memory: it has 0 arrays there"),
        (TILES_UNREAD, [], "a thread loads 64 bytes, 32 of them into shared memory"),
        (BLOCKED, [("sin_tile[i", "sin[block * blk_s + i")], "a thread loads 40 bytes, 32 of them into shared memory"),
        (BLOCKED, [("T.copy(x[block * blk_s, 0]", "T.copy(x[block, 0]")], "wrong, first [16, 0]"),
        (BLOCKED, [("cos[block * blk_s", "cos[block"), ("sin[block * blk_s", "sin[block")], "row 16 of x is turned by"),
        (BLOCKED, [("s = T.cast(sin_tile[i", "s = T.cast(sin_tile[0")], "only 30 of 32 rows are wrong"),
    ],
    "04_6": [
        (BLOCKED, [], "S=50, R=64, blk_s=16, float16: nothing was written to rows 48 … 49 of 50 (the tail)"),
        (TILES_UNREAD, [("S // blk_s", "T.ceildiv(S, blk_s)")], "32 of them into shared memory"),
        (ANY_S, OTHER_SIGN, "it turns the other way"),
        (ANY_S, [("sin[block * blk_s", "sin[0")], "only rows 16 … 49 of 50 are wrong"),
        (UNSTAGED, [("S // blk_s", "T.ceildiv(S, blk_s)")], "should lie in shared memory"),
    ],
    "05_4": [
        (BLOCKED, [], "it pairs the channels p and p + R/2, the other convention"),
        (ADJACENT, [("+ i, 2 * p]", "+ i, p]"), ("+ i, 2 * p + 1]", "+ i, p + half]")], "writes them to p and p + R/2"),
        (ADJACENT, OTHER_SIGN, "it turns the other way"),
        (ADJACENT, [("cos_tile[i, p]", "cos_tile[i, p // 2]")], "wrong"),
    ],
    "05_5": [
        (ADJACENT, [], "right, but in its CUDA a store moves 2 bytes, not 16"),
        (VECTOR, [("- b * s", "+ b * s")], "in the first channels of the pairs it turns the other way"),
        (VECTOR, [("y[row, 8 * v + k] = y_vec[k]", "y[row, 8 * v + k] = x_vec[k]")], "x comes back as it was"),
        (VECTOR, [("4 * v + k", "4 * v")], "wrong"),
    ],
    "09_4": [
        (BY_TOKEN, [("ids[t]", "t")], "token 0, head 0 of x is turned by row 0 of the table, right is row 19"),
        (BY_TOKEN, [("ids[t]", "ids[h]")], "token 0, head 1 of x is turned by row 7 of the table, right is row 19"),
        (BY_TOKEN, [("T.Parallel(heads,", "T.Parallel(1,")], "only 9 of 12 rows are wrong, first [0, 1, 0]"),
        (BY_TOKEN, [("x[t, h, p] =", "a ="), ("x[t, h, p + half] =", "b =")], "x comes back as it was: write into"),
        (BY_TOKEN, [("half)", "half // 2)")], "32 of 64 channels come back as they were"),
    ],
}  # fmt: skip
PLANTED = [
    pytest.param(name, body, changes, words, marks=[only_in_c] if words == "a word of C" else [])
    for name, wrong in WRONG.items()
    for body, changes, words in wrong
]


@pytest.mark.parametrize(("name", "body", "changes", "words"), PLANTED)
def test_planted_mistakes_are_called_by_name(name, body, changes, words):
    fault = getattr(ex, f"check_{name}").fault(written(name, edited(body, *changes)))
    assert words in fault and "\n" not in fault


def test_a_gap_is_no_mistake(capsys):
    for name in RIGHT:
        assert not getattr(ex, f"check_{name}")(written(name, "with T.Kernel(1) as i:\n    ..."))
        assert capsys.readouterr().out == "Not written yet: put your lines in the place of `...`.\n"


def test_what_is_no_kernel_of_the_reader_s_own_is_refused():
    fault = ex.check_03_4.fault
    assert fault(rk.rope_neox_naive) == "it uses rope_neox_naive, and the task is to write the kernel yourself"
    assert fault(lambda S, R, dtype: rk.rope_neox_naive.func.orig_func(S, R, dtype)).startswith("it uses rk, and")
    assert fault(rk.rope_neox_naive(5, 64)) == "it takes the factory itself, got _Kernel"
    assert fault(None) == "it takes the factory itself, got NoneType"
    assert fault(lambda S, R, dtype: None).endswith("the factory returns nothing: end it with `return rope`")
    assert "unexpected keyword argument" in fault(lambda rows, R, dtype: None)


def test_a_new_tensor_where_in_place_was_asked():
    body = edited(BY_TOKEN, ("x[t, h, p] =", "y[t, h, p] ="), ("x[t, h, p + half] =", "y[t, h, p + half] ="))
    own_output = INPLACE + "\n        y: T.Tensor((tokens, heads, R), dtype),"
    text = textwrap.indent(body.strip("\n"), " " * 8)
    answer = factory(ALL_ROWS.format(arguments=LAUNCH["09_4"], parameters=own_output, body=text))
    assert "an output of its own, a new tensor: write into x itself, in place" in ex.check_09_4.fault(answer)


def test_an_unguarded_tail_is_seen_where_tilelang_s_own_guards_are_off():
    answer = written("04_6", ANY_S)
    answer.pass_configs = {"tl.disable_safe_memory_legalize": True}
    assert "it writes past the last row: the tail is not guarded" in ex.check_04_6.fault(answer)


@pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="tried in a child process on a CPU")
def test_a_kernel_that_ends_its_process_ends_only_a_child():
    body = """
with T.Kernel(S // blk_s, threads=threads) as block:
    tile = T.alloc_shared((blk_s, R), dtype, scope="shared")
    for i, p in T.grid(blk_s, R):
        tile[100000 * i + block, p] = x[block * blk_s + i, p]
    for i, p in T.grid(blk_s, R):
        y[block * blk_s + i, p] = tile[100000 * i + block, p]
"""
    assert "it ended its process" in ex.check_04_5.fault(written("04_5", body))
