"""Settings and inputs that several test files share."""

import importlib
import inspect
import os
import pathlib
import re
import sys

# tensors are small and cores shared: threads that wait for one another would take most of the time
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tilelang
import torch

import rope_kernels

ROOT = pathlib.Path(__file__).parent.parent

# the notebooks' kernels are processes of their own, which pytest's pythonpath does not reach
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = ["c", pytest.param("cuda", marks=needs_cuda)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    """Where apply_rope runs: tensors on the CPU go through the C backend also beside a GPU."""
    return request.param


def build(factory, backend, *args, **kwargs):
    """Build for a named backend; outputs are arguments of the kernel, so that a test can poison and guard them."""
    options = (
        rope_kernels.C_BACKEND if backend == "c" else {"target": "cuda", "pass_configs": factory.cuda_pass_configs}
    )
    with tilelang.tvm.target.Target(options["target"]):  # the original: `func` keeps what it made for another target
        return tilelang.compile(factory.func.orig_func(*args, **kwargs), **options)


def copied_alone(factory, backend, tmp_path, monkeypatch):
    """Return the factory from a file of its text alone; on "c" with the one backend setting beside it."""
    lines = ["import tilelang", "import tilelang.language as T", inspect.getsource(factory)]
    if backend == "c":
        setting = re.search(r"^C_BACKEND = .*$", inspect.getsource(rope_kernels), re.M).group()
        lines += [setting, f"vars({factory.__name__}).update(C_BACKEND)"]
    (tmp_path / "copied.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "copied", raising=False)
    return getattr(importlib.import_module("copied"), factory.__name__)
