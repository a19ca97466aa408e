"""A device without memory for tbhooks: its allocations fail, are caught and logged once, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tests.support import fake_device, zoo
from tests.support.full_device import FullDevice, full_for_us
from tests.support.slow import slow


def model() -> nn.Module:
    torch.manual_seed(0)
    return fake_device.to_device(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)))


def train(trained: nn.Module, steps: int, watching: tbhooks.Watch | None = None, shows_samples: bool = False) -> Tensor:
    optimizer = torch.optim.AdamW(trained.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = trained(fake_device.put(torch.randn(6, 8, generator=generator))).square().mean(-1)
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        if watching is not None:
            watching.log({"loss": loss})
            if shows_samples:
                watching.samples(losses.detach())
    return torch.cat([parameter.detach().cpu().flatten() for parameter in trained.parameters()])


def watched(fails: Any, steps: int = 3, **options: Any) -> tuple[Tensor, tbhooks.Watch, FullDevice]:
    trained = model()
    with full_for_us(fails) as device, tbhooks.watch(trained, every=1, **options) as watching:
        weights = train(trained, steps, watching)
    return weights, watching, device


ASKED: dict[str, Callable[[tbhooks.Watch], object]] = {
    "nothing more": lambda _: None,
    "flight recorder": lambda w: w.flight_recorder(steps=8),
    "metric": lambda w: w.metric("largest", lambda tensor: tensor.abs().amax()),
    "channels": lambda w: w.per_channel("*", histograms=True),
    "embeddings": lambda w: w.embeddings("*"),
    "images": lambda w: w.images("*"),
    "progress": lambda w: w.progress().log_every(2),
}
"""What allocates memory on the device, beside samples."""


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_training_goes_on_with_the_same_bits_if_every_allocation_of_ours_fails(
    ask: Callable[[tbhooks.Watch], object], caplog: pytest.LogCaptureFixture
) -> None:
    expected, trained = train(model(), 3), model()
    with full_for_us() as device, tbhooks.watch(trained, every=1) as watching:
        ask(watching)
        with caplog.at_level(logging.WARNING, "tbhooks"):
            weights = train(trained, 3, watching, shows_samples=True)
    told = [record.getMessage() for record in caplog.records if "OutOfMemory" in record.getMessage()]
    assert len(told) == len(set(told)) > 0
    assert device.failed > 3
    assert zoo.raw(weights) == zoo.raw(expected)
    assert watching.stats.errors > 0
    assert any("OutOfMemoryError" in message for message in watching.stats.messages)


def test_it_is_logged_once_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tbhooks"):
        _, watching, _ = watched(lambda _: True, steps=6)
    about = [record.getMessage() for record in caplog.records if "OutOfMemory" in record.getMessage()]
    assert about
    assert len(about) == len(set(about))
    assert watching.stats.errors > len(about)


def allocations() -> int:
    return watched(lambda _: False)[2].asked


@pytest.mark.parametrize("is_sixteenth", [True, pytest.param(False, marks=slow("the other places"))])
def test_a_failure_at_any_place_costs_at_most_what_was_read_there(is_sixteenth: bool) -> None:
    """Each allocation fails once, in the second step: the third is complete again."""
    expected = train(model(), 3)
    _, complete, device = watched(lambda _: False)
    assert complete.latest is not None
    first, last = device.asked // 3, 2 * device.asked // 3
    for number in (place for place in range(first, last) if (place % 16 == 0) is is_sixteenth):
        weights, watching, failing = watched(lambda i, number=number: i == number)
        assert failing.failed == 1
        assert zoo.raw(weights) == zoo.raw(expected), number
        assert watching.latest is not None
        assert watching.latest.step == 2, number
        missing = {str(site) for site in complete.latest.sites} - {str(site) for site in watching.latest.sites}
        assert len(missing) <= 1, (number, missing)


def test_when_memory_is_there_again_steps_are_complete() -> None:
    trained = model()
    with tbhooks.watch(trained, every=1) as watching:
        with full_for_us():
            train(trained, 2)
        train(trained, 2)
    assert watching.latest is not None
    kinds = {site.kind for site in watching.latest.sites}
    assert kinds == {"activation", "gradient", "weight", "weight_gradient", "update"}
