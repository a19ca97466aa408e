"""Mixed precision: the loss scale of a GradScaler, and how many steps it has skipped.

GradScaler has no hooks. So its methods `scale`, `unscale_` and `step` are wrapped while a watch is open. The wrappers
change neither arguments nor results, and never wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tbhooks.capture import tensor_tree
from tbhooks.capture.compile.dynamo import dynamo_disable
from tbhooks.capture.flight.recorder import FlightRecorder
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.step.clock import Clock
from tbhooks.data.frame import SCALE, SKIPPED
from tbhooks.data.process.patching import wrapping
from tbhooks.data.self_report import Report

_readers: list[ScalerReader] = []


@dynamo_disable
def _around_scale(wrapped: Any, scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    scaled = wrapped(*args, **kwargs)
    scale = _scale_of(scaler)
    if scale is not None:
        for _, loss in tensor_tree.tensors(scaled):
            for reader in _readers:
                reader.loss_scaled(loss, scale)
    return scaled


@dynamo_disable
def _around_unscale(wrapped: Any, _scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    optimizer = args[0] if args else kwargs.get("optimizer")
    if isinstance(optimizer, Optimizer):
        for reader in _readers:
            reader.gradients_unscaled(optimizer)
    return result


@dynamo_disable
def _around_step(wrapped: Any, scaler: GradScaler, args: Any, kwargs: Any) -> Any:
    optimizer = args[0] if args else kwargs.get("optimizer")
    scale = _scale_of(scaler)
    if scale is None or not isinstance(optimizer, Optimizer):
        return wrapped(*args, **kwargs)
    for reader in _readers:
        reader.scaler_steps(optimizer, scale)
    result = wrapped(*args, **kwargs)
    for reader in _readers:
        reader.scaler_stepped(optimizer)
    return result


_PATCHES = [
    wrapping("torch.amp.grad_scaler", f"GradScaler.{name}", wrapper, "torch 2.10 to 2.15")
    for name, wrapper in (("scale", _around_scale), ("step", _around_step), ("unscale_", _around_unscale))
]


def _scale_of(scaler: GradScaler) -> Tensor | None:
    """Returns the scale as a tensor on its device, because `get_scale` would wait; None if scaling is disabled."""
    scale = getattr(scaler, "_scale", None) if scaler.is_enabled() else None
    return scale if isinstance(scale, Tensor) else None


class ScalerReader:
    """Records the loss scale and the skipped steps of one model."""

    def __init__(
        self, observer: Observer, clock: Clock, recorder: Recorder, flight: FlightRecorder,
        unscaled: Callable[[Optimizer], None],
        step_skipped: Callable[[Optimizer], None], report: Report,
    ) -> None:  # fmt: skip
        self._unscaled = unscaled  # called when the gradients of an optimizer have been divided by the scale
        self._step_skipped = step_skipped  # called when a GradScaler has skipped an optimizer's step
        self._observer = observer
        self._clock = clock
        self._recorder = recorder
        self._flight = flight
        self._report = report
        self._is_used = False
        self._skipped = 0
        # Fused optimizers skip a step on the device. These steps are counted there.
        self._skipped_on_device: Tensor | None = None
        self._steps_before = 0

    def start(self) -> None:
        """Wraps the methods of GradScaler, for all its instances."""
        _readers.append(self)
        for patch in _PATCHES:
            patch.acquire(self)

    def stop(self) -> None:
        """Removes the wrappers if no other watch needs them."""
        if self in _readers:
            _readers.remove(self)
        for patch in _PATCHES:
            patch.release(self)

    @property
    def skipped(self) -> int:
        """How many steps were skipped because gradients were not finite. May wait for the device."""
        return self._skipped + (0 if self._skipped_on_device is None else int(self._skipped_on_device))

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None:
        with self._report.guarded("reading a loss scale"):
            self._observer.watch_scaled_loss(loss, scale)

    def gradients_unscaled(self, optimizer: Optimizer) -> None:
        with self._report.guarded("after GradScaler.unscale_"):
            if self._clock.owns(optimizer):
                self._unscaled(optimizer)

    def scaler_steps(self, optimizer: Optimizer, scale: Tensor) -> None:
        with self._report.guarded("reading a loss scale"):
            self._steps_before = self._clock.optimizer_steps
            if self._flight.is_on and self._clock.owns(optimizer):
                self._flight.on_scale(scale, self._clock.count)
            if self._observer.seen is not None and self._clock.owns(optimizer):
                self._is_used = True
                self._recorder.scalar(SCALE, scale)

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        with self._report.guarded("after GradScaler.step"):
            if self._clock.owns(optimizer) and self._clock.optimizer_steps == self._steps_before:
                self._skipped += 1
                self._step_skipped(optimizer)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Counts, on the device, a step that a fused optimizer will skip."""
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            if self._skipped_on_device is None:
                self._skipped_on_device = torch.zeros_like(found_inf)
            self._skipped_on_device += found_inf.to(self._skipped_on_device.device)

    def log(self) -> None:
        """Records how many steps were skipped, including the open one."""
        if self._is_used:
            on_device = self._skipped_on_device
            self._recorder.scalar(SKIPPED, self._skipped if on_device is None else on_device + self._skipped)
