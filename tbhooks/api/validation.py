"""Checks of what users pass to the methods of `Watch`. Each raises an ArgumentError that says what is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tbhooks.capture.scalars.step_samples import SampleCall
from tbhooks.data.artifacts import Hyperparameters
from tbhooks.data.artifacts.samples import SampleId, as_id
from tbhooks.data.errors import ArgumentError, check_integer, invalid_argument, quoted


def histograms(value: Any) -> bool | int:
    """`histograms` of `watch`: True, False, or an interval in logged steps."""
    return value if isinstance(value, bool) else check_integer("histograms (if not True or False)", value)


def items(values: Any) -> list[tuple[Any, Any]]:
    """The pairs of name and value that `log` was given."""
    if not isinstance(values, Mapping):
        raise invalid_argument("the argument of log()", 'a dict such as {"loss": loss}', values)
    return list(values.items())


def tag(name: Any) -> str:
    """The TensorBoard tag of a name given to `log`."""
    if not isinstance(name, str) or not name:
        raise invalid_argument("a name given to log()", "a non-empty string", name)
    return name if "/" in name else f"train/{name}"


def number(name: str, value: Any) -> Tensor | float:
    """A value given to `log`. Tensors stay on their device."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            return value
        raise ArgumentError(f"log() takes one number per name; {name!r} is a tensor of shape {tuple(value.shape)}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"log() takes numbers and one-element tensors; {name!r} is {quoted(value)}") from None


MOST_SAMPLES = 1024


def samples(values: Any, ids: Any, group: Any, most: Any) -> SampleCall:
    """The arguments of `samples`. Tensors stay on their device."""
    if check_integer("most", most) > MOST_SAMPLES:
        raise invalid_argument("most", f"an integer <= {MOST_SAMPLES}", most)
    given = values if isinstance(values, Tensor) else _as_tensor(values)
    if given.is_complex() or given.is_meta or given.layout is not torch.strided:
        raise invalid_argument("values", "a dense tensor of real numbers", values)
    names = group if isinstance(group, str) or group is None else _per_sample("group", group, given)
    if isinstance(names, tuple):
        names = tuple(map(str, names))
    return SampleCall(given, None if ids is None else _per_sample("ids", ids, given), names, int(most))


def _as_tensor(values: Any) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise invalid_argument("values", "a tensor or a list of numbers, one per sample", values) from None


def _per_sample(name: str, given: Any, values: Tensor) -> Tensor | tuple[SampleId, ...]:
    """One id or group for each sample: on the device of the values, else as Python values."""
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
            raise invalid_argument(name, "a tensor of integers", given)
        shape = tuple(given.shape)
        if given.device != values.device and given.device.type != "cpu":
            raise ArgumentError(f"{name} is on {given.device}, and values on {values.device}: use one device")
    else:
        try:
            shape = (len(given),)
        except TypeError:
            raise invalid_argument(name, "a tensor or a list with one entry per sample", given) from None
    if tuple(values.shape[: len(shape)]) != shape and not (len(shape) == 1 and shape[0] == values.numel()):
        raise ArgumentError(f"{name} has the shape {shape}, which does not fit values of shape {tuple(values.shape)}")
    if isinstance(given, Tensor):
        return given.detach() if given.device == values.device else tuple(given.reshape(-1).tolist())
    listed = given.tolist() if hasattr(given, "tolist") else given
    return tuple(as_id(entry) for entry in listed)


def steps(value: Any) -> tuple[int, int]:
    """The first and the last step of a range, both included."""
    expected = "the first and the last step, such as (10, 20)"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise invalid_argument("steps", expected, value)
    first, last = (check_integer("a step", step, least=0) for step in value)
    if last < first:
        raise invalid_argument("steps", expected, value)
    return first, last


Value = str | float | bool


def parse_hyperparameters(values: Any, metrics: Any) -> Hyperparameters:
    """The arguments of `hparams`: nested dicts are flattened, values become strings, floats or bools."""
    if not isinstance(values, Mapping) or not values:
        raise invalid_argument("the argument of hparams()", 'a dict such as {"lr": 0.1}', values)
    flat: dict[str, Value] = {}
    for name, value in _flattened(values, ""):
        if name in flat:
            raise ArgumentError(f"hparams has {name!r} twice: as a key with a dot, and as a key of a nested dict")
        flat[name] = _comparable(value)
    return Hyperparameters(flat, _tags(metrics))


def _flattened(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            raise invalid_argument("a key of hparams", "a non-empty string", key)
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _comparable(value: Any) -> Value:
    """TensorBoard's HPARAMS tab has strings, floats and bools. Integers that a float cannot hold become strings."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum of strings prints its name otherwise
    if isinstance(value, int | float):
        return float(value) if _is_exact(value) else str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        return _comparable(value.item())
    return str(value)


def _is_exact(value: float) -> bool:
    """Whether TensorBoard shows the number. NaN and infinities are not valid JSON: they would empty the whole tab."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= 2**53


def _tags(metrics: Any) -> tuple[str, ...]:
    if isinstance(metrics, str) or not isinstance(metrics, Sequence | set | frozenset):
        raise invalid_argument("metrics", 'a list of tags such as "train/loss"', metrics)
    tags = tuple(metrics)
    for tag in tags:
        if not isinstance(tag, str) or not tag.strip():
            raise invalid_argument("a metric", 'a tag such as "train/loss"', tag)
        if tags.count(tag) > 1:
            raise ArgumentError(f"metrics has {tag!r} twice")
    return tags
