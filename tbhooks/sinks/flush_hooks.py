"""What the user closes before the watch is: everything that has been logged goes there first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import wrapt

# What to call before something is flushed or closed; several watches may share it.
_drains: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def drain_first(writer: Any, drain: Callable[[], None], before: tuple[str, ...]) -> Callable[[], None]:
    """Has `drain` called before these methods of a writer; returns what undoes it."""
    drains = _drains.setdefault(writer, [])
    if not drains:
        for name in before:
            wrapt.wrap_function_wrapper(writer, name, lambda f, _, args, kwargs: _draining(writer, f, args, kwargs))
    drains.append(drain)

    def undo() -> None:
        drains.remove(drain)
        if not drains:
            for name in before:
                _unwrap(writer, name)

    return undo


def _unwrap(writer: Any, name: str) -> None:
    """Puts back what was there: the class's own method, or one that was set on this writer."""
    wrapped = writer.__dict__.pop(name).__wrapped__
    if getattr(wrapped, "__func__", None) is not getattr(type(writer), name):
        setattr(writer, name, wrapped)


def _draining(writer: Any, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for drain in list(_drains.get(writer, ())):
        drain()
    return wrapped(*args, **kwargs)
