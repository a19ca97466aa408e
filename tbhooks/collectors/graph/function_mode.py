"""What operations are called, which only pass a tensor on, and the mode by which they are seen in one pass.

The mode passes every call on untouched. It lies on torch's stack while a pass is followed, except inside modules
that would leave their fused path for it, and sees nothing once the pass was left without a word.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from tbhooks.capture.hooks.function_mode import MODULE_CALL, NOT_CALLED, Operation, OwnMode, is_call

_NO_NEW_NUMBERS = """
    view view_as reshape reshape_as flatten unflatten ravel transpose t T mT H mH adjoint permute swapaxes swapdims
    movedim moveaxis squeeze unsqueeze expand expand_as broadcast_to narrow select unbind chunk split tensor_split
    split_with_sizes getitem hsplit vsplit dsplit view_as_real view_as_complex real imag as_strided atleast_1d
    atleast_2d atleast_3d alias contiguous clone to type type_as float double half bfloat16 cpu cuda data
    as_subclass requires_grad positive iter lift_fresh
"""
PASS_ON = frozenset(_NO_NEW_NUMBERS.split())
"""What comes out of these is drawn as what went in."""
JOIN = frozenset(("cat", "concat", "concatenate"))
_OPERATORS = ("add", "sub", "mul", "pow", "matmul", "mod", "floordiv", "and", "or", "xor", "lshift", "rshift")
_SPELT = {f"{how}{name}": name for name in _OPERATORS for how in "ri"}
_SPELT |= dict.fromkeys(("truediv", "idiv", "itruediv", "rdiv", "rtruediv"), "div")


def name_of(function: Operation) -> str:
    """`add` for `torch.add`, `x + y`, `1 + x` and `x += y`."""
    name = str(getattr(function, "__name__", "operation"))
    if name == "__get__":  # an attribute such as x.T
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    is_operator = name.startswith("__")
    name = name.partition(".")[0].strip("_")
    return _SPELT.get(name, name) if is_operator else name


class Sees(Protocol):
    """What the mode tells: before an operation and after it."""

    @property
    def is_looking(self) -> bool:
        """Whether what is computed now is the model's."""

    def before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """Returns what is to be told the result."""


class Mode(OwnMode):
    """On while a call of a module runs, which is known by the frame it runs in."""

    def __init__(self, sees: Sees, module: nn.Module) -> None:
        super().__init__()
        self._sees = sees
        frame = _module_call(sys._getframe(1))
        self._outermost = NOT_CALLED if frame is None else id(frame)
        self._module = weakref.ref(module)

    @property
    def is_left_behind(self) -> bool:
        """Whether the call it was put on for has ended; torch runs no hook when an interrupt ends a forward."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_call(frame, self._outermost, self._module):
            frame = frame.f_back
        return frame is None

    def __torch_function__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self._sees.is_looking or self.is_left_behind:
            return func(*args, **kwargs)
        told = self._sees.before(func, args, kwargs)
        self._operations_running += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._operations_running -= 1
        told(result)
        return result


def _module_call(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    return frame
