"""Calls a function before the user flushes or closes a writer, so that all logged steps get there first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tbhooks.data.process.patching import wrap_attribute

# The functions to call before the methods of a writer; several watches may share a writer.
_callbacks: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
_unwrap: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def call_before(writer: Any, methods: tuple[str, ...], callback: Callable[[], None]) -> Callable[[], None]:
    """Wraps these methods of a writer so that they first call `callback`; returns a function that undoes it."""
    callbacks = _callbacks.setdefault(writer, [])
    if not callbacks:
        _unwrap[writer] = [wrap_attribute(writer, name, _calling_first(weakref.ref(writer))) for name in methods]
    callbacks.append(callback)

    def undo() -> None:
        callbacks.remove(callback)
        if not callbacks:
            for unwrap in _unwrap.pop(writer):
                unwrap()

    return undo


def _calling_first(writer: weakref.ref[Any]) -> Callable[..., Any]:
    def wrapper(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        for callback in list(_callbacks.get(writer(), ())):
            callback()
        return wrapped(*args, **kwargs)

    return wrapper
