"""What the notebooks share: the path to rope_kernels.py, figures with alt text, generated CUDA, recorded figures."""

import importlib.util
import inspect
import io
import json
import pathlib
import platform
import re
import sys
import warnings

from IPython import get_ipython
from IPython.display import Image, Markdown, display

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # rope_kernels.py lies one folder up


class NotReady(ImportError):
    """What this machine lacks: a notebook shows the sentence alone, and later cells that miss a name point to it."""

    def __init__(self, sentence):
        super().__init__(sentence)
        if shell := get_ipython():
            shell.set_custom_exc((NameError,), self.later)

    def _render_traceback_(self):
        return [str(self)]

    def later(self, shell, kind, error, frames, tb_offset=None):
        shell._showtraceback(kind, error, [f"{error}, since an earlier cell stopped: its message says why."])


missing = [name for name in ("torch", "tilelang", "matplotlib") if importlib.util.find_spec(name) is None]
if missing:
    raise NotReady(f"This notebook needs {', '.join(missing)}: run `pip install -r requirements.txt` first.")

warnings.filterwarnings("ignore", message="IProgress not found")  # tilelang asks for progress bars it never shows

import matplotlib.pyplot as plt  # noqa: E402
import PIL.Image  # noqa: E402
import tilelang  # noqa: E402
import torch  # noqa: E402
from tilelang.contrib import cc  # noqa: E402

import rope_kernels  # noqa: E402

tilelang.set_log_level("WARNING")  # compiling logs times, which no two runs share
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = {} if DEVICE == "cuda" else rope_kernels.C_BACKEND  # what `@tilelang.jit` needs to be told on this machine


def _no_compiler():
    raise NotReady("This cell builds a kernel, which takes a CUDA device or a C++ compiler (for instance g++).")


if DEVICE == "cpu" and cc.get_cplus_compiler() is None:
    cc.get_cplus_compiler = _no_compiler  # TileLang asks it before each build

# Okabe and Ito's colours, told apart by readers with any colour vision
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999",
)  # fmt: skip
plt.rcParams.update(
    {
        "figure.facecolor": "white",
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "font.size": 11,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, SKY], marker=list("os^Dv*")),
    }
)


def versions():
    """Print what this notebook runs on."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU (C backend)"
    loaded = [sys.modules[name] for name in ("torch", "tilelang", "transformers") if name in sys.modules]
    said = ", ".join(f"{module.__name__} {module.__version__}" for module in loaded)
    print(f"Python {platform.python_version()}, {said}; {device}")


def show(fig, alt):
    """Display a figure once, with a text for readers who can't see it; 128 colours keep the notebook small."""
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png")
    plt.close(fig)
    PIL.Image.open(drawn).convert("RGB").quantize(128, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
    display(Image(small.getvalue(), alt=alt))


def table(header, rows):
    """Display rows of cells as a table."""
    lines = [header, ["---"] * len(header), *rows]
    display(Markdown("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)))


def cuda_text(factory, *args, arch="sm_90", **kwargs):
    """Return all the CUDA that TileLang generates for such a GPU; no GPU is needed."""
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    settings = tilelang.tvm.transform.PassContext(config=getattr(factory, "cuda_pass_configs", None) or {})
    with target, settings:  # orig_func, because the factory would keep what was made for a GPU that isn't here
        return tilelang.lower(factory.func.orig_func(*args, **kwargs), target=target).kernel_source


def cuda_source(factory, *args, **kwargs):
    """Return the CUDA kernel alone, without what is included before it."""
    source = cuda_text(factory, *args, **kwargs)
    return source[source.rindex('extern "C"') :].rstrip() + "\n"


def accesses(source, names=("x", "cos", "sin", "y")):
    """List the accesses to global memory in generated CUDA: (tensor, "load" or "store", bytes a thread moves, index).

    One for each access in the text, a loop body once; plain indexing counts as 2 bytes.
    """
    widths = {"uint4": 16, "float4": 16, "uint2": 8, "float2": 8, "uint1": 4, "int": 4}
    # either *(uint4*)(x + …) or x[…]; TileLang renames cos and sin to cos_1 and sin_1
    pattern = re.compile(rf"(?:\*\((\w+)\*\)\(({'|'.join(names)})(?:_1)? \+ |\b({'|'.join(names)})(?:_1)?\[)")
    found = []
    for line in source.splitlines()[1:]:
        for match in pattern.finditer(line):
            depth, end = 1, match.end()
            while depth:  # up to the bracket that closes the index
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(line[end], 0)
                end += 1
            kind = "load" if line[: match.start()].strip() else "store"
            index = line[match.end() : end - 1].removeprefix("(")  # brackets surround every sum
            index = index[: len(index) - (index.count(")") - index.count("("))]
            found.append((match[2] or match[3], kind, widths.get(match[1], 2), index))
    return found


def global_accesses(source, names=("x", "cos", "sin", "y")):
    """Count them: {(tensor, "load" or "store"): {bytes: count}}."""
    counts = {}
    for tensor, kind, width, _ in accesses(source, names):
        widths = counts.setdefault((tensor, kind), {})
        widths[width] = widths.get(width, 0) + 1
    return counts


def short_source(factory, *args, **kwargs):
    """Return the CUDA kernel with `t` for the thread's number in its block, and `block` for the block's."""
    source = cuda_source(factory, *args, **kwargs)
    return source.replace("((int)threadIdx.x)", "t").replace("((int)blockIdx.x)", "block")


def addresses(source, index, block=0, bytes_an_element=2):
    """Evaluate an index of a short source: the first byte that each lane touches, a row of 32 for each request."""
    names = {"t": torch.arange(threads_at_work(source)[0]), "block": block}
    for loop, steps in re.findall(r"for \(int (\w+) = 0; \w+ < (\d+);", source):
        if re.search(rf"\b{loop}\b", index):
            names[loop] = torch.arange(int(steps)).unsqueeze(1)
    # integer arithmetic means the same in C and in Python
    return (bytes_an_element * eval(index, names)).reshape(-1, 32)


UNWRITTEN = "Not written yet: put your lines in the place of `...`"


class Verdict:
    """What a check found, printed in one line: true if there is no fault, and no second line as a cell's value."""

    def __init__(self, fault):
        self.fault = fault
        print("Right." if fault is None else f"{fault}." if fault == UNWRITTEN else f"Wrong: {fault}.")

    def __bool__(self):
        return self.fault is None

    def _ipython_display_(self):
        """Show nothing: the verdict has been printed."""


def threads_at_work(source):
    """Return how many threads of a block work, and how many there are, from a kernel's generated CUDA."""
    started = int(re.search(r"__launch_bounds__\((\d+)", source)[1])
    guard = re.search(r"(?:threadIdx\.x\)|\(t) < (\d+)", source)
    return int(guard[1]) if guard else started, started


def body(factory):
    """Return the text of a kernel from `with T.Kernel` on."""
    text = inspect.getsource(factory.func.orig_func)
    return text[text.index("        with T.Kernel") : text.index("    return rope")].rstrip()


class Recorded:
    """The measurements of one GPU run, as notebooks/measurements/measure.py wrote them."""

    def __init__(self, name="h200.json"):
        self.data = json.loads((HERE / "measurements" / name).read_text())
        self.provenance = self.data["provenance"]

    def label(self):
        """One line that says where and when the figures come from."""
        return "{gpu}, driver {driver}, CUDA {cuda}, torch {torch}, tilelang {tilelang}, {date}".format(
            **self.provenance
        )

    def find(self, kind="records", **wanted):
        """Return the one record whose fields equal `wanted`."""
        found = [r for r in self.data[kind] if all(r[key] == value for key, value in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} {kind} match {wanted}")
        return found[0]
