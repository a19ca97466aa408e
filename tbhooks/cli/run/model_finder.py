"""Finds the models a script trains: told of its optimizers, it waits for the first forward of what they step.

One global hook waits for that forward, and is gone before the model runs; then the forward path is as it was. Where
anything is compiled there is no global hook at all, as it would be compiled too: models are found when they can be.
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
    """Calls `found` with the outermost modules that optimizers train, all that are known at a time together."""

    def __init__(self, found: Callable[[list[nn.Module]], list[Watch]], at_once: bool) -> None:
        self.steps = 0
        """How often one stepped whose model had not been found."""
        self._found = found
        self._at_once = at_once
        self._handles: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        """Of optimizers whose models are still looked for."""
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._leftover: list[RemovableHandle] = []
        self._strangers: set[int] = set()
        """The ids of modules that no optimizer trains."""
        self._models: list[weakref.ref[nn.Module]] = []
        """Those that have been found."""
        self._waiting: RemovableHandle | None = None

    def made(self, optimizer: Optimizer) -> None:
        """Tells of a new optimizer; some tell of themselves twice."""
        if optimizer in self._handles or self._is_known(optimizer):
            return
        self._handles[optimizer] = optimizer.register_step_pre_hook(self._steps)
        self._strangers = set()
        self._look_out()

    def something_is_compiled(self) -> None:
        """From now on hooks are to be on a model before it is called."""
        self._at_once = True
        self._look_out()

    def stop(self) -> None:
        """Leaves no hook anywhere."""
        self._stop_waiting()
        for handle in (*self._handles.values(), *self._leftover):
            handle.remove()
        self._handles.clear()
        self._leftover = []

    def _look_out(self) -> None:
        if self._at_once:
            self._stop_waiting()
            self._decide(None)
        elif self._waiting is None:
            self._waiting = register_module_forward_pre_hook(self._forward_begins)

    def _is_known(self, optimizer: Optimizer) -> bool:
        """Whether all it trains has been found: some scripts make one for every step, and looking takes its time."""
        models = [model for model in (reference() for reference in self._models) if model is not None]
        found = {parameter for model in models for parameter in parameters_of(model)}
        trained = _parameters([optimizer])
        return bool(trained) and trained <= found

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    def _forward_begins(self, module: nn.Module, _args: Any) -> None:
        if not _may_be_training() or id(module) in self._strangers:
            return
        with self._guarded():
            wanted = _parameters(self._handles)
            if not wanted.isdisjoint(parameters_of(module)):
                self._decide(module)
            else:
                self._strangers.update(map(id, module.modules()))

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step of an optimizer whose model has not been found.

        With a closure the forward comes inside the step, which is to be watched from its beginning. Without one it
        has been, before the optimizer was made: the next forward will tell. The second time it shows that weights are
        used without the module around them.
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
        """What goes wrong here is ours, and not the script's; nothing is looked for after that."""
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
            return []  # perhaps when it steps
        self._stop_waiting()
        for optimizer, handle in list(self._handles.items()):
            if optimizer is stepping:  # torch is walking through its hooks
                self._leftover.append(handle)
            else:
                handle.remove()
        self._handles.clear()
        self._models += map(weakref.ref, models)
        return self._found(models)


def _may_be_training() -> bool:
    """A model that is compiled, exported, traced or evaluated may be called by way of something that soon is gone."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_traced()


def _parameters(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """The ids of what they step that a module can hold: pixels that are fitted, for one, are mere tensors."""
    groups = [group for optimizer in list(optimizers) for group in optimizer.param_groups]
    return frozenset(id(tensor) for group in groups for tensor in group["params"] if isinstance(tensor, nn.Parameter))


# They only hold others, often no longer than it takes to list all parameters.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def live_modules() -> list[nn.Module]:
    """Every module of the process, in no order that means anything; but none that `gc.freeze` keeps from view."""
    gc.collect()  # a holder that is no more than garbage is no model
    # By type: asking some objects for their class runs code of theirs.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def covering(wanted: frozenset[int], modules: Iterable[nn.Module], called: nn.Module | None) -> list[nn.Module]:
    """The fewest outermost modules that hold the parameters with these ids, as far as any do.

    Of those that hold as many, one that takes hooks goes first, then one with `called` inside, then the one with the
    least besides.
    """
    held = {id(top): (top, parameters_of(top)) for top in outermost(modules, wanted)}
    chosen: list[nn.Module] = []
    left = set(wanted)
    while held:
        best = max(held, key=lambda key: _worth(*held[key], left, called))
        top, parameters = held.pop(best)
        if not parameters & left:
            break
        chosen.append(top)
        left -= parameters
    return chosen


def _worth(top: nn.Module, parameters: set[int], left: set[int], called: nn.Module | None) -> tuple[int, ...]:
    is_called = called is not None and any(module is called for module in top.modules())
    return len(parameters & left), not isinstance(top, torch.jit.ScriptModule), is_called, -len(parameters)


def outermost(modules: Iterable[nn.Module], wanted: frozenset[int]) -> list[nn.Module]:
    """Those that nobody holds, without wrappers and mere containers around them, if they hold a wanted parameter."""
    holders = [unwrap(module) for module in modules if _is_whole(module) and _holds(module, wanted)]
    tops = {id(module): module for module in holders if not isinstance(module, _CONTAINERS)}
    inside = {id(module) for top in tops.values() for module in top.modules() if module is not top}
    return [top for key, top in tops.items() if key not in inside]


def _is_whole(module: nn.Module) -> bool:
    """Whether its constructor has run, or something that stands for it."""
    return "_modules" in vars(module) and "_parameters" in vars(module)


def _holds(module: nn.Module, wanted: frozenset[int]) -> bool:
    return not wanted.isdisjoint(parameters_of(module))


def parameters_of(module: nn.Module) -> set[int]:
    """Their ids, as torch lists them: a class may have made `parameters` something of its own."""
    return {id(parameter) for parameter in nn.Module.parameters(module)}
