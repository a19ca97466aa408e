"""CONTRIBUTING.md lists the way of one activation from its hook to the event file: a tracer follows it."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.reduction import cpu

PACKAGE = Path(tbhooks.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_STOPS = 15
# Context managers and callbacks around the way, which carry no number; the hook in C, which reads most tensors itself.
ASIDE = {"data/self_report.py", "capture/autograd.py", "capture/hooks/eager_hooks.py"}

Stop = tuple[str, str]
"""A file of the package and the qualified name of a function in it."""


def listed_stops() -> list[Stop]:
    """The numbered list under "Walk one number": each line begins with a file and a function."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("## Walk one number")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", section, flags=re.MULTILINE)


@dataclass
class Tracer:
    """Notes each call of the package's functions with the calls of the package around it."""

    calls: list[tuple[Stop, list[Stop]]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and is_ours(frame):
            around = []
            outer: FrameType | None = frame
            while outer is not None:
                if is_ours(outer):
                    around.append(stop(outer))
                outer = outer.f_back
            self.calls.append((around[0], around))


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{PACKAGE}/")


def stop(frame: FrameType) -> Stop:
    return str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), frame.f_code.co_qualname


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Tracer:
    """One logged step of a model with one layer, from its forward to the file."""
    if cpu.library is None:
        pytest.skip("the way through the C kernel: there is no compiler here")
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer = Tracer()
    threading.setprofile(tracer)  # of the threads that start from here on
    try:
        watching = tbhooks.watch(model, tmp_path_factory.mktemp("run"), every=1, kinds=("activation",))
        sys.setprofile(tracer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.step()  # of the next step: the first one is submitted
        sys.setprofile(None)
        watching.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return tracer


def test_the_list_has_few_stops_that_exist() -> None:
    stops = listed_stops()
    assert 5 < len(stops) <= MOST_STOPS
    assert all((PACKAGE / file).is_file() for file, _ in stops)


def test_the_number_passes_the_stops_in_the_order_of_the_list(traced: Tracer) -> None:
    called = [call for call, _ in traced.calls]
    position = 0
    for each in listed_stops():
        assert each in called[position:], f"{each} is not called after the stop before it"
        position = called.index(each, position)


def test_no_file_lies_between_the_stops_that_is_not_listed(traced: Tracer) -> None:
    stops = listed_stops()
    files = {file for file, _ in stops} | ASIDE
    for each in stops:
        around = next(around for call, around in traced.calls if call == each)
        assert not {file for file, _ in around} - files, f"on the way to {each}"
