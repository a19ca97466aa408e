"""Patches of functions while a script runs: a callback is called after each call. All patches are undone at the end.

A patched function does what it did, returns what it returned and raises what it raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from tbhooks.data.self_report import logger

Callback = Callable[[Any, Any], None]
"""Called with the instance (None for a plain function) and the returned value."""


class Patches:
    """Patches that are applied when the script imports the patched module."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._is_over = False

    def after(self, module: str, function: str, callback: Callback) -> None:
        """Calls `callback` after each call of a function, named as in `Class.method`."""

        def patch(imported: Any) -> None:
            if not self._is_over:
                self._wrap(imported, function, callback)

        wrapt.register_post_import_hook(patch, module)

    def undo(self) -> None:
        """Restores every function that nobody else has patched since; wrappers still in use do nothing any more."""
        self._is_over = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, imported: Any, function: str, callback: Callback) -> None:
        def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            made = wrapped(*args, **kwargs)
            if not self._is_over:
                _call(callback, instance, made)
            return made

        try:
            parent, name, original = wrapt.resolve_path(imported, function)
        except AttributeError:  # this version has no such function
            return
        wrapper = wrapt.FunctionWrapper(original, around)
        setattr(parent, name, wrapper)

        def undo() -> None:
            if vars(parent).get(name) is wrapper:
                setattr(parent, name, original)

        self._undo.append(undo)


def _call(callback: Callback, instance: Any, made: Any) -> None:
    try:
        callback(instance, made)
    except Exception as problem:  # an error of ours must not reach the script
        logger.error("%s: %s", type(problem).__name__, problem)
