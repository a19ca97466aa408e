"""Finds the models that a script trains: the outermost modules that hold the parameters of its optimizers.

A global forward pre-hook waits for the first forward of such a model and is removed before the model runs. If anything
is compiled there is no global hook, because it would be compiled, too; models are then looked up at once.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import is_traced
from tbhooks.capture.selection import unwrap
from tbhooks.capture.step.clock import has_closure
from tbhooks.data.self_report import logger

if TYPE_CHECKING:
    from tbhooks.api.handle import Watch


class Finder:
    """Calls `on_models` with the outermost modules that optimizers train. With `at_once` it waits for no forward."""

    def __init__(self, on_models: Callable[[list[nn.Module]], list[Watch]], at_once: bool) -> None:
        self.steps = 0
        """The number of optimizer steps before their model was found."""
        self._on_models = on_models
        self._at_once = at_once
        self._handles: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        """The step hooks of optimizers whose models are still to be found."""
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._leftover: list[RemovableHandle] = []
        self._untrained: dict[int, weakref.ref[nn.Module]] = {}
        """Modules without parameters of these optimizers, by id. Another module may have that id later."""
        self._models: list[weakref.ref[nn.Module]] = []
        """The models found so far."""
        self._waiting: RemovableHandle | None = None

    def add(self, optimizer: Optimizer) -> None:
        """Looks for the model of a new optimizer. An optimizer may be added twice."""
        if optimizer in self._handles or self._is_known(optimizer):
            return
        self._handles[optimizer] = optimizer.register_step_pre_hook(self._before_step)
        self._untrained = {}
        self._start_looking()

    def on_compile(self) -> None:
        """From now on looks models up at once: hooks must be attached before a compiled model is called."""
        self._at_once = True
        self._start_looking()

    def stop(self) -> None:
        """Removes all hooks."""
        self._stop_waiting()
        for handle in (*self._handles.values(), *self._leftover):
            handle.remove()
        self._handles.clear()
        self._leftover = []

    def _start_looking(self) -> None:
        if self._at_once:
            self._stop_waiting()
            self._decide(None)
        elif self._waiting is None:
            self._waiting = register_module_forward_pre_hook(self._forward_begins)

    def _is_known(self, optimizer: Optimizer) -> bool:
        """Whether all its models are found. Some scripts make an optimizer for every step, and a search takes time."""
        models = [model for model in (reference() for reference in self._models) if model is not None]
        found = {parameter for model in models for parameter in parameters_of(model)}
        trained = _parameters([optimizer])
        return bool(trained) and trained <= found

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    def _forward_begins(self, module: nn.Module, _args: Any) -> None:
        known = self._untrained.get(id(module))
        if not _may_be_training() or (known is not None and known() is module):
            return
        with self._guarded():
            wanted = _parameters(self._handles)
            if not wanted.isdisjoint(parameters_of(module)):
                self._decide(module)
            else:
                self._untrained.update((id(part), weakref.ref(part)) for part in module.modules())

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before a step of an optimizer whose model has not been found.

        With a closure, the forward comes inside this step, so the model is looked up now. Without one, the forward came
        before the optimizer was made, and the next forward finds the model. A second step without a forward means that
        the weights are used without calling their module.
        """
        if optimizer not in self._handles:
            return
        self.steps += 1
        if optimizer in self._stepped or has_closure(args, kwargs):
            from tbhooks.api.handle import lifecycle_of  # noqa: PLC0415

            with self._guarded():
                for watching in self._decide(None, stepping=optimizer):
                    lifecycle_of(watching).session.clock.before_step(optimizer, args, kwargs)
        self._stepped.add(optimizer)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keeps an error of ours from the script; nothing is looked for after one."""
        try:
            yield
        except Exception as problem:
            self._stop_waiting()
            self._leftover += self._handles.values()
            self._handles.clear()
            logger.error("finding the model: %s: %s", type(problem).__name__, problem)

    def _decide(self, called: nn.Module | None, stepping: Optimizer | None = None) -> list[Watch]:
        wanted = _parameters(self._handles)
        modules = [*live_modules(), *([] if called is None else [called])] if wanted else []
        models = covering(wanted, modules, called)
        if not models and stepping is None:
            return []  # it may be found at the optimizer's step
        self._stop_waiting()
        for optimizer, handle in list(self._handles.items()):
            if optimizer is stepping:  # torch is iterating over its hooks
                self._leftover.append(handle)
            else:
                handle.remove()
        self._handles.clear()
        self._models += map(weakref.ref, models)
        return self._on_models(models)


def _may_be_training() -> bool:
    """Whether a forward may be one of training, and not of a compiler, an export, a tracer or an evaluation."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_traced()


def _parameters(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """The ids of the optimizers' parameters; plain tensors, which no module holds, are left out."""
    groups = [group for optimizer in list(optimizers) for group in optimizer.param_groups]
    return frozenset(id(tensor) for group in groups for tensor in group["params"] if isinstance(tensor, nn.Parameter))


# Containers, which scripts often make just to list parameters.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def live_modules() -> list[nn.Module]:
    """All modules of the process in arbitrary order, without those hidden by `gc.freeze`."""
    gc.collect()  # garbage may still hold parameters
    # By type(): isinstance() runs code of some objects.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def covering(wanted: frozenset[int], modules: Iterable[nn.Module], called: nn.Module | None) -> list[nn.Module]:
    """A small set of outermost modules that together hold the parameters with these ids, as far as any module does.

    Chosen greedily by the number of these parameters; on a tie by whether hooks can be attached, then whether `called`
    is inside, then by the fewest other parameters.
    """
    held = {id(top): (top, parameters_of(top)) for top in outermost(modules, wanted)}
    chosen: list[nn.Module] = []
    left = set(wanted)
    while held:
        best = max(held, key=lambda key: _score(*held[key], left, called))
        top, parameters = held.pop(best)
        if not parameters & left:
            break
        chosen.append(top)
        left -= parameters
    return chosen


def _score(top: nn.Module, parameters: set[int], left: set[int], called: nn.Module | None) -> tuple[int, ...]:
    is_called = called is not None and any(module is called for module in top.modules())
    return len(parameters & left), not isinstance(top, torch.jit.ScriptModule), is_called, -len(parameters)


def outermost(modules: Iterable[nn.Module], wanted: frozenset[int]) -> list[nn.Module]:
    """The modules with a wanted parameter that are part of no other such module, without wrappers and containers."""
    holders = [unwrap(module) for module in modules if _is_initialized(module) and _holds(module, wanted)]
    tops = {id(module): module for module in holders if not isinstance(module, _CONTAINERS)}
    inside = {id(module) for top in tops.values() for module in top.modules() if module is not top}
    return [top for key, top in tops.items() if key not in inside]


def _is_initialized(module: nn.Module) -> bool:
    """Whether `nn.Module.__init__`, or a substitute for it, has run."""
    return "_modules" in vars(module) and "_parameters" in vars(module)


def _holds(module: nn.Module, wanted: frozenset[int]) -> bool:
    return not wanted.isdisjoint(parameters_of(module))


def parameters_of(module: nn.Module) -> set[int]:
    """The ids of a module's parameters by torch's own method, which the class may have overridden."""
    return {id(parameter) for parameter in nn.Module.parameters(module)}
