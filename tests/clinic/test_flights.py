"""The flight recorder in accidents: each dump names step, parameter and sample. In normal trainings there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tbhooks
from tbhooks.data.artifacts.flights import Flight
from tests.clinic import accidents
from tests.clinic.accidents import CORRUPT_STEP, FLIPPED_EVERY, FLIPPED_STEP, FLIPPED_WEIGHT, Staged
from tests.clinic.cases import CASES
from tests.clinic.training import Case
from tests.support.loops import steps_of
from tests.support.process_pool import ProcessPool
from tests.support.slow import cases

NORMAL = {case.name: case for case in CASES if not case.rules}


def first_flight(staged: Staged, directory: Path) -> Flight:
    staged.watching.close()
    assert staged.watching.stats.errors == 0, staged.watching.stats.messages
    run = tbhooks.runs.read(directory)
    assert not run.problems
    assert [str(flight) for flight in run.flights] == [str(flight) for flight in staged.watching.flights]
    return run.flights[0]


def test_a_corrupt_batch_between_logged_steps(tmp_path: Path) -> None:
    staged = accidents.corrupt_batch(tmp_path)
    flight = first_flight(staged, tmp_path)
    assert flight.suspect_step == CORRUPT_STEP
    assert flight.suspect_parameter == staged.grown_most(CORRUPT_STEP, int(flight.steps[0]))
    assert flight.suspect_sample == staged.worst[CORRUPT_STEP]
    assert f"step {CORRUPT_STEP}" in flight.reason


def test_a_slow_divergence(tmp_path: Path) -> None:
    staged = accidents.slow_divergence(tmp_path)
    flight = first_flight(staged, tmp_path)
    step = flight.suspect_step
    assert step is not None
    assert step > 150
    assert flight.loss[flight.steps.tolist().index(step)] > 2 * np.nanmedian(flight.loss[:50])
    assert flight.suspect_parameter == staged.grown_most(step, int(flight.steps[0]))
    assert flight.suspect_sample == staged.worst[step]


def test_nan_from_one_layer_at_an_unlogged_step(tmp_path: Path) -> None:
    staged = accidents.nan_in_one_layer(tmp_path)
    flight = first_flight(staged, tmp_path)
    assert flight.suspect_step == CORRUPT_STEP
    # The gradients of the layers behind are finite.
    assert flight.suspect_parameter == "0.weight"
    assert flight.nonfinite[flight.steps.tolist().index(CORRUPT_STEP)] == 1
    assert flight.suspect_sample == staged.damaged == staged.worst[CORRUPT_STEP]


def test_an_exception_in_a_step(tmp_path: Path) -> None:
    staged = accidents.exception_in_a_step(tmp_path)
    flight = first_flight(staged, tmp_path)
    assert flight.step == CORRUPT_STEP
    assert flight.reason == "exception DamagedError: the kernel failed"
    assert flight.steps[-1] >= CORRUPT_STEP - 1
    assert flight.suspect_parameter in staged.norms[-1]
    assert flight.suspect_sample == staged.worst[flight.suspect_step or 0]


def test_an_operator_asks_for_a_burst(tmp_path: Path) -> None:
    staged = accidents.operator_asks(tmp_path)
    flight = first_flight(staged, tmp_path)
    assert flight.step == CORRUPT_STEP
    assert flight.suspect_step == CORRUPT_STEP - 5
    assert flight.suspect_parameter == staged.grown_most(CORRUPT_STEP - 5, int(flight.steps[0]))
    assert flight.suspect_sample == staged.worst[CORRUPT_STEP - 5]
    frames = steps_of(tbhooks.runs.read(tmp_path).frames)
    assert frames == [0, *range(CORRUPT_STEP + 1, CORRUPT_STEP + 5)]


@pytest.mark.xdist_group("ranks")
def test_a_rank_with_a_flipped_bit_in_one_weight(pool: ProcessPool, tmp_path: Path) -> None:
    world = 2
    ranks = pool.values(accidents.flipped_bit, world, tmp_path, world)
    for _, errors, messages in ranks:
        assert errors == 0, messages
    run = tbhooks.runs.read(tmp_path / "run")
    # The bits of all ranks are compared at logged steps.
    found = -(-FLIPPED_STEP // FLIPPED_EVERY) * FLIPPED_EVERY
    reason = f"finding replica_drift at weight/{FLIPPED_WEIGHT} of rank {world - 1} at step {found}"
    assert [(each.rank, each.reason) for each in run.flights] == [(0, reason), (1, f"{reason} (asked by rank 0)")]
    for flight in run.flights:
        assert (flight.suspect_step, flight.suspect_parameter) == (found, FLIPPED_WEIGHT)
        assert flight.suspect_sample == ranks[flight.rank][0][found]
        assert FLIPPED_STEP - 1 in flight.steps
    assert run.flights_left_out == []


@pytest.mark.parametrize(
    "case",
    cases(NORMAL, always={"MLP, AdamW", "spikes that are clipped"}, reason="trains for seconds, as the others do"),
)
def test_a_normal_training_dumps_only_what_is_asked_for(case: Case) -> None:
    torch.manual_seed(0)
    training = case.make()
    watching = tbhooks.watch(training.model, every=training.every, kinds=training.kinds).flight_recorder()
    if training.evaluated:
        watching.evaluation()
    for number in range(training.steps):
        watching.log({"loss": training.step(number)})
    assert watching.flights == []
    watching.dump("asked for")
    watching.close()  # which judges the last steps
    assert [flight.reason for flight in watching.flights] == ["asked for"]
    assert watching.stats.errors == 0, watching.stats.messages
