"""Writes frames to a SwanLab run: scalars, and findings as text. SwanLab has no histograms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.scalar_selection import scalar_table, scalars_of
from tbhooks.sinks.trackers import FindingsText, unmoved

FINDINGS = "tbhooks/findings"


class SwanlabSink:
    """Writes to a SwanLab run, which stays open.

    Args:
        run: a run returned by `swanlab.init()`, or the module `swanlab` for the current run.
        scalars: the statistics that are logged as scalars, as in `watch`.

    Raises:
        ArgumentError: if the module is passed and there is no current run.

    """

    def __init__(self, run: Any, scalars: object = "core") -> None:
        self._table = scalar_table(scalars)
        self._run = _current(run)
        self._lock = getattr(self._run, "_api_lock", None) or nullcontext()  # the script may log at the same time
        self._findings = FindingsText()
        self._unhook: Callable[[], None] | None = None

    @property
    def destination(self) -> str:
        """The run's id."""
        return f"SwanLab run {self._run.id}"

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Calls `flush` before the user finishes the run, so that all logged steps get there."""
        self._unhook = call_before(self._run, ("finish",), flush)

    def write(self, frame: Frame) -> None:
        from swanlab import Text  # noqa: PLC0415  optional

        row: dict[str, Any] = dict(scalars_of(frame, self._table))
        if self._findings.add(frame.findings):
            row[FINDINGS] = Text(str(self._findings))
        if row:
            with self._lock, unmoved(getattr(self._run, "_ctx", None), "_global_step", frame.step):
                self._run.log(row, step=frame.step)

    def flush(self) -> None:
        """Not needed: SwanLab writes on its own."""

    def close(self) -> None:
        """The run stays open: the user finishes it."""
        if self._unhook is not None:
            self._unhook()


def _current(run: Any) -> Any:
    current = run.run if isinstance(run, ModuleType) else run
    if current is None:
        raise ArgumentError("swanlab has no current run: call swanlab.init() before watch()")
    return current
