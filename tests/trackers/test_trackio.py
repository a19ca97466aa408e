"""A Trackio run on disk, read back through its storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

import tbhooks
from tbhooks.data.frame import Finding, Site
from tests.support.digits_training import make_net, same_bits, weights
from tests.support.digits_training import train as train_on_digits
from tests.support.frames import make_frame
from tests.support.loops import mlp, sgd, steps_of, train


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    yield trackio.init(project=tmp_path.name, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    trackio.context_vars.current_run.set(None)


def rows(run: Any) -> list[dict[str, Any]]:
    return SQLiteStorage.get_logs(run.project, run.name)


def series(run: Any, tag: str) -> dict[int, Any]:
    return {row["step"]: row[tag] for row in rows(run) if tag in row}


@pytest.mark.parametrize("given", ["module", "run"])
def test_numbers_and_histograms_are_those_of_the_frames(given: str, run: Any) -> None:
    model, memory = mlp(), tbhooks.MemorySink()
    with tbhooks.watch(model, [trackio if given == "module" else run, memory], every=2) as watching:
        train(model, 5, after=lambda _, loss: watching.log({"loss": loss}))
        trackio.finish()  # before the watch is closed
    assert watching.stats.errors == 0
    assert steps_of(memory.frames) == list(series(run, "train/loss")) == [0, 2, 4]
    for frame in memory.frames:
        assert series(run, "gradient.norm/0")[frame.step] == frame["0", "gradient"].norm
        assert series(run, "train/loss")[frame.step] == frame.scalars["train/loss"]
        weight = series(run, "weight/0.weight")[frame.step]
        assert sum(weight["values"]) == 32
        assert weight["bins"][0] == frame["0.weight", "weight"].min


def test_what_the_script_logs_keeps_its_own_count(run: Any) -> None:
    model = mlp()
    with tbhooks.watch(model, run, every=10) as watching:
        optimizer = sgd(model)
        for _ in range(3):
            train(model, 10, optimizer)
            watching.flush()
            trackio.log({"mine": 1.0})
    trackio.finish()
    assert list(series(run, "mine")) == [0, 1, 2]
    assert list(series(run, "weight.norm/0.weight")) == [0, 10, 20]


def test_weights_are_the_same_bits_with_and_without(run: Any) -> None:
    watched, bare = make_net(), make_net()
    with tbhooks.watch(watched, run, every=1):
        train_on_digits(watched)
    train_on_digits(bare)
    assert same_bits(weights(watched), weights(bare))


@pytest.mark.parametrize(("alerts", "told"), [(None, []), ("warning", ["warn", "error"])])
def test_findings_are_text_and_alerts_if_that_is_asked_for(alerts: str | None, told: list[str], run: Any) -> None:
    found = Finding(3, Site("0", "activation"), "dead_units", "warning", "0 is dead")
    other = Finding(4, None, "loss_spike", "error", "the loss jumped")
    sink = tbhooks.TrackioSink(run, alerts=alerts)
    sink.write(make_frame(3, {Site("0", "activation"): [1.0, np.nan, 3.0]}, findings=[found]))
    sink.write(make_frame(4, findings=[found, other]))
    sink.close()
    trackio.finish()
    assert "error, step 4: the loss jumped" in str(series(run, "tbhooks/findings")[4])
    assert sum(series(run, "activation/0")[3]["values"]) == 2
    kept = sorted(SQLiteStorage.get_alerts(run.project), key=lambda alert: alert["step"])
    assert [alert["level"] for alert in kept] == told
    if told:
        assert (kept[1]["title"], kept[1]["text"], kept[1]["step"]) == (
            "tbhooks: loss_spike",
            "step 4: the loss jumped",
            4,
        )


def test_without_a_run_it_says_what_is_missing() -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"call trackio.init\(\) before watch"):
        tbhooks.watch(mlp(), trackio)
