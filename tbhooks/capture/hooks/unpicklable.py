"""Hooks that a copy or a pickle of the model leaves out, so that it is the copy of an unwatched one.

Modules keep their hooks in an OrderedDict each. `copyreg` is where Python lets others say how a type is pickled and
deep-copied; hooks of this package are left out there, whoever copies the module and however. Nothing else changes: the
dictionary itself stays as it is, and one without hooks of this package is copied and pickled to the same bytes as ever.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

from tbhooks.data.process.patching import reducing

_PACKAGE = __name__.partition(".")[0]


class UnpicklableHook:
    """A hook that is left out of copies and pickles of the module it is on."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # For what is not kept in an OrderedDict: a callable of the standard library that takes three arguments and
        # does nothing, so that the copy loads without tbhooks.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _is_ours(value: object) -> bool:
    if isinstance(value, MethodType):
        return type(value.__self__).__module__.partition(".")[0] == _PACKAGE
    return isinstance(value, UnpicklableHook)


def _reduce(original: Callable[[OrderedDict[Any, Any]], Any], mapping: OrderedDict[Any, Any]) -> Any:
    reduced = original(mapping)
    if not any(map(_is_ours, mapping.values())):
        return reduced
    kept = [(key, value) for key, value in mapping.items() if not _is_ours(value)]
    return *reduced[:4], iter(kept), *reduced[5:]


COPIES_WITHOUT_HOOKS = reducing(OrderedDict, _reduce, "Python 3.11")
"""Held by every watch while it has hooks on a model."""
