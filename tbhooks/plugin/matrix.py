"""One stat of all sites and steps, from stored rows and histograms.

Stats that are stored columns are returned bit for bit; the others are derived by `tbhooks.data.stats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.stats import BASE, COUNT, INFS, M2, M3, M4, MAX, MEAN, MIN, NANS, QUANTILES, STATS, Counts
from tbhooks.plugin.arrays import Histograms, Indices, Rows, Source, Stored
from tbhooks.sinks.tensorboard import decode_values

_AS_STORED = {"count": COUNT, "nan_count": NANS, "inf_count": INFS}
# Stored rows have the std in the column of m2, and the ratios in those of m3 and m4.
_OF_FINITE = {"mean": MEAN, "std": M2, "min": MIN, "max": MAX, "skewness": M3, "kurtosis": M4}
# Derived stats need float64 rows; this many at a time fit into the processor's cache.
_ROWS_AT_ONCE = 1 << 14


def is_derived(name: str) -> bool:
    """Whether a statistic of rows has to be computed from several columns."""
    return name in STATS and name not in _AS_STORED and name not in _OF_FINITE


def row_stat(name: str, columns: Stored) -> Stored:
    """One statistic of stored columns [column, ...]; NaN where there is no data."""
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
            derived[some] = STATS[name](decode_values(flat[:, some].T, shape=False))
    return derived.reshape(columns.shape[1:])


CAN_BE_UNDEFINED = ("ratio", "skewness", "kurtosis")


def undefined(name: str, columns: Stored) -> NDArray[np.bool_]:
    """Where a statistic is undefined although there is data.

    That is the ratio of an update to a weight that is still zero, and the shape of equal elements.
    """
    nothing: NDArray[np.bool_] = np.zeros(columns.shape[1:], dtype=np.bool_)
    if name == "ratio":
        nothing = columns[BASE] == 0
    elif name in ("skewness", "kurtosis"):
        nothing = np.isnan(columns[_OF_FINITE[name]])
    return nothing


@dataclass(frozen=True)
class Matrix:
    """One stat of all sites; `at` are the indices of its steps among those of the rows."""

    at: Indices
    values: Stored
    sources: tuple[Source, ...] = ()
    """For a quantile: the histograms it was computed from."""

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.values.nbytes


def row_matrix(name: str, rows: Rows) -> Matrix:
    """A stat that is known for every step."""
    return Matrix(np.arange(len(rows.steps)), row_stat(name, rows.columns))


def gain_matrix(rows: Rows, before: Mapping[int, int]) -> Matrix:
    """The gain of each gradient: its rms at the site before it in its role over its own."""
    rms = row_stat("rms", rows.columns)
    values = np.full(rms.shape, np.nan, dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        values[:, list(before)] = rms[:, list(before.values())] / rms[:, list(before)]
    return Matrix(np.arange(len(rows.steps)), values)


def quantile_matrix(name: str, rows: Rows, histograms: Histograms, known: Matrix | None = None) -> Matrix:
    """Computes a quantile; values of unchanged histograms are copied from an earlier matrix of the same run."""
    at, which = common(rows, histograms)
    sites = rows.columns.shape[2]
    usable = known is not None and known.values.shape[1] == sites
    earlier = {source: i for i, source in enumerate(known.sources)} if known is not None and usable else {}
    values, sources = np.full((len(at), sites), np.nan, dtype=np.float32), []
    for target, step, i in zip(values, at, which, strict=True):
        histogram = histograms.each[i]
        sources.append(histogram.source)
        if known is not None and histogram.source in earlier:
            target[:] = known.values[earlier[histogram.source]]
        else:
            columns = rows.columns[:, step, histogram.where]
            target[histogram.where] = quantile(name, columns, histogram.counts, histogram.first)
    return Matrix(at, values, tuple(sources))


def common(rows: Rows, histograms: Histograms) -> tuple[Indices, Indices]:
    """The indices of steps that have both, among the rows and among the histograms."""
    _, at, which = np.intersect1d(rows.steps, histograms.steps, assume_unique=True, return_indices=True)
    return at, which


def quantile(name: str, columns: Stored, counts: Counts, first: int = 0) -> Stored:
    """One quantile of stored columns [column, n] and their counts [n, bucket], from the bucket `first` on."""
    with np.errstate(all="ignore"):
        return stats.quantile(decode_values(columns.T, shape=False), counts, QUANTILES[name], first).astype(np.float32)
