"""Taps, metrics and samples of two ranks, merged, against float64 NumPy over the batches of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs, reference
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.xdist_group("ranks")


def test_taps_metrics_and_samples_are_those_of_all_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    both = np.concatenate([jobs.batch(0, rank).numpy() for rank in range(2)]) * 2
    each = [float(np.abs(jobs.batch(0, rank).numpy()).max()) * 2 for rank in range(2)]
    losses = np.concatenate([jobs.batch(0, rank).square().mean(1).numpy() for rank in range(2)])
    names = [f"rank{rank}-{i}" for rank in range(2) for i in range(4)]
    for tapped, scalars, samples, errors in pool.values(jobs.tapping, 2, tmp_path):
        assert errors == 0
        expected = reference.stats(both)
        assert tapped == pytest.approx([expected["count"], expected["mean"], expected["std"]])
        assert scalars["metric.max/(root):doubled"] == pytest.approx(max(each))
        assert scalars["metric.min/(root):doubled"] == pytest.approx(min(each))
        assert scalars["metric.sum/(root):doubled"] == pytest.approx(sum(each))
        assert scalars["metric.mean/(root):doubled"] == pytest.approx(np.mean(each))
        assert scalars["train.loss_by/all"] == pytest.approx(losses.mean())
        assert list(samples) == [names[i] for i in np.argsort(-losses)[:3]]
