"""Settings and inputs that several test files share."""

import os
import pathlib

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent

# the notebooks' kernels are processes of their own, which pytest's pythonpath does not reach
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20)
