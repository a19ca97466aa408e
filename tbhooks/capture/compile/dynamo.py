"""What becomes part of a compiled graph, and which functions torch.compile must not compile.

A hook that is compiled with the model cannot run Python. Instead it adds one operator per tensor to the graph, with an
effect and no result. When the graph runs, the operator calls the hook's observer with the tensor. The graph identifies
the hook by an id that is a tensor and not a constant, so that modules which share compiled code keep sharing it.

compilation.py controls when hooks are compiled in. All other private interfaces of torch.compile are used here.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tbhooks.capture.autograd import call_stack
from tbhooks.data.process.patching import after_import
from tbhooks.data.self_report import logger
from tbhooks.reduction.metrics import write_ratio
from tbhooks.reduction.torch_private import look_up, missing

Function = TypeVar("Function", bound=Callable[..., Any])

hooks_are_wanted = False
"""Set by compilation.py while it compiles a function with hooks. Never while exporting."""
traced: list[CompileGate | None] = []
"""The hooks that the running compilation has traced: the gates of module hooks, None for other hooks."""


class GraphObserver(Protocol):
    """What operators in a compiled graph call."""

    def on_graph_tensor(self, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int) -> None: ...

    def on_graph_begin(self) -> None: ...


class GraphHook(Protocol):
    """The hook of a module, as compiled graphs know it."""

    hook_id: Tensor
    gate: CompileGate


class TapFoundError(Exception):
    """A tap was compiled, and hooks do not mark yet which module is running: they are attached, and it is repeated."""


class CompileGate:
    """The state of a watch that compiled code depends on. There is one graph for each answer: read, and not read."""

    __slots__ = ("_before_first", "evaluation", "has_taps", "open", "step_id", "was_compiled")

    def __init__(self, before_first: Callable[[], None]) -> None:
        self.open = False
        """Whether the next forward is read."""
        self.evaluation = False
        """Whether evaluation passes are read."""
        self.was_compiled = False
        """Whether any hook was compiled. From then on hooks stay attached: compiled code ignores later ones."""
        self.has_taps = False
        """Whether a tap was compiled. From then on hooks mark in graphs where forwards of modules begin and end."""
        self.step_id = _host_number(0)
        """The number of the step, as graphs are given it: a late gradient is assigned to its forward by it."""
        self._before_first = before_first
        """Called when the first hook is about to be compiled."""

    def next_step(self) -> None:
        # A new tensor: the old one may be kept for a backward that is still to come.
        self.step_id = _host_number(int(self.step_id) + 1)

    def compiling(self) -> bool:
        """Called while a hook is being compiled, and only then. Returns whether it may become part of the graph."""
        if not may_read(self):
            return False
        if not self.was_compiled:
            self.was_compiled = True
            self._before_first()
        return True

    def compiling_tap(self) -> bool:
        """Called while a tap is being compiled. Returns whether it may become part of the graph."""
        if not self.compiling():
            return False
        if not self.has_taps:
            self.has_taps = True
            raise TapFoundError
        return True

    # torch._dynamo calls a function with this mark while tracing, and keeps its result in the graph.
    compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]
    compiling_tap._dynamo_marked_constant = True  # type: ignore[attr-defined]


def may_read(gate: CompileGate | None = None) -> bool:
    """Called while a hook is being compiled. Returns whether it may become part of the graph."""
    if hooks_are_wanted:
        traced.append(gate)
    return hooks_are_wanted


may_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _host_number(value: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.int64, device="cpu")


# Whether the gradient of an output will come too: no, yes, or it would if backward were not compiled as well.
NO_GRADIENT, GRADIENT_COMES, LOST_GRADIENT = "", "comes", "lost"

NO_HOOK_ID = _host_number(0)
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, GraphObserver] = weakref.WeakValueDictionary()


def hook_id(observer: GraphObserver) -> Tensor:
    """A new id by which compiled graphs find the observer, as long as it lives."""
    number = next(_numbers)
    _observers[number] = observer
    return _host_number(number)


def _run_observe(tensor: Tensor | None, kind: str, index: str, gradient: str, hook_id: Tensor, step_id: Tensor) -> None:
    with collect_failures("an operator in compiled code"):
        observer = _observers.get(int(hook_id))
        if observer is not None and tensor is not None:
            observer.on_graph_tensor(tensor, kind, index, gradient, int(step_id))


def _run_begin(hook_id: Tensor) -> None:
    with collect_failures("an operator in compiled code"):
        observer = _observers.get(int(hook_id))
        if observer is not None:
            observer.on_graph_begin()


find_running_hook: Callable[[], GraphHook | None] = lambda: None  # noqa: E731
"""Returns the hook of the module whose forward is running; set by functional/taps.py."""


def _run_running_hook(_step_id: Tensor) -> Tensor:
    with collect_failures("a tap in compiled code"):
        hook = find_running_hook()
        return (NO_HOOK_ID if hook is None else hook.hook_id).clone()
    return NO_HOOK_ID.clone()


def _run_running_step(step_id: Tensor) -> Tensor:
    with collect_failures("a tap in compiled code"):
        hook = find_running_hook()
        return (step_id if hook is None else hook.gate.step_id).clone()
    return step_id.clone()


failures: list[tuple[str, Exception]] = []
"""Exceptions in compiled code, where it is not known which watch the hook belongs to; every watch reports them."""
MOST_FAILURES = 20


@contextlib.contextmanager
def collect_failures(where: str) -> Iterator[None]:
    """Catches exceptions in what is compiled with the model; every watch reports them."""
    try:
        yield
    except Exception as problem:
        note_failure(where, problem)


def note_failure(where: str, problem: Exception) -> None:
    """Every watch reports it after its next logged step."""
    if len(failures) < MOST_FAILURES:
        failures.append((where, problem))
        logger.debug("%s", where, exc_info=problem)


_library: Any = torch.library.Library("tbhooks", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None) -> Any:
    """Defines an operator that compilers keep, keep in order, and never capture into a CUDA graph: it runs Python."""
    name = schema.partition("(")[0]
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    _library.define(schema, tags=() if unsafe is None else (unsafe,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tbhooks::{name}", fake, lib=_library)
    operator = getattr(torch.ops.tbhooks, name).default
    _keep_in_order(operator)
    return operator


def _keep_in_order(operator: Any) -> None:
    """Without effects compilers may drop an operator that returns nothing."""
    lost = "what runs compiled is not read"
    try:
        ordered = look_up("torch._library.effects.EffectType", None, lost).ORDERED
        registry = look_up("torch._library.simple_registry.singleton", None, lost)
        registry.find(operator.name()).effect.register(ordered)
    except Exception as problem:
        missing["effects of operators"] = f"{lost}: {type(problem).__name__}: {problem}"


_observe = _define(
    "observe(Tensor? tensor, str kind, str index, str gradient, Tensor hook_id, Tensor step_id) -> ()", _run_observe
)
"""Calls the observer with a tensor."""
begin = _define("begin(Tensor hook_id) -> ()", _run_begin)
"""Calls the observer when a forward of the whole model begins."""
_running_hook = _define("running_hook(Tensor step_id) -> Tensor", _run_running_hook, torch.empty_like)
_running_step = _define("running_step(Tensor step_id) -> Tensor", _run_running_step, torch.empty_like)
"""The id of the hook of the module that called the graph, and the number of its step. The argument keeps compilers from
computing them once and for all."""


_SLOWER = "hooks may be compiled on their own, which takes time and changes nothing"
_eval_frame: Any = look_up("torch._C._dynamo.eval_frame", None, _SLOWER)


def _set_strategy(code: CodeType, itself: str, what_it_calls: str) -> None:
    """Sets how dynamo runs code that is called outside of what it compiles."""
    with contextlib.suppress(AttributeError, TypeError):  # another interface in another version
        actions = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(getattr(actions, itself), getattr(actions, what_it_calls))
        _eval_frame.set_code_exec_strategy(code, strategy)


def dynamo_skip(function: Function) -> Function:
    """Marks a function that torch.compile may trace as part of a model, but never compiles on its own."""
    _set_strategy(function.__code__, "SKIP", "SKIP")
    return function


_stay_uncompiled: set[CodeType] = set()


def stays_uncompiled(function: Callable[..., Any]) -> None:
    """Keeps torch's own modules from being compiled on their own, which dynamo does only if they have hooks."""
    code = getattr(function, "__code__", None)
    if code is None or code in _stay_uncompiled:
        return
    if (function.__module__ or "").startswith(("torch.nn.", "torch.ao.")):
        _stay_uncompiled.add(code)
        _set_strategy(code, "SKIP", "DEFAULT")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is called through compiled code. A module that only is part of compiled code is not noticed."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def is_around() -> bool:
    """Whether a frame of dynamo is on the Python stack, other than one that runs something uncompiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frames = () if dynamo is None else (frame for frame in call_stack() if frame.f_globals is vars(dynamo))
    innermost = next(iter(frames), None)
    return innermost is not None and not innermost.f_code.co_qualname.startswith("DisableContext")


def dynamo_disable(function: Function) -> Function:
    """Marks a function that torch.compile must not trace at all, as torch.compiler.disable does without an import."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return dynamo_skip(function)


def observe(tensor: Tensor, kind: str, index: str, wants_gradient: bool, hook_id: Tensor, step_id: Tensor) -> None:
    """Adds operators for a tensor, and for its gradient if that is wanted, to the graph that is being compiled.

    torch._dynamo keeps the call as one node. Its body is traced later, by AOTAutograd, where tensors take hooks again.
    """
    with collect_failures("a hook in compiled code"):
        gradient_kind = kind.replace("activation", "gradient", 1)
        comes = NO_GRADIENT
        if wants_gradient and tensor.requires_grad and not tensor.is_leaf:  # a leaf and its hook outlive the graph
            comes = LOST_GRADIENT if _backward_is_compiled() else GRADIENT_COMES
        _observe(tensor.detach(), kind, index, comes, hook_id, step_id)
        if comes == GRADIENT_COMES:

            def on_gradient(gradient: Tensor | None) -> None:  # None if only other outputs of the operation are used
                _observe(gradient, gradient_kind, index, NO_GRADIENT, hook_id, step_id)

            tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]


def _backward_is_compiled() -> bool:
    """Whether compiled autograd is on, which cannot take hooks on tensors inside a graph."""
    autograd = getattr(sys.modules["torch._dynamo"], "compiled_autograd", None)
    return bool(getattr(autograd, "compiled_autograd_enabled", False))


def observe_pair(given: Tensor, output: Tensor, index: str, hook_id: Tensor, step_id: Tensor) -> None:
    """Adds to the graph the ratio of what a module changes of its first input, and an operator that observes it."""
    with collect_failures("a hook in compiled code"), torch.no_grad():
        if output.is_floating_point():
            with torch.autocast(output.device.type, enabled=False):
                ratio = write_ratio(given.detach(), output.detach())
            _observe(ratio, "write_ratio", index, NO_GRADIENT, hook_id, step_id)


class _RunningCalls(threading.local):
    """The modules whose forward is being traced, or run by a backend that does not trace: hook id, step id, is read."""

    def __init__(self) -> None:
        self.stack: list[tuple[Tensor, Tensor, bool]] = []
        self.mode: Any = None
        """What observes the operations of these modules, if any of them reads operations."""


running_calls = _RunningCalls()


make_mode: Callable[[], Any] = lambda: None  # noqa: E731
"""Makes what observes operations while a graph is traced; set by compile/graph_operations.py."""


def enter_module(hook_id: Tensor, step_id: Tensor, is_read: bool, reads_operations: bool = False) -> None:
    """The forward of a module begins. A node of the graph, of which AOTAutograd leaves nothing."""
    running_calls.stack.append((hook_id, step_id, is_read))
    if reads_operations:
        running_calls.mode = running_calls.mode or make_mode()
        running_calls.mode.enter(len(running_calls.stack))


def leave_module(_hook_id: Tensor) -> None:
    """It has ended."""
    if running_calls.stack:
        running_calls.stack.pop()
    if running_calls.mode is not None:
        running_calls.mode.leave(len(running_calls.stack))


def restore_calls(stack: list[tuple[Tensor, Tensor, bool]]) -> None:
    """Only these calls still run: tracing, or a graph that a backend does not trace, may have ended by an exception."""
    running_calls.stack = stack
    if running_calls.mode is not None:
        running_calls.mode.leave(len(stack))


def observe_operation(tensor: Tensor, kind: str, index: str) -> None:
    """Adds an operator for a tensor inside an operation, for the module whose forward is running."""
    if running_calls.stack and running_calls.stack[-1][2]:
        hook_id, step_id, _ = running_calls.stack[-1]
        _observe(tensor.detach(), kind, index, NO_GRADIENT, hook_id, step_id)


def observe_tap(tensor: Tensor, name: str, index: str, step_id: Tensor) -> None:
    """Adds operators for a tapped tensor and its gradient to the graph, for the module whose forward is running."""
    with collect_failures("a tap in compiled code"):
        if running_calls.stack:
            hook_id, step_id, is_read = running_calls.stack[-1]
        else:  # the module that has called the graph
            hook_id, step_id, is_read = _running_hook(step_id), _running_step(step_id), True
        if is_read:
            observe(tensor, f"activation:{name}", index, True, hook_id, step_id)


def _keep_as_one_node(dynamo: Any) -> None:
    for function in (observe, observe_pair, observe_tap, enter_module, leave_module):
        dynamo.allow_in_graph(function)


after_import(_keep_as_one_node, "torch._dynamo")


GRADIENTS_INSIDE = "compiled with other outputs: gradients between them stay inside the graph"


def with_gradients_inside(found: list[tuple[str, Tensor]]) -> bool:
    """Whether these are several outputs of one compiled graph: a gradient from one to another stays inside it."""
    return sum(type(tensor.grad_fn).__name__ == "CompiledFunctionBackward" for _, tensor in found) > 1
