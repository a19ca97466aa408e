"""The step at which gradients first went non-finite, known even if that step was not logged.

Before every optimizer step the sum of one small gradient is put aside on the device; what was put aside is
looked at with the next copy. NaN in a loss or in any layer's backward reaches the gradients of the layers
before it, so one of the first is enough; what it misses shows a step later, when the weights have it. No sync.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from tbhooks import shards
from tbhooks.buffer import Recorder
from tbhooks.frame import NONFINITE_SINCE

# The smallest of the first parameters that have a gradient is read.
LOOKED_AT = 16
# So many steps may lie between two looks at what was put aside.
MOST_STEPS = 1024
NEVER = -1


class Tripwire:
    """Watches the optimizers of one model."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._slots: tuple[Tensor, ...] = ()
        self._used = 0
        self._first_step = 0
        self._last_step = NEVER
        self._since: Tensor | None = None
        """On the device: the step, or NEVER."""

    def look(self, optimizer: Optimizer, step: int) -> None:
        """To be called before each of the optimizer's steps."""
        if step == self._last_step:
            return  # another optimizer of the same step
        gradient = _small_gradient(optimizer)
        gradient = None if gradient is None else shards.here(gradient)
        if gradient is None:
            return
        if self._sums is None or self._sums.device != gradient.device:
            self._prepare(gradient)
        if self._used == MOST_STEPS or step != self._first_step + self._used:
            self._look_back()
            self._first_step = step
        with torch.no_grad():
            slot = self._slots[self._used]
            torch.sum(gradient, tuple(range(gradient.dim())), dtype=torch.float32, out=slot)
            handled = getattr(optimizer, "found_inf", None)
            if isinstance(handled, Tensor):  # a fused optimizer leaves this step out
                slot.masked_fill_(handled.to(slot.device).reshape(()) > 0, 0.0)
        self._used += 1
        self._last_step = step

    def log(self, recorder: Recorder) -> None:
        """Puts the step into the open one's copy, and starts anew."""
        if self._since is not None and self._used:
            self._look_back()
            recorder.scalar(NONFINITE_SINCE, self._since)
            self._since = torch.full_like(self._since, NEVER)

    def _prepare(self, gradient: Tensor) -> None:
        with torch.inference_mode(False):
            self._sums = gradient.detach().new_zeros(MOST_STEPS, dtype=torch.float32)
            self._since = gradient.detach().new_full((), NEVER, dtype=torch.float32)
        self._slots = self._sums.unbind()
        self._used = 0

    def _look_back(self) -> None:
        if self._used and self._sums is not None and self._since is not None:
            with torch.no_grad():
                bad = self._sums[: self._used].isfinite().logical_not()
                found = bad.any() & (self._since < 0)
                step = bad.to(torch.float32).argmax() + self._first_step
                self._since = torch.where(found, step.to(self._since.dtype), self._since)
        self._first_step += self._used
        self._used = 0


def _small_gradient(optimizer: Optimizer) -> Tensor | None:
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.is_floating_point():
                found.append(gradient)
            if len(found) == LOOKED_AT:
                return min(found, key=Tensor.numel)
    return min(found, key=Tensor.numel, default=None)
