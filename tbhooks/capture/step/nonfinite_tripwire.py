"""Finds the step at which gradients were first not finite, even if that step was not logged.

Before every optimizer step the smallest and the largest value of one small gradient are stored on the device. They are
evaluated there at the next logged step, without a sync. Extremes are used because a sum of large finite values may
overflow; if there is a NaN, both are NaN. One gradient is enough: a NaN in the loss or in the backward of any layer
reaches the gradients of all layers before it, so a parameter of the first layers is read. A NaN that does not reach it
is found one step later, when the weights are NaN.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from tbhooks.capture import sharded_tensors
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.frame import NONFINITE_SINCE

# The smallest gradient of the first so many parameters that have one is read.
CANDIDATES = 16
# For so many steps the extremes are stored before they are evaluated.
MOST_STEPS = 1024
# The views of so many of them are made at once, when they are needed.
PREPARED = 64
NEVER = -1


class Tripwire:
    """Stores the extremes of one gradient in every step, and records the first step in which they are not finite."""

    def __init__(self) -> None:
        self._extremes: Tensor | None = None
        # Views of the two numbers of each step, made only once.
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._used = 0
        self._first_step = 0
        self._last_step = NEVER
        # Where each optimizer has the parameter whose gradient is read: the numbers of its group and in its group.
        self._chosen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        # Two tensors on the device, each with a step or NEVER. The first non-finite step since the last logged one:
        self._since: Tensor | None = None
        self._never: Tensor | None = None
        # If the newest step is not finite, the first of the non-finite steps before it without a finite one in between:
        self._ongoing_since: Tensor | None = None

    def check(self, optimizer: Optimizer, step: int) -> None:
        """Stores the extremes of a gradient. To be called before each of the optimizer's steps."""
        if step == self._last_step:
            return  # another optimizer of the same step
        gradient = self._gradient(optimizer)
        gradient = None if gradient is None else sharded_tensors.local_tensor(gradient)
        if gradient is None or not gradient.numel():
            return
        with torch.no_grad() if gradient.requires_grad else contextlib.nullcontext():
            values = gradient if gradient.dtype.itemsize > 1 else gradient.float()  # float8 has no reductions
            stored = self._extremes
            if stored is None or stored.device != values.device or stored.dtype != values.dtype:
                self._allocate(values)
            if self._used == MOST_STEPS or step != self._first_step + self._used:
                self._evaluate()
                self._first_step = step
            if self._used == len(self._slots):
                self._make_slots()
            low, high = self._slots[self._used]
            _store_extremes(values, low, high)
            found_inf = getattr(optimizer, "found_inf", None)
            if isinstance(found_inf, Tensor):  # set by a GradScaler: the fused optimizer skips this step
                is_skipped = found_inf.to(low.device).reshape(()) > 0
                for number in (low, high):
                    number.masked_fill_(is_skipped, 0.0)
        self._used += 1
        self._last_step = step

    def log(self, recorder: Recorder) -> None:
        """Records the first non-finite step. It stays the same in later logged steps, until a step is finite."""
        if self._since is not None and self._used:
            self._evaluate()
            recorder.scalar(NONFINITE_SINCE, self._since)
            self._since = self._never

    def _allocate(self, like: Tensor) -> None:
        """Allocates the buffer for gradients of this device and dtype. What was found so far is kept."""
        self._evaluate()
        with torch.inference_mode(False):
            self._extremes = like.detach().new_zeros(MOST_STEPS, 2)
            self._never = never = like.detach().new_full((), NEVER, dtype=torch.int64)
        self._slots = []
        self._make_slots()
        self._since = never if self._since is None else self._since.to(like.device)
        self._ongoing_since = never if self._ongoing_since is None else self._ongoing_since.to(like.device)

    def _gradient(self, optimizer: Optimizer) -> Tensor | None:
        """Returns the gradient to be read: that of the same parameter as before, as long as it has one."""
        gradient = _gradient_at(optimizer, self._chosen.get(optimizer))
        if gradient is None:
            place = _smallest_gradient(optimizer)
            gradient = _gradient_at(optimizer, place)
            if place is not None:
                self._chosen[optimizer] = place
        return gradient

    def _make_slots(self) -> None:
        if self._extremes is not None:
            known = len(self._slots)
            with torch.inference_mode(False):
                columns = self._extremes[known : known + PREPARED].unbind(1)
                self._slots += zip(*(column.unbind() for column in columns), strict=True)

    def _evaluate(self) -> None:
        """Updates `_since` and `_ongoing_since` from the stored extremes, on the device, and empties the buffer."""
        stored, since, ongoing, never = self._extremes, self._since, self._ongoing_since, self._never
        if self._used and stored is not None and since is not None and ongoing is not None and never is not None:
            with torch.no_grad():
                extremes = stored[: self._used]
                if extremes.is_cpu and bool(extremes.sum().isfinite()):  # no sync is needed to know that all are
                    self._ongoing_since = never
                else:  # or the sum has overflowed
                    bad = extremes.isfinite().all(dim=1).logical_not()
                    first = bad.to(torch.int32).argmax() + self._first_step
                    first = torch.where(bad[0] & (ongoing >= 0), ongoing, first)
                    self._since = torch.where(bad.any() & (since < 0), first, since)
                    self._ongoing_since = torch.where(bad[-1], self._since, never)
        self._first_step += self._used
        self._used = 0


def _store_extremes(values: Tensor, low: Tensor, high: Tensor) -> None:
    """Writes the smallest and the largest value, in one pass and without an intermediate that could overflow."""
    try:
        torch.aminmax(values, out=(low, high))
    except (NotImplementedError, RuntimeError):  # some backends lack aminmax; the norm is as exact, but slower on a CPU
        high.copy_(torch.linalg.vector_norm(values, math.inf))
        low.copy_(high)


def _gradient_at(optimizer: Optimizer, place: tuple[int, int] | None) -> Tensor | None:
    """Returns the gradient of the parameter at this place; None if it has none that can be read."""
    if place is None:
        return None
    group, number = place
    try:
        gradient: Tensor | None = optimizer.param_groups[group]["params"][number].grad
    except IndexError:  # there are fewer parameters now
        return None
    return gradient if gradient is not None and _can_be_read(gradient) else None


def _can_be_read(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel() > 0


def _smallest_gradient(optimizer: Optimizer) -> tuple[int, int] | None:
    """Returns the place of the smallest gradient of the first parameters that have one."""
    places = (
        (parameter.grad.numel(), group, number)
        for group, members in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(members["params"])
        if parameter.grad is not None and _can_be_read(parameter.grad)
    )
    smallest = min(itertools.islice(places, CANDIDATES), default=None)
    return None if smallest is None else smallest[1:]
