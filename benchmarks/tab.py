"""How long the tab takes in a real browser: from its address to the map, and from each action to its picture.

One run of 1000 modules x 2000 logged steps, as in plugin.py. TensorBoard has loaded it; the tab asks for the first
time. The time of an action is from the event to the drawing after the last answer of the server that it needs, in
Debian's chromium without a GPU, at 1440 x 900. After an action with "again", the same action on something else.

    python benchmarks/tab.py [--modules 1000] [--steps 2000] [--rounds 3] [--logs DIRECTORY]

`--logs` keeps the run in a directory, and reuses the one that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import sync_playwright
from plugin import KIND, LargeRun

from tests.support.browser_tab import ALONE, parameters
from tests.support.tensorboard_server import Server

READY = "() => document.querySelector('.map-base')?.dataset.layout !== undefined"
# An action is done when `done` holds and the page has been painted after it.
TIMED = """async ([action, done]) => {
  const painted = () => new Promise((then) => requestAnimationFrame(() => setTimeout(then)));
  const [act, isDone] = [action, done].map((body) => new Function("$", "at", body));
  const $ = (query) => document.querySelector(query);
  const at = (row, step) => {
    const layout = JSON.parse($(".map-base").dataset.layout), box = $(".map-stage").getBoundingClientRect();
    const [first, last] = layout.view, pane = layout.panes[0];
    const clientX = box.left + pane.x + ((step - first) / (last - first)) * pane.width;
    const clientY = box.top + layout.top + (row + 0.5) * layout.rowHeight;
    const options = { clientX, clientY, bubbles: true, pointerId: 1, pointerType: "mouse", isPrimary: true, button: 0 };
    return (...types) => types.forEach((type) => $(".map-stage").dispatchEvent(new PointerEvent(type, options)));
  };
  const began = performance.now();
  act($, at);
  do await painted(); while (!isDone($, at) && performance.now() - began < 20000);
  await painted();
  return performance.now() - began;
}"""
CHOOSE = """const box = $('select[aria-label="{}"]'); box.value = "{}"; box.dispatchEvent(new Event("change"));"""
PRESS = """[...document.querySelectorAll("button, .switch label")]
  .find((each) => each.textContent.trim() === "{}").click();"""
FILL = """const box = $("{}"); box.value = "{}"; box.dispatchEvent(new Event("input"));"""
CLICK = 'at({}, {})("pointermove", "pointerdown", "pointerup", "click");'
LEGEND = """return $("canvas.legend").ariaLabel.includes("update {}");"""
DETAILS = """return $(".detail-name") && !$(".detail-section[aria-busy=true], .detail-busy");"""
NOW = "return true;"
ACTIONS: dict[str, tuple[str, str]] = {
    "tooltip": ('at(3, 900)("pointermove");', "return !$('.tip').hidden && $('.tip').textContent !== '';"),
    "click a module: details": (CLICK.format(3, 900), DETAILS),
    "click another module": (CLICK.format(5, 500), DETAILS),
    "zoom in": (PRESS.format("+"), NOW),
    "all steps": (PRESS.format("All steps"), NOW),
    "range: full": (PRESS.format("Full"), NOW),
    "scale: linear": (PRESS.format("Linear"), NOW),
    "another stat": (CHOOSE.format("Stat", "norm"), LEGEND.format("norm")),
    "a quantile, first time": (CHOOSE.format("Stat", "p50"), LEGEND.format("p50")),
    "std again": (CHOOSE.format("Stat", "std"), LEGEND.format("std")),
    "a quantile, again": (CHOOSE.format("Stat", "p50"), LEGEND.format("p50")),
    "back to std": (CHOOSE.format("Stat", "std"), LEGEND.format("std")),
    "by path": (CHOOSE.format("Group", "tree"), NOW),
    "all levels open": (FILL.format("input[type=range]", "9"), NOW),
    "search": (FILL.format("input[type=search]", "part7"), NOW),
    "no search": (FILL.format("input[type=search]", ""), NOW),
    "sort: 20 most unusual": (CHOOSE.format("Sort", "unusual"), NOW),
    "sort: largest change": (CHOOSE.format("Sort", "change"), NOW),
    "model order": (CHOOSE.format("Sort", "order"), NOW),
}


def measure(browser: Any, address: str) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(60_000)
    page.goto(address + ALONE + "#tbhooks&" + parameters(page="map", run="large", kind=KIND, stat="std", depth="2"))
    page.wait_for_function(READY)
    found = {"ready": page.evaluate("() => new Promise((d) => requestAnimationFrame(() => d(performance.now())))")}
    page.wait_for_timeout(3000)  # somebody looks at the map before he clicks
    for name, (action, done) in ACTIONS.items():
        found[name] = page.evaluate(TIMED, [action, done])
        print(f"{name}: {found[name]:.0f} ms", file=sys.stderr)
        page.wait_for_timeout(200)
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tab.json")
    options = parser.parse_args()
    with nullcontext(options.logs) if options.logs else tempfile.TemporaryDirectory() as kept:
        logs = Path(kept)
        if not (logs / "large").exists():
            LargeRun(logs, options.modules).write(options.steps)
        rounds = []
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            for _ in range(options.rounds):
                with tempfile.TemporaryDirectory() as scratch, Server(logs, Path(scratch) / "log") as server:
                    server.wait_for(lambda server=server: server.newest() == {"large": options.steps - 1})
                    rounds.append(measure(browser, server.address))
            browser.close()
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    figures = {"modules": options.modules, "steps": options.steps, "milliseconds": medians}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"| {options.modules} modules x {options.steps} steps | ms |\n|---|---|")
    for name, milliseconds in medians.items():
        print(f"| {name} | {milliseconds:.0f} |")


if __name__ == "__main__":
    main()
