"""An MLflow run on sqlite, read back through its client."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

import tbhooks
from tbhooks.data.frame import Finding, Site
from tbhooks.integrations.lightning import WatchCallback
from tbhooks.sinks.mlflow import MAX_NAME_LENGTH, Names, cleaned
from tests.support.digits_training import make_net, same_bits, weights
from tests.support.digits_training import train as train_on_digits
from tests.support.frames import make_frame
from tests.support.lightning_training import fit, make_module, make_trainer
from tests.support.loops import mlp, sgd, steps_of, train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Made once: its first start takes seconds."""
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    directory = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{directory}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("tests", artifact_location=(directory / "artifacts").as_uri())
    mlflow.set_experiment("tests")
    return uri


@pytest.fixture
def run(store: str) -> Iterator[Any]:
    with mlflow.start_run() as found:
        yield found


def series(run: Any, name: str) -> dict[int, float]:
    points = MlflowClient().get_metric_history(run.info.run_id, name)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


def runs() -> int:
    return len(mlflow.search_runs(experiment_names=["tests"], output_format="list"))


@pytest.mark.parametrize("given", ["module", "run", "id"])
def test_the_active_run_gets_the_numbers_of_the_frames_and_no_other_is_started(given: str, run: Any) -> None:
    before, model, memory = runs(), mlp(), tbhooks.MemorySink()
    writer = {"module": mlflow, "run": run, "id": tbhooks.MlflowSink(run.info.run_id)}[given]
    with tbhooks.watch(model, [writer, memory], every=2) as watching:
        optimizer = sgd(model)
        for step in range(5):
            train(model, 1, optimizer, after=lambda _, loss: watching.log({"loss": loss}))
            mlflow.log_metric("mine", step, step=step)
    assert watching.stats.errors == 0
    assert series(run, "mine") == dict(enumerate(range(5)))
    assert list(series(run, "activation.std/0")) == steps_of(memory.frames) == [0, 2, 4]
    for frame in memory.frames:
        assert series(run, "activation.std/0")[frame.step] == frame["0", "activation"].std
        assert series(run, "update.ratio/2.weight")[frame.step] == frame["2.weight", "update"].ratio
        assert series(run, "train/loss")[frame.step] == frame.scalars["train/loss"]
    assert runs() == before


def test_weights_are_the_same_bits_with_and_without(run: Any) -> None:
    watched, bare = make_net(), make_net()
    with tbhooks.watch(watched, mlflow, every=1):
        train_on_digits(watched)
    train_on_digits(bare)
    assert same_bits(weights(watched), weights(bare))


def test_a_frame_of_more_than_a_thousand_numbers_arrives_whole(run: Any) -> None:
    data = {Site(f"layer.{i}", "activation"): [i, i + 1.0] for i in range(700)}
    tbhooks.MlflowSink(run).write(make_frame(7, data))
    stored = MlflowClient().get_run(run.info.run_id).data.metrics
    assert len(stored) == 3 * 700
    assert stored["activation.mean/layer.699"] == 699.5


def test_names_it_would_refuse_are_cleaned_and_no_two_become_one(run: Any) -> None:
    paths = ["(root)", "a[0]", "a_0_", "a<0>", "x" * 400 + "1", "x" * 400 + "2", "%", "ü.weight", "..", "a//b"]
    data = {Site(path, "weight"): [float(i)] for i, path in enumerate(paths)}
    sink = tbhooks.MlflowSink(run, scalars=("max",))
    sink.write(make_frame(0, data))
    sink.write(make_frame(1, {Site("a-0-", "weight"): [99.0], **data}))
    stored = MlflowClient().get_run(run.info.run_id).data.metrics
    assert sorted(stored.values()) == [*map(float, range(len(paths))), 99.0]
    assert all(len(name) <= MAX_NAME_LENGTH for name in stored)
    assert stored["weight.max/a_0_"] == 2.0  # which can stay as it is


def test_names_stay_the_same_from_step_to_step() -> None:
    names = Names()
    assert names.of(["a[0]"]) == ["a_0_"]
    (late,) = names.of(["a_0_"])
    assert late != "a_0_"
    assert names.of(["a_0_", "a[0]"]) == [late, "a_0_"]
    assert cleaned("train/loss") == "train/loss"


def test_nan_is_a_number_to_it_and_findings_are_a_tag(run: Any) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    sink = tbhooks.MlflowSink(run)
    sink.write(make_frame(3, {Site("0", "activation"): [np.nan]}, scalars={"train/loss": np.nan}, findings=[found]))
    data = MlflowClient().get_run(run.info.run_id).data
    assert math.isnan(data.metrics["train/loss"])
    assert data.metrics["activation.nan_count/0"] == 1
    assert data.tags["tbhooks.findings"] == "warning, step 3: 0 is dead"


def test_without_an_active_run_it_says_what_is_missing(store: str) -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"call mlflow.start_run\(\) before watch"):
        tbhooks.watch(mlp(), mlflow)


def test_what_is_written_after_the_runs_end_arrives_too(store: str) -> None:
    model = mlp()
    with mlflow.start_run() as run:
        watching = tbhooks.watch(model, mlflow, every=1)
        train(model, 3)
    watching.close()
    assert list(series(run, "weight.norm/0.weight")) == [0, 1, 2]


def test_lightnings_logger_leads_to_its_run(store: str, tmp_path: Path) -> None:
    logger = MLFlowLogger("tests", tracking_uri=store)
    fit(make_trainer(tmp_path, [WatchCallback(every=2)], logger=logger), make_module())
    points = MlflowClient().get_metric_history(logger.run_id, "weight_gradient.norm/net.0.weight")
    assert [point.step for point in points] == [0, 2, 4]
