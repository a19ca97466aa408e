"""The objects torch calls as hooks: on a module's inputs and outputs, on a tensor's gradient, on the whole model.

Each calls the observer at once and keeps nothing: no tensor, no graph. A copy or a pickle of the model has none of
them. Where a model is compiled its hooks are compiled with it, and pass tensors on through dynamo.observe.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import in_backward, is_profiled, profiler_label
from tbhooks.capture.compile import dynamo
from tbhooks.capture.compile.dynamo import CompileGate, dynamo_skip
from tbhooks.capture.functional.function_mode import FunctionalObserver
from tbhooks.capture.hooks.dead_units import RECTIFIERS
from tbhooks.capture.hooks.eager_hooks import EagerGradientHook, EagerHook, EagerLane
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.unpicklable import UnpicklableHook
from tbhooks.capture.recording.recorder import NO_SITE
from tbhooks.data.frame import ROOT, Site


class GradientObserver(Protocol):
    """What hooks on tensors call."""

    def on_gradient(self, hook: GradientHook | EagerGradientHook, gradient: Tensor) -> None: ...

    def on_scaled_loss(self, hook: ScaledLossHook) -> None: ...


class HookObserver(Protocol):
    """What hooks on modules call."""

    gate: CompileGate

    def on_forward_begin(self) -> None: ...

    def on_forward_end(self, output: object) -> None: ...

    def on_output(self, hook: ForwardHook, output: object, args: tuple[Any, ...] = ()) -> None: ...

    def on_call(self, hook: ForwardHook) -> None: ...

    def on_inputs(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def on_graph_tensor(
        self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int
    ) -> None: ...

    def on_tap(self, module: nn.Module, name: str, value: object) -> bool: ...

    def hook_of(self, module: nn.Module) -> dynamo.GraphHook | None: ...

    def number(self, site: Site) -> int: ...


class ForwardHook(UnpicklableHook):
    """Placed on a module for a logged step; on a compiled one for good."""

    __slots__ = (
        "__weakref__",
        "broken",
        "collects_inputs",
        "collects_outputs",
        "eager",
        "ends_backward",
        "expected",
        "gate",
        "has_units",
        "hook_id",
        "module",
        "observer",
        "outputs",
        "path",
        "reads_gradients",
        "reads_inputs",
        "reads_operations",
        "reads_outputs",
        "reads_pairs",
        "sites",
    )  # fmt: skip

    def __init__(
        self, observer: HookObserver, path: str, module: nn.Module, wanted: frozenset[str], chosen: bool,
        lane: EagerLane | None = None,
    ) -> None:  # fmt: skip
        self.observer, self.path, self.module = observer, path, weakref.ref(module)
        self.gate = observer.gate
        self.hook_id = dynamo.NO_HOOK_ID
        self.sites: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and dtype of each output when it was first read, by its index."""
        self.reads_outputs = chosen and "activation" in wanted
        self.reads_gradients = chosen and "gradient" in wanted
        self.reads_inputs = chosen and "input" in wanted
        self.reads_operations = chosen and "functional" in wanted
        # Set when it is attached: whether a collector wants its tensors.
        self.collects_outputs = self.collects_inputs = False
        # And whether a metric wants its first input together with its output.
        self.reads_pairs = False
        self.has_units = isinstance(module, RECTIFIERS)
        # Weight gradients are read when a backward pass through its output ends. A forward that no backward pass goes
        # through is not part of the step.
        self.ends_backward = path == ROOT
        self.broken = False
        """Whether it has failed in this logged step, and no longer reads in it."""
        self.expected = self._numbers_of("")
        """The site numbers of its output, if it returns one tensor: worked out before the first logged step."""
        self.eager = None if lane is None else lane.hook(self)
        """The hook in C that torch calls instead, where hooks in C can be used."""
        self.update_eager()

    def note_output(self, index: str, tensor: Tensor) -> None:
        """Keeps the shape and dtype of an output, once."""
        if index not in self.outputs and not tensor.is_nested:  # a nested tensor has no shape
            self.outputs[index] = tensor.shape, tensor.dtype

    def assign_hook_id(self) -> None:
        """To be called once anything is compiled: an id is a tensor, too expensive to make for each module of every
        model.
        """
        if self.hook_id is dynamo.NO_HOOK_ID:
            self.hook_id = dynamo.hook_id(self)

    @property
    def reads(self) -> bool:
        """Whether statistics of the module's outputs or their gradients are wanted."""
        return self.reads_outputs or self.reads_gradients

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if _is_read_in_graph(self.gate, module):
                wants_gradient = self.reads_gradients or self.ends_backward
                for index, tensor in tensor_tree.tensors(output):
                    dynamo.observe(tensor, "activation", index, wants_gradient, self.hook_id, self.gate.step_id)
                if self.reads_pairs:
                    self._observe_pair(args, output)
        elif self.broken:
            self.observer.on_call(self)
        elif is_profiled():
            with profiler_label("activation"):
                self.observer.on_output(self, output, args)
        else:  # without a context manager that does nothing, which costs as much as it looks
            self.observer.on_output(self, output, args)

    def _observe_pair(self, args: Any, output: Any) -> None:
        found = tensor_tree.tensors(output)
        if args and found and isinstance(args[0], Tensor) and args[0].shape == found[0][1].shape:
            dynamo.observe_pair(args[0], found[0][1], found[0][0], self.hook_id, self.gate.step_id)

    def site_numbers(self, index: str, tensor: Tensor) -> tuple[int, int]:
        """The site numbers of this output's activation and of its gradient."""
        if index not in self.sites:
            self.note_output(index, tensor)
            self.sites[index] = self._numbers_of(index) if index else self.expected
            self.update_eager()
        return self.sites[index]

    def _numbers_of(self, index: str) -> tuple[int, int]:
        number, path = self.observer.number, self.path
        return (
            number(Site(path, "activation", index)) if self.reads_outputs else NO_SITE,
            number(Site(path, "gradient", index)) if self.reads_gradients else NO_SITE,
        )

    def called_by_torch(self, is_compiling: bool) -> ForwardHook | EagerHook:
        """What torch is to call: the hook in C, but where hooks are or may be compiled with the model."""
        if self.eager is None or is_compiling or self.gate.was_compiled:
            return self
        return self.eager

    def update_eager(self) -> None:
        """To be called when anything has changed that decides what is read, and how."""
        if self.eager is None:
            return
        if "" in self.sites:  # else the hook in C asks for the numbers when it needs them
            site, gradient = self.sites[""]
            self.eager.site, self.eager.gradient_site = site, None if gradient == NO_SITE else gradient
        self.eager.units = f"activation/{self.path}" if self.has_units else None
        is_more = self.ends_backward or self.collects_outputs or self.reads_pairs
        self.eager.is_ready = self.reads_outputs and not is_more and not self.broken

    def on_graph_tensor(self, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int) -> None:
        if not self.broken:
            self.observer.on_graph_tensor(self, tensor, kind, index, gradient, step_id)

    def on_graph_begin(self) -> None:
        """Only the hook of the forward event puts the operator into a graph that calls this."""


class InputHook(UnpicklableHook):
    """Placed on a module whose inputs are watched: they are read before its forward can overwrite them."""

    __slots__ = ("hook",)

    def __init__(self, hook: ForwardHook) -> None:
        self.hook = hook

    @property
    def observer(self) -> HookObserver:
        return self.hook.observer

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        hook = self.hook
        if kwargs is None:  # removed a moment ago: torch still calls it, but no longer with keyword arguments
            return
        if torch.compiler.is_compiling():
            if _is_read_in_graph(hook.gate, module):
                for index, tensor in tensor_tree.inputs(args, kwargs):
                    dynamo.observe(tensor, "input", index, False, hook.hook_id, hook.gate.step_id)
        elif not hook.broken:
            with profiler_label("input"):
                hook.observer.on_inputs(hook, args, kwargs)


def _is_read_in_graph(gate: CompileGate, module: nn.Module) -> bool:
    return gate.compiling() and (gate.open or (gate.evaluation and not module.training))


def read_gradient(hook: GradientHook | EagerGradientHook, gradient: Tensor) -> None:
    """Reads what a gradient hook was called with."""
    if is_profiled():
        with profiler_label("gradient"):
            hook.observer.on_gradient(hook, gradient)
    else:  # without a context manager that does nothing, which costs as much as it looks
        hook.observer.on_gradient(hook, gradient)


class GradientHook:
    """Placed on an output; reads the gradient of every site whose output is that tensor. Holds no tensor itself."""

    __slots__ = ("failure", "fired", "is_view", "observer", "passes", "sites", "step")
    __torch_unserializable__ = True  # torch leaves it out of pickles without a warning

    def __init__(self, observer: GradientObserver, step: object, is_view: bool) -> None:
        self.observer, self.step, self.is_view = observer, step, is_view
        self.sites: list[int] = []
        self.passes: list[Pass] = []
        """The forwards that returned the tensor."""
        self.fired = False
        self.failure = ""
        """Why its gradient could not be read."""

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            read_gradient(self, gradient)


def is_hooked(tensor: Tensor, step: object, site: int) -> bool:
    """Whether this very tensor already has a hook of this step for that site."""
    hooks = (tensor._backward_hooks or {}).values()
    own = GradientHook | EagerGradientHook
    return any(isinstance(hook, own) and hook.step is step and site in hook.sites for hook in hooks)


class ScaledLossHook:
    """Placed on a loss that a GradScaler has multiplied: reports the scale when its backward begins."""

    __slots__ = ("observer", "scale", "step")
    __torch_unserializable__ = True  # torch leaves it out of pickles without a warning

    def __init__(self, observer: GradientObserver, step: object, scale: Tensor) -> None:
        self.observer, self.step, self.scale = observer, step, scale

    @dynamo_skip
    def __call__(self, gradient: Tensor | None) -> None:
        self.observer.on_scaled_loss(self)


class EnterHook(UnpicklableHook):
    """Called when a module's forward begins, so that the operations in it get its name."""

    __slots__ = ("functional", "hook")

    def __init__(self, functional: FunctionalObserver, hook: ForwardHook) -> None:
        self.functional, self.hook = functional, hook

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            gate = self.hook.gate
            if gate.compiling() and (gate.open or gate.evaluation):
                is_read = gate.open or not module.training
                dynamo.enter_module(self.hook.hook_id, gate.step_id, is_read, self.hook.reads_operations)
        elif not in_backward():
            self.hook.observer.on_call(self.hook)
            self.functional.enter_module(self.hook.path, module)


class LeaveHook(UnpicklableHook):
    """Called when a module's forward ends, also by an exception."""

    __slots__ = ("functional", "hook")

    def __init__(self, functional: FunctionalObserver, hook: ForwardHook) -> None:
        self.functional, self.hook = functional, hook

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            gate = self.hook.gate
            if gate.compiling() and (gate.open or gate.evaluation):
                dynamo.leave_module(self.hook.hook_id)
        elif not in_backward():
            self.functional.leave_module(self.hook.path)


class MarkHook(UnpicklableHook):
    """Marks in a graph that is being compiled where the forward of a module begins or ends, for taps in it."""

    __slots__ = ("begins", "hook")

    def __init__(self, hook: ForwardHook, begins: bool) -> None:
        self.hook, self.begins = hook, begins

    @property
    def observer(self) -> HookObserver:
        return self.hook.observer

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        gate = self.hook.gate
        if torch.compiler.is_compiling() and (gate.open or gate.evaluation) and gate.compiling():
            if self.begins:
                is_read = gate.open or not module.training
                dynamo.enter_module(self.hook.hook_id, gate.step_id, is_read)
            else:
                dynamo.leave_module(self.hook.hook_id)


class BeginHook(UnpicklableHook):
    """Called when a forward of the whole model begins. It adds nothing to a compiled graph."""

    __slots__ = ("observer",)

    def __init__(self, observer: HookObserver) -> None:
        self.observer = observer

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.observer.on_forward_begin()


class EndHook(UnpicklableHook):
    """Called when a forward of the whole model ends, also by an exception."""

    __slots__ = ("observer",)

    def __init__(self, observer: HookObserver) -> None:
        self.observer = observer

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.observer.on_forward_end(output)


class CallObserver(Protocol):
    """Follows the calls of modules."""

    def enters(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leaves(self, path: str, output: object) -> None: ...


class CallHook(UnpicklableHook):
    """Called with the arguments of a module. It adds nothing to a compiled graph."""

    __slots__ = ("observer", "path")

    def __init__(self, observer: CallObserver, path: str) -> None:
        self.observer, self.path = observer, path

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling() and kwargs is not None and not in_backward():
            self.observer.enters(self.path, module, args, kwargs)


class ReturnHook(UnpicklableHook):
    """Called with what the module returned; None if it raised."""

    __slots__ = ("observer", "path")

    def __init__(self, observer: CallObserver, path: str) -> None:
        self.observer, self.path = observer, path

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self.observer.leaves(self.path, output)


def call_new_pre_hooks(module: nn.Module, known: set[int], args: Any, kwargs: Any) -> None:
    """Calls the pre-hooks that were registered during this call: torch has made its list of them before."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key not in known and isinstance(hook, InputHook | CallHook):
            hook(module, args, kwargs)
        elif key not in known and isinstance(hook, EnterHook | BeginHook):
            hook(module, args)
