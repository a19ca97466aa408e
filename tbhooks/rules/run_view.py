"""A run as rules look at it: rows of one kind, newest and earlier ones side by side, as arrays.

Built once a frame and shared by all rules. Evaluation passes and frames of scalars alone are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import ROOT, SKIPPED, Frame, Site
from tbhooks.data.history import History
from tbhooks.data.stats import COUNT, STATS, WIDTH, Counts, Floats

Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Series:
    """The rows of one kind's sites in a few frames, `values[frame, site]`; NaN where a frame has no such row."""

    sites: tuple[Site, ...]
    values: Floats

    def stat(self, name: str) -> Floats:
        with np.errstate(invalid="ignore", over="ignore"):
            return STATS[name](self.values)

    @property
    def is_masked(self) -> Flags:
        """Where the least value is one that masks are made of, such as -torch.finfo().max, and no other is so large."""
        low, high = self.stat("min"), self.stat("max")
        far_apart = np.abs(high) <= np.where(_is_of_a_mask(low), 1e-2, 1e-15) * np.abs(low)
        return np.asarray((low <= -_LEAST_MASK) & (far_apart | (_is_of_a_mask(low) & (low == high))))

    def unmasked(self, stat: str) -> Floats:
        """A measure of size, such as `rms`; where some values are masked, the largest of the others stands for it."""
        low, high = self.stat("min"), self.stat("max")
        return np.where(self.is_masked, np.where(low == high, np.nan, np.abs(high)), self.stat(stat))

    @property
    def present(self) -> Flags:
        """Which frames have which row."""
        return self.values[..., COUNT] >= 0


class RunView:
    """The training frames of a history; `frame` is the newest, which is the one to be judged."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = tuple(frames)
        self.frame = self.frames[-1]
        self._places: dict[str, Indices] = {}
        self._sites: dict[str, tuple[Site, ...]] = {}
        self._owners: dict[str, frozenset[str]] = {}
        self._rows: dict[tuple[str, int], Floats] = {}

    def sites(self, kind: str) -> tuple[Site, ...]:
        """The newest frame's sites of a kind, in the order they came in: backwards for gradients."""
        if kind not in self._sites:
            self._sites[kind] = tuple(self.frame.sites[i] for i in self._place(kind))
        return self._sites[kind]

    def now(self, kind: str) -> Series:
        return self.last(kind, 1)

    def first(self, kind: str) -> Series:
        """The same sites in the first frame there is."""
        return self._series(kind, [0])

    def last(self, kind: str, count: int) -> Series:
        """The same sites in the last frames, the newest last; fewer if there are not so many."""
        return self._series(kind, range(max(len(self.frames) - count, 0), len(self.frames)))

    def buckets(self, kind: str) -> Counts:
        """Histograms of the newest frame; without columns if it took none."""
        return self.frame.buckets[self._place(kind)]

    def step(self, frames_ago: int) -> int:
        return self.frames[-1 - frames_ago].step

    def owners(self, kind: str) -> frozenset[str]:
        """Paths of the modules that have a parameter of their own among the sites of this kind."""
        if kind not in self._owners:
            self._owners[kind] = frozenset(owner(site.path) for site in self.sites(kind))
        return self._owners[kind]

    @cached_property
    def recurrent(self) -> frozenset[str]:
        """Paths of the modules that are an RNN, LSTM or GRU of torch, by the names of their weights."""
        hidden = (s.path for s in self.sites("weight") if s.path.rpartition(".")[2].startswith("weight_hh"))
        return frozenset(owner(path) for path in hidden)

    @property
    def was_skipped(self) -> bool:
        """Whether a GradScaler has skipped the newest step, or one since the last frame."""
        counts = [frame.scalars[SKIPPED] for frame in self.frames[-2:] if SKIPPED in frame.scalars]
        return bool(counts) and counts[-1] > (counts[0] if len(counts) > 1 else 0)

    def _place(self, kind: str) -> Indices:
        if not self._places:
            places: dict[str, list[int]] = {}
            for i, site in enumerate(self.frame.sites):
                places.setdefault(site.kind, []).append(i)
            self._places = {name: np.array(found, dtype=np.intp) for name, found in places.items()}
        return self._places.get(kind, np.zeros(0, dtype=np.intp))

    def _series(self, kind: str, numbers: Iterable[int]) -> Series:
        rows = [self._of_frame(kind, number) for number in numbers]
        return Series(self.sites(kind), np.stack(rows))

    def _of_frame(self, kind: str, number: int) -> Floats:
        if (kind, number) not in self._rows:
            self._rows[kind, number] = self._aligned(kind, self.frames[number])
        return self._rows[kind, number]

    def _aligned(self, kind: str, frame: Frame) -> Floats:
        # Site objects live as long as the watch, so that this comparison is one of addresses.
        if frame.sites == self.frame.sites:
            return frame.values[self._place(kind)]
        rows = np.full((len(self.sites(kind)), WIDTH), np.nan)
        for i, site in enumerate(self.sites(kind)):
            place = frame._index.get((site.name, site.kind))
            if place is not None:
                rows[i] = frame.values[place]
        return rows


_LEAST_MASK = 1e4
# The largest numbers of float16, bfloat16, float32 and float64; some masks are half of that.
_LARGEST = np.array([65504.0, 2.0**128 * (1 - 2.0**-8), 2.0**128 * (1 - 2.0**-24), np.finfo(np.float64).max])
_MASKS = np.concatenate([_LARGEST, _LARGEST / 2])


def _is_of_a_mask(numbers: Floats) -> Flags:
    """Whether each is the largest of a format, half of that, or a power of ten: nothing that is computed hits these."""
    sizes = np.abs(np.nan_to_num(numbers, nan=0.0))
    tens = np.log10(np.maximum(sizes, 1.0))
    is_power = (sizes > 0.99 * _LEAST_MASK) & (np.abs(tens - np.round(tens)) < 1e-7)
    return np.asarray(is_power | (np.abs(sizes[..., None] / _MASKS - 1) < 1e-3).any(axis=-1))


def middle(numbers: Floats) -> Floats:
    """The median along the last axis of what is not NaN; NaN where nothing else is."""
    nothing = np.isnan(numbers).all(axis=-1)
    if not nothing.any():
        return np.asarray(np.nanmedian(numbers, axis=-1))
    known = np.where(np.expand_dims(nothing, -1), 0.0, numbers)
    return np.where(nothing, np.nan, np.nanmedian(known, axis=-1))


def in_every_frame(flags: Flags) -> Flags:
    """Which sites have a flag in each frame of `flags[frame, site]`."""
    return np.asarray(flags.all(axis=0))


def owner(parameter: str) -> str:
    """The path of the module a parameter belongs to."""
    return parameter.rpartition(".")[0] or ROOT


def is_bias(site: Site) -> bool:
    """By its name: nothing else in a frame tells it from a scale or an embedding."""
    return "bias" in site.path.rpartition(".")[2]


_examined: weakref.WeakKeyDictionary[History, RunView] = weakref.WeakKeyDictionary()


def view_of(history: History, evaluations: bool = False) -> RunView | None:
    """The run so far; None if the newest frame is of no step, or of an evaluation that nobody asked for."""
    frames = history[:]
    if not frames or not frames[-1].sites:
        return None
    if frames[-1].is_evaluation:
        return RunView(frames[-1:]) if evaluations else None
    known = _examined.get(history)
    if known is None or known.frame is not frames[-1]:
        known = RunView([frame for frame in frames if frame.sites and not frame.is_evaluation])
        _examined[history] = known
    return known
