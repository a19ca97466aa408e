"""How much Python runs for one more layer in a logged step: calls of functions are counted, nothing is timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.capture.hooks import eager_hooks

pytestmark = pytest.mark.skipif(eager_hooks._make_lane() is None, reason="the package has no hooks in C here")


def calls_in(run: Callable[[], None]) -> int:
    """The calls made from Python code while it runs, in this thread."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # finalizers of earlier tests are calls, too
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def calls_of_a_step(layers: int, **options: Any) -> int:
    """Those that a watch adds to one training step in the steady state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.ReLU())))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    bare = calls_in(step)
    with tbhooks.watch(model, every=1, **options) as watching:
        for _ in range(3):
            step()
        watching.flush()
        logged = calls_in(step)
    assert watching.stats.errors == 0
    return logged - bare


@pytest.mark.parametrize(
    ("kinds", "most"),
    # A layer and its ReLU have four tensors of modules and six of parameters.
    [(("activation", "gradient"), 26), (("activation", "gradient", "weight", "weight_gradient", "update"), 60)],
    ids=["modules", "all"],
)
def test_the_work_for_a_layer_does_not_grow(kinds: tuple[str, ...], most: int) -> None:
    few, many = (calls_of_a_step(layers, kinds=kinds, histograms=1) for layers in (50, 100))
    assert (many - few) / 50 <= most
