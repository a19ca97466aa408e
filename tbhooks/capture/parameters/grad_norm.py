"""The L2 norm over the elements of many tensors, as one number on their device, without a sync; which have changed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tbhooks.capture import sharded_tensors
from tbhooks.capture.hooks.eager_hooks import UNREADABLE, describe_all
from tbhooks.data import stats
from tbhooks.reduction import cpu, torch_rows


@dataclass(frozen=True, slots=True)
class GradientVersion:
    """Identifies a gradient and its contents when a backward pass began, without keeping the tensor alive."""

    gradient: weakref.ref[Tensor]
    version: int

    def is_current(self, gradient: Tensor) -> bool:
        return self.gradient() is gradient and gradient._version == self.version


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm as a scalar tensor: float64 where the device has it. It is not finite if any element is not."""
    described = describe_all(list(tensors))
    if described is not None and len(described) and (described[:, 2] != UNREADABLE).all():
        return _by_kernel(described)
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    dense = [local for tensor in dense if (local := sharded_tensors.local_tensor(tensor)) is not None]
    if not dense:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    by_kernel: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in dense:
        (by_kernel if cpu.can_read(tensor) else others).append(tensor)
    devices = dict.fromkeys(tensor.device for tensor in others)
    parts = [_by_kernel(np.array([cpu.described(tensor) for tensor in by_kernel]))] if by_kernel else []
    parts += [_by_torch([tensor for tensor in others if tensor.device == device]) for device in devices]
    device = parts[0].device
    wide = torch.float64 if device.type == "cpu" else parts[0].dtype
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(device, wide) for part in parts]))
    return total


def _by_kernel(described: NDArray[np.int64]) -> Tensor:
    rows = np.empty((len(described), stats.WIDTH))
    jobs = cpu.jobs_of(described)
    jobs[:, 5] = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    cpu.reduce_table(jobs)
    nans, infs = rows[:, stats.NANS], rows[:, stats.INFS]
    if nans.any() or infs.any():
        norm = math.nan if nans.any() else math.inf
    else:
        with np.errstate(over="ignore"):
            norm = math.sqrt((rows[:, stats.M2] + rows[:, stats.COUNT] * rows[:, stats.MEAN] ** 2).sum())
    return torch.tensor(norm, dtype=torch.float64, device="cpu")


def _by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Computes the norm in float64, or scaled: in float32 squares overflow beyond 1e19 and vanish below 1e-23."""
    device = tensors[0].device
    if not torch_rows.has_float64(device):
        return _scaled_norm(tensors)
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def _scaled_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Divides by the largest element first, one tensor after the other."""
    largest = torch.stack(list(torch._foreach_norm(list(tensors), torch.inf, dtype=torch.float32))).amax()
    divisor = largest.clamp(min=torch.finfo(torch.float32).tiny)
    norms = [torch.linalg.vector_norm(tensor.float() / divisor) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms)) * divisor
    return total
