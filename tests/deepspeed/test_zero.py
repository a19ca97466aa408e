"""DeepSpeed ZeRO with real processes: what is read where it lies, against DeepSpeed's own accessors for whole tensors.

`make test-deepspeed` installs DeepSpeed in a place of its own and runs these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import deepspeed_jobs as jobs
from tests.support.process_pool import ProcessPool

LOGGED = [0, 2, 4]
LIMIT = {"limit_s": 240.0, "patience_s": 120.0}  # DeepSpeed compiles its collectives for shared memory, once


@pytest.mark.parametrize(
    ("stage", "several", "dtype"),
    [(1, False, "float32"), (2, True, "float32"), (3, False, "float32"), (3, True, "float32"), (2, False, "bfloat16"),
     (3, False, "bfloat16")],
)  # fmt: skip
def test_weights_gradients_updates_and_moments_are_those_of_the_optimizer(
    pool: ProcessPool, tmp_path: Path, stage: int, several: bool, dtype: str
) -> None:
    results = pool.values(jobs.train, 2, tmp_path, stage, several, dtype, **LIMIT)
    frames, errors, unseen, messages, truth, _ = results[0]
    assert errors == 0, messages
    assert [frame.step for frame in frames] == LOGGED
    for frame in frames:
        check(frame, truth[frame.step], rate=jobs.RATE)
        assert frame["act", "activation"].count == 2 * jobs.MICRO * 4 * 13, "both micro-batches of both ranks"
        assert ("fixed.weight", "weight") in frame
    trained = set(truth[0]["before"])
    assert not [name for name in unseen if name.startswith("weight") and name.partition("/")[2] in trained], unseen
    if several:
        assert frames[-1].scalars["train.lr/0"] == jobs.RATE
        assert frames[-1].scalars["train.lr/1"] == jobs.RATE / 2


def check(frame: Any, seen: dict[str, Any], rate: float) -> None:
    """The numbers of a merged frame against the whole tensors, which DeepSpeed gathers."""
    clip = min(1.0, 0.05 / (seen["norm"] + 1e-6))
    for name, before in seen["before"].items():
        change = seen["after"][name] - before
        used = seen["gradient"][name] * clip
        for kind, expected in (("weight", before), ("update", change), ("weight_gradient", used)):
            read = frame[name, kind]
            assert read.count == expected.size, (name, kind)
            assert read.norm == pytest.approx(np.linalg.norm(expected), rel=2e-3, abs=1e-12), (name, kind, frame.step)
            assert read.mean == pytest.approx(expected.mean(), rel=2e-3, abs=2e-3 * read.rms), (name, kind, frame.step)
            assert read.abs_max == pytest.approx(np.abs(expected).max(), rel=2e-3), (name, kind)
        assert frame[name, "weight"].norm == pytest.approx(np.linalg.norm(before), rel=1e-6)
        if "exp_avg" not in seen:
            continue
        assert frame[name, "first_moment"].norm == pytest.approx(np.linalg.norm(seen["exp_avg"][name]), rel=1e-6)
        assert frame[name, "second_moment"].mean == pytest.approx(seen["exp_avg_sq"][name].mean(), rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_the_same_without_a_watch(pool: ProcessPool, tmp_path: Path, stage: int) -> None:
    watched = pool.values(jobs.train, 2, tmp_path / "a", stage, **LIMIT)
    bare = pool.values(jobs.train, 2, tmp_path / "b", stage, False, "float32", "merge", False, **LIMIT)
    assert [rank[-1] for rank in watched] == [rank[-1] for rank in bare]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_alone_has_its_own_part_and_says_what_it_lacks(pool: ProcessPool, tmp_path: Path, stage: int) -> None:
    results = pool.values(jobs.train, 2, tmp_path, stage, False, "float32", "local", **LIMIT)
    frames, errors, unseen, messages, truth, _ = results[0]
    assert errors == 0, messages
    assert [frame.step for frame in frames] == LOGGED
    whole = sum(part.size for part in truth[0]["before"].values())
    read = sum(frames[-1][site.path, site.kind].count for site in frames[-1].sites if site.kind == "weight_gradient")
    assert 0 < read < whole
    absent = {name for name in truth[0]["before"] if (name, "weight_gradient") not in frames[-1]}
    assert bool(absent) == (stage == 1)
    for name in absent:
        assert "another rank" in unseen[f"weight_gradient/{name}"]
