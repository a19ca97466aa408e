"""Hooks that a copy or a pickle of the model leaves out, so that it is the copy of an unwatched one.

Modules keep their hooks in an OrderedDict each. `copyreg` is where Python lets others say how a type is pickled and
deep-copied; hooks of ours are taken out there, whoever copies the module and however. Nothing else changes: the
dictionary itself stays as it is, and one without hooks of ours is copied and pickled to the same bytes as ever.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


class Unkept:
    """A hook that is left out of copies and pickles of the module it is on."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # For what is not kept in an OrderedDict: a callable of the standard library that takes three arguments and
        # does nothing, so that the copy loads without tbhooks.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _is_ours(value: object) -> bool:
    if isinstance(value, MethodType):
        return type(value.__self__).__module__.partition(".")[0] == _PACKAGE
    return isinstance(value, Unkept)


_reduce_as_before: Callable[[OrderedDict[Any, Any]], Any] = copyreg.dispatch_table.get(
    OrderedDict, OrderedDict.__reduce__
)


def _reduce(mapping: OrderedDict[Any, Any]) -> Any:
    reduced = _reduce_as_before(mapping)
    if not any(map(_is_ours, mapping.values())):
        return reduced
    kept = [(key, value) for key, value in mapping.items() if not _is_ours(value)]
    return *reduced[:4], iter(kept), *reduced[5:]


copyreg.pickle(OrderedDict, _reduce)
