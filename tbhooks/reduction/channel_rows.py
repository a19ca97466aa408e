"""Rows with one per channel, head or other slice of a tensor.

Tensors are reduced at once on their device, without waiting for it; rows of torch operations are finished on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tbhooks.data import stats
from tbhooks.reduction import batched, cpu, finalize, histogram, torch_rows

# Torch operations make temporaries of a few times the tensor's size: larger tensors are split into this many elements.
PART = 1 << 22


@dataclass(frozen=True)
class Piece:
    """One reduced tensor: finished rows, or partial results of `size` elements per channel for `finalize.finish`."""

    numbers: Tensor
    size: int
    finished: bool


@dataclass
class Sums:
    """The reduced tensors of one layer in the current step."""

    channels: int
    pieces: list[Piece] = field(default_factory=list)
    counts: Tensor | None = None


def reduce_channels(matrix: Tensor, sums: Sums, with_buckets: bool) -> None:
    """Reduces each row of a matrix and adds the results, with bucket counts if requested, to `sums`."""
    if matrix.dtype not in torch_rows.ORDINARY:
        matrix = matrix.float()
    dense = matrix.contiguous()
    if cpu.can_read(dense):
        numbers = torch.zeros((len(dense), stats.WIDTH), dtype=torch.float64, device="cpu")
        counts = torch.zeros((len(dense), histogram.SLOTS), dtype=torch.int32, device="cpu") if with_buckets else None
        cpu.reduce_rows(dense, numbers, counts)
        sums.pieces.append(Piece(numbers, dense.size(1), finished=True))
        add_counts(sums, counts)
        return
    row_type = torch_rows.row_type(dense.device)
    for part in torch.split(dense, max(1, PART // len(dense)), 1):
        made = torch.cat([one.reshape(-1) for one in batched.reduce(part, row_type)])
        sums.pieces.append(Piece(made.view(-1, len(dense)), part.size(1), finished=False))
        add_counts(sums, histogram.of_rows(part) if with_buckets else None)


def add_counts(sums: Sums, counts: Tensor | None) -> None:
    """Adds bucket counts."""
    if counts is not None:
        sums.counts = counts if sums.counts is None else sums.counts + counts


def rows_of(numbers: stats.Floats, size: int, finished: bool) -> stats.Floats:
    """The rows of a piece that was copied to the host."""
    if finished:
        return numbers
    sizes = np.full(numbers.shape[1], float(size))
    return finalize.finish(numbers, sizes, sizes)
