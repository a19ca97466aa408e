"""Writes frames to a Weights & Biases run, with their own step axis.

A run has one row per step and rejects rows below the last. The user may log with `step=`, before or after the
background thread. So a frame joins the user's current row without committing it, and the next frame waits until the
user has moved on, or until it is certain that an extra row does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError, TbhooksError
from tbhooks.data.frame import Frame
from tbhooks.data.stats import Counts, Floats
from tbhooks.sinks.alerts import Alerts
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.scalar_selection import is_summarised, scalar_table, scalars_of
from tbhooks.sinks.trackers import BINS, FindingsText, histograms_of

STEP = "tbhooks/step"
FINDINGS = "tbhooks/findings"
# How many frames may wait for a row, and how many values they may hold, before every other frame is dropped.
MAX_WAITING = 128
MAX_VALUES = 4_000_000
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


class WandbSink:
    """Writes to a wandb run, which stays open.

    Args:
        run: a run returned by `wandb.init()`, or the module `wandb` for the current run.
        scalars: the statistics that are logged as scalars, as in `watch`.
        alone: whether nothing else logs to the run, so that no frame has to wait.
        alerts: the least severity of findings that become wandb alerts: "info", "warning" or "error". Each rule
            alerts once, and again if it becomes more severe. None for no alerts.

    Raises:
        ArgumentError: if the module is passed and there is no current run, or for an unknown severity.

    """

    def __init__(self, run: Any, scalars: object = "core", *, alone: bool = False, alerts: str | None = None) -> None:
        self._table = scalar_table(scalars)
        self._run = _current(run)
        self._rows = Rows(self._run, alone)
        self._findings = FindingsText()
        self._alerts = Alerts(alerts)
        self._defined: set[str] = set()
        self._unhook: Callable[[], None] | None = None
        self._run.define_metric(STEP, hidden=True)

    @property
    def destination(self) -> str:
        """The run's id."""
        return f"wandb run {self._run.id}"

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Calls `flush` before the user finishes the run, so that all logged steps get there."""

        def flush_all() -> None:
            flush()
            self._rows.write_all()

        # `run.finish()`, the end of a `with` block and `wandb.finish()` all call this method.
        method = "_finish" if hasattr(self._run, "_finish") else "finish"
        self._unhook = call_before(self._run, (method,), flush_all)

    def write(self, frame: Frame) -> None:
        from wandb import Histogram  # noqa: PLC0415  optional

        if not frame.has_numbers:
            return
        numbers = scalars_of(frame, self._table)
        histograms = {tag: Histogram(np_histogram=(c, e)) for tag, c, e in self._histograms_of(frame)}
        self._define(frame, [*numbers, *histograms])
        self._rows.add(frame.step, {**numbers, **histograms, STEP: frame.step})
        if self._findings.add(frame.findings):
            self._run.summary[FINDINGS] = str(self._findings)
        for alert in self._alerts.of(frame.findings):
            self._run.alert(alert.title, alert.text, level=_LEVELS[alert.severity])

    def flush(self) -> None:
        """Not needed: wandb writes on its own. Waiting frames keep waiting."""

    def close(self) -> None:
        """Writes the waiting frames. The run stays open: the user finishes it."""
        self._rows.write_all()
        if self._unhook is not None:
            self._unhook()

    def _histograms_of(self, frame: Frame) -> Iterable[tuple[str, Counts, Floats]]:
        return () if is_summarised(frame.sites, self._table) else histograms_of(frame)

    def _define(self, frame: Frame, tags: list[str]) -> None:
        """Sets the step axis: one definition per group of tags, and one for each scalar that the user has named."""
        for tag in tags:
            name = tag if tag in frame.scalars or "/" not in tag else tag[: tag.index("/") + 1] + "*"
            if name not in self._defined and "*" not in name[:-1]:
                self._defined.add(name)
                self._run.define_metric(name, step_metric=STEP)


class Rows:
    """The rows of a run that the user logs to as well, and the frames that wait for a row."""

    def __init__(self, run: Any, alone: bool) -> None:
        self._run = run
        self._alone = alone
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._row: int = run.step
        self._our_row = -1
        """The uncommitted row that holds a frame."""
        self._last_label = -1
        self._user_logs = bool(self._row > run.starting_step)
        self._counts_training_steps = False
        """Whether the steps that the user passes count training steps."""

    def add(self, label: int, row: dict[str, Any]) -> None:
        self._update_position()
        self._waiting.append((label, row))
        self._last_label = label
        while self._waiting and self._may_write():
            self._write_next()
        if len(self._waiting) > MAX_WAITING and sum(map(_size, self._waiting)) > MAX_VALUES:
            del self._waiting[1::2]
            raise TbhooksError(
                "some steps are missing in the wandb run: the script logs with step= and another count, or has not "
                "logged yet, and may need the rows. Log without step= (define_metric gives an axis), increase every=, "
                "or pass WandbSink(run, alone=True) if nothing else logs to the run"
            )

    def write_all(self) -> None:
        if self._waiting:
            self._update_position()
        while self._waiting:
            self._write_next()

    def _update_position(self) -> None:
        if getattr(self._run, "_is_finished", False):  # reading its step would block
            self._waiting.clear()
            raise OSError("the wandb run was finished before the watch")
        at = self._run.step
        if at > self._row:
            self._user_logs = True
            self._counts_training_steps = at >= self._last_label
            self._row = at

    def _may_write(self) -> bool:
        if self._row > self._our_row:
            return True
        if self._alone or not _sets_steps(self._run):
            return self._alone or self._user_logs
        label, _ = self._waiting[0]
        return self._counts_training_steps and bool(self._row < label)

    def _write_next(self) -> None:
        """Adds a frame to the user's current row; commits that row first if it already holds a frame."""
        _, row = self._waiting.pop(0)
        if self._row == self._our_row:
            self._run.log({}, commit=True)
        self._run.log(row, commit=False)
        self._row = self._our_row = self._run.step


def _size(waiting: tuple[int, dict[str, Any]]) -> int:
    _, row = waiting
    return sum(1 if isinstance(value, float | int) else 2 * BINS for value in row.values())


def _sets_steps(run: Any) -> bool:
    """Whether the user passes `step=` to `log`; True if that is not known."""
    features = getattr(getattr(run, "_telemetry_obj", None), "feature", None)
    return bool(getattr(features, "set_step_log", True))


def _current(run: Any) -> Any:
    current = run.run if isinstance(run, ModuleType) else run
    if current is None:
        raise ArgumentError("wandb has no current run: call wandb.init() before watch()")
    return current
