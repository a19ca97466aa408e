"""What a view takes over from the view of the frame before is what it would have computed itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tbhooks.data import stats
from tbhooks.data.frame import Finding, Frame, Sites
from tbhooks.data.history import History
from tbhooks.data.sites import Site
from tbhooks.rules.run_view import RunView, median, view_of

SITES = Sites(Site(f"{i}", kind) for i in range(4) for kind in ("activation", "gradient"))
OTHERS = Sites(SITES[:5])


def make_frame(step: int, sites: Sites = SITES) -> Frame:
    values = stats.empty_rows(len(sites))
    values[:, [stats.COUNT, stats.MEAN, stats.M2]] = np.random.default_rng(step).uniform(1, 9, (len(sites), 3))
    return Frame(step, 0.0, 0, sites, values, np.zeros((len(sites), 0), np.int64), scalars={"train/loss": float(step)})


def loss(frame: Frame) -> float:
    return frame.scalars["train/loss"]


def assert_is_as_new(view: RunView, history: History) -> None:
    anew = RunView(history[:], history.early)
    assert view.column(loss).tolist() == anew.column(loss).tolist() == [loss(frame) for frame in history]
    for kind in ("activation", "gradient"):
        for mine, fresh in ((view.last(kind, 3), anew.last(kind, 3)), (view.start(kind), anew.start(kind))):
            assert mine.sites == fresh.sites
            assert np.array_equal(mine.values, fresh.values, equal_nan=True)
            assert all(
                np.array_equal(mine.stat(name), stats.STATS[name](fresh.values), equal_nan=True) for name in stats.STATS
            )
            assert np.array_equal(mine.usual_maximum("rms"), fresh.usual_maximum("rms"), equal_nan=True)


def test_a_view_of_each_frame_of_a_long_run() -> None:
    history = History(most_frames=6)
    for step in range(20):
        history.append(make_frame(step, OTHERS if step in (7, 8, 12) else SITES))
        view = view_of(history)
        assert view is not None
        assert_is_as_new(view, history)
        if step % 3 == 0:
            found = (Finding(step, None, "loss_spike", "warning", ""),)
            history.replace_newest(replace(history[-1], findings=found))
        if step % 4 == 0:  # a scalar of an earlier step, which is logged late
            late = replace(make_frame(step, Sites()), scalars={"train/loss": -1.0})
            history.append(replace(late, step=max(step - 2, 0)))


def test_a_column_reads_new_frames_only() -> None:
    history, read = History(most_frames=10), []

    def noted(frame: Frame) -> float:
        read.append(frame.step)
        return loss(frame)

    for step in range(30):
        history.append(make_frame(step))
        view = view_of(history)
        assert view is not None
        view.column(noted)
    assert read == list(range(30))


@pytest.mark.parametrize("shape", [(1,), (2,), (501,), (4, 5), (3, 400), (0, 3)])
def test_the_median_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(1)
    for share in (0.0, 0.3):
        values = generator.normal(size=shape)
        values[generator.random(shape) < share] = np.nan
        assert np.array_equal(median(values), np.nanmedian(values, axis=-1), equal_nan=True)
    assert np.isnan(median(np.full(shape, np.nan))).all()
