"""The README's snippets run, and its results are those of the recorded file."""

import base64
import json
import re

import torch
from books import cells
from conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
RECORDED = json.loads((ROOT / "notebooks" / "measurements" / "h200.json").read_text())


def test_the_snippets_run_in_order(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = TEXT[TEXT.index("## Copy a kernel") : TEXT.index("## Glossary")]
    snippets = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(snippets) == 3
    kernel, op, model = ({} for _ in snippets)
    for namespace, snippet in zip((kernel, op, model), snippets, strict=True):
        exec(snippet, namespace)
    assert torch.equal(kernel["y"], kernel["torch_rope_neox"](kernel["x"], kernel["cos"], kernel["sin"]))
    assert op["q_rotated"].shape == op["q"].shape and not torch.equal(op["q_rotated"], op["q"])
    torch.testing.assert_close(model["ours"], model["theirs"], rtol=0, atol=1e-4)


def test_the_results_are_the_recorded_ones():
    """The rows as the file gives them: ladder over 16 384 tokens × 32 heads, then the op over 32/8 heads."""

    def row(name, record):
        return f"| {name} | {record['median_us']:.1f} | {record['fraction_of_copy']:.2f} |"

    def ladder(name):
        wanted = {"implementation": name, "shape": [524288, 128], "dtype": "float16"}
        return next(r for r in RECORDED["records"] if wanted.items() <= r.items())

    def op(name, pairing):
        wanted = {"implementation": name, "pairing": pairing, "direction": "forward", "tokens": 16384}
        wanted |= {"heads_q": 32, "heads_k": 8, "D": 128, "dtype": "bfloat16"}
        return next(r for r in RECORDED["op_records"] if wanted.items() <= r.items())

    chapter = [
        row("① one row a block", ladder("naive, 256 threads")),
        row("② 16 rows a block", ladder("blocked, blk_s=16")),
        row("③ interleaved, 16 rows a block", ladder("interleaved, blk_s=16")),
    ]
    others = [
        row("④ `apply_rope`, neox", op("apply_rope", "neox")),
        row("④ `apply_rope`, interleaved", op("apply_rope", "interleaved")),
        row("TileOPs, neox", op("TileOPs", "neox")),
        row("transformers under `torch.compile`, neox", op("transformers, torch.compile", "neox")),
        row("Liger-Kernel, neox", op("Liger-Kernel", "neox")),
        row("transformers, neox", op("transformers, eager", "neox")),
        row("④ `apply_rope` in place, neox", op("apply_rope, in place", "neox")),
        row("SGLang in place, neox", op("SGLang", "neox")),
        row("FlashInfer in place, neox", op("FlashInfer", "neox")),
    ]
    assert "\n".join(chapter) in TEXT and "\n".join(others) in TEXT
    host = {r["implementation"]: f"{r['median_us']:.0f} µs for" for r in RECORDED["host_records"]}
    names = ("apply_rope", "Liger-Kernel", "transformers, torch.compile")
    ours, liger, compiled = (host[name] for name in names)
    line = f"{ours} `apply_rope`, {liger} Liger-Kernel and {compiled} the compiled function"
    assert line in " ".join(TEXT.split())
    records, in_place = RECORDED["op_records"], "apply_rope, in place"
    fused = {(r["pairing"], r["tokens"]): r["median_us"] for r in records if r["implementation"] == in_place}
    for name, words in (("SGLang", "SGLang's kernel takes"), ("FlashInfer", "FlashInfer's")):
        ratios = [r["median_us"] / fused[r["pairing"], r["tokens"]] for r in records if r["implementation"] == name]
        assert len(ratios) == 20 and f"{words} {min(ratios):.2f} to {max(ratios):.2f} times" in " ".join(TEXT.split())
    provenance = RECORDED["provenance"]
    assert f"{provenance['gpu']}, {provenance['date']}" in TEXT


def test_the_figure_is_the_one_that_notebook_09_draws():
    drawn = [
        base64.b64decode(output["data"]["image/png"])
        for cell in cells(ROOT / "notebooks" / "09_to_the_roofline.ipynb", "code")
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert (ROOT / "notebooks" / "measurements" / "roofline.png").read_bytes() in drawn
