"""Short runs of training and evaluation, and what an unwatched model was given and returned in its evaluations.

A run is written as a string: `f` a training forward and backward, `s` the optimizer's step, `t` both, `e` one batch
of an evaluation. What it should show is kept by plain hooks, in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tbhooks import MemorySink
from tbhooks.capture.tensor_tree import inputs, tensors
from tbhooks.data.frame import ROOT, Frame
from tests.support import float64_recorder, reference, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import steps_of


class Net(nn.Module):
    """What differs in evaluation: a BatchNorm and a Dropout. And an operation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


PATHS = ("first", "norm", "drop", "last", ROOT)


class Kept:
    """Everything the modules of an unwatched model are given and return in evaluation, between training passes."""

    def __init__(self, model: Net) -> None:
        self.evaluations: list[tuple[int, float64_recorder.Step]] = []
        self._model, self._steps, self._open = model, 0, False
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._pre(name or ROOT), with_kwargs=True)
            module.register_forward_hook(self._post(name or ROOT))

    def step(self) -> None:
        self._steps += 1

    def _pre(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if path == ROOT and self._model.training:
                self._open = False
            for index, tensor in inputs(args, kwargs):
                self._keep(path + index, "eval.input", tensor)

        return hook

    def _post(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for index, tensor in tensors(output):
                self._keep(path + index, "eval.activation", tensor)
                if path == "norm":
                    self._keep("(root):relu", "eval.functional", torch.maximum(tensor, torch.zeros(())))

        return hook

    def _keep(self, name: str, kind: str, tensor: Tensor) -> None:
        if self._model.training:
            return
        if not self._open:
            self.evaluations.append((max(self._steps - 1, 0), {}))
            self._open = True
        seen = self.evaluations[-1][1]
        seen[name, kind] = np.append(seen.get((name, kind), []), reference.to_numpy(tensor).ravel())


@dataclass
class Run:
    """One run: its model and optimizer, the watch or recorder, and the bits of its results."""

    model: Net
    optimizer: torch.optim.Optimizer
    watcher: Any = None
    results: list[bytes] = field(default_factory=list)
    guard: Callable[[], Any] = torch.no_grad
    called: Any = None
    """What is called: the model itself, or something around it."""
    data: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    other_data: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(2))

    def do(self, script: str, after: Callable[[str], Any] = lambda event: None) -> Run:
        for event in script.replace("t", "fs"):
            getattr(self, {"f": "forward", "s": "step", "e": "evaluate"}[event])()
            after(event)
        return self

    def forward(self) -> None:
        self.model.train()
        loss = self.called(torch.randn(6, 4, generator=self.data)).square().mean()
        loss.backward()
        self.results.append(zoo.raw(loss))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.watcher, Kept):
            self.watcher.step()

    def evaluate(self) -> None:
        self.model.eval()
        with self.guard():
            self.results.append(zoo.raw(self.called(torch.randn(5, 4, generator=self.other_data))))

    def bits(self) -> tuple[list[bytes], list[bytes], bytes]:
        kept = [zoo.raw(tensor) for tensor in self.model.state_dict().values()]
        return self.results, kept, zoo.raw(torch.get_rng_state())


def start(begin: Callable[[Net], Any] = lambda model: None, **options: Any) -> Run:
    torch.manual_seed(0)
    model = Net()
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **{"called": model, **options})
    run.watcher = begin(model)
    return run


def split(history: Any) -> tuple[list[Frame], list[Frame]]:
    return [f for f in history if not f.is_evaluation], [f for f in history if f.is_evaluation]


def assert_evaluations(
    found: list[Frame], kept: list[tuple[int, float64_recorder.Step]], kinds: tuple[str, ...]
) -> None:
    assert steps_of(found) == [label for label, _ in kept]
    for frame, (_, step) in zip(found, kept, strict=True):
        float64_recorder.assert_frame_equals(
            frame, {key: x for key, x in step.items() if key[1].removeprefix("eval.") in kinds}
        )


def watched(script: str, writer: Any = None, evaluate: bool = True, guard: Any = torch.no_grad, **options: Any) -> Run:
    """A watched run that is not closed."""
    run = start(lambda model: tbhooks.watch(model, writer, **{"every": 1, **options}), guard=guard)
    if evaluate:
        assert run.watcher.evaluation() is run.watcher
    return run.do(script)


def closed(run: Run) -> tuple[list[Frame], list[Frame]]:
    """Its training frames and its evaluations, and nothing went wrong."""
    run.watcher.close()
    assert (run.watcher.stats.errors, run.watcher.stats.dropped) == (0, 0), run.watcher.stats.messages
    return split(run.watcher.history)


def expected_training(script: str) -> list[float64_recorder.Step]:
    run = start(Float64Recorder).do(script.replace("e", ""))
    run.watcher.close()
    return run.watcher.steps


class Slow(MemorySink):
    """A sink that keeps the queue waiting."""

    def write(self, frame: Frame) -> None:
        time.sleep(0.2)
        super().write(frame)


def on_modules(model: nn.Module) -> list[int]:
    """How many hooks each module has."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def freeze(part: nn.Module, training: bool) -> None:
    """Has a part of a model stay in one mode."""
    part.training, part.train = training, lambda mode=True: part  # type: ignore[method-assign,assignment,misc]
