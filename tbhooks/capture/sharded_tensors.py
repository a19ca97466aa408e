"""Tensors that are spread over the ranks of a job: what of one is here, and which piece of the whole that is.

Never asks another rank for anything: a collective the others do not join would hang. Reads no numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (Tensor, nn.Parameter)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether other ranks may hold parts of it, as they do of a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def is_in_pieces(tensor: Tensor) -> bool:
    """Whether this rank holds less than all of a parameter."""
    return is_of_first_fsdp(tensor) or not all(
        placement.is_replicate() for placement in getattr(tensor, "placements", ())
    )


def here(tensor: Tensor) -> Tensor | None:
    """The numbers this rank holds; None where they are only summands of the real ones."""
    if type(tensor) in _PLAIN:
        return tensor
    found: Any = tensor
    if hasattr(found, "to_local"):
        if any(placement.is_partial() for placement in found.placements):
            return None
        with torch.no_grad():
            found = found.to_local()
    if hasattr(found, "trigger_wait"):  # the result of a collective that was not waited for
        found = found.trigger_wait()
    local: Tensor = found
    return local


def piece(tensor: Tensor) -> tuple[int, int]:
    """Which piece of the whole a tensor's numbers are, and of how many (0: nobody knows). Replicas are the same one."""
    if is_of_first_fsdp(tensor):  # a rank may have none of it
        return distributed.get_rank(), 0
    spread: Any = tensor
    mesh = spread.device_mesh
    number, pieces = 0, 1
    for placement, at, size in zip(spread.placements, mesh.get_coordinate() or (), mesh.shape, strict=False):
        if not placement.is_replicate():
            number, pieces = number * size + at, pieces * size
    return number, pieces


def is_of_first_fsdp(parameter: Tensor) -> bool:
    """Whether `FullyShardedDataParallel`, the older one, has put its piece of the parameter in its place."""
    return bool(getattr(parameter, "_fsdp_flattened", False)) or type(parameter).__name__ == "FlatParameter"


def needs_others_to_run(model: nn.Module) -> bool:
    """Whether its forward asks other ranks for something, as far as can be known."""
    if any(is_dtensor(parameter) or is_of_first_fsdp(parameter) for parameter in model.parameters()):
        return True
    return are_several() and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def are_several() -> bool:
    """Whether this process is one of a job's."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to talk to other ranks, who are not listening."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"{func} needs the other ranks")
        return func(*args, **(kwargs or {}))


def alone() -> contextlib.AbstractContextManager[Any]:
    """Inside, a collective raises: what one rank runs for itself must not be taken for a part of the training."""
    return _NoCollectives() if are_several() else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def is_gathered_to_run(model: nn.Module) -> bool:
    """Whether FSDP puts gathered weights in the place of the real parameters while the model runs."""
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def batch_group(model: nn.Module, rank: int) -> int:
    """The lowest rank of those that work on the same batch as this one, each on a part of the model.

    They are the ranks of the parameters' meshes, but for the dimensions along which FSDP spreads batches.
    """
    with_other_batches = set(_fsdp_ranks(model))
    beside = {rank}
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values():
        beside.update(_beside(mesh, with_other_batches))
    return min(beside)


def _beside(mesh: Any, with_other_batches: set[int]) -> Iterator[int]:
    at = mesh.get_coordinate()
    if at is None:
        return
    along = [
        dim for dim in range(mesh.ndim)
        if not with_other_batches.issuperset(_ranks(mesh.mesh[_line(at, (dim,))]))
    ]  # fmt: skip
    yield from _ranks(mesh.mesh[_line(at, tuple(along))])


def _ranks(of_mesh: Tensor) -> list[int]:
    """A mesh keeps its table of ranks in the host's memory, wherever its tensors are."""
    return [int(rank) for rank in of_mesh.flatten()]


def _line(at: Any, dims: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(slice(None) if dim in dims else index for dim, index in enumerate(at))


def _fsdp_ranks(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else getattr(state(), "_fsdp_param_group", None)
        if group is not None:
            yield from _ranks(group.mesh_info.mesh.mesh)
