"""A TensorBoard with the tab over runs whose every number is known, and a browser that lets no error pass."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.sinks.tensorboard import TensorBoardSink
from tests.support import waiting
from tests.support.frames import make_frame

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_S = 60.0
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

SERVE = """
import sys
from tensorboard import default, program
from tbhooks.plugin import Loader
plugins = default.get_plugins()
tensorboard = program.TensorBoard(plugins=plugins if Loader in plugins else [*plugins, Loader])
tensorboard.configure(sys.argv)
sys.exit(tensorboard.main())
"""


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
    told = {
        BAD_SINCE: Finding(
            step, Site("blocks.1.up", "activation"), "non_finite", "error", "1 NaN in blocks.1.up", {"nan_count": 1}
        ),
        300: Finding(
            step, Site("head.weight", "weight"), "unchanged_weight", "warning", "head.weight does not change", {}
        ),
        400: Finding(step, None, "loss_spike", "info", "the loss jumped", {}),
    }
    return [told[step]] if step in told else []


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


def wait_for(ready: Callable[[], Any], what: str) -> Any:
    answer = waiting.until(ready, PATIENCE_S)
    assert answer, f"waited in vain for {what}"
    return answer


def write_runs(directory: Path) -> TensorBoardSink:
    for run in ("first", "second"):
        sink = TensorBoardSink(directory / run, scalars=())
        for step in STEPS:
            sink.write(frame_of(run, step))
        sink.close()
    sink = TensorBoardSink(directory / "hostile", scalars=())
    for step in range(10):
        sink.write(hostile_frame(step))
    sink.close()
    growing = TensorBoardSink(directory / "live", scalars=())
    for step in range(40):
        growing.write(live_frame(step))
    growing.flush()
    return growing


@pytest.fixture(scope="session")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    directory = tmp_path_factory.mktemp("runs")
    log = tmp_path_factory.mktemp("said") / "log"
    growing = write_runs(directory)
    flags = ["--logdir", str(directory), "--host", "127.0.0.1", "--port", "0", "--reload_interval=1"]
    with log.open("w") as told:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *flags], stdout=told, stderr=told, stdin=subprocess.DEVNULL
        )
    try:
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()), "TensorBoard")[0]
        serving = Board(address, directory, growing)
        wait_for(
            lambda: all(f'"{run}"' in serving.runs() for run in ("first", "second", "hostile", "live")), "the runs"
        )
        yield serving
    finally:
        process.kill()
        process.wait(10)
        growing.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    directory = Path(os.environ.get("TBHOOKS_SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@dataclass
class Pages:
    """Opens pages and remembers what their consoles said."""

    browser: Any
    address: str
    said: list[str] = field(default_factory=list)
    expected: str = ""

    def context(self, **options: Any) -> Any:
        options = {"viewport": {"width": 1300, "height": 800}, "accept_downloads": True, **options}
        return self.browser.new_context(**options)

    def _hear(self, message: Any) -> None:
        where = message.location["url"]
        if message.type == "error" and not where.endswith("/favicon.ico"):  # which browsers ask every page for
            self.said.append(f"{message.text} {where}")

    def open(self, path: str = "", **options: Any) -> Any:
        page = self.context(**options).new_page()
        page.set_default_timeout(20_000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(self.address + path)
        return page


@pytest.fixture
def pages(browser: Any, board: Board) -> Iterator[Pages]:
    """Fails a test whose page wrote an error to the console, unless the test says which it expects."""
    opened = Pages(browser, board.address)
    yield opened
    for context in browser.contexts:
        context.close()
    assert not [line for line in opened.said if not opened.expected or opened.expected not in line]
