"""Guards over the notebooks: what nbval does not look at, and the worked answers of the exercises."""

import inspect
import pathlib
import re

import nbclient
import nbformat
import pytest
from books import NOTEBOOKS, cells, prose, worked_answers
from conftest import ROOT

import rope_kernels as rk

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def run(notebook, **options):
    where = {"metadata": {"path": ROOT / "notebooks"}}
    nbclient.NotebookClient(notebook, resources=where, shutdown_kernel="immediate", **options).execute()


def outside_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def test_notebooks_are_numbered_without_gap():
    assert [int(path.stem[:2]) for path in NOTEBOOKS] == list(range(1, len(NOTEBOOKS) + 1))
    assert NOTEBOOKS


@every_notebook
def test_the_file_is_valid_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"


@every_notebook
def test_a_notebook_that_is_opened_and_saved_stays_as_it_is(path):
    """JupyterLab writes a file so, with the language described in full; only Python's version may differ."""
    notebook = nbformat.read(path, as_version=4)
    assert path.read_text() == nbformat.writes(notebook) + "\n"
    language = dict(notebook.metadata.language_info)
    assert re.fullmatch(r"3\.\d+\.\d+", language.pop("version"))
    assert language == {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    }
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    assert notebook.metadata == {"kernelspec": kernel, "language_info": notebook.metadata.language_info}


@every_notebook
def test_every_code_cell_was_executed_in_order(path):
    code = cells(path, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    compared = [cell for cell in code if cell.outputs and "nbval-ignore-output" not in cell.metadata.get("tags", [])]
    assert compared, "a notebook stripped of its outputs would pass nbval without being compared"


@every_notebook
def test_cells_are_short_and_quiet(path):
    for cell in cells(path, "code"):
        longest = 32 if "@T.prim_func" in cell.source else 15  # a kernel stands in one piece
        assert len(cell.source.splitlines()) <= longest, cell.source
        for output in cell.outputs:
            if output.output_type == "error":
                assert "raises-exception" in cell.metadata.get("tags", []), cell.source
            assert output.get("name") != "stderr", output.text


@every_notebook
def test_no_path_of_a_machine(path):
    assert not re.search(r"/(home|root|tmp|work|Users|opt|usr)/|[A-Z]:\\\\", path.read_text())


@every_notebook
def test_the_first_code_cell_shows_versions(path):
    first = cells(path, "code")[0]
    assert "chapter.versions()" in first.source
    assert "nbval-ignore-output" in first.metadata.tags


@every_notebook
def test_one_title_then_goals_and_at_the_end_summary_and_exercises(path):
    text = outside_fences(prose(path))
    assert re.findall(r"^# .*", text, re.M) == [text.splitlines()[0]]
    assert text.startswith(f"# {path.stem[:2]} · ")
    assert "**Goals**" in text and "**What you need**" in text
    assert text.index("## Summary") < text.index("## Exercises")


@every_notebook
def test_links_resolve_and_lead_to_the_neighbours(path):
    text = prose(path)
    targets = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    for target in targets:
        assert (path.parent / target).exists(), target
    place = NOTEBOOKS.index(path)
    for neighbour in [*NOTEBOOKS[max(place - 1, 0) : place], *NOTEBOOKS[place + 1 : place + 2]]:
        assert targets.count(neighbour.name) >= 2, f"{neighbour.name} belongs at the top and at the end"


@every_notebook
def test_images_have_alt_text(path):
    for cell in cells(path, "code"):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                assert len(output.metadata["image/png"]["alt"]) > 20
    for alt in re.findall(r"!\[([^\]]*)\]", prose(path)):
        assert alt


@every_notebook
def test_every_notebook_has_an_exercise_with_hints_and_an_answer(path):
    summaries = re.findall(r"<summary>(.*?)</summary>", prose(path))
    assert any("Hint" in summary for summary in summaries)
    assert any("nswer" in summary for summary in summaries)


@pytest.mark.parametrize(
    ("number", "factory"),
    [(3, rk.rope_neox_naive), (4, rk.rope_neox_blocked), (5, rk.rope_interleaved_blocked)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_kernel_that_a_page_teaches_is_that_of_the_file(number, factory):
    def body(text):
        return text[text.index("    half = R // 2\n\n    @T.prim_func") :].rstrip()

    assert body(inspect.getsource(factory)) in [
        body(cell.source) for cell in cells(NOTEBOOKS[number - 1], "code") if "@T.prim_func" in cell.source
    ]


@pytest.mark.parametrize(
    ("prelude", "sentence"),
    [
        ("import importlib.util as util; util.find_spec = lambda name: None", "This notebook needs torch, tilelang"),
        (
            "import os; os.environ |= {'PATH': '', 'CXX': '', 'CC': '', 'CUDA_VISIBLE_DEVICES': ''}",
            "This cell builds a k",
        ),
    ],
)
def test_where_something_is_missing_one_cell_says_so_and_later_ones_point_to_it(prelude, sentence):
    stops = "import chapter, rope_kernels as rk\nkernel = rk.rope_neox_naive(4, 34)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (prelude, stops, "kernel(1)")])
    run(notebook, allow_errors=True)
    cause, later = (cell.outputs[-1].traceback for cell in notebook.cells[1:])
    assert len(cause) == 1 and cause[0].startswith(sentence)
    assert later == ["name 'kernel' is not defined, since an earlier cell stopped: its message says why."]


@every_notebook
def test_a_cell_under_each_exercise_calls_its_check(path):
    code = "\n".join(cell.source for cell in cells(path, "code"))
    assert [name for name in re.findall(r"`ex\.(check_\w+)\(", prose(path)) if f"ex.{name}(" not in code] == []


@every_notebook
def test_worked_answers_run_below_their_page(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells += map(nbformat.v4.new_code_cell, worked_answers(path))
    run(notebook)


def test_the_readme_names_every_notebook_and_its_links_resolve():
    text = pathlib.Path(ROOT / "README.md").read_text()
    targets = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if not link.startswith("http")]
    assert all((ROOT / target).exists() for target in targets)
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in targets] == []


@every_notebook
def test_the_readme_gives_the_reading_time(path):
    words = len(re.sub(r"<details>.*?</details>", "", outside_fences(prose(path)), flags=re.S).split())
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if f"| [{path.stem[:2]} " in line]
    assert row.split(" | ")[2] == str(5 * round(words / 500))


def test_ci_runs_the_readme_s_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command in (ROOT / "README.md").read_text()
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert f"- run: {command}\n" in workflow
    assert "cache: pip" in workflow and 'python-version: ["3.11", "3.14"]' in workflow
