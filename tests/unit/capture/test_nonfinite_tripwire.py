"""The step at which gradients were first not finite is found even if it was not logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.step import nonfinite_tripwire
from tbhooks.data.frame import NONFINITE_SINCE
from tests.support import fake_device
from tests.support.loops import forward, mlp, sgd


def train(model: nn.Module, steps: int, nan_step: int | None, optimizer: Any = None) -> None:
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss = forward(model)
        if step == nan_step:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def since(watching: tbhooks.Watch) -> dict[int, float | None]:
    return {frame.step: frame.scalars.get(NONFINITE_SINCE) for frame in watching.history}


@pytest.mark.parametrize("nan_step", [0, 1, 7, 19, 20, 21])
def test_the_next_logged_step_has_the_first_nonfinite_step(nan_step: int) -> None:
    model = mlp()
    with tbhooks.watch(model, every=20) as watching:
        train(model, 41, nan_step)
    first = next(step for step in (0, 20, 40) if step >= nan_step)
    known = since(watching)
    assert known[first] == nan_step
    assert all(known[step] is None for step in known if step < first)


def test_nothing_is_recorded_if_all_gradients_are_finite() -> None:
    model = mlp()
    with tbhooks.watch(model, every=5) as watching:
        train(model, 16, None)
    assert set(since(watching).values()) == {None}


def test_finite_gradients_whose_sum_overflows_are_finite() -> None:
    model = mlp()
    with tbhooks.watch(model, every=5) as watching:
        for _ in range(6):
            forward(model)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3e38)
            sgd(model, lr=0.0).step()
    assert watching.stats.errors == 0
    assert set(since(watching).values()) == {None}


def test_a_full_buffer_is_evaluated_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite_tripwire, "MOST_STEPS", 4)
    model = mlp()
    with tbhooks.watch(model, every=50) as watching:
        train(model, 51, 23)
    assert since(watching) == {0: None, 50: 23.0}


def test_several_optimizers_in_a_step_are_checked_once() -> None:
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
def test_gradients_that_cannot_be_read_raise_nothing(gradients: str) -> None:
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


def test_a_step_that_a_fused_optimizer_skips_is_not_reported() -> None:
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


def test_there_is_no_sync() -> None:
    model = fake_device.to_device(mlp())
    optimizer = sgd(model)
    with fake_device.Log() as record, tbhooks.watch(model, every=5) as watching:
        for step in range(11):
            (model(fake_device.put(torch.randn(16, 4))).square().mean() * (float("nan") if step == 7 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert record.syncs == 0
        assert len(record.copies) == 3
    assert since(watching)[10] == 7


LARGE = {torch.float16: 3e4, torch.bfloat16: 1e38, torch.float32: 1e37, torch.float64: 1e308}


class Multiplied(nn.Module):
    """One weight per element; the gradient of each is exactly its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def multiply(dtype: torch.dtype, gradients: list[float], reaction: str | None = None) -> tbhooks.Watch:
    """Trains one step per gradient, which is that of all weights. Every second step is logged."""
    model = Multiplied(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=2, rules=()) as watching:
        if reaction is not None:
            watching.on_nonfinite(reaction)
        for gradient in gradients:
            model(torch.full((64,), gradient, dtype=dtype)).backward(torch.ones(64, dtype=dtype))
            optimizer.step()
            optimizer.zero_grad()
    assert watching.stats.errors == 0, watching.stats.messages
    return watching


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", LARGE)
def test_large_finite_gradients_are_finite_although_their_sum_is_not(dtype: torch.dtype, sign: float) -> None:
    assert not torch.full((64,), LARGE[dtype], dtype=dtype).sum(dtype=dtype).isfinite()
    watching = multiply(dtype, [0.0, sign * LARGE[dtype], sign * LARGE[dtype]])
    assert set(since(watching).values()) == {None}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", LARGE)
def test_nonfinite_gradients_are_found_in_every_dtype(dtype: torch.dtype, bad: float) -> None:
    assert since(multiply(dtype, [0.0, bad, 0.0])) == {0: None, 2: 1.0}


@pytest.mark.parametrize("dtype", LARGE)
def test_raise_lets_large_finite_gradients_pass(dtype: torch.dtype) -> None:
    assert len(multiply(dtype, [0.0, LARGE[dtype], -LARGE[dtype]], "raise").history) == 2
    with pytest.raises(tbhooks.FindingError):
        multiply(dtype, [0.0, float("inf")], "raise")


def test_a_backend_without_aminmax_uses_the_infinity_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aten::aminmax.out")

    monkeypatch.setattr(torch, "aminmax", missing)
    assert since(multiply(torch.float32, [0.0, 1e37, 1e37, -float("inf"), 0.0])) == {0: None, 2: None, 4: 3.0}


def test_a_step_costs_one_reduction_of_the_gradient() -> None:
    model = fake_device.to_device(mlp())
    optimizer = sgd(model)
    with tbhooks.watch(model, every=100):
        for _ in range(3):
            model(fake_device.put(torch.randn(16, 4))).square().mean().backward()
            optimizer.step()
        with fake_device.Log() as record:
            optimizer.step()
        with_watch = record.launches.copy()
    with fake_device.Log() as record:
        optimizer.step()
    assert (with_watch - record.launches).total() == 1


def train_until(steps: int, is_nan: Any, every: int = 5) -> dict[int, float | None]:
    """Gradients are NaN in the steps for which `is_nan` is true."""
    watching = multiply_steps([float("nan") if is_nan(step) else 1.0 for step in range(steps)], every)
    return since(watching)


def multiply_steps(gradients: list[float], every: int) -> tbhooks.Watch:
    model = Multiplied(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=every, rules=()) as watching:
        for gradient in gradients:
            model(torch.full((64,), gradient)).backward(torch.ones(64))
            optimizer.step()
            optimizer.zero_grad()
    return watching


def test_the_first_nonfinite_step_stays_the_same_while_gradients_are_nonfinite() -> None:
    known = train_until(24, lambda step: step >= 7)
    assert known == {0: None, 5: None, 10: 7.0, 15: 7.0, 20: 7.0}


def test_the_first_nonfinite_step_stays_the_same_over_a_full_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nonfinite_tripwire, "MOST_STEPS", 3)
    known = train_until(31, lambda step: step >= 7, every=10)
    assert known == {0: None, 10: 7.0, 20: 7.0, 30: 7.0}


def test_after_finite_steps_the_next_nonfinite_step_is_a_new_one() -> None:
    known = train_until(31, lambda step: step in (7, 12, 13) or step >= 22)
    assert known == {0: None, 5: None, 10: 7.0, 15: 12.0, 20: None, 25: 22.0, 30: 22.0}


def test_a_change_of_the_gradients_dtype_loses_nothing() -> None:
    first, second = Multiplied(torch.float64), Multiplied(torch.float32)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=6, rules=(), step="optimizer") as watching:
        for step in range(13):
            used = first if step < 4 else second
            numbers = torch.full((64,), float("nan") if step == 2 else 1.0, dtype=used.weight.dtype)
            used(numbers).backward(torch.ones_like(numbers))
            optimizer.step()
            optimizer.zero_grad()
    assert since(watching) == {0: None, 6: 2.0, 12: None}


def test_another_gradient_is_read_once_the_parameter_has_none() -> None:
    first, second = Multiplied(torch.float32), Multiplied(torch.float32)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=6, rules=(), step="optimizer") as watching:
        for step in range(13):
            used = first if step < 4 else second
            used(torch.full((64,), float("nan") if step == 8 else 1.0)).backward(torch.ones(64))
            optimizer.step()
            optimizer.zero_grad()
    assert since(watching) == {0: None, 6: None, 12: 8.0}


def test_parameters_may_be_taken_from_the_optimizer() -> None:
    model = Multiplied(torch.float32)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4)), model.weight], lr=0.0)
    with tbhooks.watch(model, every=6, rules=(), step="optimizer") as watching:
        for step in range(13):
            if step == 4:
                del optimizer.param_groups[0]["params"][:2]
            model(torch.full((64,), float("nan") if step == 8 else 1.0)).backward(torch.ones(64))
            optimizer.step()
            optimizer.zero_grad()
    assert since(watching) == {0: None, 6: None, 12: 8.0}
    assert watching.stats.errors == 0, watching.stats.messages
