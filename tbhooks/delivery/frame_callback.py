"""Those who look on while a watch runs, such as a live view: shown every frame, timed, and kept from harm.

Runs in the pump's thread. What a follower raises ends with it: writing goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report


class Follower(Protocol):
    """Something that is shown frames as they come."""

    def frame(self, frame: Frame) -> None: ...

    def closed(self) -> None:
        """Once, after the last frame."""


class LiveView(Protocol):
    """A view that follows a watch; what `Watch.live()` returns."""

    updates: int
    seconds: float

    def choose(self, kind: str, stat: str) -> None: ...

    def stop(self) -> None: ...


class Following:
    """A follower as a sink, which is how the pump knows it."""

    def __init__(self, follower: Follower, report: Report) -> None:
        self._follower = follower
        self._report = report

    def write(self, frame: Frame) -> None:
        self._timed(lambda: self._follower.frame(frame))

    def flush(self) -> None:
        """Nothing of it is on the way."""

    def close(self) -> None:
        self._timed(self._follower.closed)

    def _timed(self, what: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            what()
        except Exception as problem:  # a view that fails is no step that was not written
            self._report.error(type(self._follower).__name__, problem)
        finally:
            self._report.seconds_views += time.perf_counter() - started
