"""A SwanLab run on disk, read back with the reader of its `sync` command."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

import tbhooks
from tbhooks.data.frame import Finding, Site
from tests.support.digits_training import make_net, same_bits, weights
from tests.support.digits_training import train as train_on_digits
from tests.support.frames import make_frame
from tests.support.loops import mlp, sgd, steps_of, train


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    found = swanlab.init(project="tests", mode="offline", logdir=str(tmp_path))
    yield found
    if found.alive:
        found.finish()


def records(run: Any) -> Iterator[Any]:
    reader = DataStoreReader()
    (file,) = Path(run.dir).glob("*.swanlab")
    reader.open(file)
    reader.scan()
    for data in reader:
        yield Record.FromString(data)
    reader.close()


def series(run: Any, key: str) -> dict[int, float]:
    scalars = [record.scalar for record in records(run) if record.HasField("scalar")]
    return {scalar.step: scalar.value.number for scalar in scalars if scalar.key == key}


@pytest.mark.parametrize("given", ["module", "run"])
def test_the_numbers_are_those_of_the_frames(given: str, run: Any) -> None:
    model, memory = mlp(), tbhooks.MemorySink()
    with tbhooks.watch(model, [swanlab if given == "module" else run, memory], every=2) as watching:
        train(model, 5, after=lambda _, loss: watching.log({"loss": loss}))
        swanlab.finish()  # before the watch is closed
    assert watching.stats.errors == 0
    assert steps_of(memory.frames) == list(series(run, "train/loss")) == [0, 2, 4]
    for frame in memory.frames:
        assert series(run, "gradient.norm/0")[frame.step] == frame["0", "gradient"].norm
        assert series(run, "train/loss")[frame.step] == frame.scalars["train/loss"]


def test_what_the_script_logs_keeps_its_own_count(run: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, run, every=10) as watching:
        optimizer = sgd(model)
        for _ in range(3):
            train(model, 10, optimizer)
            watching.flush()
            swanlab.log({"mine": 1.0})
    run.finish()
    assert list(series(run, "mine")) == [0, 1, 2]
    assert list(series(run, "weight.norm/0.weight")) == [0, 10, 20]


def test_weights_are_the_same_bits_with_and_without(run: Any) -> None:
    watched, bare = make_net(), make_net()
    with tbhooks.watch(watched, run, every=1):
        train_on_digits(watched)
    train_on_digits(bare)
    assert same_bits(weights(watched), weights(bare))


def test_findings_are_text_and_nan_is_kept(run: Any) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    sink = tbhooks.SwanlabSink(run)
    sink.write(make_frame(3, {Site("0", "activation"): [np.nan]}, scalars={"train/loss": np.nan}, findings=[found]))
    sink.close()
    run.finish()
    assert math.isnan(series(run, "train/loss")[3])
    assert series(run, "activation.nan_count/0")[3] == 1
    (text,) = (record.media for record in records(run) if record.HasField("media"))
    (file,) = Path(run.dir).rglob(text.value.items[0].filename)
    assert (text.key, file.read_text()) == ("tbhooks/findings", "warning, step 3: 0 is dead")


def test_without_a_run_it_says_what_is_missing() -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"call swanlab.init\(\) before watch"):
        tbhooks.watch(mlp(), swanlab)
