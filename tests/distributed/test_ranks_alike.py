"""Ranks that differ, fail, come late or do without each other: what is reported, and that nobody hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tbhooks
from tests.support import float64_recorder, jobs
from tests.support.float64_recorder import Float64Recorder
from tests.support.process_pool import ProcessPool
from tests.support.slow import cases, slow

pytestmark = pytest.mark.xdist_group("ranks")
ANOTHER = slow("another argument of watch(), compared in the same way")


@pytest.mark.parametrize(
    ("options", "change", "expected"),
    [
        ([{"every": 10}, {"every": 20}], "", "every is 10 on rank 0 and 20 on rank 1"),
        pytest.param([{}, {"kinds": ["weight"]}], "", "kinds is ['activation', 'gradient'", marks=ANOTHER),
        pytest.param([{}, {"histograms": False}], "", "histograms is True on rank 0 and False on", marks=ANOTHER),
        ([{}, {"exclude": "act"}], "", "the model differs: rank 0 has act, and rank 1 has not"),
        ([{}, {}], "shape", "the model differs: head.weight has shape [3, 7] on rank 0 and [4, 7] on rank 1"),
        ([{}, {}], "module", "the model differs: rank 1 has more.weight, more.bias, and rank 0 has not"),
        ([{}, {}], "type", "the model differs: act is a ReLU on rank 0 and a GELU on rank 1"),
    ],
)
def test_ranks_that_disagree_all_get_the_same_error_that_names_the_difference(
    pool: ProcessPool, tmp_path: Path, options: list[dict[str, Any]], change: str, expected: str
) -> None:
    said = pool.values(jobs.disagree, 2, tmp_path, options, change)
    assert all(expected in each for each in said), said


@pytest.mark.parametrize("who", [pytest.param(0, marks=slow("the same wait for another rank")), 1])
def test_a_rank_that_never_calls_watch_is_named_and_nobody_hangs(pool: ProcessPool, tmp_path: Path, who: int) -> None:
    said = pool.values(jobs.absent, 2, tmp_path, who, patience_s=1.5)
    assert f"rank {who} did not call watch() within" in said[1 - who]


def test_merging_needs_the_process_group_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tbhooks.ArgumentError, match=r"call init_process_group\(\) before watch\(\)"):
        tbhooks.watch(nn.Linear(2, 1), ranks="merge")
    with pytest.raises(tbhooks.ArgumentError, match="unknown value of ranks 'all'"):
        tbhooks.watch(nn.Linear(2, 1), ranks="all")


def test_a_single_process_merges_with_nobody() -> None:
    model = nn.Linear(2, 1)
    with tbhooks.watch(model, every=1, ranks="merge") as w:
        model(torch.ones(4, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert w.latest is not None
        assert w.latest["weight", "weight_gradient"].mean == 4.0
        with pytest.raises(tbhooks.ArgumentError, match=r'this logged step has one rank only; watch.*ranks="merge"'):
            w.latest["weight", "weight"].spread("norm")


@pytest.mark.parametrize(
    "how",
    cases(
        ["killed", "raises", "exits", "is late", "labels otherwise"],
        always={"killed", "raises", "labels otherwise"},
        reason="another way to be lost, found by the same wait",
    ),
)
def test_a_rank_that_is_lost_ends_the_merging_and_not_the_training(pool: ProcessPool, tmp_path: Path, how: str) -> None:
    first, second = pool.run(jobs.ends, 2, tmp_path, how, limit_s=45, patience_s=3)
    assert first.status == 0, first.output[-2000:]
    steps, messages, merged, slowest, seconds = first.value
    assert merged[:2] == [2.0, 2.0]
    assert merged[-1] == 1.0, "the last frames are of this rank alone"
    assert len(steps) >= 4
    lost = [message for message in messages if "merging of ranks ended" in message]
    assert len(lost) == 1, messages
    assert "From now on the statistics are those of rank 0" in lost[0]
    assert slowest < 2, "training waited for it"
    assert seconds < 30
    assert second.status == {"killed": -9, "raises": 1}.get(how, 0), second.output[-2000:]


def test_close_writes_what_the_first_rank_saw_when_another_does_not_come(pool: ProcessPool, tmp_path: Path) -> None:
    first, _ = pool.run(jobs.hung_at_close, 2, tmp_path, limit_s=60)
    assert first.status == 0, first.output[-2000:]
    steps, ranks, dropped, messages = first.value
    assert steps == list(range(28))
    assert ranks[:2] == [2, 2]
    assert ranks[-24:] == [1] * 24
    assert dropped == 0
    assert [message for message in messages if "another rank had not arrived when the watch was closed" in message]


def test_a_job_that_breaks_ends_by_itself_and_keeps_what_was_logged(pool: ProcessPool, tmp_path: Path) -> None:
    started = time.monotonic()
    ranks = pool.run(jobs.distributed_failure, 2, tmp_path, limit_s=45, patience_s=5)
    assert [rank.status for rank in ranks] == [1, 1]
    assert time.monotonic() - started < 40
    assert "out of luck" in ranks[1].output
    steps = tbhooks_steps(tmp_path / "run")
    assert steps[:3] == [0, 1, 2]


def tbhooks_steps(directory: Path) -> list[int]:
    from tbhooks import runs

    return [frame.step for frame in runs.read(directory).training]


def test_a_rank_that_waits_for_another_dies_of_sigterm_at_once_with_everything_on_disk(
    pool: ProcessPool, tmp_path: Path
) -> None:
    first, second = pool.run(jobs.terminated, 2, tmp_path, limit_s=40)
    assert (first.status, second.status) == (-15, 0), first.output[-2000:]
    assert tbhooks_steps(tmp_path / "run") == [0, 1, 2]


def test_a_rank_that_reads_nothing_counts_for_nothing(pool: ProcessPool, tmp_path: Path) -> None:
    for counts, steps, messages, _ in pool.values(jobs.paused, 2, tmp_path):
        assert counts == [2 * 4 * 16, 4 * 16, 2 * 4 * 16]
        assert steps == jobs.LOGGED
        assert not messages


def test_a_module_that_one_rank_does_not_run_is_merged_as_nothing_there(pool: ProcessPool, tmp_path: Path) -> None:
    for counts, steps, messages, _ in pool.values(jobs.sometimes, 2, tmp_path):
        assert counts == [(2 * 4 * 3, 4 * 3)] * 2
        assert steps == [0, 1]
        assert not any("merging of ranks ended" in message for message in messages)


def test_gradients_that_were_not_averaged_are_reported_from_those_that_were(pool: ProcessPool, tmp_path: Path) -> None:
    (_, messages, _), (_, others, _) = (
        (found, said, spread) for found, spread, said in pool.values(jobs.differing, 2, tmp_path, 1.0)
    )
    assert any("the weight_gradients of" in message and "differ between ranks" in message for message in messages)
    assert not others, "the first rank alone speaks"


def test_a_sick_rank_is_found_and_named(pool: ProcessPool, tmp_path: Path) -> None:
    found, spread, _ = pool.values(jobs.differing, 4, tmp_path, 1000.0)[0]
    (deviating,) = [each for each in found if each[0] == "sick_rank"]
    assert deviating[1] == "warning"
    assert deviating[2].startswith("Rank 1: ")
    assert "x the median of all ranks" in deviating[2]
    assert deviating[3]["rank"] == 1
    assert (spread.ranks, spread.max_rank) == (4, 1)
    assert spread.min <= spread.median <= spread.max


def test_a_rank_that_alone_has_nan_is_named_at_once(pool: ProcessPool, tmp_path: Path) -> None:
    found, _, _ = pool.values(jobs.differing, 2, tmp_path, float("nan"))[0]
    deviating = [each for each in found if each[0] == "sick_rank"]
    assert [(each[1], each[3]["rank"]) for each in deviating] == [("error", 1)]
    assert "Rank 1: 64 values of the up output are not finite, while all are on another rank" in deviating[0][2]


def test_logged_numbers_are_means_over_the_ranks_that_logged_them(pool: ProcessPool, tmp_path: Path) -> None:
    for scalars, steps, messages, _ in pool.values(jobs.logging, 2, tmp_path):
        assert steps == [0, 1, 2, 3], messages
        assert [each["train/loss"] for each in scalars] == [10 * step + 0.5 for step in range(4)]
        assert [each["train/mine"] for each in scalars] == [7.0] * 4
        assert [each["train/late"] for each in scalars[:3]] == [50.0 + step for step in range(3)]


def test_evaluations_are_those_of_the_first_rank_however_often_others_evaluate(
    pool: ProcessPool, tmp_path: Path
) -> None:
    (steps, ranks, messages, files), (_, theirs, others, none) = pool.values(jobs.evaluating, 2, tmp_path)
    assert steps == [0, 0, 1, 1, 2, 2], messages
    assert ranks == [2.0, 1.0] * 3
    assert theirs == [2.0] * 3
    assert len(files) == 1
    assert none == []
    assert not any("merging of ranks ended" in message for message in (*messages, *others))


def test_a_label_given_after_the_first_step_and_a_late_number_reach_it(pool: ProcessPool, tmp_path: Path) -> None:
    for frames, messages in pool.values(jobs.profiler_label, 2, tmp_path):
        assert frames == [(5000, 0.5), (5001, 0.5), (5002, 0.5)], messages


def test_a_closed_watch_leaves_no_thread_and_no_connection(pool: ProcessPool, tmp_path: Path) -> None:
    for counts in pool.values(jobs.again_and_again, 2, tmp_path):
        assert counts[-1] == counts[1], counts


def test_a_rank_that_reads_keeps_nobody_from_training(pool: ProcessPool, tmp_path: Path) -> None:
    for seconds, losses, messages in pool.values(jobs.reading, 2, tmp_path):
        assert sum(seconds) < 12, seconds
        assert losses == [0.5] * 5, messages


def test_weights_of_which_a_piece_is_missing_are_not_shown_as_whole(pool: ProcessPool, tmp_path: Path) -> None:
    kinds, scalars, messages = pool.values(jobs.torn, 2, tmp_path)[0]
    assert kinds == [{"activation", "gradient"}] * 2
    assert not any("train.grad_norm" in each or "train.grad_norm_raw" in each for each in scalars)
    assert any("shards of weights are missing" in message for message in messages)


def test_one_rank_does_not_run_again_what_needs_the_others(pool: ProcessPool, tmp_path: Path) -> None:
    said, _ = pool.values(jobs.replaying, 2, tmp_path)
    assert len(said) == 1
    assert "the step could not be run again" in said[0]


def test_the_older_fsdp_shows_pieces_alone_and_whole_weights_when_merged(pool: ProcessPool, tmp_path: Path) -> None:
    counts, sizes, scalars, _ = pool.values(jobs.older_fsdp, 2, tmp_path / "local", "local")[0]
    assert sum(counts.values()) < sum(sizes.values())
    assert not any("train.grad_norm" in each for each in scalars)
    counts, sizes, scalars, messages = pool.values(jobs.older_fsdp, 2, tmp_path / "merge", "merge")[0]
    assert counts == sizes
    assert all("train.grad_norm" in each for each in scalars)
    assert not any("drifted" in message for message in messages)


@pytest.mark.parametrize("ranks", ["local", "merge"])
def test_a_process_group_that_is_made_after_the_watch_is_noticed(pool: ProcessPool, tmp_path: Path, ranks: str) -> None:
    (first, messages), (second, _) = pool.values(jobs.grouped_late, 2, tmp_path, ranks)
    assert first == [0, 1, 2]
    assert second == []
    assert any("call init_process_group() before watch()" in said for said in messages) == (ranks == "merge")


def test_a_step_that_one_rank_drops_is_merged_without_it(pool: ProcessPool, tmp_path: Path) -> None:
    (counts, _, steps, messages, ranks), (_, dropped, *_) = pool.values(jobs.dropping, 2, tmp_path)
    assert counts == [4 * 16] * 3
    assert steps == jobs.LOGGED
    assert ranks == [1.0] * 3
    assert dropped == 3
    assert not any("merging of ranks ended" in message for message in messages)


def test_with_very_many_ranks_only_the_first_gets_the_numbers(pool: ProcessPool, tmp_path: Path) -> None:
    (counts, steps, messages, _), (others, _, theirs, _) = pool.values(jobs.only_the_first_reads, 2, tmp_path)
    assert counts == [2 * 4 * 16] * 3
    assert steps == jobs.LOGGED
    assert others == []
    assert not any("merging of ranks ended" in message for message in (*messages, *theirs))


def test_nothing_is_lost_when_the_process_group_is_destroyed_first(pool: ProcessPool, tmp_path: Path) -> None:
    for was_wrapped, is_restored, steps, messages, ranks in pool.values(jobs.ends_with_the_group, 2, tmp_path):
        assert was_wrapped
        assert is_restored
        assert steps == [0, 2]
        assert ranks == [2.0, 2.0]
        assert not any("merging of ranks ended" in message for message in messages)


@pytest.mark.parametrize(("wrap", "first"), [("ddp", True), ("ddp", False), ("fsdp", True), ("fsdp", False)])
def test_by_default_the_first_rank_shows_its_own_part_and_the_others_do_nothing(
    pool: ProcessPool, tmp_path: Path, wrap: str, first: bool
) -> None:
    (frames, mine, _, files, stats), (none, _, hooks, nothing, idle) = pool.values(jobs.local, 2, tmp_path, wrap, first)
    assert [frame.step for frame in frames] == [0, 1]
    assert stats.errors == 0, stats.messages
    assert len(files) == 1
    for name, size in mine.items():
        for kind in ("weight", "weight_gradient", "update"):
            assert frames[1][name, kind].count == size
    assert frames[1]["up", "activation"].count == 4 * 16
    assert ("train.grad_norm" in frames[1].scalars) == (wrap == "ddp"), "the norm of a part is nobody's"
    assert (none, hooks, nothing, idle.logged, idle.hooks_fired) == ([], 0, [], 0, 0)


def test_mixed_precision_shows_what_was_computed(pool: ProcessPool, tmp_path: Path) -> None:
    ranks = pool.values(jobs.mixed, 2, tmp_path)
    (frame,) = ranks[0][1]
    parts = [each[0] for each in ranks]
    expected = {key: np.concatenate([array for part in parts for array in part[key]]) for key in parts[0]}
    float64_recorder.assert_frame_equals(frame, expected)


@pytest.mark.parametrize("watched", ["part", "whole"])
def test_the_stages_of_a_pipeline_make_one_frame_under_the_names_of_the_whole_model(
    pool: ProcessPool, tmp_path: Path, watched: str
) -> None:
    ranks = pool.values(jobs.pipeline, 2, tmp_path, watched)
    frames, messages = ranks[0]
    assert [frame.step for frame in frames] == [0, 1], messages
    reference = alone_in_micro_batches()
    for frame in frames:
        for path in ("up", "act", "down", "norm", "head"):
            # Before its first step a stage is run forth and back on zeros, to find out shapes; that is seen, too.
            for kind in ("activation", "gradient") if frame.step else ():
                assert frame[path, kind].norm == pytest.approx(np.linalg.norm(reference[frame.step][path, kind]))
        for name in ("up.weight", "head.bias"):
            for kind in ("weight", "weight_gradient", "update"):
                assert frame[name, kind].norm == pytest.approx(np.linalg.norm(reference[frame.step][name, kind]))


def alone_in_micro_batches() -> list[float64_recorder.Step]:
    """GPipe sums the losses of its micro-batches, and divides gradients by their number."""
    model = jobs.make_model()
    seen = Float64Recorder(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for part in (jobs.batch(step, 0), jobs.batch(step, 1)):
            jobs.loss_of(model(part)).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    seen.close()
    return seen.steps


def test_workers_that_torchrun_restarts_go_on_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(writer: Any, steps: int) -> list[int]:
        model = nn.Linear(2, 1)
        with tbhooks.watch(model, writer, every=2) as w:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
            return [frame.step for frame in w.history]

    for writer in (lambda: tbhooks.JsonlSink(tmp_path / "f.jsonl"), lambda: tmp_path / "run"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert train(writer(), 5) == [0, 2, 4]
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert train(writer(), 5) == [6, 8]
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert train(writer(), 2) == [0]
