"""The notebooks run from top to bottom, and are committed as they ran.

`python -m tests.test_notebooks` runs them and writes them back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What a reader comes for, by notebook.
SHOWS = {
    "overhead": (
        "average at every=100",
        "watched, not logged",
        "logged, histograms",
        "sites read in a logged step: 70",
        "every=1000  average step / bare step = ",
        "include=nn.ReLU",
    ),
}
every_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def read(file: Path) -> Any:
    return nbformat.read(file, as_version=4)


def executed(file: Path) -> Any:
    """The notebook, run in a kernel of its own."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    notebook = read(file)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    notebook.metadata = read(file).metadata  # the kernel adds which Python it is
    return notebook


def shown(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    return "\n".join(output.get("text", "") for output in outputs)


def test_there_are_notebooks() -> None:
    assert {file.stem for file in NOTEBOOKS} >= set(SHOWS)


@every_notebook
def test_it_runs_and_shows_what_it_is_for(file: Path) -> None:
    text = shown(executed(file))
    assert [expected for expected in SHOWS.get(file.stem, ()) if expected not in text] == []
    assert text


@every_notebook
def test_it_is_committed_as_it_ran_and_small(file: Path) -> None:
    notebook = read(file)
    text = shown(notebook)
    assert [expected for expected in SHOWS.get(file.stem, ()) if expected not in text] == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert file.stat().st_size < 100_000
    assert str(Path.home()) not in file.read_text(encoding="utf-8")


if __name__ == "__main__":
    for notebook_file in NOTEBOOKS:
        nbformat.write(executed(notebook_file), notebook_file)
