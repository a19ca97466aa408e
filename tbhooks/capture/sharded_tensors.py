"""Tensors that are sharded over the ranks of a job: the local part, and which shard of the whole it is.

No collective is called here: ranks that do not join it would make it hang. Reads no numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tbhooks.capture import structure

_PLAIN = (Tensor, nn.Parameter)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether other ranks may hold parts of it, as they do of a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds less than all of a parameter."""
    return is_of_first_fsdp(tensor) or not all(
        placement.is_replicate() for placement in getattr(tensor, "placements", ())
    )


def local_tensor(tensor: Tensor) -> Tensor | None:
    """The part of a tensor on this rank; None for partial DTensors, whose local values still have to be summed."""
    if type(tensor) in _PLAIN:
        return tensor
    local: Any = tensor
    if hasattr(local, "to_local"):
        if any(placement.is_partial() for placement in local.placements):
            return None
        with torch.no_grad():
            local = local.to_local()
    if hasattr(local, "trigger_wait"):  # the result of a collective that was not waited for
        local = local.trigger_wait()
    return local  # type: ignore[no-any-return]


def shard_index(tensor: Tensor) -> tuple[int, int]:
    """The number of the local shard, and how many shards there are (0: unknown). Replicas have the same number."""
    if is_of_first_fsdp(tensor):  # a rank may have none of it
        return distributed.get_rank(), 0
    sharded: Any = tensor
    mesh = sharded.device_mesh
    number, shards = 0, 1
    for placement, at, size in zip(sharded.placements, mesh.get_coordinate() or (), mesh.shape, strict=False):
        if not placement.is_replicate():
            number, shards = number * size + at, shards * size
    return number, shards


def is_of_first_fsdp(parameter: Tensor) -> bool:
    """Whether `FullyShardedDataParallel` (FSDP1) has replaced the parameter by its local shard."""
    return bool(getattr(parameter, "_fsdp_flattened", False)) or type(parameter).__name__ == "FlatParameter"


def needs_others_to_run(model: nn.Module) -> bool:
    """Whether its forward is known to communicate with other ranks."""
    if any(is_dtensor(each) or is_of_first_fsdp(each) or hasattr(each, "ds_id") for each in model.parameters()):
        return True
    return are_several() and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def are_several() -> bool:
    """Whether this process belongs to a job of several processes."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises on every collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"{func} needs the other ranks")
        return func(*args, **(kwargs or {}))


def alone() -> contextlib.AbstractContextManager[Any]:
    """Inside, a collective raises: the other ranks would take it for a part of the training."""
    return _NoCollectives() if are_several() else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def is_gathered_to_run(model: nn.Module) -> bool:
    """Whether FSDP replaces the parameters by gathered ones while the model runs."""
    return any(hasattr(kind, "_get_fsdp_state") for kind in structure.of(model).classes())


def batch_group(model: nn.Module, rank: int) -> int:
    """The lowest of the ranks that work on the same batch as this one, each on a part of the model.

    They are the ranks of the parameters' meshes, except for the dimensions along which FSDP distributes batches.
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
    """The table of ranks of a mesh is always on the CPU."""
    return [int(rank) for rank in of_mesh.flatten()]


def _line(at: Any, dims: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(slice(None) if dim in dims else index for dim, index in enumerate(at))


def _fsdp_ranks(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else getattr(state(), "_fsdp_param_group", None)
        if group is not None:
            yield from _ranks(group.mesh_info.mesh.mesh)
