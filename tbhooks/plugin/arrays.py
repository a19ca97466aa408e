"""The arrays that the tab works with: rows, histograms and findings over all steps, each with its size in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.artifacts.samples import Samples
from tbhooks.data.frame import Finding
from tbhooks.data.stats import BUCKETS, INFS, NANS, Counts

Stored = NDArray[np.float32]
Indices = NDArray[np.intp]
Source = tuple[int, float, int]
"""Step, time and hash of a stored histogram; one with the same source is not unpacked again."""

_BYTES_PER_FINDING = 2000
_BYTES_PER_SAMPLE = 300


@dataclass(frozen=True)
class Rows:
    """All rows of one kind as stored: `columns[column, step, site]`, NaN where a site has no data."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    columns: Stored
    seen: NDArray[np.bool_]
    thinned: bool
    """Whether TensorBoard returned only a sample of the steps."""

    @cached_property
    def nonfinite(self) -> NDArray[np.bool_]:
        """Where a tensor held NaN or infinity."""
        held: NDArray[np.bool_] = (self.columns[NANS] > 0) | (self.columns[INFS] > 0)
        return held

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + 2 * self.seen.nbytes + self.steps.nbytes + self.times.nbytes


def used_buckets(counts: Counts) -> slice:
    """The buckets that any row has elements in, with one more on each side: what `stats.quantile` needs."""
    used = np.flatnonzero(counts.any(axis=0))
    return slice(max(int(used[0]) - 1, 0), int(used[-1]) + 2) if len(used) else slice(0, 0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """The bucket counts of one step in the smallest integer type; of the unused buckets at either end only one."""

    source: Source
    first: int
    counts: NDArray[np.unsignedinteger[Any]]
    where: Indices

    @classmethod
    def of(cls, source: Source, counts: Counts, where: Indices) -> Histogram:
        used = used_buckets(counts)
        smallest = np.min_scalar_type(int(counts.max(initial=0)))
        return cls(source, used.start, counts[:, used].astype(smallest), where)

    def of_site(self, position: int) -> Counts:
        """The counts of one site."""
        counts = np.zeros(BUCKETS, dtype=np.int64)
        for row in np.flatnonzero(self.where == position):
            counts[self.first : self.first + self.counts.shape[1]] = self.counts[row]
        return counts


@dataclass(frozen=True)
class Histograms:
    """The histograms of one kind, for the steps that have any."""

    steps: NDArray[np.int64]
    each: tuple[Histogram, ...]

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + sum(one.counts.nbytes + one.where.nbytes for one in self.each)


@dataclass(frozen=True)
class StoredFindings:
    """All findings of a run by step; one that was reported several times is in it several times."""

    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        return _BYTES_PER_FINDING * len(self.findings)


@dataclass(frozen=True)
class StoredSamples:
    """The samples of all logged steps of a run."""

    by_step: Mapping[int, Samples]

    @property
    def nbytes(self) -> int:
        return _BYTES_PER_SAMPLE * sum(1 + len(each) + len(each.groups) for each in self.by_step.values())


@dataclass(frozen=True)
class StoredOutcome:
    """How a run ended."""

    outcome: str
    nbytes: int = 100
