"""A function as a writer, several writers at once, and writers reported by what they are."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import tbhooks
from tbhooks.data.frame import Frame
from tests.support.frames import scalar_series
from tests.support.loops import mlp, steps_of, train


class Callable:
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def __call__(self, frame: Frame) -> None:
        self.frames.append(frame)


def test_a_function_gets_every_frame_beside_other_writers(tmp_path: Path) -> None:
    model, seen, memory, callable_ = mlp(), [], tbhooks.MemorySink(), Callable()
    writers = [seen.append, lambda frame: seen.extend([frame]), memory, tmp_path / "run", callable_,
               tbhooks.JsonlSink(tmp_path / "frames.jsonl"), partial(Callable.__call__, callable_)]  # fmt: skip
    with tbhooks.watch(model, writers, every=2) as watching:
        train(model, 5)
    assert watching.stats.errors == 0
    assert steps_of(memory.frames) == [0, 2, 4]
    assert steps_of(seen) == steps_of(callable_.frames) == [0, 0, 2, 2, 4, 4]
    assert seen[0] is memory.frames[0]
    assert list(scalar_series(tmp_path / "run", "activation.mean/0")) == [0, 2, 4]


def test_a_function_that_fails_is_counted_and_training_goes_on() -> None:
    def fail(frame: Frame) -> None:
        raise ValueError("mine")

    model = mlp()
    with tbhooks.watch(model, fail, every=1) as watching:
        train(model, 2)
    assert watching.stats.errors == 2
    assert "mine" in " ".join(watching.stats.messages)


def stranger(package: str, name: str = "Run") -> Any:
    return type(name, (), {"__module__": package})()


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param(nn.ReLU(), id="a module of the model"),
        pytest.param(tbhooks.MemorySink, id="a class"),
        pytest.param(ModuleType("json"), id="another module"),
        pytest.param(stranger("wandb.sdk.table", "Table"), id="something else of wandb"),
        pytest.param(stranger("marathon"), id="somebody else's run"),
        pytest.param(b"runs", id="bytes"),
    ],
)
def test_what_is_no_writer_is_refused_with_all_that_is(writer: Any) -> None:
    accepted = r"a run of wandb, mlflow, aim, trackio or swanlab .* a function that takes a frame"
    with pytest.raises(tbhooks.ArgumentError, match=accepted):
        tbhooks.watch(mlp(), writer)


@pytest.mark.parametrize("package", ["wandb", "mlflow", "aim"])
def test_a_run_is_known_by_its_name_and_nothing_is_imported_for_others(package: str) -> None:
    from tbhooks.api.writers import _sink_class

    expected = f"{package}:{package.capitalize()}Sink"
    assert _sink_class(stranger(f"{package}.sdk.run")) == expected
    assert _sink_class(type("Mine", (type(stranger(f"{package}.sdk.run")),), {"__module__": "mine"})()) == expected
    assert _sink_class(ModuleType(package)) == (None if package == "aim" else expected)
    assert _sink_class("wandb") == "tensorboard:TensorBoardSink", "a directory"


def test_sinks_of_trackers_are_there_without_their_packages() -> None:
    assert {"WandbSink", "MlflowSink", "AimSink"} <= set(dir(tbhooks))
    before = set(sys.modules)
    assert tbhooks.AimSink.__module__ == "tbhooks.sinks.aim"
    assert tbhooks.MlflowSink.__module__ == "tbhooks.sinks.mlflow"
    assert tbhooks.WandbSink.__module__ == "tbhooks.sinks.wandb"
    assert not {"mlflow", "aim"} & (set(sys.modules) - before)
