"""`hparams`: a real TensorBoard compares runs by what they were started with."""

from __future__ import annotations

import enum
import json
import math
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata
from torch import nn

import tbhooks
from tbhooks.api import validation
from tests.support.script_host import ScriptHost
from tests.support.slow import slow
from tests.support.tensorboard_server import Server

pytestmark = pytest.mark.xdist_group("tensorboard_server")

Post = Callable[[str, dict[str, Any] | None], Any]
METRICS = ["train/loss", "eval/accuracy", "gradient.norm/(root)"]


class Precision(str, enum.Enum):  # noqa: UP042  older than the other
    """As configurations have them."""

    HALF = "bf16"


def values_of(lr: float) -> dict[str, Any]:
    return {
        "lr": lr, "layers": 2, "amsgrad": lr > 0.02, "name": "linear", "precision": Precision.HALF,
        "data": {"batch": 4, "shape": (3, 2)}, "seed": np.int64(7), "nothing": None, "limit": math.inf,
    }  # fmt: skip


def train(directory: str | Path, lr: float, fails: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses: list[float] = []
    watching = tbhooks.watch(model, str(directory), every=3).hparams(values_of(lr), metrics=METRICS)
    with watching.log_every(2).environment() as w:
        for step in range(4):
            loss = model(torch.ones(4, 3)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            w.log({"loss": loss, "eval/accuracy": step / lr})
            losses.append(float(loss.detach()))
        if fails:
            raise ArithmeticError("diverged")
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    directory = tmp_path_factory.mktemp("runs")
    losses = {"slow": train(directory / "slow", 0.01), "fast": train(directory / "fast", 0.05)}
    with pytest.raises(ArithmeticError):
        train(directory / "broken", 0.25, fails=True)
    return directory, losses


@pytest.fixture(params=["true", "false"], ids=["load_fast", "load_slow"], scope="module")
def post(
    request: pytest.FixtureRequest, runs: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Post]:
    with Server(runs[0], tmp_path_factory.mktemp("server") / "log", f"--load_fast={request.param}") as server:

        def ask(route: str, body: dict[str, Any] | None) -> Any:
            content = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{server.address}/data/plugin/{route}", content)
            request.add_header("Content-Type", "application/json")
            try:
                with server.opener.open(request, timeout=10) as answer:
                    return json.load(answer)
            except OSError:  # not served yet
                return {}

        server.wait_for(lambda: len(ask("hparams/session_groups", everything(0)).get("sessionGroups", ())) == 3)
        yield ask


def everything(metrics: int) -> dict[str, Any]:
    columns = [{"metric": {"group": "", "tag": tag}} for tag in METRICS[:metrics]]
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    return {"startIndex": 0, "sliceSize": 100, "allowedStatuses": statuses, "colParams": columns}


def test_the_tab_has_a_column_for_each_value_and_metric(post: Post) -> None:
    experiment = post("hparams/experiment", {"experimentName": ""})
    types = {info["name"]: info["type"] for info in experiment["hparamInfos"]}
    assert types == {
        "lr": "DATA_TYPE_FLOAT64", "layers": "DATA_TYPE_FLOAT64", "amsgrad": "DATA_TYPE_BOOL",
        "name": "DATA_TYPE_STRING", "precision": "DATA_TYPE_STRING", "data.batch": "DATA_TYPE_FLOAT64",
        "data.shape": "DATA_TYPE_STRING", "seed": "DATA_TYPE_FLOAT64", "nothing": "DATA_TYPE_STRING",
        "limit": "DATA_TYPE_STRING",
    }  # fmt: skip
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == METRICS


def test_runs_are_compared_with_their_last_metrics_and_their_end(
    post: Post, runs: tuple[Path, dict[str, list[float]]]
) -> None:
    groups = {group["name"]: group for group in post("hparams/session_groups", everything(3))["sessionGroups"]}
    assert sorted(groups) == ["broken", "fast", "slow"], "no run but those that were started"
    for name, lr in (("slow", 0.01), ("fast", 0.05)):
        reported = groups[name]["hparams"]
        assert reported["lr"] == pytest.approx(lr)
        assert reported["amsgrad"] is (lr > 0.02)
        assert (reported["layers"], reported["data.batch"], reported["seed"]) == (2, 4, 7)
        assert (reported["name"], reported["precision"], reported["data.shape"]) == ("linear", "bf16", "(3, 2)")
        assert (reported["nothing"], reported["limit"]) == ("None", "inf")
        metrics = {value["name"]["tag"]: value["value"] for value in groups[name]["metricValues"]}
        assert metrics["train/loss"] == pytest.approx(runs[1][name][3], rel=1e-5)
        assert metrics["eval/accuracy"] == pytest.approx(3 / lr, rel=1e-5)
        assert metrics["gradient.norm/(root)"] > 0
    ended = {name: group["sessions"][0]["status"] for name, group in groups.items()}
    assert ended == {"slow": "STATUS_SUCCESS", "fast": "STATUS_SUCCESS", "broken": "STATUS_FAILURE"}


def test_means_and_the_environment_are_served_beside_it(post: Post, runs: tuple[Path, dict[str, list[float]]]) -> None:
    losses = runs[1]["slow"]
    served = {step: value for _, step, value in post("scalars/scalars?run=slow&tag=train%2Floss", None)}
    assert served == pytest.approx({0: losses[0], 2: (losses[1] + losses[2]) / 2, 3: losses[3]}, rel=1e-5)
    (text,) = post("text/text?run=slow&tag=tbhooks%2Fenvironment%2Ftext_summary", None)
    assert f"<td>{torch.__version__}</td>" in text["text"]


def test_it_is_in_the_runs_own_file(runs: tuple[Path, Any]) -> None:
    for name in ("slow", "fast", "broken"):
        assert len(list((runs[0] / name).iterdir())) == 1


def status(directory: Path) -> int | None:
    events = EventAccumulator(str(directory))
    events.Reload()
    if metadata.SESSION_END_INFO_TAG not in events.Tags()["tensors"]:
        return None
    content = events.PluginTagToContent(metadata.PLUGIN_NAME)[metadata.SESSION_END_INFO_TAG]
    return int(metadata.parse_session_end_info_plugin_data(content).status)


PROGRAM = """
import os, signal, sys, torch, tbhooks
model = torch.nn.Linear(3, 2)
w = tbhooks.watch(model, sys.argv[1]).hparams({"lr": 0.1})
model(torch.ones(1, 3))
if sys.argv[2] == "raise":
    raise ArithmeticError("diverged")
if sys.argv[2] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
try:
    raise KeyError("handled")
except KeyError:
    pass
if sys.argv[2] == "gone":
    del model
"""


@pytest.mark.parametrize(
    ("how", "code", "expected"),
    [
        ("well", 0, api_pb2.STATUS_SUCCESS),
        pytest.param("gone", 0, api_pb2.STATUS_SUCCESS, marks=slow("ends as `well` does")),
        ("raise", 1, api_pb2.STATUS_FAILURE),
        pytest.param("signal", -signal.SIGTERM, api_pb2.STATUS_FAILURE, marks=slow("test_lifecycle.py has signals")),
    ],
)
def test_how_a_process_ends_is_how_its_run_ends(
    scripts: ScriptHost, tmp_path: Path, how: str, code: int, expected: int
) -> None:
    done = scripts.run("-c", PROGRAM, tmp_path, how, timeout=100)
    assert done.returncode == code, done.stderr
    assert status(tmp_path) == expected


def test_without_hyperparameters_nothing_is_written(tmp_path: Path) -> None:
    tbhooks.watch(nn.Linear(1, 1), str(tmp_path)).close()
    assert status(tmp_path) is None


def test_other_ranks_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tbhooks.watch(nn.Linear(1, 1), str(tmp_path)).hparams({"lr": 0.1}).environment().close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [2**53 + 1, -(2**70), 10**400, math.nan, -math.inf])
def test_numbers_that_would_not_arrive_as_they_are_become_texts(given: float) -> None:
    assert validation.parse_hyperparameters({"x": given}, ()).values == {"x": str(given)}


@pytest.mark.parametrize(
    ("values", "metrics", "message"),
    [
        ({}, (), "hparams() must be a dict such as"),
        ([("lr", 1)], (), "hparams() must be a dict such as"),
        ({1: 2}, (), "a key of hparams must be a non-empty string, got 1"),
        ({"": 2}, (), "a key of hparams must be a non-empty string"),
        ({"a": {"": 2}}, (), "a key of hparams must be a non-empty string"),
        ({"a": {"b": 2}, "a.b": 3}, (), "hparams has 'a.b' twice"),
        ({"lr": 1}, "train/loss", "metrics must be a list of tags"),
        ({"lr": 1}, None, "metrics must be a list of tags"),
        ({"lr": 1}, ["train/loss", ""], "a metric must be a tag"),
        ({"lr": 1}, [3], "a metric must be a tag"),
        ({"lr": 1}, ["train/loss", "train/loss"], "metrics has 'train/loss' twice"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(values: Any, metrics: Any, message: str) -> None:
    with tbhooks.watch(nn.Linear(1, 1)) as w, pytest.raises(tbhooks.ArgumentError, match=re.escape(message)):
        w.hparams(values, metrics=metrics)


def test_a_run_has_one_set() -> None:
    w = tbhooks.watch(nn.Linear(1, 1)).hparams({"lr": 1})
    with pytest.raises(tbhooks.ArgumentError, match="give all at once"):
        w.hparams({"depth": 2})
    w.close()
