"""Twelve runs beside each other, and what is said about modules that not all of them have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser_tab import ALONE, Pages, Tab
from tests.support.tensorboard_server import Server
from tests.support.transformer_runs import write_wide

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

RUNS = 13


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Pages]:
    """Thirteen runs; one has two modules that the others have not."""
    for i in range(RUNS):
        write_wide(tmp_path / "runs" / f"run{i:02}", modules=10 if i == 5 else 8, steps=6, odd=i % 8, since=2)
    with Server(tmp_path / "runs", tmp_path / "log") as server:
        server.wait_for(lambda: len(server.newest()) == RUNS)
        pages = Pages(browser, server.address)
        yield pages
        for context in browser.contexts:
            context.close()
        assert not pages.errors


def test_twelve_runs_are_compared_with_one_action(opened: Pages, screenshots: Path) -> None:
    page = opened.open(ALONE, viewport={"width": 1440, "height": 900})
    page.get_by_role("button", name="Compare the newest 12 runs").click()
    tab = Tab(page, page)
    tab.settle()
    assert len(tab.layout()["panes"]) == 12
    expect(page.locator(".remark").first).to_contain_text("have 8 of 10 modules in common")
    page.screenshot(path=screenshots / "twelve-runs.png")
    for pane in (0, 11):
        assert tab.hover(1, 3, pane=pane).startswith("blocks.0")
