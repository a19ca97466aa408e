"""What ranks must agree on before their statistics can be merged, and the message about a difference.

Every rank describes itself; the first rank compares. Ranks have the same model, or parts of one model without a common
parameter, such as the stages of a pipeline.
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
from tbhooks.data.self_report import listed

# About how many sites of each kind a module has. It decides the size of the buffer; sites that do not fit are left out.
_SITES_PER_MODULE = {"activation": 1, "gradient": 1, "input": 1, "functional": 4}


@dataclass(frozen=True)
class Description:
    """One rank: a short summary that every rank sends, and a list of its modules that is read if summaries differ."""

    summary: dict[str, Any]
    details: dict[str, Any]


def describe(
    model: nn.Module, selector: selection.Selector, kinds: tuple[str, ...], schedule: Schedule, step: str
) -> Description:
    """Returns the description of this rank."""
    modules = selector.choose(selection.walk(model).by_path)
    parameters = selection.parameters(modules)
    details = {
        "modules": {path: class_name(module) for path, module in modules.items()},
        "parameters": {path: _shape(parameter) for path, parameter in parameters.items()},
    }
    per_module = sum(_SITES_PER_MODULE.get(kind, 0) for kind in kinds)
    per_parameter = sum(kind not in _SITES_PER_MODULE for kind in kinds) + ("update" in kinds and "weight" not in kinds)
    options = {"every": schedule.every, "kinds": sorted(kinds), "histograms": schedule.histograms, "step": step}
    summary = {
        "options": options,
        "model": hashlib.blake2b(json.dumps(details, sort_keys=True).encode(), digest_size=16).hexdigest(),
        "sites": len(modules) * per_module + len(parameters) * per_parameter,
    }
    return Description(summary, details)


def _shape(parameter: nn.Parameter) -> list[int]:
    """The shape of the whole parameter; unknown with FSDP1, which leaves a shard in its place."""
    return [] if sharded_tensors.is_of_first_fsdp(parameter) else list(parameter.shape)


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote. `fully_shard` replaces it by a subclass of its own."""
    kind = type(module)
    if kind.__name__.startswith("FSDP") and len(kind.__mro__) > 2:
        return next(c.__name__ for c in kind.__mro__[1:] if not c.__name__.startswith("FSDP"))
    return kind.__name__


def difference(summaries: Sequence[dict[str, Any]], details: Callable[[int], dict[str, Any]]) -> str | None:
    """The first difference between two ranks in words, or None. `details(rank)` fetches the details of a rank."""
    for rank, each in enumerate(summaries):
        for name, value in each["options"].items():
            if value != summaries[0]["options"][name]:
                return f"{name} is {summaries[0]['options'][name]} on rank 0 and {value} on rank {rank}"
    models: dict[str, int] = {}
    for rank, each in enumerate(summaries):
        models.setdefault(each["model"], rank)
    fetched = {rank: details(rank) for rank in models.values()} if len(models) > 1 else {}
    for a, b in ((a, b) for a in fetched for b in fetched if a < b):
        problem = _model_difference(a, fetched[a], b, fetched[b])
        if problem is not None:
            return problem
    return None


def _model_difference(a: int, one: dict[str, Any], b: int, other: dict[str, Any]) -> str | None:
    first, second = one["parameters"], other["parameters"]
    common = first.keys() & second.keys()
    for path in first:
        if path in common and first[path] != second[path]:
            return f"the model differs: {path} has shape {first[path]} on rank {a} and {second[path]} on rank {b}"
    if not common and first and second:
        return None  # parts of one model
    for what in ("parameters", "modules"):
        for has, has_not, x, y in ((one, other, a, b), (other, one, b, a)):
            missing = [path for path in has[what] if path not in has_not[what]]
            if missing:
                return f"the model differs: rank {x} has {listed(missing, most=3)}, and rank {y} has not"
    for path, kind in one["modules"].items():
        if kind != other["modules"][path]:
            name = "it" if path == ROOT else path
            return f"the model differs: {name} is a {kind} on rank {a} and a {other['modules'][path]} on rank {b}"
    return None
