"""The background thread: takes steps from a bounded queue, makes frames, applies the rules, calls the sinks.

`submit` never blocks: if the queue is full, the step is dropped and counted. A sink that is slow or raises affects
only this thread. No torch, no hooks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report
from tbhooks.sinks import Sink

# The queue is full with this many steps or this much memory. An empty queue takes a step of any size.
QUEUE_STEPS = 512
QUEUE_BYTES = 64 << 20
# A dropped step that other ranks wait for stays in the queue without its numbers, up to this many times QUEUE_STEPS.
# Beyond that the ranks notice that they are not at the same step, and merging ends.
MOST_EMPTY = 16
DEADLINE_S = 30.0
# How often the thread polls, at most.
POLL_S = 1.0
# No exception of a sink or a rule ends the thread, not even sys.exit(), which in a thread ends only the thread.
CAUGHT = (Exception, SystemExit)

Poll = Callable[[], None]
"""Called by the thread at most once a second, between two steps: looks for requests from outside the process."""
Judge = Callable[[Frame], Frame]
"""Applied to each frame before the sinks get it: returns the frame with findings."""


class Step(Protocol):
    """What the training thread submits."""

    @property
    def nbytes(self) -> int: ...

    def frames(self) -> Sequence[Frame]:
        """Makes the frames, in the background thread. May wait for the device-to-host copy."""

    def without_numbers(self) -> Step | None:
        """What must be done if the step is dropped, because other ranks wait for it. Itself if it is never dropped."""


@dataclass(frozen=True)
class _SubmitLast:
    """Has the background thread make these calls, each after everything that was submitted before, and then close."""

    calls: tuple[Callable[[], None], ...]


Item = Step | Callable[[Sink], None] | _SubmitLast


def _is_step(item: Item) -> TypeGuard[Step]:
    return not callable(item) and not isinstance(item, _SubmitLast)


class Worker:
    """Owns the queue, the thread and the sinks. All calls of a sink come from the one thread."""

    def __init__(
        self, sinks: Sequence[Sink], judge: Judge, report: Report, flushes: bool = False, poll: Poll | None = None
    ) -> None:
        self._sinks = tuple(sinks)
        self._flushes = flushes
        self._evaluation_sinks: tuple[Sink, ...] | None = None
        self._judge = judge
        self._polls = () if poll is None else (poll,)
        self._polled_at = 0.0
        self._report = report
        self._queue: deque[Item] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._busy = False
        self._writing = False
        self._closed = False
        self._finished_at: float | None = None
        """When `finish()` was called."""
        self._thread: threading.Thread | None = None
        self._is_threadless = False

    def send_evaluations_to(self, sinks: Sequence[Sink]) -> None:
        """Writes evaluation passes to these sinks from now on, and not to the others."""
        self._evaluation_sinks = tuple(sinks)

    def add(self, sink: Sink) -> None:
        """Adds a sink, which gets everything from now on."""
        with self._changed:
            self._sinks = (*self._sinks, sink)

    def add_poll(self, poll: Poll) -> None:
        """From now on the thread calls it as well, at most once a second."""
        with self._changed:
            self._polls = (*self._polls, poll)
            self._changed.notify_all()

    def submit(self, step: Step) -> None:
        """Queues a step, or drops it if the queue is full. Never waits; takes the same time for any queue length."""
        if self._queue_or_drop(step):  # logged after the lock is released: a log handler may take long
            self._report.drop("writing is slower than training; increase every=, or capture fewer kinds")

    def _queue_or_drop(self, step: Step) -> bool:
        """Returns whether the numbers of the step were dropped."""
        with self._changed:
            if self._closed:
                return False
            rest = step.without_numbers() if self._is_full(step.nbytes) else step
            is_dropped = rest is not step
            if rest is None or (is_dropped and len(self._queue) >= MOST_EMPTY * max(QUEUE_STEPS, 1)):
                return True
            self._queued_bytes += rest.nbytes
            self._enqueue(rest)
            return is_dropped

    def _is_full(self, nbytes: int) -> bool:
        """Whether there is no room for a step of this size."""
        if len(self._queue) >= QUEUE_STEPS:
            return True
        return bool(self._queue) and self._queued_bytes + nbytes > QUEUE_BYTES

    def flush(self, timeout_s: float = DEADLINE_S) -> bool:
        """Waits until everything submitted is written and flushed. Returns False if the time is over before that."""
        with self._changed:
            if self._thread is None:
                return True
            is_last = bool(self._queue) and self._queue[-1] is _flush
            if self._finished_at is None and not is_last:  # closing a sink flushes it as well
                self._enqueue(_flush)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = DEADLINE_S) -> bool:
        """Waits until the thread has nothing left to do. Returns False if the time is over before that."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what is left and closes the sinks. Steps that are not written in time count as dropped."""
        self.finish()
        if not self.wait(timeout_s):
            with self._changed:
                left = sum(map(_is_step, self._queue)) + self._writing
                passed = time.monotonic() - (self._finished_at or time.monotonic())
            if left:
                self._report.drop(f"the sinks had not written it {passed:.1f} s after close()", steps=left)

    @property
    def is_done(self) -> bool:
        """Whether nothing is queued or being written."""
        with self._changed:
            return not self._queue and not self._busy

    def finish(self, *last: Callable[[], None]) -> None:
        """Closes without waiting: the thread writes what is left and ends.

        Each of `last` is called in the thread after everything that was submitted before, also by the one before it.
        """
        with self._changed:
            if self._finished_at is None:
                self._finished_at = time.monotonic()
                self._enqueue(_SubmitLast(last) if last else _close)
                self._closed = not last

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: drops everything, and does nothing from now on."""
        self._changed = threading.Condition()
        self._queue.clear()
        self._queued_bytes = 0
        self._closed, self._busy, self._thread = True, False, None
        self._finished_at = time.monotonic()

    def _enqueue(self, item: Item) -> None:
        self._queue.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tbhooks-worker", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started while the interpreter shuts down
                self._thread, self._is_threadless = threading.current_thread(), True
        if self._is_threadless:
            # The garbage collector may submit while a step is being written; that one waits for its turn.
            while self._queue and not self._busy:
                self._next()
        self._changed.notify_all()

    def _run(self) -> None:
        while self._next() is not _close:
            pass

    def _next(self) -> Item:
        self._wait_and_poll()
        with self._changed:
            item = self._queue.popleft()
            self._queued_bytes -= item.nbytes if _is_step(item) else 0
            self._busy, self._writing = True, _is_step(item)
        started = time.perf_counter()
        if isinstance(item, _SubmitLast):
            self._submit_last(item)
        elif callable(item):
            self._call((*self._sinks, *(self._evaluation_sinks or ())), item)
        else:
            self._write(item)
        self._report.seconds_pump += time.perf_counter() - started
        with self._changed:
            self._busy = self._writing = False
            self._changed.notify_all()
        return item

    def _wait_and_poll(self) -> None:
        """Waits until something is queued, and polls in the meantime."""
        is_waiting = True
        while is_waiting:
            left = self._polled_at + POLL_S - time.monotonic()
            if self._polls and left <= 0 and not self._is_threadless:
                self._polled_at, left = time.monotonic(), POLL_S
                self._poll()
            with self._changed:
                is_waiting = not self._changed.wait_for(
                    lambda: bool(self._queue), max(left, 0) if self._polls else None
                )

    def _poll(self) -> None:
        for poll in self._polls:
            try:
                poll()
            except CAUGHT as problem:
                self._report.error("looking for requests", problem)

    def _submit_last(self, last: _SubmitLast) -> None:
        first, *others = last.calls
        try:
            first()
        except CAUGHT as problem:
            self._report.error("submitting the last step", problem)
        with self._changed:
            if not self._closed:
                self._enqueue(_SubmitLast(tuple(others)) if others else _close)
                self._closed = not others

    def _write(self, step: Step) -> None:
        try:
            frames = step.frames()
        except CAUGHT as problem:
            self._report.error("making a logged step", problem)
            self._report.drop("its numbers could not be read")
            return
        for frame in frames:
            self._write_frame(self._with_findings(frame))

    def _write_frame(self, frame: Frame) -> None:
        sinks = self._sinks
        if frame.is_evaluation and self._evaluation_sinks is not None:
            sinks, frame = self._evaluation_sinks, frame.without_phase()
        if self._call(sinks, lambda sink: sink.write(frame)) == len(sinks) > 0:
            self._report.drop("every sink failed to write it")
        elif self._flushes:
            self._call(sinks, _flush)

    def _with_findings(self, frame: Frame) -> Frame:
        try:
            return self._judge(frame)
        except CAUGHT as problem:
            self._report.error("rules", problem)
            return frame

    def _call(self, sinks: Sequence[Sink], function: Callable[[Sink], None]) -> int:
        """Calls the function with each sink. Returns how many of the calls failed."""
        failed = 0
        for sink in sinks:
            try:
                function(sink)
            except CAUGHT as problem:
                failed += 1
                self._report.error(type(sink).__name__, problem)
        return failed


def _flush(sink: Sink) -> None:
    sink.flush()


def _close(sink: Sink) -> None:
    sink.close()


class Follower(Protocol):
    """Something that gets every frame while the watch runs."""

    def frame(self, frame: Frame) -> None: ...

    def closed(self) -> None:
        """Called once, after the last frame."""


class FollowerSink:
    """Passes frames to a follower, as a sink of the worker. Measures the time that the follower takes."""

    def __init__(self, follower: Follower, report: Report) -> None:
        self._follower = follower
        self._report = report

    def write(self, frame: Frame) -> None:
        self._call(lambda: self._follower.frame(frame))

    def flush(self) -> None:
        """Does nothing: a follower stores nothing."""

    def close(self) -> None:
        self._call(self._follower.closed)

    def _call(self, function: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            function()
        except Exception as problem:  # raised further, the step would count as not written
            self._report.error(type(self._follower).__name__, problem)
        finally:
            self._report.seconds_views += time.perf_counter() - started
