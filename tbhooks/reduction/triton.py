"""Reduces CUDA tensors to rows and bucket counts in two launches and one read, where Triton is installed.

Each program reads blocks (STRETCH elements) of the tensor and writes one partial row, with moments about the mean of
each block; a second launch of a single program merges them. All sums over elements are float32, of at most STRETCH
numbers that are centred and scaled, so that neither a large mean nor a large exponent costs accuracy. float64 is
used for a few numbers of each block only.

The logic is tested with Triton's interpreter. That the kernels compile, how long they take, and that two streams may
use them at once, can only be tested on a GPU.
"""

from __future__ import annotations

import importlib.util
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tbhooks.data import stats

TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
STRETCH = 4096
# Several for each multiprocessor of any GPU, and few enough for one program to merge.
MOST_PROGRAMS = 1024

_lock = threading.Lock()
_kernels: Any = None
failure = ""
"""The first exception of Triton. From then on torch operations are used."""
proven = False
"""Whether the kernels have run in this process."""


def can_read(tensor: Tensor) -> bool:
    """Whether these kernels can reduce it: CUDA, float32 or half precision, contiguous."""
    return (
        tensor.is_cuda
        and tensor.dtype in TYPES
        and type(tensor) is Tensor
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not failure
        and is_installed()
    )


def takes(tensor: Tensor) -> bool:
    """Whether the whole tensor can be reduced at once, which torch operations do in parts."""
    return proven and can_read(tensor)


@cache
def is_installed() -> bool:
    """Triton is a dependency of torch on Linux with CUDA."""
    return importlib.util.find_spec("triton") is not None


def name() -> str:
    """What reduces CUDA tensors here: "triton", or "torch" and why."""
    if not is_installed():
        return "torch"
    return f"torch: {failure}" if failure else "triton"


def reduce(numbers: Tensor, row: Tensor, counts: Tensor | None) -> bool:
    """Writes the row and the buckets of an unused record. Returns False if that failed, now or before.

    The first call compiles, which takes seconds; what it raises is kept in `failure` and never raised again.
    """
    global failure, proven  # noqa: PLW0603 - of the process, as Triton's compiler is
    if failure:
        return False
    try:
        launch(numbers, row, counts)
    except Exception as problem:  # no compiler, a driver too old, an architecture without a code generator
        failure = f"{type(problem).__name__}: {problem}"
        if counts is not None:
            counts.zero_()  # the first launch may have added to them
        return False
    proven = True
    return True


def launch(numbers: Tensor, row: Tensor, counts: Tensor | None) -> None:
    """The two launches, on the current stream. Temporaries: 64 bytes for each program."""
    kernels = _load()
    stretches = -(-numbers.numel() // STRETCH)
    programs = min(stretches, MOST_PROGRAMS)
    partial = torch.empty((programs, kernels.PARTIALS), dtype=torch.float64, device=numbers.device)
    each = -(-stretches // programs)
    with _device_of(numbers):
        kernels.partial_rows[(programs,)](
            numbers, numbers.numel(), partial, row if counts is None else counts, each,
            STRETCH=STRETCH, WITH_BUCKETS=counts is not None,
        )  # fmt: skip
        kernels.merge_rows[(1,)](partial, programs, row, PROGRAMS=_power_of_two(programs))


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _load() -> Any:
    global _kernels  # noqa: PLW0603 - importing Triton takes a second, and most processes never need it
    with _lock:
        if _kernels is None:
            from tbhooks.reduction import triton_kernels  # noqa: PLC0415

            _kernels = triton_kernels
    return _kernels


assert stats.WIDTH == 9, "the merging kernel writes the columns by position"
