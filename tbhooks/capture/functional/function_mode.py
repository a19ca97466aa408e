"""The functional operations a model calls inside its forwards, such as `F.relu`, `@` and attention.

A `TorchFunctionMode` is on torch's stack of modes only while a module of the model runs, and passes every call on
unchanged. It decides which results are observed and under which name. Reducing them, and distinguishing a recompute
from a forward, is left to the observer. It registers no hooks and never waits for the device.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import is_traced, without_dispatch_modes
from tbhooks.capture.functional import attention, redispatch
from tbhooks.capture.retries import Retries
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.reduction.torch_private import look_up, missing
from tbhooks.reduction.torch_rows import has_no_data

Operation = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
OnResult = Callable[[str, str, Tensor], bool | None]
"""Called with the site's path such as "encoder.layer.0.attention:softmax", an index such as "" or "[1]", and a tensor.
Returns whether a collector wants it."""
OnHeads = Callable[[str, str, Tensor], None]
"""Called with the path and index of a site inside attention, and its numbers as [..., heads, queries]."""
Collect = Callable[[str, str, str, Tensor], None]
"""Calls the collectors with a path, a kind, an index and a tensor."""

# Calls of one operation within one forward of a module that have an index of their own.
MOST_CALLS = 32

_NAMES = """
    relu relu6 leaky_relu elu gelu silu mish selu celu softplus softsign sigmoid logsigmoid tanh hardswish hardsigmoid
    hardtanh hardshrink softshrink tanhshrink threshold glu prelu rrelu
    softmax log_softmax softmin gumbel_softmax logsumexp
    matmul mm bmm addmm addbmm baddbmm einsum bilinear linear scaled_dot_product_attention multi_head_attention_forward
    layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize cosine_similarity
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag interpolate
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
"""
_LISTED = _NAMES.split()
_SPELLINGS = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "sigmoid": ("expit",),
    **{name: (f"{name}_with_indices",) for name in _LISTED if "max_pool" in name},
}
OPERATIONS: dict[Operation, str] = {
    operation: name
    for name in _LISTED
    for spelling in (name, f"{name}_", *_SPELLINGS.get(name, ()))
    for namespace in (F, torch, Tensor, torch.special, torch.linalg, getattr(torch._C, "_nn", None))
    for operation in (getattr(namespace, spelling, None),)
    if operation is not None
}
"""The observed functions, in every spelling, and the name of each."""
# Python functions inside which operations are observed too. Of others only the outermost call is.
COMPOSITE = frozenset(
    {F.multi_head_attention_forward} if redispatch.is_possible(F.multi_head_attention_forward) else ()
)

ATTENTION = frozenset({"softmax", "scaled_dot_product_attention"})
# These leave their fused path if a mode is active, and the last bits may differ.
FUSED_IN_EVALUATION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

# A frame of this code is a module's call.
MODULE_CALL = nn.Module._call_impl.__code__
# Instead of the address of a frame, where a forward was not called through its module.
NOT_CALLED = -1
_NOT_SEEN = "functional operations are not read"
_PUSH, _POP = "torch._C._push_on_torch_function_stack", "torch._C._pop_torch_function_stack"
push: Callable[[TorchFunctionMode], None] = look_up(_PUSH, lambda _: None, _NOT_SEEN)
_pop: Callable[[], Any] = look_up(_POP, lambda: None, _NOT_SEEN)
_mode_at: Callable[[int], Any] = look_up("torch._C._get_function_stack_at", lambda _: None, _NOT_SEEN)
_count_modes: Callable[[], int] = look_up("torch._C._len_torch_function_stack", lambda: 0, _NOT_SEEN)
_CAN_PUSH = _NOT_SEEN not in "".join(missing.values())
_DeviceContext: type = look_up("torch.utils._device.DeviceContext", type(None), "attention in a composite is not read")
_DisableTorchFunction: Callable[[], Any] = look_up(
    "torch._C.DisableTorchFunction",
    contextlib.nullcontext,
    "modes and subclasses of others are called by what reads operations",
)


class _Call:
    """The forward of a module that is running."""

    __slots__ = ("blind", "counts", "frame", "module", "only", "path")

    def __init__(self, path: str, module: nn.Module, frame: int, inside_blind: bool) -> None:
        self.path, self.frame, self.module = path, frame, weakref.ref(module)
        self.blind = inside_blind or (isinstance(module, FUSED_IN_EVALUATION) and not module.training)
        self.only = _observed_in(module)
        self.counts: dict[str, int] = {}

    def index(self, name: str) -> str:
        """The index of the next call of this operation."""
        earlier = self.counts.get(name, 0)
        self.counts[name] = earlier + 1
        return f"[{min(earlier, MOST_CALLS - 1)}]" if earlier else ""


def _observed_in(module: nn.Module) -> frozenset[str] | None:
    """Which operations are observed in a module; None for all.

    The forward of torch's own modules is one operation, whose result is the activation that is logged anyway: only
    attention is observed there, for its logits and entropy. Transformer layers are the exception: they call a
    functional activation between modules. Where a user's module returns an operation's result, both are the same
    tensor object, which the observer recognises.
    """
    where = getattr(type(module).forward, "__module__", None) or ""
    return ATTENTION if where.startswith("torch.nn.") and where != "torch.nn.modules.transformer" else None


def is_call(frame: FrameType, address: int, module: weakref.ref[nn.Module]) -> bool:
    """Whether this frame is that call of a module.

    Frames are identified by their address, because a reference to one would keep tensors alive. The address of a call
    that was interrupted is soon that of another frame: so it also has to be a call of the same module.
    """
    return id(frame) == address and frame.f_code is MODULE_CALL and frame.f_locals.get("self") is module()


def _is_running(call: _Call, frame: FrameType | None) -> bool:
    """Whether a module's call is around a frame."""
    while frame is not None and not is_call(frame, call.frame, call.module):
        frame = frame.f_back
    return frame is not None or call.frame == NOT_CALLED


def _count_running(calls: list[_Call], frame: FrameType | None) -> int:
    """How many of these nested calls are around a frame.

    torch calls no hook when a KeyboardInterrupt ends a forward: that a module was left is only noticed here.
    """
    count = len(calls)
    while count and not _is_running(calls[count - 1], frame):
        count -= 1
    return count


class OwnMode(TorchFunctionMode):
    """A mode of this package: it passes every call on unchanged, and is on the stack while modules run."""

    def __init__(self) -> None:
        self._is_active = False
        self._operations_running = 0

    def set_active(self, wanted: bool) -> None:
        """Puts the mode on torch's stack, or removes it.

        While one of its operations runs torch itself has taken the mode off, and puts it back afterwards: then it
        stays until the next time this is called.
        """
        if wanted is not self._is_active and not self._operations_running and _CAN_PUSH:
            (push if wanted else detach)(self)
            self._is_active = wanted


class _Mode(OwnMode):
    """The modules that are running in one thread; called with the operations in them."""

    def __init__(self, owner: FunctionalObserver) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.era = owner.era
        self._owner = owner

    def enter(self, path: str, module: nn.Module) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        del self.calls[_count_running(self.calls, frame and frame.f_back) :]
        inside_blind = bool(self.calls) and self.calls[-1].blind
        self.calls.append(_Call(path, module, NOT_CALLED if frame is None else id(frame), inside_blind))
        self.update()

    def leave(self, path: str) -> None:
        paths = [call.path for call in self.calls]
        if path in paths:
            del self.calls[-1 - paths[::-1].index(path) :]
        self.update()

    def update(self) -> None:
        """Activates the mode if the running modules want it. Where no module runs it is not active."""
        self.set_active(bool(self.calls) and not self.calls[-1].blind)

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if func is Tensor.unflatten:  # it calls super(), which torch._dynamo cannot trace
                return args[0].unflatten(*args[1:], **kwargs)
            return func(*args, **kwargs)
        name = OPERATIONS.get(func)
        call = None if name is None else self._innermost(sys._getframe(1))
        self._operations_running += 1
        try:
            if name is None or call is None:
                return func(*args, **kwargs)
            is_opened = func in COMPOSITE and _only_own_modes(types)
            result = self._open(func, types, args, kwargs) if is_opened else func(*args, **kwargs)
            if call.only is None or name in call.only:
                self._owner.on_operation(call, name, (args, kwargs), result)
            return result
        finally:
            self._operations_running -= 1

    def _innermost(self, frame: FrameType | None) -> _Call | None:
        """The innermost module that calls an operation. Changes nothing: torch may call from a thread of its own."""
        if self.era is not self._owner.era:
            return None
        running = _count_running(self.calls, frame)
        return self.calls[running - 1] if running else None

    def _open(self, func: Operation, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the body of a composite operation with the mode active."""
        with self:
            return redispatch.run_body(func, types, args, kwargs)


def _only_own_modes(types: Any) -> bool:
    """Whether no subclass and no mode of others overrides an operation: a redispatch would skip them."""
    modes = map(_mode_at, range(_count_modes()))
    return all(map(_has_plain_meaning, types)) and all(isinstance(mode, (_DeviceContext, OwnMode)) for mode in modes)


def detach(mode: TorchFunctionMode) -> None:
    """Removes a mode from torch's stack, wherever it is, and leaves all others as they are."""
    if not any(_mode_at(i) is mode for i in range(_count_modes())):
        return
    above = []
    while (top := _pop()) is not mode:
        above.append(top)
    for other in reversed(above):
        push(other)


class FunctionalObserver:
    """Observes the functional operations that a model calls while one of its forwards runs in a logged step.

    `enter_module` and `leave_module` have to be called for every module; missed calls are corrected for. After an
    interrupt that ends a forward without calling hooks the mode observes nothing, and is removed by the next of the
    three calls below.
    """

    def __init__(self, on_result: OnResult, on_heads: OnHeads, collect: Collect, report: Report) -> None:
        self.era = object()
        """Replaced when everything is forgotten, so that other threads notice."""
        self.is_enabled = True
        """Whether anything is observed; a hook that was removed may be called once more."""
        self._on_result = on_result
        self._on_heads = on_heads
        self._collect = collect
        self._report = report
        self._local = threading.local()
        self._failing: Retries[str] = Retries()

    def enter_module(self, path: str, module: nn.Module) -> None:
        """To be called from a forward pre-hook of every module."""
        if self.is_enabled and not _is_traced():
            with self._report.guarded(f"entering {path}"):
                self._mode().enter(path, module)

    def leave_module(self, path: str) -> None:
        """To be called from an `always_call` forward hook; ends what was entered inside as well."""
        if not _is_traced():
            with self._report.guarded(f"leaving {path}"):
                self._mode().leave(path)

    def begin_step(self) -> None:
        """A logged step begins: operations that could not be read in the last one are read again."""
        for path in self._failing.next_step() if self._failing else ():
            self._report.mark_seen(f"functional/{path}")

    def abandon(self) -> None:
        """Forgets everything and removes the mode; other threads do so at their next module."""
        self.era = object()
        self._mode().update()

    def _mode(self) -> _Mode:
        mode: _Mode | None = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._local.mode = _Mode(self)
        if mode.era is not self.era:
            mode.era = self.era
            mode.calls.clear()
        return mode

    def on_operation(self, call: _Call, name: str, given: Given, result: object) -> None:
        """Passes on the result of an operation, and of attention its logits and entropies."""
        path = f"{call.path}:{name}"
        if (self._failing and not self._failing.may_try(path)) or _is_traced():
            return
        started = self._report.enter()
        try:
            with (
                _DisableTorchFunction(),
                without_dispatch_modes(),
            ):  # so that neither subclasses nor modes of the user are called by what reads the result
                for _, tensor in tensor_tree.tensors(result)[:1]:
                    if not has_no_data(tensor):
                        index = call.index(name)
                        is_collected = self._on_result(path, index, tensor)
                        if name in attention.INSIDE:
                            heads = getattr(call.module(), "num_heads", None)
                            self._compute_inside(path, index, tensor, attention.INSIDE[name], given, heads)
                        if is_collected and name == "scaled_dot_product_attention":
                            self._collect_weights(path, index, given)
            self._failing.worked(path)
        except Exception as problem:
            why = f"reading it failed: {describe_exception(problem)}{self._failing.failed(path)}"
            self._report.mark_unseen(f"functional/{path}", why, replace=True)
            self._report.error(f"functional {path}", problem)
        finally:
            self._report.leave(started)

    def _compute_inside(
        self, path: str, index: str, result: Tensor, compute: attention.Compute, given: Given, heads: int | None
    ) -> None:  # fmt: skip
        args, kwargs = given
        if self._can_compute(f"{path}.entropy", ((result, *args), kwargs)):
            for part, inside, by_head in compute(args, kwargs, result, heads):
                self._on_result(f"{path}.{part}", index, inside)
                if by_head is not None:
                    self._on_heads(f"{path}.{part}", index, by_head)

    def _collect_weights(self, path: str, index: str, given: Given) -> None:
        weights = attention.first_weights(*given) if self._can_compute(f"{path}.weights", given) else None
        if weights is not None:
            self._collect(f"{path}.weights", "functional", index, weights)

    def _can_compute(self, name: str, given: Given) -> bool:
        args, kwargs = given
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not _is_plain(value):
                self._report.mark_unseen(name, f"cannot be computed from this {type(value).__name__}")
                return False
        return True


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or is_traced()


_PLAIN_MEANING = (
    getattr(Tensor.__torch_function__, "__func__", None),
    getattr(torch._C, "_disabled_torch_function_impl", None),
)


def _has_plain_meaning(kind: type[Tensor]) -> bool:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__) in _PLAIN_MEANING


def _is_plain(tensor: Tensor) -> bool:
    """Not a block mask, nor a distributed tensor, which would communicate with other ranks."""
    return (
        _has_plain_meaning(type(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(tensor, "to_local")
        and not has_no_data(tensor)
    )
