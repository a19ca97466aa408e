"""Rows and buckets of CPU tensors from the C kernel (kernel.c), where the package was built with one.

One read of the tensor, no temporaries, the GIL released. Without a compiler at build time, or on a
device, the torch operations of rows.py and buckets.py serve instead, with the same meaning.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

LIBRARY = Path(__file__).with_name("_kernel.so")
# Raised with the meaning of a row or a bucket: a library left over from another version is not used.
ABI = 1
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Subclasses may wrap other tensors and have no memory of their own to read.
_PLAIN = (Tensor, Parameter)


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
        if library.tbhooks_abi() != ABI:
            return None
    except (OSError, AttributeError):
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.tbhooks_reduce.argtypes = (address, number, ctypes.c_int, address, address)
    library.tbhooks_reduce_difference.argtypes = (address, address, number, ctypes.c_int, address, address)
    return library


library = _load(LIBRARY)


def name() -> str:
    """What reduces CPU tensors here: "C" or "torch"."""
    return "torch" if library is None else "C"


def can_read(tensor: Tensor) -> bool:
    """Whether the kernel can read this tensor's memory as it lies there."""
    return (
        library is not None
        and type(tensor) in _PLAIN
        and tensor.dtype in _CODES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)  # autograd's zeros have no memory
    )


def reduce(numbers: Tensor, row: Tensor, counts: Tensor | None) -> None:
    """Writes the row of a contiguous tensor; adds its buckets to `counts`."""
    assert library is not None
    buckets = None if counts is None else counts.data_ptr()
    library.tbhooks_reduce(numbers.data_ptr(), numbers.numel(), _CODES[numbers.dtype], row.data_ptr(), buckets)


def reduce_difference(after: Tensor, before: Tensor, row: Tensor, counts: Tensor | None) -> None:
    """The same of `after - before`, two contiguous tensors of one type and size, without a temporary."""
    assert library is not None
    buckets = None if counts is None else counts.data_ptr()
    library.tbhooks_reduce_difference(
        after.data_ptr(), before.data_ptr(), after.numel(), _CODES[after.dtype], row.data_ptr(), buckets
    )
