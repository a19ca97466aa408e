"""How much memory a watch allocates, to the byte, from torch's record of every allocation and release."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.hooks import eager_hooks
from tbhooks.capture.recording.calls import ROOM
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


def trained() -> timing.Variant:
    """A model of 2 MB whose optimizer has its state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    variant = timing.Variant("", model, loss, timing.bare, Path())
    variant.steps(2)
    return variant


def peak(variant: timing.Variant) -> int:
    return cuda_counters.peak_bytes(variant.step, CPU)


def allocated(variant: timing.Variant) -> int:
    return sum(number for number in cuda_counters.host_allocations(variant.step) if number > 0)


def held(watching: tbhooks.Watch) -> tuple[int, int]:
    """Returns the bytes of the records of a step, and of the block for copies of weights."""
    block = watching._session.parameters._snapshots._block
    records = sum(buffer.header[ROOM] * buffer.record_bytes for buffer in watching._session.recorder._buffers)
    return records, 0 if block is None else block.nbytes


def test_the_same_step_has_the_same_peak_every_time() -> None:
    variant = trained()
    assert peak(variant) == peak(variant)


@needs_kernel
@pytest.mark.parametrize("histograms", [False, 1])
def test_a_logged_step_allocates_no_more_than_the_copy_of_its_records(histograms: bool | int) -> None:
    variant = trained()
    bare = peak(variant)
    with tbhooks.watch(variant.model, every=1, histograms=histograms) as watching:
        variant.steps(3)  # the buffers grow to the size of a step
        records, _ = held(watching)
        assert peak(variant) - bare <= records + SMALL
        assert watching.stats.errors == 0


@needs_kernel
def test_all_that_a_logged_step_ever_allocates_is_the_copy_of_its_records() -> None:
    """Temporaries included: there is none of any tensor's size."""
    variant = trained()
    bare = allocated(variant)
    with tbhooks.watch(variant.model, every=1, histograms=1) as watching:
        variant.steps(3)
        records, _ = held(watching)
        assert 0 < allocated(variant) - bare <= records + SMALL


@needs_kernel
def test_the_copies_of_weights_take_their_size_and_stay() -> None:
    variant = trained()
    weights = sum(parameter.nbytes for parameter in variant.model.parameters())
    with tbhooks.watch(variant.model, every=1) as watching:
        variant.steps(2)
        _, copies = held(watching)
        assert weights <= copies <= weights + 64 * 2 * LAYERS
        variant.steps(3)
        assert held(watching)[1] == copies


def test_without_updates_no_copy_of_weights_is_made() -> None:
    variant = trained()
    with tbhooks.watch(variant.model, every=1, kinds=("activation", "weight", "weight_gradient")) as watching:
        variant.steps(2)
        assert held(watching)[1] == 0


def test_an_unlogged_step_allocates_what_a_bare_one_does() -> None:
    variant = trained()
    bare = peak(variant)
    with tbhooks.watch(variant.model, every=1000):
        variant.steps(2)
        assert peak(variant) - bare <= 64  # the extremes that the check for NaN stores


@pytest.fixture
def collector_off() -> Iterator[None]:
    yield
    gc.enable()
    gc.set_debug(0)
    gc.garbage.clear()


@pytest.mark.parametrize("hooks", ["C", "Python"])
def test_hooks_and_steps_need_no_garbage_collector(
    hooks: str, monkeypatch: pytest.MonkeyPatch, collector_off: None
) -> None:
    if hooks == "Python":
        monkeypatch.setattr(eager_hooks, "_make_lane", lambda: None)
    variant = trained()
    with tbhooks.watch(variant.model, every=1) as watching:
        for _ in range(2):
            variant.step()
            watching.flush()
        gc.collect()
        gc.disable()
        for _ in range(3):
            variant.step()
            watching.flush()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if type(each).__module__.startswith("tbhooks.capture.hooks")]
        assert watching.stats.errors == 0
