"""The flight recorder and bursts where ranks are merged: every rank has its ring, and the run has the dumps of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.xdist_group("ranks")


def test_a_burst_is_that_of_the_first_rank_and_merging_goes_on(pool: ProcessPool, tmp_path: Path) -> None:
    first, second = pool.values(jobs.bursts, 2, tmp_path)
    assert first[:2] == ([(0, 2.0), (4, 2.0), (5, None), (6, None), (8, 2.0)], 0)
    assert [step for step, _ in second[0]] == [0, 4, 8]
    assert second[1] == 0


def test_the_other_ranks_answer_a_dump_of_the_first(pool: ProcessPool, tmp_path: Path) -> None:
    first, second = pool.values(jobs.flights, 2, tmp_path, False)
    assert first[:2] == ([(0, "look at this"), (1, "look at this (asked by rank 0)")], 0)
    assert second[1] == 0


def test_a_rank_that_fails_writes_its_own_dump(pool: ProcessPool, tmp_path: Path) -> None:
    first, second = pool.values(jobs.flights, 2, tmp_path, True)
    assert first[0] == [(1, "exception RuntimeError: out of luck")]
    assert (first[1], second[1]) == (0, 0)
