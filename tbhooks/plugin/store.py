"""The frame tensors of a run, read from TensorBoard's data provider, decoded once and cached.

The provider has no range queries, so a tag is read whole, and only if it has new values. Every stat is then computed
from the same arrays. A value that does not match the metadata of its tag is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.artifacts.samples import Samples
from tbhooks.data.frame import Finding
from tbhooks.data.jsonable import to_jsonable
from tbhooks.data.roles import GAIN
from tbhooks.data.stats import COUNT, INFS, NANS, ZEROS
from tbhooks.plugin.arrays import (
    Histogram,
    Histograms,
    Indices,
    Rows,
    Source,
    Stored,
    StoredFindings,
    StoredOutcome,
    StoredSamples,
)
from tbhooks.plugin.cache import Cache
from tbhooks.plugin.index import Kind, RunIndex, Tag
from tbhooks.plugin.index import read as read_index
from tbhooks.plugin.matrix import Matrix, gain_matrix, quantile_matrix, row_matrix
from tbhooks.plugin.provider import Reader, TagValue, list_tags
from tbhooks.runs.reader import OUTCOMES
from tbhooks.runs.stored_frames import PackedCounts, is_shape_of_rows
from tbhooks.sinks.tensorboard import STORED_COLUMNS
from tbhooks.sinks.tensorboard import findings as finding_codec
from tbhooks.sinks.tensorboard import samples as sample_codec

BUDGET = 512 << 20
LARGEST = 4 << 30
"""The most bytes that are decoded: no real run has more, and they could exhaust TensorBoard's memory."""
LISTING_S = 1.0
"""For so long the index of a run is used again. One click asks several questions, and TensorBoard's fast loader delays
the second of two listings by 40 ms.
"""
_MUST_BE_COUNTS = (COUNT, ZEROS, NANS, INFS)


class TooLargeError(Exception):
    """More than fits into memory."""


class Store:
    """Our data in the log directory of one TensorBoard."""

    def __init__(self, provider: Any, budget: int = BUDGET) -> None:
        self._provider = provider
        self.cache = Cache(budget)
        # The indices of single runs, and when they were read.
        self._listed: dict[tuple[str, str], tuple[float, dict[str, RunIndex]]] = {}

    def runs(self, context: Any, experiment: str, run: str | None = None) -> dict[str, RunIndex]:
        """The index of all runs with our data, or of one run; no tensor is read."""
        now = time.monotonic()
        if run is None:
            found = read_index(list_tags(self._provider, context, experiment))
        else:
            listed, found = self._listed.get((experiment, run), (now - LISTING_S, {}))
            if now - listed < LISTING_S:
                return found
            found = read_index(list_tags(self._provider, context, experiment, run))
        self._listed |= {(experiment, name): (now, {name: index}) for name, index in found.items()}
        return found

    def run(self, context: Any, experiment: str, index: RunIndex) -> StoredRun:
        return StoredRun(Reader(self._provider, context, experiment, index.name), self.cache, experiment, index)


class StoredRun:
    """The numbers of one run, as of its index."""

    def __init__(self, reader: Reader, cache: Cache, experiment: str, index: RunIndex) -> None:
        self._reader, self._cache = reader, cache
        self._key, self._findings = (experiment, index.name), index.findings
        self._samples, self._outcome = index.samples, index.outcome if index.has_ended else None

    def rows(self, kind: Kind) -> Rows:
        if kind.metrics is not None and kind.metrics.elements:
            return _placed(self.rows(kind.metrics.stored), kind, kind.metrics.numbers.values())
        key = ("rows", kind.name, *self._key)
        return self._cache.get(key, _version(kind.rows), lambda _: _rows(self._reader, kind))

    def metric(self, kind: Kind, stat: str) -> Rows:
        """A metric as rows of the sites of its kind; each row is that of a tensor with one element."""
        if kind.metrics is None:
            raise LookupError(stat)
        return _placed(self.rows(kind.metrics.stored), kind, [kind.metrics.numbers[stat]])

    def metrics(self, kind: Kind, position: int) -> dict[str, Rows]:
        """All metrics of one site, by name, each as rows of that site alone."""
        if kind.metrics is None:
            return {}
        rows = self.rows(kind.metrics.stored)
        at = {stat: numbers[position] for stat, numbers in kind.metrics.numbers.items() if position in numbers}
        return {stat: replace(rows, columns=rows.columns[:, :, [i]], seen=rows.seen[:, [i]]) for stat, i in at.items()}

    def outcome(self) -> str:
        """How the run ended, "finished" or "failed"; empty if it goes on or was killed."""
        tag = self._outcome
        if tag is None:
            return ""
        key = ("outcome", *self._key)
        return self._cache.get(key, _version((tag,)), lambda _: _outcome(self._reader, tag)).outcome

    def samples(self, step: int) -> tuple[int, Samples] | None:
        """The samples of the logged step nearest to `step`, and that step; None if there are none."""
        tag = self._samples
        if tag is None:
            return None
        key = ("samples", *self._key)
        stored = self._cache.get(key, _version((tag,)), lambda _: _samples(self._reader, tag)).by_step
        nearest = min(stored, key=lambda each: (abs(each - step), each), default=None)
        return None if nearest is None else (nearest, stored[nearest])

    def histograms(self, kind: Kind) -> Histograms:
        key, version = ("histograms", kind.name, *self._key), (_version(kind.buckets), len(kind.sites))
        return self._cache.get(key, version, lambda known: _histograms(self._reader, kind, known))

    def quantiles(self, kind: Kind, stat: str) -> Matrix:
        """One quantile of all sites; cached, because it takes a while to compute."""
        rows, histograms = self.rows(kind), self.histograms(kind)
        key, version = (stat, kind.name, *self._key), (_version(kind.rows), _version(kind.buckets))
        return self._cache.get(key, version, lambda known: quantile_matrix(stat, rows, histograms, known))

    def derived(self, kind: Kind, stat: str) -> Matrix:
        """A stat that is computed from several columns, of all sites; cached like a quantile."""
        rows, key = self.rows(kind), (stat, kind.name, *self._key)

        def computed(_: Matrix | None) -> Matrix:
            return gain_matrix(rows, kind.before) if stat == GAIN else row_matrix(stat, rows)

        return self._cache.get(key, _version(kind.rows), computed)

    def scalars(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The scalars of the run that are no statistics of modules; TensorBoard has them in memory."""
        return self._reader.scalars()

    def findings(self) -> tuple[Finding, ...]:
        tag = self._findings
        if tag is None:
            return ()
        key = ("findings", *self._key)
        return self._cache.get(key, _version((tag,)), lambda _: _findings(self._reader, tag)).findings


def _version(tags: tuple[Tag, ...]) -> Hashable:
    return tuple((tag.name, tag.last_step, tag.last_time, len(tag.sites)) for tag in tags)


def _latest(series: Iterable[TagValue]) -> list[TagValue]:
    """Sorted by step; of a step that was written again, as after a restart, the last value."""
    by_step = {written.step: written for written in series}
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True, slots=True)
class _Merged:
    """The values of all generations of a tag by step, each with the indices of its sites among those of the kind."""

    values: list[tuple[TagValue, Indices]]
    thinned: bool


def _merged(read: Reader, kind: Kind, tags: tuple[Tag, ...], fits: Callable[[TagValue, int], bool]) -> _Merged:
    """Merges the generations of a tag. After a restart a step may be in several; the value written last is used."""
    chosen: dict[int, tuple[TagValue, Indices]] = {}
    thinned = False
    for tag in tags:
        indices = np.array([kind.position.get((site.path, site.index), -1) for site in tag.sites], dtype=np.intp)
        if (indices < 0).any():  # histograms of sites that have no rows
            continue
        series = read.tag(tag.name)
        thinned |= series.thinned
        for written in _latest(series.values):
            known = chosen.get(written.step)
            if fits(written, len(indices)) and (known is None or written.time >= known[0].time):
                chosen[written.step] = written, indices
    return _Merged([chosen[step] for step in sorted(chosen)], thinned)


def _are_rows(written: TagValue, sites: int) -> bool:
    return written.array.dtype == np.float32 and is_shape_of_rows(written.array.shape, sites)


def _is_string(written: TagValue, _sites: int) -> bool:
    return _bytes(written) is not None


def _bytes(written: TagValue) -> bytes | None:
    """The one string that a tensor of ours holds."""
    content = written.array.reshape(-1)[0] if written.array.size == 1 else None
    return content if isinstance(content, bytes) else None


def _rows(read: Reader, kind: Kind) -> Rows:
    merged = _merged(read, kind, kind.rows, _are_rows)
    shape = (len(STORED_COLUMNS), len(merged.values), len(kind.sites))
    if 4 * int(np.prod(shape, dtype=object)) > LARGEST:
        raise TooLargeError(f"{shape[1]} steps of {shape[2]} sites exceed the limit of {LARGEST >> 30} GiB")
    columns = np.full(shape, np.nan, dtype=np.float32)
    generations = {id(indices): indices for _, indices in merged.values}
    places = {key: _as_slice(indices) for key, indices in generations.items()}
    for i, (written, indices) in enumerate(merged.values):
        columns[: written.array.shape[1], i, places[id(indices)]] = written.array.T  # older rows have fewer
    seen = _seen(columns)
    columns[:, ~seen] = np.nan
    steps = np.array([written.step for written, _ in merged.values], dtype=np.int64)
    times = np.array([written.time for written, _ in merged.values], dtype=np.float64)
    return Rows(steps, times, columns, seen, merged.thinned)


def _as_slice(indices: Indices) -> slice | Indices:
    """Indices that follow each other as a slice, to which is copied in half the time."""
    first = int(indices[0]) if len(indices) else 0
    consecutive = np.array_equal(indices, np.arange(first, first + len(indices)))
    return slice(first, first + len(indices)) if consecutive else indices


def _placed(rows: Rows, kind: Kind, numbers: Iterable[Mapping[int, int]]) -> Rows:
    """Rows of single numbers as rows of the sites that they belong to."""
    shape = (*rows.columns.shape[:2], len(kind.sites))
    columns, seen = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape[1:], dtype=np.bool_)
    for each in numbers:
        sites, at = list(each), list(each.values())
        columns[:, :, sites] = rows.columns[:, :, at]
        seen[:, sites] |= rows.seen[:, at]
    return replace(rows, columns=columns, seen=seen)


def _seen(columns: Stored) -> NDArray[np.bool_]:
    """Where there is data, as `seen_in` of stored frames, for many steps; a row with an invalid count is none."""
    seen: NDArray[np.bool_] = columns[COUNT] > 0
    for column in _MUST_BE_COUNTS:
        seen &= np.isfinite(columns[column]) & (columns[column] >= 0)
    return seen


def _histograms(read: Reader, kind: Kind, known: Histograms | None) -> Histograms:
    unpacked = {} if known is None else {one.source: one for one in known.each}
    each = []
    for written, indices in _merged(read, kind, kind.buckets, _is_string).values:
        content = _bytes(written) or b""
        source = written.step, written.time, hash(content)
        one = unpacked.get(source)
        if one is None or not np.array_equal(one.where, indices):
            one = _unpack(source, content, indices)
        each += [] if one is None else [one]
    return Histograms(np.array([one.source[0] for one in each], dtype=np.int64), tuple(each))


def _unpack(source: Source, content: bytes, indices: Indices) -> Histogram | None:
    try:
        return Histogram.of(source, PackedCounts(content, len(indices)).unpack(), indices)
    except ValueError:
        return None


def _findings(read: Reader, tag: Tag) -> StoredFindings:
    findings: list[Finding] = []
    for written in _latest(read.tag(tag.name).values):
        content = _bytes(written)
        try:
            findings += () if content is None else _checked(finding_codec.decode(content))
        except (ValueError, RecursionError):
            continue
    return StoredFindings(tuple(findings))


def _outcome(read: Reader, tag: Tag) -> StoredOutcome:
    values = read.tag(tag.name).values
    content = _bytes(values[-1]) if values else None
    return StoredOutcome(content.decode() if content in OUTCOMES else "")


def _samples(read: Reader, tag: Tag) -> StoredSamples:
    by_step = {}
    for written in _latest(read.tag(tag.name).values):
        with contextlib.suppress(ValueError, RecursionError):
            by_step[written.step] = sample_codec.decode(_bytes(written) or b"")
    return StoredSamples(by_step)


def _checked(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Raises RecursionError for evidence that is nested too deep for a JSON response."""
    for finding in findings:
        to_jsonable(finding.evidence)
    return findings
