"""Runs written before the package was split into layers: every reader gives the numbers they gave then.

`data/before_layers` holds three runs of one small CNN, written by commit c4a9827: event files with graph, images,
channels, hyperparameters and evaluations; JSON lines; and event files of a training that became NaN.
`expected.json` is what that commit read from them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

from tbhooks import plugin, runs
from tbhooks.cli.commands import main
from tbhooks.data.frame import Frame
from tbhooks.sinks.tensorboard import PLUGIN

OLD_RUNS = Path(__file__).parent / "data" / "before_layers"
EXPECTED: dict[str, Any] = json.loads((OLD_RUNS / "expected.json").read_text())

every_run = pytest.mark.parametrize("name", EXPECTED)


def by_step(frames: list[Frame], path: str, kind: str, stat: str) -> dict[str, float]:
    return {str(frame.step): getattr(frame[path, kind], stat) for frame in frames}


@every_run
def test_read_returns_the_numbers_of_then(name: str) -> None:
    expected, run = EXPECTED[name], runs.read(OLD_RUNS / name)
    assert run.problems == []
    assert [frame.step for frame in run.training] == expected["training"]
    assert [frame.step for frame in run.evaluations] == expected["evaluations"]
    assert [frame.step for frame in run.channels] == expected["channels"]
    assert [str(site) for site in run.training[0].sites] == expected["sites"]
    assert by_step(run.training, "0", "activation", "std") == pytest.approx(expected["std"], nan_ok=True)
    assert by_step(run.training, "4.weight", "weight", "p50") == pytest.approx(expected["p50"], nan_ok=True)
    assert by_step(run.training, "0.weight", "update", "ratio") == pytest.approx(expected["ratio"], nan_ok=True)
    losses = {str(frame.step): frame.scalars["train/loss"] for frame in run.training}
    assert losses == pytest.approx(expected["loss"], nan_ok=True)
    found = [[f.step, f.rule, f.severity, str(f.site) if f.site else None, f.message] for f in run.findings]
    assert found == expected["findings"]


@every_run
def test_what_they_did_not_hold_is_unknown(name: str) -> None:
    reading = runs.read(OLD_RUNS / name).training[0]["0", "activation"]
    assert reading.std > 0
    assert np.isnan([reading.skewness, reading.kurtosis]).all()


@every_run
def test_report_shows_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(OLD_RUNS / name), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = EXPECTED[name]
    assert report["steps"] == {"first": 0, "last": 8, "logged": 5}
    assert report["evaluations"] == len(expected["evaluations"])
    assert report["scalars"]["train/loss"]["first"] == pytest.approx(expected["loss"]["0"])
    assert main(["report", str(OLD_RUNS / name)]) == 0
    shown = capsys.readouterr().out
    assert all(finding[1] in shown for finding in expected["findings"])


@pytest.mark.parametrize("name", ["tensorboard", "nan"])
def test_the_tab_serves_them(name: str) -> None:
    multiplexer = EventMultiplexer(tensor_size_guidance={PLUGIN: 0})
    multiplexer.AddRunsFromDirectory(str(OLD_RUNS))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(OLD_RUNS))
    loaded = plugin.Loader().load(base_plugin.TBContext(data_provider=provider))
    assert loaded is not None
    routes = loaded.get_plugin_apps()

    def get(route: str, **parameters: str) -> bytes:
        response = Client(routes[route]).get(route, query_string={"run": name, **parameters})
        assert response.status_code == 200, response.text
        return response.data

    content = get("/matrix", kind="activation", stat="std")
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    values = np.frombuffer(content[4 + length :], "<f4").reshape(len(header["steps"]), header["sites"])
    expected = EXPECTED[name]
    assert header["steps"] == expected["training"]
    np.testing.assert_allclose(values[:, 0], list(expected["std"].values()), rtol=1e-6)
    unknown = get("/matrix", kind="activation", stat="kurtosis")
    start = 4 + int.from_bytes(unknown[:4], "little")
    assert np.isnan(np.frombuffer(unknown[start:], "<f4")).all()
    findings = json.loads(get("/findings"))["findings"]
    assert [finding["rule"] for finding in findings] == [finding[1] for finding in expected["findings"]]
