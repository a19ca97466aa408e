"""The tensors inside whatever a module is given or returns, each with the index a reader would use to reach it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def tensors(output: object) -> list[tuple[str, Tensor]]:
    """`[("", t)]` for a single tensor; `("[0]", t)`, `("[1][0]", t)`, `("[logits]", t)` for several."""
    if isinstance(output, Tensor):
        return [("", output)]
    # The address of a container does not exist while torch.compile traces this, and a container that contains itself
    # cannot be traced anyway.
    found = list(_inside(output, "", None if torch.compiler.is_compiling() else ()))
    return [("", found[0][1])] if len(found) == 1 else found


def inputs(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The same of what a module is called with: `("[0]", t)` by position, `("[mask]", t)` by name."""
    given: dict[object, object] = dict(enumerate(args))
    return tensors(given | dict(kwargs))


def _inside(value: object, index: str, around: tuple[int, ...] | None) -> Iterator[tuple[str, Tensor]]:
    """`around` are the containers on the way here: one that contains itself is entered once. None: not looked at."""
    if isinstance(value, Tensor):
        yield index, value
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
