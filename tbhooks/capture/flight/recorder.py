"""The flight recorder of one watch: writes a row into the ring at every step, and dumps the ring when asked to.

All state of the recorder is in one object, which does nothing until it is started. Rows are written in the training
thread, without a copy and without a sync. Other threads may only request a dump. The training thread makes it when the
step ends: one copy to the host, of which the background thread makes a `Flight`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture.autograd import profiler_label, without_dispatch_modes
from tbhooks.capture.flight.gradients import GradientNorms
from tbhooks.capture.flight.range_monitor import RangeMonitor
from tbhooks.capture.flight.ring import MOST_NUMBERS, SAMPLES, DeviceRing
from tbhooks.capture.flight.rows import FOUND_INF, UNSCALE, FlightCopy, RingCopy, Row
from tbhooks.capture.recording.packed_step import Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.step_samples import WorstSamples
from tbhooks.capture.schedule import Bursts
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.data.artifacts import Artifact
from tbhooks.data.artifacts.flights import Named
from tbhooks.data.frame import SCALE
from tbhooks.data.self_report import Report
from tbhooks.reduction import pinned

DETAILS = ("parameters", "global")
# The dumps of a run are bounded. What is left out is counted and written when the watch closes.
MOST_DUMPS = 16
MOST_BYTES = 64 << 20
# A larger ring keeps only global numbers.
LARGEST_RING = 64 << 20
MOST_REASONS = 3
MOST_SCALARS = "a row of the flight recorder has no room for more scalars on a device; some are left out"

Send = Callable[[FlightCopy], None]


@dataclass(frozen=True)
class Request:
    """A dump that somebody wants."""

    reason: str
    is_automatic: bool
    """Whether nobody asked for it: a finding, or a number that left its range."""
    named: Named | None = None
    """The step and the parameter that a finding names, if gradients do not show what it found."""


class FlightRecorder:
    """Off until `start` is called."""

    def __init__(
        self, model: weakref.ref[nn.Module], groups: GroupNumbers, bursts: Bursts, rank: int, report: Report
    ) -> None:
        self.is_started = self.is_paused = False
        self.left_out: list[str] = []
        """The reasons of dumps that were not made, because there were too many."""
        self._groups, self._bursts, self._rank, self._report = groups, bursts, rank, report
        self._gradients = GradientNorms(model, report)
        self._monitor = RangeMonitor()
        self._requests: deque[Request] = deque()
        self._send: Send = lambda _copy: None
        self._steps, self._is_global, self._burst_steps = 0, False, 0
        self._rings: dict[torch.device, DeviceRing] = {}
        self._rows: deque[Row] = deque()
        self._open: Row | None = None
        self._count = 0
        self._capacity = 0
        # How many dumps and bytes there were, the last step in a dump, and the rows since the last automatic one.
        self._dumps = self._bytes = 0
        self._dumped_until = -1
        self.is_end_dumped = False
        """Whether there was a dump because training failed."""
        self._rows_since_automatic: int | None = None
        self._thread = 0
        # The newest row that the monitor knows.
        self._monitored = -1

    def start(self, steps: int, detail: str, burst_steps: int, send: Send) -> None:
        """Begins to record. `send` is called with each dump; `burst_steps` are logged after an automatic one."""
        self._steps, self._is_global, self._burst_steps, self._send = steps, detail == "global", burst_steps, send
        self._rows = deque(maxlen=steps)
        self._open = None
        self._rings = {}
        self._thread = threading.get_ident()
        self.is_started = True

    def sizes(self) -> tuple[int, int]:
        """The bytes that a logged step copies more, and those of a dump, if all parameters are on one device."""
        slots, norms = self._steps + 1, max(len(self._gradients.find_parameters()), 1)
        norms = 1 if self._is_global else norms
        return 4 * slots * (1 + MOST_NUMBERS), slots * (4 * (norms + MOST_NUMBERS + SAMPLES) + 8 * SAMPLES)

    @property
    def is_on(self) -> bool:
        """Whether steps are recorded now."""
        return self.is_started and not self.is_paused

    # Rows, in the training thread.

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool, step: int) -> None:
        """Writes the gradients that the optimizer is about to use. A closure computes them inside the step."""
        if self.is_on:
            with self._report.guarded("flight recorder"), torch.no_grad(), without_dispatch_modes():
                row = self._row(step)
                for group, name in zip(optimizer.param_groups, self._groups.of(optimizer), strict=True):
                    self._write(row, f"train.lr/{name}", group.get("lr"))
                self._write(row, UNSCALE, getattr(optimizer, "grad_scale", None))
                self._write(row, FOUND_INF, getattr(optimizer, "found_inf", None))
                if not has_closure:
                    self._write_norms(row, optimizer)

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool, step: int) -> None:
        if self.is_on and has_closure:
            with self._report.guarded("flight recorder"), torch.no_grad(), without_dispatch_modes():
                self._write_norms(self._row(step), optimizer)

    def on_scale(self, scale: Tensor, step: int) -> None:
        """A GradScaler with this scale is about to step."""
        if self.is_on:
            with torch.no_grad(), without_dispatch_modes():
                self._write(self._row(step), SCALE, scale)

    def scalar(self, tag: str, value: Tensor | float, step: int, is_late: bool) -> None:
        """The user has logged a scalar, in the open step or, `is_late`, to the one that has ended."""
        if self.is_on:
            with torch.no_grad(), without_dispatch_modes():
                ended = self._rows[-1] if is_late and self._rows else None
                self._write(ended if ended is not None and not ended.has(tag) else self._row(step), tag, value)

    def samples(self, worst: WorstSamples, step: int) -> None:
        """The user has shown the values of samples; `step` is the number of the step they belong to."""
        if not self.is_on:
            return
        with self._report.guarded("flight recorder"), torch.no_grad():
            row = self._rows[-1] if self._rows and self._rows[-1].number == step else self._row(step)
            ring, device = self._ring(worst.values), worst.values.device
            known = row.samples if row.samples is not None and row.samples[0] == device else None
            batch = None if known is None else known[2]
            positions = worst.positions // worst.per_sample
            ids = worst.ids if worst.ids is not None else positions + worst.first // worst.per_sample
            if worst.host_ids is not None:
                ids, batch = positions + len(batch or ()), (*(batch or ()), *worst.host_ids)
            if known is None:
                count = ring.write_samples(row.slot, worst.values, ids)
            else:
                count = ring.merge_samples(row.slot, known[1], worst.values, ids)
            row.samples = device, count, batch

    def step_ended(self, step: int, label: int) -> None:
        """Completes the row of the step, and makes the dump that was requested, if any."""
        if self.is_on:
            with self._report.guarded("flight recorder"), without_dispatch_modes():
                row = self._row(step)
                row.label, self._open, self._thread = label, None, threading.get_ident()
                for device, ring in self._rings.items():
                    ring.finish(row.slot, row.ends.get(device, 0))
                self._rows.append(row)
                if self._rows_since_automatic is not None:
                    self._rows_since_automatic += 1
                self._dump_requested(label)

    def relabel(self, label: int) -> None:
        """The user has given the step that has ended another number."""
        if self._rows:
            self._rows[-1].label = label

    def _row(self, step: int) -> Row:
        if self._open is None or self._open.number != step:
            self._open = Row(step, self._count % (self._steps + 1))
            self._count += 1
        return self._open

    def _write(self, row: Row, tag: str, value: object) -> None:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            ring = self._ring(value)
            if ring.write_number(row.slot, tag, value):
                row.on_device[tag] = value.device
            else:
                self._report.log_once(MOST_SCALARS)
        elif isinstance(value, Tensor | float | int):
            row.host[tag] = float(value.detach() if isinstance(value, Tensor) else value)

    def _write_norms(self, row: Row, optimizer: Optimizer) -> None:
        with profiler_label("flight"):
            found = self._gradients.read(optimizer)
            self._check_size()
            for columns, norms in found:
                if self._is_global:
                    columns, norms = (), [torch.linalg.vector_norm(torch.stack(norms))]  # noqa: PLW2901
                ring, device = self._ring(norms[0]), norms[0].device
                start = next((at for where, at, of in row.segments if (where, of) == (device, columns) and of), None)
                if start is None:
                    start = row.ends.get(device, 0)
                    if start + len(norms) > ring.norms:
                        continue
                    row.segments.append((device, start, columns))
                    row.ends[device] = start + len(norms)
                ring.write_norms(row.slot, start, norms)

    def _check_size(self) -> None:
        """If parameters were added to the model, the rings start again, with room for them."""
        if len(self._gradients.names) > self._capacity or not self._capacity:
            self._gradients.find_parameters()
            self._capacity = max(len(self._gradients.names), 1)
            size = 4 * self._capacity * (self._steps + 1)
            if size > LARGEST_RING and not self._is_global:
                self._is_global = True
                self._report.log_once(
                    f"a flight recorder of {self._steps} steps and {self._capacity} parameters would take "
                    f'{size >> 20} MB on the device: it keeps only global norms, as with detail="global"'
                )
            self._rings = {}
            self._rows.clear()
            if self._open is not None:
                self._open.segments, self._open.ends, self._open.on_device = [], {}, {}

    def _ring(self, like: Tensor) -> DeviceRing:
        """The ring on the device of a tensor."""
        self._check_size()
        if like.device not in self._rings:
            self._rings[like.device] = DeviceRing(like, self._steps + 1, self._capacity)
        return self._rings[like.device]

    # What a logged step copies anyway.

    def add_to_copy(self, recorder: Recorder) -> None:
        """Adds the loss and the gradient norm of every step since the last logged one to the copy of this one. The
        background thread compares them with their recent range.
        """
        rows = self._take_unmonitored() if self.is_on else []
        if not rows:
            return
        with self._report.guarded("flight recorder"), torch.no_grad():
            attached = {device: recorder.attach(ring.summary()) for device, ring in self._rings.items()}
            columns = {device: dict(ring.columns) for device, ring in self._rings.items()}

            def observe(read: Read) -> Sequence[Artifact]:
                self._observe(rows, {device: read(what) for device, what in attached.items()}, columns)
                return ()

            recorder.artifact(observe)

    def _take_unmonitored(self) -> list[Row]:
        """The rows that the monitor has not seen yet. The first rank has a monitor."""
        if self._rank != 0:
            return []
        rows = [row for row in self._rows if row.number > self._monitored and row.label >= 0]
        if rows:
            self._monitored = rows[-1].number
        return rows

    def _observe(
        self, rows: Sequence[Row], numbers: dict[torch.device, np.ndarray], columns: dict[torch.device, dict[str, int]]
    ) -> None:
        """In the background thread."""
        tags = [tag for row in rows for tag in (*row.host, *row.on_device) if "loss" in tag.lower()]
        tag = "train/loss" if "train/loss" in tags else next(iter(tags), None)

        def number(row: Row, tag: str | None) -> float | None:
            if tag is None or tag not in row.on_device:
                return None if tag is None else row.host.get(tag)
            device = row.on_device[tag]
            return float(numbers[device][row.slot, 1 + columns[device][tag]])

        for row in rows:
            devices = dict.fromkeys(device for device, _, _ in row.segments)
            squares = sum(float(numbers[device][row.slot, 0]) ** 2 for device in devices)
            norm = squares**0.5 / (number(row, UNSCALE) or 1.0) if row.segments else None
            if number(row, FOUND_INF):  # a fused optimizer skips the step
                norm = None
            reason = self._monitor.observe(row.label, number(row, tag), norm)
            if reason is not None:
                self.request(reason, is_automatic=True)

    # Dumps.

    def request(self, reason: str, *, is_automatic: bool = False, named: Named | None = None) -> None:
        """Asks for a dump at the end of the running step. Any thread may call it, and a signal handler."""
        if self.is_started:
            self._requests.append(Request(reason, is_automatic, named))

    def dump(self, reason: str, step: int, *, at_end: bool = False) -> None:
        """Dumps now in the training thread, or `at_end`; for another thread when the step ends."""
        self.request(reason)
        if threading.get_ident() != self._thread and not at_end:
            return
        self.is_end_dumped = at_end
        with self._report.guarded("flight recorder"), without_dispatch_modes():
            self._dump_requested(step)

    def finish(self) -> None:
        """After the last step, in the background thread: judges the steps after the last logged one, and makes the dump
        that is due, unless one was made because training failed.
        """
        if not self.is_started or self.is_end_dumped or not self._rows:
            return
        with torch.no_grad():
            rows = self._take_unmonitored()
            if rows:
                copies = {device: ring.copied_summary() for device, ring in self._rings.items()}
                self._observe(rows, copies, {device: ring.columns for device, ring in self._rings.items()})
            self._open = None
            self._dump_requested(self._rows[-1].label)

    def _dump_requested(self, step: int) -> None:
        requests: list[Request] = []
        while self._requests:
            requests.append(self._requests.popleft())
        if not requests:
            return
        asked = [request for request in requests if not request.is_automatic]
        since = self._rows_since_automatic
        if not asked and since is not None and since < self._steps // 4:
            return  # the same accident: most of its rows are in the last dump
        reason = _joined([request.reason for request in asked or requests])
        named = next((request.named for request in asked or requests if request.named is not None), None)
        size = sum(ring.nbytes for ring in self._rings.values())
        if self._dumps >= MOST_DUMPS or self._bytes + size > MOST_BYTES:
            self.left_out.append(f"step {step}: {reason}")
            self._report.log_once(
                f"the flight recorder has made {self._dumps} dumps of {self._bytes >> 20} MB in all, and makes no more"
            )
            return
        if not asked:
            self._rows_since_automatic = 0
            if self._burst_steps:
                self._bursts.ask(self._burst_steps)
        self._dumps, self._bytes = self._dumps + 1, self._bytes + size
        self._send(self._copy(step, reason, named))

    def _copy(self, step: int, reason: str, named: Named | None) -> FlightCopy:
        """Starts the copy of all rings, one for each device."""
        rows = list(self._rows)
        if self._open is not None:  # the step that is running: what it has so far
            self._open.label = step
            rows.append(self._open)
        rings = {}
        with torch.no_grad(), profiler_label("flight dump"):
            for device, ring in self._rings.items():
                with pinned.on_device(device):
                    copied = pinned.download(ring.packed())
                rings[device] = RingCopy(copied, self._steps + 1, ring.norms, dict(ring.columns))
        new_after, self._dumped_until = self._dumped_until, max([self._dumped_until, *(row.label for row in rows)])
        model_note = "" if not self._is_global else "Only global norms were recorded."
        return FlightCopy(
            step, self._rank, reason, [_frozen(row) for row in rows], list(self._gradients.names), rings, new_after,
            model_note, named,
        )  # fmt: skip


def _joined(reasons: Sequence[str]) -> str:
    """The first reasons, and how many more there are."""
    distinct = list(dict.fromkeys(reasons))
    more = f"; and {len(distinct) - MOST_REASONS} more" if len(distinct) > MOST_REASONS else ""
    return "; ".join(distinct[:MOST_REASONS]) + more


def _frozen(row: Row) -> Row:
    """A copy of what the host knows of a row: late scalars may still be added to it."""
    return Row(
        row.number, row.slot, row.label, list(row.segments), dict(row.ends), dict(row.host), dict(row.on_device),
        row.samples,
    )  # fmt: skip
