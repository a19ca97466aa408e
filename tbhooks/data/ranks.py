"""How far the ranks of a job differ: for each statistic of a site its minimum, maximum and median over the ranks.

NumPy only. The size does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.stats import STATS, Floats, Rows

SPREAD_STATS = tuple(name for name in STATS if name != "ratio")
"""The statistics that ranks are compared by. The ratio of an update is known for the whole parameter only."""
FIELDS = ("min", "min_rank", "max", "max_rank", "median", "ranks")


@dataclass(frozen=True, slots=True)
class Spread:
    """One statistic over the ranks of a job, returned by `Reading.spread`."""

    min: float
    min_rank: int
    max: float
    max_rank: int
    median: float
    ranks: int
    """The number of ranks that have a value."""


def empty(sites: int) -> Floats:
    """No spreads, for a frame of a single rank."""
    return np.zeros((sites, 0, len(FIELDS)))


def measure(values: Floats, site: NDArray[np.intp], rank: NDArray[np.intp], sites: int, world: int) -> Floats:
    """Spreads as [sites, SPREAD_STATS, FIELDS]; `site` and `rank` say where each row of `values` belongs."""
    by_rank, rows = np.full((len(SPREAD_STATS), world, sites), np.nan), Rows(values)
    for i, name in enumerate(SPREAD_STATS):
        by_rank[i, rank, site] = rows.stat(name)
    return _fields(by_rank)


def _fields(by_rank: Floats) -> Floats:
    """The fields of [statistic, rank, site] as [site, statistic, field]. Ranks are not last: they are few, and NumPy is
    slow where it reduces many short rows.
    """
    known = ~np.isnan(by_rank)
    low, high = np.where(known, by_rank, np.inf), np.where(known, by_rank, -np.inf)
    count = known.sum(axis=1)
    least, most = low.min(axis=1), high.max(axis=1)
    with np.errstate(invalid="ignore"):  # the median of one or two is halfway between their extremes
        median = (least + most) / 2 if by_rank.shape[1] <= 2 else _median(low, count)
    fields = np.stack([least, low.argmin(axis=1), most, high.argmax(axis=1), median, count], axis=2)
    fields[count == 0, : len(FIELDS) - 1] = np.nan
    return np.ascontiguousarray(fields.transpose(1, 0, 2))


def _median(with_unknown_last: Floats, known: NDArray[np.intp]) -> Floats:
    ordered = np.sort(with_unknown_last, axis=1)
    last = np.maximum(known - 1, 0)[:, None]
    low, high = (np.take_along_axis(ordered, place, axis=1)[:, 0] for place in (last // 2, (last + 1) // 2))
    middle: Floats = (low + high) / 2
    return middle


def read(measured: Floats, stat: str) -> Spread:
    """The spread of one statistic, from the [SPREAD_STATS, FIELDS] of one site."""
    if stat not in SPREAD_STATS:
        raise ArgumentError(f"ranks cannot be compared by {stat!r}: {nearest(stat, SPREAD_STATS)}")
    if not len(measured):
        raise ArgumentError('this logged step has one rank only; watch(..., ranks="merge") compares ranks')
    place = SPREAD_STATS.index(stat)
    # Frames that were written by an older version have fewer statistics.
    low, low_rank, high, high_rank, median, ranks = measured[place] if place < len(measured) else [0.0] * len(FIELDS)
    if not ranks:
        return Spread(np.nan, -1, np.nan, -1, np.nan, 0)
    return Spread(float(low), int(low_rank), float(high), int(high_rank), float(median), int(ranks))
