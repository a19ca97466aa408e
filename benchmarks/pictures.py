"""Pictures of the tab for the documentation: `make pictures` writes docs/pictures/*.png.

The runs are those of tests/support/transformer_runs.py, so that the pictures change only when the tab does; those of
experts and heads are of a tiny Mixtral that is trained here, at first with a load-balancing loss of the wrong sign.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
from playwright.sync_api import sync_playwright

import tbhooks
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
    "experts": (
        parameters(page="map", run="mixture", kind="channel.experts", stat="mean", range="full"),
        "light",
        (1280, 620),
    ),
    "heads": (
        parameters(page="map", run="mixture", kind="channel.heads", stat="mean", range="full"),
        "light",
        (1280, 620),
    ),
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


def write_mixture(directory: Path) -> None:
    """A tiny Mixtral whose routers collapse during 150 steps, and are mended in the next 150."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tbhooks.watch(model, directory, every=5, kinds=("activation", "functional")).experts() as w:
        for step in range(300):
            model.router_aux_loss_coef = -0.5 if step < 150 else 0.5
            tokens = (torch.randint(64, (16, 1)) + torch.arange(24).square()) % 64
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            w.log({"loss": loss})


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        runs = Path(directory) / "runs"
        write_transformers(runs)
        write_mixture(runs / "mixture")
        with Server(runs, Path(directory) / "log") as server:
            server.wait_for(lambda: len(server.newest()) == len(RUNS) + 1)
            browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            shoot(browser, server.address)
            browser.close()


if __name__ == "__main__":
    main()
