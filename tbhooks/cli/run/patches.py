"""What is patched while a script runs: constructors that tell of what they made. All of it is undone at the end.

A patched function does what it did, returns what it returned and raises what it raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from tbhooks.data.self_report import logger

Told = Callable[[Any, Any], None]
"""Called with the instance a method was called on, if it is one, and with what it returned."""


class Patches:
    """Put in place when the modules they are in are imported, by the script and not before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._is_over = False

    def after(self, module: str, function: str, told: Told) -> None:
        """Has `told` called after each call of a function, named as in `Class.method`."""

        def patch(imported: Any) -> None:
            if not self._is_over:
                self._wrap(imported, function, told)

        wrapt.register_post_import_hook(patch, module)

    def undo(self) -> None:
        """Puts back everything that nobody else has patched since; what others hold does nothing any more."""
        self._is_over = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, imported: Any, function: str, told: Told) -> None:
        def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            made = wrapped(*args, **kwargs)
            if not self._is_over:
                _guarded(told, instance, made)
            return made

        try:
            parent, name, original = wrapt.resolve_path(imported, function)
        except AttributeError:  # another version, which has no such thing
            return
        wrapper = wrapt.FunctionWrapper(original, around)
        setattr(parent, name, wrapper)

        def undo() -> None:
            if vars(parent).get(name) is wrapper:
                setattr(parent, name, original)

        self._undo.append(undo)


def _guarded(told: Told, instance: Any, made: Any) -> None:
    try:
        told(instance, made)
    except Exception as problem:  # ours, and not the script's
        logger.error("%s: %s", type(problem).__name__, problem)
