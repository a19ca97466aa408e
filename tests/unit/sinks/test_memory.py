"""Frames kept in memory."""

from __future__ import annotations

import pytest

import tbhooks
from tbhooks import MemorySink, Sink
from tbhooks.data.errors import ArgumentError
from tests.support import frames
from tests.support.frames import make_frame


def test_it_is_a_sink() -> None:
    assert isinstance(MemorySink(), Sink)


def test_it_keeps_every_frame_in_order() -> None:
    sink = MemorySink()
    written = [make_frame(step) for step in range(5)]
    for frame in written:
        sink.write(frame)
    assert sink.frames == list(sink) == written
    assert len(sink) == 5


def test_with_a_limit_it_keeps_the_newest() -> None:
    sink = MemorySink(limit=2)
    for step in range(5):
        sink.write(make_frame(step))
    assert [frame.step for frame in sink.frames] == [3, 4]


def test_frames_can_be_read_after_close() -> None:
    sink = MemorySink()
    sink.write(make_frame(1))
    sink.flush()
    sink.close()
    assert sink.frames[-1].step == 1


def test_the_list_it_gives_is_the_readers_own() -> None:
    sink = MemorySink()
    sink.write(make_frame(0))
    sink.frames.clear()
    assert len(sink) == 1


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3"])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(ArgumentError, match="limit must be an integer >= 1"):
        MemorySink(limit)  # type: ignore[arg-type]


def test_a_watched_training_arrives() -> None:
    model, sink = frames.make_model(), MemorySink()
    with tbhooks.watch(model, sink, every=2) as w:
        frames.train(model, 5)
    assert [frame.step for frame in sink] == [0, 2, 4]
    assert sink.frames == list(w.history)


def test_without_a_writer_frames_are_in_the_watchs_history() -> None:
    model = frames.make_model()
    with tbhooks.watch(model, every=2) as w:
        frames.train(model, 5)
    assert [frame.step for frame in w.history] == [0, 2, 4]
    assert w.stats.dropped == 0
