"""The tensors in the arguments or the output of a module, each with the index by which it is reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def tensors(output: object) -> list[tuple[str, Tensor]]:
    """`[("", t)]` for a single tensor; `("[0]", t)`, `("[1][0]", t)`, `("[logits]", t)` for several."""
    if isinstance(output, Tensor):
        return [("", output)]
    # torch.compile cannot trace `id` of a container. A container that contains itself cannot be traced anyway.
    found = list(_inside(output, "", None if torch.compiler.is_compiling() else ()))
    return [("", found[0][1])] if len(found) == 1 else found


def inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The same for the arguments of a module: `("[0]", t)` by position, `("[mask]", t)` by name."""
    given: dict[object, object] = dict(enumerate(args))
    return tensors(given | dict(kwargs))


def _inside(value: object, index: str, around: tuple[int, ...] | None) -> Iterator[tuple[str, Tensor]]:
    """`around` are the ids of the containers around this one, so that one that contains itself is entered once; None
    if they are not compared.
    """
    if isinstance(value, Tensor):
        yield index, value
    elif value is None or isinstance(value, (str, int, float)):  # torch.compile cannot ask None for its fields
        return
    elif around is None:
        for key, item in _items(value):
            yield from _inside(item, f"{index}[{key}]", None)
    elif id(value) not in around:
        for key, item in _items(value):
            yield from _inside(item, f"{index}[{key}]", (*around, id(value)))


def _items(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
