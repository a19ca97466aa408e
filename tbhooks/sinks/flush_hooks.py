"""Calls a function before the user flushes or closes a writer, so that all logged steps get there first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import wrapt

# The functions to call before the methods of a writer; several watches may share a writer.
_callbacks: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def call_before(writer: Any, methods: tuple[str, ...], callback: Callable[[], None]) -> Callable[[], None]:
    """Wraps these methods of a writer so that they first call `callback`; returns a function that undoes it."""
    callbacks = _callbacks.setdefault(writer, [])
    if not callbacks:
        for name in methods:
            wrapt.wrap_function_wrapper(writer, name, lambda f, _, args, kwargs: _call(writer, f, args, kwargs))
    callbacks.append(callback)

    def undo() -> None:
        callbacks.remove(callback)
        if not callbacks:
            for name in methods:
                _unwrap(writer, name)

    return undo


def _call(writer: Any, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for callback in list(_callbacks.get(writer, ())):
        callback()
    return wrapped(*args, **kwargs)


def _unwrap(writer: Any, name: str) -> None:
    """Restores the class's method, or one that was set on this writer."""
    wrapped = writer.__dict__.pop(name).__wrapped__
    if getattr(wrapped, "__func__", None) is not getattr(type(writer), name):
        setattr(writer, name, wrapped)
