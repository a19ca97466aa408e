"""Makes rows of the partial results that torch_rows.reduce and batched.reduce leave for each record.

NumPy only, after the copy: a device would need as many launches again for arithmetic on single numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tbhooks.data import stats

# The columns of partial results: the number of elements that are not zero; of those the finite ones; and those that are
# not NaN. Minimum and maximum, each twice, with non-finite elements replaced by minus and by plus infinity. Variance
# and mean about zero, or about the shift that follows. Of the finite elements' deviations from that mean, the sum of
# cubes and the norm of squares.
NOT_ZERO, FINITE, NOT_NAN, _, MIN, MAX, _, VARIANCE, MEAN, CUBES, FOURTHS, SHIFT = range(12)
LARGEST_BYTES = 8 * (SHIFT + 1)
"""The bytes that the partial results of a record take at most."""
# Relative errors of m4 beyond this make it unknown.
WORST_ERROR = 1e-6


@dataclass(frozen=True)
class Block:
    """Records reduced together: `size` elements each, of which those past `counts` are padding (NaN).

    The columns before the variance are in float32 if the block is `narrow`, apart from those of the type of rows.
    """

    records: Sequence[int]
    counts: Sequence[int]
    size: int
    shifted: bool = False
    narrow: bool = False


def narrow_numbers(blocks: Sequence[Block]) -> int:
    """How many of the partial results are in float32, where rows are float64."""
    return sum(VARIANCE * len(block.records) for block in blocks if block.narrow)


def gather(wide: stats.Floats, narrow: stats.Floats, blocks: Sequence[Block]) -> tuple[list[int], stats.Floats]:
    """The records of all blocks and their rows, from the partial results of one block after the other."""
    records = [record for block in blocks for record in block.records]
    counts = np.array([count for block in blocks for count in block.counts], dtype=np.float64)
    sizes = np.array([block.size for block in blocks for _ in block.records], dtype=np.float64)
    table = []
    for block in blocks:
        n = len(block.records)
        before = VARIANCE * n if block.narrow else 0
        after = (SHIFT + block.shifted) * n - before
        table.append(_with_shift(np.concatenate([narrow[:before], wide[:after]]).reshape(-1, n)))
        narrow, wide = narrow[before:], wide[after:]
    return records, finish(np.concatenate(table, axis=1), counts, sizes)


def _with_shift(parts: stats.Floats) -> stats.Floats:
    return parts if len(parts) > SHIFT else np.concatenate([parts, np.zeros((1, parts.shape[1]))])


def finish(parts: stats.Floats, counts: stats.Floats, sizes: stats.Floats) -> stats.Floats:
    """One row for each column of `parts`."""
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
    rows[:, stats.M3], rows[:, stats.M4] = _higher_moments(rows, parts, away, sizes)
    return rows


def _higher_moments(
    rows: stats.Floats, parts: stats.Floats, mean: stats.Floats, sizes: stats.Floats
) -> tuple[stats.Floats, stats.Floats]:
    """m3 and m4 about the mean of the finite elements, from sums about the mean that counts the others as zeros.

    NaN where the two means are so far apart that the subtraction leaves too few digits.
    """
    n, m2 = stats.finite(rows), rows[:, stats.M2]
    with np.errstate(over="ignore", invalid="ignore"):
        off, cubes, fourths = mean - parts[MEAN], parts[CUBES], np.square(parts[FOURTHS])
        from_squares = off * (6.0 * m2 + 3.0 * n * np.square(off))
        m3 = cubes - off * (3.0 * m2 + n * np.square(off))
        m4 = fourths - off * (4.0 * cubes - from_squares)
        subtracted = 4.0 * off * cubes, off * from_squares, 6.0 * np.square(off) * parts[VARIANCE] * sizes
        error = 64 * np.finfo(np.float64).eps * (fourths + sum(map(np.abs, subtracted)))
        unknown = ~(error <= WORST_ERROR * m4)
    equal = ~(rows[:, stats.MAX] > rows[:, stats.MIN])
    of_known = (np.where(unknown, np.nan, moment) for moment in (m3, m4))
    m3, m4 = (np.where(equal, 0.0, moment) for moment in of_known)
    return m3, m4


def _without_replaced(
    mean: stats.Floats, squares: stats.Floats, finite: stats.Floats, sizes: stats.Floats
) -> tuple[stats.Floats, stats.Floats]:
    """Mean and sum of squared deviations of the finite elements. In the partial results the others count as zeros."""
    replaced, some = sizes - finite, np.maximum(finite, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        due_to_zeros = np.where(replaced > 0, replaced * np.square(mean) * sizes / some, 0.0)
        left = np.where(replaced > 0, squares - due_to_zeros, squares)
        # Of equal numbers only a rounding error is left.
        rounding = 64 * np.finfo(np.float64).eps * due_to_zeros
    left = np.where((finite > 0) & ~(left <= rounding), left, 0.0)
    return mean * np.where(replaced > 0, sizes / some, 1.0), left
