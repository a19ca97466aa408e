"""The gradient noise scale of two ranks: McCandlish's estimates in NumPy, over the gradients of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.xdist_group("ranks")


def expected(by_rank: list[list[np.ndarray]], parts: int, seen: list[int]) -> float:
    """`seen` are the ranks whose own gradients are known; the mean over all ranks is known to each."""
    traces, signals = [], []
    for step in range(3):
        micro = np.array([gradients[step * parts : (step + 1) * parts] for gradients in by_rank])  # rank, part, element
        small = np.square(micro[seen]).sum(-1).mean()
        large = float(np.square(micro.mean((0, 1))).sum())
        b_small, b_large = 4.0, 4.0 * parts * len(by_rank)
        traces.append((small - large) / (1 / b_small - 1 / b_large))
        signals.append((b_large * large - b_small * small) / (b_large - b_small))
    weights = 0.95 ** np.arange(2, -1, -1)
    return float(weights @ traces / (weights @ signals))


@pytest.mark.parametrize(("ranks", "parts"), [("merge", 1), ("local", 2)])
def test_two_ranks(pool: ProcessPool, tmp_path: Path, ranks: str, parts: int) -> None:
    found = pool.values(jobs.noise_scale, 2, tmp_path, ranks, parts)
    assert [errors for _, _, errors, _ in found] == [0, 0], found[0][3]
    number = expected([gradients for _, gradients, _, _ in found], parts, [0, 1] if ranks == "merge" else [0])
    assert found[0][0]["train.noise_scale"] == pytest.approx(number, rel=1e-9)
