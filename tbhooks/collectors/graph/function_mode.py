"""The TorchFunctionMode that observes the operations of one forward, and the names of operations.

The mode leaves every call unchanged. It is active while a forward is traced, except inside modules that would leave
their fused path for it, and does nothing after the forward was interrupted.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from tbhooks.capture.functional.function_mode import MODULE_CALL, NOT_CALLED, Operation, OwnMode, is_call

_VIEWS_AND_COPIES = """
    view view_as reshape reshape_as flatten unflatten ravel transpose t T mT H mH adjoint permute swapaxes swapdims
    movedim moveaxis squeeze unsqueeze expand expand_as broadcast_to narrow select unbind chunk split tensor_split
    split_with_sizes getitem hsplit vsplit dsplit view_as_real view_as_complex real imag as_strided atleast_1d
    atleast_2d atleast_3d alias contiguous clone to type type_as float double half bfloat16 cpu cuda data
    as_subclass requires_grad positive iter lift_fresh
"""
PASS_ON = frozenset(_VIEWS_AND_COPIES.split())
"""Operations that return the values of their input: they get no node."""
JOIN = frozenset(("cat", "concat", "concatenate"))
_OPERATORS = ("add", "sub", "mul", "pow", "matmul", "mod", "floordiv", "and", "or", "xor", "lshift", "rshift")
_ALIASES = {f"{how}{name}": name for name in _OPERATORS for how in "ri"}
_ALIASES |= dict.fromkeys(("truediv", "idiv", "itruediv", "rdiv", "rtruediv"), "div")


def name_of(function: Operation) -> str:
    """`add` for `torch.add`, `x + y`, `1 + x` and `x += y`."""
    name = str(getattr(function, "__name__", "operation"))
    if name == "__get__":  # an attribute such as x.T
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    is_operator = name.startswith("__")
    name = name.partition(".")[0].strip("_")
    return _ALIASES.get(name, name) if is_operator else name


class OperationObserver(Protocol):
    """Is called before and after each operation."""

    @property
    def is_observing(self) -> bool:
        """Whether the current operation is the model's, and not ours."""

    def before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """Returns a function to be called with the result."""


class TracingMode(OwnMode):
    """Active during the call of a module, which is identified by its stack frame."""

    def __init__(self, observer: OperationObserver, module: nn.Module) -> None:
        super().__init__()
        self._observer = observer
        frame = _module_call(sys._getframe(1))
        self._outermost = NOT_CALLED if frame is None else id(frame)
        self._module = weakref.ref(module)

    @property
    def was_interrupted(self) -> bool:
        """Whether its call has ended without the forward hook, which torch does not run after an interrupt."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_call(frame, self._outermost, self._module):
            frame = frame.f_back
        return frame is None

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self._observer.is_observing or self.was_interrupted:
            return func(*args, **kwargs)
        after = self._observer.before(func, args, kwargs)
        self._operations_running += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._operations_running -= 1
        after(result)
        return result


def _module_call(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    return frame
