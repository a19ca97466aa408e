"""Training loops without a torch optimizer: detects manual updates of the weights.

Some loops update weights themselves (`p.data.add_(p.grad, alpha=-lr)`). There a training step ends when a forward
follows a backward. Forwards without a backward, as in rollouts, end nothing.

Gradient accumulation before an optimizer's first step looks the same. So steps are counted like this only if no
optimizer of the model has stepped, and one of these has happened:

* a weight has changed between a backward and the next forward;
* gradients were cleared or replaced after each of `CLEARED_IN_A_ROW` backward passes (accumulation keeps them);
* no optimizer has stepped in `FORWARDS_WITHOUT_OPTIMIZER` forwards. If none of them had a backward, each forward is a
  step.

If an optimizer steps later, its steps are counted instead. Only the last condition applies to compiled models, and to
models that return no tensor.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import at_end_of_backward, in_backward, is_traced, without_dispatch_modes
from tbhooks.capture.compile.dynamo import dynamo_skip
from tbhooks.capture.hooks.manager import hook_output, hook_tensor
from tbhooks.capture.hooks.unpicklable import UnpicklableHook
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data

# Accumulation over more forwards than this is rarer than a loop without an optimizer.
FORWARDS_WITHOUT_OPTIMIZER = 256
# Warm-up passes also clear their gradients. There are rarely more than two before training begins.
CLEARED_IN_A_ROW = 3
# An update of `p.data` does not change the version of `p`. So the values of a few small CPU weights are compared.
MOST_COMPARED, LARGEST_COMPARED = 16, 4096


class _OutputHook(UnpicklableHook):
    """The forward hook on the model; does nothing while the model is compiled or traced."""

    __slots__ = ("__weakref__", "updates")

    def __init__(self, updates: ManualUpdates) -> None:
        self.updates = updates

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not is_traced():
            self.updates.forward_ended(module, output)


class _BackwardHook(UnpicklableHook):
    """The hook on an output tensor of the model, called in its backward pass."""

    __slots__ = ("__weakref__", "model", "updates")
    __torch_unserializable__ = True  # torch leaves the hook out of pickles without a warning

    def __init__(self, updates: ManualUpdates, model: nn.Module) -> None:
        self.updates, self.model = updates, weakref.ref(model)

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        self.updates.backward_reached(self.model)


class ManualUpdates:
    """Finds out from the forwards and backwards of one model whether its weights are updated without an optimizer."""

    def __init__(self, report: Report) -> None:
        self.backward_ran = False
        """Whether a backward pass has run since the last step ended; the clock resets it."""
        self.backward_ever_ran = False
        self._report = report
        self._forwards = 0
        self._versions = -1
        self._values: list[int] = []
        self._gradients: dict[int, weakref.ref[Tensor]] = {}
        # Since the last forward began: whether a backward has run, has left gradients, and has left new ones.
        self._reached = self._has_gradients = self._replaced = False
        self._cleared = 0

    def forward_begins(self, model: nn.Module, backward_ran: bool) -> str | None:
        """Returns why there seems to be no optimizer, or None. `backward_ran` says whether a gradient hook on a module
        was called since the last forward.
        """
        self.backward_ran |= backward_ran
        self.backward_ever_ran |= self.backward_ran
        parameters = list(model.parameters())
        versions, values = _versions(parameters), _values(parameters)
        why = self._why(model, versions, values) if self._forwards else None
        self._forwards += 1
        self._versions, self._values = versions, values
        self._reached = self._has_gradients = self._replaced = False
        return why

    def _why(self, model: nn.Module, versions: int, values: list[int]) -> str | None:
        if self.backward_ran:  # loading a checkpoint between two forwards is no step
            if versions != self._versions != -1 or (values != self._values and len(values) == len(self._values)):
                return "weights change without one"
            if self._has_gradients:
                is_cleared = self._replaced or all(parameter.grad is None for parameter in model.parameters())
                self._cleared = self._cleared + 1 if is_cleared else 0
            if self._cleared >= CLEARED_IN_A_ROW:
                return f"gradients were cleared {self._cleared} times, and none stepped"
        if self._forwards >= FORWARDS_WITHOUT_OPTIMIZER:
            return f"none stepped in {self._forwards} forwards"
        return None

    def watch_outputs(self, model: nn.Module) -> RemovableHandle:
        """Hooks the outputs of the model from now on, to notice backward passes through them."""
        return hook_output(model, _OutputHook(self))

    def forward_ended(self, model: nn.Module, output: object) -> None:
        """The forward hook calls this with what the model has returned."""
        with self._report.guarded("after the model's forward"):
            for _, tensor in () if in_backward() else tensor_tree.tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    hook_tensor(tensor, _BackwardHook(self, model))

    def backward_reached(self, model: weakref.ref[nn.Module]) -> None:
        """The hook on an output calls this in the backward pass."""
        if not self._reached and in_backward():
            with self._report.guarded("in backward"):
                self._reached = self.backward_ran = True
                at_end_of_backward(partial(self._backward_ended, model))

    @dynamo_skip
    def _backward_ended(self, reference: weakref.ref[nn.Module]) -> None:
        with self._report.guarded("after backward"):
            model = reference()
            gradients = [] if model is None else [parameter.grad for parameter in model.parameters()]
            now = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
            before, self._gradients = self._gradients, {i: weakref.ref(gradient) for i, gradient in now.items()}
            self._has_gradients = bool(now)
            shared = before.keys() & now.keys()
            self._replaced = bool(shared) and all(before[i]() is not now[i] for i in shared)


def _versions(parameters: Sequence[nn.Parameter]) -> int:
    """Returns a number that changes when a parameter is written in place; -1 if the model has lazy parameters."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        return -1
    return sum(parameter._version for parameter in parameters)


def _values(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Returns checksums of a few small weights on the CPU, where reading them needs no sync."""
    dense = (p for p in parameters if type(p) is nn.Parameter and p.is_cpu and p.layout is torch.strided)
    small = (p.detach() for p in dense if 0 < p.numel() <= LARGEST_COMPARED and not has_no_data(p))
    with torch.no_grad(), without_dispatch_modes():
        # Clones are read, because a storage that was shared with NumPy cannot be resized any more, and FSDP does that.
        return [
            zlib.crc32(weight.flatten().clone().view(torch.uint8).numpy().data)
            for weight in itertools.islice(small, MOST_COMPARED)
        ]
