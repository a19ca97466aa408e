"""The objects torch calls: on a module's inputs and outputs, on a tensor's gradient, on the whole model.

Each tells the probe at once and keeps nothing: no tensor, no graph. A copied or pickled model takes none of
them along. Where a model is compiled, its hooks are compiled with it and speak through compiled.see.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tbhooks.capture import dynamo, tensor_tree
from tbhooks.capture.autograd import in_backward, profiler_label
from tbhooks.capture.dynamo import CompileGate, dynamo_skip
from tbhooks.capture.hooks.dead_units import RECTIFIERS
from tbhooks.capture.hooks.function_mode import Functional
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.unpicklable import Unkept
from tbhooks.capture.recorder import NO_SITE
from tbhooks.data.frame import ROOT, Site


class ToldOfGradients(Protocol):
    """What the hooks on tensors call."""

    def saw_gradient(self, hook: GradientHook, gradient: Tensor) -> None: ...

    def saw_scaled_loss(self, hook: ScaledLossHook) -> None: ...


class Told(ToldOfGradients, Protocol):
    """What the hooks call."""

    gate: CompileGate

    def forward_begins(self) -> None: ...

    def forward_ends(self, output: object) -> None: ...

    def saw_output(self, hook: ForwardHook, output: object) -> None: ...

    def saw_call(self, hook: ForwardHook) -> None: ...

    def saw_inputs(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def saw_in_graph(
        self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, serial: int
    ) -> None: ...

    def number(self, site: Site) -> int: ...


class ForwardHook(Unkept):
    """Placed on a module for a logged step; on a compiled one for good."""

    __slots__ = (
        "__weakref__",
        "broken",
        "ends_backward",
        "failures",
        "gate",
        "has_units",
        "hook_id",
        "module",
        "path",
        "reads_gradients",
        "reads_inputs",
        "reads_operations",
        "reads_outputs",
        "shows_inputs",
        "shows_outputs",
        "sites",
        "told",
    )  # fmt: skip

    def __init__(self, told: Told, path: str, module: nn.Module, wanted: frozenset[str], chosen: bool) -> None:
        self.told, self.path, self.module = told, path, weakref.ref(module)
        self.gate = told.gate
        self.hook_id = dynamo.NO_TICKET
        self.sites: dict[str, tuple[int, int]] = {}
        self.reads_outputs = chosen and "activation" in wanted
        self.reads_gradients = chosen and "gradient" in wanted
        self.reads_inputs = chosen and "input" in wanted
        self.reads_operations = chosen and "functional" in wanted
        # Set when it is put on: whether somebody looks on.
        self.shows_outputs = self.shows_inputs = False
        self.has_units = isinstance(module, RECTIFIERS)
        # The end of a backward pass through its output is when weight gradients are read. That there is one tells
        # whether the forward is part of the step.
        self.ends_backward = path == ROOT
        self.broken = False
        """Whether it has failed, and is not called in this logged step."""
        self.failures = 0
        """On how many logged steps in a row."""

    def take_ticket(self) -> None:
        """Once anything is compiled: a ticket is a tensor, too dear to make one for each module of every model."""
        if self.hook_id is dynamo.NO_TICKET:
            self.hook_id = dynamo.hook_id(self)

    @property
    def reads(self) -> bool:
        """Whether it is there for the module's own sake."""
        return self.reads_outputs or self.reads_gradients

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if _is_read_in_graph(self.gate, module):
                wants_gradient = self.reads_gradients or self.ends_backward
                for index, tensor in tensor_tree.tensors(output):
                    dynamo.show(tensor, "activation", index, wants_gradient, self.hook_id, self.gate.serial)
        elif self.broken:
            self.told.saw_call(self)
        else:
            with profiler_label("activation"):
                self.told.saw_output(self, output)

    def site_numbers(self, index: str) -> tuple[int, int]:
        """The numbers of this output's activation and gradient."""
        if index not in self.sites:
            number, path = self.told.number, self.path
            self.sites[index] = (
                number(Site(path, "activation", index)) if self.reads_outputs else NO_SITE,
                number(Site(path, "gradient", index)) if self.reads_gradients else NO_SITE,
            )
        return self.sites[index]

    def saw_in_graph(self, tensor: Tensor, kind: str, index: str, gradient: str, serial: int) -> None:
        if not self.broken:
            self.told.saw_in_graph(self, tensor, kind, index, gradient, serial)

    def began_in_graph(self) -> None:
        """Only the whole model's hook is told of that."""


class InputHook(Unkept):
    """Placed on a module whose inputs are watched: they are read before its forward can overwrite them."""

    __slots__ = ("hook",)

    def __init__(self, hook: ForwardHook) -> None:
        self.hook = hook

    @property
    def told(self) -> Told:
        return self.hook.told

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        hook = self.hook
        if kwargs is None:  # taken off a moment ago: torch has it on its list still, but not how to call it
            return
        if torch.compiler.is_compiling():
            if _is_read_in_graph(hook.gate, module):
                for index, tensor in tensor_tree.inputs(args, kwargs):
                    dynamo.show(tensor, "input", index, False, hook.hook_id, hook.gate.serial)
        elif not hook.broken:
            with profiler_label("input"):
                hook.told.saw_inputs(hook, args, kwargs)


def _is_read_in_graph(gate: CompileGate, module: nn.Module) -> bool:
    return gate.compiling() and (gate.open or (gate.evaluation and not module.training))


class GradientHook:
    """Placed on an output; serves every site whose output is that very tensor. Holds no tensor itself."""

    __slots__ = ("failure", "fired", "is_view", "passes", "sites", "step", "told")
    __torch_unserializable__ = True  # torch leaves it out of pickles, and need not warn of it

    def __init__(self, told: ToldOfGradients, step: object, is_view: bool) -> None:
        self.told, self.step, self.is_view = told, step, is_view
        self.sites: list[int] = []
        self.passes: list[Pass] = []
        """The forwards that returned the tensor."""
        self.fired = False
        self.failure = ""
        """Why its gradient could not be read."""

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            with profiler_label("gradient"):
                self.told.saw_gradient(self, gradient)


def is_hooked(tensor: Tensor, step: object, site: int) -> bool:
    """Whether this very tensor has shown its gradient for that site already."""
    hooks = (tensor._backward_hooks or {}).values()
    return any(isinstance(hook, GradientHook) and hook.step is step and site in hook.sites for hook in hooks)


class ScaledLossHook:
    """Placed on a loss that a GradScaler multiplied: says so when its backward begins."""

    __slots__ = ("scale", "step", "told")
    __torch_unserializable__ = True  # torch leaves it out of pickles, and need not warn of it

    def __init__(self, told: ToldOfGradients, step: object, scale: Tensor) -> None:
        self.told, self.step, self.scale = told, step, scale

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        self.told.saw_scaled_loss(self)


class EnterHook(Unkept):
    """Tells that a module's forward begins, to name the operations it calls."""

    __slots__ = ("functional", "hook")

    def __init__(self, functional: Functional, hook: ForwardHook) -> None:
        self.functional, self.hook = functional, hook

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self.hook.gate.compiling()
        elif not in_backward():
            self.hook.told.saw_call(self.hook)
            self.functional.enter_module(self.hook.path, module)


class LeaveHook(Unkept):
    """Tells that it has ended, one way or another."""

    __slots__ = ("functional", "path")

    def __init__(self, functional: Functional, path: str) -> None:
        self.functional, self.path = functional, path

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self.functional.leave_module(self.path)


class BeginHook(Unkept):
    """Tells that a forward of the whole model begins. Compiled, it is nothing."""

    __slots__ = ("told",)

    def __init__(self, told: Told) -> None:
        self.told = told

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.told.forward_begins()


class EndHook(Unkept):
    """Tells that it has ended, also by an exception."""

    __slots__ = ("told",)

    def __init__(self, told: Told) -> None:
        self.told = told

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.told.forward_ends(output)


class Follows(Protocol):
    """Who is told of the calls of modules."""

    def enters(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leaves(self, path: str, output: object) -> None: ...


class CallHook(Unkept):
    """Tells with what a module is called. Compiled, it is nothing."""

    __slots__ = ("follows", "path")

    def __init__(self, follows: Follows, path: str) -> None:
        self.follows, self.path = follows, path

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling() and kwargs is not None and not in_backward():
            self.follows.enters(self.path, module, args, kwargs)


class ReturnHook(Unkept):
    """Tells what came of it; nothing if it raised."""

    __slots__ = ("follows", "path")

    def __init__(self, follows: Follows, path: str) -> None:
        self.follows, self.path = follows, path

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self.follows.leaves(self.path, output)


def call_new_pre_hooks(module: nn.Module, known: set[int], args: Any, kwargs: Any) -> None:
    """Calls the pre-hooks that were registered during this call: torch has made its list of them before."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key not in known and isinstance(hook, InputHook | CallHook):
            hook(module, args, kwargs)
        elif key not in known and isinstance(hook, EnterHook | BeginHook):
            hook(module, args)
