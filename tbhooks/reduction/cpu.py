"""Reduces CPU tensors to rows and bucket counts with the C kernel (kernel.c), where the package was built with one.

One read of the tensor, no temporaries, the GIL released, as many threads as torch uses. Without a compiler at build
time, torch_rows.py and histogram.py give the same results with torch operations. Rows, counts and copies are passed as
addresses: making a tensor for each would cost more than the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from tbhooks.reduction.torch_private import look_up

LIBRARY = Path(__file__).with_name("_kernel.so")
# Incremented when a row or a bucket changes its meaning: a library left over from another version is not loaded.
ABI = 4
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Subclasses may wrap other tensors and have no memory of their own.
_PLAIN = frozenset({Tensor, Parameter})
_has_storage: Callable[[Tensor], bool] = look_up(
    "torch._C._has_storage", lambda _: True, "tensors of torch.func are recognised by an error that is counted"
)

Address = int
NULL: Address = 0
Addresses = Address | NDArray[np.int64]
Job = tuple[Address, Address, Address, int, int, Address, Address]
"""The struct Job of kernel.c: data, minus, copy, size, type, row, counts."""


def _load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why a library that exists is not used."""
    if not path.exists():
        return None, ""
    try:
        library = ctypes.CDLL(str(path))
        if (version := library.tbhooks_abi()) != ABI:
            return None, f"{path} is of version {version}, and this tbhooks needs version {ABI}"
    except (OSError, AttributeError) as problem:
        return None, f"{path} cannot be loaded: {problem}"
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.tbhooks_reduce.argtypes = (address, number, number, address, address, number)
    library.tbhooks_reduce_all.argtypes = (address, number, number)
    library.tbhooks_find_alive.argtypes = (address, number, number, number, number, address)
    library.tbhooks_sum_words.argtypes = (address, number, number, address, number)
    library.tbhooks_use.argtypes = (address,)
    library.tbhooks_use.restype = None
    library.tbhooks_use(_threads_of_torch())
    return library, ""


def _threads_of_torch() -> Address | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; None if that is another library."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


library, failure = _load(LIBRARY)


def name() -> str:
    """What reduces CPU tensors here: "C", or "torch", followed by the reason if there is a library that is not used."""
    if library is not None:
        return "C"
    return f"torch: {failure}" if failure else "torch"


def can_read(tensor: Tensor) -> bool:
    """Whether the kernel can read the memory of this tensor."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in _CODES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and _has_storage(tensor)  # tensors of torch.func have none
        and not tensor.is_nested
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and (_has_memory(tensor) if tensor.storage_offset() or not tensor.data_ptr() else True)
        and library is not None
    )


def _has_memory(tensor: Tensor) -> bool:
    """Not if its storage was freed, as FSDP does between steps. Zeros made by autograd have no memory either."""
    if tensor._is_zerotensor():
        return False
    size = tensor.numel()
    needed = (tensor.storage_offset() + size) * tensor.itemsize
    return size == 0 or (tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= needed)


def reduce(numbers: Tensor, row: Address, counts: Address) -> None:
    """Writes the row of a tensor for which `can_read` is true; adds its buckets to `counts`, unless that is NULL."""
    assert library is not None
    library.tbhooks_reduce(
        numbers.data_ptr(), numbers.numel(), _CODES[numbers.dtype], row, counts, torch.get_num_threads()
    )


def job(numbers: Tensor, row: Address, counts: Address, minus: Address = NULL, copy: Address = NULL) -> Job:
    """One tensor for `reduce_all`: less another of the same type and size, or copied while it is read."""
    return numbers.data_ptr(), minus, copy, numbers.numel(), _CODES[numbers.dtype], row, counts


def reduce_all(jobs: Sequence[Job]) -> None:
    """Reduces many tensors in one call, shared among the threads."""
    assert library is not None
    reduce_table(np.array(jobs, dtype=np.int64))


def described(numbers: Tensor) -> tuple[Address, int, int]:
    """Address, size and type of a tensor for which `can_read` is true."""
    return numbers.data_ptr(), numbers.numel(), _CODES[numbers.dtype]


def jobs_of(described: NDArray[np.int64], minus: Addresses = NULL, copies: Addresses = NULL) -> NDArray[np.int64]:
    """Jobs for `reduce_table` of tensors that are described by address, size and type; without rows and counts."""
    jobs = np.zeros((len(described), 7), np.int64)
    jobs[:, 0], jobs[:, 3], jobs[:, 4] = described.T
    jobs[:, 1], jobs[:, 2] = minus, copies
    return jobs


def reduce_table(jobs: NDArray[np.int64]) -> None:
    """As `reduce_all`; the fields of a job are the columns of the table."""
    assert library is not None
    library.tbhooks_reduce_all(jobs.ctypes.data, len(jobs), torch.get_num_threads())


def reduce_rows(matrix: Tensor, rows: Tensor, counts: Tensor | None) -> None:
    """Reduces each row of a matrix for which `can_read` is true, into as many rows and counts."""
    size, first = matrix.size(1), job(matrix, rows.data_ptr(), NULL if counts is None else counts.data_ptr())
    data, _, _, _, code, row, count = first
    row_step = rows.size(1) * rows.itemsize
    count_step = 0 if counts is None else counts.size(1) * counts.itemsize
    reduce_all([
        (data + i * size * matrix.itemsize, NULL, NULL, size, code, row + i * row_step, count + i * count_step)
        for i in range(len(matrix))
    ])  # fmt: skip


def find_alive(numbers: Tensor, unit_dimension: int, alive: Tensor) -> None:
    """Sets `alive`, float32, to 1 for each unit with an element that is not zero."""
    assert library is not None
    shape = numbers.shape
    outer, inner = shape[:unit_dimension].numel(), shape[unit_dimension + 1 :].numel()
    library.tbhooks_find_alive(
        numbers.data_ptr(), _CODES[numbers.dtype], outer, shape[unit_dimension], inner, alive.data_ptr()
    )


def dead_shares(alive: Tensor, starts: Sequence[int], widths: Sequence[int]) -> list[float]:
    """Returns the share of zeros in each part of `alive`, which has ones and zeros: its start, and its length."""
    width = np.array(widths)
    bounds = np.stack([starts, starts + width], axis=1).ravel()
    ones = np.add.reduceat(np.append(alive[: bounds.max()].numpy(), 0), bounds)[::2]
    shares: list[float] = ((width - ones).astype(np.float32) / width.astype(np.float32)).tolist()
    return shares


def copied(numbers: Tensor) -> Tensor:
    """A copy in new memory, made by this thread alone: torch would share the work among threads, and wait for them
    where other processes use the cores.
    """
    content = numbers.contiguous()
    copy = torch.empty_like(content)
    ctypes.memmove(copy.data_ptr(), content.data_ptr(), content.nbytes)
    return copy


def clear(numbers: Tensor) -> None:
    """Sets a contiguous tensor to zero. On a CPU, by this thread alone: as `copied`."""
    if numbers.is_cpu:
        ctypes.memset(numbers.data_ptr(), 0, numbers.nbytes)
    else:
        numbers.zero_()


def can_sum(words: Tensor) -> bool:
    """Whether the kernel can add up these integers."""
    return (
        library is not None and type(words) is Tensor and words.is_cpu and words.is_contiguous() and _has_memory(words)
    )


def sum_words(words: Tensor) -> Tensor:
    """The sum of integers for which `can_sum` is true, and that of their squares, modulo 2**64."""
    assert library is not None
    with torch.inference_mode(False):
        sums = torch.empty(2, dtype=torch.int64, device="cpu")
    library.tbhooks_sum_words(words.data_ptr(), words.numel(), words.itemsize, sums.data_ptr(), torch.get_num_threads())
    return sums
