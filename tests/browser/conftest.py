"""Fixtures of the browser tests: TensorBoard over runs whose numbers are known, and a browser without errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser_tab import Board, Pages, write_runs
from tests.support.processes import wait_for
from tests.support.tensorboard_server import Server
from tests.support.transformer_runs import ODD, write_transformers, write_wide

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium; without it, or without playwright, the tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def board(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """TensorBoard over four runs, one of which still grows."""
    directory = tmp_path_factory.mktemp("runs")
    growing = write_runs(directory)
    with Server(directory, tmp_path_factory.mktemp("server") / "log") as server:
        running = Board(server.address, directory, growing)
        wait_for(
            lambda: all(f'"{run}"' in running.runs() for run in ("first", "second", "hostile", "live")), "the runs"
        )
        yield running
    growing.close()


@pytest.fixture
def pages(browser: Any, board: Board) -> Iterator[Pages]:
    """Opens pages. A page that wrote an error to the console fails the test, unless the test expects that error."""
    opened = Pages(browser, board.address)
    yield opened
    for context in browser.contexts:
        context.close()
    assert not [line for line in opened.errors if not opened.expected or opened.expected not in line]


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Where pictures are kept: `TBHOOKS_SCREENSHOTS` or a temporary directory."""
    directory = Path(os.environ.get("TBHOOKS_SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def transformers(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of TensorBoard over four runs of a transformer, and one of a thousand modules."""
    directory = tmp_path_factory.mktemp("transformers")
    write_transformers(directory)
    write_wide(directory / "wide", modules=1000, steps=60, odd=ODD, since=20)
    with Server(directory, tmp_path_factory.mktemp("server") / "log") as server:
        server.wait_for(lambda: len(server.newest()) == 5 and server.newest()["wide"] == 59)
        yield server.address


@pytest.fixture
def models(browser: Any, transformers: str) -> Iterator[Pages]:
    """Opens pages over whole models. A page that wrote an error to the console fails the test."""
    opened = Pages(browser, transformers)
    yield opened
    for context in browser.contexts:
        context.close()
    assert not opened.errors
