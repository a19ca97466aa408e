"""Copies from and to pinned memory: none of it is allocated in training, and the background thread waits properly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.reduction import pinned
from tests.support import fake_device, fake_host_memory, zoo
from tests.support.fake_host_memory import HostMemory

STEPS = 4


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with fake_host_memory.installed() as made:
        yield made


def trained(name: str, memory: HostMemory) -> tuple[tbhooks.Watch, int]:
    """The watch of a training on the simulated device, and how many blocks there were before its first step."""
    on_device = zoo.moved(zoo.ZOO[name], fake_device.to_device, fake_device.put)
    made: list[tbhooks.Watch] = []
    before: list[int] = []

    def watch(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1))
        before.append(memory.allocations)
        return model

    zoo.plain_loop(on_device, STEPS, watch, lambda _, loss: made[0].log({"loss": loss}))
    made[0].close()
    assert made[0].stats.errors == 0, made[0].stats.messages
    assert len(made[0].history) == STEPS
    return made[0], before[0]


@pytest.mark.parametrize("name", ["mlp", "cnn", "shared_module", "dict_output"])
def test_pinned_memory_is_allocated_by_watch_and_never_in_training(memory: HostMemory, name: str) -> None:
    _, before = trained(name, memory)
    assert memory.allocations == before == pinned.BLOCKS


def test_the_thread_that_waits_for_a_copy_sleeps_and_uses_the_device_of_the_copy(memory: HostMemory) -> None:
    trained("mlp", memory)
    assert memory.blocking == [True] * STEPS
    assert len(memory.waits) == STEPS
    for thread, device in memory.waits:
        assert thread != "MainThread"
        assert device == fake_device.DEVICE


def test_a_dump_of_the_flight_recorder_is_waited_for_in_the_same_way(memory: HostMemory) -> None:
    model = fake_device.to_device(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=100).flight_recorder(steps=8) as watching:
        for _ in range(3):
            model(fake_device.put(torch.ones(2, 3))).sum().backward()
            optimizer.step()
        watching.dump("asked for")
    assert watching.stats.errors == 0
    assert len(watching.flights) == 1
    assert memory.blocking == [True] * 2
    assert {device for _, device in memory.waits} == {fake_device.DEVICE}


def test_what_is_uploaded_takes_a_reserved_block(memory: HostMemory) -> None:
    pinned.reserve(5000)
    before = memory.allocations
    sent = [torch.arange(600), torch.ones(3, 7), torch.tensor([], dtype=torch.int64)]
    for tensor in sent:
        there = pinned.upload(tensor, fake_device.DEVICE)
        assert there.device == fake_device.DEVICE
        assert torch.equal(there.cpu(), tensor)
    assert memory.allocations == before
    assert pinned.empty(9000).numel() == 9000
    assert memory.allocations == before + 1


def test_a_host_without_memory_for_it_costs_the_steps_and_no_exception(memory: HostMemory) -> None:
    model = fake_device.to_device(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        for is_full in (False, True, False):
            memory.is_full = is_full
            model(fake_device.put(torch.ones(2, 3))).sum().backward()
            optimizer.step()
            watching.flush()
    assert [frame.step for frame in watching.history] == [0, 2]
    assert watching.stats.errors == 1
    memory.is_full = True
    with tbhooks.watch(fake_device.to_device(nn.Linear(300, 3))):
        pass
