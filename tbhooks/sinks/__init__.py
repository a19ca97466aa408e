"""Where frames go: one file a destination. A sink is anything with `write`, `flush` and `close`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tbhooks.data.frame import Frame


@runtime_checkable
class Sink(Protocol):
    """Takes frames, one call at a time, all from the pump's thread."""

    def write(self, frame: Frame) -> None:
        """Stores a frame."""

    def flush(self) -> None:
        """Makes everything written so far durable."""

    def close(self) -> None:
        """Releases what the sink holds; nothing is written afterwards."""


@runtime_checkable
class HasSteps(Protocol):
    """A sink that can tell how far whoever wrote there before has come."""

    def last_step(self) -> int | None:
        """The last step written, by an earlier process too; None if there is none."""
