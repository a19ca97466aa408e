"""JupyterLab in a real browser: the table of a look at a model and the live view are on the page and answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jupyter_lab import DARK, LIGHT, Lab, Notebook, open_notebook, serving
from tests.support.processes import wait_for

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
LIVE = ".tbhooks-live"
MODEL = """
import time, torch, tbhooks
from torch import nn
torch.manual_seed(0)
blocks = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.ReLU())]
model = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def step():
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    w.log({"loss": loss})
"""
TRAINING = """
import pathlib
while not pathlib.Path("enough").exists():
    step(); time.sleep(0.02)
"""
CELLS = (
    MODEL,
    "tbhooks.peek(model, torch.randn(64, 8))",
    "w = tbhooks.watch(model, every=1)\nw.live()",
    TRAINING,
    "w.close()",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    with serving(tmp_path_factory.mktemp("jupyter") / "lab") as running:
        yield running


@pytest.fixture(scope="module")
def training(lab: Lab, browser: Any) -> Iterator[Notebook]:
    """A notebook whose third cell follows the training that its fourth is busy with."""
    (lab.directory / "enough").unlink(missing_ok=True)
    lab.write("training.ipynb", CELLS)
    notebook = open_notebook(browser, lab, "training.ipynb")
    notebook.run_all()
    notebook.page.wait_for_selector(f"{LIVE} .stage")
    notebook.page.wait_for_function(
        f"() => Number(document.querySelector('{LIVE} .headline').textContent.match(/step (\\d+)/)?.[1]) > 20"
    )
    yield notebook
    (lab.directory / "enough").touch()
    notebook.page.context.close()


def step_shown(notebook: Notebook) -> int:
    return int(notebook.page.locator(f"{LIVE} .headline").inner_text().split(",")[0].removeprefix("step "))


def point(notebook: Notebook, across: float, row: int) -> tuple[float, float]:
    stage = notebook.page.locator(f"{LIVE} .stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    return box["x"] + across * box["width"], box["y"] + 16 * row + 8


def test_the_live_view_follows_while_a_later_cell_trains(training: Notebook, screenshots: Path) -> None:
    before = step_shown(training)
    wait_for(lambda: step_shown(training) > before, "a later step")
    page = training.page
    assert page.locator(f"{LIVE} .lines").inner_text().startswith("train/loss")
    assert page.locator(f"{LIVE} .names div").all_inner_texts()[0].endswith("0")
    assert page.locator(".jp-CodeCell").nth(3).locator(".jp-OutputArea-output").count() == 0
    page.screenshot(path=screenshots / "jupyter-live.png")


def test_the_pointer_reads_values_and_a_click_shows_a_histogram_while_the_kernel_is_busy(
    training: Notebook, screenshots: Path
) -> None:
    page = training.page
    page.mouse.move(*point(training, 0.5, 2))
    assert "2 at step" in page.locator(f"{LIVE} .value").inner_text()
    assert ": std 0." in page.locator(f"{LIVE} .value").inner_text()
    page.mouse.click(*point(training, 0.999, 2))
    page.wait_for_selector(f"{LIVE} .bars")
    assert page.locator(f"{LIVE} .histogram h4").inner_text().startswith("activation of 2 at step")
    page.screenshot(path=screenshots / "jupyter-histogram.png")


def test_the_map_is_reached_with_the_keyboard(training: Notebook) -> None:
    page = training.page
    page.locator(f"{LIVE} .stage").focus()
    for key in ("ArrowDown", "ArrowUp", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.wait_for_function(f"() => document.querySelector('{LIVE} .histogram').textContent.includes('activation of')")
    assert " at step" in page.locator(f"{LIVE} .value").inner_text()


def test_kind_stat_and_layers_can_be_chosen_in_the_middle_of_training(training: Notebook, screenshots: Path) -> None:
    page = training.page
    page.get_by_label("kind", exact=True).select_option("gradient")
    page.get_by_label("stat", exact=True).select_option("norm")
    page.wait_for_function(f"() => document.querySelector('{LIVE}').textContent.includes('gradient norm, one row')")
    page.get_by_label("find a layer").fill("1")
    names = page.locator(f"{LIVE} .names div").all_inner_texts()
    assert names
    assert all("1" in name for name in names)
    page.get_by_label("find a layer").fill("")
    training.theme(DARK)
    page.screenshot(path=screenshots / "jupyter-live-dark.png")
    training.theme(LIGHT)


def test_a_saved_notebook_shows_the_last_state_without_its_kernel(
    training: Notebook, lab: Lab, browser: Any, screenshots: Path
) -> None:
    page = training.page
    picture = page.locator('[class^="tbhooks-live-"]')
    assert not picture.is_visible()
    (lab.directory / "enough").touch()
    training.finished(len(CELLS))
    page.wait_for_function(f"() => document.querySelector('{LIVE} .headline').textContent.endsWith('ended')")
    last = page.locator(f"{LIVE} .headline").inner_text()
    assert page.locator(".jp-OutputArea-output .tbhooks table").first.is_visible()
    training.save()
    wait_for(lambda: last in str(lab.saved("training.ipynb")), "the saved notebook")
    shutil.copy(lab.directory / "training.ipynb", lab.directory / "copy.ipynb")
    reader = open_notebook(browser, lab, "copy.ipynb")
    reader.page.wait_for_selector('[class^="tbhooks-live-"]')
    kept = reader.page.locator('[class^="tbhooks-live-"]')
    assert last in kept.inner_text()
    kept.scroll_into_view_if_needed()
    reader.page.screenshot(path=screenshots / "jupyter-saved.png")
    reader.page.context.close()


@pytest.mark.skipif(not QUICKSTART.exists(), reason="there is no quickstart notebook")
def test_the_quickstart_shows_its_table_and_its_live_view(lab: Lab, browser: Any, screenshots: Path) -> None:
    shutil.copy(QUICKSTART, lab.directory / "quickstart.ipynb")
    cells = [cell for cell in lab.saved("quickstart.ipynb").cells if cell.cell_type == "code"]
    notebook = open_notebook(browser, lab, "quickstart.ipynb")
    notebook.command("notebook:clear-all-cell-outputs")
    notebook.run_all()
    notebook.finished(len(cells))
    page = notebook.page
    assert not page.locator('.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]').count()
    table = page.locator(".tbhooks table").first
    table.scroll_into_view_if_needed()
    # What was out of sight is drawn when it comes into it.
    wait_for(lambda: "BatchNorm2d" in table.inner_text(), "the table of the first cell")
    page.screenshot(path=screenshots / "jupyter-quickstart-table.png")
    page.locator(f"{LIVE} .stage").scroll_into_view_if_needed()
    assert page.locator(f"{LIVE} .headline").inner_text().startswith("step 140")
    assert page.locator(f"{LIVE} .headline").inner_text().endswith("ended")
    page.screenshot(path=screenshots / "jupyter-quickstart.png")
    page.context.close()
