"""The numbers of one logged step: fixed-width records on the device, one copy, and the frame they become.

Every reduced tensor takes the next record of a preallocated buffer; which site it belongs to stays in
Python. So the calls of a shared module, micro-batches and outputs passed on unchanged cost no device
work: records are merged on the CPU, by the thread that resolves the copy. `_copy_out` is the only place
of the capture side that moves data to the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tbhooks import buckets, kernel, rows, stats
from tbhooks.frame import Frame, Site

# Torch reductions make temporaries of the tensor's size: larger tensors are read in parts this long.
PART = 1 << 22
# A step that never ends must not eat the device: past this many bytes of records, calls go unseen.
MOST_BYTES = 256 << 20

# Bucket counts are 32-bit integers.
MOST_COUNT = 2**31 - 1

NO_SITE = -1
Number = TypeVar("Number", np.float64, np.int64)
Span = tuple[int, int, int]
"""Where one reduced tensor lies: buffer number, first record, one past the last."""


class Buffer:
    """Records of one device, handed out in order and copied out together."""

    def __init__(self, device: torch.device, with_buckets: bool, capacity: int) -> None:
        self.device = device
        self.with_buckets = with_buckets
        # Devices without float64 keep float32 rows; counts are then exact to 2**24.
        self.row_type = torch.float32 if device.type == "mps" else torch.float64
        unit = self.row_type.itemsize
        row_bytes = stats.WIDTH * unit
        count_bytes = -(-buckets.SLOTS * 4 // unit) * unit if with_buckets else 0
        self.row_bytes, self.record_bytes = row_bytes, row_bytes + count_bytes
        self._chunks: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._counts: list[Tensor] = []
        self.used = 0
        self.overflowed = False
        self._grow(max(capacity, 64))

    def take(self) -> int | None:
        """The number of a fresh record, or None when a step has made more calls than may be held."""
        if self.used == len(self._rows):
            room = MOST_BYTES // self.record_bytes - self.used
            if room <= 0:
                self.overflowed = True
                return None
            self._grow(min(self.used, room))
        self.used += 1
        return self.used - 1

    def row(self, record: int) -> Tensor:
        return self._rows[record]

    def counts(self, record: int) -> Tensor:
        return self._counts[record]

    def pack(self) -> Tensor:
        """All used records as one tensor on the device."""
        left, parts = self.used, []
        for chunk in self._chunks:
            parts.append(chunk[: min(left, len(chunk))])
            left = max(0, left - len(chunk))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def reset(self) -> None:
        """Makes all records fresh, in one chunk that fits what the last step needed."""
        needed = len(self._rows)
        if len(self._chunks) > 1:
            self._chunks, self._rows, self._counts = [], [], []
            self._grow(needed)
        elif self.with_buckets:
            self._chunks[0][: self.used].zero_()
        self.used = 0

    def _grow(self, records: int) -> None:
        with torch.inference_mode(False):  # a tensor made inside it could not be written outside
            chunk = torch.zeros(records, self.record_bytes, dtype=torch.uint8, device=self.device)
            self._chunks.append(chunk)
            self._rows += chunk[:, : self.row_bytes].view(self.row_type).unbind()
            if self.with_buckets:
                counts = chunk[:, self.row_bytes :].view(torch.int32)[:, : buckets.SLOTS]
                self._counts += counts.unbind()


@dataclass(frozen=True)
class Copy:
    """Records on their way to the host."""

    host: Tensor
    row_type: torch.dtype
    event: torch.cuda.Event | None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def rows(self) -> stats.Floats:
        data = self.host[:, : stats.WIDTH * self.row_type.itemsize].view(self.row_type)
        return np.asarray(data, dtype=np.float64)

    def counts(self) -> stats.Counts:
        data = self.host[:, stats.WIDTH * self.row_type.itemsize :].view(torch.int32)
        return np.asarray(data[:, : stats.BUCKETS], dtype=np.int64)


def _copy_out(buffer: Buffer) -> Copy:
    packed = buffer.pack()
    cuda = buffer.device.type == "cuda"
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=cuda)
    host.copy_(packed, non_blocking=cuda)
    event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
    if event is not None:
        event.record(torch.cuda.current_stream(buffer.device))
    return Copy(host, buffer.row_type, event)


def reduce(numbers: Tensor, row: Tensor, counts: Tensor | None) -> None:
    """A real, flat tensor into its record, by the C kernel where it can."""
    if kernel.can_read(numbers):
        kernel.reduce(numbers, row, counts)
        return
    rows.write_row(numbers, row)
    if counts is not None:
        buckets.add_counts(numbers, counts)


def _parts(numbers: Tensor) -> Iterable[Tensor]:
    longest = MOST_COUNT if kernel.can_read(numbers) else PART
    return torch.split(rows.flat(numbers), longest) if numbers.numel() > longest else (numbers,)


def _difference(after: Tensor, before: Tensor) -> Tensor:
    """In half precision the difference itself would be rounded, so it is taken in float32."""
    if after.dtype.itemsize < 4:
        return after.float() - before.float()
    return torch.sub(after, before, out=before)


class Recorder:
    """Collects one logged step, on as many devices as the model uses, and knows every site by its number."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.with_buckets = False
        self._kinds = frozenset(kinds)
        # Modules may run in several threads, and the kernel lets others run while it reads.
        self._lock = threading.RLock()
        self.sites: list[Site] = []
        self._numbers: dict[Site, int] = {}
        self._buffers: list[Buffer] = []
        self._number: dict[tuple[torch.device, bool], int] = {}
        self.calls: list[tuple[int, Span]] = []
        self._scalars: dict[str, Span | float] = {}
        self._earlier: dict[int, dict[str, Span | float]] = {}

    def wants(self, *kinds: str) -> bool:
        """Whether any of these kinds was asked for."""
        return not self._kinds.isdisjoint(kinds)

    def number(self, site: Site) -> int:
        """The site's number; NO_SITE for a kind nobody asked for.

        Weights are read whenever updates are, because an update is measured against its weight.
        """
        number = self._numbers.get(site)
        if number is not None:
            return number
        if site.kind not in self._kinds and not (site.kind == "weight" and "update" in self._kinds):
            return NO_SITE
        with self._lock:
            if site not in self._numbers:
                self.sites.append(site)
                self._numbers[site] = len(self.sites) - 1
            return self._numbers[site]

    def begin(self, with_buckets: bool) -> None:
        """Starts an empty step."""
        self.with_buckets = with_buckets
        self.restart()

    def restart(self) -> None:
        """Forgets what the step has recorded so far."""
        self.calls, self._scalars, self._earlier = [], {}, {}
        for buffer in self._buffers:
            buffer.reset()

    def record(self, site: int, tensor: Tensor) -> Span | None:
        """Reduces a tensor for a site; None if it holds no real numbers."""
        with self._lock:
            span = self._record_sparse(tensor) if tensor.layout is torch.sparse_coo else self._record_dense(tensor)
            if span is not None:
                self.calls.append((site, span))
        return span

    def record_difference(self, site: int, after: Tensor, before: Tensor) -> None:
        """Reduces `after - before` for a site; `before` may be overwritten."""
        with self._lock:
            if kernel.can_read(after) and kernel.can_read(before) and after.numel() <= MOST_COUNT:
                span = self._record_difference(after, before)
            else:
                span = self._record_dense(_difference(after, before))
            if span is not None:
                self.calls.append((site, span))

    def share(self, site: int, span: Span) -> None:
        """Gives a site what was already reduced for another."""
        self.calls.append((site, span))

    def scalar(self, tag: str, value: Tensor | float, earlier_step: int | None = None) -> None:
        """A number that rides along; one-element tensors stay on their device until the copy.

        One that came too late for its own step's copy rides in this one, under that earlier step.
        """
        scalars = self._scalars if earlier_step is None else self._earlier.setdefault(earlier_step, {})
        if not isinstance(value, Tensor):
            scalars[tag] = value
            return
        number, buffer = self._buffer(value.device)
        record = buffer.take()
        if record is not None:
            buffer.row(record)[stats.MEAN].copy_(value.detach().reshape(()))
            scalars[tag] = (number, record, record + 1)

    @property
    def overflowed(self) -> bool:
        """Whether any step made more calls than a buffer may hold; the rest of such a step is missing."""
        return any(buffer.overflowed for buffer in self._buffers)

    @property
    def scalar_tags(self) -> frozenset[str]:
        return frozenset(self._scalars)

    def scalars_alone(self, step: int, rank: int, scalars: dict[str, Span | float]) -> Pending:
        """A step's scalars that need no copy, for a step that was handed over before they came."""
        return Pending(step, time.time(), rank, [], self._kinds, False, {}, [], scalars, {})

    def pack(self, step: int, rank: int) -> Pending:
        """Starts the one copy of the step and forgets it."""
        copies = {i: _copy_out(buffer) for i, buffer in enumerate(self._buffers) if buffer.used}
        pending = Pending(
            step, time.time(), rank, self.sites[:], self._kinds, self.with_buckets,
            copies, self.calls, self._scalars, self._earlier,
        )  # fmt: skip
        self.restart()
        return pending

    def _buffer(self, device: torch.device) -> tuple[int, Buffer]:
        key = (device, self.with_buckets)
        if key not in self._number:
            self._number[key] = len(self._buffers)
            self._buffers.append(Buffer(device, self.with_buckets, capacity=len(self.sites)))
        number = self._number[key]
        return number, self._buffers[number]

    def _record_dense(self, tensor: Tensor) -> Span | None:
        numbers = tensor if kernel.can_read(tensor) else rows.readable(tensor)
        if numbers is None:
            return None
        number, buffer = self._buffer(numbers.device)
        start = buffer.used
        for part in _parts(numbers):
            record = buffer.take()
            if record is None:
                break
            reduce(part, buffer.row(record), buffer.counts(record) if self.with_buckets else None)
        return number, start, buffer.used

    def _record_difference(self, after: Tensor, before: Tensor) -> Span | None:
        number, buffer = self._buffer(after.device)
        record = buffer.take()
        if record is None:
            return None
        counts = buffer.counts(record) if self.with_buckets else None
        kernel.reduce_difference(after, before, buffer.row(record), counts)
        return number, record, record + 1

    def _record_sparse(self, tensor: Tensor) -> Span | None:
        present = tensor.detach().coalesce().values()
        span = self._record_dense(present)
        if span is None:
            return None
        number, start, _ = span
        buffer = self._buffers[number]
        absent = tensor.numel() - present.numel()
        for zeros in (min(MOST_COUNT, absent - done) for done in range(0, absent, MOST_COUNT)):
            record = buffer.take()
            if record is None:
                break
            rows.write_constant(buffer.row(record), zeros)
            if self.with_buckets:
                buffer.counts(record)[stats.MIDDLE].fill_(zeros)
        return number, start, buffer.used


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
    scalars: dict[str, Span | float]
    earlier: dict[int, dict[str, Span | float]]

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

    def _scalar_frame(self, step: int, scalars: dict[str, Span | float], rows: dict[int, stats.Floats]) -> Frame:
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
        shown = [i for i, site in enumerate(order) if self.sites[site].kind in self.kinds]
        sites = tuple(self.sites[order[i]] for i in shown)
        scalars = _read(self.scalars, rows)
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
        for i, site in enumerate(order):
            if self.sites[site].kind == "update":
                values[i, stats.BASE] = np.square(stats.STATS["norm"](values[weight[self.sites[site].path]]))


def _gather(hosts: dict[int, NDArray[Number]], record: list[tuple[int, int]], width: int) -> NDArray[Number]:
    if len(hosts) == 1:
        (number,) = hosts
        return hosts[number][[i for _, i in record]]
    parts = [hosts[number][i] for number, i in record]
    return np.stack(parts) if parts else np.zeros((0, width))  # type: ignore[return-value]


def _read(scalars: dict[str, Span | float], rows: dict[int, stats.Floats]) -> dict[str, float]:
    return {
        tag: float(rows[value[0]][value[1], stats.MEAN]) if isinstance(value, tuple) else float(value)
        for tag, value in scalars.items()
    }
