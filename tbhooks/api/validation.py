"""What users pass, understood or refused with a sentence that says what is allowed."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tbhooks.data.artifacts import Hyperparameters
from tbhooks.data.errors import ArgumentError, shown


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


Value = str | float | bool


def understood(values: Any, metrics: Any) -> Hyperparameters:
    """Of `hparams`' arguments."""
    if not isinstance(values, Mapping) or not values:
        raise ArgumentError(f'hparams takes a dict such as {{"lr": 0.1}}, not {shown(values)}')
    found: dict[str, Value] = {}
    for name, value in _flattened(values, ""):
        if name in found:
            raise ArgumentError(f"hparams names {name!r} twice: with a dot in a key, and as a dict in a dict")
        found[name] = _comparable(value)
    return Hyperparameters(found, _tags(metrics))


def _flattened(values: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            raise ArgumentError(f"hparams names values by non-empty strings, not {shown(key)}")
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{above}{key}.")
        else:
            yield above + key, value


def _comparable(value: Any) -> Value:
    """Whole numbers become floats, as TensorBoard knows no others; what those cannot tell apart become texts."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum of strings, too
    if isinstance(value, int | float):
        return float(value) if _is_exact(value) else str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy's or torch's
        return _comparable(value.item())
    return str(value)


def _is_exact(value: float) -> bool:
    """Infinity and NaN are not: no JSON holds them, and the whole tab would stay empty."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= 2**53


def _tags(metrics: Any) -> tuple[str, ...]:
    if isinstance(metrics, str) or not isinstance(metrics, Sequence | set | frozenset):
        raise ArgumentError(f'metrics is a list of tags such as "train/loss", not {shown(metrics)}')
    tags = tuple(metrics)
    for tag in tags:
        if not isinstance(tag, str) or not tag.strip():
            raise ArgumentError(f'a metric is a tag such as "train/loss", not {shown(tag)}')
        if tags.count(tag) > 1:
            raise ArgumentError(f"metrics names {tag!r} twice")
    return tags
