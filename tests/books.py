"""Reading the notebooks: their cells, their prose, and the worked answers of their exercises."""

import linecache
import re

import nbformat
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def prose(path):
    return "\n\n".join(cell.source for cell in cells(path, "markdown"))


def worked_answers(path):
    """Return the ```py blocks folded under a summary that says so, in the order of the exercises."""
    folded = re.findall(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", prose(path), re.S)
    blocks = [
        "\n".join(re.findall(r"^```py\n(.*?)^```", body, re.M | re.S)) for name, body in folded if "nswer" in name
    ]
    return [block for block in blocks if block]


def execute(path, code):
    """Execute code after the notebook's imports, and return what it defines."""
    names = {"display": lambda *shown, **options: None}
    for text in (cells(path, "code")[0].source, code):
        name = f"<cell {hash(text)}>"  # TileLang reads a kernel's text where Python keeps it
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), names)
    return names
