"""Runs to show in the tab, and a driver of the tab: its cells, its tooltip, its address."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.sinks.tensorboard import TensorBoardSink
from tests.support.frames import make_frame, write_run
from tests.support.processes import wait_for

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
STEPS = tuple(range(0, 600, 10))
BAD_SINCE = 500
MODULES = ("stem", "blocks.0.norm", "blocks.0.up", "blocks.0", "blocks.1.norm", "blocks.1.up", "blocks.1", "head")
PARAMETERS = ("stem.weight", "stem.bias", "head.weight")
HOSTILE = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=2</script>",
    "a\"b'c&d=e",
    "=1+1",
    "__proto__",
    "x" * 300,
    "слой.0",
)


# --- Runs whose every number is known ---


def level(run: str, module: int, step: int) -> float:
    """The scale of a module's numbers: `second` has twice as much, and both grow."""
    return 10.0 ** (module - 4) * (1 + step / 100) * (2.0 if run == "second" else 1.0)


def numbers(run: str, module: int, step: int) -> list[float]:
    """Four numbers with population standard deviation `level` and a mean that changes its sign."""
    size = level(run, module, step)
    shift = size * math.cos(step / 60)
    return [shift - size, shift + size, shift - size, shift + size]


def frame_of(run: str, step: int) -> Frame:
    data: dict[Site, Any] = {}
    for i, path in enumerate(MODULES):
        if run == "second" and path == "head":
            continue
        values = numbers(run, i, step)
        if run == "first" and path == "blocks.1.up" and step >= BAD_SINCE:
            values = [*values, math.nan]
        if path != "stem" or step != 20:
            data[Site(path, "activation")] = values
    data |= {Site(path, "weight"): numbers(run, i, step) for i, path in enumerate(PARAMETERS)}
    return make_frame(step, data, histograms=step % 50 == 0, findings=findings_of(run, step))


def findings_of(run: str, step: int) -> list[Finding]:
    if run != "first":
        return []
    by_step = {
        BAD_SINCE: Finding(
            step, Site("blocks.1.up", "activation"), "non_finite", "error", "1 NaN in blocks.1.up", {"nan_count": 1}
        ),
        300: Finding(
            step, Site("head.weight", "weight"), "unchanged_weight", "warning", "head.weight does not change", {}
        ),
        400: Finding(step, None, "loss_spike", "info", "the loss jumped", {}),
    }
    return [by_step[step]] if step in by_step else []


def hostile_frame(step: int) -> Frame:
    found = (
        [Finding(step, Site(HOSTILE[0], "activation"), "dead_units", "warning", HOSTILE[1], {})] if step == 3 else []
    )
    return make_frame(step, {Site(name, "activation"): [1.0, 2.0, step] for name in HOSTILE}, findings=found)


def live_frame(step: int) -> Frame:
    frame = make_frame(
        step, {Site(f"layer.{i}", "activation"): [0.0, 1.0 + step + i] for i in range(4)}, histograms=False
    )
    return Frame(frame.step, time.time(), 0, frame.sites, frame.values, frame.buckets, (), {})


@dataclass
class Board:
    """A TensorBoard process and the run that still grows."""

    address: str
    directory: Path
    growing: TensorBoardSink

    def grow(self, *steps: int) -> None:
        for step in steps:
            self.growing.write(live_frame(step))
        self.growing.flush()
        wait_for(lambda: f'"last_step":{steps[-1]}' in self.runs().replace(" ", ""), "the new steps")

    def runs(self) -> str:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self.address}/data/plugin/tbhooks/runs", timeout=30) as answer:
            return str(answer.read().decode())


def write_runs(directory: Path) -> TensorBoardSink:
    """Writes three finished runs, and one that the returned sink can go on writing."""
    for run in ("first", "second"):
        write_run(directory / run, *(frame_of(run, step) for step in STEPS), scalars=())
    write_run(directory / "hostile", *map(hostile_frame, range(10)), scalars=())
    growing = TensorBoardSink(directory / "live", scalars=())
    for step in range(40):
        growing.write(live_frame(step))
    growing.flush()
    return growing


@dataclass
class Pages:
    """Opens pages and remembers the errors in their consoles."""

    browser: Any
    address: str
    errors: list[str] = field(default_factory=list)
    expected: str = ""

    def context(self, **options: Any) -> Any:
        options = {"viewport": {"width": 1300, "height": 800}, "accept_downloads": True, **options}
        return self.browser.new_context(**options)

    def _on_console(self, message: Any) -> None:
        where = message.location["url"]
        if message.type == "error" and not where.endswith("/favicon.ico"):  # which browsers ask every page for
            self.errors.append(f"{message.text} {where}")

    def open(self, path: str = "", **options: Any) -> Any:
        page = self.context(**options).new_page()
        page.set_default_timeout(20_000)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(self.address + path)
        return page


# --- The tab ---


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

    def open_menu(self, name: str) -> None:
        button = self.frame.locator(".menu-button", has_text=name)
        if button.get_attribute("aria-expanded") == "false":
            button.click()

    def compare(self, *runs: str) -> None:
        """Ticks runs in the menu of runs to compare."""
        self.open_menu("Compare")
        for run in runs:
            self.frame.locator(".menu-box .tick", has_text=run).first.click()

    def height(self, word: str) -> None:
        """Chooses the height of rows: Auto, Readable or Fit."""
        self.open_menu("View")
        self.frame.get_by_text(word, exact=True).click()
        self.page.keyboard.press("Escape")

    def save(self, name: str) -> Any:
        """Downloads the picture (PNG) or the numbers (CSV)."""
        self.open_menu("Save")
        with self.page.expect_download() as started:
            self.frame.get_by_role("button", name=name).click()
        return started.value

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
