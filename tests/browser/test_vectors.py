"""Maps of vectors in the tab: the load of experts and the numbers of attention heads by steps, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tbhooks
from tests.support.browser_tab import Pages, Tab, alone, parameters, shown
from tests.support.moe_models import Block
from tests.support.tensorboard_server import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

STEPS, STEP = 8, 5
EXPERTS, TOP_K, HEADS, WIDTH, LENGTH = 6, 2, 2, 8, 5


class Attention(nn.Module):
    """Softmax attention of two heads, whose queries, keys and values are the input."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        weights = nn.functional.softmax(parts @ parts.transpose(-1, -2), dim=-1)
        return (weights @ parts).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mixture = Attention(), Block(EXPERTS, TOP_K, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x) * 0  # so that the router gets what the test knows
        found: Tensor = self.mixture((attended + x).flatten(0, 1))
        return found


def batch(step: int) -> NDArray[np.float64]:
    return np.random.default_rng(step).normal(size=(4, LENGTH, WIDTH)).astype(np.float32).astype(np.float64)


def gate() -> NDArray[np.float64]:
    return np.random.default_rng(77).normal(size=(EXPERTS, WIDTH)).astype(np.float32).astype(np.float64)


@pytest.fixture(scope="module")
def vectors(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of TensorBoard over a run of a mixture of experts with attention."""
    directory = tmp_path_factory.mktemp("vectors")
    model = Model()
    with torch.no_grad():
        model.mixture.gate.weight.copy_(torch.from_numpy(gate()))
        model.mixture.gate.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, directory / "run", every=1, kinds=("activation", "functional")).experts() as w:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.from_numpy(batch(step)).float()).square().mean().backward()
            optimizer.step()
    assert w.stats.errors == 0, w.stats.messages
    with Server(directory, tmp_path_factory.mktemp("server") / "log") as server:
        server.wait_for(lambda: server.newest() == {"run": STEPS - 1})
        yield server.address


@pytest.fixture
def opened(browser: Any, vectors: str) -> Iterator[Pages]:
    pages = Pages(browser, vectors)
    yield pages
    for context in browser.contexts:
        context.close()
    assert not pages.errors


def rows(tab: Tab) -> dict[str, str]:
    """The tooltip of each row at one step, by its first line."""
    tab.settle()
    count = round(tab.frame.evaluate("() => document.querySelector('.map-stage').clientHeight"))
    shown_rows = min(int((count - tab.layout()["top"]) / tab.layout()["rowHeight"]), 40)
    found = [tab.hover(row, STEP) for row in range(shown_rows)]
    return {text.splitlines()[0]: text for text in found if text}


def test_the_load_of_experts_is_a_map_by_steps(opened: Pages, screenshots: Path) -> None:
    tab = alone(opened, parameters(run="run", kind="channel.experts"))
    kind = tab.frame.get_by_label("Kind", exact=True).locator("option:checked")
    expect(kind).to_have_text("load by expert")
    expect(tab.frame.get_by_label("Stat", exact=True)).to_have_value("mean")
    chosen = np.argsort(batch(STEP).reshape(-1, WIDTH) @ gate().T, axis=1)[:, -TOP_K:]
    tokens = np.bincount(chosen.reshape(-1), minlength=EXPERTS)
    tooltips = rows(tab)
    for expert, load in enumerate(EXPERTS * tokens / tokens.sum()):
        assert f"mean {shown(load)}" in tooltips[f"mixture.gate[{expert}]"]
    tab.page.screenshot(path=screenshots / "experts.png")


def test_attention_heads_are_maps_by_steps(opened: Pages, screenshots: Path) -> None:
    tab = alone(opened, parameters(run="run", kind="channel.heads"))
    kind = tab.frame.get_by_label("Kind", exact=True).locator("option:checked")
    expect(kind).to_have_text("attention by head")
    parts = batch(STEP).reshape(4, LENGTH, HEADS, -1).transpose(0, 2, 1, 3)
    logits = parts @ parts.transpose(0, 1, 3, 2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = {
        "entropy": -(weights * np.log(weights)).sum(-1).mean((0, 2)),
        "logits": logits.max(-1).mean((0, 2)),
        "first_token": weights[..., 0].mean((0, 2)),
    }
    tooltips = rows(tab)
    for name, values in expected.items():
        for head, value in enumerate(values):
            assert f"mean {shown(value)}" in tooltips[f"attention:softmax.{name}[head {head}]"]
    tab.page.screenshot(path=screenshots / "heads.png")
