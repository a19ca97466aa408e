"""The state of optimizers, for `Watch.optimizer_state`: their moments, and what follows from them.

Read right after the optimizer's step: these are the moments that the step used. State tensors are known by their names.
Everything becomes rows of element-wise tensors, so that shards and ranks merge exactly. No value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tbhooks.capture import sharded_tensors
from tbhooks.capture.parameters.master_weights import Master
from tbhooks.capture.recording.recorder import NO_SITE, Recorder, can_be_one_of_many, can_be_together
from tbhooks.data.frame import Site
from tbhooks.data.self_report import Report, listed
from tbhooks.reduction.cpu import NULL

FIRST_MOMENTS = ("exp_avg", "momentum_buffer", "momentum")
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "variance")
FACTORED = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
"""Second moments as the product of a column and a row: Adafactor of torch, and of transformers."""
WRAPPED = ("optim", "optimizer", "base_optimizer")
"""The attributes under which optimizers that wrap another one keep it: ZeroRedundancyOptimizer, SAM, ..."""
# Optimizers of torch with decoupled weight decay. The others add it to the gradient, unless their groups say.
DECOUPLED = ("AdamW", "Adafactor", "Muon")
# Temporaries of this many elements are made before they are reduced together.
MOST_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class _Moments:
    """The state of one parameter on this rank, in float32 or wider. `root` is the root of the second moment as the
    optimizer divides by it, without epsilon.
    """

    first: Tensor | None
    second: Tensor | None
    root: Tensor | None
    epsilon: float


class OptimizerStateReader:
    """Records the state of the optimizers of one watch."""

    def __init__(self, recorder: Recorder, report: Report) -> None:
        self._recorder = recorder
        self._report = report
        self._waiting: list[tuple[int, Tensor]] = []

    def read(
        self, optimizer: Optimizer, paths: Mapping[int, str], before: Callable[[int, Tensor], Tensor | None],
        held: Mapping[int, Tensor], masters: Mapping[int, Master],
    ) -> None:  # fmt: skip
        """Reads the state of the parameters in `paths`, by their ids. `before` returns a weight before the step.

        `held` are the optimizer's own tensors that stand for parameters, and `masters` the parts they have of them.
        """
        without = []
        for owned in _owners(optimizer, _stand_ins(held, masters)):
            path = paths.get(owned.key)
            if path is None or owned.parameter.grad is None:
                continue
            moments = _moments(owned.group, owned.state, owned.parameter)
            if moments.first is None and moments.second is None:
                without.append(path)
            for kind, tensor in self._tensors(owned, moments, before):
                self._add(path, kind, tensor)
        self._flush()
        name = f"optimizer_state/{type(optimizer).__name__}"
        if without:
            why = f"the optimizer keeps no moments, or none on this rank, of {listed(without, most=3)}"
            self._report.mark_unseen(name, why, replace=True)

    def _tensors(
        self, owned: _Owned, moments: _Moments, before: Callable[[int, Tensor], Tensor | None]
    ) -> Iterator[tuple[str, Tensor]]:
        first, second, root = moments.first, moments.second, moments.root
        gradient = _wide(owned.parameter.grad)
        if gradient is not None and owned.group.get("maximize"):
            gradient = -gradient
        if first is not None:
            yield "first_moment", first
            if gradient is not None:
                yield "momentum_product", first * gradient
        if second is not None and root is not None:
            yield "second_moment", second
            yield "below_epsilon", (root < moments.epsilon).to(root.dtype)
            if gradient is not None:
                yield "normalized_gradient", gradient / root.clamp(min=moments.epsilon)
        proposed = _proposed(owned, moments, before)
        if proposed is not None:
            yield "proposed_update", proposed

    def _add(self, path: str, kind: str, tensor: Tensor) -> None:
        site = self._recorder.number(Site(path, kind))
        if site != NO_SITE:
            self._waiting.append((site, tensor))
            if sum(each.numel() for _, each in self._waiting) > MOST_AT_ONCE:
                self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._recorder.record_all([(site, each, NULL, NULL) for site, each in waiting if can_be_one_of_many(each)])
        others = [(site, each) for site, each in waiting if not can_be_one_of_many(each)]
        self._recorder.record_together([(site, each, None, None) for site, each in others if can_be_together(each)])
        for site, each in others:
            if not can_be_together(each):
                self._recorder.record(site, each)


@dataclass(frozen=True)
class _Owned:
    """A parameter, or the part of one on this rank, with its group, its state, and the optimizer that has it."""

    key: int
    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizer: Optimizer


_StandIns = Mapping[int, list[tuple[int, Master]]]


def _stand_ins(held: Mapping[int, Tensor], masters: Mapping[int, Master]) -> _StandIns:
    """The parameters that each tensor of an optimizer stands for, by its id."""
    found: dict[int, list[tuple[int, Master]]] = {}
    for key, tensor in held.items():
        found.setdefault(id(tensor), []).append((key, masters[key]))
    return found


def _parts(
    optimizer: Optimizer, group: Mapping[str, Any], tensor: Tensor, parts: list[tuple[int, Master]]
) -> Iterator[_Owned]:
    """The parameters that one tensor of an optimizer stands for, each with its part of the gradient and the state."""
    for key, master in parts:
        state = {
            name: master.part_of(value, tensor) if isinstance(value, Tensor) and value.shape == tensor.shape else value
            for name, value in optimizer.state.get(tensor, {}).items()
        }
        weight = master.weight.detach()
        weight.grad = None if tensor.grad is None else master.part_of(tensor.grad, tensor)
        yield _Owned(key, weight, group, state, optimizer)


def _owners(optimizer: Optimizer, stand_ins: _StandIns, depth: int = 3) -> Iterator[_Owned]:
    """The parameters, each with its group and the optimizer that has its state: this one, or one that it wraps."""
    if not optimizer.state and depth:
        wrapped = [getattr(optimizer, name, None) for name in WRAPPED]
        inner = next((each for each in wrapped if isinstance(each, Optimizer) and each is not optimizer), None)
        if inner is not None:
            yield from _owners(inner, stand_ins, depth - 1)
            return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in stand_ins:
                yield from _parts(optimizer, group, parameter, stand_ins[id(parameter)])
            else:
                yield _Owned(id(parameter), parameter, group, optimizer.state.get(parameter, {}), optimizer)


def _wide(tensor: object) -> Tensor | None:
    """The part of a dense real tensor on this rank, in float32 or wider; None of anything else."""
    local = sharded_tensors.local_tensor(tensor) if isinstance(tensor, Tensor) else None
    if local is None or not local.is_floating_point() or local.layout is not torch.strided:
        return None
    return local.detach().float() if local.dtype.itemsize < 4 else local.detach()


def _moments(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> _Moments:
    size = _size(parameter)
    first = _named(state, FIRST_MOMENTS, size)
    second = _named(state, SECOND_MOMENTS, size)
    epsilon = _epsilon(group, parameter)
    if second is None:
        second = _factored(state, epsilon, size)
    used = _named(state, ("max_exp_avg_sq",), size) if group.get("amsgrad") else second
    root = None if used is None else (used / _bias_correction(group, state, 1)).sqrt()
    return _Moments(first, second, root, epsilon)


def _size(parameter: Tensor) -> torch.Size | None:
    local = sharded_tensors.local_tensor(parameter)
    return None if local is None else local.shape


def _named(state: Mapping[str, Any], names: Iterable[str], size: torch.Size | None) -> Tensor | None:
    found = (_wide(state.get(name)) for name in names)
    return next((tensor for tensor in found if tensor is not None and tensor.shape == size), None)


def _factored(state: Mapping[str, Any], epsilon: float, size: torch.Size | None) -> Tensor | None:
    """The second moment that two factors stand for: rows times columns over the mean of the rows."""
    for names in FACTORED:
        rows, columns = (_wide(state.get(name)) for name in names)
        if rows is None or columns is None or size is None:
            continue
        if rows.dim() < len(size):  # transformers keeps the factors without the dimension they were averaged over
            rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
        if (*rows.shape[:-1], columns.shape[-1]) == tuple(size):
            return rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=epsilon)
    return None


def _epsilon(group: Mapping[str, Any], parameter: Tensor) -> float:
    """Of Adafactor the first of its two, which is None for the smallest difference of the dtype."""
    epsilon = group.get("eps", 0.0)
    if isinstance(epsilon, tuple | list):
        epsilon = epsilon[0]
    epsilon = torch.finfo(parameter.dtype).eps if epsilon is None else epsilon
    return max(float(epsilon), torch.finfo(torch.float32).tiny)  # where the second moment is zero, so is the gradient


def _bias_correction(group: Mapping[str, Any], state: Mapping[str, Any], which: int) -> Tensor | float:
    """1 - beta ** step, for optimizers that have betas and count steps; else 1."""
    betas, step = group.get("betas"), state.get("step", group.get("step"))
    if not isinstance(betas, tuple | list) or len(betas) <= which or step is None:
        return 1.0
    if not group.get("bias_correction", True):
        return 1.0
    if isinstance(step, Tensor):
        step = step.float() if step.device.type == "mps" else step.double()
    correction: Tensor | float = 1.0 - betas[which] ** step
    return correction


def _proposed(owned: _Owned, moments: _Moments, before: Callable[[int, Tensor], Tensor | None]) -> Tensor | None:
    """What the optimizer adds to the weight, without decoupled weight decay. Of Adam it is computed from the moments,
    before it is rounded to the weight's dtype; of others it is the change of the weight.
    """
    optimizer, group, parameter = owned.optimizer, owned.group, owned.parameter
    rate: Any = group.get("lr")
    if isinstance(optimizer, torch.optim.Adam) and moments.first is not None and moments.root is not None:
        rate = rate / _bias_correction(group, owned.state, 0)
        proposed: Tensor = moments.first / (moments.root + moments.epsilon) * -rate
        return proposed
    after, earlier = sharded_tensors.local_tensor(parameter), before(owned.key, parameter)
    if after is None or earlier is None or not after.is_floating_point():
        return None
    wide = torch.float64 if after.dtype is torch.float64 else torch.float32
    change = after.detach().to(wide) - earlier.to(wide)
    decay = group.get("weight_decay", 0.0)
    if rate is not None and isinstance(decay, Tensor | float) and _is_decoupled(optimizer, group):
        change += earlier.to(wide) * (rate * decay)
    return change


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay is subtracted from the weight. Optimizers of other packages mostly do that."""
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim")
    return bool(group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED or not is_torch))
