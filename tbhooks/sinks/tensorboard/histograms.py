"""TensorBoard histograms: all histograms of a step, encoded as bytes.

TensorBoard draws 30 bars over a linear axis and lines at nine percentiles. Buckets are joined where neither would show
the difference; the full counts are in the frame tensors. All edges lie within the exact finite range, which both of
TensorBoard's loaders draw correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks.data import stats
from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import BUCKETS, M2, MAX, MEAN, MIN, Counts, Floats
from tbhooks.sinks.scalar_selection import HISTOGRAM_KINDS, indices_of
from tbhooks.sinks.tensorboard import protobuf

# A bar of TensorBoard covers a thirtieth of a range that is at least as wide as the largest magnitude.
NARROW_SHARE = 2.0**-5
# Joined buckets lie between two of these quantiles (in 256ths), so that percentiles and tails do not move.
QUANTILES = (1, 4, 8, *range(16, 256, 16), 248, 252, 255)

# So many rows that what is computed of their buckets fits into the cache of a processor.
_AT_ONCE = 128

Flags = NDArray[np.bool_]

_FARTHEST = np.maximum(np.abs(stats.LOWER), np.abs(stats.UPPER))
# For each number of 256ths, how many quantiles lie below.
_PASSED = np.searchsorted(QUANTILES, np.arange(257), side="right").astype(np.int8)
_MOMENTS = ("min", "max", "num", "sum", "sum_squares")
_MOMENT_KEYS = [protobuf.double_key(summary_pb2.HistogramProto, name) for name in _MOMENTS]
_MOMENT_TYPE = np.dtype([(f"{part}{i}", kind) for i in range(5) for part, kind in (("key", "S1"), ("value", "<f8"))])
_HISTO = protobuf.delimited_key(summary_pb2.Summary.Value, "histo")
_LIMITS = protobuf.delimited_key(summary_pb2.HistogramProto, "bucket_limit")
_HEIGHTS = protobuf.delimited_key(summary_pb2.HistogramProto, "bucket")


class SiteHistograms:
    """The histograms of a list of sites."""

    def __init__(self, sites: Sequence[Site]) -> None:
        rows = [i for i, site in enumerate(sites) if site.plain_kind in HISTOGRAM_KINDS]
        names = [protobuf.tag_field(str(sites[i])) for i in rows]
        starts = range(0, len(rows), _AT_ONCE)
        self._blocks = [(indices_of(rows[at : at + _AT_ONCE]), names[at : at + _AT_ONCE]) for at in starts]

    def encode(self, frame: Frame) -> bytes:
        """Sites without finite values are left out: one infinite edge would blank their chart for all steps."""
        if not frame.buckets.shape[1]:
            return b""
        buckets, pieces = frame.buckets, list[bytes]()
        for rows, names in self._blocks:
            pieces += _encoded(names, frame.values[rows], buckets[rows])
        return b"".join(pieces)


def _encoded(names: Sequence[bytes], values: Floats, counts: Counts) -> list[bytes]:
    drawn = stats.finite(values) > 0
    if not drawn.all():
        names, values, counts = list(compress(names, drawn)), values[drawn], counts[drawn]
    return _pieces(names, _moments(values), _bars(values, counts)) if names else []


class _Bars(NamedTuple):
    """The bars of all rows, concatenated."""

    limits: Floats
    heights: Floats
    lengths: NDArray[np.intp]


def _bars(values: Floats, counts: Counts) -> _Bars:
    columns = _relevant_buckets(counts)
    counts = counts[:, columns]
    starts = _starts(values, counts, _FARTHEST[columns])
    indices = np.flatnonzero(starts)
    lengths = np.count_nonzero(starts, axis=1)
    # The buckets between the last bar of a row and the first bar of the next are empty.
    heights = np.add.reduceat(counts.ravel(), indices)
    limits = np.append(stats.UPPER[columns][(indices[1:] - 1) % len(columns)], 0.0)
    limits[np.cumsum(lengths) - 1] = values[:, MAX]
    return _Bars(limits, heights.astype(np.float64), lengths)


def _relevant_buckets(counts: Counts) -> NDArray[np.intp]:
    """The buckets that any row uses, and their neighbours; all others are empty."""
    used: Flags = np.any(counts, axis=0)
    near = used.copy()
    near[1:] |= used[:-1]
    near[:-1] |= used[1:]
    return np.flatnonzero(near) if near.any() else np.array([0])


def _starts(values: Floats, counts: Counts, farthest: Floats) -> Flags:
    """The buckets at which a bar starts, between the first and the last used bucket of a row."""
    empty = counts == 0
    first, last = empty.argmin(axis=1), counts.shape[1] - 1 - empty[:, ::-1].argmin(axis=1)
    narrow = NARROW_SHARE * np.maximum(np.abs(values[:, MIN]), np.abs(values[:, MAX]))
    free = (narrow[:, None] >= farthest) & ~_crosses_a_quantile(counts)
    starts = np.ones(counts.shape, dtype=np.bool_)
    starts[:, 1:] = ~(free[:, 1:] & free[:, :-1] | empty[:, 1:] & empty[:, :-1])
    starts[np.arange(len(counts)), first] = True
    position = np.arange(counts.shape[1])
    starts &= (position >= first[:, None]) & (position <= last[:, None])
    return starts


def _crosses_a_quantile(counts: Counts) -> Flags:
    below = np.cumsum(counts, axis=1).astype(np.float64)
    between = _PASSED[(256 * below / np.maximum(below[:, -1:], 1.0)).astype(np.int16)]
    crosses: Flags = between != 0
    crosses[:, 1:] = between[:, 1:] != between[:, :-1]
    return crosses


def _moments(values: Floats) -> NDArray[np.void]:
    n = stats.finite(values)
    moments = np.empty(len(values), dtype=_MOMENT_TYPE)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = n * values[:, MEAN]
        squares = values[:, M2] + n * np.square(values[:, MEAN])
    for i, column in enumerate((values[:, MIN], values[:, MAX], n, sums, squares)):
        moments[f"key{i}"], moments[f"value{i}"] = _MOMENT_KEYS[i], column
    return moments


class _Prefixes(NamedTuple):
    """The bytes before the moments, limits and heights of a histogram with a number of bars, and its total length."""

    histogram: bytes
    limits: bytes
    heights: bytes
    length: int


@lru_cache(maxsize=BUCKETS)
def _prefixes(bars: int) -> _Prefixes:
    size = protobuf.varint(8 * bars)
    limits, heights = _LIMITS + size, _HEIGHTS + size
    length = _MOMENT_TYPE.itemsize + len(limits) + len(heights) + 16 * bars
    histogram = _HISTO + protobuf.varint(length)
    return _Prefixes(histogram, limits, heights, len(histogram) + length)


def _pieces(names: Sequence[bytes], moments: NDArray[np.void], bars: _Bars) -> list[bytes]:
    texts, step = moments.tobytes(), _MOMENT_TYPE.itemsize
    limits, heights = bars.limits.astype("<f8").tobytes(), bars.heights.astype("<f8").tobytes()
    pieces: list[bytes] = []
    at = start = 0
    for name, length in zip(names, bars.lengths.tolist(), strict=True):
        prefixes, end = _prefixes(length), at + 8 * length
        pieces += (
            protobuf.VALUE, protobuf.varint(len(name) + prefixes.length), name, prefixes.histogram,
            texts[start : start + step], prefixes.limits, limits[at:end], prefixes.heights, heights[at:end],
        )  # fmt: skip
        at, start = end, start + step
    return pieces
