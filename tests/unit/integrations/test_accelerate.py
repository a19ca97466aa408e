"""A loop with accelerate: micro-batches make one step, and the trackers get what is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.nn import functional as F

import tbhooks
from tbhooks.integrations import accelerate as integration
from tests.support.digits_training import (
    ACCUMULATED,
    CLIP,
    STEPS,
    assert_same_frames,
    loader,
    make_net,
    make_optimizer,
    same_bits,
    train,
    weights,
)
from tests.support.frames import event_files, scalar_series


@pytest.fixture(autouse=True)
def _accelerate_starts_anew() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_accelerator(directory: Path | None = None, **options: Any) -> Accelerator:
    where = {} if directory is None else {"project_config": ProjectConfiguration(logging_dir=str(directory))}
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **where, **options)


def fit(accelerator: Accelerator, watched: bool = True, **options: Any) -> tuple[nn.Module, tbhooks.Watch | None]:
    net = make_net()
    model, optimizer, batches = accelerator.prepare(net, make_optimizer(net), loader())
    watching = integration.watch(accelerator, model, **options) if watched else None
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if watching is not None:
        watching.close()
    return net, watching


def test_accumulated_and_clipped_the_numbers_are_those_of_a_plain_loop() -> None:
    plain = make_net()
    frames, sink = train(plain), tbhooks.MemorySink()
    net, _ = fit(make_accelerator(), writer=sink, every=1)
    assert_same_frames(sink.frames, frames)
    assert same_bits(weights(net), weights(plain))
    assert same_bits(weights(net), weights(fit(make_accelerator(), watched=False)[0]))


def test_the_tensorboard_tracker_gets_it_in_its_own_file(tmp_path: Path) -> None:
    accelerator = make_accelerator(tmp_path, log_with="tensorboard")
    accelerator.init_trackers("mine")
    fit(accelerator, every=2)
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    (file,) = event_files(tmp_path)
    assert list(scalar_series(file.parent, "activation.std/3")) == list(range(0, STEPS, 2))
    assert scalar_series(file.parent, "loss") == {3: 1.0}


def test_without_trackers_frames_stay_in_memory() -> None:
    _, watching = fit(make_accelerator(), every=3)
    assert watching is not None
    assert [frame.step for frame in watching.history] == [0, 3]
