"""Judging a kernel that a reader wrote: it is built and run here, and its mistake is told by name where it has one.

What is right comes from the references in float64. The one entry is `faults`; it raises nothing on a wrong kernel.
"""

import contextlib
import dataclasses
import faulthandler
import inspect
import linecache
import logging
import os
import traceback
import types
import warnings

import chapter
import tilelang
import torch

import rope_kernels as rk

UNWRITTEN = 99.0  # lies in the output, and around it, before the kernel runs: no rotation of normal numbers gives it
GUARD = 16  # rows of it before and behind


@dataclasses.dataclass
class Case:
    """What a kernel is run on: rows of D channels, R of them rotated from `start` on, table row rows[i] for row i."""

    sizes: dict  # the factory's arguments, all but dtype
    lead: tuple  # x's shape without the channels
    D: int
    R: int
    rows: list
    mode: str = "neox"
    start: int = 0
    inverse: bool = False
    ids: list | None = None  # the kernel gathers its table rows by these; None: a table row for each row of x
    inplace: bool = False

    def rotate(self, x, cos, sin, rows=None, **other):
        """Return x (rows, D) rotated as `other` says, and else as this case asks, in float64."""
        mode, start, inverse = (other.get(name, getattr(self, name)) for name in ("mode", "start", "inverse"))
        cos, sin = (table[self.rows if rows is None else rows] for table in (cos, sin))
        return rk.torch_partial_rope(x, cos, -sin if inverse else sin, mode, start=start)


def written_by(answer):
    """Return the reader's function: that inside `@tilelang.jit`, if it is one."""
    return getattr(getattr(answer, "func", None), "orig_func", answer)


def foreign(function):
    """Name what a function takes from torch or from our file, or return None."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for name in [name for code in codes for name in code.co_names]:
        used = function.__globals__.get(name)
        module = getattr(used, "__module__", None) or getattr(used, "__name__", "")
        if module.split(".")[0] in ("torch", "rope_kernels"):
            return name
    return function.__name__ if function.__module__ == "rope_kernels" else None


def told(error, function):
    """Say an error in one line, with the last of the reader's own lines that led to it."""
    path = function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if "Compilation Failed" in str(error):
        return "the generated C does not compile: perhaps one of your names is a word of C, such as `signed` or `new`"
    words = [line for line in str(error).splitlines() if line.strip()] or [""]
    where = f", in the line `{linecache.getline(path, lines[-1]).strip()}`" if lines else ""
    return f"{type(error).__name__}: {words[0].strip()[:200]}{where}"


@contextlib.contextmanager
def silent():
    """Keep the compiler's own reports off the page: the verdict says what went wrong."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        os.dup2(kept, 2)
        os.close(kept), os.close(nowhere)


def build(answer, function, sizes, dtype, change=lambda program: program):
    """Build with the outputs as arguments, so that they can be guarded."""
    options = {"target": "cuda"} if chapter.DEVICE == "cuda" else dict(rk.C_BACKEND)
    options["pass_configs"] = (getattr(answer, "pass_configs", None) or {}) | options.get("pass_configs", {})
    with silent(), tilelang.tvm.target.Target(options["target"]):
        program = function(**sizes, dtype=dtype)
        return program if program is None else tilelang.compile(change(program), **options)


def dies(run):
    """Tell whether the process of a run ends: tried in a child, which leaves nothing behind."""
    if chapter.DEVICE == "cuda" or not hasattr(os, "fork"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in the parent: the child uses none
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        with contextlib.suppress(BaseException):
            run()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def span(name, chosen, of):
    """Say which rows or channels are chosen."""
    first, last = chosen[0], chosen[-1]
    if len(chosen) == 1:
        return f"{name} {first} of {of}"
    step = chosen[1] - first
    if chosen == list(range(first, last + 1, step)):
        return f"{name}s {first} … {last} of {of}" if step == 1 else f"{name}s {first}, {first + step} … {last} of {of}"
    return f"{len(chosen)} of {of} {name}s"


def named(case, y, x, cos, sin, near):
    """Say which known mistake gives this y, or return None."""
    channel, half, R = torch.arange(case.D), case.R // 2, case.R
    rotated = slice(case.start, case.start + R)
    other = "interleaved" if case.mode == "neox" else "neox"
    pairs = {"neox": "p and p + R/2", "interleaved": "2p and 2p + 1"}
    known = {
        "it turns the other way: the sign of sin": case.rotate(x, cos, sin, inverse=not case.inverse),
        f"it pairs the channels {pairs[other]}, the other convention": case.rotate(x, cos, sin, mode=other),
        "cos and sin are exchanged": case.rotate(x, sin, cos),
        "x comes back as it was" + (": write into x itself, in place" if case.inplace else ""): x,
    }
    for start in {0, case.D - R} - {case.start}:
        known[f"it rotates the channels from {start} on, not from {case.start}"] = case.rotate(x, cos, sin, start=start)
    order = channel.clone()  # pairs taken from the right places, and put where the other convention has them
    order[rotated] = case.start + torch.arange(R).view(2, half).T.flatten()
    order = order if case.mode == "neox" else order.argsort()
    moved = case.rotate(x, cos, sin)[:, order]
    known[f"it reads pairs {pairs[case.mode]}, and writes them to {pairs[other]}"] = moved
    right = near(y, case.rotate(x, cos, sin))
    pair = torch.arange(half) if case.mode == "neox" else 2 * torch.arange(half)
    second = torch.zeros(case.D, dtype=torch.bool)
    second[case.start + pair + (half if case.mode == "neox" else 1)] = True
    parts = {"": second | True, "second": second, "first": ~second}
    for part, columns in parts.items():
        for mistake, result in known.items():
            if near(y, result)[:, columns].all() and right[:, ~columns].all():
                return f"in the {part} channels of the pairs {mistake}" if part else mistake
    row = next(i for i, same in enumerate(right.all(1)) if not same)
    by_each = case.rotate(x[row].expand(len(cos), -1), cos, sin, rows=slice(None))
    for j in near(y[row], by_each).all(1).nonzero().flatten().tolist():
        if j != case.rows[row]:
            name = f"row {row}" if case.ids is None else f"token {row // case.lead[1]}, head {row % case.lead[1]}"
            return f"{name} of x is turned by row {j} of the table, right is row {case.rows[row]}"
    same = near(y, x).all(0)
    if same.any() and not right[:, same].all():
        return f"{span('channel', same.nonzero().flatten().tolist(), case.D)} come back as they were"
    return None


def judge(case, dtype, y, x, cos, sin):
    """Yield what is wrong with a result y for x, both in float64: the most telling first."""
    if (y == UNWRITTEN).any():
        rows = (y == UNWRITTEN).all(1).nonzero().flatten().tolist()
        columns = (y == UNWRITTEN).all(0).nonzero().flatten().tolist()
        at = (y == UNWRITTEN).nonzero()[0].tolist()
        tail = " (the tail)" if rows and rows[-1] == len(x) - 1 and rows[0] > 0 else ""
        which = span("row", rows, len(x)) + tail if rows else span("channel", columns, case.D) if columns else f"y{at}"
        yield f"nothing was written to {which}"
    right = case.rotate(x, cos, sin)
    if dtype == "float32":
        off = 1 - ((y - right).abs() <= 5e-6).double().mean()
    else:  # once through float32, as the kernel computes, or once in all: nearly always the same
        off = (y != right.half().double()).double().mean()
    if off <= (0 if dtype == "float32" else 0.01):
        return

    def near(a, b):
        return (a - b).abs() <= 2e-2

    wrong = ~near(y, right)
    if not wrong.any():
        yield f"{off:.0%} of the elements are rounded in the wrong place: compute in float32, round once at the store"
    yield named(case, y, x, cos, sin, near)
    row, channel = wrong.nonzero()[0].tolist()
    columns, rows = (wrong.any(axis).nonzero().flatten().tolist() for axis in (0, 1))
    only = (
        f"only {span('channel', columns, case.D)} are wrong, "
        if len(columns) < case.D
        else f"only {span('row', rows, len(x))} are wrong, "
        if len(rows) < len(x)
        else ""
    )
    at = [row, channel] if len(case.lead) == 1 else [*divmod(row, case.lead[1]), channel]
    yield f"{only}first {at}: got {y[row, channel]:.4g}, right is {right[row, channel]:.4g}"


def run(case, dtype, answer, function):
    """Build and run a kernel on one case, and yield what is wrong with it."""
    try:
        kernel = build(answer, function, case.sizes, dtype)
    except (Exception, SystemExit) as error:
        yield f"it does not build: {told(error, function)}"
        return
    if kernel is None:
        yield "the factory returns nothing: end it with `return rope`"
        return
    generator, n = torch.Generator().manual_seed(len(case.rows)), len(case.rows)
    angle = 6 * torch.rand(case.sizes.get("P", n), case.R // 2, generator=generator, dtype=torch.float64)
    kept = getattr(torch, dtype)
    given = [torch.randn(n, case.D, generator=generator, dtype=torch.float64).to(kept)]
    given += [table.to(kept if case.ids is None else torch.float32) for table in (angle.cos(), angle.sin())]
    written = torch.full((n + 2 * GUARD, case.D), UNWRITTEN, dtype=kept)
    if case.inplace:
        written[GUARD:-GUARD] = given[0]
    written = written.to(chapter.DEVICE)
    y = written[GUARD:-GUARD].view(*case.lead, case.D)
    arguments = [given[0].view_as(y), *given[1:]]
    if case.ids is not None:
        arguments.append(torch.tensor(case.ids, dtype=torch.int32))
    before = [t.to(chapter.DEVICE) for t in arguments]
    arguments = [t.clone() for t in before]
    arguments = [y, *arguments[1:]] if case.inplace else [*arguments, y]
    if len(kernel.prim_func.params) != len(arguments):
        if case.inplace and len(kernel.prim_func.params) == len(arguments) + 1:
            yield "it has an output of its own, a new tensor: write into x itself, in place"
        yield f"the kernel has {len(kernel.prim_func.params)} tensors, the task names {len(arguments)}"
        return
    try:
        with silent():
            if dies(lambda: kernel(*arguments)):
                yield "it ended its process: it writes outside its own arrays"
                return
            kernel(*arguments)
            x, cos, sin, result = (t.double().cpu() for t in (before[0].view(n, -1), *before[1:3], written))
    except (Exception, SystemExit) as error:
        yield f"it raised {told(error, function)}"
        return
    if (result[:GUARD] != UNWRITTEN).any() or (result[-GUARD:] != UNWRITTEN).any():
        yield "it writes past the last row: the tail is not guarded"
    for name, after, was in list(zip(("x", "cos", "sin", "ids"), arguments, before, strict=False))[case.inplace :]:
        if not torch.equal(after, was):
            yield f"it writes into {name}"
    yield from judge(case, dtype, result[GUARD:-GUARD], x, cos, sin)


def faults(answer, cases):
    """Yield what is wrong with a reader's factory, tried on each case in float16 and in float32."""
    function = written_by(answer)
    if not inspect.isfunction(function):
        yield f"it takes the factory itself, got {type(answer).__name__}"
        return
    if name := foreign(function):
        yield f"it uses {name}, and the task is to write the kernel yourself"
        return
    for case in cases:
        for dtype in ("float16", "float32"):
            what = ", ".join(f"{name}={value}" for name, value in case.sizes.items())
            for fault in run(case, dtype, answer, function):
                if fault is not None:
                    yield f"with {what}, {dtype}: {fault}"


def counting(program):
    """Let each store to a program's last tensor add one to what lies there."""
    tirx, y = tilelang.tvm.tirx, program.buffer_map[program.params[-1]]

    def count(store):
        if store.buffer.same_as(y):
            return tirx.BufferStore(y, tirx.BufferLoad(y, store.indices) + 1, store.indices)

    return program.with_body(tirx.stmt_functor.ir_transform(program.body, None, count, ["tirx.BufferStore"]))


def written_twice(answer, case):
    """Say which channels a right kernel writes more than once, or return None."""
    kernel = build(answer, written_by(answer), case.sizes, "float32", counting)
    x, one = torch.ones(len(case.rows), case.D), torch.ones(len(case.rows), case.R // 2)
    arguments = [t.to(chapter.DEVICE) for t in (x, one, 0 * one, 0 * x)]  # what T.copy writes is 1 as well
    kernel(*arguments)
    twice = (arguments[-1] > 1).any(0).nonzero().flatten().tolist()
    return f"{span('channel', twice, case.D)} are written more than once, on a GPU in any order" if twice else None
