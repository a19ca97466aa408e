"""An Aim run, read back through its Repo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aim
import numpy as np
import pytest
from aim.sdk.index_manager import RepoIndexManager
from aim.sdk.types import QueryReportMode

import tbhooks
from tbhooks.data.frame import Finding, Site
from tests.support.digits_training import make_net, same_bits, weights
from tests.support.digits_training import train as train_on_digits
from tests.support.frames import make_frame
from tests.support.loops import mlp, sgd, steps_of, train


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    found = aim.Run(repo=str(tmp_path), system_tracking_interval=None, log_system_params=False)
    yield found
    found.close()


def read(run: Any) -> Any:
    """The repository as its server sees it: indexed first."""
    repo = aim.Repo(run.repo.root_path)
    assert RepoIndexManager.get_index_manager(repo).index(run.hash)
    return aim.Repo(run.repo.root_path)


def sequences(found: Any) -> dict[str, dict[int, Any]]:
    """Values by name and step."""
    found_by_name = {}
    for sequence in (one for traces in found.iter_runs() for one in traces):
        steps, (values, *_) = sequence.data.items_list()
        found_by_name[sequence.name] = dict(sorted(zip(steps, values, strict=True)))
    return found_by_name


def test_numbers_and_distributions_are_those_of_the_frames(run: Any) -> None:
    model, memory = mlp(), tbhooks.MemorySink()
    with tbhooks.watch(model, [run, memory], every=2) as watching:
        optimizer = sgd(model)
        for step in range(5):
            train(model, 1, optimizer, after=lambda _, loss: watching.log({"loss": loss}))
            run.track(float(step), name="mine", step=step)
        run.close()  # before the watch is
    assert watching.stats.errors == 0
    repo = read(run)
    stored = sequences(repo.query_metrics(report_mode=QueryReportMode.DISABLED))
    shown = sequences(repo.query_distributions(report_mode=QueryReportMode.DISABLED))
    assert stored["mine"] == {step: float(step) for step in range(5)}
    assert steps_of(memory.frames) == list(stored["train/loss"]) == [0, 2, 4]
    for frame in memory.frames:
        assert stored["gradient.norm/0"][frame.step] == frame["0", "gradient"].norm
        assert stored["train/loss"][frame.step] == frame.scalars["train/loss"]
        weight = shown["weight/0.weight"][frame.step]
        assert weight.weights.sum() == 32
        assert tuple(weight.range) == (frame["0.weight", "weight"].min, frame["0.weight", "weight"].max)


def test_weights_are_the_same_bits_with_and_without(run: Any) -> None:
    watched, bare = make_net(), make_net()
    with tbhooks.watch(watched, run, every=1):
        train_on_digits(watched)
    train_on_digits(bare)
    assert same_bits(weights(watched), weights(bare))


def test_findings_are_kept_and_nan_is_in_no_distribution(run: Any) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    sink = tbhooks.AimSink(run)
    sink.write(make_frame(3, {Site("0", "activation"): [1.0, np.nan, 3.0]}, findings=[found]))
    sink.close()
    run.close()
    repo = read(run)
    assert repo.get_run(run.hash)["tbhooks_findings"] == "warning, step 3: 0 is dead"
    shown = sequences(repo.query_distributions(report_mode=QueryReportMode.DISABLED))
    assert shown["activation/0"][3].weights.sum() == 2
