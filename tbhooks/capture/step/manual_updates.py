"""Loops without a torch optimizer: whether weights are updated by hand, and where one step of such a loop ends.

Some loops update weights themselves (`p.data.add_(p.grad, alpha=-lr)`). No optimizer says there that a step has ended,
so it is taken to end where a forward follows a backward. Forwards without a backward, as in rollouts, end nothing.

The same order of calls is seen while gradients are accumulated for an optimizer that has not stepped yet. So the rule
is used only after one of these, in a loop in which no optimizer of the model has been seen:

* a weight has changed between a backward and the next forward: at once;
* gradients were cleared or replaced after each of `CLEARED_IN_A_ROW` backward passes (accumulation keeps them);
* no optimizer has stepped in `FORWARDS_WITHOUT_OPTIMIZER` forwards. If no backward was seen in any of them, each
  forward is a step.

An optimizer that steps later takes over. A model whose output shows no tensor, and one that is compiled, can only be
counted by the last rule.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import at_end_of_backward, in_backward, is_traced, without_dispatch_modes
from tbhooks.capture.dynamo import dynamo_skip
from tbhooks.capture.hooks.manager import hook_output, hook_tensor
from tbhooks.capture.hooks.unpicklable import UnpicklableHook
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data

# Longer accumulations than this are rarer than loops without an optimizer.
FORWARDS_WITHOUT_OPTIMIZER = 256
# Warm-up passes also clear their gradients; there are rarely more than two before training begins.
CLEARED_IN_A_ROW = 3
# Weights on the CPU whose values are compared, because `p.data` is changed without a new version: few and small ones.
MOST_COMPARED, LARGEST_COMPARED = 16, 4096


class _OutputHook(UnpicklableHook):
    """Tells what a model's forward has returned; not of one that is being compiled or traced."""

    __slots__ = ("__weakref__", "told")

    def __init__(self, told: Callable[[nn.Module, object], None]) -> None:
        self.told = told

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not is_traced():
            self.told(module, output)


class _BackwardHook(UnpicklableHook):
    """On an output of the model: tells that a backward pass went through it."""

    __slots__ = ("__weakref__", "model", "turns")
    __torch_unserializable__ = True  # torch leaves it out of pickles, and need not warn of it

    def __init__(self, turns: Turns, model: nn.Module) -> None:
        self.turns, self.model = turns, weakref.ref(model)

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        self.turns.backward_reached(self.model)


class Turns:
    """What the forwards and backwards of one model show while no optimizer steps it."""

    def __init__(self, report: Report) -> None:
        self.backward_ran = False
        """Whether a backward pass went through an output of the model since the last step ended."""
        self.saw_backward = False
        """Whether one ever did."""
        self._report = report
        self._forwards = 0
        self._versions = -1
        self._values: list[int] = []
        self._gradients: dict[int, weakref.ref[Tensor]] = {}
        # Since the last forward began: whether a backward has run, has left gradients, and has left new ones.
        self._reached = self._has_gradients = self._replaced = False
        self._cleared = 0

    @property
    def forwards(self) -> int:
        return self._forwards

    def step_ended(self) -> None:
        self.backward_ran = False

    def forward_begins(self, model: nn.Module, backward_ran: bool) -> str | None:
        """Why there seems to be no optimizer, if that can be told by now; `backward_ran` is what others have seen."""
        self.backward_ran |= backward_ran
        self.saw_backward |= self.backward_ran
        versions, values = _versions(model), _values(model)
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

    def follow(self, model: nn.Module) -> RemovableHandle:
        """Notices backward passes through the outputs of the model."""
        return hook_output(model, _OutputHook(self._forward_ended))

    def _forward_ended(self, model: nn.Module, output: object) -> None:
        with self._report.guarded("after the model's forward"):
            for _, tensor in () if in_backward() else tensor_tree.tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    hook_tensor(tensor, _BackwardHook(self, model))

    def backward_reached(self, model: weakref.ref[nn.Module]) -> None:
        """Called from a backward pass."""
        if not self._reached and in_backward():
            with self._report.guarded("in backward"):
                self._reached = self.backward_ran = True
                at_end_of_backward(partial(self._backward_ended, model))

    @dynamo_skip
    def _backward_ended(self, reference: weakref.ref[nn.Module]) -> None:
        with self._report.guarded("after backward"):
            model = reference()
            found = {} if model is None else {i: p.grad for i, p in enumerate(model.parameters()) if p.grad is not None}
            before, self._gradients = self._gradients, {i: weakref.ref(gradient) for i, gradient in found.items()}
            self._has_gradients = bool(found)
            shared = before.keys() & found.keys()
            self._replaced = bool(shared) and all(before[i]() is not found[i] for i in shared)


def _versions(model: nn.Module) -> int:
    """Changes whenever a parameter is written in place; -1 while some have yet to be made."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return -1
    return sum(parameter._version for parameter in model.parameters())


def _values(model: nn.Module) -> list[int]:
    """Checksums of a few small weights on the CPU, where reading them waits for nothing."""
    some = (p for p in model.parameters() if type(p) is nn.Parameter and p.is_cpu and p.layout is torch.strided)
    chosen = [p.detach() for p in some if 0 < p.numel() <= LARGEST_COMPARED and not has_no_data(p)][:MOST_COMPARED]
    with torch.no_grad(), without_dispatch_modes():
        # Of copies: a storage that NumPy has seen can no longer be resized, as FSDP does.
        return [zlib.crc32(weight.flatten().clone().view(torch.uint8).numpy().data) for weight in chosen]
