"""Where one run ends and the next begins, when several were written into one directory.

A run that is resumed goes on from a later step. A run that is started again begins at its first step again, in a file
of its own or further down in the same one. Only the newest run is kept.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Newest:
    """The newest run in frames that are taken in the order they were written."""

    count: int = 0
    """How many runs there were so far."""
    first: int = 0
    """The first step of the newest."""
    start: float = 0.0
    """The time of that step."""
    file: str = ""
    """The file the newest run begins in."""
    in_new_file: bool = True
    """Whether it begins with that file, and not further down in the file of the run before it."""
    _last_step: int = 0
    _last_file: str = ""

    def begins(self, step: int, time: float, file: str) -> bool:
        """Takes the next frame; returns whether it is the first of another run than the frame before it."""
        in_new_file = file != self._last_file
        is_first = self.count == 0 or (step <= self.first and (in_new_file or step < self._last_step))
        self._last_step, self._last_file = step, file
        if is_first:
            self.in_new_file = in_new_file
            self.count, self.first, self.start, self.file = self.count + 1, step, time, file
        return is_first and self.count > 1


def hides(newer: Newest, older: Newest) -> bool:
    """Whether the first came after the second and is another run: neither the same one nor its continuation."""
    return bool(newer.count and older.count) and newer.start > older.start and newer.first <= older.first


@dataclass(frozen=True)
class Span:
    """What one event file added to the log of scalars, and when it was written to last."""

    begin: int
    end: int
    last_time: float
    has_frames: bool

    def is_beside(self, newest: Newest) -> bool:
        """Whether it is a file of scalars that was still written to while this run went on."""
        return not self.has_frames and self.last_time >= newest.start
