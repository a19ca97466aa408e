"""How far the ranks of a job differ: for each statistic of a site its minimum, maximum and median over the ranks.

NumPy only. The size does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.stats import STATS, Floats

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
    measured = np.empty((sites, len(SPREAD_STATS), len(FIELDS)))
    for i, name in enumerate(SPREAD_STATS):
        by_rank = np.full((sites, world), np.nan)
        by_rank[site, rank] = STATS[name](values)
        measured[:, i] = _fields(by_rank)
    return measured


def _fields(by_rank: Floats) -> Floats:
    known = ~np.isnan(by_rank)
    seen = known.any(axis=1)
    low, high = np.where(known, by_rank, np.inf), np.where(known, by_rank, -np.inf)
    fields = np.stack(
        [low.min(axis=1), low.argmin(axis=1), high.max(axis=1), high.argmax(axis=1), _median(low, known.sum(axis=1)),
         known.sum(axis=1)], axis=1,
    )  # fmt: skip
    fields[~seen, : len(FIELDS) - 1] = np.nan
    return fields


def _median(with_unknown_last: Floats, known: NDArray[np.intp]) -> Floats:
    ordered = np.sort(with_unknown_last, axis=1)
    row = np.arange(len(ordered))
    last = np.maximum(known - 1, 0)
    with np.errstate(invalid="ignore"):
        middle: Floats = (ordered[row, last // 2] + ordered[row, (last + 1) // 2]) / 2
    return middle


def read(measured: Floats, stat: str) -> Spread:
    """The spread of one statistic, from the [SPREAD_STATS, FIELDS] of one site."""
    if stat not in SPREAD_STATS:
        raise ArgumentError(f"ranks cannot be compared by {stat!r}: {nearest(stat, SPREAD_STATS)}")
    if not len(measured):
        raise ArgumentError('this frame has one rank only; watch(..., ranks="merge") compares ranks')
    place = SPREAD_STATS.index(stat)
    # Frames that were written by an older version have fewer statistics.
    low, low_rank, high, high_rank, median, ranks = measured[place] if place < len(measured) else [0.0] * len(FIELDS)
    if not ranks:
        return Spread(np.nan, -1, np.nan, -1, np.nan, 0)
    return Spread(float(low), int(low_rank), float(high), int(high_rank), float(median), int(ranks))
