"""A run as rules read it: the rows of one kind in the newest and in earlier frames, as arrays.

Built once per frame and shared by all rules. Evaluation passes and frames without tensor statistics are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import GRADIENT_NORM, RAW_GRADIENT_NORM, ROOT, SKIPPED, Frame, Site
from tbhooks.data.history import History
from tbhooks.data.stats import COUNT, STATS, WIDTH, Counts, Floats

EARLY = 5
"""How many early frames make a reference value."""
# A frame in which one of these was found is not part of a reference value.
_NOT_USUAL = frozenset({
    "exploding_gradient", "exploding_activation", "collapsed_variance", "divergence", "loss_spike", "non_finite",
})  # fmt: skip

Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Series:
    """The rows of all sites of one kind in some frames, `values[frame, site]`; NaN where a frame lacks the site."""

    sites: tuple[Site, ...]
    values: Floats

    def stat(self, name: str) -> Floats:
        with np.errstate(invalid="ignore", over="ignore"):
            return STATS[name](self.values)

    @property
    def is_masked(self) -> Flags:
        """Where the minimum is a typical mask value, such as -torch.finfo().max, far beyond all other values."""
        low, high = self.stat("min"), self.stat("max")
        far_apart = np.abs(high) <= np.where(_is_mask_value(low), 1e-2, 1e-15) * np.abs(low)
        return np.asarray((low <= -_MIN_MASK) & (far_apart | (_is_mask_value(low) & (low == high))))

    def unmasked(self, stat: str) -> Floats:
        """A magnitude such as `rms`; where some values are masked, the largest of the other values instead."""
        low, high = self.stat("min"), self.stat("max")
        return np.where(self.is_masked, np.where(low == high, np.nan, np.abs(high)), self.stat(stat))

    @property
    def present(self) -> Flags:
        """Whether a frame has the site, `[frame, site]`."""
        return self.values[..., COUNT] >= 0


class RunView:
    """The training frames of a history. `frame` is the newest one, which the rules check."""

    def __init__(self, frames: Sequence[Frame], early: Sequence[Frame] = ()) -> None:
        self.frames = tuple(frames)
        self._first_frames = tuple(early) or self.frames
        self.frame = self.frames[-1]
        self._sites: dict[str, tuple[Site, ...]] = {}
        self._owners: dict[str, frozenset[str]] = {}
        self._rows: dict[tuple[str, int], Floats] = {}

    def sites(self, kind: str) -> tuple[Site, ...]:
        """The newest frame's sites of a kind in the order they were recorded: backward order for gradients."""
        if kind not in self._sites:
            self._sites[kind] = tuple(self.frame.sites[i] for i in self._positions(kind))
        return self._sites[kind]

    def now(self, kind: str) -> Series:
        return self.last(kind, 1)

    def early(self, newest: int = 1) -> tuple[Frame, ...]:
        """The frames of reference values: the first of the run, and the next in which nothing unusual was found.

        The newest frames, which are compared with them, do not count, but the first of the run always does.
        """
        until = self.frames[-min(newest, len(self.frames))].step
        before = [frame for frame in self._first_frames if frame.step < until]
        usual = [frame for frame in before[1:] if not any(f.rule in _NOT_USUAL for f in frame.findings)]
        return (self._first_frames[0], *usual)[:EARLY]

    def start(self, kind: str, newest: int = 1) -> Series:
        """The newest frame's sites in the early frames; the first frame of the run is first."""
        return Series(self.sites(kind), np.stack([self._aligned(kind, frame) for frame in self.early(newest)]))

    def last(self, kind: str, count: int) -> Series:
        """The same sites in the last `count` frames, or in all frames if there are fewer; the newest is last."""
        return self._series(kind, range(max(len(self.frames) - count, 0), len(self.frames)))

    def buckets(self, kind: str) -> Counts:
        """The histograms of the newest frame; an array without columns if it has none."""
        return self.frame.buckets[self._positions(kind)]

    def step(self, frames_ago: int) -> int:
        return self.frames[-1 - frames_ago].step

    def owners(self, kind: str) -> frozenset[str]:
        """Paths of the modules that directly own a parameter among the sites of this kind."""
        if kind not in self._owners:
            self._owners[kind] = frozenset(owner(site.path) for site in self.sites(kind))
        return self._owners[kind]

    @cached_property
    def recurrent(self) -> frozenset[str]:
        """Paths of the RNN, LSTM and GRU modules of torch, recognised by their parameter names."""
        hidden = (s.path for s in self.sites("weight") if s.path.rpartition(".")[2].startswith("weight_hh"))
        return frozenset(owner(path) for path in hidden)

    @property
    def was_skipped(self) -> bool:
        """Whether the GradScaler skipped the newest step, or one since the previous frame."""
        counts = [frame.scalars[SKIPPED] for frame in self.frames[-2:] if SKIPPED in frame.scalars]
        return bool(counts) and counts[-1] > (counts[0] if len(counts) > 1 else 0)

    @cached_property
    def _positions_by_kind(self) -> dict[str, Indices]:
        positions: dict[str, list[int]] = {}
        for i, site in enumerate(self.frame.sites):
            positions.setdefault(site.kind, []).append(i)
        return {kind: np.array(indices, dtype=np.intp) for kind, indices in positions.items()}

    def _positions(self, kind: str) -> Indices:
        return self._positions_by_kind.get(kind, np.zeros(0, dtype=np.intp))

    def _series(self, kind: str, numbers: Sequence[int]) -> Series:
        for number in numbers:
            if (kind, number) not in self._rows:
                self._rows[kind, number] = self._aligned(kind, self.frames[number])
        return Series(self.sites(kind), np.stack([self._rows[kind, number] for number in numbers]))

    def _aligned(self, kind: str, frame: Frame) -> Floats:
        """The rows of a frame in the order of the newest frame's sites."""
        # Site objects live as long as the watch: comparing the tuples compares addresses.
        if frame.sites == self.frame.sites:
            return frame.values[self._positions(kind)]
        rows = np.full((len(self.sites(kind)), WIDTH), np.nan)
        for i, site in enumerate(self.sites(kind)):
            position = frame.position(site.name, site.kind)
            if position is not None:
                rows[i] = frame.values[position]
        return rows


_MIN_MASK = 1e4
# The largest values of float16, bfloat16, float32 and float64; some masks are half of that.
_LARGEST = np.array([65504.0, 2.0**128 * (1 - 2.0**-8), 2.0**128 * (1 - 2.0**-24), np.finfo(np.float64).max])
_MASKS = np.concatenate([_LARGEST, _LARGEST / 2])


def _is_mask_value(values: Floats) -> Flags:
    """Whether each is the largest value of a dtype, half of that, or a power of ten: computed values never are."""
    sizes = np.abs(np.nan_to_num(values, nan=0.0))
    exponents = np.log10(np.maximum(sizes, 1.0))
    is_power = (sizes > 0.99 * _MIN_MASK) & (np.abs(exponents - np.round(exponents)) < 1e-7)
    return np.asarray(is_power | (np.abs(sizes[..., None] / _MASKS - 1) < 1e-3).any(axis=-1))


def median(values: Floats) -> Floats:
    """The median along the last axis without NaN; NaN where all values are NaN."""
    empty = np.isnan(values).all(axis=-1)
    if not empty.any():
        return np.asarray(np.nanmedian(values, axis=-1))
    filled = np.where(np.expand_dims(empty, -1), 0.0, values)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=-1))


def usual_maximum(values: Floats) -> Floats:
    """A reference for what must not grow: the first frame's value or the median of the early ones, the larger."""
    return np.asarray(np.fmax(values[0], median(values.T)))


def in_every_frame(flags: Flags) -> Flags:
    """Which sites are flagged in each frame of `flags[frame, site]`."""
    return np.asarray(flags.all(axis=0))


def total_gradient(frame: Frame) -> float:
    """The norm of all gradients before clipping; after clipping where only that is known."""
    return float(frame.scalars.get(RAW_GRADIENT_NORM, frame.scalars.get(GRADIENT_NORM, np.nan)))


def owner(parameter: str) -> str:
    """The path of the module that owns a parameter."""
    return parameter.rpartition(".")[0] or ROOT


def is_bias(site: Site) -> bool:
    """Decided by the parameter's name: the statistics of a bias look like those of a scale or an embedding."""
    return "bias" in site.path.rpartition(".")[2]


_views: weakref.WeakKeyDictionary[History, RunView] = weakref.WeakKeyDictionary()


def view_of(history: History, evaluations: bool = False) -> RunView | None:
    """The view of a history, built once per frame.

    None if the newest frame has no tensor statistics, or is an evaluation and `evaluations` is false.
    """
    frames = history[:]
    if not frames or not frames[-1].sites:
        return None
    if frames[-1].is_evaluation:
        return RunView(frames[-1:]) if evaluations else None
    view = _views.get(history)
    if view is None or view.frame is not frames[-1]:
        view = _views[history] = RunView(
            [frame for frame in frames if frame.sites and not frame.is_evaluation],
            [frame for frame in history.early if frame.sites],
        )
    return view
