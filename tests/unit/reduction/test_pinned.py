"""Copies from and to pinned memory: none of it is allocated in training, and the background thread waits properly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.reduction import pinned
from tests.support import fake_device, fake_host_memory, moe_models, zoo
from tests.support.fake_host_memory import HostMemory

ROOT = Path(__file__).parents[3]
STEPS = 4


SCRIPT = """
import os, threading, time, torch
from pathlib import Path
from tbhooks.capture.recording.device_buffer import Buffer, copy_out

def wakes_of_others(work):
    def wakes():
        time.sleep(0.3)  # they wait actively for a while
        own = str(threading.get_native_id())
        texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir() if task.name != own]
        return sum(int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for text in texts)

    before = wakes()
    work()
    return wakes() - before

torch.set_num_threads(2)
buffer = Buffer(torch.zeros(()), True, 20_000)
buffer.take_together(20_000)
numbers = torch.zeros(1 << 22)
print(wakes_of_others(lambda: (copy_out(buffer), buffer.reset())), wakes_of_others(lambda: numbers.add_(1)))
"""


def test_records_of_a_cpu_are_copied_without_other_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    of_records, of_torch = map(int, done.stdout.split())
    assert of_records == 0
    assert of_torch > 0  # what torch itself shares among threads


@pytest.mark.parametrize("tensor", [torch.arange(12.0).view(3, 4).t(), torch.ones(2).expand(3, 2), torch.ones(0, 3)])
def test_a_copy_of_any_layout_is_equal_and_stays_so(tensor: Tensor) -> None:
    expected = tensor.clone()
    copied = pinned.download(tensor).tensor
    tensor.untyped_storage().fill_(0)
    assert copied.shape == expected.shape
    assert torch.equal(copied, expected)


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


Ask = Callable[[tbhooks.Watch], object]
EXTRAS: dict[str, Ask] = {
    "nothing": lambda _: None,
    "experts": lambda w: w.experts(),
    "optimizer state": lambda w: w.optimizer_state(),
    "checksums": lambda w: w.checksums(),
    "metrics": lambda w: w.metric("largest", lambda tensor: tensor.abs().amax()).metric(
        "many", lambda tensor: tensor.reshape(-1)[:64].float(), kind="weight"
    ),
    "noise scale": lambda w: w.noise_scale(),
    "flight recorder": lambda w: w.flight_recorder(steps=256),
    "global flight recorder": lambda w: w.flight_recorder(steps=256, detail="global"),
    "progress": lambda w: w.progress().log_every(2),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def mixture(dtype: torch.dtype, depth: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [moe_models.Block() for _ in range(depth)]
    return fake_device.to_device(nn.Sequential(*blocks, nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype))


def train_asking(ask: Ask, memory: HostMemory, dtype: torch.dtype, depth: int) -> tbhooks.Watch:
    """Trains with samples and dumps; asserts that no block is allocated from the first step to the last."""
    model = mixture(dtype, depth)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    watching = tbhooks.watch(model, every=1, histograms=True)
    ask(watching)
    before = memory.allocations
    for step in range(3):
        losses = model(fake_device.put(torch.randn(6, 8).to(dtype))).float().square().mean(-1)
        watching.samples(losses.detach(), ids=[f"{step}-{i}" for i in range(6)], group=["a", "b"] * 3)
        losses.mean().backward()
        watching.log({"loss": losses.mean()})
        optimizer.step()
        optimizer.zero_grad()
        if watching._session.flight.is_started:
            watching.dump("for this test")
        watching.flush()
    watching.close()
    assert watching.stats.errors == 0, watching.stats.messages
    assert memory.allocations == before
    return watching


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ask", EXTRAS.values(), ids=EXTRAS.keys())
def test_whatever_is_asked_for_fits_in_what_was_reserved(memory: HostMemory, ask: Ask, dtype: torch.dtype) -> None:
    train_asking(ask, memory, dtype, depth=6)


@pytest.mark.parametrize("depth", [1, 12])
def test_everything_at_once_fits_in_what_was_reserved(memory: HostMemory, depth: int) -> None:
    def everything(w: tbhooks.Watch) -> None:
        for name, ask in EXTRAS.items():
            if name != "global flight recorder":
                ask(w)

    watching = train_asking(everything, memory, torch.float32, depth)
    assert len(watching.flights) == 3


class Repeated(nn.Module):
    """One layer that is called so often that a step needs more than what was reserved for it."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layer, self._calls = nn.Linear(3, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._calls):
            x = self.layer(x)
        return x


def test_a_step_that_needs_more_is_copied_in_pieces_and_the_background_thread_reserves_more(memory: HostMemory) -> None:
    def train(put: Callable[[Tensor], Tensor], move: Callable[[nn.Module], nn.Module]) -> tuple[tbhooks.Watch, int]:
        torch.manual_seed(0)
        model = move(Repeated(300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watching = tbhooks.watch(model, every=1)
        before = memory.allocations
        for _ in range(3):
            model(put(torch.ones(2, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            watching.flush()
        watching.close()
        assert watching.stats.errors == 0, watching.stats.messages
        return watching, before

    on_cpu, _ = train(lambda tensor: tensor, lambda model: model)
    reserved = memory.in_training
    on_device, before = train(fake_device.put, fake_device.to_device)
    assert memory.in_training - reserved == before == pinned.BLOCKS  # of watch()
    assert memory.allocations == pinned.BLOCKS + pinned.MORE_BLOCKS  # those of the background thread, once
    for one, other in zip(on_device.history, on_cpu.history, strict=True):
        assert one["layer", "activation"].count == 300 * 6
        assert one["layer", "activation"].mean == pytest.approx(other["layer", "activation"].mean, rel=1e-6)
        assert one["layer", "gradient"].max == other["layer", "gradient"].max


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
    assert memory.blocking == [True] * 3  # the first step, the dump, and what close() judges
    assert {device for _, device in memory.waits} == {fake_device.DEVICE}
    # What close() copies in the background thread, it copies on the device of the model.
    assert [device for thread, device in memory.copies if thread != "MainThread"] == [fake_device.DEVICE]


def test_the_smallest_block_is_taken_and_none_is_larger_than_the_largest(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "LARGEST", 1 << 14)
    for size in (1000, 5000, 100_000, 3000):
        pinned.reserve(size)
    assert pinned._reserved == [1024, 8192, 1 << 14]
    before = memory.allocations
    for size, blocks in ((1000, [1024]), (1025, [8192]), (20_000, [1 << 14, 1 << 14])):
        assert [piece.untyped_storage().nbytes() for piece in pinned.empty(size)] == blocks
    assert memory.allocations == before == 3 * pinned.BLOCKS


def test_what_is_uploaded_takes_a_reserved_block(memory: HostMemory) -> None:
    pinned.reserve(5000)
    before = memory.allocations
    sent = [torch.arange(600), torch.ones(3, 7), torch.tensor([], dtype=torch.int64)]
    for tensor in sent:
        there = pinned.upload(tensor, fake_device.DEVICE)
        assert there.device == fake_device.DEVICE
        assert torch.equal(there.cpu(), tensor)
    assert memory.allocations == before
    assert [piece.numel() for piece in pinned.empty(9000)] == [8192, 808]
    large = torch.arange(5000)
    assert torch.equal(pinned.upload(large, fake_device.DEVICE).cpu(), large)
    assert memory.allocations == before


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
