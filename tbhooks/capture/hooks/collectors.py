"""Who looks on while logged steps run, besides the statistics: one file each. Asked for by a call on the watch.

An onlooker looks at tensors in the training thread, without waiting for the device; what it wants to show rides
in the step's one copy and is made in the background. Where nobody looks on, nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from tbhooks.capture.packed_step import Make, Read
from tbhooks.capture.recorder import Recorder
from tbhooks.data.artifacts import Exhibit
from tbhooks.data.self_report import Report


class Onlooker(Protocol):
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

    def put_on(self, modules: Mapping[str, nn.Module]) -> None:
        """What runs from now on may be looked at. Called again and again."""

    def take_off(self) -> None:
        """Nothing may be, and no hook be left."""


class Onlookers:
    """All of one watch; each is kept from harming training and the others."""

    def __init__(self, report: Report) -> None:
        self.wishes = 0
        """A number that changes with what they want."""
        self._report = report
        self._all: tuple[Onlooker, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, onlooker: Onlooker) -> None:
        self._all = (*self._all, onlooker)
        self.change_wishes()

    def change_wishes(self) -> None:
        """Somebody wants more, or less, than when hooks were put on."""
        self.wishes += 1

    def put_on(self, modules: Mapping[str, nn.Module]) -> None:
        for onlooker in self._all:
            if isinstance(onlooker, HasHooks):
                with self._guarded(onlooker):
                    onlooker.put_on(modules)

    def take_off(self) -> None:
        for onlooker in self._all:
            if isinstance(onlooker, HasHooks):
                with self._guarded(onlooker):
                    onlooker.take_off()

    def wants(self, path: str, module: nn.Module) -> bool:
        """Everybody is asked, and may remember what it wants: all are shown what anybody does."""
        wanted = False
        for onlooker in self._all:
            with self._guarded(onlooker):  # patterns may be calls of the user's
                wanted = onlooker.wants(path, module) or wanted
        return wanted

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        wanted = False
        for onlooker in self._all:
            with self._guarded(onlooker):
                wanted = onlooker.wants_inputs(path, module) or wanted
        return wanted

    def begin(self) -> None:
        for onlooker in self._all:
            with self._guarded(onlooker):
                onlooker.begin()

    def saw(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        for onlooker in self._all:
            with self._guarded(onlooker):
                onlooker.saw(path, kind, index, tensor)

    def end(self, recorder: Recorder) -> None:
        for onlooker in self._all:
            with self._guarded(onlooker):
                onlooker.end(recorder)

    def forget(self) -> None:
        for onlooker in self._all:
            with self._guarded(onlooker):
                onlooker.forget()

    @contextlib.contextmanager
    def _guarded(self, onlooker: Onlooker) -> Iterator[None]:
        """One that failed is not asked again."""
        try:
            yield
        except Exception as problem:
            self._all = tuple(other for other in self._all if other is not onlooker)
            if isinstance(onlooker, HasHooks):
                with contextlib.suppress(Exception):
                    onlooker.take_off()
            self._report.error(type(onlooker).__name__, problem)


def guarded(make: Make, report: Report, where: str) -> Make:
    """In the background: an exhibit that cannot be made must not cost the frame it goes with."""

    def made(read: Read) -> Iterable[Exhibit]:
        try:
            return tuple(make(read))
        except Exception as problem:
            report.error(where, problem)
            return ()

    return made
