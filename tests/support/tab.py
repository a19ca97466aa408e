"""Driving the tab: where its cells are, what its tooltip says, what its address holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from tests.browser.conftest import Pages

ALONE = "/data/plugin_entry.html?name=tbhooks"  # the tab's own page, without TensorBoard around it
ROWS = (
    "stem",
    "blocks",
    "blocks.0",
    "blocks.0.norm",
    "blocks.0.up",
    "blocks.1",
    "blocks.1.norm",
    "blocks.1.up",
    "head",
)


@dataclass
class Tab:
    """The tab in a page: as the page itself, or in the frame TensorBoard gives it."""

    page: Any
    frame: Any

    def layout(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.frame.locator(".map-base").get_attribute("data-layout"))
        return answer

    def settle(self) -> None:
        """Until two drawings in a row put everything in the same place."""
        self.frame.wait_for_selector(".map-base[data-layout]", state="attached")
        self.frame.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def place(self, row: int, step: float, pane: int = 0) -> tuple[float, float]:
        self.settle()
        layout, box = self.layout(), self.frame.locator(".map-stage").bounding_box()
        first, last = layout["view"]
        maps = layout["panes"][pane]
        scroll = self.frame.evaluate("() => document.querySelector('.map-scroll').scrollTop")
        x = maps["x"] + (step - first) / (last - first) * maps["width"]
        return box["x"] + x, box["y"] + layout["top"] + (row + 0.5) * layout["rowHeight"] - scroll

    def hover(self, row: int, step: float, pane: int = 0) -> str:
        self.page.mouse.move(*self.place(row, step, pane))
        return str(self.frame.locator(".tip").inner_text())

    def click(self, row: int, step: float, pane: int = 0, *, shift: bool = False) -> None:
        x, y = self.place(row, step, pane)
        if shift:
            self.page.keyboard.down("Shift")
        self.page.mouse.click(x, y)
        if shift:
            self.page.keyboard.up("Shift")

    def choose(self, label: str, value: str) -> None:
        self.frame.get_by_label(label, exact=True).select_option(value)

    def look_again(self) -> None:
        """What happens when somebody comes back to the tab: it asks at once."""
        self.frame.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")

    def state(self) -> dict[str, str]:
        self.page.wait_for_timeout(250)  # the address is written when the user pauses
        found = re.findall(r"p\.tbhooks\.(\w+)=([^&]*)", self.page.url)
        return {name: unquote(value) for name, value in found}


def alone(pages: Pages, state: str = "", **options: Any) -> Tab:
    page = pages.open(ALONE + ("#tbhooks&" + state if state else ""), **options)
    tab = Tab(page, page)
    tab.settle()
    return tab


def in_tensorboard(pages: Pages, state: str = "", **options: Any) -> Tab:
    page = pages.open("/#tbhooks&" + state, **options)
    return Tab(page, frame_of_tab(page))


def frame_of_tab(page: Any) -> Any:
    element = page.wait_for_selector("iframe[src*=tbhooks]")
    frame = element.content_frame()
    Tab(page, frame).settle()
    return frame


def parameters(**values: str) -> str:
    return "&".join(f"p.tbhooks.{name}={quote(value, safe='')}" for name, value in values.items())


def shown(value: float) -> str:
    """Three digits, as the tooltip writes them."""
    if 1e-3 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".").replace("-", "\u2212")
    if 999.5 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):,.0f}"
    return re.sub(r"e([+-])0?", r"e\1", f"{value:.2e}").replace("e+", "e").replace("-", "\u2212")


FIRST = parameters(run="first", kind="activation", stat="std")
