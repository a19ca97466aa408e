"""What a device leaves undone: the few sums that rows.reduce brings back for each record become rows here.

NumPy only, after the copy. A device would need as many launches again for arithmetic on single numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tbhooks.data import stats

# How many elements are not zero; of those the finite ones; those that are not NaN. Then the smallest and the
# largest twice, with what is not finite replaced by minus and by plus infinity; then variance and mean about zero,
# or about the shift that follows.
NOT_ZERO, FINITE, NOT_NAN, _, MIN, MAX, _, VARIANCE, MEAN, SHIFT = range(10)


@dataclass(frozen=True)
class Block:
    """Records reduced together: `size` elements each, of which those past `counts` are NaN that nobody put there."""

    records: Sequence[int]
    counts: Sequence[int]
    size: int
    shifted: bool = False


def gather(numbers: stats.Floats, blocks: Sequence[Block]) -> tuple[list[int], stats.Floats]:
    """The records of all blocks and their rows, from their parts one block after the other."""
    records = [record for block in blocks for record in block.records]
    counts = np.array([count for block in blocks for count in block.counts], dtype=np.float64)
    sizes = np.array([block.size for block in blocks for _ in block.records], dtype=np.float64)
    table, start = [], 0
    for block in blocks:
        stop = start + (SHIFT + block.shifted) * len(block.records)
        table.append(_with_shift(numbers[start:stop].reshape(-1, len(block.records))))
        start = stop
    return records, finish(np.concatenate(table, axis=1), counts, sizes)


def _with_shift(parts: stats.Floats) -> stats.Floats:
    return parts if len(parts) > SHIFT else np.concatenate([parts, np.zeros((1, parts.shape[1]))])


def finish(parts: stats.Floats, counts: stats.Floats, sizes: stats.Floats) -> stats.Floats:
    """The row of each column of `parts`."""
    padding = sizes - counts
    rows = stats.empty_rows(len(counts))
    rows[:, stats.COUNT] = counts
    rows[:, stats.ZEROS] = sizes - parts[NOT_ZERO]
    rows[:, stats.NANS] = parts[NOT_ZERO] - parts[NOT_NAN] - padding
    rows[:, stats.INFS] = parts[NOT_NAN] - parts[FINITE]
    rows[:, stats.MIN], rows[:, stats.MAX] = parts[MIN], parts[MAX]
    away, squares = _without_replaced(parts[MEAN], parts[VARIANCE] * sizes, stats.finite(rows), sizes)
    rows[:, stats.MEAN] = np.where(stats.finite(rows) > 0, away + parts[SHIFT], 0.0)
    rows[:, stats.M2] = squares
    return rows


def _without_replaced(
    mean: stats.Floats, squares: stats.Floats, finite: stats.Floats, sizes: stats.Floats
) -> tuple[stats.Floats, stats.Floats]:
    """Mean and centred squares of the finite elements alone: in the sums the others stand as zeros."""
    replaced, some = sizes - finite, np.maximum(finite, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        due_to_zeros = np.where(replaced > 0, replaced * np.square(mean) * sizes / some, 0.0)
        left = np.where(replaced > 0, squares - due_to_zeros, squares)
        # What is left of equal numbers is rounding, and not spread.
        rounding = 64 * np.finfo(np.float64).eps * due_to_zeros
    left = np.where((finite > 0) & ~(left <= rounding), left, 0.0)
    return mean * np.where(replaced > 0, sizes / some, 1.0), left
