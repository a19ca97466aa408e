"""A function as a destination: it is called with every frame, from the background thread."""

from __future__ import annotations

from collections.abc import Callable

from tbhooks.frame import Frame


class FunctionSink:
    """Calls a function with each frame."""

    def __init__(self, function: Callable[[Frame], object]) -> None:
        self._function = function

    def write(self, frame: Frame) -> None:
        self._function(frame)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held."""
