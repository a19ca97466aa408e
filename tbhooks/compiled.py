"""What torch.compile needs: operators that carry numbers out of a compiled graph, and code it must leave alone.

A hook that is compiled with the model cannot run Python. What it does instead becomes part of the graph: one
operator a tensor, with an effect and no result, that hands the tensor to the same recorder as in eager mode. A
hook is known in the graph by a ticket, which is a tensor: modules that share compiled code keep sharing it. All
of torch's private compile interfaces are used here and nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
import wrapt
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


class Observer(Protocol):
    """Who is told what runs inside a compiled graph."""

    def saw_in_graph(self, tensor: Tensor, kind: str, index: str, gradient: str, serial: int) -> None: ...

    def began_in_graph(self) -> None: ...


def _nothing() -> None: ...


class Gate:
    """All that compiled code asks of a watch. Each answer is one graph, so there are two: read, and not read."""

    __slots__ = ("evaluation", "get_ready", "open", "serial", "was_compiled")

    def __init__(self) -> None:
        self.open = False
        """Whether the next forward is read."""
        self.evaluation = False
        """Whether evaluation passes are read."""
        self.was_compiled = False
        """Whether any hook was compiled: from then on they stay on, as later ones would go unnoticed."""
        self.get_ready: Callable[[], None] = _nothing
        """Called when the first hook is being compiled, before anything of it is read."""
        self.serial = _host_number(0)
        """The number of the step: a backward pass that comes late shows here."""

    def next_step(self) -> None:
        # A new tensor: the old one may be kept for a backward that is still to come.
        self.serial = _host_number(int(self.serial) + 1)

    def compiling(self) -> bool:
        """Called while a hook is being compiled, and only then."""
        if not self.was_compiled:
            self.was_compiled = True
            self.get_ready()
        return True

    # torch._dynamo calls a function with this mark at once, and keeps its result in the graph.
    compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _host_number(value: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.int64, device="cpu")


# Whether an output's gradient will be shown too: no, yes, or it would be if backward were not compiled as well.
NO_GRADIENT, GRADIENT_COMES, LOST_GRADIENT = "", "comes", "lost"

NO_TICKET = _host_number(0)
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()


def ticket(observer: Observer) -> Tensor:
    """What an observer is known by inside a compiled graph, as long as it lives."""
    number = next(_numbers)
    _observers[number] = observer
    return _host_number(number)


def _see(tensor: Tensor | None, kind: str, index: str, gradient: str, ticket: Tensor, serial: Tensor) -> None:
    observer = _observers.get(int(ticket))
    if observer is not None and tensor is not None:
        observer.saw_in_graph(tensor, kind, index, gradient, int(serial))


def _begin(ticket: Tensor) -> None:
    observer = _observers.get(int(ticket))
    if observer is not None:
        observer.began_in_graph()


_library: Any = torch.library.Library("tbhooks", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., None]) -> Any:
    """An operator that compilers keep, keep in order, and never capture into a CUDA graph: it runs Python."""
    name = schema.partition("(")[0]
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    _library.define(schema, tags=() if unsafe is None else (unsafe,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tbhooks::{name}", lambda *_: None, lib=_library)
    with contextlib.suppress(ImportError, AttributeError):  # without effects, compilers may drop the operator
        from torch._library.effects import EffectType  # noqa: PLC0415  not in every version

        torch._library.simple_registry.singleton.find(f"tbhooks::{name}").effect.register(EffectType.ORDERED)
    return getattr(torch.ops.tbhooks, name).default


see = _define("see(Tensor? tensor, str kind, str index, str gradient, Tensor ticket, Tensor serial) -> ()", _see)
"""Hands a tensor to the observer of `ticket`."""
begin = _define("begin(Tensor ticket) -> ()", _begin)
"""Tells the observer of `ticket` that a forward of the whole model begins."""


def runs_as_python(function: Function) -> Function:
    """Marks a function that torch.compile may trace as part of a model, but never compiles on its own."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # noqa: PLC0415  private

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # neither itself nor what it calls
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


_stay_uncompiled: set[CodeType] = set()


def stays_uncompiled(function: Callable[..., Any]) -> None:
    """Torch's own modules are compiled as part of others, or not at all; with hooks on they would be on their own."""
    code = getattr(function, "__code__", None)
    if code is None or code in _stay_uncompiled:
        return
    if (function.__module__ or "").startswith(("torch.nn.", "torch.ao.")):
        _stay_uncompiled.add(code)
        with contextlib.suppress(ImportError, AttributeError):
            from torch._C._dynamo import eval_frame  # noqa: PLC0415  private

            actions = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
            eval_frame.set_code_exec_strategy(code, strategy)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is called through compiled code; that it is part of such code does not show on it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def is_around() -> bool:
    """Whether something compiled is what has called this, as far as Python knows; not what compilers were kept from."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = sys._getframe(1) if dynamo is not None else None
    while frame is not None and frame.f_globals is not vars(dynamo):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_qualname.startswith("DisableContext")


def never_compiled(function: Function) -> Function:
    """Marks a function that torch.compile must not look into at all; what torch.compiler.disable does, unloaded."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return runs_as_python(function)


def show(tensor: Tensor, kind: str, index: str, wants_gradient: bool, ticket: Tensor, serial: Tensor) -> None:
    """Puts a tensor, and if it is wanted its gradient, into the graph that is being compiled.

    torch._dynamo takes the call as it is; what it does is traced below it, where tensors take hooks again.
    """
    comes = NO_GRADIENT
    if wants_gradient and tensor.requires_grad and not tensor.is_leaf:  # a leaf outlives the graph, as would its hook
        comes = LOST_GRADIENT if _backward_is_compiled() else GRADIENT_COMES
    see(tensor.detach(), kind, index, comes, ticket, serial)
    if comes == GRADIENT_COMES:

        def saw(gradient: Tensor | None) -> None:  # None where only other outputs of the same operation are used
            see(gradient, "gradient", index, NO_GRADIENT, ticket, serial)

        tensor.register_hook(saw)  # type: ignore[no-untyped-call]


def _backward_is_compiled() -> bool:
    """Whether compiled autograd is on, which cannot take hooks on tensors inside a graph."""
    return bool(sys.modules["torch._dynamo"].compiled_autograd.compiled_autograd_enabled)


def _take_as_it_is(dynamo: Any) -> None:
    dynamo.allow_in_graph(show)


wrapt.register_post_import_hook(_take_as_it_is, "torch._dynamo")


GRADIENTS_INSIDE = "compiled with other outputs: what they pass on to each other stays inside"


def with_gradients_inside(found: list[tuple[str, Tensor]]) -> bool:
    """Whether these are several outputs of one compiled graph: a gradient from one to another is not seen outside."""
    origins = [tensor.grad_fn for _, tensor in found if tensor.grad_fn is not None]
    compiled_origins = [origin for origin in origins if type(origin).__name__ == "CompiledFunctionBackward"]
    return len(compiled_origins) > 1
