"""A logged step whose copy to the host was started: waits for the copy, merges the records, and makes the frame.

Runs in the background thread. Reads host memory only; nothing here touches a device or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tbhooks.capture.recording import layouts
from tbhooks.capture.recording.calls import CallTable, empty_table
from tbhooks.capture.recording.step_table import MergedStep, StepTable
from tbhooks.data import checksums, ranks, stats
from tbhooks.data.artifacts import Artifact, vectors
from tbhooks.data.frame import (
    BELOW_EPSILON,
    CRITICAL_BATCH,
    GRADIENT_COSINE,
    GRADIENT_NORM,
    METRIC,
    NOISE_PARTS,
    NOISE_SCALE,
    NONFINITE_SINCE,
    OPTIMIZER_PARTS,
    RAW_GRADIENT_NORM,
    SAMPLED,
    Frame,
    Site,
    Sites,
)
from tbhooks.reduction import finalize
from tbhooks.reduction.pinned import HostCopy

Scalars = dict[str, tuple[int, int, int] | float]
"""Scalars by tag: the value if it is known, or the buffer, record and column of the copy that hold it."""


@dataclass(frozen=True)
class Copy:
    """Records on their way to the host, followed by partial results of which rows are made here."""

    copied: HostCopy
    row_type: torch.dtype
    unfinished: Sequence[finalize.Block] = ()
    record_bytes: int = 0
    part_bytes: int = 0
    attached_bytes: int = 0

    @property
    def host(self) -> Tensor:
        """The records on the host, after the copy."""
        return self.copied.tensor

    def rows(self) -> stats.Floats:
        data = self._records()[:, : stats.WIDTH * self.row_type.itemsize].view(self.row_type)
        rows: stats.Floats = np.asarray(data, dtype=np.float64)
        if self.unfinished:
            rows = rows.copy()
            end = len(self.host) - self.attached_bytes
            middle = end - 4 * finalize.narrow_numbers(self.unfinished)
            wide, narrow = self.host[end - self.part_bytes : middle], self.host[middle:end]
            parts = (
                np.asarray(wide.view(self.row_type), np.float64),
                np.asarray(narrow.view(torch.float32), np.float64),
            )
            records, values = finalize.gather(*parts, self.unfinished)
            rows[records] = values
        return rows

    def _records(self) -> Tensor:
        behind = self.part_bytes + self.attached_bytes
        return self.host[: len(self.host) - behind].view(-1, self.record_bytes) if behind else self.host

    def counts(self) -> NDArray[np.int32]:
        data = self._records()[:, stats.WIDTH * self.row_type.itemsize :].view(torch.int32)
        return np.asarray(data[:, : stats.BUCKETS])

    def attached(self, what: Attached) -> NDArray[Any]:
        start = len(self.host) - self.attached_bytes + what.start
        content = np.asarray(self.host[start : start + what.size])
        return np.frombuffer(content.tobytes(), what.dtype).reshape(what.shape)


@dataclass(frozen=True)
class Attached:
    """A tensor that is copied with a step: its buffer, its position among those attached, its type and shape."""

    buffer: int
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


Read = Callable[[Attached], NDArray[Any]]
"""Returns an attached tensor, after the copy."""
ArtifactBuilder = Callable[[Read], Iterable[Artifact]]
"""Makes artifacts of attached tensors in the background; it raises nothing."""
TablePart = Callable[[StepTable, Read], StepTable]
"""Adds numbers that are in attached tensors to the table of the step, in the background; it raises nothing."""
Merge = Callable[[StepTable], MergedStep | None]
"""Merges the table of this rank with those of all ranks; returns None if another rank writes."""


@dataclass(frozen=True)
class PackedStep:
    """A step whose copy is under way. `frames` waits for it; nothing here touches the device."""

    step: int
    time: float
    rank: int
    sites: list[Site]
    kinds: frozenset[str]
    with_buckets: bool
    copies: dict[int, Copy]
    calls: CallTable
    scalars: Scalars
    earlier: dict[int, Scalars]
    shards: Mapping[Site, tuple[int, int]] = field(default_factory=dict)
    """Of tensors that are sharded over ranks, which shard was read, and of how many."""
    sampled: Mapping[Site, int] = field(default_factory=dict)
    """Of tensors of which only a sample was read, the number of their elements."""
    group: int = 0
    """The lowest of the ranks that worked on the same batch."""
    merge: Merge | None = None
    """Merges it with the tables of other ranks, which wait for that."""
    artifact_builders: Sequence[ArtifactBuilder] = ()
    """What makes the artifacts of the step."""
    parts: Sequence[TablePart] = ()
    """What adds to the table of the step: samples, metrics."""

    @property
    def nbytes(self) -> int:
        """About how much host memory it holds until it is written: the copied records and its lists."""
        return sum(copy.copied.nbytes for copy in self.copies.values()) + self.calls.nbytes

    def without_numbers(self) -> PackedStep | None:
        """The step without its numbers: other ranks still have to be answered. None if there are none."""
        if self.merge is None:
            return None
        return replace(self, copies={}, calls=empty_table(), scalars={}, earlier={}, artifact_builders=(), parts=())

    def frames(self) -> list[Frame]:
        """The frame of the step, after frames with late scalars of earlier steps."""
        if self.merge is None:
            return self._frames(self._alone(self._table()))
        try:
            table = self._table()
        except BaseException:
            self.merge(StepTable(self.step))  # the other ranks wait for it
            raise
        merged = self.merge(table)
        if merged is not None:
            return self._frames(merged)
        return self._frames(self._alone(table)) if self.rank == 0 else []

    def _alone(self, table: StepTable) -> MergedStep:
        """The step of this rank alone. If weights are sharded, the norm of all gradients is not known here."""
        if any(site.kind == "weight_gradient" for site in self.shards):
            table = replace(table, scalars={k: v for k, v in table.scalars.items() if k != RAW_GRADIENT_NORM})
            return MergedStep(table, ranks.empty(len(table.sites)), is_whole=False)
        return MergedStep(table, ranks.empty(len(table.sites)))

    def _frames(self, merged: MergedStep) -> list[Frame]:
        table, sites = merged.table, layouts.shared_sites(merged.table.sites)
        known = _with_noise_scale(table.scalars)
        late = [self._scalar_frame(step, scalars) for step, scalars in table.earlier.items()]
        artifacts = tuple(artifact for make in self.artifact_builders for artifact in make(self._attached))
        found = vectors.finished(sites, table.values)
        if not sites and not known and not artifacts and not table.samples:
            return late
        follows = _from_rows(sites, table.values, merged.is_whole)
        shown = sites.derived(layouts.shown, self.kinds)
        frame = Frame(
            self.step, self.time, self.rank, shown.sites, shown.of(table.values),
            shown.of(table.counts) if sites else np.zeros((0, 0), dtype=np.int64),
            scalars={**known, **follows, **table.samples.scalars(), **found.scalars},
            spreads=shown.of(merged.spreads) if sites else ranks.empty(0),
            artifacts=artifacts + found.channels, samples=table.samples,
            checksums=shown.of(table.checksums) if len(table.checksums) and sites else checksums.empty(0),
            vectors=found.vectors,
            metrics={start: kind for start, (kind, _) in table.metrics.items() if METRIC in start},
        )  # fmt: skip
        return [*late, frame]

    def _attached(self, what: Attached) -> NDArray[Any]:
        return self.copies[what.buffer].attached(what)

    def added_to(self, table: StepTable, _read: Read) -> StepTable:
        """A `TablePart` that adds the parts of this step, from its own copy, to the table of another one."""
        for copy in self.copies.values():
            copy.copied.wait()
        for add in self.parts:
            table = add(table, self._attached)
        return table

    def _scalar_frame(self, step: int, scalars: dict[str, float]) -> Frame:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return Frame(step, self.time, self.rank, Sites(), stats.empty_rows(0), nothing, scalars=scalars)

    def _table(self) -> StepTable:
        """The records of the step, merged by site."""
        for copy in self.copies.values():
            copy.copied.wait()
        rows = {i: copy.rows() for i, copy in self.copies.items()}
        layout = layouts.layout(self.calls, self.sites, self.shards)
        sites, n = layout.sites, len(layout.sites)
        values = stats.merge(layout.gather(rows, stats.WIDTH, np.float64), layout.owner, n)
        counts: stats.Counts = np.zeros((n, 0), dtype=np.int64)
        if self.with_buckets:
            host_counts = {i: copy.counts() for i, copy in self.copies.items()}
            # Half the memory where nothing is added up or estimated: most of what a logged step takes.
            dtype = np.int32 if layout.is_one_each and not self.sampled else np.int64
            counts = stats.merge_counts(layout.gather(host_counts, stats.BUCKETS, dtype), layout.owner, n)
        scalars = {**_read(self.scalars, rows), **self._extrapolate(sites, values, counts)}
        table = StepTable(
            self.step, sites, values, counts, layout.shards, scalars,
            {step: _read(scalars, rows) for step, scalars in self.earlier.items()}, self.group,
        )  # fmt: skip
        for add in self.parts:
            table = add(table, self._attached)
        return table

    def _extrapolate(self, sites: Sequence[Site], values: stats.Floats, counts: stats.Counts) -> dict[str, float]:
        """Scales the rows and counts of samples to their whole tensors, in place. Returns the scalars that mark them:
        which fraction of the elements was read.
        """
        marks = {}
        for i, site in enumerate(sites) if self.sampled else ():
            read = values[i, stats.COUNT]
            if site in self.sampled and read:
                counts[i] = np.round(counts[i] * (self.sampled[site] / read))
                values[i] = stats.extrapolated(values[i], self.sampled[site])
                marks[SAMPLED + site.name] = float(read / self.sampled[site])
        return marks


def _from_rows(sites: Sites, values: stats.Floats, is_whole: bool) -> dict[str, float]:
    """The scalars that follow from the rows of a step. Also sets the norm an update is compared with, in place: that of
    its weight, which was reduced in the same step.
    """
    if not sites:
        return {}
    updates, weights = sites.derived(layouts.updates_and_weights)
    values[updates, stats.BASE] = np.square(stats.STATS["norm"](values[weights]))
    return {**(_gradient_norm(sites, values) if is_whole else {}), **_optimizer_scalars(sites, values)}


def _gradient_norm(sites: Sites, values: stats.Floats) -> dict[str, float]:
    """The norm of all watched weight gradients together, as the optimizer used them."""
    if "weight_gradient" not in sites.positions:
        return {}
    of_gradients = values[sites.positions["weight_gradient"]]
    squares = np.square(stats.STATS["norm"](of_gradients))
    squares[of_gradients[:, stats.INFS] > 0] = np.inf  # unlike a site's own norm, which leaves them out
    squares[of_gradients[:, stats.NANS] > 0] = np.nan
    return {GRADIENT_NORM: float(np.sqrt(squares.sum()))}


def _with_noise_scale(scalars: dict[str, float]) -> dict[str, float]:
    """The scalars with the gradient noise scale instead of its parts: the trace of the gradients' covariance over the
    squared norm of the true gradient, both running means; and the mean of the noise scales so far.
    """
    if NOISE_PARTS[0] not in scalars:
        return scalars
    trace, signal, total, count = (scalars[tag] for tag in NOISE_PARTS)
    found = {
        NOISE_SCALE: max(trace, 0.0) / signal if signal > 0 else float("nan"),
        CRITICAL_BATCH: total / count if count > 0 else float("nan"),
    }
    return {**{tag: value for tag, value in scalars.items() if tag not in NOISE_PARTS}, **found}


def _optimizer_scalars(sites: Sites, values: stats.Floats) -> dict[str, float]:
    """What follows from the state of an optimizer: the cosine of the first moment and the gradient, and the fraction of
    elements of which the root of the second moment is below epsilon.
    """
    if sites.positions.keys().isdisjoint(OPTIMIZER_PARTS):
        return {}
    rows = {(site.path, site.kind): values[i] for i, site in enumerate(sites)}
    scalars = {}
    for (path, kind), row in rows.items():
        pair = [rows.get((path, other)) for other in ("first_moment", "weight_gradient")]
        if kind == "below_epsilon":
            scalars[f"second_moment.{BELOW_EPSILON}/{path}"] = float(row[stats.MEAN])
        elif kind == "momentum_product" and all(each is not None for each in pair):
            norms = float(np.prod([stats.STATS["norm"](each) for each in pair if each is not None]))
            cosine = float(row[stats.MEAN] * row[stats.COUNT]) / norms if norms > 0 else float("nan")
            scalars[f"first_moment.{GRADIENT_COSINE}/{path}"] = cosine
    return scalars


def _read(scalars: Scalars, rows: dict[int, stats.Floats]) -> dict[str, float]:
    read = {
        tag: float(rows[value[0]][value[1], value[2]]) if isinstance(value, tuple) else float(value)
        for tag, value in scalars.items()
    }
    if read.get(NONFINITE_SINCE, 0) < 0:  # never
        del read[NONFINITE_SINCE]
    return read
