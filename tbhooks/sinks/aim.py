"""Frames into an Aim run: scalars as metrics, histograms as distributions, findings as one of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tbhooks.data.frame import Frame
from tbhooks.sinks.findings_text import Told
from tbhooks.sinks.scalar_selection import numbers_of, scalar_table
from tbhooks.sinks.uniform_bins import histograms_of

FINDINGS = "tbhooks_findings"


class AimSink:
    """Writes to an `aim.Run`."""

    def __init__(self, run: Any, scalars: object = "core") -> None:
        self._table = scalar_table(scalars)
        self._run = run
        self._told = Told()

    @property
    def destination(self) -> str:
        """The run's hash."""
        return f"Aim run {self._run.hash}"

    def drain_before_close(self, drain: Callable[[], None]) -> None:
        """A closed run takes numbers, too."""

    def write(self, frame: Frame) -> None:
        from aim import Distribution  # noqa: PLC0415  only where it is used

        for tag, number in numbers_of(frame, self._table).items():
            self._run.track(number, name=tag, step=frame.step)
        for tag, counts, edges in histograms_of(frame):
            shown = Distribution.from_histogram(counts, (float(edges[0]), float(edges[-1])))
            self._run.track(shown, name=tag, step=frame.step)
        if self._told.hears(frame.findings):
            self._run[FINDINGS] = self._told.text

    def flush(self) -> None:
        """Aim writes by itself, and at the latest when the run is closed."""

    def close(self) -> None:
        """The run stays the user's to close."""
