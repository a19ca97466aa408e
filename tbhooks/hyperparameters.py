"""What a run was started with, as users pass it: flattened, in the types that can be compared, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tbhooks import arguments
from tbhooks.errors import ArgumentError
from tbhooks.exhibits import Hyperparameters

Value = str | float | bool


def understood(values: Any, metrics: Any) -> Hyperparameters:
    """Of `hparams`' arguments."""
    if not isinstance(values, Mapping) or not values:
        raise ArgumentError(f'hparams takes a dict such as {{"lr": 0.1}}, not {arguments.shown(values)}')
    found: dict[str, Value] = {}
    for name, value in _flattened(values, ""):
        if name in found:
            raise ArgumentError(f"hparams names {name!r} twice: with a dot in a key, and as a dict in a dict")
        found[name] = _comparable(value)
    return Hyperparameters(found, _tags(metrics))


def _flattened(values: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            raise ArgumentError(f"hparams names values by non-empty strings, not {arguments.shown(key)}")
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
        raise ArgumentError(f'metrics is a list of tags such as "train/loss", not {arguments.shown(metrics)}')
    tags = tuple(metrics)
    for tag in tags:
        if not isinstance(tag, str) or not tag.strip():
            raise ArgumentError(f'a metric is a tag such as "train/loss", not {arguments.shown(tag)}')
        if tags.count(tag) > 1:
            raise ArgumentError(f"metrics names {tag!r} twice")
    return tags
