"""Manners: what a run is called, and what it says it was made with."""

from __future__ import annotations

import getpass
import os
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import tbhooks


def runs_in(directory: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(directory)) for file in directory.rglob("events.*"))


@pytest.mark.parametrize("given", ["runs", Path("runs"), "some/dir", Path("runs/")], ids=repr)
def test_a_directory_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tbhooks.watch(nn.Linear(1, 1), given).close()
    assert runs_in(tmp_path) == [str(given)]


def test_a_directory_that_ends_with_a_slash_holds_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        tbhooks.watch(nn.Sequential(nn.Linear(1, 1)), "runs/").close()
    found = runs_in(tmp_path)
    assert len(found) == 3, "each has a name of its own, in the same second too"
    for run in found:
        assert re.fullmatch(r"runs/Sequential-\d{8}-\d{6}(-\d)?", run)


def test_evaluations_and_wrapped_models_are_named_alike(tmp_path: Path) -> None:
    model = nn.DataParallel(nn.Linear(1, 1))
    tbhooks.watch(model, f"{tmp_path}/train/").evaluation(f"{tmp_path}/eval/").close()
    names = [re.sub(r"\d{8}-\d{6}", "*", run) for run in runs_in(tmp_path)]
    assert names == ["eval/Linear-*", "train/Linear-*"]


def test_a_wrong_argument_makes_no_run(tmp_path: Path) -> None:
    with pytest.raises(tbhooks.ArgumentError):
        tbhooks.watch(nn.Linear(1, 1), f"{tmp_path}/", every=0)
    assert not list(tmp_path.iterdir())


def test_the_environment_is_logged_once_if_asked_and_holds_nothing_private(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.float64))
    model[0].requires_grad_(requires_grad=False)
    tbhooks.watch(model, str(tmp_path), every=7, kinds=["weight", "gradient"]).environment().close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tag = "tbhooks/environment/text_summary"
    assert events.Tags()["tensors"] == [tag]
    (event,) = events.Tensors(tag)
    text = event.tensor_proto.string_val[0].decode()
    for said in (
        f"| torch | {torch.__version__} |", "| model | Sequential |", "| parameters | 11, of which 3 are trained |",
        "| dtypes | float32, float64 |", "| every | 7 |", "| kinds | gradient, weight |", "| devices | cpu (",
        f"| Python | {platform.python_version()} |", "| tbhooks | ",
    ):  # fmt: skip
        assert said in text
    private = {platform.node(), getpass.getuser(), str(Path.home()), str(tmp_path), str(Path.cwd())} - {"root", "/"}
    private |= {value for value in os.environ.values() if len(value) > 12}
    assert not [secret for secret in private if secret and secret in text]
    assert "/" not in text.replace("tbhooks/environment", "")
