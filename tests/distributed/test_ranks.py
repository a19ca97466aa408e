"""Several ranks: what each layout shows when merged, against one process that has all batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tbhooks.capture.recording.step_table import RANKS
from tbhooks.data.artifacts import Channels
from tests.support import float64_recorder, jobs
from tests.support.float64_recorder import Float64Recorder
from tests.support.process_pool import ProcessPool
from tests.support.slow import slow

pytestmark = pytest.mark.xdist_group("ranks")


def alone(batches: int, parts: int = 1) -> list[float64_recorder.Step]:
    """The steps of one process that has the batches of all ranks, and their mean gradient."""
    model = jobs.make_model()
    seen = Float64Recorder(model)
    for module in model.modules():
        module.register_forward_pre_hook(_keeps_input(seen, module, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(jobs.STEPS):
        for part in range(parts):
            outputs = model(torch.cat([jobs.batch(step, i, part) for i in range(batches)]))
            losses = [jobs.loss_of(output) / parts for output in outputs.chunk(batches)]
            torch.stack(losses).sum().backward()
        for parameter in model.parameters():
            parameter.grad /= batches
        optimizer.step()
        optimizer.zero_grad()
    seen.close()
    return seen.steps


def _keeps_input(seen: Float64Recorder, module: Any, model: Any) -> Any:
    path = next(path or "(root)" for path, one in model.named_modules() if one is module)
    return lambda _module, args: seen._keep((path, "input"), args[0])


# What is called, how many ranks, whether the watch came before the wrapper, in how many micro-batches.
LAYOUTS = [
    ("ddp", 2, True, 2), ("ddp_unused", 2, True, 1), ("ddp_compiled", 2, False, 1),
    ("fsdp", 2, True, 1), ("fsdp_checkpointed", 2, False, 1),
    ("tensor_parallel", 2, True, 1), ("fsdp_and_tensor_parallel", 4, False, 1),
    pytest.param("hsdp", 4, False, 1, marks=slow("four ranks; sharding and replicas are in make test, each alone")),
    pytest.param("ddp", 4, False, 1, marks=slow("four ranks of a layout that is in make test with two")),
    pytest.param("fsdp", 4, False, 1, marks=slow("four ranks of a layout that is in make test with two")),
    pytest.param("ddp_static", 2, False, 1, marks=slow("another option of a layout that is in make test")),
    pytest.param("fsdp_unresharded", 2, False, 1, marks=slow("another option of a layout that is in make test")),
    pytest.param("tensor_parallel", 2, False, 1, marks=slow("another option of a layout that is in make test")),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "world", "first", "parts"), LAYOUTS)
def test_merged_numbers_are_those_of_one_process_with_all_batches_and_training_is_untouched(
    pool: ProcessPool, tmp_path: Path, wrap: str, world: int, first: bool, parts: int
) -> None:
    ranks = pool.values(jobs.both, world, tmp_path, wrap, first, parts)
    expected = alone(jobs.batch_of(world - 1, wrap, world) + 1, parts)
    for plain, watched in ranks:
        assert watched.weights == plain.weights
        assert watched.stats.errors == 0, watched.stats.messages
        assert [frame.step for frame in watched.frames] == jobs.LOGGED, watched.stats.messages
        more = [ours - theirs for ours, theirs in zip(watched.collectives, plain.collectives, strict=True)]
        assert more == [1, 0, 1, 0, 1]
        assert len(watched.files) == 1
        for frame in watched.frames:
            assert frame.scalars[RANKS] == world
            norms = [frame[site.name, site.kind].norm for site in frame.sites if site.kind == "weight_gradient"]
            assert frame.scalars["train.grad_norm"] == pytest.approx(np.linalg.norm(norms), rel=1e-9)
    one, *others = (watched.frames for _, watched in ranks)
    for frame in one:
        float64_recorder.assert_frame_equals(frame, expected[frame.step])
    for other in others:
        assert [frame.values.tobytes() for frame in other] == [frame.values.tobytes() for frame in one]


# Collectors. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "up"),
    [
        ("fsdp", 16),
        pytest.param("tensor_parallel", 8, marks=slow("another option of a layout that is in make test")),
        pytest.param("ddp", 16, marks=slow("another option of a layout that is in make test")),
    ],
)
def test_of_a_model_in_pieces_the_first_rank_shows_what_it_holds(
    wrap: str, up: int, tmp_path: Path, pool: ProcessPool
) -> None:
    ranks = pool.values(jobs.with_collectors, 2, tmp_path, wrap)
    for rank, (shown, errors, messages, weights) in enumerate(ranks):
        assert not errors, messages
        assert weights == ranks[0][3]
        if rank:
            assert shown in ([], [[], []])
            continue
        for step in shown:
            found = {each.kind: each for each in step if isinstance(each, Channels)}
            counted = {kind: Counter(path for path, _ in each.names) for kind, each in found.items()}
            assert counted["activation"]["up"] == up
            assert {type(each).__name__ for each in step} >= {"Picture", "Channels", "Embedding"}
            if wrap != "tensor_parallel":  # there its summands are on several ranks
                assert counted["activation"]["down"] == 7


def test_merged_ranks_share_running_means_of_logged_steps_and_stay_in_step(pool: ProcessPool, tmp_path: Path) -> None:
    first, second = pool.values(jobs.log_means, 2, tmp_path / "ranks")
    # Steps 0, 4 and 8 are logged: means over both ranks. The others are the first's own.
    assert first[0][0] == {0: 5.0, 2: 1.5, 4: 8.5, 6: 5.5, 8: 12.5}
    # Ranks do not wait for what is logged after a step: it is of the next mean, but for the first.
    assert first[1][0] == {0: 5.0, 2: 1.5, 4: 8.0, 6: 5.0, 8: 12.0}
    assert [result[0] for result in second] == [{}, {}]
    assert [result[1:] for result in (*first, *second)] == [(0, ())] * 4


def test_what_does_not_fit_into_the_buffer_is_left_out_on_every_rank(pool: ProcessPool, tmp_path: Path) -> None:
    by_rank = pool.values(jobs.sliced, 2, tmp_path / "ranks", False, None, 4000)
    (first, _, messages), (second, _, _) = by_rank
    assert len(first) == len(second) == 3
    for one, other in zip(first, second, strict=True):
        assert list(one.sites) == list(other.sites)
        assert np.array_equal(one.values, other.values, equal_nan=True)
        assert 0 < len(one.sites) < 20
    assert any("the buffer that ranks exchange is too small for all sites" in message for message in messages)
