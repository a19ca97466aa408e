"""What tbhooks does has a name in traces, and `profile` writes one of chosen steps."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import tbhooks
from tbhooks.capture import autograd
from tests.support import zoo


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, w: tbhooks.Watch | None = None) -> None:
    for _ in range(steps):
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        optimizer.step()
        torch.zeros(1).cos()
        if w is not None:
            w.log({"loss": loss})


def events_of(file: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def times(events: list[dict[str, Any]], name: str) -> int:
    return Counter(event["name"] for event in events)[name]


def test_what_tbhooks_does_has_a_name_in_traces_of_others() -> None:
    model, optimizer = made()
    with tbhooks.watch(model, every=2, kinds=["activation", "gradient", "input", "weight", "update"]) as w:
        train(model, optimizer, 1, w)
        with profile() as profiler:
            train(model, optimizer, 2, w)
    counted = Counter(event.name for event in profiler.events())
    assert counted["tbhooks::activation"] == 4, "three modules and the root, in the one logged step"
    assert counted["tbhooks::input"] == 4
    assert counted["tbhooks::gradient"] == 3, "the root's output is the last module's"
    assert counted["tbhooks::parameters"] == 2, "before and after the optimizer's step"
    assert counted["tbhooks::step"] == counted["tbhooks::log"] == 2
    assert counted["tbhooks::copy"] == 1


def test_without_a_profiler_no_label_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made_labels: list[str] = []
    monkeypatch.setattr(autograd, "_Label", lambda name: made_labels.append(name) or autograd._NOTHING)
    model, optimizer = made()
    with tbhooks.watch(model, every=1) as w:
        train(model, optimizer, 2, w)
        assert made_labels == []
        with profile():
            train(model, optimizer, 1, w)
    assert made_labels


def test_a_trace_of_the_steps_asked_for_lies_beside_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    with caplog.at_level(logging.INFO, "tbhooks"):
        w = tbhooks.watch(model, str(tmp_path), every=2).profile(steps=(3, 5))
        train(model, optimizer, 9)
        assert not autograd.is_profiled()
        w.close()
    (file,) = (tmp_path / "tbhooks-profile").iterdir()
    assert file.name == "steps-3-5.pt.trace.json.gz"
    (said,) = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert str(file) in said
    assert "ui.perfetto.dev" in said
    assert "chrome://tracing" in said
    events = events_of(file)
    assert times(events, "aten::linear") == 3 * 2, "the user's own operations, of three steps"
    assert times(events, "Optimizer.step#SGD.step") == 3
    assert times(events, "tbhooks::activation") == 4, "of step 4, which is logged"
    assert times(events, "tbhooks::copy") == 1
    assert times(events, "aten::cos") == 4, "and what is between the step before, those, and the next forward"
    assert w.stats.errors == 0


def test_steps_are_counted_by_whatever_ends_them(tmp_path: Path) -> None:
    model, _ = made()
    w = tbhooks.watch(model, str(tmp_path), every=100, step="manual").profile(steps=(0, 1)).profile(steps=(3, 3))
    for step in range(6):
        for _ in range(step + 1):
            model(torch.ones(4, 3))
        w.step()
    w.close()
    counts = {file.name[:9]: times(events_of(file), "aten::relu") for file in (tmp_path / "tbhooks-profile").iterdir()}
    assert counts == {"steps-0-1": 3, "steps-3-3": 4}


def test_a_watch_that_closes_before_writes_what_there_is(tmp_path: Path) -> None:
    model, optimizer = made()
    w = tbhooks.watch(model, str(tmp_path)).profile(steps=(1, 100))
    train(model, optimizer, 4)
    w.close()
    assert not autograd.is_profiled()
    (file,) = (tmp_path / "tbhooks-profile").iterdir()
    assert file.name == "steps-1-3.pt.trace.json.gz"
    assert times(events_of(file), "aten::linear") == 3 * 2


def test_a_profiler_that_runs_already_is_left_alone_and_that_is_reported(tmp_path: Path) -> None:
    model, optimizer = made()
    w = tbhooks.watch(model, str(tmp_path)).profile(steps=(1, 2))
    with profile() as theirs:
        train(model, optimizer, 4)
    w.close()
    assert times([{"name": event.name} for event in theirs.events()], "aten::linear") == 8
    assert not (tmp_path / "tbhooks-profile").exists()
    assert [message for message in w.stats.messages if "another profiler is already running" in message]


def test_a_step_that_raises_leaves_no_profiler_running(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(ZeroDivisionError), tbhooks.watch(model, str(tmp_path)).profile(steps=(1, 9)):
        train(model, optimizer, 3)
        _ = 1 / 0
    assert not autograd.is_profiled()


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    case, made_ = zoo.ZOO["cnn"], []

    def before(model: nn.Module) -> nn.Module:
        made_.append(tbhooks.watch(model, str(tmp_path), every=2).profile(steps=(1, 2)))
        return model

    assert zoo.train(case, 4, before=before) == zoo.train(case, 4)
    made_[0].close()
    assert list((tmp_path / "tbhooks-profile").iterdir())


@pytest.mark.parametrize("steps", [5, None, (1,), (1, 2, 3), "12", (3, 1), (-1, 2), (0, 1.5), (True, 2)])
def test_bad_steps_are_refused_at_once(tmp_path: Path, steps: Any) -> None:
    with tbhooks.watch(nn.Linear(1, 1), str(tmp_path)) as w, pytest.raises(tbhooks.ArgumentError):
        w.profile(steps=steps)


def test_steps_that_are_over_and_runs_without_a_place_are_refused() -> None:
    model, optimizer = made()
    with tbhooks.watch(model) as w:
        with pytest.raises(tbhooks.ArgumentError, match=re.escape("give watch() a local directory")):
            w.profile(steps=(1, 2))
        train(model, optimizer, 3)
        with pytest.raises(tbhooks.ArgumentError, match="current step of this watch, 3"):
            w.profile(steps=(2, 4))


def test_compiled_models_have_the_labels_of_their_operators(tmp_path: Path) -> None:
    model, optimizer = made()
    w = tbhooks.watch(model, str(tmp_path), every=1).profile(steps=(1, 1))
    train(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, 3)
    w.close()
    (file,) = (tmp_path / "tbhooks-profile").iterdir()
    assert times(events_of(file), "tbhooks::observe") >= 4
    assert times(events_of(file), "tbhooks::parameters") == 2
    assert w.stats.errors == 0


@pytest.mark.parametrize("steps_before", [1, 2], ids=["ends inside", "has just ended"])
def test_a_pause_leaves_no_hook_where_a_profile_ends(tmp_path: Path, steps_before: int) -> None:
    model, optimizer = made()
    with tbhooks.watch(model, str(tmp_path), every=10).profile((0, 1)) as w:
        train(model, optimizer, steps_before)
        with w.paused():
            train(model, optimizer, 2 - steps_before)
            assert zoo.hook_count(model) == 0
    assert [file.name for file in (tmp_path / "tbhooks-profile").iterdir()] == ["steps-0-1.pt.trace.json.gz"]
