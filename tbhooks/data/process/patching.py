"""Replaces attributes of other packages while they are needed, and puts the original objects back.

A few events that a watch needs have no callback: a GradScaler scales a loss, torch.compile compiles a function, a
process group is destroyed. The functions behind them are wrapped, and only through this module: a test of the
architecture fails if any other module assigns to an attribute of another package, or uses wrapt.

A patch is declared once, beside the code that needs it, with the versions it was tried with:

    _PATCH = wrapping("torch.distributed", "destroy_process_group", _drain_first, "torch 2.10 to 2.15")

It is installed while it has holders. `acquire` installs it for the first holder, or as soon as the module is imported
if it is not yet. `release` puts the original object back after the last holder. If another package has wrapped our
wrapper in the meantime, the wrapper stays where it is and only passes calls on.

`declared()` lists all patches of the process. They are declared in

- capture/compile/compilation.py: torch.compile compiles a function;
- capture/cuda_graphs.py: modules are made into CUDA graphs;
- capture/hooks/unpicklable.py: a module's table of hooks is pickled or copied;
- capture/step/grad_scaler.py: a GradScaler scales a loss, unscales gradients, or steps an optimizer;
- capture/step/zero_step.py: an optimizer of DeepSpeed ZeRO steps;
- distributed/topology.py: the process group is destroyed;
- sinks/tensorboard/event_files.py: the checksum of an event is computed;
- sinks/flush_hooks.py: the user flushes or closes a writer (an attribute of that one object);
- cli/run/session.py: a script run by `tbhooks run` makes an optimizer or a writer, or calls torch.compile.
"""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import wrapt

from tbhooks.data.process.fork import in_forked_child

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the wrapped function, the instance it is bound to, its arguments and its keyword arguments."""
Undo = Callable[[], None]
Install = Callable[[Any], Undo | None]
"""Changes the imported module and returns what undoes it; None if there is nothing to change in this version."""

after_import: Callable[[Callable[[Any], None], str], None] = wrapt.register_post_import_hook
"""Calls a function with the module of that name, now or when it is imported."""

_lock = threading.RLock()
_declared: weakref.WeakSet[Patch] = weakref.WeakSet()


def declared() -> list[Patch]:
    """Every patch there is in this process, installed or not."""
    return list(_declared)


class Patch:
    """A change to another package that is in place while it has holders.

    Holders are distinguished by identity and held weakly: `acquire` and `release` may be called any number of times.
    """

    def __init__(self, module: str, name: str, install: Install, tried_with: str) -> None:
        self.module, self.name, self.tried_with = module, name, tried_with
        self._install = install
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._imported: Any = None
        self._is_awaited = False
        self._undo: Undo | None = None
        _declared.add(self)

    @property
    def is_installed(self) -> bool:
        return self._undo is not None

    def acquire(self, holder: object) -> None:
        """Installs the patch, now or when its module is imported."""
        with _lock:
            self._holders.add(holder)
            if not self._is_awaited:
                self._is_awaited = True
                after_import(self._on_import, self.module)
            else:
                self._update()

    def release(self, holder: object) -> None:
        """Undoes the patch if nobody else holds it."""
        with _lock:
            self._holders.discard(holder)
            self._update()

    def _on_import(self, module: Any) -> None:
        with _lock:
            self._imported = module
            self._update()

    def _update(self) -> None:
        if self._imported is not None and self._holders and self._undo is None:
            self._undo = self._install(self._imported)
        elif not self._holders and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()


def _is_there(original: Any) -> bool:
    return original is not None


def wrapping(
    module: str, name: str, wrapper: Wrapper, tried_with: str, accepts: Callable[[Any], bool] = _is_there
) -> Patch:
    """A patch that wraps a function or method, named as in `Class.method`.

    `accepts` is called with the original before it is wrapped, None if the installed version has no such attribute.
    Nothing is wrapped unless it returns True.
    """

    def install(imported: Any) -> Undo | None:
        try:
            _, _, original = wrapt.resolve_path(imported, name)
        except AttributeError:
            original = None
        return wrap_attribute(imported, name, wrapper) if accepts(original) else None

    return Patch(module, name, install, tried_with)


def wrap_attribute(owner: Any, name: str, wrapper: Wrapper) -> Undo:
    """Wraps a function or method of a module, class or object; returns what puts the original back.

    What is returned keeps the object alive no longer than others do.
    """
    parent, attribute, original = wrapt.resolve_path(owner, name)
    is_own = attribute in vars(parent)
    is_over = threading.Event()
    wrapped = wrapt.FunctionWrapper(original, wrapper, enabled=lambda: not is_over.is_set())
    setattr(parent, attribute, wrapped)
    return partial(_unwrap, weakref.ref(parent), attribute, weakref.ref(wrapped), is_own, is_over)


def _unwrap(parent_ref: Any, attribute: str, wrapped_ref: Any, is_own: bool, is_over: threading.Event) -> None:
    is_over.set()
    parent, wrapped = parent_ref(), wrapped_ref()
    if parent is None or wrapped is None or vars(parent).get(attribute) is not wrapped:
        return  # it is gone, or another package has replaced the attribute since
    if is_own:
        setattr(parent, attribute, wrapped.__wrapped__)
    else:
        delattr(parent, attribute)


def reducing(kind: type, reduce: Callable[[Callable[[Any], Any], Any], Any], tried_with: str) -> Patch:
    """A patch of how objects of a type are pickled and copied: `reduce(original, value)` takes the place of
    `original(value)`.
    """

    def install(_: Any) -> Undo:
        before = copyreg.dispatch_table.get(kind)
        original: Any = before or kind.__reduce__

        def patched(value: Any) -> Any:
            return reduce(original, value)

        copyreg.pickle(kind, patched)

        def undo() -> None:
            if copyreg.dispatch_table.get(kind) is not patched:
                return
            if before is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.pickle(kind, before)

        return undo

    return Patch("copyreg", f"dispatch_table[{kind.__name__}]", install, tried_with)


def _forked() -> None:
    """In a forked child, the thread that held the lock does not exist."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


in_forked_child(_forked)
