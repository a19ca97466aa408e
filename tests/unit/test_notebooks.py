"""The notebooks run from top to bottom, and are committed as they ran.

`python -m tests.unit.test_notebooks` runs them and writes them back; with names, only those.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow import cases

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What a reader comes for, by notebook.
SHOWS = {
    "quickstart": (
        "module   type         output",  # the table of peek
        "gradient norm of output.weight: ",
        "steps/s",  # the live view, in the state it was left in
        ", ended\n",
        "digits it was not trained on: 9",
        "no issues found",
        "History(36 logged steps, steps 0 to 140)",
        "zero_fraction",  # of pandas
        "0 of 40 tensors match within 1%",
    ),
    "dead_relu": (
        "learning rate 1.0: the loss is 2.3",
        "warning, step ",
        ", dead_units: ",
        "dead_units at relu",
        "relu3: 100% of the units are zero",
        "learning rate 0.05: the loss is 0.",
        "no issues found",
        "largest change: activation of relu3",
    ),
    "nan_hunt": (
        "loss after 200 steps: nan",
        "stopped at step 96: non_finite in the gradient of encoder.2",
        "the gradient of distance just before it is: inspect the backward of distance",
        "pairs of a picture with itself: 1",
        "largest change: gradient of encoder.2, NaN/Inf 32 → 0",
        "loss after 200 steps: 0.",
        "no issues found",
    ),
    "collapsing_router": ("Experts collapsed: model.layers.", "the routers use their experts again"),
    "logit_growth": ("step   0: largest logit     0.2, entropy 2.08", "attention logits grew"),
    "compare_precisions": (
        "dtypes: float32 bfloat16 float16",
        "low_precision: The float16 values of the gradient of the output output are",
        "largest change: gradient of block3.up, zeros 0% → ",
        "foretold from float32",
        "block3.up",
    ),
    "transformer_activations": (
        "transformer.h.0.attn[1]  GPT2Attention (32, 4, 32, 32)",
        "transformer.h.2",
        "rms of the stream:",
        "norm of its gradient:",
    ),
    "overhead": (
        "average at every=100",
        "watched, not logged",
        "logged, histograms",
        "sites read in a logged step: 70",
        "every=1000  average step / bare step = ",
        "include=nn.ReLU",
    ),
}
# How many pictures it has.
DRAWS = {"quickstart": 2, "dead_relu": 3, "compare_precisions": 1, "transformer_activations": 5}
# What a notebook imports besides tbhooks, where that is not in every installation.
NEEDS = {
    "quickstart": ("sklearn", "matplotlib", "pandas", "anywidget"),
    "dead_relu": ("sklearn", "matplotlib"),
    "nan_hunt": ("sklearn",),
    "logit_growth": ("sklearn",),
    "compare_precisions": ("sklearn", "matplotlib", "pandas"),
    "collapsing_router": ("transformers",),
    "transformer_activations": ("transformers", "matplotlib"),
}
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 300_000
# What no reader's machine has: where somebody else keeps their files.
OF_A_MACHINE = re.compile(r"/(?:home|root|Users|tmp|work|private)/|site-packages|ipykernel_\d|[A-Z]:\\\\Users")
every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def read(file: Path) -> Any:
    nbformat = pytest.importorskip("nbformat")  # here, because it takes a second to import
    return nbformat.read(file, as_version=4)


def executed(file: Path) -> Any:
    """The notebook, run in a kernel of its own, with what is worth keeping of it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # conftest says why; without pytest it is not there
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    notebook = read(file)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    notebook.metadata = read(file).metadata  # the kernel adds which Python it is, and what widgets held
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # A widget without its kernel is an empty place; the picture beside it stays.
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", ())]
    return notebook


def outputs_of(notebook: Any) -> Iterator[Any]:
    return (output for cell in notebook.cells for output in cell.get("outputs", ()))


def shown(notebook: Any) -> str:
    """All that is shown in words."""
    outputs = list(outputs_of(notebook))
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", ()) for output in outputs_of(notebook))


def missing_from(notebook: Any, file: Path) -> list[str]:
    text = shown(notebook)
    return [expected for expected in SHOWS[file.stem] if expected not in text]


def test_every_notebook_says_what_it_is_for() -> None:
    assert {file.stem for file in NOTEBOOKS} == set(SHOWS)


@pytest.mark.parametrize(
    "file",
    cases(
        {file.stem: file for file in NOTEBOOKS},
        always={"quickstart"},
        reason="ten seconds each; what they show is tested in tests/unit/views, tests/unit/rules and test_bench.py",
    ),
)
def test_it_runs_and_shows_what_it_is_for(file: Path) -> None:
    for package in NEEDS.get(file.stem, ()):
        pytest.importorskip(package)
    notebook = executed(file)
    assert missing_from(notebook, file) == []
    assert pictures(notebook) == DRAWS.get(file.stem, 0)


@every_notebook
def test_it_is_committed_as_it_ran_and_small(file: Path) -> None:
    notebook = read(file)
    assert missing_from(notebook, file) == []
    assert pictures(notebook) == DRAWS.get(file.stem, 0)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert file.stat().st_size < LARGEST


@every_notebook
def test_it_begins_with_a_title_and_knows_no_machine_and_no_widget(file: Path) -> None:
    notebook, text = read(file), file.read_text(encoding="utf-8")
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert OF_A_MACHINE.findall(text) == []
    assert WIDGET not in text
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


if __name__ == "__main__":
    import nbformat

    for name in sys.argv[1:] or [file.stem for file in NOTEBOOKS]:
        nbformat.write(executed(FOLDER / f"{name}.ipynb"), FOLDER / f"{name}.ipynb")
