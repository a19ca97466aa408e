"""One stat of every site on every step, out of stored rows and histograms.

Stats that are stored columns are taken as they were written, to the bit; the others are derived by `tbhooks.stats`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tbhooks.data import stats
from tbhooks.data.stats import COUNT, INFS, MAX, MEAN, MIN, NANS, QUANTILES, STATS, Counts
from tbhooks.plugin.arrays import Histograms, Places, Rows, Source, Stored
from tbhooks.sinks.tensorboard import decode_values

_STORED_STD = stats.M2  # what is stored has the std where a row has m2
_AS_STORED = {"count": COUNT, "nan_count": NANS, "inf_count": INFS}
_OF_FINITE = {"mean": MEAN, "std": _STORED_STD, "min": MIN, "max": MAX}
# Derived stats need rows of float64: a slice of this many at a time stays in the processor's cache.
_ROWS_AT_ONCE = 1 << 14


def row_stat(name: str, columns: Stored) -> Stored:
    """One statistic of stored columns [column, ...]; NaN where nothing was seen."""
    if name in _AS_STORED:
        stored: Stored = columns[_AS_STORED[name]]
        return stored
    if name in _OF_FINITE:
        finite = columns[COUNT] - columns[NANS] - columns[INFS]
        return np.where(finite > 0, columns[_OF_FINITE[name]], np.float32(np.nan))
    flat = columns.reshape(len(columns), -1)
    derived = np.empty(flat.shape[1], dtype=np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(derived), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            derived[some] = STATS[name](decode_values(flat[:, some].T))
    return derived.reshape(columns.shape[1:])


@dataclass(frozen=True)
class Matrix:
    """One stat of every site, on the steps that have it: `at` says which of the rows' steps these are."""

    at: Places
    values: Stored
    sources: tuple[Source, ...] = ()
    """For a quantile: which histograms it was taken from."""

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.values.nbytes


def row_matrix(name: str, rows: Rows) -> Matrix:
    """A stat that every step has."""
    return Matrix(np.arange(len(rows.steps)), row_stat(name, rows.columns))


def quantile_matrix(name: str, rows: Rows, histograms: Histograms, known: Matrix | None = None) -> Matrix:
    """Takes from an earlier matrix of the same run what has not changed since: a running training adds few steps."""
    at, which = common(rows, histograms)
    sites = rows.columns.shape[2]
    usable = known is not None and known.values.shape[1] == sites
    earlier = {source: i for i, source in enumerate(known.sources)} if known is not None and usable else {}
    values, sources = np.empty((len(at), sites), dtype=np.float32), []
    for target, step, i in zip(values, at, which, strict=True):
        histogram = histograms.each[i]
        sources.append(histogram.source)
        if known is not None and histogram.source in earlier:
            target[:] = known.values[earlier[histogram.source]]
        else:
            target[:] = quantile(name, rows.columns[:, step], histogram.of_sites(sites))
    return Matrix(at, values, tuple(sources))


def common(rows: Rows, histograms: Histograms) -> tuple[Places, Places]:
    """Where the steps that have both are among the rows, and among the histograms."""
    _, at, which = np.intersect1d(rows.steps, histograms.steps, assume_unique=True, return_indices=True)
    return at, which


def quantile(name: str, columns: Stored, counts: Counts) -> Stored:
    """One quantile of stored columns [column, n] and their counts [n, bucket]."""
    with np.errstate(all="ignore"):
        return stats.quantile(decode_values(columns.T), counts, QUANTILES[name]).astype(np.float32)
