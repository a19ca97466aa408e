"""What users pass, understood or refused with a sentence that says what is allowed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tbhooks.errors import ArgumentError


def shown(value: object) -> str:
    """A value as messages quote it."""
    text = repr(value)
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(value).__name__})"


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """`every`, `n` and their like."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if number >= least:
                return number
    raise ArgumentError(f"{name} is a whole number of at least {least}, not {shown(value)}")


def histograms(value: Any) -> bool | int:
    """True, False, or every how many logged steps."""
    return value if isinstance(value, bool) else whole_number("histograms (if not True or False)", value)


def items(values: Any) -> list[tuple[Any, Any]]:
    """What `log` was given, name by name."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f'log takes a dict such as {{"loss": loss}}, not {shown(values)}')
    return list(values.items())


def tag(name: Any) -> str:
    """The TensorBoard tag of a name given to `log`."""
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"log names values by non-empty strings, not {shown(name)}")
    return name if "/" in name else f"train/{name}"


def number(name: str, value: Any) -> Tensor | float:
    """A value given to `log`; tensors stay on their device."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            return value
        raise ArgumentError(f"log takes one number a name; {name!r} is a tensor of shape {tuple(value.shape)}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"log takes numbers and one-element tensors; {name!r} is {shown(value)}") from None


def steps(value: Any) -> tuple[int, int]:
    """The first and the last of some steps."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentError(f"steps is the first and the last, such as (10, 20), not {shown(value)}")
    first, last = (whole_number("a step", step, least=0) for step in value)
    if last < first:
        raise ArgumentError(f"steps begins with the first, such as (10, 20), not {shown(value)}")
    return first, last
