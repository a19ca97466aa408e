"""Only forwards that the step's backward went through are in its numbers: no rollouts, nothing that was given up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tests.support import reference
from tests.support.loops import mlp, sgd, steps_of

SCALE = 100.0
"""By how much inputs of forwards that do not count are larger, so that they would show."""


def batch(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) * scale


class Kept:
    """What hooks of the test see of the first layer while it is on, in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.activations: list[Any] = []
        self.gradients: list[Any] = []
        self.looks = False
        model.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.looks and torch._C._current_graph_task_id() == -1:
            self.activations.append(output.detach().double().numpy().copy())
        if self.looks and output.requires_grad:
            output.register_hook(lambda gradient: self.gradients.append(gradient.detach().double().numpy().copy()))

    @contextlib.contextmanager
    def looking(self) -> Any:
        self.looks = True
        yield
        self.looks = False

    def assert_shown_by(self, frame: tbhooks.Frame, name: str = "0") -> None:
        for kind, arrays in (("activation", self.activations), ("gradient", self.gradients)):
            expected = reference.stats(np.concatenate([array.ravel() for array in arrays]))
            for stat in ("count", "mean", "std", "norm"):
                assert getattr(frame[name, kind], stat) == pytest.approx(expected[stat], rel=1e-5), (kind, stat)
        self.activations, self.gradients = [], []


def no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7, SCALE))


def inference(model: nn.Module) -> None:
    with torch.inference_mode():
        model(batch(7, SCALE))


def with_grad(model: nn.Module) -> None:
    model(batch(7, SCALE)).argmax()


UNUSED: dict[str, Callable[[nn.Module], None]] = {"no_grad": no_grad, "inference": inference, "with_grad": with_grad}


@pytest.mark.parametrize("kinds", [("activation", "gradient"), tbhooks.data.frame.ALL_KINDS], ids=["two", "all"])
@pytest.mark.parametrize("unused", UNUSED)
def test_forwards_without_backward_are_not_in_the_numbers(unused: str, kinds: tuple[str, ...]) -> None:
    model = mlp()
    optimizer, kept = sgd(model), Kept(model[0])
    with tbhooks.watch(model, every=1, kinds=kinds) as watching:
        for step in range(4):
            for _ in range(step % 3):
                UNUSED[unused](model)
            with kept.looking():
                model(batch(step)).square().mean().backward()
            if step == 3:
                UNUSED[unused](model)
            optimizer.step()
            optimizer.zero_grad()
            kept.assert_shown_by(watching.latest)
            for site in watching.latest.sites:
                if site.kind in ("input", "functional"):
                    assert watching.latest[site.name, site.kind].count == 16 * (
                        4 if site.name in ("0", "(root)") else 8
                    )
        UNUSED[unused](model)  # no optimizer step comes after it
    assert steps_of(watching.history) == [0, 1, 2, 3]
    assert watching.stats.errors == 0, watching.stats.messages


def test_that_forwards_are_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "tbhooks"), tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            no_grad(model)
            with_grad(model)
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert sum("no backward went through" in record.message for record in caplog.records) == 1
    assert sum("no backward went through" in message for message in watching.stats.messages) == 1


@pytest.mark.parametrize("kinds", [("activation",), ("activation", "input")])
def test_where_gradients_are_not_asked_for_the_forwards_are_distinguished_too(kinds: tuple[str, ...]) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1, kinds=kinds, include="0") as watching:
        for step in range(3):
            with_grad(model)
            model(batch(step)).square().mean().backward()
            optimizer.step()
            assert {site.path for site in watching.latest.sites} == {"0"}
            assert watching.latest["0", "activation"].count == 16 * 8


@pytest.mark.parametrize("mode", ["forward", "manual"])
@pytest.mark.parametrize("unused", UNUSED)
def test_a_loop_that_never_runs_backward_is_read_as_ever(unused: str, mode: str) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, step=mode) as watching:
        for _ in range(3):
            UNUSED[unused](model)
            if mode == "manual":
                watching.step()
    assert [frame["0", "activation"].count for frame in watching.history] == [16 * 8] * 3
    assert watching.stats.messages == ()


def test_accumulated_batches_all_count() -> None:
    model = mlp()
    optimizer, kept = sgd(model), Kept(model[0])
    with tbhooks.watch(model, every=1) as watching:
        for step in range(2):
            for part in range(3):
                no_grad(model)
                with kept.looking():
                    loss = model(batch(step + 10 * part)).square().mean()
                loss.backward()
            optimizer.step()
            kept.assert_shown_by(watching.latest)


class Actor(nn.Module):
    """Called through methods of its own, never as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def act(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def test_rollouts_through_a_method_of_the_model_are_left_out() -> None:
    torch.manual_seed(0)
    model = Actor()
    optimizer, kept = sgd(model), Kept(model.body)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            with torch.no_grad():
                for _ in range(4):
                    model.act(batch(7, SCALE))
            with kept.looking():
                model.act(batch(step)).square().mean().backward()
            optimizer.step()
            kept.assert_shown_by(watching.latest, "body")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpointed_forwards_count_and_rollouts_beside_them_do_not(use_reentrant: bool, whole: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 1))
    optimizer, kept = sgd(model), Kept(model[0][0])
    with tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            no_grad(model)
            x = batch(step).requires_grad_()
            with kept.looking():
                if whole:
                    out = checkpoint(model, x, use_reentrant=use_reentrant)
                else:
                    out = model[1](checkpoint(model[0], x, use_reentrant=use_reentrant))
                out.square().mean().backward()
            optimizer.step()
            assert watching.latest["0.0", "activation"].count == 16 * 8
            kept.activations = kept.activations[:1]
            expected = reference.stats(kept.activations[0])
            assert watching.latest["0.0", "activation"].std == pytest.approx(expected["std"], rel=1e-5)
            assert watching.latest["0.0", "gradient"].count == 16 * 8
            kept.activations = []


def test_a_frozen_part_belongs_to_the_step() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(4, 8).requires_grad_(False), "head": nn.Linear(8, 1)})
    optimizer = sgd(model["head"])
    with tbhooks.watch(model, every=1) as watching:
        for step in range(2):
            model["head"](model["body"](batch(step))).square().mean().backward()
            optimizer.step()
    assert [frame["body", "activation"].count for frame in watching.history] == [16 * 8] * 2


def test_a_part_without_gradients_inside_the_forward_belongs_to_the_step() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.body(x)
            return self.head(x)

    model = Half()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert [frame["body", "activation"].count for frame in watching.history] == [16 * 8] * 2


def test_a_shared_module_in_one_forward_counts_all_its_calls() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.part(x))

    model = Shared()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(2):
            with_grad(model)
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert [frame["part", "activation"].count for frame in watching.history] == [2 * 16 * 4] * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("unused", ["no_grad", "with_grad"])
def test_forwards_of_a_compiled_model_are_distinguished(unused: str, backend: str) -> None:
    torch.compiler.reset()
    model = mlp()
    called = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            UNUSED[unused](called)
            called(batch(step)).square().mean().backward()
            optimizer.step()
            assert watching.latest["0", "activation"].count == 16 * 8
            assert watching.latest["0", "activation"].abs_max < SCALE / 4
            assert watching.latest["0", "gradient"].count == 16 * 8
    assert watching.stats.errors == 0, watching.stats.messages


# -- another optimizer's backward -------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["none_before", "zero_before", "none_between", "frozen"])
def test_a_generators_pass_through_the_discriminator_is_not_in_its_numbers(clear: str) -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(4, 4), mlp()
    of_generator, of_judge, kept = sgd(generator), sgd(judge), Kept(judge[0])
    with tbhooks.watch(judge, every=1) as watching:
        for step in range(4):
            if clear in ("none_before", "zero_before", "frozen"):
                of_judge.zero_grad(set_to_none=clear != "zero_before")
            with kept.looking():
                loss = judge(batch(step)).mean()
                fake = generator(batch(step + 50)).detach()
                other = judge(fake).square().mean()
            if clear == "none_between":
                of_judge.zero_grad()
            with kept.looking():
                loss.backward()
                other.backward()
            of_judge.step()
            kept.assert_shown_by(watching.latest)
            of_generator.zero_grad()
            judge.requires_grad_(clear != "frozen")
            judge(generator(batch(step, SCALE))).square().mean().backward()
            judge.requires_grad_(True)
            of_generator.step()
    assert steps_of(watching.history) == [0, 1, 2, 3]


def test_one_backward_for_two_optimizers_counts_for_both() -> None:
    first, second = mlp(), nn.Linear(1, 1)
    of_first, of_second = sgd(first), sgd(second)
    with tbhooks.watch(second, every=1) as watching:
        for step in range(3):
            second(first(batch(step))).square().mean().backward()
            of_first.step()
            torch.nn.utils.clip_grad_norm_(second.parameters(), 0.1)
            of_second.step()
            of_first.zero_grad()
            of_second.zero_grad()
    assert [frame["(root)", "gradient"].count for frame in watching.history] == [16] * 3


# -- what was given up ------------------------------------------------------------------------------


class Full(nn.Module):
    """Runs out of memory on demand, in forward or in backward."""

    def __init__(self, problem: type[BaseException]) -> None:
        super().__init__()
        self.fails_in, self.problem = "", problem

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise self.problem
        out = x * 1.0
        if self.fails_in == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: Tensor) -> None:
        raise self.problem


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_what_ran_out_of_memory_is_not_in_the_numbers_of_the_retry(fails_in: str, problem: type[BaseException]) -> None:
    torch.manual_seed(0)
    full = Full(problem)
    model = nn.Sequential(nn.Linear(4, 8), full, nn.Linear(8, 1))
    optimizer, kept = sgd(model), Kept(model[0])
    last = Kept(model[2])
    with tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            full.fails_in = fails_in
            with pytest.raises(problem):
                model(batch(7, SCALE)).square().mean().backward()
            full.fails_in = ""
            optimizer.zero_grad()
            with kept.looking(), last.looking():
                model(batch(step)).square().mean().backward()
            optimizer.step()
            kept.assert_shown_by(watching.latest)
            last.assert_shown_by(watching.latest, "2")
    assert watching.stats.errors == 0


def test_a_model_that_calls_itself_is_one_forward() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.part(x)
            return self(x, depth - 1) if depth else x

    model = Recursive()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert [frame["part", "activation"].count for frame in watching.history] == [3 * 16 * 4] * 2


# -- a forgotten model.train() ----------------------------------------------------------------------


def evaluate(model: nn.Module, guard: Callable[[], Any] = torch.no_grad) -> None:
    model.eval()
    with guard():
        model(batch(7, SCALE))


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("guard", [torch.no_grad, contextlib.nullcontext], ids=["no_grad", "with_grad"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "plain"])
@pytest.mark.parametrize("every", [1, 5])
def test_training_goes_on_being_read_where_train_was_forgotten(
    every: int, evaluates: bool, guard: Callable[[], Any]
) -> None:
    model = mlp()
    optimizer, kept = sgd(model), Kept(model[0])
    with tbhooks.watch(model, every=every) as watching:
        if evaluates:
            watching.evaluation()
        for step in range(20):
            if step == 10:
                evaluate(model, guard)
            with kept.looking():
                train_one(model, optimizer, step)
            if step % every == 0:
                kept.assert_shown_by(watching.latest)
            kept.activations, kept.gradients = [], []
    training = [frame for frame in watching.history if not frame.is_evaluation]
    assert steps_of(training) == list(range(0, 20, every))
    evaluations = [frame for frame in watching.history if frame.is_evaluation]
    assert [frame["0", "eval.activation"].count for frame in evaluations] == [16 * 8] * evaluates
    found = [finding for finding in watching.findings if finding.rule == "evaluation_mode"]
    assert {finding.severity for finding in found} == {"warning"}
    assert found[0].evidence["since"] == 10
    assert "at step 10" in found[0].message
    assert not any("compile" in message for message in watching.stats.messages)


@pytest.mark.parametrize("late", [True, False])
def test_what_is_forgotten_is_found_although_values_are_logged_late(late: bool) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(8):
            if step == 4:
                evaluate(model)
            train_one(model, optimizer, step)
            if late:
                watching.log({"loss": 1.0})
    assert ("0", "activation") in watching.latest
    assert any("evaluation mode at step 4" in finding.message for finding in watching.findings)


def test_frozen_parts_and_models_always_in_evaluation_mode_are_no_finding() -> None:
    for part, all_along in ((True, False), (False, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = sgd(model)
        with tbhooks.watch(model, every=1) as watching:
            for step in range(6):
                model.train(not all_along)
                if part:
                    model[1].eval()
                train_one(model, optimizer, step)
        assert [finding for finding in watching.findings if finding.rule == "evaluation_mode"] == []
        assert watching.latest["0", "activation"].count == 16 * 8


def test_it_is_over_when_the_model_is_back_in_training_mode() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(9):
            if step == 3:
                evaluate(model)
            if step == 6:
                model.train()
            train_one(model, optimizer, step)
    assert [frame.step for frame in watching.history if "train.evaluation_since" in frame.scalars] == [3, 4, 5]


class Rectifier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@pytest.mark.parametrize("way", ["module", "compiled", "functional"])
@pytest.mark.parametrize("unused", UNUSED)
def test_units_are_not_alive_because_of_a_forward_without_backward(unused: str, way: str) -> None:
    functional = way == "functional"
    model = nn.Sequential(nn.Linear(4, 8), Rectifier() if functional else nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias[:2] = -20.0  # positive for the large inputs of unused forwards only
    optimizer = sgd(model)
    kinds = tbhooks.data.frame.ALL_KINDS if functional else ("activation", "gradient")
    with tbhooks.watch(model, every=1, kinds=kinds) as watching:
        called: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        for step in range(3):
            UNUSED[unused](called)
            for part in range(2):
                called(batch(step + 10 * part)).square().mean().backward()
            UNUSED[unused](called)
            optimizer.step()
            optimizer.zero_grad()
            name, kind = ("1:relu", "functional") if functional else ("1", "activation")
            assert watching.latest[name, kind].dead_fraction == pytest.approx(2 / 8)
    assert watching.stats.errors == 0, watching.stats.messages


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("unused", UNUSED)
def test_collectors_leave_out_forwards_without_backward(unused: str, when: str) -> None:
    """Channels and embeddings have those of the training forwards, and images show the first of them."""
    sinks = []
    for runs_unused in (False, True):
        torch.manual_seed(0)
        model, sink = mlp(), tbhooks.MemorySink()
        optimizer = sgd(model)
        with tbhooks.watch(model, sink, every=1).per_channel("0").images("0").embeddings("0", every=1) as watching:
            for step in range(3):
                if when == "before" and runs_unused:
                    UNUSED[unused](model)
                loss = model(batch(step)).square().mean()
                if when == "between" and runs_unused:
                    UNUSED[unused](model)
                loss.backward()
                if when == "after" and runs_unused:
                    UNUSED[unused](model)
                model(batch(10 + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert watching.stats.errors == 0, watching.stats.messages
        sinks.append(sink)
    alone, mixed = ([artifact for frame in sink.frames for artifact in frame.artifacts] for sink in sinks)
    assert len(alone) == len(mixed) > 9
    for expected, got in zip(alone, mixed, strict=True):
        assert type(expected) is type(got)
        for name in ("values", "counts", "pixels", "points"):
            np.testing.assert_array_equal(getattr(got, name, 0), getattr(expected, name, 0))
