"""What torch.compile needs: operators that carry numbers out of a compiled graph, and code it must leave alone.

A hook that is compiled with the model cannot run Python. What it does instead becomes part of the graph: one
operator a tensor, with an effect and no result, that hands the tensor to the same recorder as in eager mode. A
hook is known in the graph by a ticket, which is a tensor: modules that share compiled code keep sharing it. All
of torch's private compile interfaces are used here and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tbhooks.data.patching import after_import
from tbhooks.data.self_report import logger
from tbhooks.reduction.torch_private import look_up, missing

Function = TypeVar("Function", bound=Callable[..., Any])

hooks_are_wanted = False
"""Whether compilation.py stands around what is being traced now, and wants hooks in it. Never while exporting."""
NOT_GUARDED = "it was not seen running, and compiled code is not read: the compiler of this torch is not known"
traced: list[CompileGate | None] = []
"""What the running compilation has come across: the gates of module hooks, None for others of ours."""


class Observer(Protocol):
    """Who is told what runs inside a compiled graph."""

    def saw_in_graph(self, tensor: Tensor, kind: str, index: str, gradient: str, serial: int) -> None: ...

    def began_in_graph(self) -> None: ...


def _nothing() -> None: ...


class CompileGate:
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
        """Called while a hook is being compiled, and only then; says whether it may become part of the graph."""
        if not may_read(self):
            return False
        if not self.was_compiled:
            self.was_compiled = True
            self.get_ready()
        return True

    # torch._dynamo calls a function with this mark at once, and keeps its result in the graph.
    compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def may_read(gate: CompileGate | None = None) -> bool:
    """Called while a hook is being compiled: whether it may become part of the graph."""
    if hooks_are_wanted:
        traced.append(gate)
    return hooks_are_wanted


may_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _host_number(value: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.int64, device="cpu")


# Whether an output's gradient will be shown too: no, yes, or it would be if backward were not compiled as well.
NO_GRADIENT, GRADIENT_COMES, LOST_GRADIENT = "", "comes", "lost"

NO_TICKET = _host_number(0)
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, Observer] = weakref.WeakValueDictionary()


def hook_id(observer: Observer) -> Tensor:
    """What an observer is known by inside a compiled graph, as long as it lives."""
    number = next(_numbers)
    _observers[number] = observer
    return _host_number(number)


def _see(tensor: Tensor | None, kind: str, index: str, gradient: str, hook_id: Tensor, serial: Tensor) -> None:
    with _unheard("an operator in compiled code"):
        observer = _observers.get(int(hook_id))
        if observer is not None and tensor is not None:
            observer.saw_in_graph(tensor, kind, index, gradient, int(serial))


def _begin(hook_id: Tensor) -> None:
    with _unheard("an operator in compiled code"):
        observer = _observers.get(int(hook_id))
        if observer is not None:
            observer.began_in_graph()


failures: list[tuple[str, Exception]] = []
"""What went wrong in compiled code before it was known whose hook it was; each watch tells of it."""
MOST_FAILURES = 20


@contextlib.contextmanager
def _unheard(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if len(failures) < MOST_FAILURES:
            failures.append((where, problem))
            logger.debug("%s", where, exc_info=problem)


_library: Any = torch.library.Library("tbhooks", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., None]) -> Any:
    """An operator that compilers keep, keep in order, and never capture into a CUDA graph: it runs Python."""
    name = schema.partition("(")[0]
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    _library.define(schema, tags=() if unsafe is None else (unsafe,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tbhooks::{name}", lambda *_: None, lib=_library)
    operator = getattr(torch.ops.tbhooks, name).default
    _keep_in_order(operator)
    return operator


def _keep_in_order(operator: Any) -> None:
    """Without effects compilers may drop an operator that returns nothing."""
    lost = "what runs compiled is not read"
    try:
        if importlib.util.find_spec("torch._library.effects") is not None:
            ordered = look_up("torch._library.effects.EffectType", None, lost).ORDERED
            registry = look_up("torch._library.simple_registry.singleton", None, lost)
            registry.find(operator.name()).effect.register(ordered)
        else:  # before torch 2.10
            ordered = look_up("torch._higher_order_ops.effects._EffectType", None, lost).ORDERED
            look_up("torch._higher_order_ops.effects._register_effectful_op", None, lost)(operator, ordered)
    except Exception as problem:
        missing["effects of operators"] = f"{lost}: {type(problem).__name__}: {problem}"


see = _define("see(Tensor? tensor, str kind, str index, str gradient, Tensor ticket, Tensor serial) -> ()", _see)
"""Hands a tensor to the observer of `ticket`."""
begin = _define("begin(Tensor ticket) -> ()", _begin)
"""Tells the observer of `ticket` that a forward of the whole model begins."""


_SLOWER = "hooks may be compiled on their own, which takes time and changes nothing"
_eval_frame: Any = look_up("torch._C._dynamo.eval_frame", None, _SLOWER)


def _set_strategy(code: CodeType, itself: str, what_it_calls: str) -> None:
    """Tells dynamo how to run code that is called outside of what it compiles."""
    with contextlib.suppress(AttributeError, TypeError):  # another way to say it in another version
        if not hasattr(_eval_frame, "_FrameExecStrategy"):  # before torch 2.7
            _eval_frame.skip_code(code)
            return
        actions = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(getattr(actions, itself), getattr(actions, what_it_calls))
        _eval_frame.set_code_exec_strategy(code, strategy)


def dynamo_skip(function: Function) -> Function:
    """Marks a function that torch.compile may trace as part of a model, but never compiles on its own."""
    _set_strategy(function.__code__, "SKIP", "SKIP")
    return function


_stay_uncompiled: set[CodeType] = set()


def stays_uncompiled(function: Callable[..., Any]) -> None:
    """Torch's own modules are compiled as part of others, or not at all; with hooks on they would be on their own."""
    code = getattr(function, "__code__", None)
    if code is None or code in _stay_uncompiled:
        return
    if (function.__module__ or "").startswith(("torch.nn.", "torch.ao.")):
        _stay_uncompiled.add(code)
        _set_strategy(code, "SKIP", "DEFAULT")


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


def dynamo_disable(function: Function) -> Function:
    """Marks a function that torch.compile must not look into at all; what torch.compiler.disable does, unloaded."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return dynamo_skip(function)


def show(tensor: Tensor, kind: str, index: str, wants_gradient: bool, hook_id: Tensor, serial: Tensor) -> None:
    """Puts a tensor, and if it is wanted its gradient, into the graph that is being compiled.

    torch._dynamo takes the call as it is; what it does is traced below it, where tensors take hooks again.
    """
    with _unheard("a hook in compiled code"):
        _show(tensor, kind, index, wants_gradient, hook_id, serial)


def _show(tensor: Tensor, kind: str, index: str, wants_gradient: bool, hook_id: Tensor, serial: Tensor) -> None:
    comes = NO_GRADIENT
    if wants_gradient and tensor.requires_grad and not tensor.is_leaf:  # a leaf outlives the graph, as would its hook
        comes = LOST_GRADIENT if _backward_is_compiled() else GRADIENT_COMES
    see(tensor.detach(), kind, index, comes, hook_id, serial)
    if comes == GRADIENT_COMES:

        def saw(gradient: Tensor | None) -> None:  # None where only other outputs of the same operation are used
            see(gradient, "gradient", index, NO_GRADIENT, hook_id, serial)

        tensor.register_hook(saw)  # type: ignore[no-untyped-call]


def _backward_is_compiled() -> bool:
    """Whether compiled autograd is on, which cannot take hooks on tensors inside a graph."""
    autograd = getattr(sys.modules["torch._dynamo"], "compiled_autograd", None)
    return bool(getattr(autograd, "compiled_autograd_enabled", False))


def _take_as_it_is(dynamo: Any) -> None:
    dynamo.allow_in_graph(show)


after_import(_take_as_it_is, "torch._dynamo")


GRADIENTS_INSIDE = "compiled with other outputs: what they pass on to each other stays inside"


def with_gradients_inside(found: list[tuple[str, Tensor]]) -> bool:
    """Whether these are several outputs of one compiled graph: a gradient from one to another is not seen outside."""
    origins = [tensor.grad_fn for _, tensor in found if tensor.grad_fn is not None]
    compiled_origins = [origin for origin in origins if type(origin).__name__ == "CompiledFunctionBackward"]
    return len(compiled_origins) > 1
