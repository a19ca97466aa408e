"""Accessibility of the tab by axe-core: `python -m tests.support.axe_report AXE_JS`.

axe-core is not part of this repository: `npm pack axe-core` downloads it, and its `axe.min.js` is the argument. Opens
every page of the tab in light and dark, prints each fault with its elements, and exits with 1 if one is serious.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.support.browser_tab import ALONE, parameters
from tests.support.tensorboard_server import Server
from tests.support.transformer_runs import write_transformers

PICKS = '[["layers.0.q_proj",""]]'
PAGES = {
    "overview": "",
    "map": parameters(page="map", run="vanishing", kind="gradient"),
    "details": parameters(page="map", run="vanishing", kind="gradient", picks=PICKS, step="300"),
    "two runs": parameters(page="map", run="baseline", vs="diverged", kind="activation"),
    "unusual": parameters(page="map", run="outlier", kind="activation", sort="unusual"),
}
SERIOUS = ("serious", "critical")


def faults(page: Any, script: str) -> list[tuple[str, str, list[str]]]:
    page.evaluate(script)
    found = page.evaluate("() => axe.run()")["violations"]
    return [(one["impact"], one["id"], [node["html"][:140] for node in one["nodes"][:4]]) for one in found]


def main(axe: Path) -> int:
    script = axe.read_text()
    worst = 0
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        write_transformers(Path(directory) / "runs")
        with Server(Path(directory) / "runs", Path(directory) / "log") as server:
            server.wait_for(lambda: len(server.newest()) == 4)
            browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                for name, state in PAGES.items():
                    page = browser.new_page(color_scheme=scheme, viewport={"width": 1440, "height": 900})
                    page.goto(server.address + ALONE + ("#tbhooks&" + state if state else ""))
                    page.wait_for_timeout(3000)
                    page.wait_for_selector(".detail-section[aria-busy=true]", state="detached")
                    found = faults(page, script)
                    worst += sum(impact in SERIOUS for impact, _, _ in found)
                    print(f"{scheme}, {name}: {len(found)} faults")  # noqa: T201  a script
                    for impact, rule, nodes in found:
                        print(f"  {impact} {rule}", *nodes, sep="\n    ")  # noqa: T201
                    page.close()
            browser.close()
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
