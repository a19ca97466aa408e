"""Copies of weights and gradients on several ranks, compared to the bit (`Watch.checksums`, rule `replica_drift`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.process_pool import ProcessPool
from tests.support.slow import cases

pytestmark = pytest.mark.xdist_group("ranks")


WORLDS = {"ddp": 3, "fsdp": 2, "hsdp": 4, "tensor_parallel": 2}


@pytest.mark.parametrize("wrap", cases(["ddp", "hsdp"], always={"ddp"}, reason="four ranks, the same rule"))
def test_a_flipped_bit_is_found_with_rank_parameter_and_step(pool: ProcessPool, tmp_path: Path, wrap: str) -> None:
    world = WORLDS[wrap]
    (found, flights, messages, errors, why), *_ = pool.values(jobs.flipped_bit, world, tmp_path, wrap, 2)
    assert errors == 0, why
    assert found == [(2, "down.weight", world - 1)]
    assert messages[0].startswith(
        f"Rank {world - 1}: the bits of down.weight are not those of the other ranks at step 2"
    )
    assert "The gradients are equal" in messages[0]
    assert flights == [f"finding replica_drift at weight/down.weight of rank {world - 1} at step 2"]


@pytest.mark.parametrize("wrap", cases(WORLDS.keys(), always={"ddp", "tensor_parallel"}, reason="other shards"))
def test_equal_replicas_and_shards_are_no_finding(pool: ProcessPool, tmp_path: Path, wrap: str) -> None:
    for found, _flights, _messages, errors, why in pool.values(jobs.flipped_bit, WORLDS[wrap], tmp_path, wrap, None):
        assert (found, errors) == ([], 0), why


def test_gradients_that_are_not_averaged_are_found_when_the_weights_drift(pool: ProcessPool, tmp_path: Path) -> None:
    (found, _, messages, errors, why), _ = pool.values(jobs.flipped_bit, 2, tmp_path, "bare", None)
    assert errors == 0, why
    assert found[0] == (1, "up.weight", 1)
    assert "Check that DDP averages all gradients" in messages[0]
