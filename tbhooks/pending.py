"""A logged step after its copy was started: waits for it, merges the records, and makes the frame.

Runs in the pump's thread. Reads host memory only; nothing here touches a device or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tbhooks import parts, stats
from tbhooks.frame import GRADIENT_NORM, NONFINITE_SINCE, Frame, Site

Number = TypeVar("Number", np.float64, np.int64)
Span = tuple[int, int, int]
"""Where one reduced tensor lies: buffer number, first record, one past the last."""
Scalars = dict[str, tuple[int, int, int] | float]
"""Numbers by tag: known already, or the buffer, record and column where they are."""


@dataclass(frozen=True)
class Copy:
    """Records on their way to the host, and behind them the parts that rows of some are made of here."""

    host: Tensor
    row_type: torch.dtype
    event: torch.cuda.Event | None
    unfinished: Sequence[parts.Block] = ()
    record_bytes: int = 0
    part_bytes: int = 0

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def rows(self) -> stats.Floats:
        data = self._records()[:, : stats.WIDTH * self.row_type.itemsize].view(self.row_type)
        rows: stats.Floats = np.asarray(data, dtype=np.float64)
        if self.unfinished:
            rows = rows.copy()
            behind = self.host[len(self.host) - self.part_bytes :].view(self.row_type)
            records, values = parts.gather(np.asarray(behind, dtype=np.float64), self.unfinished)
            rows[records] = values
        return rows

    def _records(self) -> Tensor:
        if not self.unfinished:
            return self.host
        return self.host[: len(self.host) - self.part_bytes].view(-1, self.record_bytes)

    def counts(self) -> stats.Counts:
        data = self._records()[:, stats.WIDTH * self.row_type.itemsize :].view(torch.int32)
        return np.asarray(data[:, : stats.BUCKETS], dtype=np.int64)


@dataclass(frozen=True)
class Pending:
    """A step whose copy is under way. `frames` waits for it; nothing here touches the device."""

    step: int
    time: float
    rank: int
    sites: list[Site]
    kinds: frozenset[str]
    with_buckets: bool
    copies: dict[int, Copy]
    calls: list[tuple[int, Span]]
    scalars: Scalars
    earlier: dict[int, Scalars]

    @property
    def nbytes(self) -> int:
        """What it holds of the host's memory until it is written."""
        return sum(copy.host.nbytes for copy in self.copies.values())

    def frames(self) -> list[Frame]:
        """The step's frame, after what is only now known of earlier ones."""
        for copy in self.copies.values():
            copy.wait()
        rows = {i: copy.rows() for i, copy in self.copies.items()}
        late = [self._scalar_frame(step, scalars, rows) for step, scalars in self.earlier.items()]
        if not self.calls:
            return [*late, self._scalar_frame(self.step, self.scalars, rows)] if self.scalars else late
        return [*late, self._frame(rows)]

    def _scalar_frame(self, step: int, scalars: Scalars, rows: dict[int, stats.Floats]) -> Frame:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return Frame(step, self.time, self.rank, (), stats.empty_rows(0), nothing, scalars=_read(scalars, rows))

    def _frame(self, rows: dict[int, stats.Floats]) -> Frame:
        order = list(dict.fromkeys(site for site, _ in self.calls))
        owner, record = self._records({site: i for i, site in enumerate(order)})
        values = stats.merge(_gather(rows, record, stats.WIDTH), owner, len(order))
        self._set_update_base(order, values)
        counts = np.zeros((len(order), 0), dtype=np.int64)
        if self.with_buckets:
            host_counts = {i: copy.counts() for i, copy in self.copies.items()}
            counts = stats.merge_counts(_gather(host_counts, record, stats.BUCKETS), owner, len(order))
        scalars = {**_read(self.scalars, rows), **self._gradient_norm(order, values)}
        shown = [i for i, site in enumerate(order) if self.sites[site].kind in self.kinds]
        sites = tuple(self.sites[order[i]] for i in shown)
        return Frame(self.step, self.time, self.rank, sites, values[shown], counts[shown], scalars=scalars)

    def _records(self, position: dict[int, int]) -> tuple[NDArray[np.intp], list[tuple[int, int]]]:
        """The frame row each record merges into, and where each record lies."""
        owner, record = [], []
        for site, (number, start, stop) in self.calls:
            for i in range(start, stop):
                owner.append(position[site])
                record.append((number, i))
        return np.array(owner, dtype=np.intp), record

    def _set_update_base(self, order: list[int], values: stats.Floats) -> None:
        """An update is measured against the weight it changed, which was reduced in the same step."""
        weight = {self.sites[site].path: i for i, site in enumerate(order) if self.sites[site].kind == "weight"}
        norms = stats.STATS["norm"](values)
        for i, site in enumerate(order):
            if self.sites[site].kind == "update" and self.sites[site].path in weight:
                values[i, stats.BASE] = np.square(norms[weight[self.sites[site].path]])

    def _gradient_norm(self, order: list[int], values: stats.Floats) -> dict[str, float]:
        """The norm of all watched weight gradients together, as the optimizer used them."""
        of_gradients = values[[i for i, site in enumerate(order) if self.sites[site].kind == "weight_gradient"]]
        if not len(of_gradients):
            return {}
        squares = np.square(stats.STATS["norm"](of_gradients))
        squares[of_gradients[:, stats.INFS] > 0] = np.inf  # unlike a site's own norm, one number must show them
        squares[of_gradients[:, stats.NANS] > 0] = np.nan
        return {GRADIENT_NORM: float(np.sqrt(squares.sum()))}


def _gather(hosts: dict[int, NDArray[Number]], record: list[tuple[int, int]], width: int) -> NDArray[Number]:
    if len(hosts) == 1:
        (number,) = hosts
        return hosts[number][[i for _, i in record]]
    parts = [hosts[number][i] for number, i in record]
    return np.stack(parts) if parts else np.zeros((0, width))  # type: ignore[return-value]


def _read(scalars: Scalars, rows: dict[int, stats.Floats]) -> dict[str, float]:
    read = {
        tag: float(rows[value[0]][value[1], value[2]]) if isinstance(value, tuple) else float(value)
        for tag, value in scalars.items()
    }
    if read.get(NONFINITE_SINCE, 0) < 0:  # never
        del read[NONFINITE_SINCE]
    return read
