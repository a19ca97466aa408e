"""Weights that an optimizer updates in the place of a model's parameters, and their gradients.

DeepSpeed ZeRO gives its optimizer flat partitions, of which each parameter is a part; Megatron gives it float32 copies
(`main_param`). Their own accessors for whole tensors (`safe_get_full_grad` and others) are collectives, which hang if a
rank does not call them, and those for local parts wait for the device. So the parts are read where these accessors
find them. No collective, no copy, no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

ELSEWHERE = (
    'this rank holds no part of it: DeepSpeed ZeRO has given it to another rank. Only watch(..., ranks="merge") '
    "collects what other ranks hold"
)
SWAPPED = "DeepSpeed keeps it on a disk"


@dataclass(frozen=True, slots=True)
class Master:
    """The part of a parameter that the optimizer of this rank updates, as a flat tensor or as it is."""

    weight: Tensor
    shard: tuple[int, int] | None
    """The number of the shard, and how many there are (0: unknown); None if every rank has the whole parameter."""

    def held_by(self, optimizer: Optimizer) -> Tensor | None:
        """The tensor of the optimizer that the weight is a part of, if it has one."""
        return _by_memory(optimizer).get(_memory(self.weight))

    def part_of(self, tensor: Tensor, held: Tensor) -> Tensor | None:
        """The elements of a tensor of the shape of `held` (its gradient, a moment) that belong to this weight."""
        if tensor.numel() != held.numel() or not tensor.is_contiguous():
            return None
        start = self.weight.storage_offset() - held.storage_offset()
        return tensor.detach().view(-1).narrow(0, start, self.weight.numel()).view(self.weight.shape)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_memory(optimizer: Optimizer) -> dict[int, Tensor]:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {_memory(parameter): parameter for parameter in held if parameter.numel()}


def is_partitioned(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO has partitioned the parameter, or its optimizer's state."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def is_gone(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has freed the parameter: between forward and backward passes it has no elements."""
    return hasattr(parameter, "ds_id")


def why_gone(parameter: Any) -> str:
    """Why nothing is read of a parameter that ZeRO-3 has freed."""
    is_swapped = getattr(getattr(parameter, "_z3_optimizer", None), "swap_optimizer", False)
    return SWAPPED if is_swapped else ELSEWHERE


def find(parameter: Tensor) -> Master | None:
    """What the optimizer updates in the place of a parameter; None if that is the parameter, or not on this rank."""
    if is_gone(parameter):
        return _of_third_stage(parameter)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        return Master(mapping.get_hp_fragment().detach(), (_rank(getattr(parameter, "_dp_group", None)), 0))
    main = getattr(parameter, "main_param", None)
    if isinstance(main, Tensor):
        is_part = bool(getattr(parameter, "main_param_sharded", False))
        return Master(main.detach(), (_rank(None), 0) if is_part else None)
    return None


def gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that Megatron and others accumulate in `main_grad`. Of a sharded optimizer it is not yet summed."""
    main = None if getattr(parameter, "main_param_sharded", False) else getattr(parameter, "main_grad", None)
    return main if isinstance(main, Tensor) else None


def find_all(parameters: Iterable[nn.Parameter]) -> dict[int, Master]:
    """The masters by the ids of their parameters."""
    found = ((id(parameter), find(parameter)) for parameter in parameters)
    return {key: master for key, master in found if master is not None}


def owned_by(optimizer: Optimizer, parameters: Callable[[], Iterable[nn.Parameter]]) -> frozenset[int]:
    """The ids of the parameters whose masters the optimizer updates."""
    memory = _by_memory(optimizer).keys()
    return frozenset(key for key, master in find_all(parameters()).items() if _memory(master.weight) in memory)


def _of_third_stage(parameter: Any) -> Master | None:
    """The partition of this rank, without the elements that pad it. Of a frozen parameter it is in its own dtype."""
    rank = _rank(getattr(parameter, "ds_process_group", None))
    zero = getattr(parameter, "_z3_optimizer", None)
    position = None if zero is None else zero.grad_position.get(zero.get_param_id(parameter))
    if position is None:
        partition = parameter.ds_tensor
    elif zero is None or getattr(zero, "swap_optimizer", False):
        return None
    else:
        group, start, size = position
        partition = zero.fp32_partitioned_groups_flat[group].detach().narrow(0, int(start), int(size))
    size = partition.numel()
    count = min(size, max(parameter.ds_numel - rank * size, 0))
    return Master(partition.detach().view(-1).narrow(0, 0, count), (rank, 0)) if count else None


def _rank(group: Any) -> int:
    return distributed.get_rank(group) if distributed.is_available() and distributed.is_initialized() else 0
