"""Rows of statistics: their columns, how rows merge, and every statistic that is derived from them.

A row is a summary of one tensor with a fixed number of columns; bucket counts are its histogram. Rows of several
tensors merge exactly. NumPy only: this runs on the CPU after the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.errors import ArgumentError, nearest

Floats = NDArray[np.float64]
Counts = NDArray[np.signedinteger[Any]]
"""Bucket counts, in 32 bits where they are enough."""

# count is the number of elements; mean, min, max and the sums of powers of deviations from the mean (m2 squares,
# m3 cubes, m4 fourth powers) are over the finite ones. m3 and m4 are NaN where they are not known.
# base is the sum of squares of a reference: for an update, of the weight before it.
COLUMNS = ("count", "mean", "m2", "min", "max", "zeros", "nans", "infs", "base", "m3", "m4")
WIDTH = len(COLUMNS)
COUNT, MEAN, M2, MIN, MAX, ZEROS, NANS, INFS, BASE, M3, M4 = range(WIDTH)
ADDITIVE = (COUNT, ZEROS, NANS, INFS, BASE)

# Two buckets per octave, split at 1.5: the exponent and the top bit of the mantissa, so that the bits of a float
# give its bucket. Values below 2**-64 share the middle bucket with zero.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -64, 32
HALF_OCTAVES = 2 * (HIGHEST_EXPONENT - LOWEST_EXPONENT)
BUCKETS = 2 * HALF_OCTAVES + 1
MIDDLE = HALF_OCTAVES


def _edges() -> tuple[Floats, Floats]:
    octaves = 2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    starts = np.stack([octaves, 1.5 * octaves], axis=1).ravel()
    ends = np.append(starts[1:], np.inf)
    tiny = starts[0]
    lower = np.concatenate([-ends[::-1], [-tiny], starts])
    upper = np.concatenate([-starts[::-1], [tiny], ends])
    return lower, upper


LOWER, UPPER = _edges()
"""The bounds of each bucket, ascending. The outermost buckets reach to infinity."""


def empty_rows(n: int) -> Floats:
    """Rows without elements: merging one changes nothing."""
    rows = np.zeros((n, WIDTH))
    rows[:, MIN], rows[:, MAX] = np.inf, -np.inf
    return rows


def row_of(numbers: Floats) -> Floats:
    """The row of a few finite numbers."""
    row: Floats = empty_rows(1)[0]
    away = numbers - numbers.mean()
    row[[COUNT, MEAN, MIN, MAX]] = len(numbers), numbers.mean(), numbers.min(), numbers.max()
    row[[M2, M3, M4]] = [(away**power).sum() for power in (2, 3, 4)]
    row[ZEROS] = (numbers == 0).sum()
    return row


def widened(values: Floats) -> Floats:
    """Rows that were written before the columns m3 and m4, with NaN for what is missing."""
    if values.shape[-1:] != (M3,):
        return values
    missing = WIDTH - M3
    return np.concatenate([values, np.full((*values.shape[:-1], missing), np.nan)], axis=-1)


def finite(values: Floats) -> Floats:
    """The number of finite elements of each row."""
    return values[..., COUNT] - values[..., NANS] - values[..., INFS]


def merge(values: Floats, owner: NDArray[np.intp], n: int) -> Floats:
    """Merges rows with the same owner into one of n rows, exactly as if their data had been one tensor.

    Used for several calls of a module, micro-batches and ranks (the rules of Chan and Pebay for the moments).
    """
    if _is_one_each(owner, n):
        return _merge_alone(values)
    merged = empty_rows(n)
    for column in ADDITIVE:
        merged[:, column] = np.bincount(owner, weights=values[:, column], minlength=n)
    with np.errstate(invalid="ignore", over="ignore"):  # the square of a mean beyond 1e154 is infinite
        share = finite(values) / np.maximum(finite(merged), 1.0)[owner]
        merged[:, MEAN] = np.bincount(owner, weights=share * values[:, MEAN], minlength=n)
        moments = moments_about(values, values[:, MEAN] - merged[owner, MEAN])
        for column, moment in zip((M2, M3, M4), moments, strict=True):
            counted = np.where(finite(values) > 0, moment, 0.0)
            merged[:, column] = np.bincount(owner, weights=counted, minlength=n)
    np.minimum.at(merged[:, MIN], owner, values[:, MIN])
    np.maximum.at(merged[:, MAX], owner, values[:, MAX])
    return merged


def _is_one_each(owner: NDArray[np.intp], n: int) -> bool:
    """Whether every owner has one row, in order, as in most steps."""
    return len(owner) == n and np.array_equal(owner, np.arange(n))


def _merge_alone(values: Floats) -> Floats:
    """What `merge` makes of rows that are not merged with others, to the bit: additions to zero, which has no sign."""
    merged = values + 0.0
    if _is_plain(values):
        merged[:, MIN], merged[:, MAX] = values[:, MIN], values[:, MAX]
        return merged
    count = finite(values)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = count / np.maximum(count, 1.0) * values[:, MEAN] + 0.0
        moments = moments_about(values, values[:, MEAN] - mean)
        for column, moment in zip((M2, M3, M4), moments, strict=True):
            merged[:, column] = np.where(count > 0, moment, 0.0) + 0.0
    merged[:, MEAN] = mean
    np.minimum(values[:, MIN], np.inf, out=merged[:, MIN])
    np.maximum(values[:, MAX], -np.inf, out=merged[:, MAX])
    return merged


def _is_plain(values: Floats) -> bool:
    """Whether all rows have finite elements (others have infinite extremes), and a few times their moments is finite:
    as nearly always.
    """
    return bool((np.abs(values) < 1e300).all())


def extrapolated(row: Floats, count: int) -> Floats:
    """The row of a sample as an estimate of the row of the whole tensor, which has `count` elements.

    Means and extremes stay those of the sample; sums and the numbers of zeros, NaN and infinities grow with the count.
    """
    whole: Floats = row * (count / row[COUNT])
    whole[[MEAN, MIN, MAX, BASE]] = row[[MEAN, MIN, MAX, BASE]]
    whole[[ZEROS, NANS, INFS]] = np.round(whole[[ZEROS, NANS, INFS]])
    whole[COUNT] = count
    return whole


def moments_about(values: Floats, away: Floats) -> tuple[Floats, Floats, Floats]:
    """Each row's sums of squared, cubed and fourth powers of deviations from a number `away` below its mean."""
    n, m2, m3, m4 = finite(values), values[..., M2], values[..., M3], values[..., M4]
    square = np.square(away)
    return (
        m2 + n * square,
        m3 + away * (3.0 * m2 + n * square),
        m4 + away * (4.0 * m3 + away * (6.0 * m2 + n * square)),
    )


def merge_counts(counts: Counts, owner: NDArray[np.intp], n: int) -> Counts:
    """Adds up bucket counts by owner. May return the counts themselves, if there is nothing to add."""
    if _is_one_each(owner, n):
        return counts
    merged = np.zeros((n, counts.shape[1]), dtype=np.int64)
    if np.bincount(owner, minlength=n).max(initial=0) <= 1:  # no owner has two rows, as in most steps
        merged[owner] = counts
    else:
        np.add.at(merged, owner, counts)
    return merged


class Rows:
    """The statistics of rows. What several of them need is computed once: nearly every operation of NumPy releases the
    GIL, and interrupts a training that runs beside it.
    """

    def __init__(self, values: Floats) -> None:
        self.values = values

    def stat(self, name: str) -> Floats:
        """One of `STATS`."""
        return _FORMULAS[name](self)

    @cached_property
    def finite(self) -> Floats:
        return finite(self.values)

    @cached_property
    def has_finite(self) -> NDArray[np.bool_]:
        return np.asarray(self.finite > 0)

    @cached_property
    def divisor(self) -> Floats:
        return np.maximum(self.finite, 1.0)

    @cached_property
    def rms(self) -> Floats:
        with np.errstate(over="ignore"):
            return np.sqrt(self.values[..., M2] / self.divisor + np.square(self.values[..., MEAN]))

    @cached_property
    def has_moments(self) -> NDArray[np.bool_]:
        """Not where all elements are equal, and not where a fourth power overflows or underflows float64."""
        values = self.values
        with np.errstate(all="ignore"):
            known = (values[..., MAX] > values[..., MIN]) & (values[..., M2] > 0)
            known &= (values[..., M4] > _SMALLEST_M4) & (values[..., M4] < np.inf)
        return known

    def where_finite(self, numbers: Floats) -> Floats:
        return np.where(self.has_finite, numbers, np.nan)


# Below this, fourth powers of float64 numbers have lost digits: their standard deviation is some 1e-73.
_SMALLEST_M4 = 1e-290


def _norm(rows: Rows) -> Floats:
    return rows.where_finite(rows.rms * np.sqrt(np.maximum(rows.finite, 0.0)))


def _fraction(values: Floats, column: int) -> Floats:
    return np.where(values[..., COUNT] > 0, values[..., column] / np.maximum(values[..., COUNT], 1.0), np.nan)


def _ratio(rows: Rows) -> Floats:
    """NaN without a reference, and where it is zero: a weight that is initialised to zero has no ratio yet."""
    base = rows.values[..., BASE]
    return np.where(base > 0, _norm(rows) / np.sqrt(np.where(base > 0, base, 1.0)), np.nan)


def _skewness(rows: Rows) -> Floats:
    m2, m3 = rows.values[..., M2], rows.values[..., M3]
    with np.errstate(all="ignore"):
        return np.where(rows.has_moments, m3 / m2 / np.sqrt(m2) * np.sqrt(rows.finite), np.nan)


def _kurtosis(rows: Rows) -> Floats:
    m2, m4 = rows.values[..., M2], rows.values[..., M4]
    with np.errstate(all="ignore"):
        return np.where(rows.has_moments, m4 / m2 / m2 * rows.finite, np.nan)


_FORMULAS: Mapping[str, Callable[[Rows], Floats]] = {
    "count": lambda rows: rows.values[..., COUNT],
    "mean": lambda rows: rows.where_finite(rows.values[..., MEAN]),
    "std": lambda rows: rows.where_finite(np.sqrt(rows.values[..., M2] / rows.divisor)),
    "norm": _norm,
    "rms": lambda rows: rows.where_finite(rows.rms),
    "min": lambda rows: rows.where_finite(rows.values[..., MIN]),
    "max": lambda rows: rows.where_finite(rows.values[..., MAX]),
    "abs_max": lambda rows: rows.where_finite(np.maximum(np.abs(rows.values[..., MIN]), np.abs(rows.values[..., MAX]))),
    "zero_fraction": lambda rows: _fraction(rows.values, ZEROS),
    "nan_count": lambda rows: rows.values[..., NANS],
    "inf_count": lambda rows: rows.values[..., INFS],
    "ratio": _ratio,
    "skewness": _skewness,
    "kurtosis": _kurtosis,
}


def _of_values(formula: Callable[[Rows], Floats]) -> Callable[[Floats], Floats]:
    return lambda values: formula(Rows(values))


STATS: Mapping[str, Callable[[Floats], Floats]] = {name: _of_values(formula) for name, formula in _FORMULAS.items()}
"""Statistics that need the row only. `ratio` has a value for updates, whose rows have a base.

`skewness` and `kurtosis` are the population's: the mean cube of the deviations from the mean over std**3, and their
mean fourth power over std**4. A normal distribution has skewness 0 and kurtosis 3: nothing is subtracted, as in
`scipy.stats.kurtosis(x, fisher=False)`. Both are NaN if all elements are equal.
"""

QUANTILES: Mapping[str, float] = {"p01": 0.01, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p99": 0.99}
"""Statistics that need the buckets."""

STAT_NAMES = (*STATS, *QUANTILES)


def quantile(values: Floats, counts: Counts, q: float, first: int = 0) -> Floats:
    """The q-quantile of each row's finite values, interpolated within its bucket.

    `counts` may begin at the bucket `first` and have fewer buckets, if those beyond are empty and so are the two at its
    ends.

    The density inside a bucket is assumed to be linear, with the slope of its neighbours. The exact minimum and maximum
    bound the outermost buckets, so that constants are exact. The error is a few percent for smooth distributions around
    zero, and at most the width of the bucket, which is a third to a half of the value.
    """
    if counts.shape[-1] == 0:
        return np.full(len(values), np.nan)
    last = counts.shape[1] - 1
    below = np.cumsum(counts, axis=1, dtype=np.int64)
    total = below[:, -1]
    target = q * np.maximum(total - 1, 0) + 0.5
    above = np.ceil(target).astype(np.int64)[:, None]  # integers compare faster
    bucket = np.minimum((below < above).sum(axis=1), last)
    rows = np.arange(len(values))
    around = np.clip(bucket[:, None] + (-1, 0, 1), 0, last)
    low, high = values[:, MIN, None], values[:, MAX, None]
    left, right = np.clip(LOWER[first + around], low, high), np.clip(UPPER[first + around], low, high)
    held = counts[rows[:, None], around]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        width = right - left
        density = np.where(width > 0, held / width, 0.0)
        slope = _slope(density, (left + right) / 2, width[:, 1])
        rank = target - (below[rows, bucket] - held[:, 1])
        start = density[:, 1] - slope * width[:, 1] / 2
        away = 2 * rank / (start + np.sqrt(np.maximum(start**2 + 2 * slope * rank, 0.0)))
        value = left[:, 1] + np.nan_to_num(away, nan=0.0)
        value[(first + bucket == MIDDLE) & (values[:, ZEROS] > 0)] = 0.0  # other values in this bucket are below 2**-64
        return np.where(total > 0, np.clip(value, left[:, 1], right[:, 1]), np.nan)


def _slope(density: Floats, middle: Floats, width: Floats) -> Floats:
    """The slope of the density in the bucket between its neighbours, limited so that the density is not negative."""
    rise, run = density[:, 2] - density[:, 0], middle[:, 2] - middle[:, 0]
    steepest = 2 * density[:, 1] / width
    return np.clip(np.nan_to_num(rise / run, nan=0.0, posinf=0.0, neginf=0.0), -steepest, steepest)


def stat(name: str, values: Floats, counts: Counts) -> Floats:
    """One statistic of every row, by name. Raises an ArgumentError for an unknown name."""
    if name in STATS:
        return STATS[name](values)
    if name in QUANTILES:
        return quantile(values, counts, QUANTILES[name])
    raise ArgumentError(f"unknown stat {name!r}: {nearest(name, STAT_NAMES)}")


# The first number is where values begin to round to zero in that format, the second where they overflow.
FORMATS: Mapping[str, tuple[float, float]] = {
    "float16": (2.0**-25, 65520.0),
    "bfloat16": (2.0**-134, 2.0**128 * (1 - 2.0**-9)),
    "float8_e4m3fn": (2.0**-10, 464.0),
    "float8_e5m2": (2.0**-17, 61440.0),
}


def _format(dtype: object) -> tuple[float, float]:
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise ArgumentError(f"unknown number format {name!r}: {nearest(name, FORMATS)}")
    return FORMATS[name]


def underflow_fraction(values: Floats, counts: Counts, dtype: object) -> Floats:
    """The fraction of each row's elements that are not zero but would be in `dtype`, to the precision of a bucket."""
    smallest, _ = _format(dtype)
    if counts.shape[1] == 0:
        return np.full(len(values), np.nan)
    inside = (smallest >= UPPER) & (-smallest <= LOWER)
    lost = counts[:, inside].sum(axis=1) - np.where(inside[MIDDLE], values[:, ZEROS], 0.0)
    hidden = counts[:, MIDDLE] > values[:, ZEROS]  # a format finer than the buckets: unknown there
    unknown = ~inside[MIDDLE] & hidden
    return np.where(unknown | (values[:, COUNT] == 0), np.nan, lost / np.maximum(values[:, COUNT], 1.0))


def overflow_fraction(values: Floats, counts: Counts, dtype: object) -> Floats:
    """The fraction of each row's elements that are finite but would overflow `dtype`, to the precision of a bucket."""
    _, largest = _format(dtype)
    if counts.shape[1] == 0:
        return np.full(len(values), np.nan)
    outside = (largest <= LOWER) | (-largest >= UPPER)
    lost = counts[:, outside].sum(axis=1)
    over = STATS["abs_max"](values) >= largest
    unknown = over & ~outside.any()
    share = np.where(over, lost, 0) / np.maximum(values[:, COUNT], 1.0)
    return np.where(unknown | (values[:, COUNT] == 0), np.nan, share)
