"""The background thread: order, the bounded queue, failing and slow sinks, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tbhooks.api.extras import ArtifactStep
from tbhooks.data.artifacts import Text
from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report
from tbhooks.delivery import worker as pump_module
from tbhooks.delivery.worker import QUEUE_BYTES, QUEUE_STEPS, Worker
from tbhooks.sinks import Sink
from tbhooks.sinks.memory import MemorySink
from tests.support.frames import Step, make_frame

Log = pytest.LogCaptureFixture


class GatedSink(MemorySink):
    """Takes a frame only while its gate is open: a slow sink whose slowness the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.calls: list[str] = []

    def write(self, frame: Frame) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        super().write(frame)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class FailingSink:
    """Fails at everything it is asked."""

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem or OSError("no space left")
        self.asked: list[str] = []

    def write(self, frame: Frame) -> None:
        self._fail("write")

    def flush(self) -> None:
        self._fail("flush")

    def close(self) -> None:
        self._fail("close")

    def _fail(self, what: str) -> None:
        self.asked.append(what)
        raise self.problem


def unchanged(frame: Frame) -> Frame:
    return frame


def steps(sink: MemorySink) -> list[int]:
    return [frame.step for frame in sink.frames]


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def make(report: Report) -> Iterator[Callable[..., Worker]]:
    """Workers that share the test's report and are closed after it, gates open."""
    made: list[tuple[Worker, tuple[Sink, ...]]] = []

    def build(*sinks: Sink, judge: Callable[[Frame], Frame] = unchanged) -> Worker:
        worker = Worker(sinks, judge, report)
        made.append((worker, sinks))
        return worker

    yield build
    for worker, sinks in made:
        for sink in sinks:
            if isinstance(sink, GatedSink):
                sink.gate.set()
        worker.close(5)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    started = time.perf_counter()
    yield
    assert time.perf_counter() - started < seconds


def fill(worker: Worker, sink: GatedSink, more: int = 0) -> None:
    """One step inside the sink, a full queue behind it, and `more` that find no place."""
    worker.submit(Step(make_frame(0)))
    assert sink.entered.wait(10)
    for step in range(1, 1 + QUEUE_STEPS + more):
        worker.submit(Step(make_frame(step)))


# --- Order and the queue ----------------------------------------------------------------------------


def test_frames_arrive_in_the_order_they_were_submitted(make: Callable[..., Worker]) -> None:
    first, second = MemorySink(), MemorySink()
    worker = make(first, second)
    for step in range(50):
        worker.submit(Step(make_frame(step)))
        if step % QUEUE_STEPS == QUEUE_STEPS - 1:
            assert worker.wait(10)
    worker.close()
    assert steps(first) == steps(second) == list(range(50))


def test_a_step_of_several_frames_gives_them_in_order(make: Callable[..., Worker]) -> None:
    sink = MemorySink()
    worker = make(sink)
    worker.submit(Step(make_frame(3), make_frame(5)))
    worker.submit(Step())
    worker.close()
    assert steps(sink) == [3, 5]


def test_a_full_queue_drops_and_counts_and_never_blocks(
    make: Callable[..., Worker], report: Report, caplog: Log
) -> None:
    sink = GatedSink()
    worker = make(sink)
    with caplog.at_level(logging.WARNING, "tbhooks"), at_most(1.0):
        fill(worker, sink, more=20)
    assert report.dropped == 20
    assert [record.levelname for record in caplog.records if "dropped" in record.message] == ["WARNING"]
    sink.gate.set()
    worker.close()
    assert steps(sink) == list(range(1 + QUEUE_STEPS))
    assert report.dropped == 20
    assert report.errors == 0


def test_a_queue_with_room_again_takes_steps_again(make: Callable[..., Worker], report: Report) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink, more=1)
    sink.gate.set()
    assert worker.wait(10)
    worker.submit(Step(make_frame(100)))
    worker.close()
    assert steps(sink)[-1] == 100
    assert report.dropped == 1


def test_a_slow_sink_gets_everything_the_queue_took(make: Callable[..., Worker], report: Report) -> None:
    class SlowSink(MemorySink):
        def write(self, frame: Frame) -> None:
            time.sleep(0.1)
            super().write(frame)

    slow, quick = SlowSink(), MemorySink()
    worker = make(slow, quick)
    with at_most(0.4):
        for step in range(8):
            worker.submit(Step(make_frame(step)))
    worker.close()
    assert steps(slow) == steps(quick) == list(range(8))
    assert report.dropped == 0
    assert report.seconds_pump >= 0.8


def test_steps_that_weigh_nothing_are_bounded_by_their_number(make: Callable[..., Worker], report: Report) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink, more=5 * QUEUE_STEPS)
    assert len(worker._queue) == QUEUE_STEPS
    assert report.dropped == 5 * QUEUE_STEPS


def test_heavy_steps_are_bounded_by_their_bytes_and_one_is_always_taken(
    make: Callable[..., Worker], report: Report
) -> None:
    sink = GatedSink()
    worker = make(sink)
    worker.submit(Step(make_frame(0), nbytes=QUEUE_BYTES * 3))
    assert sink.entered.wait(10)
    worker.submit(Step(make_frame(1), nbytes=QUEUE_BYTES * 2))  # the queue is empty, so there is room
    worker.submit(Step(make_frame(2), nbytes=1))
    assert report.dropped == 1
    sink.gate.set()
    assert worker.wait(10)
    sink.gate.clear()
    sink.entered.clear()
    worker.submit(Step(make_frame(3)))
    assert sink.entered.wait(10)
    for step in range(4, 9):  # what has been written counts no longer
        worker.submit(Step(make_frame(step), nbytes=QUEUE_BYTES // 3))
    assert report.dropped == 3
    sink.gate.set()
    worker.close()
    assert steps(sink) == [0, 1, 3, 4, 5, 6]


class Weighed(Step):
    """Counts how often it is asked for its size."""

    asked = 0

    @property
    def nbytes(self) -> int:
        Weighed.asked += 1
        return 0

    @nbytes.setter
    def nbytes(self, value: int) -> None:
        """It has none of its own."""


def work(action: Callable[[], object]) -> int:
    """How many calls and lines of Python an action takes in this thread."""
    events = 0

    def count(*_: object) -> Callable[..., object]:
        nonlocal events
        events += 1
        return count

    gc.disable()  # finalizers of other tests are no work of this one
    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(None)
        gc.enable()
    return events


def test_handing_a_step_over_takes_as_much_work_behind_a_long_queue_as_behind_a_short_one(
    make: Callable[..., Worker], report: Report
) -> None:
    sink = GatedSink()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    assert sink.entered.wait(10)
    frame = make_frame(1)
    while report.dropped < 3:
        worker.submit(Weighed(frame))
        assert len(worker._queue) < 5000, "nothing is dropped"
    Weighed.asked = 0
    full = [work(lambda: worker.submit(Weighed(frame))) for _ in range(5)]
    assert Weighed.asked <= 10
    sink.gate.set()
    assert worker.wait(30)
    sink.gate.clear()
    sink.entered.clear()
    worker.submit(Step(frame))
    assert sink.entered.wait(10)
    taken = [work(lambda: worker.submit(Weighed(frame))) for _ in range(QUEUE_STEPS)]
    usual = sorted(taken)[QUEUE_STEPS // 2]
    assert max(taken[-8:]) <= usual + 20
    assert min(full) < 2 * usual + 40


def test_what_ranks_wait_for_is_bounded_too(make: Callable[..., Worker], report: Report) -> None:
    class Awaited(Step):
        def without_numbers(self) -> Any:
            return Step(*self._frames)

    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    frame = make_frame(1, {})
    for _ in range(40 * QUEUE_STEPS):
        worker.submit(Awaited(frame))
    assert report.dropped == 40 * QUEUE_STEPS
    assert len(worker._queue) <= 20 * QUEUE_STEPS


def test_waiting_for_a_hung_sink_again_and_again_fills_no_queue(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    for _ in range(50):
        assert not worker.flush(0)
    assert len(worker._queue) <= QUEUE_STEPS + 1
    sink.gate.set()
    assert worker.flush(10)
    assert sink.calls == ["flush"] * len(sink.calls)
    assert len(sink.calls) <= 2


# --- Failure ----------------------------------------------------------------------------------------


def test_a_failing_sink_stops_no_other_and_is_logged_once(
    make: Callable[..., Worker], report: Report, caplog: Log
) -> None:
    before, failing, after = MemorySink(), FailingSink(), MemorySink()
    worker = make(before, failing, after)
    with caplog.at_level(logging.DEBUG, "tbhooks"):
        for step in range(5):
            worker.submit(Step(make_frame(step)))
        worker.flush()
        worker.close()
    assert steps(before) == steps(after) == list(range(5))
    assert failing.asked == ["write"] * 5 + ["flush", "close"]
    assert report.errors == 7
    assert report.dropped == 0
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tbhooks", "ERROR")
    assert record.message == "FailingSink: OSError: no space left"
    assert report.messages == [record.message]


def test_a_step_no_sink_could_write_is_counted_as_dropped(
    make: Callable[..., Worker], report: Report, caplog: Log
) -> None:
    worker = make(FailingSink(), FailingSink())
    with caplog.at_level(logging.DEBUG, "tbhooks"):
        for step in range(3):
            worker.submit(Step(make_frame(step)))
        assert worker.wait(10)
    assert report.dropped == 3
    assert report.errors == 6
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_each_kind_of_failure_is_reported(make: Callable[..., Worker], report: Report) -> None:
    sink = FailingSink()
    worker = make(sink, MemorySink())
    for problem in (OSError("disk"), ValueError("value"), OSError("disk, again")):
        sink.problem = problem
        worker.submit(Step(make_frame()))
        assert worker.wait(10)
    assert report.messages == ["FailingSink: OSError: disk", "FailingSink: ValueError: value"]
    assert report.errors == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sink_that_exits_does_not_end_the_thread(report: Report) -> None:
    good = MemorySink()
    worker = Worker((FailingSink(SystemExit(1)), good), unchanged, report)
    worker.submit(Step(make_frame(0)))
    try:
        assert worker.flush(1)
        assert steps(good) == [0]
    finally:
        worker.close(0.1)


def test_a_judge_that_fails_does_not_lose_the_frame(make: Callable[..., Worker], report: Report) -> None:
    def judge(frame: Frame) -> Frame:
        raise ZeroDivisionError("a rule divides")

    sink = MemorySink()
    worker = make(sink, judge=judge)
    frames = [make_frame(0), make_frame(1)]
    for frame in frames:
        worker.submit(Step(frame))
    worker.close()
    assert sink.frames == frames
    assert (report.errors, report.dropped) == (2, 0)
    assert report.messages == ["rules: ZeroDivisionError: a rule divides"]


def test_sinks_get_what_the_judge_made_of_the_frame(make: Callable[..., Worker]) -> None:
    judged = make_frame(7)
    sink = MemorySink()
    worker = make(sink, judge=lambda frame: judged)
    worker.submit(Step(make_frame(0)))
    worker.close()
    assert sink.frames == [judged]


def test_a_step_that_cannot_be_read_is_dropped_counted_and_survived(
    make: Callable[..., Worker], report: Report
) -> None:
    sink = MemorySink()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    worker.submit(Step(problem=RuntimeError("device gone")))
    worker.submit(Step(make_frame(2)))
    worker.close()
    assert steps(sink) == [0, 2]
    assert (report.errors, report.dropped) == (1, 1)
    assert "making a logged step: RuntimeError: device gone" in report.messages


# --- Flush and close --------------------------------------------------------------------------------


def test_flush_waits_for_what_was_submitted_and_flushes_the_sinks(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    threading.Timer(0.2, sink.gate.set).start()
    assert worker.flush(10)
    assert steps(sink) == list(range(1 + QUEUE_STEPS))
    assert sink.calls == ["flush"]


def test_flush_gives_up_in_time_and_says_so(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    with at_most(2.0):
        assert not worker.flush(0.2)
    assert not sink.calls


def test_flush_of_a_worker_that_never_had_anything_is_done_at_once(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    worker = make(sink)
    assert worker.flush(10)
    assert not sink.calls


def test_close_writes_what_is_left_and_closes_the_sinks_last(make: Callable[..., Worker], report: Report) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    threading.Timer(0.2, sink.gate.set).start()
    worker.close(10)
    assert steps(sink) == list(range(1 + QUEUE_STEPS))
    assert sink.calls == ["close"]
    assert (report.errors, report.dropped) == (0, 0)


def test_close_closes_sinks_that_never_got_anything(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    make(sink).close(10)
    assert sink.calls == ["close"]


def test_close_keeps_its_deadline_and_counts_the_loss(make: Callable[..., Worker], report: Report, caplog: Log) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    with caplog.at_level(logging.WARNING, "tbhooks"), at_most(2.0):
        worker.close(timeout_s=0.2)
    assert report.dropped == 1 + QUEUE_STEPS
    (record,) = caplog.records
    assert re.search(r"had not written it \d+\.\d s after close\(\)", record.message)


def test_a_sink_slow_to_close_loses_no_step(make: Callable[..., Worker], report: Report) -> None:
    class SlowToClose(MemorySink):
        def close(self) -> None:
            time.sleep(0.5)

    sink = SlowToClose()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    assert worker.wait(10)
    worker.close(timeout_s=0.1)
    assert steps(sink) == [0]
    assert report.dropped == 0


def test_close_can_be_called_again(make: Callable[..., Worker]) -> None:
    sink = GatedSink()
    sink.gate.set()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    worker.close()
    with at_most(0.5):
        worker.close()
    assert sink.calls == ["close"]
    assert steps(sink) == [0]


def test_after_close_nothing_is_taken_counted_or_waited_for(make: Callable[..., Worker], report: Report) -> None:
    sink = GatedSink()
    sink.gate.set()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    worker.close()
    worker.submit(Step(make_frame(1)))
    with at_most(0.5):
        assert worker.flush(10)
        assert worker.wait(10)
    assert steps(sink) == [0]
    assert sink.calls == ["close"]
    assert (report.errors, report.dropped) == (0, 0)


def test_an_abandoned_worker_does_nothing(make: Callable[..., Worker], report: Report) -> None:
    sink = GatedSink()
    worker = make(sink)
    worker.abandon()
    worker.submit(Step(make_frame(0)))
    assert worker.flush(10)
    worker.close(10)
    assert not sink.frames
    assert not sink.calls
    assert report.dropped == 0


# --- The thread -------------------------------------------------------------------------------------


def pump_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tbhooks-worker"]


def wait_until_gone(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_the_thread_starts_when_needed_is_a_daemon_and_ends_with_close(make: Callable[..., Worker]) -> None:
    wait_until_gone(pump_threads())
    worker = make(MemorySink())
    worker.flush()
    assert not pump_threads()
    worker.submit(Step(make_frame(0)))
    (thread,) = pump_threads()
    assert thread.daemon
    worker.submit(Step(make_frame(1)))
    assert pump_threads() == [thread]
    worker.close()
    wait_until_gone([thread])


def test_sinks_are_asked_from_one_thread_only(make: Callable[..., Worker]) -> None:
    asked: list[int] = []

    class Curious(MemorySink):
        def write(self, frame: Frame) -> None:
            asked.append(threading.get_ident())

        flush = close = lambda self: asked.append(threading.get_ident())

    worker = make(Curious())
    worker.submit(Step(make_frame(0)))
    worker.flush()
    worker.close()
    assert len(asked) == 3
    assert len(set(asked)) == 1
    assert asked[0] != threading.get_ident()


def test_a_sink_may_flush_the_worker_it_is_called_from(make: Callable[..., Worker]) -> None:
    class Recursive(MemorySink):
        def write(self, frame: Frame) -> None:
            assert worker.wait(10)
            super().write(frame)

    sink = Recursive()
    worker = make(sink)
    worker.submit(Step(make_frame(0)))
    with at_most(5.0):
        worker.close()
    assert steps(sink) == [0]


def test_many_threads_may_submit_at_once(
    make: Callable[..., Worker], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "QUEUE_STEPS", 10_000)
    sink = MemorySink()
    worker = make(sink)
    frame = make_frame()

    def submit() -> None:
        for _ in range(200):
            worker.submit(Step(frame))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    worker.close()
    assert len(sink) == 1600
    assert report.dropped == 0


class ClosesWhileWriting(MemorySink):
    """Ends the worker from its own thread in the middle of a write, as the garbage collector may."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate
        self.finish: Callable[[], None] = lambda: None

    def write(self, frame: Frame) -> None:
        assert self.gate.wait(30)
        self.finish()
        super().write(frame)


def test_a_worker_that_is_ended_from_its_own_thread_writes_in_order(report: Report) -> None:
    gate = threading.Event()
    sink = ClosesWhileWriting(gate)
    worker = Worker([sink], lambda frame: frame, report)
    sink.finish = worker.finish
    for step in range(3):
        worker.submit(Step(make_frame(step)))
    gate.set()
    assert worker.wait()
    assert [frame.step for frame in sink.frames] == [0, 1, 2]


def test_where_no_thread_can_be_started_steps_are_written_in_order_by_whoever_hands_them_over(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    gate = threading.Event()
    gate.set()
    sink = ClosesWhileWriting(gate)
    worker = Worker([sink], lambda frame: frame, report)
    sink.finish = lambda: worker.submit(Step(make_frame(1))) if not sink.frames and not worker._queue else None
    worker.submit(Step(make_frame(0)))
    worker.submit(Step(make_frame(2)))
    worker.close()
    assert [frame.step for frame in sink.frames] == [0, 1, 2]


def test_what_is_never_dropped_is_taken_by_a_full_queue_and_not_counted(
    make: Callable[..., Worker], report: Report
) -> None:
    sink = GatedSink()
    worker = make(sink)
    fill(worker, sink)
    worker.submit(ArtifactStep((Text("note", "once"),), step=77))
    sink.gate.set()
    worker.close()
    assert steps(sink)[-1] == 77
    assert report.dropped == 0
