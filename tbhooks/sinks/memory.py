"""Sinks without files: frames in memory, and frames passed to a function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame


class MemorySink:
    """Keeps frames in memory, for tests and notebooks; `sink.frames[-1]` is the newest.

    Args:
        limit: how many frames are kept; None for all.

    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ArgumentError(f"limit must be an integer >= 1, or None for no limit, got {limit!r}")
        self._frames: deque[Frame] = deque(maxlen=limit)

    @property
    def frames(self) -> list[Frame]:
        return list(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)

    def write(self, frame: Frame) -> None:
        self._frames.append(frame)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """The frames stay readable."""


class FunctionSink:
    """Calls a function with each frame, on the background thread."""

    def __init__(self, function: Callable[[Frame], object]) -> None:
        self._function = function

    def write(self, frame: Frame) -> None:
        self._function(frame)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
