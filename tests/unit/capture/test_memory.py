"""How much memory a watch allocates, to the byte, from torch's record of every allocation and release."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.cli.bench import cuda_counters, timing
from tbhooks.reduction import cpu

CPU = torch.device("cpu")
WIDTH, BATCH, LAYERS = 256, 64, 8
INPUTS = torch.randn(BATCH, WIDTH)
# Python floats that torch wraps, loss and norms: some hundred bytes each.
SMALL = 16 << 10

needs_kernel = pytest.mark.skipif(cpu.library is None, reason="built without the C kernel")


def loss(model: nn.Module) -> Tensor:
    return model(INPUTS).square().mean()


def trained() -> timing.Trainee:
    """A model of 2 MB whose optimizer has its state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    trainee = timing.Trainee("", model, loss, timing.bare, Path())
    trainee.steps(2)
    return trainee


def peak(trainee: timing.Trainee) -> int:
    return cuda_counters.peak_bytes(trainee.step, CPU)


def allocated(trainee: timing.Trainee) -> int:
    return sum(number for number in cuda_counters.host_allocations(trainee.step) if number > 0)


def held(watching: tbhooks.Watch) -> tuple[int, int]:
    """Returns the bytes of the records of a step, and of the block for copies of weights."""
    block = watching._session.parameters._snapshots._block
    records = sum(buffer.records * buffer.record_bytes for buffer in watching._session.recorder._buffers)
    return records, 0 if block is None else block.nbytes


def test_the_same_step_has_the_same_peak_every_time() -> None:
    trainee = trained()
    assert peak(trainee) == peak(trainee)


@needs_kernel
@pytest.mark.parametrize("histograms", [False, 1])
def test_a_logged_step_allocates_no_more_than_the_copy_of_its_records(histograms: bool | int) -> None:
    trainee = trained()
    bare = peak(trainee)
    with tbhooks.watch(trainee.model, every=1, histograms=histograms) as watching:
        trainee.steps(3)  # the buffers grow to the size of a step
        records, _ = held(watching)
        assert peak(trainee) - bare <= records + SMALL
        assert watching.stats.errors == 0


@needs_kernel
def test_all_that_a_logged_step_ever_allocates_is_the_copy_of_its_records() -> None:
    """Temporaries included: there is none of any tensor's size."""
    trainee = trained()
    bare = allocated(trainee)
    with tbhooks.watch(trainee.model, every=1, histograms=1) as watching:
        trainee.steps(3)
        records, _ = held(watching)
        assert 0 < allocated(trainee) - bare <= records + SMALL


@needs_kernel
def test_the_copies_of_weights_take_their_size_and_stay() -> None:
    trainee = trained()
    weights = sum(parameter.nbytes for parameter in trainee.model.parameters())
    with tbhooks.watch(trainee.model, every=1) as watching:
        trainee.steps(2)
        _, copies = held(watching)
        assert weights <= copies <= weights + 64 * 2 * LAYERS
        trainee.steps(3)
        assert held(watching)[1] == copies


def test_without_updates_no_copy_of_weights_is_made() -> None:
    trainee = trained()
    with tbhooks.watch(trainee.model, every=1, kinds=("activation", "weight", "weight_gradient")) as watching:
        trainee.steps(2)
        assert held(watching)[1] == 0


def test_an_unlogged_step_allocates_what_a_bare_one_does() -> None:
    trainee = trained()
    bare = peak(trainee)
    with tbhooks.watch(trainee.model, every=1000):
        trainee.steps(2)
        assert peak(trainee) - bare <= 64  # the extremes that the check for NaN stores
