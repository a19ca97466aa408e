"""Collectors read tensors of logged steps besides the statistics: images, channels, the graph and others.

A collector is called with tensors in the training thread and never waits for the device. What it collects is copied to
the host with the step, and made into artifacts in the background. Without collectors nothing is done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.recording.packed_step import ArtifactBuilder, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.retries import Retries
from tbhooks.data.artifacts import Artifact
from tbhooks.data.self_report import Report, describe_exception

Result = TypeVar("Result")


class Collector(Protocol):
    """Is called with tensors of logged steps. A collector that raises is left out of the rest of the step, and is
    called no more after several steps in a row.
    """

    def wants(self, path: str, module: nn.Module) -> bool:
        """Whether it wants the outputs of this module."""

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        """Whether it wants the inputs of this module."""

    def begin(self) -> None:
        """A logged step begins, or begins again: what was collected before is not part of it."""

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        """Called with a tensor of kind "activation", "input" or "functional". The tensor must not be kept."""

    def end(self, recorder: Recorder) -> None:
        """The step has ended: what was collected goes into the recorder."""

    def forget(self) -> None:
        """The step did not happen, or is abandoned."""


@runtime_checkable
class HasHooks(Protocol):
    """A collector with hooks of its own, which are attached and detached with those of the watch."""

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Attaches its hooks to the modules. Called any number of times."""

    def detach(self) -> None:
        """Leaves no hook of its own on any module."""


@runtime_checkable
class ReadsPairs(Protocol):
    """A collector that wants the first input of a module together with its output."""

    def wants_pairs(self, path: str) -> bool: ...


@runtime_checkable
class SeparatesForwards(Protocol):
    """A collector that keeps the tensors of each forward apart, so that those of unused ones can be left out."""

    def in_forward(self, forward: Pass) -> None:
        """The tensors it is called with from now on belong to this forward."""

    def drop(self, forwards: Set[Pass]) -> None:
        """No backward went through these forwards: they are not part of the step. Called before `end`."""


class Profile(Protocol):
    """A profiler that runs for some steps."""

    def step_ended(self, step: int) -> None:
        """A training step has ended."""

    def leave_model(self) -> None:
        """Removes its hooks from the model."""

    def stop(self, step: int) -> None:
        """The watch closes after this step."""


class Profiles:
    """The profilers of one watch."""

    def __init__(self) -> None:
        self._all: list[Profile] = []

    def add(self, profile: Profile) -> None:
        self._all.append(profile)

    def step_ended(self, step: int) -> None:
        for profile in self._all:
            profile.step_ended(step)

    def leave_model(self) -> None:
        for profile in self._all:
            profile.leave_model()

    def stop(self, step: int) -> None:
        for profile in self._all:
            profile.stop(step)


class Collectors:
    """All collectors of one watch. An exception in one reaches neither training nor the others."""

    def __init__(self, report: Report) -> None:
        self.subscription_version = 0
        """Changes whenever a collector wants other modules than before."""
        self._report = report
        self._all: tuple[Collector, ...] = ()
        self._failing: Retries[Collector] = Retries()
        self._forward: Pass | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, collector: Collector) -> None:
        self._all = (*self._all, collector)
        self.change_subscription()

    def change_subscription(self) -> None:
        """A collector wants other modules than when hooks were attached."""
        self.subscription_version += 1

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        self._each(lambda collector: collector.attach(modules) if isinstance(collector, HasHooks) else None)

    def detach(self) -> None:
        self._each(lambda collector: collector.detach() if isinstance(collector, HasHooks) else None)

    def wants(self, path: str, module: nn.Module) -> bool:
        """Asks every collector, even after one has said yes: each may keep what it wants."""
        return any(self._each(lambda collector: collector.wants(path, module)))

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return any(self._each(lambda collector: collector.wants_inputs(path, module)))

    def wants_pairs(self, path: str) -> bool:
        return any(self._each(lambda collector: isinstance(collector, ReadsPairs) and collector.wants_pairs(path)))

    def begin(self) -> None:
        if not all(map(self._failing.may_try, self._all)):  # one that failed last time has to be asked what it wants
            self.change_subscription()
        self._failing.next_step()
        self._forward = None
        self._each(lambda collector: collector.begin())

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor, forward: Pass) -> None:
        if forward is not self._forward:
            self._forward = forward
            self._each(lambda one: one.in_forward(forward) if isinstance(one, SeparatesForwards) else None)
        self._each(lambda collector: collector.on_tensor(path, kind, index, tensor))

    def drop(self, forwards: Set[Pass]) -> None:
        if forwards:
            self._each(lambda one: one.drop(forwards) if isinstance(one, SeparatesForwards) else None)

    def end(self, recorder: Recorder) -> None:
        def end(collector: Collector) -> None:
            collector.end(recorder)
            self._failing.worked(collector)

        self._each(end)

    def forget(self) -> None:
        self._each(lambda collector: collector.forget())

    def _each(self, call: Callable[[Collector], Result]) -> list[Result]:
        """The results of calling all collectors but those that have failed in this step."""
        results = []
        for collector in self._all:
            if self._failing and not self._failing.may_try(collector):
                continue
            try:
                results.append(call(collector))
            except Exception as problem:
                self._on_failure(collector, problem)
        return results

    def _on_failure(self, collector: Collector, problem: Exception) -> None:
        """What it has collected in this step is lost. It is tried again on the next logged step."""
        gives_up = self._failing.failed(collector)
        with contextlib.suppress(Exception):
            collector.forget()
        if isinstance(collector, HasHooks):
            with contextlib.suppress(Exception):
                collector.detach()
        name = type(collector).__name__
        self._report.error(name, problem)
        if gives_up:
            self._all = tuple(other for other in self._all if other is not collector)
            self._report.log_once(f"{name}: {describe_exception(problem)}{gives_up}", logging.ERROR)


def guarded(make: ArtifactBuilder, report: Report, where: str) -> ArtifactBuilder:
    """An artifact that cannot be made in the background is reported, and does not cost the logged step."""

    def build(read: Read) -> Iterable[Artifact]:
        try:
            return tuple(make(read))
        except Exception as problem:
            report.error(where, problem)
            return ()

    return build
