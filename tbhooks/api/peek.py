"""`peek`: one look at a model, without training it and without a trace.

The pass is read as a logged step of a watch is: by a probe and a parameter reader into a recorder. Here is only
what is special about a single pass: what outputs are, which are kept, where its loss comes from.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from tbhooks.api import lifecycle
from tbhooks.api.watch import Watch
from tbhooks.capture import selection, tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced, without_dispatch_modes
from tbhooks.capture.dynamo import dynamo_disable
from tbhooks.capture.hooks.hook_types import ForwardHook
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.preserve_state import gradients_aside, untouched
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.selection import Selector
from tbhooks.capture.session import CaptureSession
from tbhooks.capture.step.nan_replay import run_eagerly
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.capture.step.parameters import ParameterReader
from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, nearest, quoted
from tbhooks.data.frame import Frame
from tbhooks.data.history import History
from tbhooks.data.peek_result import Output, Peeked
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data
from tbhooks.rules import RULES, Rule, RuleEngine, dead_units, saturated, vanishing_gradient

MOST_KEPT_BYTES = 256 << 20
"""What `keep=` may take of the host's memory; what does not fit is left out, and named in the notes."""

Loss = Callable[[Any], Tensor] | Literal["sum"] | None

REENTRANT = "CheckpointFunctionBackward"

KINDS = ("activation", "weight")
KINDS_WITH_LOSS = (*KINDS, "gradient", "weight_gradient")

# These wait for several frames, as a first step may be unlike those after it; here there is but one to judge by.
# Others stay patient: gradients of zero are how a branch begins whose last weights are zero on purpose.
_AT_ONCE: dict[str, Rule] = {rule.name: rule(frames=1) for rule in (dead_units, saturated, vanishing_gradient)}
ONE_PASS_RULES = tuple({**RULES, **_AT_ONCE}.values())


@dynamo_disable
def peek(model: nn.Module, /, *args: Any, loss: Loss = None, keep: Any = None, **kwargs: Any) -> Peeked:
    """Calls `model(*args, **kwargs)` once with every module read, and leaves the model exactly as it was.

    `loss` is a function of what the model returns, or "sum" of every floating tensor in it: with one there is a
    backward pass too. `keep` chooses modules as `include` of `watch` does; their outputs are in `kept`, as detached
    copies on the CPU, up to 256 MB. The pass runs in the model's own mode, and as it would if you called it here:
    random numbers, autocast. So that they mean this, arguments of the model cannot be called `loss` or `keep`.

    >>> import torch, tbhooks
    >>> frame = tbhooks.peek(torch.nn.Linear(2, 1), torch.ones(4, 2), loss="sum")
    >>> frame["weight", "weight_gradient"].mean, frame.outputs["(root)"].shape
    (4.0, (4, 1))
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a torch.nn.Module, not {quoted(model)}")
    _check_loss(loss)
    model = selection.unwrap(model)
    _check_data(model)
    report = Report()
    recorder = Recorder(KINDS if loss is None else KINDS_WITH_LOSS)
    collector = _Collector(model, recorder, report, _chosen(model, keep))
    with _watches_paused(model), untouched(model, dict(tensor_tree.inputs(args, kwargs))) as unrestored:
        notes = _run(model, args, kwargs, loss, collector, recorder, report)
        frame = _frame(recorder)
    judged = RuleEngine(ONE_PASS_RULES, History())(frame)
    return Peeked(
        **{field.name: getattr(judged, field.name) for field in fields(Frame)},
        outputs=collector.outputs, kept=collector.kept,
        notes=(*notes, *collector.notes(), *report.messages, *unrestored),
    )  # fmt: skip


# What was passed.


def _check_loss(loss: object) -> None:
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return
    if not isinstance(loss, str):
        raise ArgumentError(f'loss is a function of what the model returns, "sum", or None, not {quoted(loss)}')
    if loss != "sum":
        raise ArgumentError(f"loss={loss!r} is unknown: {nearest(loss, ['sum'])} Or pass a function of the output")


def _check_data(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} has no shape yet: call the model once, and a lazy module makes its parameters")
        if has_no_data(tensor):
            where = "is on the meta device" if tensor.is_meta else "is a stand-in for tracing"
            raise ArgumentError(f"{name} {where} and holds no numbers to look at: load the weights first")


def _chosen(model: nn.Module, keep: object) -> frozenset[str]:
    if keep is None:
        return frozenset()
    try:
        selector = Selector(model, keep, None)
    except ArgumentError as problem:  # it knows its patterns as include=
        raise ArgumentError("keep" + str(problem).removeprefix("include")) from None
    return frozenset(selector.choose(selection.walk(model).by_path))


# The pass.


def _run(
    model: nn.Module, args: Any, kwargs: Any, loss: Loss, collector: _Collector, recorder: Recorder, report: Report
) -> list[str]:
    reader = ParameterReader(model, collector.selector, recorder, GroupNumbers(), report)
    recorder.begin(with_buckets=True)
    collector.begin(attach=True)
    notes = []
    try:
        with run_eagerly():
            if loss is None:
                model(*args, **kwargs)
            else:
                notes = _forward_and_backward(model, args, kwargs, loss, recorder)
        reader.read_remaining()
        with without_dispatch_modes():
            collector.units.log(recorder)
        collector.end(keep_hooks=False)
        if recorder.overflowed:
            notes.append("the pass made more calls than its buffer holds; the rest of it is not in its numbers")
    finally:
        collector.abandon()
        reader.release()
    return notes


def _forward_and_backward(
    model: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Tensor] | str, recorder: Recorder
) -> list[str]:
    with torch.inference_mode(False), torch.enable_grad():
        begin = _next_node()
        own = {id(parameter) for parameter in model.parameters()}
        if any(_has_strings(tensor) for _, tensor in tensor_tree.inputs(args, kwargs)):
            args, kwargs = tree_map_only(Tensor, lambda t: t if id(t) in own else _without_strings(t), (args, kwargs))
        output = model(*args, **kwargs)
        value = _summed(output) if isinstance(loss, str) else loss(output)
        _check_value(value)
        recorder.scalar("train/loss", value)
        if not value.requires_grad:
            return ["the loss depends on nothing that needs a gradient: there was no backward pass"]
        _backward(value, model, begin)
    return _without_gradient(model)


def _has_strings(tensor: Tensor) -> bool:
    return tensor.requires_grad or tensor.is_inference()


def _without_strings(tensor: Tensor) -> Tensor:
    """An input that backward ends at: the caller's own, with its gradient, hooks and graph, is not reached."""
    if tensor.is_inference():  # cannot be saved for backward
        tensor = tensor.clone()
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()  # only a leaf may not be written in place


def _summed(output: object) -> Tensor:
    found = [tensor for _, tensor in tensor_tree.tensors(output) if tensor.is_floating_point()]
    if not found:
        raise ArgumentError(
            f'loss="sum" found no floating tensor in the output, a {type(output).__name__}: pass a function of it'
        )
    # In half precision the sum itself could overflow.
    sums = [(tensor.float() if tensor.dtype.itemsize < 4 else tensor).sum() for tensor in found]
    return torch.stack([one.to(sums[0]) for one in sums]).sum()


def _check_value(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        what = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(f"loss returns one floating number as a tensor, not {what}")


@dataclass(frozen=True)
class _Graph:
    """What a loss was made from."""

    leaves: list[Tensor]
    is_reentrant: bool
    """Whether part of it is a checkpoint that runs a backward pass of its own."""
    is_older: bool
    """Whether part of it was there before the pass, and may be needed after it."""


def _graph(loss: Tensor, begin: int) -> _Graph:
    """`begin` is the number of the first node that can be of the pass."""
    if loss.grad_fn is None:
        return _Graph([loss], False, False)
    leaves, found, pending = [], {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if hasattr(node, "variable") and node.variable.requires_grad:  # the forward may have frozen it since
            leaves.append(node.variable)
        pending += {below for below, _ in node.next_functions if below is not None} - found
        found.update(pending)
    return _Graph(
        leaves,
        is_reentrant=any(node.name() == REENTRANT for node in found),
        is_older=any(node._sequence_nr() < begin for node in found),
    )


def _next_node() -> int:
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())  # type: ignore[union-attr]


def _backward(loss: Tensor, model: nn.Module, begin: int) -> None:
    """Gradients of the parameters into `.grad`, which is kept aside, by a way on which nobody else is told."""
    graph = _graph(loss, begin)
    own = {id(parameter) for parameter in model.parameters()}
    if not graph.is_reentrant:
        found = torch.autograd.grad(loss, graph.leaves, retain_graph=graph.is_older, allow_unused=True)
        for leaf, gradient in zip(graph.leaves, found, strict=True):
            if id(leaf) in own:
                leaf.grad = gradient
    elif any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ArgumentError(
            "an optimizer steps in the backward pass of this model, and torch.utils.checkpoint(use_reentrant=True) "
            "leaves no way around it: peek without a loss, or checkpoint with use_reentrant=False"
        )
    else:
        with gradients_aside(leaf for leaf in graph.leaves if id(leaf) not in own):
            torch.autograd.backward(loss, retain_graph=graph.is_older)


def _without_gradient(model: nn.Module) -> list[str]:
    parameters = selection.parameters(selection.walk(model).by_path)
    names = [path for path, one in parameters.items() if one.requires_grad and one.grad is None]
    return [f"no gradient reached {_listed(names)}: the loss does not depend on it"] if names else []


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _frame(recorder: Recorder) -> Frame:
    frames = recorder.pack(0, 0).frames()
    if frames:
        return frames[-1]
    return Frame(0, time.time(), 0, (), stats.empty_rows(0), np.zeros((0, 0), dtype=np.int64))


# Who looks on.


class _Collector(Observer):
    """A probe that also tells what outputs are, and copies those that are to be kept."""

    def __init__(self, model: nn.Module, recorder: Recorder, report: Report, keeps: frozenset[str]) -> None:
        self.selector = Selector(model, None, None)
        super().__init__(model, self.selector, recorder, None, report)
        self.outputs: dict[str, Output] = {}
        self.kept: dict[str, Tensor] = {}
        self._keeps = keeps
        self._room = MOST_KEPT_BYTES
        self._sizes: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def saw_output(self, hook: ForwardHook, output: object) -> None:
        super().saw_output(hook, output)
        if in_backward() or is_traced():
            return
        with self._report.guarded(f"output of {hook.path}"), without_dispatch_modes():
            for index, tensor in tensor_tree.tensors(output):
                name, dtype = hook.path + index, str(tensor.dtype).removeprefix("torch.")
                self.outputs[name] = Output(type(hook.module()).__name__, _shape(tensor), dtype)
                if hook.path in self._keeps and not has_no_data(tensor):
                    self._keep(name, tensor)

    def _keep(self, name: str, tensor: Tensor) -> None:
        """A copy made now: what is changed in place later does not show. Of several calls the last one stays."""
        self._calls[name] = self._calls.get(name, 0) + 1
        if self.kept.pop(name, None) is not None:
            self._room += self._sizes[name]
        self._sizes[name] = size = tensor.numel() * tensor.element_size()
        if size > self._room:
            return
        self._room -= size
        with torch.inference_mode(False), torch.no_grad():
            self.kept[name] = tensor.detach().to("cpu", copy=True)

    def notes(self) -> Iterator[str]:
        """What is to be said of the kept tensors."""
        left_out = [f"{name} ({size / 2**20:.1f} MB)" for name, size in self._sizes.items() if name not in self.kept]
        if left_out:
            yield f"not kept, as it would be more than {MOST_KEPT_BYTES / 2**20:.0f} MB in all: {_listed(left_out)}"
        again = [f"{name} ({calls} calls)" for name, calls in self._calls.items() if calls > 1]
        if again:
            yield f"kept of the last call only: {_listed(again)}"
        if self._keeps and not self._calls:
            yield f"nothing was kept: no call of {_listed(sorted(self._keeps))} returned a tensor"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a nested tensor only how many there are: the rest differs."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


@contextlib.contextmanager
def _watches_paused(model: nn.Module) -> Iterator[None]:
    """No open watch counts or reads this pass, be it on the model, a part of it, or something around it."""
    modules = set(model.modules())
    with contextlib.ExitStack() as paused:
        for watching in list(lifecycle.open_watches):
            if isinstance(watching, Watch) and not watching._idle:
                watched = watching._model()
                if watched is not None and not modules.isdisjoint(watched.modules()):
                    paused.enter_context(_paused(watching._session))
        yield


@contextlib.contextmanager
def _paused(loop: CaptureSession) -> Iterator[None]:
    """As `Watch.paused`, and nothing is told of the step that is open: it goes on afterwards as if nothing had been."""
    observer, replay = loop.observer, loop._replay
    seen, was_open, were_on = observer.seen, observer.gate.open, observer.placement._are_on
    passes = [] if replay is None else replay._passes
    loop.pause()
    observer.remove()
    observer.seen = None
    try:
        yield
    finally:
        observer.seen = seen
        loop.resume()
        if were_on:
            observer.placement.attach()
        observer.gate.open = was_open
        if replay is not None:
            replay._passes = passes
