"""Runs the body of a Python function of torch whose call has already been passed to a TorchFunctionMode.

Such a function asks first whether a mode or a subclass overrides it, and would pass the call to the mode again.
From torch 2.13 on torch.overrides.redispatch_function skips that question. Before, a copy of the function is called, in
which the answer is no.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

_QUESTION = "has_torch_function"
_redispatch: Callable[..., Any] | None = getattr(torch.overrides, "redispatch_function", None)


def is_possible(function: Callable[..., Any]) -> bool:
    """Whether the body of this function can be run by itself in this torch."""
    return _redispatch is not None or (isinstance(function, FunctionType) and _QUESTION in function.__code__.co_names)


def run_body(function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function without passing the call itself to modes and subclasses; what it calls is passed to them."""
    if _redispatch is not None:
        return _redispatch(function, types, args, kwargs)
    return _without_question(function)(*args, **kwargs)


def _without_question(function: FunctionType) -> FunctionType:
    """A copy made at each call: a user may have replaced functions that the body calls."""
    names = {**function.__globals__, _QUESTION: lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
