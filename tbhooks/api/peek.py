"""`peek()`: captures one forward pass, and one backward pass if there is a loss, without changing the model.

The pass is captured as a logged step of a watch is: by an observer and a parameter reader, into a recorder. This module
adds what a single pass needs: descriptions and copies of outputs, the loss, and pausing of open watches.
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

from tbhooks.api.lifecycle import open_watches
from tbhooks.capture import selection, tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced, without_dispatch_modes
from tbhooks.capture.compile.dynamo import dynamo_disable
from tbhooks.capture.hooks.hook_types import ForwardHook
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.parameters.parameter_reader import ParameterReader
from tbhooks.capture.parameters.watched_parameters import WatchedParameters
from tbhooks.capture.preserve_state import preserved, without_gradients
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.selection import Selector
from tbhooks.capture.session import CaptureSession
from tbhooks.capture.step.nan_replay import run_eagerly
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, invalid_argument, nearest
from tbhooks.data.frame import Frame, Sites
from tbhooks.data.history import History
from tbhooks.data.peek_result import Output, Peeked
from tbhooks.data.self_report import Report, listed
from tbhooks.reduction.torch_rows import has_no_data
from tbhooks.rules import RULES, Rule, RuleEngine, dead_units, saturated, vanishing_gradient

MOST_KEPT_BYTES = 256 << 20
"""How much host memory `keep=` may take. Tensors that do not fit are left out, and named in the notes."""

Loss = Callable[[Any], Tensor] | Literal["sum"] | None

REENTRANT = "CheckpointFunctionBackward"

KINDS = ("activation", "weight")
KINDS_WITH_LOSS = (*KINDS, "gradient", "weight_gradient")

# In training these rules wait for several frames, because a first step may differ from later ones. Here is only one.
# Other rules still wait: zero gradients are normal at first in a branch whose last weights are initialized to zero.
_ONE_FRAME: dict[str, Rule] = {rule.name: rule(frames=1) for rule in (dead_units, saturated, vanishing_gradient)}
ONE_PASS_RULES = tuple({**RULES, **_ONE_FRAME}.values())


@dynamo_disable
def peek(model: nn.Module, /, *args: Any, loss: Loss = None, keep: Any = None, **kwargs: Any) -> Peeked:
    """Calls `model(*args, **kwargs)` once, captures every module, and leaves the model exactly as it was.

    The pass runs in the current mode of the model (`train` or `eval`), under the current autocast and with the current
    random state, which is restored afterwards. Open watches do not count it.

    Args:
        model: the model. An exception that it raises is raised after everything was restored.
        args: its positional arguments.
        loss: a function that takes the output of the model and returns a scalar tensor, or "sum" for the sum of all
            floating-point tensors in the output. With a loss there is a backward pass, too.
        keep: which outputs to return as tensors; selects modules as `include` of `watch` does. `frame.kept` has them,
            as detached copies on the CPU, up to 256 MB.
        kwargs: its keyword arguments. Pass those that are called `loss` or `keep` by position.

    Returns:
        A `Peeked`: the `Frame` of the pass with findings, `outputs`, `kept` and `notes`.

    Raises:
        ArgumentError: for a wrong argument, or for a model on the meta device or with lazy parameters.

    Examples:
        >>> import torch, tbhooks
        >>> frame = tbhooks.peek(torch.nn.Linear(2, 1), torch.ones(4, 2), loss="sum")
        >>> frame["weight", "weight_gradient"].mean, frame.outputs["(root)"].shape
        (4.0, (4, 1))

    """
    if not isinstance(model, nn.Module):
        raise invalid_argument("model", "a torch.nn.Module", model)
    _check_loss(loss)
    model = selection.unwrap(model)
    _check_data(model)
    report = Report()
    recorder = Recorder(KINDS if loss is None else KINDS_WITH_LOSS)
    observer = _PeekObserver(model, recorder, report, _chosen(model, keep))
    with _watches_paused(model), preserved(model, dict(tensor_tree.inputs(args, kwargs))) as unrestored:
        notes = _run(model, args, kwargs, loss, observer, recorder, report)
        frame = _frame(recorder)
    judged = RuleEngine(ONE_PASS_RULES, History())(frame)
    return Peeked(
        **{field.name: getattr(judged, field.name) for field in fields(Frame)},
        outputs=observer.outputs, kept=observer.kept,
        notes=(*notes, *observer.notes(), *report.messages, *unrestored),
    )  # fmt: skip


# Checks of the arguments.


def _check_loss(loss: object) -> None:
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return
    if not isinstance(loss, str):
        raise invalid_argument("loss", 'a function of the model\'s output, "sum", or None', loss)
    if loss != "sum":
        raise ArgumentError(f"loss={loss!r} is unknown: {nearest(loss, ['sum'])}, or pass a function of the output")


def _check_data(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} has no shape yet: call the model once to initialize lazy modules")
        if has_no_data(tensor):
            where = "is on the meta device" if tensor.is_meta else "is a fake tensor"
            raise ArgumentError(f"{name} {where} and has no values: load the weights first")


def _chosen(model: nn.Module, keep: object) -> frozenset[str]:
    if keep is None:
        return frozenset()
    try:
        selector = Selector(model, keep, None)
    except ArgumentError as problem:  # its message says include=
        raise ArgumentError("keep" + str(problem).removeprefix("include")) from None
    return frozenset(selector.choose(selection.walk(model).by_path))


# The pass.


def _run(
    model: nn.Module, args: Any, kwargs: Any, loss: Loss, observer: _PeekObserver, recorder: Recorder, report: Report
) -> list[str]:
    parameters = WatchedParameters(model, observer.selector, recorder, report, merges_ranks=False)
    reader = ParameterReader(parameters, recorder, GroupNumbers(), report)
    recorder.begin(with_buckets=True)
    observer.begin(attach=True)
    notes = []
    try:
        with run_eagerly():
            if loss is None:
                model(*args, **kwargs)
            else:
                notes = _forward_and_backward(model, args, kwargs, loss, recorder)
        reader.read_remaining()
        with without_dispatch_modes():
            observer.end_reading()
        observer.end(keep_hooks=False)
        if recorder.overflowed:
            notes.append("the pass made more calls than the buffer holds; the statistics do not include the rest")
    finally:
        observer.abandon()
        reader.release()
    return notes


def _forward_and_backward(
    model: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Tensor] | str, recorder: Recorder
) -> list[str]:
    with torch.inference_mode(False), torch.enable_grad():
        begin = _sequence_number(torch.zeros((), requires_grad=True).clone().grad_fn)
        own = {id(parameter) for parameter in model.parameters()}
        if any(tensor.requires_grad or tensor.is_inference() for _, tensor in tensor_tree.inputs(args, kwargs)):
            args, kwargs = tree_map_only(Tensor, lambda t: t if id(t) in own else _detached(t), (args, kwargs))
        output = model(*args, **kwargs)
        value = _summed(output) if isinstance(loss, str) else loss(output)
        _check_value(value)
        recorder.scalar("train/loss", value)
        if not value.requires_grad:
            return ["the loss does not require a gradient: there was no backward pass"]
        _backward(value, model, begin)
    return _without_gradient(model)


def _detached(tensor: Tensor) -> Tensor:
    """An input at which backward ends: it does not reach the gradient, hooks and graph of the caller's tensor."""
    if tensor.is_inference():  # autograd cannot save it for backward
        tensor = tensor.clone()
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()  # a leaf cannot be modified in place


def _summed(output: object) -> Tensor:
    tensors = [tensor for _, tensor in tensor_tree.tensors(output) if tensor.is_floating_point()]
    if not tensors:
        name = type(output).__name__
        raise ArgumentError(f'loss="sum" needs a floating-point tensor in the output, a {name}: pass a function of it')
    # In half precision the sum itself could overflow.
    sums = [(tensor.float() if tensor.dtype.itemsize < 4 else tensor).sum() for tensor in tensors]
    return torch.stack([one.to(sums[0]) for one in sums]).sum()


def _check_value(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        what = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(f"loss must return a floating-point tensor with one element, got {what}")


@dataclass(frozen=True)
class _Graph:
    """The autograd graph of a loss."""

    leaves: list[Tensor]
    is_reentrant: bool
    """Whether it contains a reentrant checkpoint, which runs a backward pass of its own."""
    is_older: bool
    """Whether a part of it existed before the pass, and may be needed afterwards."""


def _graph(loss: Tensor, begin: int) -> _Graph:
    """`begin` is the sequence number of the first node that the pass can have made."""
    if loss.grad_fn is None:
        return _Graph([loss], False, False)
    leaves, nodes, pending = [], {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if hasattr(node, "variable") and node.variable.requires_grad:  # the forward may have frozen it
            leaves.append(node.variable)
        pending += {below for below, _ in node.next_functions if below is not None} - nodes
        nodes.update(pending)
    return _Graph(
        leaves,
        is_reentrant=any(node.name() == REENTRANT for node in nodes),
        is_older=any(_sequence_number(node) < begin for node in nodes),
    )


def _sequence_number(node: Any) -> int:
    return int(node._sequence_nr())  # noqa: SLF001  nothing else says how old a node is


def _backward(loss: Tensor, model: nn.Module, begin: int) -> None:
    """Computes the gradients of the parameters into `.grad` (the caller saved it), without hooks of others running."""
    graph = _graph(loss, begin)
    own = {id(parameter) for parameter in model.parameters()}
    if not graph.is_reentrant:
        gradients = torch.autograd.grad(loss, graph.leaves, retain_graph=graph.is_older, allow_unused=True)
        for leaf, gradient in zip(graph.leaves, gradients, strict=True):
            if id(leaf) in own:
                leaf.grad = gradient
    elif any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ArgumentError(
            "an optimizer steps in the backward pass of this model, and torch.utils.checkpoint(use_reentrant=True) "
            "cannot run without it: call peek() without a loss, or checkpoint with use_reentrant=False"
        )
    else:
        with without_gradients(leaf for leaf in graph.leaves if id(leaf) not in own):
            torch.autograd.backward(loss, retain_graph=graph.is_older)


def _without_gradient(model: nn.Module) -> list[str]:
    parameters = selection.parameters(selection.walk(model).by_path)
    names = [path for path, one in parameters.items() if one.requires_grad and one.grad is None]
    return [f"no gradient reached {listed(names)}: the loss does not depend on it"] if names else []


def _frame(recorder: Recorder) -> Frame:
    frames = recorder.pack(0, 0).frames()
    if frames:
        return frames[-1]
    return Frame(0, time.time(), 0, Sites(), stats.empty_rows(0), np.zeros((0, 0), dtype=np.int64))


# Outputs.


class _PeekObserver(Observer):
    """An observer that also notes the shapes of outputs, and copies those that are to be kept."""

    def __init__(self, model: nn.Module, recorder: Recorder, report: Report, keep: frozenset[str]) -> None:
        self.selector = Selector(model, None, None)
        super().__init__(model, self.selector, recorder, None, report)
        self._step.eager.leave_to_python()  # it has to be called with every output
        self.outputs: dict[str, Output] = {}
        self.kept: dict[str, Tensor] = {}
        self._paths_to_keep = keep
        self._bytes_left = MOST_KEPT_BYTES
        self._sizes: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def on_output(self, hook: ForwardHook, output: object, args: tuple[Any, ...] = ()) -> None:
        super().on_output(hook, output, args)
        if in_backward() or is_traced():
            return
        with self._report.guarded(f"output of {hook.path}"), without_dispatch_modes():
            for index, tensor in tensor_tree.tensors(output):
                name, dtype = hook.path + index, str(tensor.dtype).removeprefix("torch.")
                self.outputs[name] = Output(type(hook.module()).__name__, _shape(tensor), dtype)
                if hook.path in self._paths_to_keep and not has_no_data(tensor):
                    self._keep(name, tensor)

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Copies at once, before the tensor can be modified in place. Of several calls the last one is kept."""
        self._calls[name] = self._calls.get(name, 0) + 1
        if self.kept.pop(name, None) is not None:
            self._bytes_left += self._sizes[name]
        self._sizes[name] = size = tensor.numel() * tensor.element_size()
        if size > self._bytes_left:
            return
        self._bytes_left -= size
        with torch.inference_mode(False), torch.no_grad():
            self.kept[name] = tensor.detach().to("cpu", copy=True)

    def notes(self) -> Iterator[str]:
        """What the user must know about the kept tensors."""
        left_out = [f"{name} ({size / 2**20:.1f} MB)" for name, size in self._sizes.items() if name not in self.kept]
        if left_out:
            yield f"not kept, because keep= is limited to {MOST_KEPT_BYTES / 2**20:.0f} MB: {listed(left_out)}"
        again = [f"{name} ({calls} calls)" for name, calls in self._calls.items() if calls > 1]
        if again:
            yield f"only the last call was kept: {listed(again)}"
        if self._paths_to_keep and not self._calls:
            yield f"nothing was kept: no call of {listed(sorted(self._paths_to_keep))} returned a tensor"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape; of a nested tensor only its length."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


@contextlib.contextmanager
def _watches_paused(model: nn.Module) -> Iterator[None]:
    """Pauses every open watch on the model, on a part of it, or on a model around it."""
    modules = set(model.modules())
    with contextlib.ExitStack() as paused:
        for lifecycle in list(open_watches):
            watched = lifecycle.model() if lifecycle.is_active else None
            if watched is not None and not modules.isdisjoint(watched.modules()):
                paused.enter_context(_paused(lifecycle.session))
        yield


@contextlib.contextmanager
def _paused(session: CaptureSession) -> Iterator[None]:
    """Like `Watch.paused`, but the open step goes on afterwards as if nothing had happened."""
    observer, replay = session.observer, session.replay
    seen, was_open, was_attached = observer.seen, observer.gate.open, observer.placement.is_attached
    passes = replay.passes
    session.pause()
    observer.remove()
    observer.seen = None
    try:
        yield
    finally:
        observer.seen = seen
        session.resume()
        if was_attached:
            observer.placement.attach()
        observer.gate.open = was_open
        replay.passes = passes
