"""A run as rules read it: the rows of one kind in the newest and in earlier frames, as arrays.

Built once per frame and shared by all rules. Evaluation passes and frames without tensor statistics are left out.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import chain, compress, count, repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import GRADIENT_NORM, RAW_GRADIENT_NORM, ROOT, SKIPPED, Frame, Sites
from tbhooks.data.history import History
from tbhooks.data.stats import COUNT, WIDTH, Counts, Floats, Rows

EARLY = 5
"""How many early frames make a reference value."""
# A frame in which one of these was found is not part of a reference value.
_NOT_USUAL = frozenset({
    "exploding_gradient", "exploding_activation", "collapsed_variance", "divergence", "loss_spike", "non_finite",
})  # fmt: skip

Argument = TypeVar("Argument", bound=Hashable)
Result = TypeVar("Result")
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


class Series:
    """The rows of all sites of one kind in some frames, `values[frame, site]`; NaN where a frame lacks the site.

    Everything that is computed of it is kept: several rules ask for the same statistics.
    """

    def __init__(self, sites: Sites, rows: Sequence[Floats], frames: Sequence[Series] = ()) -> None:
        """`frames` are those of single frames, if there are several: their statistics are not computed again."""
        self.sites = sites
        self._rows, self._frames = rows, frames
        self._kept: dict[Hashable, Any] = {}

    @cached_property
    def values(self) -> Floats:
        # Statistics read columns: those of all sites lie side by side.
        columns = self._rows[0][:, None] if len(self._rows) == 1 else np.stack(self._rows, axis=1)
        return columns.transpose(1, 2, 0)

    @cached_property
    def _statistics(self) -> Rows:
        return Rows(self.values)

    def _compute(self, name: str) -> Floats:
        if self._frames:
            return np.concatenate([frame.stat(name) for frame in self._frames])
        with np.errstate(invalid="ignore", over="ignore"):
            return self._statistics.stat(name)

    def stat(self, name: str) -> Floats:
        return self.derived(Series._compute, name)

    @cached_property
    def is_masked(self) -> Flags:
        """Where the minimum is a typical mask value, such as -torch.finfo().max, far beyond all other values."""
        low, high = self.stat("min"), self.stat("max")
        is_low = low <= -_MIN_MASK
        if not is_low.any():  # as nearly always
            return is_low
        far_apart = np.abs(high) <= np.where(_is_mask_value(low), 1e-2, 1e-15) * np.abs(low)
        return np.asarray(is_low & (far_apart | (_is_mask_value(low) & (low == high))))

    def unmasked(self, stat: str) -> Floats:
        """A magnitude such as `rms`; where some values are masked, the largest of the other values instead."""
        if not self.is_masked.any():
            return self.stat(stat)
        low, high = self.stat("min"), self.stat("max")
        return np.where(self.is_masked, np.where(low == high, np.nan, np.abs(high)), self.stat(stat))

    def usual(self, stat: str) -> Floats:
        """The median of a statistic over the frames."""
        return self.derived(_median_of_frames, stat)

    def usual_maximum(self, stat: str) -> Floats:
        """The `usual_maximum` of a statistic without masked values."""
        return self.derived(_usual_maximum, stat)

    def derived(self, function: Callable[[Series, Argument], Result], argument: Argument) -> Result:
        """What a function returns for this series; it is called once, and must not depend on anything else."""
        if (function, argument) not in self._kept:
            self._kept[function, argument] = function(self, argument)
        result: Result = self._kept[function, argument]
        return result

    @property
    def present(self) -> Flags:
        """Whether a frame has the site, `[frame, site]`."""
        return self.values[..., COUNT] >= 0


def _median_of_frames(series: Series, stat: str) -> Floats:
    return median(series.stat(stat).T)


def _usual_maximum(series: Series, stat: str) -> Floats:
    return usual_maximum(series.unmasked(stat))


class RunView:
    """The training frames of a history. `frame` is the newest one, which the rules check."""

    def __init__(
        self, frames: Sequence[Frame], early: Sequence[Frame] = (), before: RunView | None = None,
        formats: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`before` is the view of the frame before, which has what is still the same."""
        self.frames = tuple(frames)
        self.formats = tuple(formats)
        """The number formats that quantizers of the model use."""
        self._first_frames = tuple(early) or self.frames
        self.frame = self.frames[-1]
        self._series: dict[tuple[str, tuple[Frame, ...]], Series] = {}
        self._rows: dict[tuple[str, int], tuple[Floats, Floats]] = {}
        self._columns: dict[Callable[..., float], Floats] = {}
        is_same = before is not None and before.frame.sites is self.frame.sites
        self._before = (before._series, before._rows) if before is not None and is_same else ({}, {})  # noqa: SLF001
        self._frames_before = () if before is None else before.frames
        self._columns_before = {} if before is None else before._columns  # noqa: SLF001

    def sites(self, kind: str) -> Sites:
        """The newest frame's sites of a kind in the order they were recorded: backward order for gradients."""
        return self.frame.sites.of_kind(kind)

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
        return self._of_frames(kind, self.early(newest))

    def last(self, kind: str, count: int) -> Series:
        """The same sites in the last `count` frames, or in all frames if there are fewer; the newest is last."""
        return self._of_frames(kind, self.frames[-count:])

    def of_frame(self, kind: str, frame: Frame) -> Series:
        """The same sites in one frame."""
        return self._of_frames(kind, (frame,))

    def buckets(self, kind: str) -> Counts:
        """The histograms of the newest frame; an array without columns if it has none."""
        return self.frame.buckets[self._positions(kind)]

    def step(self, frames_ago: int) -> int:
        return self.frames[-1 - frames_ago].step

    def column(self, function: Callable[[Frame], float]) -> Floats:
        """One number of every frame, oldest first; only those of new frames are computed."""
        if function not in self._columns:
            known, column = self._columns_before.get(function), np.empty(len(self.frames))
            start = len(self._frames_before) - (len(self.frames) - 1)
            old = self._frames_before[max(start, 0) :] if known is not None else ()
            if known is not None:
                column[: len(old)] = known[max(start, 0) :][: len(self.frames)]
            for i in compress(count(), map(operator.is_not, self.frames, chain(old, repeat(None)))):
                column[i] = function(self.frames[i])
            self._columns[function] = column
        return self._columns[function]

    def owners(self, kind: str) -> frozenset[str]:
        """Paths of the modules that directly own a parameter among the sites of this kind."""
        return self.sites(kind).derived(_owners)

    def flags_at(self, kind: str, flags: Flags, of: str) -> Flags:
        """The flags of another kind's sites, for the sites of `kind` with the same names; false where there is none."""
        partner = self.frame.sites.derived(_partners, kind, of)
        return np.append(flags, False)[partner]

    @property
    def recurrent(self) -> frozenset[str]:
        """Paths of the RNN, LSTM and GRU modules of torch, recognised by their parameter names."""
        return self.sites("weight").derived(_recurrent)

    @property
    def was_skipped(self) -> bool:
        """Whether the GradScaler skipped the newest step, or one since the previous frame."""
        counts = [frame.scalars[SKIPPED] for frame in self.frames[-2:] if SKIPPED in frame.scalars]
        return bool(counts) and counts[-1] > (counts[0] if len(counts) > 1 else 0)

    def _positions(self, kind: str) -> Indices:
        return self.frame.sites.positions.get(kind, np.zeros(0, dtype=np.intp))

    def _of_frames(self, kind: str, frames: tuple[Frame, ...]) -> Series:
        key = (kind, frames)
        if key not in self._series:
            found = self._before[0].get(key)
            self._series[key] = found or self._new_series(kind, frames)
        return self._series[key]

    def _new_series(self, kind: str, frames: tuple[Frame, ...]) -> Series:
        single = [self.of_frame(kind, frame) for frame in frames] if len(frames) > 1 else ()
        return Series(self.sites(kind), [self._aligned(kind, frame) for frame in frames], single)

    def _aligned(self, kind: str, frame: Frame) -> Floats:
        """The rows of a frame in the order of the newest frame's sites, as `[column, site]`."""
        key = (kind, id(frame.values))
        if key not in self._rows:
            # With the array they were taken from, which keeps its id from being given to another one.
            self._rows[key] = self._before[1].get(key) or (
                frame.values,
                np.ascontiguousarray(self._align(kind, frame).T),
            )
        return self._rows[key][1]

    def _align(self, kind: str, frame: Frame) -> Floats:
        # Site objects live as long as the watch: comparing the tuples compares addresses.
        if frame.sites is self.frame.sites or frame.sites == self.frame.sites:
            return frame.values[self._positions(kind)]
        rows = np.full((len(self.sites(kind)), WIDTH), np.nan)
        for i, site in enumerate(self.sites(kind)):
            position = frame.position(site.name, site.kind)
            if position is not None:
                rows[i] = frame.values[position]
        return rows


def _owners(sites: Sites) -> frozenset[str]:
    return frozenset(owner(site.path) for site in sites)


def _recurrent(weights: Sites) -> frozenset[str]:
    hidden = (site.path for site in weights if site.path.rpartition(".")[2].startswith("weight_hh"))
    return frozenset(owner(path) for path in hidden)


def _partners(sites: Sites, kind: str, of: str) -> Indices:
    """For each site of one kind the position of the site with its name among those of another, or -1."""
    position = {name: i for i, name in enumerate(sites.of_kind(of).names)}
    return np.array([position.get(name, -1) for name in sites.of_kind(kind).names], dtype=np.intp)


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
    """The median along the last axis without NaN; NaN where all values are NaN.

    np.nanmedian goes through masked arrays where the axis is short, which takes ten times as long.
    """
    ordered = np.sort(values, axis=-1)  # NaN is last
    size = ordered.shape[-1]
    if size and not np.isnan(ordered[..., -1]).any():
        with np.errstate(invalid="ignore"):
            return ordered[..., size // 2] if size % 2 else (ordered[..., size // 2 - 1] + ordered[..., size // 2]) / 2
    count = np.count_nonzero(~np.isnan(ordered), axis=-1, keepdims=True)
    last = np.maximum(count - 1, 0)
    low, high = (np.take_along_axis(ordered, place, axis=-1)[..., 0] for place in (last // 2, (last + 1) // 2))
    with np.errstate(invalid="ignore"):
        return np.where(count[..., 0] % 2 == 1, high, (low + high) / 2)


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


def is_bias(sites: Sites) -> Flags:
    """Decided by the parameters' names: the statistics of a bias look like those of a scale or an embedding."""
    return sites.derived(_is_bias)


def _is_bias(sites: Sites) -> Flags:
    return np.array(["bias" in site.path.rpartition(".")[2] for site in sites], dtype=bool)


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
            [frame for frame in frames if frame.sites and not frame.sites.are_of_evaluation],
            [frame for frame in history.early if frame.sites],
            view,
            history.formats,
        )
    return view
