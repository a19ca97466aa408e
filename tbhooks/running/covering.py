"""Which modules are the models that optimizers train: the fewest outermost ones that hold their parameters.

Modules do not know who holds them, and the outermost need never be called: a LightningModule is not. So all modules
that live are looked at, once, when a training begins.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from tbhooks.select import unwrap

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
