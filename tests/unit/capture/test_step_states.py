"""Model-based test: whatever the order of events in a loop, the right steps are written with the right contents.

`Expected` is the model, in plain Python. Hypothesis drives a real training loop and the model side by side. In the end
all frames that were written are compared with the model.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.amp.grad_scaler import GradScaler

import tbhooks
from tests.support.loops import mlp, sgd
from tests.support.slow import slow

BATCH, WIDTH = 3, 8
ROWS = BATCH * WIDTH
TAGS = ("a", "b")
NAMES = st.sampled_from([[], [], [TAGS[0]], [TAGS[1]], list(TAGS)])


@dataclass
class One:
    """The expected contents of one step: its forwards, whether an optimizer stepped, and its scalars."""

    forwards: int = 0
    stepped: bool = False
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass
class Expected:
    """The expected steps of a run. Optimizer steps are counted from 0, and every `every`-th step is logged.

    * A scalar that is logged between the first forward of an iteration and its optimizer step belongs to that step.
    * Between the optimizer step and the next training forward a scalar belongs to the step that has just ended, if that
      step is a logged one and has no scalar of this name. The name is then a late name.
    * If not, the scalar belongs to the next step, or to no step if its name is a late name.
    * In an iteration that a GradScaler skips, and after it, scalars belong to no step.
    * In a pause nothing is logged in this test: no hook is on the model, so forwards are not noticed.
    """

    every: int
    ended: list[One] = field(default_factory=list)
    open: One = field(default_factory=One)
    late_names: set[str] = field(default_factory=set)
    in_iteration: bool = False
    was_skipped: bool = False
    paused: bool = False

    def is_logged(self, step: int) -> bool:
        return step % self.every == 0

    def forward(self) -> None:
        self.in_iteration, self.was_skipped = True, False
        if not self.paused:
            self.open.forwards += 1

    def log(self, name: str, value: float) -> None:
        if self.in_iteration:
            self.open.scalars[name] = value
        elif not self.was_skipped:
            self._log_between(name, value)

    def _log_between(self, name: str, value: float) -> None:
        last = len(self.ended) - 1
        if last >= 0 and self.is_logged(last) and name not in self.ended[last].scalars:
            self.ended[last].scalars[name] = value
            self.late_names.add(name)
        elif last < 0 or name not in self.late_names:
            self.open.scalars[name] = value

    def step(self) -> None:
        self.open.stepped = not self.paused
        self.ended.append(self.open)
        self.open, self.in_iteration = One(), False

    def skip(self) -> None:
        self.open, self.in_iteration, self.was_skipped = One(), False, True

    def written(self) -> dict[int, One]:
        """Returns the steps that are written. A step without records and scalars has no frame."""
        found = {step: one for step, one in enumerate(self.ended) if self.is_logged(step)}
        return {step: one for step, one in found.items() if one.forwards or one.stepped or one.scalars}


class Steps(RuleBasedStateMachine):
    """A training loop with events in any order that is possible in a loop."""

    @initialize(every=st.integers(1, 3))
    def begin(self, every: int) -> None:
        self.model = mlp(WIDTH)
        self.optimizer = sgd(self.model)
        self.scaler = GradScaler("cpu", init_scale=2.0, growth_interval=10**6)
        self.kept = tbhooks.MemorySink()
        self.watching = tbhooks.watch(self.model, self.kept, every=every, histograms=False, rules=())
        self.expected = Expected(every)
        self.around = contextlib.ExitStack()
        self.losses: list[torch.Tensor] = []
        self.has_gradients = False
        self.value = 0.0

    @rule()
    def forward(self) -> None:
        self.losses.append(self.model(torch.ones(BATCH, 4)).square().mean())
        self.expected.forward()

    @precondition(lambda self: self.losses)
    @rule()
    def backward(self) -> None:
        self.scaler.scale(torch.stack(self.losses).sum()).backward()
        self.losses, self.has_gradients = [], True

    @precondition(lambda self: self.has_gradients and not self.losses)
    @rule()
    def step(self) -> None:
        self._scaled_step()
        self.expected.step()

    @precondition(lambda self: self.has_gradients and not self.losses)
    @rule()
    def skip(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("inf"))
        self._scaled_step()
        self.expected.skip()

    @precondition(lambda self: not self.has_gradients and not self.losses)
    @rule(each=st.lists(st.tuples(NAMES, NAMES, st.booleans()), min_size=1, max_size=8))
    def iterations(self, each: list[tuple[list[str], list[str], bool]]) -> None:
        """Iterations in the usual order, each with early and late scalars, and whether the GradScaler skips it."""
        for early, late, skips in each:
            self.forward()
            for name in early if not self.expected.paused else ():
                self.log(name, as_tensor=False)
            self.backward()
            (self.skip if skips else self.step)()
            for name in late if not self.expected.paused else ():
                self.log(name, as_tensor=True)

    def _scaled_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update(new_scale=2.0)
        self.optimizer.zero_grad()
        self.has_gradients = False

    @precondition(lambda self: not self.expected.paused)
    @rule(name=st.sampled_from(TAGS), as_tensor=st.booleans())
    def log(self, name: str, as_tensor: bool) -> None:
        self.value += 1.0
        self.watching.log({name: torch.tensor(self.value) if as_tensor else self.value})
        self.expected.log(name, self.value)

    @rule(reads=st.sampled_from(["flush", "latest", "stats"]))
    def flush(self, reads: str) -> None:
        read = getattr(self.watching, reads)
        _ = read() if callable(read) else read

    @precondition(lambda self: not self.losses)
    @rule()
    def evaluation(self) -> None:
        if not self.expected.ended:  # before its first training step, an evaluation is read as training
            return
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(50, 4))
        self.model.train()

    @precondition(lambda self: not self.expected.paused and not self.losses and not self.has_gradients)
    @rule()
    def pause(self) -> None:
        self.around.enter_context(self.watching.paused())
        self.expected.paused = True

    @precondition(lambda self: self.expected.paused and not self.losses and not self.has_gradients)
    @rule()
    def resume(self) -> None:
        self.around.close()
        self.expected.paused = False

    def teardown(self) -> None:
        if not hasattr(self, "watching"):
            return
        self.around.close()
        self.watching.close()
        assert self.watching.stats.errors == 0, self.watching.stats.messages
        assert self.watching.stats.steps == len(self.expected.ended)
        assert self._written() == self.expected.written()

    def _written(self) -> dict[int, One]:
        """Returns the contents of the frames of ended steps. Of several frames of a step, one has the statistics."""
        found: dict[int, One] = {}
        for frame in self.kept.frames:
            if frame.step >= len(self.expected.ended):
                continue
            one = found.setdefault(frame.step, One())
            own = {tag.removeprefix("train/"): value for tag, value in frame.scalars.items() if "/" in tag}
            assert not own.keys() & one.scalars.keys(), f"written twice: step {frame.step}"
            one.scalars |= {tag: value for tag, value in own.items() if tag in TAGS}
            if frame.sites:
                assert not one.forwards
                assert not one.stepped
                one.forwards = int(_count(frame, "0", "activation")) // ROWS
                one.stepped = ("0.weight", "update") in frame
                assert _count(frame, "0.weight", "update") in (0, 4 * WIDTH)
        return {step: one for step, one in found.items() if one != One()}  # in a pause only the loss scale is written


def _count(frame: tbhooks.Frame, path: str, kind: str) -> Any:
    return frame[path, kind].count if (path, kind) in frame else 0


# Derandomised: the same examples in every run.
SETTINGS = settings(
    stateful_step_count=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.filterwarnings("ignore")
class TestSteps(Steps.TestCase):
    """Some orders of events."""

    settings = settings(SETTINGS, max_examples=15)


@slow("ten times as many orders of events", covered_by="TestSteps")
@pytest.mark.filterwarnings("ignore")
class TestManySteps(Steps.TestCase):
    """More orders of events."""

    settings = settings(SETTINGS, max_examples=150)
