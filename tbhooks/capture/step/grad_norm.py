"""The L2 norm over the elements of many tensors, as one number on their device, without a sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tbhooks.capture import sharded_tensors
from tbhooks.data import stats
from tbhooks.reduction import cpu


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm as a scalar tensor: float64 on a CPU, else float32. It is not finite if any element is not."""
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    dense = [local for tensor in dense if (local := sharded_tensors.local_tensor(tensor)) is not None]
    if not dense:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    by_kernel: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in dense:
        (by_kernel if cpu.can_read(tensor) else others).append(tensor)
    devices = dict.fromkeys(tensor.device for tensor in others)
    parts = [_by_kernel(by_kernel)] if by_kernel else []
    parts += [_by_torch([tensor for tensor in others if tensor.device == device]) for device in devices]
    device = parts[0].device
    wide = torch.float64 if device.type == "cpu" else parts[0].dtype
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(device, wide) for part in parts]))
    return total


def _by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    rows = torch.empty((len(tensors), stats.WIDTH), dtype=torch.float64, device="cpu")
    start, width = rows.data_ptr(), stats.WIDTH * rows.itemsize
    cpu.reduce_all([cpu.job(tensor, start + i * width, cpu.NULL) for i, tensor in enumerate(tensors)])
    count, mean, m2, nans, infs = (
        rows[:, column] for column in (stats.COUNT, stats.MEAN, stats.M2, stats.NANS, stats.INFS)
    )
    squares = m2 + (count - nans - infs) * mean.square()
    squares = squares.masked_fill(infs > 0, torch.inf).masked_fill(nans > 0, torch.nan)
    return squares.sum().sqrt()


def _by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Computes the norm in float32 at least, because squares overflow in half precision."""
    wide = torch.float64 if tensors[0].device.type == "cpu" else torch.float32
    narrow = [t for t in tensors if t.dtype.itemsize < 8]
    others = [t for t in tensors if t.dtype.itemsize >= 8]
    norms: list[Tensor] = list(torch._foreach_norm(narrow, 2, dtype=wide)) if narrow else []
    norms += torch._foreach_norm(others, 2) if others else ()
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))
    return total
