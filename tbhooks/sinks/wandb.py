"""Frames into a Weights & Biases run, on an axis of their own: nothing of theirs or the user's is too late for it.

A run has one row a step and takes none below the last. The user may log with `step=`, and does so later than the
background thread or earlier. So a frame joins the row the user is at, which moves nobody on, and the next frame
waits until the user has moved on, or cannot mind.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError, TbhooksError
from tbhooks.data.frame import Frame
from tbhooks.sinks.findings_text import Told
from tbhooks.sinks.flush_hooks import drain_first
from tbhooks.sinks.scalar_selection import numbers_of, scalar_table
from tbhooks.sinks.uniform_bins import BINS, histograms_of

STEP = "tbhooks/step"
FINDINGS = "tbhooks/findings"
# How many frames wait for a row of their own, and how many numbers they may hold, before every other is left out.
MOST_WAITING = 128
MOST_NUMBERS = 4_000_000


class WandbSink:
    """Writes to a run as `wandb.init()` gives it, or to the current one when given the module.

    `alone` says that nobody else logs to it, so that no frame waits for anybody.
    """

    def __init__(self, run: Any, scalars: object = "core", *, alone: bool = False) -> None:
        self._table = scalar_table(scalars)
        self._run = _current(run)
        self._rows = Rows(self._run, alone)
        self._told = Told()
        self._defined: set[str] = set()
        self._unhook: Callable[[], None] | None = None
        self._run.define_metric(STEP, hidden=True)

    @property
    def destination(self) -> str:
        """The run's id."""
        return f"wandb run {self._run.id}"

    def drain_before_close(self, drain: Callable[[], None]) -> None:
        """Has `drain` called when the user finishes the run, so that nothing comes too late."""

        def drain_all() -> None:
            drain()
            self._rows.write_all()

        # `finish()`, the end of a `with`, and the module's `finish()` all come through this one.
        last = "_finish" if hasattr(self._run, "_finish") else "finish"
        self._unhook = drain_first(self._run, drain_all, before=(last,))

    def write(self, frame: Frame) -> None:
        from wandb import Histogram  # noqa: PLC0415  only where it is used

        if not frame.has_numbers:
            return
        numbers = numbers_of(frame, self._table)
        histograms = {tag: Histogram(np_histogram=(c, e)) for tag, c, e in histograms_of(frame)}
        self._define(frame, [*numbers, *histograms])
        self._rows.add(frame.step, {**numbers, **histograms, STEP: frame.step})
        if self._told.hears(frame.findings):
            self._run.summary[FINDINGS] = self._told.text

    def flush(self) -> None:
        """The tool writes by itself; what waits for the user to move on waits longer."""

    def close(self) -> None:
        """The run stays the user's to finish."""
        self._rows.write_all()
        if self._unhook is not None:
            self._unhook()

    def _define(self, frame: Frame, tags: list[str]) -> None:
        """Which axis they are drawn over: a definition a kind of number, and one for each that users name."""
        for tag in tags:
            name = tag if tag in frame.scalars or "/" not in tag else tag[: tag.index("/") + 1] + "*"
            if name not in self._defined and "*" not in name[:-1]:
                self._defined.add(name)
                self._run.define_metric(name, step_metric=STEP)


class Rows:
    """The rows of a run that the user writes to as well, and the frames that wait for one."""

    def __init__(self, run: Any, alone: bool) -> None:
        self._run = run
        self._alone = alone
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._at: int = run.step
        self._ours = -1
        """The row that holds a frame of ours and is not over yet."""
        self._last_label = -1
        self._user_logs = bool(self._at > run.starting_step)
        self._counts_as_we_do = False
        """Whether the numbers the user asks for are those of training steps."""

    def add(self, label: int, row: dict[str, Any]) -> None:
        self._look_at_user()
        self._waiting.append((label, row))
        self._last_label = label
        while self._waiting and self._may_write():
            self._write_next()
        if len(self._waiting) > MOST_WAITING and sum(map(_size, self._waiting)) > MOST_NUMBERS:
            del self._waiting[1::2]
            raise TbhooksError(
                "some steps are not in the wandb run: you log to it with step= by another count, or have not logged "
                "yet, and theirs would be rows that yours may need. Log without step= (define_metric gives an axis), "
                "raise every=, or say WandbSink(run, alone=True) if nobody else logs there"
            )

    def write_all(self) -> None:
        if self._waiting:
            self._look_at_user()
        while self._waiting:
            self._write_next()

    def _look_at_user(self) -> None:
        if getattr(self._run, "_is_finished", False):  # it would not answer
            self._waiting.clear()
            raise OSError("the wandb run was finished before the watch")
        at = self._run.step
        if at > self._at:
            self._user_logs = True
            self._counts_as_we_do = at >= self._last_label
            self._at = at

    def _may_write(self) -> bool:
        if self._at > self._ours:
            return True
        if self._alone or not _sets_steps(self._run):
            return self._alone or self._user_logs
        label, _ = self._waiting[0]
        return self._counts_as_we_do and bool(self._at < label)

    def _write_next(self) -> None:
        """Into the row the user is at; if that holds a frame already, it is over now."""
        _, row = self._waiting.pop(0)
        if self._at == self._ours:
            self._run.log({}, commit=True)
        self._run.log(row, commit=False)
        self._at = self._ours = self._run.step


def _size(waiting: tuple[int, dict[str, Any]]) -> int:
    _, row = waiting
    return sum(1 if isinstance(value, float | int) else 2 * BINS for value in row.values())


def _sets_steps(run: Any) -> bool:
    """Whether the user passes `step=` to `log`; if that cannot be known, as if."""
    features = getattr(getattr(run, "_telemetry_obj", None), "feature", None)
    return bool(getattr(features, "set_step_log", True))


def _current(run: Any) -> Any:
    found = run.run if isinstance(run, ModuleType) else run
    if found is None:
        raise ArgumentError("wandb has no current run: call wandb.init() before watch()")
    return found
