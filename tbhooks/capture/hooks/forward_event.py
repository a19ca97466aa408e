"""One event for everybody who has to know that a forward of the whole model begins.

The clock, a step that waits for late scalars, running means, evaluation passes, throughput and the profiler subscribe
here. One pre-hook on the model serves them all. It is on the model only while somebody is subscribed and the watch is
not paused. Inside a compiled model it becomes operators of the graph, for subscribers that ask for it (`in_graph`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced
from tbhooks.capture.compile import dynamo
from tbhooks.capture.compile.dynamo import CompileGate, dynamo_skip
from tbhooks.capture.cuda_graphs import GraphCapture
from tbhooks.capture.hooks.hook_types import call_new_pre_hooks
from tbhooks.capture.hooks.manager import hook_begin
from tbhooks.capture.hooks.unpicklable import UnpicklableHook
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data

Sizes = tuple[int, int]
"""How many samples and how many tokens a batch has."""
Callback = Callable[[nn.Module, Callable[[], Sizes]], None]
"""Called with the model, and with a function that counts the samples and tokens of the batch it was given."""


@dataclass(eq=False)
class Subscription:
    """One subscriber. `cancel` ends it; a second call does nothing."""

    event: ForwardEvent
    callback: Callback
    in_graph: bool
    """Whether forwards of compiled code are to be noticed, by an operator in the graph."""
    reads_batch: bool
    """Whether the subscriber asks for the sizes of the batch; in compiled code they come one by one."""

    def cancel(self) -> None:
        self.event.cancel(self)


class ForwardEvent:
    """Calls its subscribers, in the order in which they subscribed, before each forward of the model.

    Forwards that autograd runs again inside a backward pass (checkpointing) are not announced. An exception of one
    subscriber is reported, and keeps neither the others nor the forward from running.
    """

    def __init__(
        self, model: weakref.ref[nn.Module], gate: CompileGate, graph_capture: GraphCapture, report: Report
    ) -> None:
        self._model = model
        self._gate = gate
        self._graph_capture = graph_capture
        self._report = report
        self._subscriptions: list[Subscription] = []
        self._handle: RemovableHandle | None = None
        self._is_paused = False
        self._hook = _ForwardBeginsHook(self)

    def subscribe(self, callback: Callback, *, in_graph: bool, reads_batch: bool = False) -> Subscription:
        subscription = Subscription(self, callback, in_graph, reads_batch)
        self._subscriptions.append(subscription)
        self._update_hook()
        return subscription

    def cancel(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._update_hook()

    def pause(self) -> None:
        """Takes the hook off the model; the subscribers stay."""
        self._is_paused = True
        self._update_hook()

    def resume(self) -> None:
        self._is_paused = False
        self._update_hook()

    def close(self) -> None:
        """Cancels every subscription and takes the hook off the model."""
        self._subscriptions = []
        self._remove_hook()

    def _update_hook(self) -> None:
        self._hook.in_graph = any(each.in_graph and not each.reads_batch for each in self._subscriptions)
        self._hook.reads_batch = any(each.in_graph and each.reads_batch for each in self._subscriptions)
        model = self._model()
        if self._subscriptions and not self._is_paused and model is not None:
            if self._handle is None:
                self._handle = hook_begin(model, self._hook)
        elif not self._gate.was_compiled:  # or torch would recompile what it is a part of
            self._remove_hook()

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @dynamo_skip
    def forward_begins(self, count: Callable[[], Sizes]) -> None:
        """The hook calls this in eager mode."""
        self._call([*self._subscriptions], count)

    def forward_begins_in_graph(self) -> None:
        """An operator in a compiled graph calls this."""
        self._call([each for each in self._subscriptions if each.in_graph and not each.reads_batch], lambda: (0, 0))

    def batch_in_graph(self, sizes: Sizes) -> None:
        """An operator in a compiled graph calls this with the samples, another one with the tokens."""
        self._call([each for each in self._subscriptions if each.in_graph and each.reads_batch], lambda: sizes)

    def _call(self, subscriptions: list[Subscription], count: Callable[[], Sizes]) -> None:
        model = self._model()
        if model is None or self._is_paused or in_backward():  # where hooks are compiled, this one stays in a pause
            return
        if self._graph_capture.is_running():
            return
        for each in subscriptions:
            if each in self._subscriptions:  # one of those before may have cancelled it
                with self._report.guarded("before the model's forward"):
                    each.callback(model, count)


class _ForwardBeginsHook(UnpicklableHook):
    """The one pre-hook on the model."""

    __slots__ = ("__weakref__", "event", "hook_id", "in_graph", "reads_batch")

    def __init__(self, event: ForwardEvent) -> None:
        self.event = event
        self.in_graph = self.reads_batch = False
        self.hook_id = dynamo.hook_id(self)

    @dynamo_skip
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # If another hook has just removed this one, torch still calls it, without keyword arguments.
        if not torch.compiler.is_compiling():
            if not is_traced() and not _holds_no_data(args):
                known = set(module._forward_pre_hooks)
                self.event.forward_begins(partial(_sizes, args, kwargs or {}))
                call_new_pre_hooks(module, known, args, kwargs or {})
            return
        if self.reads_batch and dynamo.may_read():
            for tensor, kind in zip(_batch(args, kwargs or {}), ("samples", "tokens"), strict=True):
                if tensor is not None:
                    dynamo.observe(tensor, kind, "", False, self.hook_id, dynamo.NO_HOOK_ID)
        if self.in_graph and dynamo.may_read():
            dynamo.begin(self.hook_id)

    def on_graph_begin(self) -> None:
        self.event.forward_begins_in_graph()

    def on_graph_tensor(self, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int) -> None:
        self.event.batch_in_graph((tensor.size(0), 0) if kind == "samples" else (0, tensor.numel()))


def _holds_no_data(args: Any) -> bool:
    """Whether the model is called with tensors without data, as tracing and torch.func do."""
    try:
        return any(has_no_data(tensor) for _, tensor in tensor_tree.tensors(args))
    except Exception:  # a user's container may raise when its items are read
        return False


def _sizes(args: Any, kwargs: Any) -> Sizes:
    first, whole = _batch(args, kwargs)
    return (0 if first is None else first.size(0)), (0 if whole is None else whole.numel())


def _batch(args: Any, kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor of the arguments, whose first dimension is the batch, and the first integer tensor: tokens."""
    given = [tensor for _, tensor in tensor_tree.inputs(args, kwargs) if tensor.dim()]
    whole = [tensor for tensor in given if not (tensor.is_floating_point() or tensor.is_complex())]
    tokens = [tensor for tensor in whole if tensor.dtype != torch.bool]
    return (given[0] if given else None), (tokens[0] if tokens else None)
