"""How a tensor is reduced into a record of a buffer: with the C kernel, with Triton, or with torch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tbhooks.capture.recording.device_buffer import Buffer
from tbhooks.reduction import batched, cpu, histogram, torch_rows, triton
from tbhooks.reduction.cpu import Address
from tbhooks.reduction.finalize import Block

# Torch reductions make temporaries of some 30 bytes an element: larger tensors are reduced in parts of at least this
# length, and at most 2**25 (0.9 GB of temporaries for float32). 100 million elements take three parts and 54 launches.
PART = 1 << 22
MOST_PARTS = 3

Reduce = Callable[[Tensor, Buffer, int], None]
"""Reduces a real, flat tensor into a record that was just taken: the row, and the bucket counts if there are any."""


def reduce_by_kernel(numbers: Tensor, buffer: Buffer, record: int) -> None:
    """With the C kernel, for CPU tensors it can read."""
    cpu.reduce(numbers, *buffer.addresses(record))


def reduce_by_torch(numbers: Tensor, buffer: Buffer, record: int) -> None:
    """With torch operations, for devices without Triton and where there is no C kernel."""
    if numbers.is_cpu or numbers.numel() == 0:
        torch_rows.write_row(numbers, buffer.row(record))
    elif buffer.row_type is torch.float32:
        size, block = numbers.numel(), numbers.reshape(1, -1)
        parts = batched.reduce(block, buffer.row_type, is_padded=False)
        buffer.unfinished.hold(Block([record], [size], size, shifted=True), parts)
    else:
        _reduce_in_rows(numbers, buffer, record)
    if buffer.with_buckets:
        histogram.add_counts(numbers, buffer.counts(record))


def _reduce_in_rows(numbers: Tensor, buffer: Buffer, record: int) -> None:
    """As one row, or as two with a record each if there are more elements than float32 can count."""
    records = [record]
    if numbers.numel() > histogram.MOST:
        second = buffer.take()
        if second is None:  # the buffer has overflowed
            torch_rows.write_constant(buffer.row(record), count=0)
            return
        records.append(second)
    rows = numbers.view(len(records), -1)
    block = Block(records, [rows.size(1)] * len(records), rows.size(1), narrow=numbers.dtype is not torch.float64)
    buffer.unfinished.hold(block, torch_rows.reduce(rows, buffer.row_type))


def part_length(numbers: Tensor) -> int:
    """How many elements of a tensor torch operations reduce at a time. An even number can be reduced in two rows."""
    size = numbers.numel()
    in_two_rows = size % 2 == 0 and torch_rows.has_float64(numbers.device)
    return min(max(PART, -(-size // (2 * MOST_PARTS)) * 2), histogram.MOST * (2 if in_two_rows else 1))


def reduce_divided(scale: Tensor, numbers: Tensor, buffer: Buffer, record: int) -> None:
    """Divides by a tensor on the device first, without a sync. In half precision the quotient could underflow."""
    divided = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale.to(numbers.device)
    (reduce_by_kernel if cpu.can_read(divided) else reduce_by_torch)(divided, buffer, record)


def is_for_triton(tensor: Tensor, before: Tensor | None) -> bool:
    """Whether Triton reduces it with many others, less another tensor of the same order in memory."""
    if not triton.takes(tensor) or tensor.numel() > triton.LONGEST:
        return False
    return before is None or (before.dtype == tensor.dtype and before.stride() == tensor.stride())


def triton_job(
    tensor: Tensor, before: Tensor | None, scale: Tensor | None, addresses: tuple[Address, Address]
) -> triton.Job:
    """Of a tensor that is dense in any order; a copy of it has the same order."""
    minus = None if before is None else before.detach()
    divisor = None if scale is None else scale.detach().to(tensor.device, torch.float32)
    return triton.Job(tensor.detach(), minus, divisor, *addresses)


def reduce_by_triton(scale: Tensor | None, numbers: Tensor, buffer: Buffer, record: int) -> None:
    """With Triton, divided by `scale` if there is one."""
    buffer.scratch.reduce(triton_job(numbers, None, scale, buffer.addresses(record)))
