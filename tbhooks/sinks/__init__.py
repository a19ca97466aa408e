"""Sinks: where frames are written, with one file per destination.

A sink is any object with `write(frame)`, `flush()` and `close()`; pass it to `watch` as the writer.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tbhooks.data.frame import Frame


@runtime_checkable
class Sink(Protocol):
    """Receives frames, one call at a time, from the background thread.

    An exception is logged and counted in `Watch.stats`, and the frame is lost for this sink; training is not affected.
    """

    def write(self, frame: Frame) -> None:
        """Stores a frame."""

    def flush(self) -> None:
        """Makes everything written so far durable."""

    def close(self) -> None:
        """Releases all resources. No method is called afterwards."""


@runtime_checkable
class HasSteps(Protocol):
    """A sink that knows the last step written to its destination."""

    def last_step(self) -> int | None:
        """The last step written, also by an earlier process; None if there is none."""
