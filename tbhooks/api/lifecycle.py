"""The life of watches: how one starts and closes, and what happens to the open ones when the process ends or forks.

Open watches are closed at exit and at SIGTERM, so that every submitted step is written. A forked child inherits none
of them. When the last watch closes, the process is as it was before the first one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import nn

from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.session import CaptureSession
from tbhooks.data.errors import ArgumentError, ClosedError
from tbhooks.data.process.fork import in_forked_child
from tbhooks.data.self_report import Report
from tbhooks.delivery.worker import DEADLINE_S, Worker
from tbhooks.distributed.topology import before_process_group_ends, is_in_job
from tbhooks.sinks import Sink

# Deadlines for all watches together. SIGTERM is usually followed by SIGKILL some ten seconds later.
EXIT_DEADLINE_S = 30.0
SIGTERM_DEADLINE_S = 5.0
# How long a reader waits if ranks are merged: a rank that trains must not wait long for one that reads.
MERGED_READ_S = 2.0
# The part of its time limit that close() reserves for writing, if another rank does not arrive.
RESERVED_FOR_WRITING_S = 5.0

open_watches: set[Lifecycle] = set()
_handlers_installed = threading.Event()
_process_failed = threading.Event()


@runtime_checkable
class HasDestination(Protocol):
    """A sink that writes to something the user may hold as well, and may close before the watch."""

    @property
    def destination(self) -> str: ...

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Makes the sink call `flush` before its destination is closed."""


@runtime_checkable
class KeepsOutcome(Protocol):
    """A sink that writes how the run ended when it is closed: "finished" or "failed"."""

    outcome: str


class Lifecycle:
    """Starts and closes the parts of one watch: capture, the background thread, the sinks, the group of ranks."""

    def __init__(
        self, model: weakref.ref[nn.Module], session: CaptureSession, worker: Worker, sinks: tuple[Sink, ...],
        context: RankContext, report: Report,
    ) -> None:  # fmt: skip
        self.model = model
        self.session = session
        self.sinks = sinks
        self.context = context
        self.report = report
        self.is_active = not context.is_idle
        """False if there is nothing to capture: on an idle rank, after close(), in a forked child, without a model."""
        self.is_closed = False
        self._worker = worker
        self._evaluation_sinks: tuple[Sink, ...] = ()
        self._at_end: list[Callable[[bool], None]] = []
        self._last_calls: tuple[Callable[[], None], ...] = ()
        self._has_stopped = False
        self._is_model_gone = False

    @property
    def is_writing(self) -> bool:
        """Whether this process writes: it captures, and is the first rank."""
        return self.is_active and self.context.rank == 0

    def check_open(self) -> None:
        """Raises a ClosedError after close()."""
        if self.is_closed:
            raise ClosedError("this watch is closed; call watch() again")

    def at_end(self, callback: Callable[[bool], None]) -> None:
        """Calls `callback(failed)` when capture ends, while artifacts can still be submitted."""
        self._at_end.append(callback)

    def at_end_in_background(self, *calls: Callable[[], None]) -> None:
        """Has the background thread make these calls before it closes the sinks, each after everything that was
        submitted before is judged and written.
        """
        self._last_calls += calls

    def start(self) -> None:
        """Opens the watch: it captures from now on, until it closes or the model is garbage-collected."""
        _install_handlers(in_job=is_in_job())
        # Watches whose model is gone. One with a sink that hangs is left for the end of the process.
        for other in list(open_watches):
            if not other.is_active and other.is_written:
                other.close()
        self._connect(self.sinks)
        open_watches.add(self)
        if self.context.rank_group is not None:
            before_process_group_ends.add(id(self), self.drain)
        model = self.model()
        if model is not None:
            weakref.finalize(model, _model_is_gone, weakref.ref(self)).atexit = False
        try:
            self.session.start()
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what was captured, removes every hook and closes the sinks. Does nothing the second time."""
        self.is_closed = True
        if self not in open_watches:
            return
        self.begin_close()
        deadline = time.monotonic() + timeout_s
        rank_group = self.context.rank_group
        if rank_group is not None and not self._worker.wait(max(timeout_s / 2, timeout_s - RESERVED_FOR_WRITING_S)):
            rank_group.give_up()
        self._worker.close(max(0.0, deadline - time.monotonic()))
        if self._is_model_gone:
            self.session.stop()
        if rank_group is not None:
            before_process_group_ends.discard(id(self))
            rank_group.leave(is_idle=self.is_written)
        open_watches.discard(self)  # last: if this is interrupted, the watch is closed again at exit
        _restore_handlers()

    def begin_close(self) -> None:
        """The part of closing that does not wait. The background thread goes on writing."""
        self.is_closed = True
        if self._is_model_gone or self._has_stopped or self not in open_watches:
            return
        self.session.stop(is_failing=is_failing())
        self._end(failed=is_failing())
        self._worker.finish(*self._last_calls)
        self._has_stopped = True  # last: an interrupt before this repeats it

    def model_is_gone(self) -> None:
        """The model was garbage-collected, in any thread and at any moment: nothing may be waited for here.

        The background thread submits the steps that have ended.
        """
        if self.is_active:
            self._is_model_gone = True
            self._end(failed=False)
            self._worker.finish(partial(self.session.settle, for_good=True), *self._last_calls)

    def abandon(self) -> None:
        """Stops everything without writing: for a forked child, where the background thread does not exist."""
        self.is_active = False
        self._worker.abandon()
        self.report.forked()
        self.session.forked()
        self.session.abandon()
        self.session.disconnect()

    def _end(self, *, failed: bool) -> None:
        while self._at_end:
            self._at_end.pop()(failed)
        for sink in (*self.sinks, *self._evaluation_sinks):
            if isinstance(sink, KeepsOutcome):
                sink.outcome = "failed" if failed else "finished"
        self.is_active = False

    # Waiting for the background thread.

    @property
    def is_written(self) -> bool:
        """Whether the background thread has nothing left to write."""
        return self._worker.is_done

    def flush(self, timeout_s: float) -> None:
        """Waits until every step that has ended is written and durable, or the time is over."""
        if self.is_active:
            self.session.settle()
        if not self._worker.flush(timeout_s):
            self.report.log_once(f"flush() gave up after {timeout_s:g} s: a sink is slow, or another rank is late")

    def drain(self) -> None:
        """`flush()` for callbacks: exceptions are caught and counted."""
        with self.report.guarded("draining"):
            self.flush(DEADLINE_S)

    def catch_up(self, timeout_s: float | None = None) -> None:
        """Waits until the steps that have ended are in the history."""
        if self.is_active:
            self.session.settle()
        if timeout_s is None:
            timeout_s = DEADLINE_S if self.context.rank_group is None else MERGED_READ_S
        self._worker.wait(timeout_s)

    # Where the sinks write.

    @property
    def run_directory(self) -> str | None:
        """The destination of the first sink that has one."""
        return next((sink.destination for sink in self.sinks if isinstance(sink, HasDestination)), None)

    @property
    def destinations(self) -> set[str]:
        """The destinations of all sinks."""
        return _destinations((*self.sinks, *self._evaluation_sinks))

    def send_evaluations_to(self, sinks: tuple[Sink, ...]) -> None:
        """Writes evaluation passes to these sinks from now on, and not to the sinks of training."""
        shared = self.destinations & _destinations(sinks)
        if shared:
            raise ArgumentError(
                f"this watch writes to {shared.pop()} already; evaluation() without a writer adds evaluations to it, "
                "with tags that begin with eval."
            )
        self._connect(sinks)
        self.session.settle()
        self._worker.wait()
        self._evaluation_sinks += sinks
        self._worker.send_evaluations_to(self._evaluation_sinks)

    def _connect(self, sinks: tuple[Sink, ...]) -> None:
        taken = {destination for other in open_watches if other is not self for destination in other.destinations}
        for sink in sinks:
            if isinstance(sink, HasDestination):
                sink.flush_before_close(self.drain)
                if sink.destination in taken:
                    self.report.log_once(
                        f"another open watch writes to {sink.destination} too: where their tags are the same, their "
                        "numbers mix"
                    )


def _destinations(sinks: Iterable[Sink]) -> set[str]:
    return {sink.destination for sink in sinks if isinstance(sink, HasDestination)}


def _model_is_gone(reference: weakref.ref[Lifecycle]) -> None:
    lifecycle = reference()
    if lifecycle is not None:
        lifecycle.model_is_gone()


# The process.


def close_together(lifecycles: Iterable[Lifecycle], timeout_s: float = EXIT_DEADLINE_S) -> None:
    """Closes several watches within one time limit. They write at the same time: one that hangs delays no other."""
    deadline = time.monotonic() + timeout_s
    lifecycles = list(lifecycles)
    for lifecycle in lifecycles:
        lifecycle.begin_close()
    for lifecycle in lifecycles:
        lifecycle.close(max(0.0, deadline - time.monotonic()))


def is_failing() -> bool:
    """Whether an exception is being handled, or the process ends because of an exception or a signal."""
    return sys.exc_info()[0] is not None or _process_failed.is_set()


def _install_handlers(*, in_job: bool) -> None:
    """For exit, fork and SIGTERM. A rank of a distributed job has no SIGTERM handler: it must die at once, even while
    it waits for another rank.
    """
    if not _handlers_installed.is_set():
        _handlers_installed.set()
        atexit.register(_close_all)
        in_forked_child(_abandon_all)
    if not in_job and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _handle_sigterm(_on_sigterm)


def _restore_handlers() -> None:
    if not open_watches and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _handle_sigterm(signal.SIG_DFL)


def _handle_sigterm(handler: Any) -> None:
    with contextlib.suppress(ValueError):  # only the main thread may set it
        signal.signal(signal.SIGTERM, handler)


def _close_all() -> None:
    if getattr(sys, "last_value", None) is not None:  # an exception that nobody caught
        _process_failed.set()
    close_together(open_watches, EXIT_DEADLINE_S)


def _abandon_all() -> None:
    for lifecycle in list(open_watches):
        lifecycle.abandon()
    open_watches.clear()
    _restore_handlers()


def _on_sigterm(number: int, _frame: Any) -> None:
    """Writes what was submitted. Then the process dies of the signal, as it would without tbhooks."""
    _process_failed.set()
    close_together(open_watches, SIGTERM_DEADLINE_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
