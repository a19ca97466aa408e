"""The step at which gradients first went non-finite, known even if that step was not logged.

Before every optimizer step the smallest and the largest value of one small gradient are put aside on the device;
what was put aside is looked at with the next copy. The extremes are exact, where a sum of large finite values would
overflow, and NaN shows in both. NaN in a loss or in any layer's backward reaches the gradients of the layers before
it, so one of the first is enough; what it misses shows a step later, when the weights have it. No sync.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from tbhooks.capture import sharded_tensors
from tbhooks.capture.recorder import Recorder
from tbhooks.data.frame import NONFINITE_SINCE

# The smallest of the first parameters that have a gradient is read.
LOOKED_AT = 16
# So many steps may lie between two looks at what was put aside.
MOST_STEPS = 1024
NEVER = -1


class Tripwire:
    """Watches the optimizers of one model."""

    def __init__(self) -> None:
        self._extremes: Tensor | None = None
        # A view of each number in it, made once: a step is not to make any.
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._used = 0
        self._first_step = 0
        self._last_step = NEVER
        # On the device, each a step or NEVER: the first non-finite one of the steps since the last logged step, and
        # where the trouble began that the newest step looked at still has.
        self._since: Tensor | None = None
        self._lasting: Tensor | None = None

    def look(self, optimizer: Optimizer, step: int) -> None:
        """To be called before each of the optimizer's steps."""
        if step == self._last_step:
            return  # another optimizer of the same step
        gradient = _small_gradient(optimizer)
        gradient = None if gradient is None else sharded_tensors.local_tensor(gradient)
        if gradient is None or not gradient.numel():
            return
        with torch.no_grad():
            numbers = gradient if gradient.dtype.itemsize > 1 else gradient.float()  # float8 has no reductions
            if not self._has_room_for(numbers):
                self._prepare(numbers)
            if self._used == MOST_STEPS or step != self._first_step + self._used:
                self._look_back()
                self._first_step = step
            low, high = self._slots[self._used]
            _put_extremes(numbers, low, high)
            handled = getattr(optimizer, "found_inf", None)
            if isinstance(handled, Tensor):  # a fused optimizer leaves this step out
                is_left_out = handled.to(low.device).reshape(()) > 0
                for number in (low, high):
                    number.masked_fill_(is_left_out, 0.0)
        self._used += 1
        self._last_step = step

    def log(self, recorder: Recorder) -> None:
        """Puts the step into the open one's copy: as long as the trouble lasts, always the one it began at."""
        if self._since is not None and self._used:
            self._look_back()
            recorder.scalar(NONFINITE_SINCE, self._since)
            self._since = torch.full_like(self._since, NEVER)

    def _has_room_for(self, numbers: Tensor) -> bool:
        room = self._extremes
        return room is not None and room.device == numbers.device and room.dtype == numbers.dtype

    def _prepare(self, like: Tensor) -> None:
        """Room for the extremes of gradients of this format; what is known so far stays known."""
        self._look_back()
        with torch.inference_mode(False):
            self._extremes = like.detach().new_zeros(MOST_STEPS, 2)
            never = like.detach().new_full((), NEVER, dtype=torch.int64)
        self._slots = list(zip(*(column.unbind() for column in self._extremes.unbind(1)), strict=True))
        self._since = never if self._since is None else self._since.to(like.device)
        self._lasting = never if self._lasting is None else self._lasting.to(like.device)

    def _look_back(self) -> None:
        if self._used and self._extremes is not None and self._since is not None and self._lasting is not None:
            with torch.no_grad():
                bad = self._extremes[: self._used].isfinite().all(dim=1).logical_not()
                first = bad.to(torch.int32).argmax() + self._first_step
                first = torch.where(bad[0] & (self._lasting >= 0), self._lasting, first)
                self._since = torch.where(bad.any() & (self._since < 0), first, self._since)
                self._lasting = torch.where(bad[-1], self._since, torch.full_like(self._since, NEVER))
        self._first_step += self._used
        self._used = 0


def _put_extremes(numbers: Tensor, low: Tensor, high: Tensor) -> None:
    """In one pass over the numbers, without an intermediate that could overflow."""
    try:
        torch.aminmax(numbers, out=(low, high))
    except (NotImplementedError, RuntimeError):  # not every backend has it; this is as exact, and slower on a CPU
        high.copy_(torch.linalg.vector_norm(numbers, math.inf))
        low.copy_(high)


def _small_gradient(optimizer: Optimizer) -> Tensor | None:
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
                continue
            if gradient.numel():
                found.append(gradient)
            if len(found) == LOOKED_AT:
                return min(found, key=Tensor.numel)
    return min(found, key=Tensor.numel, default=None)
