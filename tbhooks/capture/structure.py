"""The modules and parameters of a model, walked again only if something in its structure has changed.

A walk makes names and follows wrappers; to see that nothing has changed takes a fraction of that. What is compared are
the children, the parameters and the class of every module, so that added, removed, replaced, renamed and parametrized
ones are noticed. Nothing here keeps a module or a parameter alive. Parameters are known by their ids: torch does not
swap a parameter that has a weak reference (`torch.utils.swap_tensors`, which `Module.to` may use).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tbhooks.capture import selection
from tbhooks.capture.selection import Modules

_Known = tuple[weakref.ref[nn.Module], type, tuple[str, ...], list[int], tuple[str, ...], list[int]]
"""A module, its class, the names and ids of its children, and those of its parameters."""

try:
    from tbhooks.capture.hooks._eager_hooks import is_unchanged
except ImportError:
    _is_unchanged: Callable[[list[Any]], bool] | None = None
else:
    _is_unchanged = is_unchanged

_structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()


def of(model: nn.Module) -> Structure:
    """The structure of a model, the same object for every watch."""
    known = _structures.get(model)
    if known is None:
        known = _structures[model] = Structure(model)
    return known


class Structure:
    """What a walk over one model has found."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: list[_Known] | None = None
        self._paths: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._aliases: dict[str, str] = {}
        self._parameter_ids: frozenset[int] = frozenset()
        self._classes: frozenset[type] = frozenset()
        self._version = 0

    def version(self) -> int:
        """A number that has changed if anything in the structure of the model has changed."""
        if not self._is_current():
            self._walk()
        return self._version

    def modules(self) -> Modules:
        """As `selection.walk`."""
        self.version()
        found = {path: module for path, ref in self._paths if (module := ref()) is not None}
        return Modules(found, dict(self._aliases))

    def parameter_ids(self) -> frozenset[int]:
        """The ids of all parameters of the model."""
        self.version()
        return self._parameter_ids

    def noted_parameters(self) -> list[nn.Parameter]:
        """The parameters that have attributes of their own, such as those of DeepSpeed and Megatron."""
        self.version()
        modules = (module for _, ref in self._paths if (module := ref()) is not None)
        owned = (parameter for module in modules for parameter in module._parameters.values())
        return [parameter for parameter in owned if parameter is not None and parameter.__dict__]

    def classes(self) -> frozenset[type]:
        """The classes of all modules."""
        self.version()
        return self._classes

    def _is_current(self) -> bool:
        if self._known is None:
            return False
        if _is_unchanged is not None:
            return _is_unchanged(self._known)
        for ref, kind, names, children, parameter_names, parameters in self._known:
            module = ref()
            if module is None or type(module) is not kind:
                return False
            own = module._modules
            if (own or names) and (tuple(own) != names or [*map(id, own.values())] != children):
                return False
            owned = module._parameters
            if (owned or parameter_names) and (
                tuple(owned) != parameter_names or [*map(id, owned.values())] != parameters
            ):
                return False
        return True

    def _walk(self) -> None:
        model = self._model()
        if model is None:
            self._known, self._paths, self._parameter_ids = None, [], frozenset()
            return
        found, inside = selection.walk(model), list(model.modules())
        self._version += 1
        self._classes = frozenset(map(type, inside))
        self._paths = [(path, weakref.ref(module)) for path, module in found.by_path.items()]
        self._aliases = found.aliases
        self._parameter_ids = frozenset(map(id, model.parameters()))
        # Layers of Keras and scripted modules keep what they consist of in other places: they are walked each time.
        is_plain = len(found.by_path) <= len(inside) and not any(map(_is_opaque, inside))
        self._known = [_known(module) for module in inside] if is_plain else None


def _is_opaque(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or selection.is_keras(module)


def _known(module: nn.Module) -> _Known:
    children, parameters = module._modules, module._parameters
    return (
        weakref.ref(module), type(module),
        tuple(children), [*map(id, children.values())],
        tuple(parameters), [*map(id, parameters.values())],
    )  # fmt: skip
