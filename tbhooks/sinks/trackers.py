"""What sinks for experiment trackers share: findings as one text, the step counter of a run, bins of equal width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tbhooks.data import stats
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.stats import MAX, MIN, Counts, Floats
from tbhooks.sinks.scalar_selection import HISTOGRAM_KINDS

BINS = 64


class FindingsText:
    """Findings as one growing text, for trackers that keep a text per run: for each rule and site the first finding."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, Site | None], str] = {}

    def __str__(self) -> str:
        return "\n".join(self._lines.values())

    def add(self, findings: Sequence[Finding]) -> bool:
        """Adds findings; returns whether any of them is new."""
        known = len(self._lines)
        for finding in findings:
            line = f"{finding.severity}, step {finding.step}: {finding.message}"
            self._lines.setdefault((finding.rule, finding.site), line)
        return len(self._lines) > known


@contextmanager
def unmoved(owner: Any, counter: str, step: int) -> Iterator[None]:
    """Leaves the step counter of a run, an attribute of its object, as the user knows it.

    Trackers number what a script logs without `step=` by a counter, and a row that is logged with `step=` moves it.
    Logged steps must not renumber the rows of the script: the counter is set back to what it was, unless something else
    has moved it beyond `step` meanwhile. Does nothing if there is no such attribute, as in some versions of a tracker.
    """
    before = getattr(owner, counter, None)
    yield
    if isinstance(before, int) and before < getattr(owner, counter) <= step:
        setattr(owner, counter, before)


def histograms_of(frame: Frame) -> Iterator[tuple[str, Counts, Floats]]:
    """Tag, counts and edges of each histogram of a frame, for trackers that draw all bins equally wide.

    Sites without finite values have none.
    """
    if frame.buckets.shape[1]:
        drawn = stats.finite(frame.values) > 0
        for site, row, counts, has_some in zip(frame.sites, frame.values, frame.buckets, drawn, strict=True):
            if has_some and site.plain_kind in HISTOGRAM_KINDS:
                yield str(site), *rebinned(counts, row[MIN], row[MAX])


def rebinned(counts: Counts, low: float, high: float, bins: int = BINS) -> tuple[Counts, Floats]:
    """The counts in bins of equal width from `low` to `high`, and their edges.

    The count of a bucket is spread evenly over its range. Counts stay integers, and their sum does not change.
    """
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
