"""What the host knows of the rows of the flight recorder, and how a dump is made of the copied rings.

The second part runs in the background thread. It reads host memory only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tbhooks.capture.flight.ring import MOST_NUMBERS, SAMPLES
from tbhooks.data.artifacts.flights import Flight, Named, SampleId
from tbhooks.data.stats import Floats
from tbhooks.reduction.pinned import HostCopy

# Numbers of a fused optimizer with a GradScaler: it divides gradients by the scale, and skips a step on the device.
UNSCALE, FOUND_INF = "grad_scale", "found_inf"


@dataclass(eq=False)
class Row:
    """One step in the ring."""

    number: int
    """How many steps the clock had counted when it began."""
    slot: int
    label: int = -1
    segments: list[tuple[torch.device, int, tuple[int, ...]]] = field(default_factory=list)
    """The norms in it: the device, the first column of the ring, and the parameters; none of those with global norms.
    """
    ends: dict[torch.device, int] = field(default_factory=dict)
    """The column behind the last norm, by device."""
    host: dict[str, float] = field(default_factory=dict)
    """Scalars that the host knows."""
    on_device: dict[str, torch.device] = field(default_factory=dict)
    """The device of each other scalar."""
    samples: tuple[torch.device, int, tuple[SampleId, ...] | None] | None = None
    """The device and the number of its samples. If the host knows the ids of the batch, those: then the ids in the ring
    are positions among them."""

    def has(self, tag: str) -> bool:
        return tag in self.host or tag in self.on_device


@dataclass(frozen=True)
class RingCopy:
    """The rows of one ring on their way to the host."""

    copied: HostCopy
    slots: int
    norms: int
    columns: dict[str, int]

    def arrays(self) -> tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """The values [slot, norms + scalars + samples] and the ids [slot, samples]."""
        content = np.asarray(self.copied.tensor).tobytes()
        width = self.norms + MOST_NUMBERS + SAMPLES
        values = np.frombuffer(content, np.float32, self.slots * width).reshape(self.slots, width)
        ids = np.frombuffer(content, np.int64, self.slots * SAMPLES, self.slots * width * 4)
        return values.astype(np.float64), ids.reshape(self.slots, SAMPLES)


@dataclass(frozen=True)
class FlightCopy:
    """A dump whose copy was started."""

    step: int
    rank: int
    reason: str
    rows: Sequence[Row]
    names: Sequence[str]
    rings: dict[torch.device, RingCopy]
    new_after: int
    note: str
    named: Named | None = None
    time: float = field(default_factory=time.time)

    @property
    def nbytes(self) -> int:
        return sum(ring.copied.nbytes for ring in self.rings.values())

    def flight(self) -> Flight:
        """Waits for the copy, and makes the dump."""
        for ring in self.rings.values():
            ring.copied.wait()
        arrays = {device: ring.arrays() for device, ring in self.rings.items()}
        tags = list(dict.fromkeys(tag for row in self.rows for tag in (*row.host, *row.on_device)))
        scalars = {tag: np.full(len(self.rows), np.nan) for tag in tags}
        logged = {tag: np.array([row.has(tag) for row in self.rows], dtype=bool) for tag in tags}
        norms = np.full((len(self.rows), len(self.names)), np.nan)
        squares = np.full(len(self.rows), np.nan)
        samples = []
        for i, row in enumerate(self.rows):
            for tag, number in row.host.items():
                scalars[tag][i] = number
            for tag, device in row.on_device.items():
                ring = self.rings[device]
                scalars[tag][i] = arrays[device][0][row.slot, ring.norms + ring.columns[tag]]
            for device, start, columns in row.segments:
                found = arrays[device][0][row.slot, start : start + max(len(columns), 1)]
                found = np.where(np.isfinite(found), found, np.inf) / (scalars[UNSCALE][i] if row.has(UNSCALE) else 1.0)
                if scalars.get(FOUND_INF, np.zeros(i + 1))[i] > 0:
                    continue
                if columns:
                    norms[i, list(columns)] = found
                squares[i] = np.nansum([squares[i], np.square(found).sum()])
            samples.append(self._samples(row, arrays))
        for tag in (UNSCALE, FOUND_INF):
            scalars.pop(tag, None)
            logged.pop(tag, None)
        with_norms = [] if not len(norms) else [int(j) for j in np.flatnonzero(~np.isnan(norms).all(axis=0))]
        return Flight(
            self.step, self.time, self.rank, self.reason, np.array([row.label for row in self.rows], dtype=np.int64),
            scalars, tuple(self.names[j] for j in with_norms), norms[:, with_norms], np.sqrt(squares), logged,
            tuple(samples), self.new_after, self.note, self.named,
        )  # fmt: skip

    def _samples(
        self, row: Row, arrays: dict[torch.device, tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]]
    ) -> tuple[tuple[SampleId, float], ...]:
        if row.samples is None:
            return ()
        device, count, batch = row.samples
        values, ids = arrays[device]
        start = self.rings[device].norms + MOST_NUMBERS
        worst = zip(map(int, ids[row.slot, :count]), map(float, values[row.slot, start : start + count]), strict=True)
        return tuple((one if batch is None else batch[one], value) for one, value in worst)
