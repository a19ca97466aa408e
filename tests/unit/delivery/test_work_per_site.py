"""The background thread works on whole arrays: a step with more sites executes hardly more Python.

Counted in bytecode instructions, which are the same on every machine, and not in seconds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.api.handle import lifecycle_of
from tbhooks.delivery.worker import Step, Worker

FEW, MANY = 30, 60
STEPS = 8
"""From the sixth step on, nothing is seen for the first time."""


class Block(nn.Module):
    """A layer of a model of any depth about which no rule has anything to say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tanh = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.tanh(self.linear(x))


def packed_steps(layers: int, directory: Path, histograms: bool, patch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of a training that the background thread would get."""
    kept: list[Step] = []
    patch.setattr(Worker, "submit", lambda _, step: kept.append(step))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching = tbhooks.watch(model, directory, every=1, histograms=histograms, rules=())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
    watching.close()
    patch.undo()
    return kept


def instructions_of(call: Callable[[], None]) -> int:
    """How many bytecode instructions a call executes, in all Python functions."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalizers are Python as well
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.fixture
def growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, str], float]:
    """How many instructions more a logged step takes in the background thread for each site more."""

    def measure(histograms: bool, scalars: str) -> float:
        found = []
        for layers in (FEW, MANY):
            steps = packed_steps(layers, tmp_path / f"{layers}", histograms, monkeypatch)
            model = nn.Linear(1, 1)
            watching = tbhooks.watch(
                model, tmp_path / f"{layers} again", every=1, histograms=histograms, scalars=scalars
            )
            worker = lifecycle_of(watching)._worker
            for step in steps[:-3]:
                worker._write(step)
            # The least of three: how often a wait for the thread of the SummaryWriter is interrupted is chance.
            counts = [instructions_of(lambda worker=worker, step=step: worker._write(step)) for step in steps[-3:]]
            latest = watching.latest
            assert latest is not None
            assert not latest.findings, "findings would be counted as well"
            found.append((len(latest.sites), min(counts)))
            watching.close()
        (few, less), (many, more) = found
        assert many > few + 300
        return (more - less) / (many - few)

    return measure


@pytest.mark.parametrize(
    ("histograms", "scalars", "most"),
    [
        pytest.param(False, "core", 1, id="scalars of every layer"),
        pytest.param(True, "auto", 1, id="summaries, and histograms in frame tensors"),
        # One loop is left, which joins the bytes of each histogram.
        pytest.param(True, "core", 100, id="histograms of every layer"),
    ],
)
def test_a_site_more_takes_no_more_python(
    growth: Callable[[bool, str], float], histograms: bool, scalars: str, most: float
) -> None:
    assert growth(histograms, scalars) < most
