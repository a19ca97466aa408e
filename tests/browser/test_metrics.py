"""Metrics, vectors and samples of a real training in the tab; the expected numbers are computed with NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import tbhooks
from tests.support.browser_tab import Pages, alone, in_tensorboard, parameters, shown
from tests.support.processes import wait_for
from tests.support.tensorboard_server import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

STEPS = 12
GROUPS = ("web", "books", "web", "books", "web", "code")


def batch(step: int) -> NDArray[np.float64]:
    return np.random.default_rng(step).normal(size=(6, 4)) * (1 + step)


def losses(step: int) -> NDArray[np.float64]:
    return np.square(batch(step)).mean(1)


def linear_weights() -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    random = np.random.default_rng(99)
    return [(random.normal(size=(4, 4)), random.normal(size=4)) for _ in range(3)]


def write(directory: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for layer, (weight, bias) in zip(list(model)[1:], linear_weights(), strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    w = tbhooks.watch(model, directory, every=1)
    w.per_channel("1")
    w.metric("largest", lambda t: t.max(), "0").metric("by_column", lambda t: t.amax(0), "0")
    for step in range(STEPS):
        data = torch.from_numpy(batch(step)).float()
        loss = model(data).square().mean()
        w.samples(data.square().mean(1), ids=[f"file {step}-{i}" for i in range(6)], group=list(GROUPS), most=3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    w.close()
    assert w.stats.errors == 0, w.stats.messages


@pytest.fixture(scope="module")
def metrics(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of TensorBoard over a run with metrics and samples."""
    directory = tmp_path_factory.mktemp("metrics")
    write(directory / "run")
    with Server(directory, tmp_path_factory.mktemp("server") / "log") as server:
        server.wait_for(lambda: server.newest() == {"run": STEPS - 1})
        yield server.address


@pytest.fixture
def opened(browser: Any, metrics: str) -> Iterator[Pages]:
    pages = Pages(browser, metrics)
    yield pages
    for context in browser.contexts:
        context.close()
    assert not pages.errors


def test_a_metric_is_a_stat_of_its_kind(opened: Pages, screenshots: Path) -> None:
    tab = in_tensorboard(opened, parameters(run="run", kind="activation"))
    tab.choose("Stat", "metric.largest")
    wait_for(lambda: shown(batch(7).max()) in tab.hover(0, 7), "the map of the metric")
    assert "no data" in tab.hover(1, 7), "the metric is of the first module only"
    tab.click(0, 7)
    table = tab.frame.locator(".detail-stats .detail-table")
    expect(table.locator("tr", has_text="metric.largest")).to_contain_text(shown(batch(7).max()))
    tab.frame.locator(".detail-lines").locator("select[name=stat]").select_option("metric.largest")
    expect(tab.frame.locator(".detail-lines h3")).to_have_text("metric.largest over steps")
    tab.page.screenshot(path=screenshots / "metric.png")


def test_a_metric_with_several_numbers_is_a_map_of_its_elements_by_steps(opened: Pages, screenshots: Path) -> None:
    tab = alone(opened, parameters(run="run", kind="element.activation"))
    expect(tab.frame.get_by_label("Kind", exact=True).locator("option:checked")).to_have_text("activation by element")
    for column in range(4):
        tooltip = tab.hover(1 + column, 5)
        assert shown(batch(5)[:, column].max()) in tooltip
        assert f"0[{column}]" in tooltip
    tab.click(3, 5)
    expect(tab.frame.locator(".detail-lines h3")).to_have_text("metric.by_column over steps")
    tab.page.screenshot(path=screenshots / "elements.png")


def test_channels_are_a_map_by_steps(opened: Pages, screenshots: Path) -> None:
    tab = alone(opened, parameters(run="run", kind="channel.activation", stat="std"))
    ((weight, bias), *_) = linear_weights()
    outputs = batch(5) @ weight.T + bias
    for channel in range(4):
        tooltip = tab.hover(1 + channel, 5)
        assert f"1[{channel}]" in tooltip
        assert shown(outputs[:, channel].std()) in tooltip
    tab.page.screenshot(path=screenshots / "channels.png")


def test_the_panel_shows_the_samples_of_the_chosen_step(opened: Pages, screenshots: Path) -> None:
    tab = alone(opened, parameters(run="run", kind="activation"), viewport={"width": 1440, "height": 1000})
    tab.click(1, 4)
    section = tab.frame.locator(".detail-samples")
    worst = np.argsort(-losses(4))[:3]
    rows = section.locator(".detail-table").first.locator("tbody tr")
    expect(rows).to_have_count(3)
    for row, i in enumerate(worst):
        expect(rows.nth(row)).to_contain_text(f"file 4-{i}")
        expect(rows.nth(row)).to_contain_text(shown(losses(4)[i]))
        expect(rows.nth(row)).to_contain_text(GROUPS[i])
    web = losses(4)[[0, 2, 4]].mean()
    expect(section.locator("tr", has_text="web").last).to_contain_text(shown(web))
    section.scroll_into_view_if_needed()
    tab.page.screenshot(path=screenshots / "samples.png")


def test_the_gain_of_a_gradient_is_shown_per_module(opened: Pages) -> None:
    tab = alone(opened, parameters(run="run", kind="gradient", stat="gain"))
    # The rms of the gradient at module 1 over that at module 2; the weights hardly change.
    weights, data = linear_weights(), batch(5)
    outputs = [data]
    for weight, bias in weights:
        outputs.append(outputs[-1] @ weight.T + bias)
    gradient = 2 * outputs[3] / outputs[3].size
    of_second = gradient @ weights[2][0]
    of_first = of_second @ weights[1][0]
    expected = np.sqrt(np.square(of_first).mean()) / np.sqrt(np.square(of_second).mean())
    assert shown(expected) in tab.hover(1, 5)


def test_the_text_tab_has_the_samples(opened: Pages, screenshots: Path) -> None:
    page = opened.open("/#text")
    expect(page.get_by_text("tbhooks/samples").first).to_be_visible()
    expect(page.get_by_text(f"file {STEPS - 1}-{np.argmax(losses(STEPS - 1))}").first).to_be_attached(timeout=20_000)
    page.screenshot(path=screenshots / "text.png")
