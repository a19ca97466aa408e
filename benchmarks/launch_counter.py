"""Counts the kernels that torch operations would start on a GPU, as they are dispatched. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_free = func.is_view or "empty" in func.__name__
        self.count += 0 if is_free else 2 if "aminmax" in func.__name__ or _converts(func, args) else 1
        return func(*args, **(kwargs or {}))


def _converts(func: Any, args: Any) -> bool:
    """Whether it is a torch.where that first converts one tensor to the type of the other."""
    return func is torch.ops.aten.where.self and args[1].dtype != args[2].dtype and args[2].dim() > 0


def launched(call: Callable[[], object]) -> int:
    """How many kernels the operations of a call start."""
    with Launches() as mode:
        call()
    return mode.count
