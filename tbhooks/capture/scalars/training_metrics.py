"""How training goes, besides its numbers: what optimizers are set to, how fast steps are, how much memory they take.

All of it is known on the host: nothing is read from a device, and nothing waited for.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import in_backward
from tbhooks.capture.dynamo import dynamo_skip
from tbhooks.capture.hooks.hook_types import BatchHook, Sizes
from tbhooks.capture.hooks.manager import hook_root
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.data.self_report import Report

OPTIMIZER, SPEED, MEMORY = PARTS = ("optimizer", "speed", "memory")

# How a setting of a parameter group is called in a tag; of several numbers, each by its own name.
SETTINGS = {
    "lr": ("lr",),
    "weight_decay": ("weight_decay",),
    "momentum": ("momentum",),
    "betas": ("beta1", "beta2", "beta3"),
}


class Progress:
    """Counts what passes through a model between two written steps."""

    def __init__(self, model: weakref.ref[nn.Module], groups: GroupNumbers, report: Report) -> None:
        self.parts: frozenset[str] = frozenset()
        self._model = model
        self._report = report
        self._root: RemovableHandle | None = None
        self._settings: dict[str, Tensor | float] = {}
        self._groups = groups
        self._samples = self._tokens = 0
        # The step written last, and when it ended.
        self._since: tuple[int, float] | None = None
        # When an evaluation began, and how long all took since then: they are no part of a step's time.
        self._aside: float | None = None
        self._seconds_aside = 0.0

    def start(self) -> None:
        model = self._model()
        if self._root is None and model is not None and SPEED in self.parts:
            self._root = hook_root(model, BatchHook(self._forward_begins))

    def stop(self) -> None:
        if self._root is not None:
            self._root.remove()
            self._root = None

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Its settings, of a step that will be written."""
        if OPTIMIZER in self.parts:
            for group, name in zip(optimizer.param_groups, self._groups.of(optimizer), strict=True):
                self._settings.update(_settings(group, name))

    def numbers(self, step: int) -> dict[str, Tensor | float]:
        """What there is to tell of a step that has just ended, and of those since the one told of last."""
        numbers = self._settings
        self._settings = {}
        if SPEED in self.parts:
            numbers |= self._speed(step, time.perf_counter())
        if MEMORY in self.parts:
            numbers |= self._memory()
        return numbers

    def _speed(self, step: int, now: float) -> dict[str, float]:
        since, self._since = self._since, (step, now)
        aside, self._seconds_aside = self._seconds_aside, 0.0
        samples, tokens = self._samples, self._tokens
        self._samples = self._tokens = 0
        if since is None or step <= since[0]:  # where counting began anew, there is nothing to measure from
            return {}
        seconds = max(now - since[1] - aside, 1e-9)
        told = {"train.step_seconds": seconds / (step - since[0])}
        if samples:
            told["train.samples_per_second"] = samples / seconds
        if tokens:
            told["train.tokens_per_second"] = tokens / seconds
        return told

    def _memory(self) -> dict[str, float]:
        model = self._model()
        parameter = None if model is None else next(model.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            return {"train.peak_memory_bytes": float(torch.cuda.max_memory_allocated(parameter.device))}
        peak = peak_rss()
        return {} if peak is None else {"train.peak_memory_bytes": peak}

    @dynamo_skip
    def _forward_begins(self, count: Callable[[], Sizes]) -> None:
        with self._report.guarded("before the model's forward"):
            model = self._model()
            if model is None or in_backward():
                return
            now = time.perf_counter()
            if not model.training:
                self._aside = now if self._aside is None else self._aside
                return
            if self._aside is not None:
                self._seconds_aside, self._aside = self._seconds_aside + now - self._aside, None
            samples, tokens = count()
            self._samples += samples
            self._tokens += tokens


def _settings(group: dict[str, Any], name: object) -> dict[str, Tensor | float]:
    found: dict[str, Tensor | float] = {}
    for setting, tags in SETTINGS.items():
        value = group.get(setting)
        for tag, number in zip(tags, value if isinstance(value, tuple | list) else (value,), strict=False):
            if isinstance(number, Tensor | float | int):
                # A scheduler may change a tensor in place before it is written.
                found[f"train.{tag}/{name}"] = number.detach().clone() if isinstance(number, Tensor) else number
    return found


def peak_rss() -> float | None:
    """The most memory this process has had, in bytes; None where the system does not say."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
