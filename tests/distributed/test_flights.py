"""The flight recorder and bursts where ranks are merged: every rank has its ring, and the run has the dumps of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from tbhooks.data.artifacts.flights import Flight, Named, decode
from tbhooks.distributed import flights as exchange
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


# --- The exchange itself, with all ranks in one process -----------------------------------------------


def dump(rank: int, step: int, reason: str, named: Named | None = None) -> Flight:
    nothing = np.zeros(1)
    return Flight(step, 0.0, rank, reason, np.array([step]), {}, (), np.zeros((1, 0)), nothing, named=named)


class Job:
    """Three ranks with one store: what each was asked for, and which ranks are named as silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path | None) -> None:
        store = distributed.HashStore()
        monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(exchange, "CLOSING_S", 0.1)
        self.silent: list[str] = []
        self.asked: dict[int, list[tuple[str, Named | None]]] = {rank: [] for rank in range(3)}
        self.ranks = [
            exchange.FlightExchange(
                rank, 3, lambda reason, named, rank=rank: self.asked[rank].append((reason, named)), self.silent.append,
                directory if rank == 0 else None,
            )
            for rank in range(3)
        ]  # fmt: skip


@pytest.mark.parametrize("is_shared", [True, False], ids=["one file system", "a directory only of the first rank"])
def test_a_rank_that_is_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    job = Job(monkeypatch, tmp_path)
    first, second, _dead = job.ranks
    first.dumped(dump(0, 7, "look", (5, "fc.weight")))
    second.poll()
    assert job.asked[1] == [("look (asked by rank 0)", (5, "fc.weight"))]
    if not is_shared:
        monkeypatch.setattr(second, "_write", lambda *_: False)
    second.dumped(dump(1, 8, "look (asked by rank 0)"))
    first.poll()
    assert job.silent == []  # there is time left
    first.close()
    assert job.silent == ["step 7: rank 2 did not answer in time"]
    (file,) = (tmp_path / "tbhooks-flights").glob("*.flight")
    assert (decode(file.read_bytes()).rank, decode(file.read_bytes()).step) == (1, 8)


def test_ranks_that_close_hear_the_last_request_and_do_not_wait_for_a_first_rank_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, tmp_path)
    first, second, third = job.ranks
    first.dumped(dump(0, 7, "one"))
    first.dumped(dump(0, 9, "two"))
    third.take_last_requests()  # the first rank has not closed: it ends after CLOSING_S
    first.close()
    second.take_last_requests()
    assert [reason for reason, _ in job.asked[1]] == ["one (asked by rank 0)", "two (asked by rank 0)"]
    assert job.asked[2] == job.asked[1]

    class Gone:
        def check(self, _keys: list[str]) -> bool:
            raise distributed.DistNetworkError("the connection is closed")

    second._store = Gone()
    second.take_last_requests()
