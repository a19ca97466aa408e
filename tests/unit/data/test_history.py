"""The last frames of a run: bounded, joined with what came late, readable as series."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tbhooks.data import history as history_module
from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, UnknownSiteError
from tbhooks.data.frame import Frame, Site
from tbhooks.data.history import History
from tests.support import reference
from tests.support.tensors import row_of

A, B = Site("a", "activation"), Site("b", "gradient")


def frame(step: int, data: dict[Site, np.ndarray] | None = None, **scalars: float) -> Frame:
    data = {A: np.array([step, step + 1.0])} if data is None else data
    values = np.array([row_of(x) for x in data.values()]).reshape(-1, stats.WIDTH)
    counts = np.array([reference.bucket_counts(x) for x in data.values()], dtype=np.int64).reshape(-1, stats.BUCKETS)
    return Frame(step, float(step), 0, tuple(data), values, counts, scalars=scalars)


def late(step: int, **scalars: float) -> Frame:
    nothing = np.zeros((0, 0), dtype=np.int64)
    return Frame(step, float(step), 0, (), stats.empty_rows(0), nothing, scalars=scalars)


def filled(steps: int, most_frames: int = history_module.MOST_FRAMES) -> History:
    history = History(most_frames)
    for step in range(steps):
        history.append(frame(step, loss=1.0 / (step + 1)))
    return history


def test_frames_are_kept_oldest_first() -> None:
    history = filled(3)
    assert len(history) == 3
    assert [f.step for f in history] == [0, 1, 2]
    assert (history[0].step, history[-1].step) == (0, 2)


def test_only_the_last_frames_are_kept() -> None:
    history = filled(25, most_frames=10)
    assert len(history) == 10
    assert [f.step for f in history] == list(range(15, 25))


def test_a_history_is_bounded_unless_reported_otherwise() -> None:
    assert len(filled(history_module.MOST_FRAMES + 5)) == history_module.MOST_FRAMES


# --- Buckets --------------------------------------------------------------------------------------


def test_only_the_newest_frames_keep_their_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_WITH_BUCKETS", 4)
    history = filled(10)
    assert [f.buckets.shape[1] > 0 for f in history] == [False] * 6 + [True] * 4
    steps, medians = history.series("a", "activation", "p50")
    assert steps == list(range(10))
    assert np.isnan(medians[:6]).all()
    assert np.isfinite(medians[6:]).all()
    assert np.isfinite(history.series("a", "activation", "mean")[1]).all()


def test_the_memory_of_old_buckets_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_WITH_BUCKETS", 4)
    history = History()
    buckets = np.ones((1, stats.BUCKETS), dtype=np.int64)
    alive = weakref.ref(buckets)
    history.append(replace(frame(0), buckets=buckets))
    del buckets
    for step in range(1, 10):
        history.append(frame(step))
    gc.collect()
    assert alive() is None


# --- Late scalars ---------------------------------------------------------------------------------


def test_late_scalars_join_the_frame_of_their_step() -> None:
    history = filled(3)
    history.append(late(1, accuracy=0.5))
    assert len(history) == 3
    assert dict(history[1].scalars) == {"loss": 0.5, "accuracy": 0.5}
    assert history[1].sites == (A,)
    assert history[1]["a", "activation"].mean == 1.5
    assert dict(history[2].scalars) == {"loss": 1.0 / 3}


def test_late_scalars_of_an_unknown_step_are_kept_on_their_own() -> None:
    history = filled(2)
    history.append(late(7, loss=3.0))
    history.append(late(7, accuracy=0.1))
    assert [f.step for f in history] == [0, 1], "they take no frame's place"
    assert history.scalar("loss")[0] == [0, 1, 7]
    assert history.scalar("accuracy")[1].tolist() == [0.1]


def test_a_late_scalar_replaces_what_was_known() -> None:
    history = filled(1)
    history.append(late(0, loss=9.0))
    assert dict(history[0].scalars) == {"loss": 9.0}


def test_two_full_frames_of_one_step_both_stay() -> None:
    history = History()
    history.append(frame(4))
    history.append(frame(4))
    assert len(history) == 2


# --- Series ---------------------------------------------------------------------------------------


def test_a_series_is_steps_and_values() -> None:
    steps, values = filled(4).series("a", "activation", "mean")
    assert steps == [0, 1, 2, 3]
    assert values.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_a_series_leaves_out_steps_that_did_not_see_the_site() -> None:
    history = History()
    history.append(frame(0))
    history.append(frame(5, {B: np.array([3.0, math.nan])}))
    history.append(frame(10, {A: np.ones(2), B: np.zeros(2)}))
    steps, values = history.series("b", "gradient", "nan_count")
    assert steps == [5, 10]
    assert values.tolist() == [1.0, 0.0]


def test_a_series_nobody_saw_names_the_nearest() -> None:
    with pytest.raises(UnknownSiteError, match="no logged step has the activation of 'nowhere'"):
        filled(3).series("nowhere", "activation", "mean")
    assert History().series("nowhere", "activation", "mean")[0] == []


def test_a_history_can_be_sliced() -> None:
    assert [frame.step for frame in filled(5)[-2:]] == [3, 4]


@pytest.mark.parametrize("frames", [0, 2])
def test_an_unknown_stat_names_the_nearest_even_when_nothing_was_seen(frames: int) -> None:
    with pytest.raises(ArgumentError, match=r"unknown stat 'maen': did you mean 'mean'"):
        filled(frames).series("a", "activation", "maen")


def test_a_scalar_is_steps_and_values() -> None:
    history = filled(2)
    history.append(frame(2))
    history.append(frame(3, loss=9.0))
    steps, values = history.scalar("loss")
    assert steps == [0, 1, 3]
    assert values.tolist() == [1.0, 0.5, 9.0]
    with pytest.raises(UnknownSiteError, match="did you mean 'loss'"):
        history.scalar("losss")
    assert History().scalar("nothing")[0] == []


# --- Elsewhere ------------------------------------------------------------------------------------


def test_an_iteration_is_over_the_frames_there_were_when_it_began() -> None:
    history = filled(3)
    frames = iter(history)
    history.append(frame(3))
    assert [f.step for f in frames] == [0, 1, 2]


def test_reading_while_frames_arrive_is_safe() -> None:
    history = filled(50, most_frames=60)
    stop = threading.Event()

    def append() -> None:
        step = 50
        while not stop.is_set():
            history.append(frame(step))
            history.append(late(step - 3, extra=1.0))
            step += 1

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(30):
            steps, values = history.series("a", "activation", "mean")
            assert len(steps) == len(values) >= 50
            assert steps == sorted(steps)
    finally:
        stop.set()
        thread.join()


def test_a_history_tells_what_it_spans() -> None:
    assert repr(History()) == "History(0 logged steps)"
    assert repr(filled(3)) == "History(3 logged steps, steps 0 to 2)"
