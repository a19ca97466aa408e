"""Mixed precision: which losses a GradScaler has multiplied, by what, and how many steps it has skipped.

GradScaler tells nobody, so its `scale` and `step` are wrapped while anyone listens. The wrappers pass on
what they were given and what came out of it, unchanged; they never wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tbhooks.capture import tensor_tree
from tbhooks.capture.dynamo import dynamo_disable
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.step.clock import Clock
from tbhooks.data.frame import SCALE, SKIPPED
from tbhooks.data.patching import wrapping
from tbhooks.data.self_report import Report


class Listener(Protocol):
    """Who is told. Must not raise."""

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None: ...

    def gradients_unscaled(self, optimizer: Optimizer) -> None: ...

    def scaler_steps(self, optimizer: Optimizer, scale: Tensor) -> None: ...

    def scaler_stepped(self, optimizer: Optimizer) -> None: ...


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Calls the listener from now on, whatever GradScaler does it."""
    _listeners.append(listener)
    for patch in _PATCHES:
        patch.acquire(listener)


def ignore(listener: Listener) -> None:
    """Calls it no longer. After the last one GradScaler is as it was."""
    if listener in _listeners:
        _listeners.remove(listener)
    for patch in _PATCHES:
        patch.release(listener)


@dynamo_disable
def _around_scale(wrapped: Any, scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    scaled = wrapped(*args, **kwargs)
    scale = _scale_of(scaler)
    if scale is not None:
        for _, loss in tensor_tree.tensors(scaled):
            for listener in _listeners:
                listener.loss_scaled(loss, scale)
    return scaled


@dynamo_disable
def _around_unscale(wrapped: Any, _scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    optimizer = args[0] if args else kwargs.get("optimizer")
    if isinstance(optimizer, Optimizer):
        for listener in _listeners:
            listener.gradients_unscaled(optimizer)
    return result


@dynamo_disable
def _around_step(wrapped: Any, scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    optimizer = args[0] if args else kwargs.get("optimizer")
    scale = _scale_of(scaler)
    if scale is None or not isinstance(optimizer, Optimizer):
        return wrapped(*args, **kwargs)
    for listener in _listeners:
        listener.scaler_steps(optimizer, scale)
    result = wrapped(*args, **kwargs)
    for listener in _listeners:
        listener.scaler_stepped(optimizer)
    return result


_PATCHES = [
    wrapping("torch.amp.grad_scaler", f"GradScaler.{name}", wrapper, "torch 2.9 to 2.13")
    for name, wrapper in (("scale", _around_scale), ("step", _around_step), ("unscale_", _around_unscale))
]


def _scale_of(scaler: GradScaler) -> Tensor | None:
    """The scale as it lies on the device; asking for it by `get_scale` would wait. None where scaling is off."""
    scale = getattr(scaler, "_scale", None) if scaler.is_enabled() else None
    return scale if isinstance(scale, Tensor) else None


class ScalerReader:
    """What scalers do to one watched model."""

    def __init__(
        self, observer: Observer, clock: Clock, recorder: Recorder, unscaled: Callable[[Optimizer], None],
        step_skipped: Callable[[Optimizer], None], report: Report,
    ) -> None:  # fmt: skip
        self._unscaled = unscaled  # called when the gradients of an optimizer have been divided by the scale
        self._step_skipped = step_skipped  # called when a scaler has skipped an optimizer's step
        self._observer = observer
        self._clock = clock
        self._recorder = recorder
        self._report = report
        self._met = False
        self._skipped = 0
        # Fused optimizers leave out the step on the device, and tell nobody.
        self._skipped_on_device: Tensor | None = None
        self._steps_before = 0

    @property
    def skipped(self) -> int:
        """How many steps were left out because of infinite gradients; asking may wait for the device."""
        return self._skipped + (0 if self._skipped_on_device is None else int(self._skipped_on_device))

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None:
        with self._report.guarded("reading a loss scale"):
            self._observer.watch_scaled_loss(loss, scale)

    def gradients_unscaled(self, optimizer: Optimizer) -> None:
        with self._report.guarded("after a scaler's division"):
            if self._clock.owns(optimizer):
                self._unscaled(optimizer)

    def scaler_steps(self, optimizer: Optimizer, scale: Tensor) -> None:
        with self._report.guarded("reading a loss scale"):
            self._steps_before = self._clock.optimizer_steps
            if self._observer.seen is not None and self._clock.owns(optimizer):
                self._met = True
                self._recorder.scalar(SCALE, scale)

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        with self._report.guarded("after a scaler's step"):
            if self._clock.owns(optimizer) and self._clock.optimizer_steps == self._steps_before:
                self._skipped += 1
                self._step_skipped(optimizer)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Counts a step that a fused optimizer is told to leave out, without looking whether it was."""
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            if self._skipped_on_device is None:
                self._skipped_on_device = torch.zeros_like(found)
            self._skipped_on_device += found.to(self._skipped_on_device.device)

    def log(self) -> None:
        """How many were skipped, the open step included."""
        if self._met:
            on_device = self._skipped_on_device
            self._recorder.scalar(SKIPPED, self._skipped if on_device is None else on_device + self._skipped)
