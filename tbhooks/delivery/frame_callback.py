"""Followers of a watch, such as a live view: they get each frame in the background thread.

An exception of a follower is caught and counted; the sinks go on writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report


class Follower(Protocol):
    """Something that gets every frame while the watch runs."""

    def frame(self, frame: Frame) -> None: ...

    def closed(self) -> None:
        """Called once, after the last frame."""


class LiveView(Protocol):
    """The view that `Watch.live()` returns."""

    updates: int
    seconds: float

    def choose(self, kind: str, stat: str) -> None: ...

    def stop(self) -> None: ...


class FollowerSink:
    """Passes frames to a follower, as a sink of the worker. Measures the time that the follower takes."""

    def __init__(self, follower: Follower, report: Report) -> None:
        self._follower = follower
        self._report = report

    def write(self, frame: Frame) -> None:
        self._call(lambda: self._follower.frame(frame))

    def flush(self) -> None:
        """Does nothing: a follower stores nothing."""

    def close(self) -> None:
        self._call(self._follower.closed)

    def _call(self, function: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            function()
        except Exception as problem:  # raised further, the step would count as not written
            self._report.error(type(self._follower).__name__, problem)
        finally:
            self._report.seconds_views += time.perf_counter() - started
