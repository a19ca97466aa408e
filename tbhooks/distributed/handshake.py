"""What the ranks of a job have to agree on to be merged, and in what they differ, in words.

Every rank describes itself; the first compares. Ranks may hold the same model, or parts of one that have no
parameter in common, as the stages of a pipeline do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tbhooks.capture import selection, sharded_tensors
from tbhooks.capture.schedule import Schedule
from tbhooks.data.frame import ROOT

# How many sites of a kind a module has, or nearly; more than there is room for would be left out.
_OF_MODULES = {"activation": 1, "gradient": 1, "input": 1, "functional": 4}


@dataclass(frozen=True)
class Described:
    """One rank: a few lines that all send, and a list of its modules that is asked for where they differ."""

    summary: dict[str, Any]
    details: dict[str, Any]


def describe(
    model: nn.Module, selector: selection.Selector, kinds: tuple[str, ...], schedule: Schedule, step: str
) -> Described:
    """What this rank has to say of itself."""
    modules = selector.choose(selection.walk(model).by_path)
    parameters = selection.parameters(modules)
    details = {
        "modules": {path: own_name(module) for path, module in modules.items()},
        "parameters": {path: _shape(parameter) for path, parameter in parameters.items()},
    }
    of_modules = sum(_OF_MODULES.get(kind, 0) for kind in kinds)
    of_parameters = sum(kind not in _OF_MODULES for kind in kinds) + ("update" in kinds and "weight" not in kinds)
    options = {"every": schedule.every, "kinds": sorted(kinds), "histograms": schedule.histograms, "step": step}
    summary = {
        "options": options,
        "model": hashlib.blake2b(json.dumps(details, sort_keys=True).encode(), digest_size=16).hexdigest(),
        "sites": len(modules) * of_modules + len(parameters) * of_parameters,
    }
    return Described(summary, details)


def _shape(parameter: nn.Parameter) -> list[int]:
    """Of all of it, where that is known: the older FSDP leaves a piece in its place."""
    return [] if sharded_tensors.is_of_first_fsdp(parameter) else list(parameter.shape)


def own_name(module: nn.Module) -> str:
    """Of the class the user wrote: FSDP puts one of its own in front."""
    kind = type(module)
    if kind.__name__.startswith("FSDP") and len(kind.__mro__) > 2:
        return next(c.__name__ for c in kind.__mro__[1:] if not c.__name__.startswith("FSDP"))
    return kind.__name__


def difference(said: Sequence[dict[str, Any]], details: Callable[[int], dict[str, Any]]) -> str | None:
    """The first in which a rank differs from another, or None; `details` fetches those of a rank."""
    for rank, each in enumerate(said):
        for name, value in each["options"].items():
            if value != said[0]["options"][name]:
                return f"{name} is {said[0]['options'][name]} on rank 0 and {value} on rank {rank}"
    models: dict[str, int] = {}
    for rank, each in enumerate(said):
        models.setdefault(each["model"], rank)
    fetched = {rank: details(rank) for rank in models.values()} if len(models) > 1 else {}
    for one, other in ((a, b) for a in fetched for b in fetched if a < b):
        problem = _models_differ(one, fetched[one], other, fetched[other])
        if problem is not None:
            return problem
    return None


def _models_differ(a: int, one: dict[str, Any], b: int, other: dict[str, Any]) -> str | None:
    first, second = one["parameters"], other["parameters"]
    common = first.keys() & second.keys()
    for path in first:
        if path in common and first[path] != second[path]:
            return f"the model differs: {path} has shape {first[path]} on rank {a} and {second[path]} on rank {b}"
    if not common and first and second:
        return None  # parts of one model
    for what in ("parameters", "modules"):
        for here, there, x, y in ((one, other, a, b), (other, one, b, a)):
            missing = [path for path in here[what] if path not in there[what]]
            if missing:
                return f"the model differs: rank {x} has {_shown(missing)}, and rank {y} has not"
    for path, kind in one["modules"].items():
        if kind != other["modules"][path]:
            name = "it" if path == ROOT else path
            return f"the model differs: {name} is a {kind} on rank {a} and a {other['modules'][path]} on rank {b}"
    return None


def _shown(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
