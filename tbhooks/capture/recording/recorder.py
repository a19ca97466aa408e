"""The records of one logged step, on their devices (device_buffer.py), and the site each belongs to.

The sites stay in Python. So the calls of a shared module, micro-batches and outputs passed on unchanged cost no device
work: records are merged on the host (packed_step.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tbhooks.capture import sharded_tensors
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.calls import Calls, Span, empty_table
from tbhooks.capture.recording.device_buffer import Buffer, copy_out
from tbhooks.capture.recording.packed_step import ArtifactBuilder, Attached, PackedStep, Scalars, TablePart
from tbhooks.capture.scalars.checksums import StepChecksums
from tbhooks.capture.scalars.metrics import StepMetrics
from tbhooks.data import stats
from tbhooks.data.frame import Site
from tbhooks.reduction import batched, cpu, torch_rows, triton
from tbhooks.reduction.cpu import NULL, Address, Addresses
from tbhooks.reduction.finalize import Block

# Bucket counts are 32-bit integers.
MOST_COUNT = 2**31 - 1

NO_SITE = -1
_CPU = torch.device("cpu")
# Kinds that another one needs: an update is compared with its weight.
READ_FOR = {"weight": "update"}

Wanted = tuple[int, Tensor, Address, Address]
"""A site, a tensor the kernel can read, the address of a copy to write, and that of a tensor to subtract (or NULL)."""


def can_be_together(tensor: Tensor) -> bool:
    """Whether `Recorder.record_together` takes it."""
    return triton.takes(tensor) or batched.fits(tensor)


def can_be_one_of_many(tensor: Tensor) -> bool:
    """Whether `Recorder.record_all` takes it."""
    return cpu.can_read(tensor) and tensor.numel() <= MOST_COUNT


class Recorder:
    """Records one logged step, on as many devices as the model uses. Sites are identified by numbers."""

    def __init__(self, kinds: Iterable[str], prefix: str = "") -> None:
        self.with_buckets = False
        self.kinds = frozenset(kinds)
        # Put before the kinds of its sites, to distinguish them from those of other recorders.
        self._prefix = prefix
        self._shown = frozenset(prefix + kind for kind in self.kinds)
        # Modules may run in several threads, and the kernel releases the GIL.
        self._lock = threading.RLock()
        self.sites: list[Site] = []
        self._numbers: dict[Site, int] = {}
        self._buffers: list[Buffer] = []
        self._number: dict[tuple[torch.device, bool], int] = {}
        self.calls = Calls()
        self.shards: dict[Site, tuple[int, int]] = {}
        """Of tensors that are sharded over ranks, which shard is on this rank, and of how many."""
        self._sampled: dict[Site, int] = {}
        self._scalars: Scalars = {}
        self._earlier: dict[int, Scalars] = {}
        self._artifact_builders: list[ArtifactBuilder] = []
        self._parts: list[TablePart] = []
        self.metrics: StepMetrics | None = None
        """The metrics of the user, which readers call with the tensors they record."""
        self.checksums: StepChecksums | None = None

    def wants(self, *kinds: str) -> bool:
        """Whether any of these kinds was asked for."""
        return not self.kinds.isdisjoint(kinds)

    def add_kinds(self, shown: Iterable[str], hidden: Iterable[str]) -> None:
        """Wants more kinds from now on. Those that are hidden have no sites in the frame."""
        self.kinds, self._shown = self.kinds | {*shown, *hidden}, self._shown | {self._prefix + kind for kind in shown}

    def number(self, site: Site) -> int:
        """The number of a site; NO_SITE if its kind is not wanted."""
        number = self._numbers.get(site)
        if number is not None:
            return number
        if site.kind not in self.kinds and READ_FOR.get(site.kind) not in self.kinds:
            return NO_SITE
        with self._lock:
            number = self._numbers.setdefault(site, len(self.sites))
            if number == len(self.sites):
                self.sites.append(replace(site, kind=self._prefix + site.kind) if self._prefix else site)
            return number

    def begin(self, with_buckets: bool) -> None:
        """Starts an empty step."""
        with self._lock:
            self.with_buckets = with_buckets
            self.restart()

    def restart(self) -> None:
        """Forgets what was recorded so far; waits for a tensor that is being read in another thread."""
        with self._lock:
            self.calls.clear()
            self._scalars, self._earlier, self._artifact_builders = {}, {}, []
            self._sampled, self._parts = {}, []
            for of_step in (self.metrics, self.checksums):
                if of_step is not None:
                    of_step.forget()
            for buffer in self._buffers:
                buffer.reset()

    def record(
        self, site: int, tensor: Tensor, scale: Tensor | None = None, owner: object = None, is_plain: bool = False
    ) -> Span | None:  # fmt: skip
        """Reduces a tensor for a site, divided by `scale` if there is one. Returns None if it holds no real numbers.

        `owner` identifies the record for `drop`. `is_plain` says that `can_be_one_of_many` was asked and is true.
        """
        with self._lock:
            if scale is None and (is_plain or can_be_one_of_many(tensor)):  # nearly always on a CPU: the shortest way
                span: Span | None = self._record_one(tensor)
            else:
                span = self._record_any(site, tensor, scale)
            if span is not None:
                if self.checksums is not None:
                    self._read_bits(span, tensor)
                self.calls.append(site, span, owner)
        return span

    def _read_bits(self, span: Span, tensor: Tensor | None) -> None:
        if self.checksums is not None and tensor is not None:
            self.checksums.read(span, tensor, partial(self.attach, is_own=True))

    def _record_any(self, site: int, tensor: Tensor, scale: Tensor | None) -> Span | None:
        local = sharded_tensors.local_tensor(tensor)
        if sharded_tensors.is_dtensor(tensor):
            self.shards.setdefault(self.sites[site], sharded_tensors.shard_index(tensor))
        if local is None or torch_rows.storage_is_freed(local):
            return None
        if scale is None and can_be_one_of_many(local):
            return self._record_one(local)
        record = self._record_sparse if local.layout is torch.sparse_coo else self._record_dense
        return record(local, scale)

    def _record_one(self, tensor: Tensor) -> Span:
        number, buffer = self._buffer(tensor)
        record = buffer.take()
        if record is None:
            return number, buffer.used, buffer.used
        cpu.reduce(tensor, *buffer.addresses(record))
        return number, record, record + 1

    def record_all(self, wanted: Sequence[Wanted]) -> bool:
        """Reduces many tensors in one call of the C kernel. Returns False if there was no room for all."""
        if not wanted:
            return True
        jobs: list[cpu.Job] = []
        with self._lock:
            number, buffer = self._buffer(wanted[0][1])
            for site, tensor, copy, minus in wanted:
                record = buffer.take()
                if record is None:
                    break
                jobs.append(cpu.job(tensor, *buffer.addresses(record), minus, copy))
                self.calls.append(site, (number, record, record + 1))
                self._read_bits((number, record, record + 1), tensor)
            cpu.reduce_all(jobs)
        return len(jobs) == len(wanted)

    def record_described(
        self, sites: Sequence[int], like: Tensor, described: NDArray[np.int64], minus: Addresses = NULL,
        copies: Addresses = NULL,
    ) -> bool:  # fmt: skip
        """As `record_all`, for tensors that are described by address, size and type (eager_hooks.describe_all). Returns
        False if there is no room for them, and has done nothing then. `like` is a tensor on the CPU.
        """
        with self._lock:
            number, buffer = self._buffer(like)
            size = len(described)
            first = buffer.take_together(size)
            if first is None:
                return False
            jobs = cpu.jobs_of(described, minus, copies)
            row, counts = buffer.addresses(first)
            steps = np.arange(size) * buffer.record_bytes
            jobs[:, 5] = row + steps
            if counts != NULL:
                jobs[:, 6] = counts + steps
            cpu.reduce_table(jobs)
            self.calls.extend(sites, number, first)
        return True

    def record_together(self, wanted: Sequence[batched.Wanted]) -> None:
        """Reduces many tensors of devices, for which `can_be_together` is true, in a few launches."""
        with self._lock, torch.no_grad():
            others = self._record_by_triton(wanted)
            for site, tensor, before, scale in (want for want in others if not batched.fits(want[1])):
                self._record_alone(site, tensor, before, scale)
            for group in batched.groups([want for want in others if batched.fits(want[1])]):
                made = batched.block(group)
                number, buffer = self._buffer(made)
                records = [record for record in (buffer.take() for _ in group) if record is not None]
                if len(records) < len(group):  # the buffer has overflowed
                    return
                block = Block(records, [tensor.numel() for _, tensor, _, _ in group], made.size(1), shifted=True)
                buffer.unfinished.hold(block, batched.reduce(made, buffer.row_type))
                if buffer.with_buckets:
                    batched.count(made, [buffer.counts(record) for record in records])
                for (site, tensor, _, _), record in zip(group, records, strict=True):
                    self.calls.append(site, (number, record, record + 1))
                    self._read_bits((number, record, record + 1), tensor)

    def _record_by_triton(self, wanted: Sequence[batched.Wanted]) -> list[batched.Wanted]:
        """Reduces those that Triton can, in one launch for each type on a device. Returns the others."""
        jobs: dict[int, list[triton.Job]] = {}
        others: list[batched.Wanted] = []
        for want in wanted:
            site, tensor, before, scale = want
            if not reducers.is_for_triton(tensor, before):
                others.append(want)
                continue
            number, buffer = self._buffer(tensor)
            record = buffer.take()
            if record is None:
                break
            jobs.setdefault(number, []).append(reducers.triton_job(tensor, before, scale, buffer.addresses(record)))
            self.calls.append(site, (number, record, record + 1))
            self._read_bits((number, record, record + 1), tensor)
        for number, of_device in jobs.items():
            self._buffers[number].scratch.reduce_all(of_device)
        return others

    def _record_alone(self, site: int, tensor: Tensor, before: Tensor | None, scale: Tensor | None) -> None:
        if before is None:
            self.record(site, tensor, scale)
        else:
            self.record_difference(site, tensor.detach(), before)

    def record_difference(self, site: int, after: Tensor, before: Tensor, whole: int | None = None) -> None:
        """Reduces `after - before` for a site; `before` may be overwritten.

        `whole` is given for a sample: the number of elements of the tensor that it was taken from.
        """
        with self._lock, torch.no_grad():
            for one, other in torch_rows.parts_to_subtract(after, before, reducers.part_length(after)):
                span = self._record_dense(torch_rows.difference(one, other), None)
                if span is not None:
                    self.calls.append(site, span)
                    self._read_bits(span, one if whole is None else None)
            if whole is not None:
                self._sampled[self.sites[site]] = whole

    def read_metrics(
        self, kind: str, path: str, index: str, tensor: Tensor, owner: object, scale: Tensor | None = None
    ) -> None:
        """Computes the metrics that the user has asked for of this tensor."""
        if self.metrics is not None:
            self.metrics.read(kind, path, index, tensor, owner, scale)

    def share(self, site: int, span: Span, owner: object = None) -> None:
        """Gives a site what was already reduced for another."""
        with self._lock:
            self.calls.append(site, span, owner)

    def drop(self, owners: Set[object]) -> bool:
        """Removes the records of these owners. Returns whether there were any."""
        if not owners:
            return False
        with self._lock:
            found = self.calls.drop(owners)
            if self.metrics is not None:
                self.metrics.drop(owners)
        return found

    def keep_scalars_only(self, start: str) -> None:
        """Removes everything but scalars whose tag starts with `start`."""
        with self._lock:
            self.calls.clear()
            self._artifact_builders, self._parts = [], []
            self._scalars = {tag: value for tag, value in self._scalars.items() if tag.startswith(start)}
            if self.metrics is not None:
                self.metrics.forget()

    def scalar(self, tag: str, value: Tensor | float, earlier_step: int | None = None) -> None:
        """Records a scalar; one-element tensors stay on their device until the copy.

        `earlier_step` is given for a scalar that came too late for the copy of its own step.
        """
        with self._lock:
            scalars = self._scalars if earlier_step is None else self._earlier.setdefault(earlier_step, {})
            if not isinstance(value, Tensor):
                scalars[tag] = value
                return
            number, buffer = self._buffer(value)
            record = buffer.take()
            if record is not None:
                buffer.row(record)[stats.MEAN].copy_(value.detach().reshape(()))
                scalars[tag] = (number, record, stats.MEAN)

    def scalars(self, tags: Sequence[str], values: Tensor) -> None:
        """Records the scalars in one tensor, as many per record as a row has columns."""
        with self._lock:
            number, buffer = self._buffer(values)
            for start in range(0, len(tags), stats.WIDTH):
                record = buffer.take()
                if record is None:
                    return
                part = values[start : start + stats.WIDTH]
                buffer.row(record)[: len(part)].copy_(part.detach())
                for column, tag in enumerate(tags[start : start + stats.WIDTH]):
                    self._scalars[tag] = (number, record, column)

    def attach(self, tensor: Tensor, is_own: bool = False) -> Attached:
        """Copies a tensor as it is now to the host with the step. With `is_own` nothing else will change it."""
        with self._lock:
            number, buffer = self._buffer(tensor)
            return buffer.attach(number, tensor, is_own)

    def artifact(self, make: ArtifactBuilder) -> None:
        """Adds what makes artifacts of the step, in the background after the copy."""
        self._artifact_builders.append(make)

    def part(self, add: TablePart) -> None:
        """Adds what adds numbers of attached tensors to the table of the step, in the background after the copy."""
        self._parts.append(add)

    @property
    def has_something(self) -> bool:
        """Whether anything was recorded."""
        has_metrics = self.metrics is not None and self.metrics.has_something
        return bool(self.calls or self._scalars or self._artifact_builders or self._parts or has_metrics)

    @property
    def overflowed(self) -> bool:
        """Whether the step made more calls than a buffer may hold; the rest is missing."""
        return any(buffer.overflowed for buffer in self._buffers)

    @property
    def scalar_tags(self) -> frozenset[str]:
        return frozenset(self._scalars)

    def scalars_alone(self, step: int, rank: int, scalars: Scalars) -> PackedStep:
        """Scalars that need no copy, for a step that was submitted before they came."""
        return PackedStep(step, time.time(), rank, [], self._shown, False, {}, empty_table(), scalars, {})

    def pack(self, step: int, rank: int) -> PackedStep:
        """Starts the copy of the step to the host, and begins an empty one."""
        with self._lock:
            of_metrics = None if self.metrics is None else self.metrics.part(self.attach)
            of_bits = None if self.checksums is None else self.checksums.part(self.sites, list(self.calls))
            self._parts += [part for part in (of_metrics, of_bits) if part is not None]
            copies = {i: copy_out(buffer) for i, buffer in enumerate(self._buffers) if not buffer.is_empty}
            packed = PackedStep(
                step, time.time(), rank, self.sites[:], self._shown, self.with_buckets,
                copies, self.calls.table(), self._scalars, self._earlier, dict(self.shards), self._sampled,
                artifact_builders=self._artifact_builders, parts=self._parts,
            )  # fmt: skip
            self.restart()
        return packed

    @property
    def reads_rows_only(self) -> bool:
        """Whether nothing but rows and counts is wanted of the tensors that are recorded."""
        return self.metrics is None and self.checksums is None

    def cpu_place(self) -> tuple[object, ...] | None:
        """Where a hook in C records CPU tensors of the open step (eager_hooks.c); None if nothing was recorded yet, or
        if more than rows and counts is wanted.
        """
        number = self._number.get((_CPU, self.with_buckets))
        if number is None or not self.reads_rows_only:
            return None
        buffer, lock = self._buffers[number], self._lock
        headers = self.calls.header, buffer.header
        addresses = (header.buffer_info()[0] for header in headers)
        sizes = number, buffer.row_bytes, buffer.record_bytes, buffer.with_buckets
        return headers, self.calls.owners, lock.acquire, lock.release, *addresses, *sizes

    def _buffer(self, like: Tensor) -> tuple[int, Buffer]:
        """The buffer of a tensor's device."""
        key = (like.device, self.with_buckets)
        if key not in self._number:
            made = Buffer(like, self.with_buckets, capacity=len(self.sites))  # raises if the device is full
            self._number[key] = len(self._buffers)
            self._buffers.append(made)
        number = self._number[key]
        buffer = self._buffers[number]
        buffer.order.note()
        return number, buffer

    def _record_dense(self, tensor: Tensor, scale: Tensor | None) -> Span | None:
        with torch.no_grad():
            numbers = torch_rows.readable(tensor)
            if numbers is None:
                return None
            if triton.takes(numbers):
                return self._record_parts(numbers, triton.LONGEST, partial(reducers.reduce_by_triton, scale))
            longest = reducers.part_length(numbers)
            if scale is not None:
                return self._record_parts(numbers, longest, partial(reducers.reduce_divided, scale))
            if cpu.can_read(numbers):
                return self._record_parts(numbers, MOST_COUNT, reducers.reduce_by_kernel)
            return self._record_parts(numbers, longest, reducers.reduce_by_torch)

    def _record_parts(self, numbers: Tensor, longest: int, reduce: reducers.Reduce) -> Span:
        number, buffer = self._buffer(numbers)
        start = buffer.used
        for part in (numbers,) if numbers.numel() <= longest else torch.split(torch_rows.flat(numbers), longest):
            record = buffer.take()
            if record is None:
                break
            reduce(part, buffer, record)
        return number, start, buffer.used

    def _record_sparse(self, tensor: Tensor, scale: Tensor | None) -> Span | None:
        with torch.no_grad():
            present = tensor.detach().coalesce().values()
        span = self._record_dense(present, scale)
        if span is None:
            return None
        number, start, _ = span
        buffer = self._buffers[number]
        absent = tensor.numel() - present.numel()
        for zeros in (min(MOST_COUNT, absent - done) for done in range(0, absent, MOST_COUNT)):
            record = buffer.take()
            if record is None:
                break
            torch_rows.write_constant(buffer.row(record), zeros)
            if self.with_buckets:
                buffer.counts(record)[stats.MIDDLE].fill_(zeros)
        return number, start, buffer.used
