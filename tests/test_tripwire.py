"""The step at which gradients went non-finite is known although it was not logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks import tripwire
from tbhooks.frame import NONFINITE_SINCE
from tests import simulated
from tests.loops import forward, mlp, sgd


def train(model: nn.Module, steps: int, sick: Any, optimizer: Any = None, scaler: Any = None) -> None:
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss = forward(model)
        if step == sick:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def since(watching: tbhooks.Watch) -> dict[int, float | None]:
    return {frame.step: frame.scalars.get(NONFINITE_SINCE) for frame in watching.history}


@pytest.mark.parametrize("sick", [0, 1, 7, 19, 20, 21])
def test_the_first_logged_frame_after_it_says_when_it_began(sick: int) -> None:
    model = mlp()
    with tbhooks.watch(model, every=20) as watching:
        train(model, 41, sick)
    first = next(step for step in (0, 20, 40) if step >= sick)
    known = since(watching)
    assert known[first] == sick
    assert all(known[step] is None for step in known if step < first)


def test_a_healthy_run_says_nothing() -> None:
    model = mlp()
    with tbhooks.watch(model, every=5) as watching:
        train(model, 16, None)
    assert set(since(watching).values()) == {None}


def test_more_steps_than_can_be_put_aside_are_looked_at_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tripwire, "MOST_STEPS", 4)
    model = mlp()
    with tbhooks.watch(model, every=50) as watching:
        train(model, 51, 23)
    assert since(watching) == {0: None, 50: 23.0}


def test_several_optimizers_in_a_step_are_one_look() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.01) for i in (0, 2))
    with tbhooks.watch(model, every=10) as watching:
        for step in range(21):
            (forward(model) * (float("inf") if step == 13 else 1.0)).backward()
            first.step()
            second.step()
            model.zero_grad()
    assert since(watching)[20] == 13


@pytest.mark.parametrize("gradients", ["sparse", "none", "half"])
def test_odd_gradients_do_no_harm(gradients: str) -> None:
    model: Any = {
        "sparse": lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1)),
        "none": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False),
        "half": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(torch.float16),
    }[gradients]()
    optimizer = sgd(model)
    dtype = torch.long if gradients == "sparse" else next(model.parameters()).dtype
    with tbhooks.watch(model, every=3) as watching:
        for _ in range(7):
            loss = model(torch.ones(2, 4).to(dtype)).sum()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.stats.errors == 0
    assert set(since(watching).values()) == {None}


def test_a_step_that_a_fused_optimizer_leaves_out_is_not_held_against_the_model() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with tbhooks.watch(model, every=4) as watching:
        for step in range(9):
            loss: Tensor = forward(model) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert set(since(watching).values()) == {None}
    assert watching.stats.skipped == 1


def test_nothing_is_waited_for() -> None:
    model = simulated.to_device(mlp())
    optimizer = sgd(model)
    with simulated.Log() as record, tbhooks.watch(model, every=5) as watching:
        for step in range(11):
            (model(simulated.put(torch.randn(16, 4))).square().mean() * (float("nan") if step == 7 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert record.syncs == 0
        assert len(record.copies) == 3
    assert since(watching)[10] == 7
