"""`Watch.noise_scale` on problems whose gradient noise scale is known in closed form, and where it cannot be told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tests.support.jobs import Quadratic

SIZE, START, SPREAD = 20, 0.5, 2.0
TRUE = SIZE * SPREAD**2 / (SIZE * START**2)
"""The gradient of a sample is w - x: its covariance has the trace 20 * 2², and the true gradient is w."""


def accumulate(
    steps: int, parts: int, batch: int, *, scale: float = 1.0, watched: bool = True
) -> tuple[nn.Module, tbhooks.Watch | None, list[list[Tensor]]]:
    torch.manual_seed(0)
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = tbhooks.watch(model, every=1).noise_scale() if watched else None
    gradients: list[list[Tensor]] = []
    for _ in range(steps):
        batches = [torch.randn(batch, SIZE, dtype=torch.float64) * SPREAD for _ in range(parts)]
        gradients.append([model.weight.detach() - x.mean(0) for x in batches])
        for x in batches:
            (model(x) * scale / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, watching, gradients


def reference(gradients: list[list[Tensor]], batch: int) -> tuple[float, float]:
    """The estimates of appendix A.1 in NumPy: the ratio of running means, and the mean of the ratios."""
    trace = signal = weight = 0.0
    ratios = []
    for micro in gradients:
        array = np.array([each.numpy() for each in micro])
        small, large = np.square(array).sum(1).mean(), np.square(array.mean(0)).sum()
        b_small, b_large = batch, batch * len(micro)
        trace = 0.95 * trace + 0.05 * (small - large) / (1 / b_small - 1 / b_large)
        signal = 0.95 * signal + 0.05 * (b_large * large - b_small * small) / (b_large - b_small)
        weight = 0.95 * weight + 0.05
        if signal > 0:
            ratios.append(max(trace, 0.0) / signal)
    return trace / signal, float(np.mean(ratios))


@pytest.mark.parametrize(("parts", "batch"), [(2, 8), (4, 4)])
def test_the_estimate_is_that_of_float64_numpy(parts: int, batch: int) -> None:
    _, watching, gradients = accumulate(12, parts, batch)
    assert watching is not None
    scalars = watching.latest.scalars
    watching.close()
    assert (scalars["train.noise_scale"], scalars["train.critical_batch"]) == pytest.approx(
        reference(gradients, batch), rel=1e-9
    )
    assert watching.stats.errors == 0


def test_it_converges_to_the_closed_form() -> None:
    _, watching, _ = accumulate(200, 4, 8)
    assert watching is not None
    scalars = watching.latest.scalars
    watching.close()
    assert scalars["train.noise_scale"] == pytest.approx(TRUE, rel=0.2)
    assert scalars["train.critical_batch"] == pytest.approx(TRUE, rel=0.1)
    assert not [tag for tag in scalars if tag.startswith("noise.")]


def test_a_constant_factor_of_the_loss_does_not_matter() -> None:
    found = []
    for scale in (1.0, 1024.0):
        _, watching, _ = accumulate(5, 3, 4, scale=scale)
        assert watching is not None
        found.append(watching.latest.scalars["train.noise_scale"])
        watching.close()
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_training_is_the_same_and_no_hook_stays() -> None:
    watched, watching, _ = accumulate(3, 2, 4)
    plain, _, _ = accumulate(3, 2, 4, watched=False)
    assert watching is not None
    assert torch.equal(watched.weight, plain.weight)  # type: ignore[arg-type]
    assert not watched.weight._backward_hooks
    seen = watching.stats.hooks_fired
    with watching.paused():
        watched(torch.zeros(2, SIZE, dtype=torch.float64)).backward()
    assert watching.stats.hooks_fired == seen
    watching.close()


@pytest.mark.parametrize("forwards", [1, 2])
def test_where_it_cannot_be_told_it_is_nan_and_says_why(forwards: int) -> None:
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        losses = [model(torch.ones(4, SIZE, dtype=torch.float64)) for _ in range(forwards)]
        for _ in range(forwards):
            sum(losses).backward(retain_graph=True)  # type: ignore[union-attr]
        if forwards == 2:
            losses[0].backward()
        optimizer.step()
    scalars, why = watching.latest.scalars, watching.stats.unseen["train.noise_scale"]
    assert math.isnan(scalars["train.noise_scale"])
    assert math.isnan(scalars["train.critical_batch"])
    assert ("micro-batches" if forwards == 1 else "2 forwards and 3 backwards") in why
    assert watching.stats.errors == 0


def test_a_step_that_is_not_finite_does_not_spoil_the_running_means() -> None:
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(0)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        for step in range(4):
            for _ in range(2):
                x = torch.randn(4, SIZE, dtype=torch.float64)
                model(x / 0 if step == 1 else x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(watching.latest.scalars["train.noise_scale"])
