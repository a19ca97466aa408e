"""Writes frames to an Aim run: scalars as metrics, histograms as distributions, findings as a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tbhooks.data.frame import Frame
from tbhooks.sinks.scalar_selection import is_summarised, scalar_table, scalars_of
from tbhooks.sinks.trackers import FindingsText, histograms_of

FINDINGS = "tbhooks_findings"


class AimSink:
    """Writes to an `aim.Run`, which stays open.

    Args:
        run: the `aim.Run`.
        scalars: the statistics that become metrics, as in `watch`.

    """

    def __init__(self, run: Any, scalars: object = "core") -> None:
        self._table = scalar_table(scalars)
        self._run = run
        self._findings = FindingsText()

    @property
    def destination(self) -> str:
        """The run's hash."""
        return f"Aim run {self._run.hash}"

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Not needed: a closed run still accepts values."""

    def write(self, frame: Frame) -> None:
        from aim import Distribution  # noqa: PLC0415  optional

        for tag, number in scalars_of(frame, self._table).items():
            self._run.track(number, name=tag, step=frame.step)
        for tag, counts, edges in () if is_summarised(frame.sites, self._table) else histograms_of(frame):
            distribution = Distribution.from_histogram(counts, (float(edges[0]), float(edges[-1])))
            self._run.track(distribution, name=tag, step=frame.step)
        if self._findings.add(frame.findings):
            self._run[FINDINGS] = str(self._findings)

    def flush(self) -> None:
        """Aim writes on its own, at the latest when the run is closed."""

    def close(self) -> None:
        """The run stays open: the user closes it."""
