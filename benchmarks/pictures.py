"""Pictures of the tab for the documentation: `make pictures` writes docs/pictures/*.png.

The runs are those of tests/support/transformer_runs.py, so that the pictures change only when the tab does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright

from tests.support.browser_tab import ALONE, parameters
from tests.support.tensorboard_server import Server
from tests.support.transformer_runs import RUNS, write_transformers

PICTURES = ROOT / "docs" / "pictures"
PICKS = '[["layers.0.q_proj",""]]'
SHOTS: dict[str, tuple[str, str, tuple[int, int]]] = {
    "overview": ("", "light", (1280, 800)),
    "roles": (parameters(page="map", run="vanishing", kind="gradient"), "light", (1280, 800)),
    "details": (
        parameters(
            page="map", run="vanishing", kind="gradient", picks=PICKS, step="300", search="q_proj", range="full"
        ),
        "light",
        (1280, 900),
    ),
    "four-runs": (
        parameters(page="map", run="baseline", vs="diverged", more='["outlier","vanishing"]', kind="activation"),
        "light",
        (1280, 800),
    ),
    "unusual": (parameters(page="map", run="outlier", kind="activation", sort="unusual"), "light", (1280, 800)),
    "dark": (parameters(page="map", run="diverged", kind="update", stat="ratio"), "dark", (1280, 800)),
}


def shoot(browser: Any, address: str) -> None:
    for name, (state, scheme, (width, height)) in SHOTS.items():
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
        page.goto(address + ALONE + ("#tbhooks&" + state if state else ""))
        page.wait_for_selector(".card[data-level]" if not state else ".map-base[data-layout]", state="attached")
        page.wait_for_timeout(4000)
        page.screenshot(path=PICTURES / f"{name}.png")
        print(PICTURES / f"{name}.png", (PICTURES / f"{name}.png").stat().st_size >> 10, "kB")
        page.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        runs = Path(directory) / "runs"
        write_transformers(runs)
        with Server(runs, Path(directory) / "log") as server:
            server.wait_for(lambda: len(server.newest()) == len(RUNS))
            browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            shoot(browser, server.address)
            browser.close()


if __name__ == "__main__":
    main()
