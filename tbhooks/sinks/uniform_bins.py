"""Histograms with bins of equal width, for trackers that draw one bar per bin regardless of its width.

The count of a bucket is spread evenly over its range. Counts stay integers, and their sum does not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data import stats
from tbhooks.data.frame import Frame
from tbhooks.data.stats import MAX, MIN, Counts, Floats
from tbhooks.sinks.scalar_selection import HISTOGRAM_KINDS

BINS = 64


def histograms_of(frame: Frame) -> Iterator[tuple[str, Counts, Floats]]:
    """Tag, counts and edges of each histogram of a frame; sites without finite values have none."""
    if frame.buckets.shape[1]:
        drawn = stats.finite(frame.values) > 0
        for site, row, counts, has_some in zip(frame.sites, frame.values, frame.buckets, drawn, strict=True):
            if has_some and site.plain_kind in HISTOGRAM_KINDS:
                yield str(site), *rebinned(counts, row[MIN], row[MAX])


def rebinned(counts: Counts, low: float, high: float, bins: int = BINS) -> tuple[Counts, Floats]:
    """The counts in bins of equal width from `low` to `high`, and their edges."""
    used = np.flatnonzero(counts)
    first, last = used[0], used[-1]
    known = np.append(stats.LOWER[first : last + 1], high)
    known[0] = low
    below = np.concatenate([[0], np.cumsum(counts[first : last + 1])])
    edges = _edges(low, high, bins)
    reached = np.interp(edges, known, below)
    reached[0], reached[-1] = 0, below[-1]
    return np.diff(np.rint(reached).astype(np.int64)), edges


def _edges(low: float, high: float, bins: int) -> Floats:
    """As in NumPy, a range around the value if all values are equal."""
    if low == high:
        room = max(0.5, abs(low) * 2.0**-20)
        low, high = low - room, high + room
    share = np.arange(bins + 1) / bins
    return low * (1.0 - share) + high * share  # high - low may overflow
