"""torch.compile together with everything else that training loops do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tests.support import compiling, zoo
from tests.support.compiling import Scenario, Trial, assert_same
from tests.support.loops import steps_of
from tests.support.slow import cases

pytestmark = compiling.ISOLATED


def plain(trial: Trial, steps: int = 5, every: int = 2, fullgraph: bool = True, **options: Any) -> None:
    trial.watch(every=every)
    called = trial.compile(trial.model, fullgraph=fullgraph, **options)
    for _ in range(steps):
        trial.step(trial.forward(called))


def varying_batches(trial: Trial, **options: Any) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True, **options)
    for batch in (6, 5, 3, 7, 8):
        trial.step(trial.forward(called, batch))


def dynamic_batches(trial: Trial) -> None:
    varying_batches(trial, dynamic=True)


def marked_dynamic(trial: Trial) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    for batch in (6, 5, 3, 7):
        x = torch.randn(batch, 4)
        torch._dynamo.mark_dynamic(x, 0)
        trial.step(called(x).square().mean())


def accumulation(trial: Trial) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(3):
        for _ in range(2):
            trial.forward(called).backward()
        trial.step(trial.forward(called))


def several_forwards_before_one_backward(trial: Trial) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(3):
        trial.step(trial.forward(called) + 2 * trial.forward(called, 5) - trial.forward(called, 7))


def a_backward_that_comes_a_step_late(trial: Trial) -> None:
    trial.optimizer = torch.optim.SGD(trial.model[0].parameters(), lr=0.1)  # the others are still as they were
    trial.watch(every=1)
    called = trial.compile(trial.model, fullgraph=True)
    late = None
    for _ in range(4):
        kept, loss = trial.forward(called), trial.forward(called)
        if late is not None:  # its own step is over, and this one has been seen running
            trial.losses.append(zoo.raw(torch.autograd.grad(late, trial.model[4].weight)[0]))
        trial.step(loss)
        late = kept


def evaluation_between_steps(trial: Trial, around: Any = torch.no_grad) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(4):
        trial.step(trial.forward(called))
        trial.model.eval()
        with around():
            trial.losses.append(zoo.raw(trial.forward(called, 7)))
        trial.model.train()


def evaluation_in_inference_mode(trial: Trial) -> None:
    evaluation_between_steps(trial, torch.inference_mode)


def evaluation_is_read_apart(trial: Trial) -> None:
    trial.watch(every=2).evaluation()
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(4):
        trial.step(trial.forward(called))
        trial.model.eval()
        with torch.no_grad():
            trial.losses.append(zoo.raw(trial.forward(called, 7)))
        trial.model.train()


def training_passes_without_gradients(trial: Trial) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(3):
        with torch.no_grad():
            trial.losses.append(zoo.raw(trial.forward(called, 3)))
        trial.step(trial.forward(called))


def autocast_inside(trial: Trial) -> None:
    trial.watch(every=2)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return trial.model(x).float()

    called = trial.compile(loss, fullgraph=True)
    for _ in range(3):
        trial.step(trial.forward(called))


def grad_scaler(trial: Trial) -> None:
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        loss = trial.forward(called)
        scaler.scale(loss).backward()
        scaler.step(trial.optimizer)
        scaler.update()
        trial.optimizer.zero_grad()
        trial.losses.append(zoo.raw(loss))


def two_watches(trial: Trial) -> None:
    trial.watch(every=2)
    trial.watch(every=3, kinds=("activation", "input"), include="0")
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(7):
        trial.step(trial.forward(called))


def every_kind_a_graph_can_show(trial: Trial) -> None:
    trial.watch(every=2, kinds=("input", *tbhooks.data.frame.KINDS))
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(3):
        trial.step(trial.forward(called))


def paused_steps(trial: Trial) -> None:
    watching = trial.watch(every=1)
    called = trial.compile(trial.model, fullgraph=True)
    for number in range(5):
        if number in (1, 3):
            with watching.paused():
                trial.step(trial.forward(called))
        else:
            trial.step(trial.forward(called))


def forwards_are_the_clock(trial: Trial) -> None:
    trial.watch(every=2, step="forward")
    called = trial.compile(trial.model, fullgraph=True)
    for _ in range(5):
        trial.forward(called).backward()
        with torch.no_grad():
            for parameter in trial.model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def forwards_are_the_clock_of_a_function(trial: Trial) -> None:
    trial.watch(every=2, step="forward")
    called = trial.compile(lambda x: trial.model(x) * 2, fullgraph=True)
    for _ in range(5):
        trial.forward(called).backward()


def log_inside_a_compiled_step(trial: Trial) -> None:
    watching = trial.watch(every=2)

    def step(x: Tensor) -> Tensor:
        loss = trial.model(x).square().mean()
        watching.log({"loss": loss})
        return loss

    called = trial.compile(step) if trial.is_watched else step
    for _ in range(5):
        trial.step(called(torch.randn(6, 4)))


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if x.shape[0] == 5:
            raise ValueError("five")
        return x.sin()


def a_module_that_raises_in_the_middle(trial: Trial) -> None:
    trial.model.insert(2, Fragile())
    trial.watch(every=2)
    called = trial.compile(trial.model)
    for batch in (6, 5, 6, 5, 6, 6, 6):
        try:
            loss = trial.forward(called, batch)
        except ValueError:
            continue
        trial.step(loss)


def a_layer_is_frozen_and_thawed(trial: Trial) -> None:
    trial.watch(every=1)
    called = trial.compile(trial.model, fullgraph=True)
    for frozen in (False, True, True, False):
        trial.model[0].requires_grad_(not frozen)
        trial.step(trial.forward(called))


def a_module_inside_is_compiled_and_shared(trial: Trial) -> None:
    shared = trial.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), fullgraph=True)
    trial.model.insert(0, shared)
    trial.model.insert(0, shared)
    trial.optimizer.add_param_group({"params": list(shared.parameters())})
    trial.watch(every=2)
    for _ in range(3):
        trial.step(trial.forward(trial.model))


SCENARIOS = [
    plain, varying_batches, dynamic_batches, marked_dynamic, accumulation, several_forwards_before_one_backward,
    a_backward_that_comes_a_step_late, evaluation_between_steps, evaluation_in_inference_mode,
    evaluation_is_read_apart, training_passes_without_gradients, autocast_inside, grad_scaler, two_watches,
    every_kind_a_graph_can_show, log_inside_a_compiled_step, a_module_that_raises_in_the_middle,
    a_layer_is_frozen_and_thawed, a_module_inside_is_compiled_and_shared,
    paused_steps, forwards_are_the_clock, forwards_are_the_clock_of_a_function,
]  # fmt: skip


@pytest.mark.parametrize(
    "scenario",
    cases(
        {scenario.__name__: scenario for scenario in SCENARIOS},
        always={
            "plain", "dynamic_batches", "accumulation", "evaluation_between_steps", "autocast_inside", "grad_scaler",
            "two_watches", "every_kind_a_graph_can_show", "paused_steps",
        },
        reason="every scenario is compiled twice; the others are variants of these",
    ),
)  # fmt: skip
def test_bits_are_those_of_the_unwatched_run_and_frames_those_of_the_eager_one(scenario: Scenario) -> None:
    eager = Trial(scenario, compiled=False, is_watched=True)
    bare = Trial(scenario, compiled=True, is_watched=False)
    trial = Trial(scenario, compiled=True, is_watched=True)
    assert len(trial.graphs) >= 1
    assert trial.left == bare.left
    assert bare.breaks or not trial.breaks or scenario is log_inside_a_compiled_step
    for watching, expected in zip(trial.watches, eager.watches, strict=True):
        assert watching.stats.errors == 0, watching.stats.messages
        assert len(watching.history) > 1
        assert steps_of(watching.history) == steps_of(expected.history)
        for frame, should in zip(watching.history, expected.history, strict=True):
            assert_same(frame, should)
        assert watching.stats.unseen == expected.stats.unseen
