"""Histograms for trackers, with bins of one width: all counts, whole, and where the numbers lie to the bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tbhooks.data import stats
from tbhooks.data.frame import Site
from tbhooks.sinks.trackers import BINS, histograms_of, rebinned
from tests.support import reference
from tests.support.frames import make_frame

ARRAYS: dict[str, Any] = {
    "normal": np.random.default_rng(0).normal(size=5000),
    "far from zero": np.random.default_rng(1).normal(300.0, 0.01, size=500),
    "rectified": np.maximum(np.random.default_rng(2).normal(size=3000), 0.0),
    "one outlier": np.append(np.random.default_rng(3).normal(size=999), 1e6),
    "of both ends": np.array([-3e38, 3e38]),
    "beyond a difference": np.array([-1.7e308, 0.0, 1.7e308]),
    "one number": np.full(7, 2.5),
    "zeros": np.zeros(9),
    "one large number": np.array([1e20]),
    "at the edges of buckets": np.array([-2.0, -1.5, -1.0, 1.0, 1.5, 2.0]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_counts_are_whole_and_where_the_numbers_are(name: str) -> None:
    array = ARRAYS[name]
    counts, edges = rebinned(reference.bucket_counts(array), array.min(), array.max())
    assert counts.dtype == np.int64
    assert counts.sum() == len(array)
    assert (counts >= 0).all()
    assert len(edges) == len(counts) + 1 == BINS + 1
    assert np.isfinite(edges).all()
    assert (np.diff(edges / 2) > 0).all()
    assert edges[0] <= array.min()
    assert edges[-1] >= array.max()
    of_bucket = reference.bucket_counts(array)
    for edge, below in zip(edges[1:-1], np.cumsum(counts)[:-1], strict=True):
        inside = of_bucket[(edge >= stats.LOWER) & (edge <= stats.UPPER)].sum()
        assert abs(below - (array <= edge).sum()) <= inside + 1


def test_bins_have_one_width() -> None:
    _, edges = rebinned(reference.bucket_counts(ARRAYS["normal"]), *np.quantile(ARRAYS["normal"], [0, 1]))
    assert np.allclose(np.diff(edges), (edges[-1] - edges[0]) / BINS)


def test_what_a_bucket_holds_is_spread_over_the_part_of_it_that_is_in_use() -> None:
    array = np.linspace(1.4, 1.49, 10 * BINS)  # all in the bucket from 1 to 1.5
    counts, _ = rebinned(reference.bucket_counts(array), array.min(), array.max())
    assert counts.tolist() == [10] * BINS


def test_a_frame_has_histograms_of_what_is_finite_and_of_no_update() -> None:
    data = {
        Site("0", "activation"): [1.0, np.nan, 2.0], Site("1", "activation"): [np.nan, np.inf],
        Site("w", "weight"): [1.0], Site("w", "update"): [0.1],
    }  # fmt: skip
    found = {tag: counts.sum() for tag, counts, _ in histograms_of(make_frame(data=data))}
    assert found == {"activation/0": 2, "weight/w": 1}
    assert not list(histograms_of(make_frame(data=data, histograms=False)))
