"""What the user closes before the watch is: everything that has been logged goes there first."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tbhooks.data.patching import wrap_attribute

# What to call before something is flushed or closed; several watches may share it.
_drains: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
_undo: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def drain_first(writer: Any, drain: Callable[[], None], before: tuple[str, ...]) -> Callable[[], None]:
    """Has `drain` called before these methods of a writer; returns what undoes it."""
    drains = _drains.setdefault(writer, [])
    if not drains:
        _undo[writer] = [wrap_attribute(writer, name, _draining(weakref.ref(writer))) for name in before]
    drains.append(drain)

    def undo() -> None:
        drains.remove(drain)
        if not drains:
            for put_back in _undo.pop(writer):
                put_back()

    return undo


def _draining(writer: weakref.ref[Any]) -> Callable[..., Any]:
    def around(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        for drain in list(_drains.get(writer(), ())):
            drain()
        return wrapped(*args, **kwargs)

    return around
