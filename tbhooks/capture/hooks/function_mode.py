"""The functional operations a model calls inside its forwards, such as `F.relu`, `@` and attention.

A `TorchFunctionMode` lies on torch's stack of modes only while a module of the model runs, and passes every
call on untouched. It decides what is seen and under which name; reducing, and telling a recompute from a
forward, is the caller's. It puts no hooks on anything and never waits for the device.
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
from tbhooks.capture.hooks import attention
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_private import look_up, missing
from tbhooks.reduction.torch_rows import has_no_data

Operation = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
Saw = Callable[[str, str, Tensor], bool | None]
"""Gets the site's path such as "encoder.layer.0.attention:softmax", an index such as "" or "[1]", and the tensor; says
whether somebody looks on."""
Show = Callable[[str, str, str, Tensor], None]
"""The same to those who look on, with the kind before the index."""

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
"""What is seen, in every spelling, and the name it is seen under."""
# Python functions whose own operations are seen too, from torch 2.13 on. Of all others only the outermost call is.
COMPOSITE = frozenset({F.multi_head_attention_forward} if hasattr(torch.overrides, "redispatch_function") else ())

ATTENTION = frozenset({"softmax", "scaled_dot_product_attention"})
# These look whether a mode is on and then leave their fused path, whose last bits may differ.
FUSED_IN_EVALUATION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

# A frame of this code is a module's call.
MODULE_CALL = nn.Module._call_impl.__code__
# Stands for the address of a frame where a module was not called as one.
NOT_CALLED = -1
_NOT_SEEN = "functional operations are not seen"
_PUSH, _POP = "torch._C._push_on_torch_function_stack", "torch._C._pop_torch_function_stack"
push: Callable[[TorchFunctionMode], None] = look_up(_PUSH, lambda _: None, _NOT_SEEN)
_pop: Callable[[], Any] = look_up(_POP, lambda: None, _NOT_SEEN)
_mode_at: Callable[[int], Any] = look_up("torch._C._get_function_stack_at", lambda _: None, _NOT_SEEN)
_count_modes: Callable[[], int] = look_up("torch._C._len_torch_function_stack", lambda: 0, _NOT_SEEN)
_CAN_LIE_ON_STACK = _NOT_SEEN not in "".join(missing.values())
_DeviceContext: type = look_up("torch.utils._device.DeviceContext", type(None), "attention in a composite is not seen")
_DisableTorchFunction: Callable[[], Any] = look_up(
    "torch._C.DisableTorchFunction", contextlib.nullcontext, "modes and subclasses see how operations are read"
)


class _Call:
    """The forward of a module that is running."""

    __slots__ = ("blind", "counts", "frame", "module", "only", "path")

    def __init__(self, path: str, module: nn.Module, frame: int, inside_blind: bool) -> None:
        self.path, self.frame, self.module = path, frame, weakref.ref(module)
        self.blind = inside_blind or (isinstance(module, FUSED_IN_EVALUATION) and not module.training)
        self.only = _seen_in(module)
        self.counts: dict[str, int] = {}

    def index(self, name: str) -> str:
        """The index of the next call of this operation."""
        earlier = self.counts.get(name, 0)
        self.counts[name] = earlier + 1
        return f"[{min(earlier, MOST_CALLS - 1)}]" if earlier else ""


def _seen_in(module: nn.Module) -> frozenset[str] | None:
    """Which operations are seen in a module; None for all.

    The forward of torch's own modules is one operation, whose result is the activation that is logged anyway:
    nothing is seen there but attention, for its logits and entropy. Transformer layers are the exception: they
    call a functional activation between modules. Where a user's module returns an operation's result, both are
    the same tensor object, which the reader can tell.
    """
    where = getattr(type(module).forward, "__module__", None) or ""
    return ATTENTION if where.startswith("torch.nn.") and where != "torch.nn.modules.transformer" else None


def is_call(frame: FrameType, address: int, module: weakref.ref[nn.Module]) -> bool:
    """Whether this frame is that call of a module.

    Frames are known by their address, because one that is held would hold tensors. The address of a call that was
    interrupted is soon that of another frame: so it has to be a call, and of the same module.
    """
    return id(frame) == address and frame.f_code is MODULE_CALL and frame.f_locals.get("self") is module()


def _is_running(call: _Call, frame: FrameType | None) -> bool:
    """Whether a module's call is around a frame."""
    while frame is not None and not is_call(frame, call.frame, call.module):
        frame = frame.f_back
    return frame is not None or call.frame == NOT_CALLED


def _count_running(calls: list[_Call], frame: FrameType | None) -> int:
    """How many of these nested calls are around a frame.

    torch runs no hook at all when a KeyboardInterrupt ends a forward, so that it was left can only be seen here.
    """
    count = len(calls)
    while count and not _is_running(calls[count - 1], frame):
        count -= 1
    return count


class OwnMode(TorchFunctionMode):
    """A mode of this package: it passes every call on untouched, and lies on the stack while modules run."""

    def __init__(self) -> None:
        self._on = False
        self._operations_running = 0

    def lie_on_stack(self, wanted: bool) -> None:
        """Puts the mode on or off.

        While one of its operations runs torch itself holds the mode, and puts it back afterwards: then it stays
        until the next time this is called.
        """
        if wanted is not self._on and not self._operations_running and _CAN_LIE_ON_STACK:
            (push if wanted else detach)(self)
            self._on = wanted


class _Mode(OwnMode):
    """One thread's running modules, and what sees the operations they call."""

    def __init__(self, owner: Functional) -> None:
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
        self.settle()

    def leave(self, path: str) -> None:
        paths = [call.path for call in self.calls]
        if path in paths:
            del self.calls[-1 - paths[::-1].index(path) :]
        self.settle()

    def settle(self) -> None:
        """Puts the mode on or off, as the running modules want it. Where no module runs it sees nothing."""
        self.lie_on_stack(bool(self.calls) and not self.calls[-1].blind)

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = OPERATIONS.get(func)
        call = None if name is None else self._innermost(sys._getframe(1))
        self._operations_running += 1
        try:
            if name is None or call is None:
                return func(*args, **kwargs)
            opens = func in COMPOSITE and _nobody_else_is_asked(types)
            result = self._open(func, types, args, kwargs) if opens else func(*args, **kwargs)
            if call.only is None or name in call.only:
                self._owner.saw_operation(call, name, (args, kwargs), result)
            return result
        finally:
            self._operations_running -= 1

    def _innermost(self, frame: FrameType | None) -> _Call | None:
        """The module that calls an operation. Changes nothing: torch may call from a thread of its own."""
        if self.era is not self._owner.era:
            return None
        running = _count_running(self.calls, frame)
        return self.calls[running - 1] if running else None

    def _open(self, func: Operation, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the body of a composite operation with the mode on."""
        with self:
            return torch.overrides.redispatch_function(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _nobody_else_is_asked(types: Any) -> bool:
    """Whether neither a subclass nor another mode, which a redispatch would pass over, has a say in an operation."""
    modes = map(_mode_at, range(_count_modes()))
    return all(map(_has_plain_meaning, types)) and all(isinstance(mode, (_DeviceContext, OwnMode)) for mode in modes)


def detach(mode: TorchFunctionMode) -> None:
    """Removes a mode from torch's stack, wherever it lies, and leaves all others as they are."""
    if not any(_mode_at(i) is mode for i in range(_count_modes())):
        return
    above = []
    while (top := _pop()) is not mode:
        above.append(top)
    for other in reversed(above):
        push(other)


class Functional:
    """Sees the functional operations a model calls, while one of its forwards runs in a logged step.

    Every module of the model has to say when it is entered and left; the order is mended where a call was
    missed. After an interrupt that ends a forward without a word the mode sees nothing any more, and is
    taken off by the next of the three calls below.
    """

    def __init__(self, saw: Saw, report: Report) -> None:
        self.era = object()
        """Changes when everything is forgotten, for the threads that did not forget it themselves."""
        self.listens = True
        """Whether anything is to be seen; a hook that was taken off may be called once more."""
        self.show: Show | None = None
        """For what only those want who look on."""
        self._saw = saw
        self._report = report
        self._local = threading.local()
        self._broken: set[str] = set()

    def enter_module(self, path: str, module: nn.Module) -> None:
        """To be called from a forward pre-hook of every module."""
        if self.listens and not _is_traced():
            with self._report.guarded(f"entering {path}"):
                self._mode().enter(path, module)

    def leave_module(self, path: str) -> None:
        """To be called from an `always_call` forward hook; ends what was entered inside as well."""
        if not _is_traced():
            with self._report.guarded(f"leaving {path}"):
                self._mode().leave(path)

    def abandon(self) -> None:
        """Forgets everything, and takes the mode off; other threads do so at their next module."""
        self.era = object()
        self._mode().settle()

    def _mode(self) -> _Mode:
        mode: _Mode | None = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._local.mode = _Mode(self)
        if mode.era is not self.era:
            mode.era = self.era
            mode.calls.clear()
        return mode

    def saw_operation(self, call: _Call, name: str, given: Given, result: object) -> None:
        """Shows the result of an operation, and of attention its logits and entropies."""
        path = f"{call.path}:{name}"
        if path in self._broken or _is_traced():
            return
        started = self._report.enter()
        try:
            with (
                _DisableTorchFunction(),
                without_dispatch_modes(),
            ):  # neither subclasses nor modes of the user see our reading
                for _, tensor in tensor_tree.tensors(result)[:1]:
                    if not has_no_data(tensor):
                        index = call.index(name)
                        is_looked_at = self._saw(path, index, tensor)
                        if name in attention.INSIDE:
                            self._show_inside(path, index, tensor, attention.INSIDE[name], given)
                        if is_looked_at and self.show is not None and name == "scaled_dot_product_attention":
                            self._show_weights(self.show, path, index, given)
        except Exception as problem:
            self._broken.add(path)
            self._report.error(f"functional {path}", problem)
        finally:
            self._report.leave(started)

    def _show_inside(self, path: str, index: str, result: Tensor, look: attention.LookInside, given: Given) -> None:
        args, kwargs = given
        if self._can_compute(f"{path}.entropy", ((result, *args), kwargs)):
            for part, inside in look(args, kwargs, result):
                self._saw(f"{path}.{part}", index, inside)

    def _show_weights(self, show: Show, path: str, index: str, given: Given) -> None:
        weights = attention.first_weights(*given) if self._can_compute(f"{path}.weights", given) else None
        if weights is not None:
            show(f"{path}.weights", "functional", index, weights)

    def _can_compute(self, name: str, given: Given) -> bool:
        args, kwargs = given
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not _is_plain(value):
                self._report.mark_unseen(name, f"not computed from a {type(value).__name__} like this")
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
    """Not a mask that only stands for one, nor a distributed tensor, which would talk to other ranks."""
    return (
        _has_plain_meaning(type(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(tensor, "to_local")
        and not has_no_data(tensor)
    )
