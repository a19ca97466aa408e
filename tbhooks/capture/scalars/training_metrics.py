"""Training metrics for `Watch.progress`: settings of the optimizers, throughput, and peak memory, without a sync."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture.hooks.forward_event import ForwardEvent, Sizes
from tbhooks.capture.step.optimizer_round import GroupNumbers

OPTIMIZER, SPEED, MEMORY = PARTS = ("optimizer", "speed", "memory")

# The tags for each setting of a parameter group. The setting `betas` is a tuple, with a tag for each number.
SETTINGS = {
    "lr": ("lr",),
    "weight_decay": ("weight_decay",),
    "momentum": ("momentum",),
    "betas": ("beta1", "beta2", "beta3"),
}


class TrainingMetrics:
    """Optimizer settings such as the learning rate, throughput and memory, from one written step to the next."""

    def __init__(self, model: weakref.ref[nn.Module], groups: GroupNumbers, forwards: ForwardEvent) -> None:
        self._parts: frozenset[str] = frozenset()
        self._model = model
        self._forwards = forwards
        self._settings: dict[str, Tensor | float] = {}
        self._groups = groups
        self._samples = self._tokens = 0
        # The step that was written last, and when it ended.
        self._since: tuple[int, float] | None = None
        # When the running evaluation began, and how long all evaluations since the last written step took. This time is
        # not part of the time of training steps.
        self._evaluation_began: float | None = None
        self._evaluation_seconds = 0.0

    def add_parts(self, parts: frozenset[str]) -> None:
        """Adds some of `PARTS` to the metrics that are written."""
        if SPEED in parts - self._parts:
            self._forwards.subscribe(self._forward_begins, in_graph=True, reads_batch=True)
        self._parts |= parts

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Reads the settings of an optimizer, in a step that will be written."""
        if OPTIMIZER in self._parts:
            for group, name in zip(optimizer.param_groups, self._groups.of(optimizer), strict=True):
                self._settings.update(_settings(group, name))

    def numbers(self, step: int) -> dict[str, Tensor | float]:
        """Returns the metrics of the step that has just ended; throughput is that of all steps since the last call."""
        numbers = self._settings
        self._settings = {}
        if SPEED in self._parts:
            numbers |= self._speed(step, time.perf_counter())
        if MEMORY in self._parts:
            numbers |= self._memory()
        return numbers

    def _speed(self, step: int, now: float) -> dict[str, float]:
        since, self._since = self._since, (step, now)
        evaluation_seconds, self._evaluation_seconds = self._evaluation_seconds, 0.0
        samples, tokens = self._samples, self._tokens
        self._samples = self._tokens = 0
        if since is None or step <= since[0]:  # this is the first step, or the clock has restarted its count
            return {}
        seconds = max(now - since[1] - evaluation_seconds, 1e-9)
        numbers = {"train.step_seconds": seconds / (step - since[0])}
        if samples:
            numbers["train.samples_per_second"] = samples / seconds
        if tokens:
            numbers["train.tokens_per_second"] = tokens / seconds
        return numbers

    def _memory(self) -> dict[str, float]:
        model = self._model()
        parameter = None if model is None else next(model.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            return {"train.peak_memory_bytes": float(torch.cuda.max_memory_allocated(parameter.device))}
        peak = peak_rss()
        return {} if peak is None else {"train.peak_memory_bytes": peak}

    def _forward_begins(self, model: nn.Module, count: Callable[[], Sizes]) -> None:
        now = time.perf_counter()
        if not model.training:
            self._evaluation_began = now if self._evaluation_began is None else self._evaluation_began
            return
        if self._evaluation_began is not None:
            self._evaluation_seconds += now - self._evaluation_began
            self._evaluation_began = None
        samples, tokens = count()
        self._samples += samples
        self._tokens += tokens


def _settings(group: dict[str, Any], name: object) -> dict[str, Tensor | float]:
    """Returns the settings of a parameter group, by tag."""
    settings: dict[str, Tensor | float] = {}
    for setting, tags in SETTINGS.items():
        value = group.get(setting)
        for tag, number in zip(tags, value if isinstance(value, tuple | list) else (value,), strict=False):
            if isinstance(number, Tensor | float | int):
                # A scheduler may change a tensor in place before it is written.
                settings[f"train.{tag}/{name}"] = number.detach().clone() if isinstance(number, Tensor) else number
    return settings


def peak_rss() -> float | None:
    """Returns the peak resident memory of this process in bytes; None on systems that do not report it."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
