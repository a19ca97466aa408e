"""The background thread: takes finished steps from a bounded queue and hands frames to the sinks.

`submit` never blocks: a full queue drops the step and counts it. A sink that fails or is slow reaches
no further than this thread. No torch, no hooks.
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

# A queue is full when it holds this many steps or this much memory. An empty one takes a step of any size.
QUEUE_STEPS = 512
QUEUE_BYTES = 64 << 20
# A dropped step that other ranks wait for stays in the queue without its numbers, up to this many times QUEUE_STEPS.
# Beyond that the ranks notice that they are not at the same step, and merging ends.
MOST_EMPTY = 16
DEADLINE_S = 30.0
# Whatever a sink or rule raises must not end the thread; not even sys.exit(), which ends only threads anyway.
OURS = (Exception, SystemExit)

Judge = Callable[[Frame], Frame]
"""What is done to a frame before the sinks see it: findings are attached."""


class Step(Protocol):
    """What the training thread hands over; `frames` may wait for its copy to arrive."""

    @property
    def nbytes(self) -> int: ...

    def frames(self) -> Sequence[Frame]: ...

    def without_numbers(self) -> Step | None:
        """What is left to do if it is dropped: other ranks may wait for it. Itself, if it never is."""


@dataclass(frozen=True)
class _Last:
    """What hands over the last steps, in the background thread."""

    hand_over: Callable[[], None]


Item = Step | Callable[[Sink], None] | _Last


def _is_step(item: Item) -> TypeGuard[Step]:
    return not callable(item) and not isinstance(item, _Last)


class Worker:
    """Owns the sinks once started; everything they are asked is asked from one thread."""

    def __init__(self, sinks: Sequence[Sink], judge: Judge, report: Report, flushes: bool = False) -> None:
        self._sinks = tuple(sinks)
        self._flushes = flushes
        self._evaluation_sinks: tuple[Sink, ...] | None = None
        self._judge = judge
        self._report = report
        self._queue: deque[Item] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._busy = False
        self._writing = False
        self._closed = False
        self._ended_at: float | None = None
        """When it was told that no more comes."""
        self._thread: threading.Thread | None = None
        self._threadless = False

    def send_evaluations_to(self, sinks: Sequence[Sink]) -> None:
        """Evaluation passes go there from now on, and not with the rest."""
        self._evaluation_sinks = tuple(sinks)

    def add(self, sink: Sink) -> None:
        """One more from now on, for everything."""
        with self._changed:
            self._sinks = (*self._sinks, sink)

    def submit(self, step: Step) -> None:
        """Takes a step, or drops it; never waits, and costs the same however long the queue is."""
        with self._changed:
            if self._closed:
                return
            size = step.nbytes
            if self._is_full(size):
                left = step.without_numbers()
                if left is not step:
                    self._report.drop("writing is slower than training; raise every=, or give fewer kinds")
                if left is None or (left is not step and len(self._queue) >= MOST_EMPTY * max(QUEUE_STEPS, 1)):
                    return
                step, size = left, left.nbytes
            self._queued_bytes += size
            self._enqueue(step)

    def _is_full(self, more: int) -> bool:
        """Whether a step of so many bytes is one too many."""
        if len(self._queue) >= QUEUE_STEPS:
            return True
        return bool(self._queue) and self._queued_bytes + more > QUEUE_BYTES

    def flush(self, timeout_s: float = DEADLINE_S) -> bool:
        """Waits until everything submitted is written; False if that takes longer than the time given."""
        with self._changed:
            if self._thread is None:
                return True
            is_asked = bool(self._queue) and self._queue[-1] is _flush
            if self._ended_at is None and not is_asked:  # closing makes everything durable as well
                self._enqueue(_flush)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = DEADLINE_S) -> bool:
        """Waits until the thread has nothing left to do."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what is left and closes the sinks, within the time given."""
        self.finish()
        if not self.wait(timeout_s):
            with self._changed:
                left = sum(map(_is_step, self._queue)) + self._writing
                passed = time.monotonic() - (self._ended_at or time.monotonic())
            if left:
                self._report.drop(f"the sinks had not taken it {passed:.1f} s after close()", steps=left)

    @property
    def is_done(self) -> bool:
        """Whether nothing is being written, or waits for it."""
        with self._changed:
            return not self._queue and not self._busy

    def finish(self, last: Callable[[], None] | None = None) -> None:
        """Closes without waiting: the thread writes what is left and ends.

        `last` is called in that thread after everything that was handed over so far; what it submits is written too.
        """
        with self._changed:
            if self._ended_at is None:
                self._ended_at = time.monotonic()
                self._enqueue(_close if last is None else _Last(last))
                self._closed = last is None

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: do nothing, for ever."""
        self._changed = threading.Condition()
        self._queue.clear()
        self._queued_bytes = 0
        self._closed, self._busy, self._thread = True, False, None
        self._ended_at = time.monotonic()

    def _enqueue(self, item: Item) -> None:
        self._queue.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tbhooks-pump", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is shutting down and starts no thread any more
                self._thread, self._threadless = threading.current_thread(), True
        if self._threadless:
            self._drain()
        self._changed.notify_all()

    def _drain(self) -> None:
        """Without a thread. What is handed over while a step is written, by the garbage collector, waits its turn."""
        while self._queue and not self._busy:
            self._next()

    def _run(self) -> None:
        while self._next() is not _close:
            pass

    def _next(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue))
            item = self._queue.popleft()
            self._queued_bytes -= item.nbytes if _is_step(item) else 0
            self._busy, self._writing = True, _is_step(item)
        started = time.perf_counter()
        if isinstance(item, _Last):
            self._finish_with(item)
        elif callable(item):
            self._ask((*self._sinks, *(self._evaluation_sinks or ())), item)
        else:
            self._write(item)
        self._report.seconds_pump += time.perf_counter() - started
        with self._changed:
            self._busy = self._writing = False
            self._changed.notify_all()
        return item

    def _finish_with(self, last: _Last) -> None:
        try:
            last.hand_over()
        except OURS as problem:
            self._report.error("handing over the last step", problem)
        with self._changed:
            if not self._closed:
                self._enqueue(_close)
                self._closed = True

    def _write(self, step: Step) -> None:
        try:
            frames = step.frames()
        except OURS as problem:
            self._report.error("making a frame", problem)
            self._report.drop("its numbers could not be read")
            return
        for frame in frames:
            self._write_frame(self._judged(frame))

    def _write_frame(self, frame: Frame) -> None:
        sinks = self._sinks
        if frame.is_evaluation and self._evaluation_sinks is not None:
            sinks, frame = self._evaluation_sinks, frame.without_phase()
        if self._ask(sinks, lambda sink: sink.write(frame)) == len(sinks) > 0:
            self._report.drop("no sink could write it")
        elif self._flushes:
            self._ask(sinks, _flush)

    def _judged(self, frame: Frame) -> Frame:
        try:
            return self._judge(frame)
        except OURS as problem:
            self._report.error("rules", problem)
            return frame

    def _ask(self, sinks: Sequence[Sink], what: Callable[[Sink], None]) -> int:
        """Asks each for something; how many could not."""
        failed = 0
        for sink in sinks:
            try:
                what(sink)
            except OURS as problem:
                failed += 1
                self._report.error(type(sink).__name__, problem)
        return failed


def _flush(sink: Sink) -> None:
    sink.flush()


def _close(sink: Sink) -> None:
    sink.close()
