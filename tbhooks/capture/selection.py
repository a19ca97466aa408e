"""Selects the modules and parameters that are watched, and names them.

Paths are those of `named_modules()` and `named_parameters()` without the names that wrappers insert.
Patterns are parsed here, when a watch is made; hooks never match a name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.frame import ROOT

Matcher = Callable[[str, nn.Module], bool]
Pattern = str | type[nn.Module] | Matcher

# The name under which each kind of wrapper registers the module it wraps.
_WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile, data parallelism, DeepSpeed, checkpointing and
    Lightning's Fabric.
    """
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _wrapped(module: nn.Module) -> nn.Module | None:
    parts = module._modules
    if not parts:
        return None
    if isinstance(module, DataParallel | DistributedDataParallel) or _is_engine(module):
        return parts.get("module")
    for name in _WRAPPED_AS:
        if name in parts:
            return parts[name]
    return None


def _is_engine(module: nn.Module) -> bool:
    """Whether it is an engine of DeepSpeed."""
    return type(module).__module__.startswith("deepspeed.runtime.")


@dataclass(frozen=True)
class Modules:
    """Every module of a model by its first path, and the further paths of shared ones."""

    by_path: dict[str, nn.Module]
    aliases: dict[str, str]


def walk(model: nn.Module) -> Modules:
    """All modules in the order of `named_modules()`, then layers of Keras that it does not list."""
    by_path: dict[str, nn.Module] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    stack = [("", unwrap(model))]
    while stack:
        prefix, module = stack.pop()
        path = prefix or ROOT
        if id(module) in first:
            aliases[path] = first[id(module)]
            continue
        first[id(module)] = path
        by_path[path] = module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{prefix}.{name}" if prefix else name, unwrap(child)))
    _add_keras_layers(by_path)
    return Modules(by_path, aliases)


def is_keras(module: nn.Module) -> bool:
    """Whether a module is a layer or a model of Keras 3."""
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(module).__mro__)


def _add_keras_layers(by_path: dict[str, nn.Module]) -> None:
    """Sequential and functional models of Keras keep their layers in a list, where torch does not find them."""
    known, waiting = set(map(id, by_path.values())), list(by_path.items())
    for prefix, module in waiting:
        for layer in getattr(module, "_layers", ()) if is_keras(module) else ():
            path = layer.name if prefix == ROOT else f"{prefix}.{layer.name}"
            if id(layer) not in known and path not in by_path:
                known.add(id(layer))
                by_path[path] = layer
                waiting.append((path, layer))


def parameters(modules: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of these modules by path; a tied one only under its first path."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (name if path == ROOT else f"{path}.{name}", parameter))
    return dict(found.values())


class Selector:
    """The arguments `include` and `exclude` of a watch, parsed and checked against the model."""

    def __init__(self, model: nn.Module, include: object, exclude: object) -> None:
        self._include = parse_patterns("include", include)
        self._exclude = parse_patterns("exclude", exclude)
        modules = walk(model).by_path
        _check_each_matches("include", self._include, modules)
        if not self.choose(modules):
            raise ArgumentError(f"exclude={exclude!r} leaves no module of this model to watch")

    @property
    def is_static(self) -> bool:
        """Whether the same modules are always chosen: functions of the user may change their mind."""
        return all(isinstance(pattern, str | type) for pattern in (*self._include, *self._exclude))

    def choose(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """The modules among these that are watched."""
        if not self._include and not self._exclude:
            return dict(modules)
        return {path: module for path, module in modules.items() if self._chosen(path, module)}

    def _chosen(self, path: str, module: nn.Module) -> bool:
        wanted = not self._include or any(matches(pattern, path, module) for pattern in self._include)
        return wanted and not any(matches(pattern, path, module) for pattern in self._exclude)


def choice(argument: str, given: object, model: nn.Module) -> Matcher:
    """A function that returns whether a module matches patterns as `include` takes them; each must match a module."""
    patterns = parse_patterns(argument, given)
    _check_each_matches(argument, patterns, walk(model).by_path)
    return lambda path, module: any(matches(pattern, path, module) for pattern in patterns)


def _check_each_matches(argument: str, patterns: tuple[Pattern, ...], modules: dict[str, nn.Module]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, path, module) for path, module in modules.items()):
            shown = pattern.rstrip(".*") if isinstance(pattern, str) else str(pattern)
            raise ArgumentError(f"{argument}={pattern!r} matches no module of this model: {nearest(shown, modules)}")


def parse_patterns(argument: str, given: object) -> tuple[Pattern, ...]:
    """The patterns of an argument such as `include`; none for None. Raises ArgumentError for anything else."""
    if given is None:
        return ()
    patterns = tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)
    if not patterns:
        raise ArgumentError(f"{argument} must not be an empty list; pass None to select everything")
    for pattern in patterns:
        if not _is_pattern(pattern):
            raise ArgumentError(
                f"{argument} must be a glob over module paths, a module class, a callable of (path, module), "
                f"or a list of those, got {pattern!r}"
            )
    return patterns


def _is_pattern(given: object) -> bool:
    if isinstance(given, type):
        return issubclass(given, nn.Module)
    return isinstance(given, str) or (callable(given) and not isinstance(given, nn.Module))


def matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """Whether a module matches a pattern."""
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(path, pattern)
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(path, module))
