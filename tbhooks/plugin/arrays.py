"""A run's numbers as the tab works with them: rows, histograms and findings of one kind over all steps.

Only what they are and how much memory they take; where they come from is the store's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import Finding
from tbhooks.data.stats import BUCKETS, Counts

Stored = NDArray[np.float32]
Places = NDArray[np.intp]
Source = tuple[int, float, int]
"""Step, time and hash of what a histogram was stored as: what has the same need not be unpacked again."""

_BYTES_A_FINDING = 2000


@dataclass(frozen=True)
class Rows:
    """Every row of one kind as it was written: `columns[column, step, site]`, NaN where a site was not seen."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    columns: Stored
    seen: NDArray[np.bool_]
    thinned: bool
    """Whether TensorBoard could not hand over all steps."""

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + self.seen.nbytes + self.steps.nbytes + self.times.nbytes


@dataclass(frozen=True, slots=True)
class Histogram:
    """The bucket counts of one step without the buckets that no site uses, in the smallest type that holds them."""

    source: Source
    first: int
    counts: NDArray[np.unsignedinteger[Any]]
    where: Places

    @classmethod
    def of(cls, source: Source, counts: Counts, where: Places) -> Histogram:
        used = np.flatnonzero(counts.any(axis=0))
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        smallest = np.min_scalar_type(int(counts.max(initial=0)))
        return cls(source, first, counts[:, first:last].astype(smallest), where)

    def of_sites(self, sites: int) -> Counts:
        """The counts of every site of the kind."""
        counts = np.zeros((sites, BUCKETS), dtype=np.int64)
        counts[self.where, self.first : self.first + self.counts.shape[1]] = self.counts
        return counts

    def of_site(self, position: int) -> Counts:
        """The counts of one site."""
        counts = np.zeros(BUCKETS, dtype=np.int64)
        for row in np.flatnonzero(self.where == position):
            counts[self.first : self.first + self.counts.shape[1]] = self.counts[row]
        return counts


@dataclass(frozen=True)
class Histograms:
    """The histograms of one kind, on the steps that have any."""

    steps: NDArray[np.int64]
    each: tuple[Histogram, ...]

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + sum(one.counts.nbytes + one.where.nbytes for one in self.each)


@dataclass(frozen=True)
class Told:
    """Every finding of a run in the order of their steps, each as often as it was told."""

    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        return _BYTES_A_FINDING * len(self.findings)
