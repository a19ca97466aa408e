"""Who looks on while logged steps run, besides the statistics: one file each. Asked for by a call on the watch.

An onlooker looks at tensors in the training thread, without waiting for the device; what it wants to show rides
in the step's one copy and is made in the background. Where nobody looks on, nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from tbhooks.capture.packed_step import ArtifactBuilder, Read
from tbhooks.capture.recorder import Recorder
from tbhooks.data.artifacts import Artifact
from tbhooks.data.self_report import Report


class Collector(Protocol):
    """Looks at what runs in logged steps. What it raises ends its looking, and nothing else."""

    def wants(self, path: str, module: nn.Module) -> bool:
        """Whether the outputs of this module are to be shown to it."""

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        """Whether its inputs are."""

    def begin(self) -> None:
        """A logged step begins, or begins anew: what was seen before is not of it."""

    def saw(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        """A tensor it wanted, of kind "activation", "input" or "functional", as it is now. Not to be kept."""

    def end(self, recorder: Recorder) -> None:
        """The step has ended: what is to be shown of it goes into the recorder."""

    def forget(self) -> None:
        """The step did not happen, or is given up."""


@runtime_checkable
class HasHooks(Protocol):
    """One that puts hooks of its own on modules; they come and go with those of the watch."""

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """What runs from now on may be looked at. Called again and again."""

    def detach(self) -> None:
        """Nothing may be, and no hook be left."""


class Collectors:
    """All of one watch; each is kept from harming training and the others."""

    def __init__(self, report: Report) -> None:
        self.subscription_version = 0
        """A number that changes with what they want."""
        self._report = report
        self._all: tuple[Collector, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, collector: Collector) -> None:
        self._all = (*self._all, collector)
        self.change_wishes()

    def change_wishes(self) -> None:
        """Somebody wants more, or less, than when hooks were put on."""
        self.subscription_version += 1

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        for collector in self._all:
            if isinstance(collector, HasHooks):
                with self._guarded(collector):
                    collector.attach(modules)

    def detach(self) -> None:
        for collector in self._all:
            if isinstance(collector, HasHooks):
                with self._guarded(collector):
                    collector.detach()

    def wants(self, path: str, module: nn.Module) -> bool:
        """Everybody is asked, and may remember what it wants: all are shown what anybody does."""
        wanted = False
        for collector in self._all:
            with self._guarded(collector):  # patterns may be calls of the user's
                wanted = collector.wants(path, module) or wanted
        return wanted

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        wanted = False
        for collector in self._all:
            with self._guarded(collector):
                wanted = collector.wants_inputs(path, module) or wanted
        return wanted

    def begin(self) -> None:
        for collector in self._all:
            with self._guarded(collector):
                collector.begin()

    def saw(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        for collector in self._all:
            with self._guarded(collector):
                collector.saw(path, kind, index, tensor)

    def end(self, recorder: Recorder) -> None:
        for collector in self._all:
            with self._guarded(collector):
                collector.end(recorder)

    def forget(self) -> None:
        for collector in self._all:
            with self._guarded(collector):
                collector.forget()

    @contextlib.contextmanager
    def _guarded(self, collector: Collector) -> Iterator[None]:
        """One that failed is not asked again."""
        try:
            yield
        except Exception as problem:
            self._all = tuple(other for other in self._all if other is not collector)
            if isinstance(collector, HasHooks):
                with contextlib.suppress(Exception):
                    collector.detach()
            self._report.error(type(collector).__name__, problem)


def guarded(make: ArtifactBuilder, report: Report, where: str) -> ArtifactBuilder:
    """In the background: an exhibit that cannot be made must not cost the frame it goes with."""

    def made(read: Read) -> Iterable[Artifact]:
        try:
            return tuple(make(read))
        except Exception as problem:
            report.error(where, problem)
            return ()

    return made
