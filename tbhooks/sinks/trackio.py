"""Writes frames to a Trackio run: scalars and histograms in one row per logged step, findings as alerts on request.

The current run is looked up when the sink is created: Trackio keeps it per thread.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.sinks.alerts import Alerts
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.scalar_selection import is_summarised, scalar_table, scalars_of
from tbhooks.sinks.trackers import FindingsText, histograms_of, unmoved

FINDINGS = "tbhooks/findings"
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


class TrackioSink:
    """Writes to a Trackio run, which stays open.

    Args:
        run: a run returned by `trackio.init()`, or the module `trackio` for the current run.
        scalars: the statistics that are logged as scalars, as in `watch`.
        alerts: the least severity of findings that become Trackio alerts: "info", "warning" or "error". Each rule
            alerts once, and again if it becomes more severe. None for no alerts.

    Raises:
        ArgumentError: if the module is passed and there is no current run, or for an unknown severity.

    """

    def __init__(self, run: Any, scalars: object = "core", *, alerts: str | None = None) -> None:
        self._table = scalar_table(scalars)
        self._run = _current(run)
        self._findings = FindingsText()
        self._alerts = Alerts(alerts)
        self._unhook: Callable[[], None] | None = None

    @property
    def destination(self) -> str:
        """The run's name."""
        return f"Trackio run {self._run.name}"

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Calls `flush` before the user finishes the run, so that all logged steps get there."""
        self._unhook = call_before(self._run, ("finish",), flush)

    def write(self, frame: Frame) -> None:
        from trackio import AlertLevel, Histogram, Markdown  # noqa: PLC0415  optional

        row: dict[str, Any] = dict(scalars_of(frame, self._table))
        if not is_summarised(frame.sites, self._table):
            row |= {tag: Histogram(np_histogram=(counts, edges)) for tag, counts, edges in histograms_of(frame)}
        if self._findings.add(frame.findings):
            row[FINDINGS] = Markdown(str(self._findings).replace("\n", "\n\n"))
        if row:
            with unmoved(self._run, "_next_step", frame.step + 1):
                self._run.log(row, step=frame.step)
        for alert in self._alerts.of(frame.findings):
            level = AlertLevel[_LEVELS[alert.severity]]
            self._run.alert(title=alert.title, text=alert.text, level=level, step=frame.step)

    def flush(self) -> None:
        """Not needed: Trackio writes on its own, twice a second."""

    def close(self) -> None:
        """The run stays open: the user finishes it."""
        if self._unhook is not None:
            self._unhook()


def _current(run: Any) -> Any:
    current = run.context_vars.current_run.get() if isinstance(run, ModuleType) else run
    if current is None:
        raise ArgumentError("trackio has no current run: call trackio.init() before watch()")
    return current
