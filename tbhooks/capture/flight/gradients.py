"""The norms of all gradients of an optimizer, by one foreach call for each device and dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture import selection, sharded_tensors
from tbhooks.data.self_report import Report

LEFT_OUT = "the flight recorder leaves out gradients that are sparse, complex or in 8 bits"


@dataclass(frozen=True)
class _Group:
    """Gradients that one foreach call takes."""

    positions: tuple[int, ...]
    """Among the parameters of the optimizer."""
    columns: tuple[int, ...]
    """Of these parameters among all parameters of the model."""
    dtype: torch.dtype | None
    """In which the norms are computed; None for that of the gradients."""
    is_sharded: bool


@dataclass(frozen=True)
class _Plan:
    """How the gradients of an optimizer are read, for a list of parameters and those of them that have a gradient."""

    ids: tuple[int, ...]
    present: tuple[bool, ...]
    groups: tuple[_Group, ...]


Norms = tuple[tuple[int, ...], list[Tensor]]
"""Columns, and the norm of each as a tensor of one element."""


class GradientNorms:
    """Reads the gradients of one model's parameters. Keeps no tensor."""

    def __init__(self, model: weakref.ref[nn.Module], report: Report) -> None:
        self._model = model
        self._report = report
        self.names: list[str] = []
        """The paths of all parameters that were found so far. A column is a position in it."""
        self._columns: dict[str, int] = {}
        self._plans: weakref.WeakKeyDictionary[Optimizer, _Plan] = weakref.WeakKeyDictionary()

    def find_parameters(self) -> Mapping[int, int]:
        """Finds the parameters that the model has now. Returns the column of each, by its id."""
        model = self._model()
        if model is None:
            return {}
        found = selection.parameters(selection.walk(model).by_path)
        for path in found:
            if path not in self._columns:
                self._columns[path] = len(self.names)
                self.names.append(path)
        return {id(parameter): self._columns[path] for path, parameter in found.items()}

    def read(self, optimizer: Optimizer) -> list[Norms]:
        """Returns the norms of the gradients that the optimizer is about to use, one entry for each foreach call."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        ids, present = tuple(map(id, parameters)), tuple(gradient is not None for gradient in gradients)
        plan = self._plans.get(optimizer)
        if plan is None or plan.ids != ids or plan.present != present:
            plan = self._plans[optimizer] = _Plan(ids, present, self._grouped(ids, gradients))
        return [_norms(group, gradients) for group in plan.groups]

    def _grouped(self, ids: tuple[int, ...], gradients: list[Tensor | None]) -> tuple[_Group, ...]:
        columns = self.find_parameters()
        groups: dict[tuple[torch.device, torch.dtype, bool], tuple[list[int], list[int]]] = {}
        for position, (key, gradient) in enumerate(zip(ids, gradients, strict=True)):
            if gradient is None or key not in columns:
                continue
            local = sharded_tensors.local_tensor(gradient)
            if (
                local is None
                or local.layout is not torch.strided
                or not local.is_floating_point()
                or local.dtype.itemsize == 1
            ):
                self._report.log_once(LEFT_OUT)
            else:
                group = groups.setdefault((local.device, local.dtype, local is not gradient), ([], []))
                group[0].append(position)
                group[1].append(columns[key])
        return tuple(
            # The squares of a half-precision gradient overflow, and so would its norm.
            _Group(tuple(positions), tuple(of), torch.float32 if dtype.itemsize < 4 else None, is_sharded)
            for (_, dtype, is_sharded), (positions, of) in groups.items()
        )


def _norms(group: _Group, gradients: list[Tensor | None]) -> Norms:
    chosen = [gradient for i in group.positions if (gradient := gradients[i]) is not None]
    if group.is_sharded:
        local: Callable[[Tensor], Tensor | None] = sharded_tensors.local_tensor
        chosen = [piece for gradient in chosen if (piece := local(gradient)) is not None]
    if group.dtype is None:
        return group.columns, list(torch._foreach_norm(chosen, 2))
    return group.columns, list(torch._foreach_norm(chosen, 2, dtype=group.dtype))
