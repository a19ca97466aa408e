"""The state of autograd, of the profiler and of torch's modes in this thread: whether backward runs, and when it ends.

Torch's private autograd interfaces are used here, and in peek.py and preserve_state.py for what only they need.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tbhooks.reduction.torch_private import look_up

NO_BACKWARD = -1
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
running_backward: Callable[[], int] = look_up(
    "torch._C._current_graph_task_id", lambda: NO_BACKWARD, "recomputed checkpoints are counted twice"
)
"""The number of the backward pass that runs in this thread, or NO_BACKWARD; `backward_pass` as torch has it."""
count_dispatch_modes: Callable[[], int] = look_up(
    "torch._C._len_torch_dispatch_stack", lambda: 0, "modes such as FLOP counters count what reads the model"
)
_disable_current_modes: Callable[[], contextlib.AbstractContextManager[Any]] = look_up(
    "torch.utils._python_dispatch._disable_current_modes",
    lambda: _NOTHING,
    "modes such as FLOP counters count what reads the model",
)
is_profiled: Callable[[], bool] = look_up("torch.autograd._profiler_enabled", lambda: False, "traces have no labels")
"""Whether a profiler records this thread."""
_Label: Callable[[str], Any] = look_up(
    "torch._C._profiler._RecordFunctionFast", torch.profiler.record_function, "labels in traces take longer"
)
tracing_state: Callable[[], object] = look_up(
    "torch._C._get_tracing_state", lambda: None, "a model that torch.jit.trace runs is read like any other"
)
"""What torch.jit.trace works on; None if it does not run."""
_queue_callback: Callable[[Callable[[], None]], None] | None = look_up(
    "torch.autograd.Variable._execution_engine.queue_callback",
    None,
    "weight gradients are read when the optimizer steps, and not where there is none",
)
_reentrant: Any = look_up(
    "torch.utils.checkpoint.CheckpointFunction.backward", None, "gradients in reentrant checkpoints are counted twice"
)
_REENTRANT = getattr(_reentrant, "__code__", None)
_CUSTOM_FUNCTION = getattr(torch.autograd.Function.apply, "__code__", None)


def capture_check() -> Callable[[], bool]:
    """A function that returns whether a CUDA graph is being captured: captured operations have no results yet, and
    would run again with every replay.
    """
    return torch.cuda.is_current_stream_capturing if torch.cuda.is_available() else never_captures


def never_captures() -> bool:
    """What `capture_check` returns where there is no CUDA."""
    return False


def is_traced() -> bool:
    """Whether torch.jit.trace is running the model."""
    return tracing_state() is not None


def backward_pass() -> int:
    """The number of the backward pass that autograd is running in this thread, or NO_BACKWARD."""
    return int(running_backward())


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: a forward now is a checkpoint being recomputed."""
    return backward_pass() != NO_BACKWARD


def in_nested_backward() -> bool:
    """Whether that backward runs inside another one, as that of a reentrant checkpoint does."""
    return _is_called_by(_REENTRANT)


def may_reach_backward() -> bool:
    """Whether a backward may go through what runs now. Inside an autograd.Function gradients are disabled although it
    has a backward of its own: reentrant checkpoints and graphs compiled for training run that way.
    """
    if torch.is_grad_enabled():
        return True
    return _is_called_by(_CUSTOM_FUNCTION) if _CUSTOM_FUNCTION is not None else _is_in_custom_forward()


def _is_in_custom_forward() -> bool:
    """Recognises a custom forward by its context, where `Function.apply` is no Python function (since torch 2.15)."""
    for frame in call_stack():
        code = frame.f_code
        first = code.co_varnames[0] if code.co_name == "forward" and code.co_argcount else "self"
        if first != "self" and isinstance(frame.f_locals.get(first), FunctionCtx):
            return True
    return False


def _is_called_by(code: CodeType | None) -> bool:
    return code is not None and any(frame.f_code is code for frame in call_stack())


def accumulation_node(parameter: Tensor) -> Any:
    """The node of autograd that accumulates the gradient of a parameter. Its pre-hooks are called with the gradient of
    one backward, before it is added to `grad` and before DDP averages it.
    """
    return torch.autograd.graph.get_gradient_edge(parameter).node


def call_stack() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls it when the running backward pass has ended, after the callbacks of others: DDP averages there."""
    if _queue_callback is not None:
        _queue_callback(partial(_queue_callback, function))


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, dispatch modes of others (tracers, selective checkpoints, FLOP counters) are not called."""
    return _disable_current_modes() if count_dispatch_modes() else _NOTHING


def profiler_label(what: str) -> contextlib.AbstractContextManager[Any]:
    """Labels what runs inside `tbhooks::<what>` in the trace of a profiler, if one is running."""
    return _Label(f"tbhooks::{what}") if is_profiled() else _NOTHING
