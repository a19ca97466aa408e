"""Tokens of each expert over two ranks and their micro-batches, against NumPy over the logits of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.xdist_group("ranks")


def test_tokens_are_added_over_ranks_before_shares_are_computed(pool: ProcessPool, tmp_path: Path) -> None:
    ranks = list(pool.values(jobs.routing, 2, tmp_path))
    for path in ("layers.0.gate", "layers.1.gate"):
        logits = np.concatenate([call for _, _, kept, _ in ranks for call in kept[path]])
        assert len(logits) == 4 + 3 + 13 + 3
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :2]
        tokens = np.bincount(chosen.ravel(), minlength=6)
        share = tokens[tokens > 0] / tokens.sum()
        for vectors, scalars, _, errors in ranks:
            assert errors == 0
            np.testing.assert_array_equal(vectors[f"experts.tokens/{path}"], tokens)
            assert scalars[f"experts.entropy/{path}"] == pytest.approx(-(share * np.log(share)).sum() / np.log(6))
            assert scalars[f"experts.max_load/{path}"] == pytest.approx(tokens.max() / tokens.mean())
