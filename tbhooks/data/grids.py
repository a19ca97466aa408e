"""Statistics over steps: grids of one statistic by site and step, and the order in which scalars are shown.

Reports, comparisons of runs and notebook views all show these, so that they agree. No torch and no TensorBoard.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.frame import EVALUATION, METRIC, RECORDED_KINDS, Frame
from tbhooks.data.roles import GAIN, gains, roles
from tbhooks.data.stats import INFS, NANS, Counts, Floats

MAIN_STATS: Mapping[str, tuple[str, ...]] = {
    "activation": ("std", "zero_fraction"),
    "gradient": ("norm",),
    "weight": ("norm",),
    "weight_gradient": ("norm",),
    "update": ("ratio",),
    "input": ("std", "zero_fraction"),
    "functional": ("std", "zero_fraction"),
    "first_moment": ("norm",),
    "second_moment": ("rms",),
    "normalized_gradient": ("rms",),
    "proposed_update": ("rms",),
}
_DEFAULT_STATS = ("std",)
_RATIOS = ("ratio", GAIN)
_SUMMARY = "summary."
_SCALARS_FIRST = ("loss", "train.lr", "train.grad_norm")


@dataclass(frozen=True, eq=False)
class Grid:
    """One statistic of all sites of a kind: one row per site in execution order, one column per step.

    A value is NaN where the step does not have the site, or the site not the statistic.
    """

    kind: str
    stat: str
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    values: Floats
    bad: Counts
    """The number of NaN and infinite elements."""
    seen: NDArray[np.bool_]
    """Whether the step has the site."""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.stat.replace('_', ' ')}"

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        """Where elements are not finite. A ratio without a reference is undefined, and not counted."""
        return self.bad > 0 if self.stat in _RATIOS else (self.bad > 0) | (self.seen & ~np.isfinite(self.values))

    @cached_property
    def undefined(self) -> NDArray[np.bool_]:
        """Where a ratio has no reference: the weight was zero, or the module is the first of its role."""
        if self.stat not in _RATIOS:
            return np.zeros(self.values.shape, dtype=bool)
        return np.asarray(self.seen & np.isnan(self.values) & (self.bad == 0))

    def row(self, name: str) -> int | None:
        """The row of a site, or None."""
        return self._rows.get(name)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def by_role(self) -> Grid:
        """One row per role with the median of its modules, NaN left out; `bad` adds up."""
        found = roles(self.names)
        finite = np.where(np.isfinite(self.values), self.values, np.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a median without any number
            medians = [np.nanmedian(finite[list(role.members)], axis=0) for role in found]
        sizes = {role.name: len(role.members) for role in found}
        return replace(
            self,
            names=tuple(name if size == 1 else f"{name} ({size})" for name, size in sizes.items()),
            values=np.array(medians).reshape(len(found), -1),
            bad=np.array([self.bad[list(role.members)].sum(axis=0) for role in found]).reshape(len(found), -1),
            seen=np.array([self.seen[list(role.members)].any(axis=0) for role in found]).reshape(len(found), -1),
        )

    def thinned(self, most: int) -> Grid:
        """The grid with at most this many columns. Each has the value furthest from zero of the steps it stands for."""
        n = len(self.steps)
        if n <= most:
            return self
        starts = (np.arange(most) * n) // most
        size = np.where(np.isnan(self.values), -1.0, np.abs(self.values))
        picked = np.empty((len(self.names), most))
        for column, (start, end) in enumerate(zip(starts, [*starts[1:], n], strict=True)):
            furthest = size[:, start:end].argmax(axis=1) + start
            picked[:, column] = self.values[np.arange(len(self.names)), furthest]
        bad, seen = np.add.reduceat(self.bad, starts, axis=1), np.logical_or.reduceat(self.seen, starts, axis=1)
        return replace(self, steps=self.steps[starts], values=picked, bad=bad, seen=seen)


def grids(frames: Sequence[Frame]) -> list[Grid]:
    """The main statistics of every kind in these frames, in order of appearance; evaluations after training."""
    made = []
    for phase in (False, True):
        chosen = [frame for frame in frames if frame.is_evaluation == phase]
        kinds = dict.fromkeys(site.kind for sites in {id(f.sites): f.sites for f in chosen}.values() for site in sites)
        for kind in kinds:
            made += grids_of(kind, chosen, MAIN_STATS.get(kind.removeprefix(EVALUATION), _DEFAULT_STATS))
    return made


def grids_of(kind: str, frames: list[Frame], names: tuple[str, ...]) -> list[Grid]:
    """Grids of these statistics of one kind. Quantiles are NaN for frames without histograms."""
    tuples = {id(frame.sites): frame.sites for frame in frames}
    of_kind = {key: [(i, s) for i, s in enumerate(sites) if s.kind == kind] for key, sites in tuples.items()}
    order: dict[str, int] = {}
    for indexed in of_kind.values():
        for _, site in indexed:
            order.setdefault(site.name, len(order))
    order = {name: i for i, name in enumerate(_forward_first(kind, list(order), frames))}
    targets = {
        key: (_integers(i for i, _ in indexed), _integers(order[site.name] for _, site in indexed))
        for key, indexed in of_kind.items()
    }
    with_kind = [frame for frame in frames if len(targets[id(frame.sites)][0])]
    shape = (len(order), len(with_kind))
    values, bad = np.full((len(names), *shape), np.nan), np.zeros(shape, dtype=np.int64)
    seen = np.zeros(shape, dtype=bool)
    for column, frame in enumerate(with_kind):
        rows, where = targets[id(frame.sites)]
        picked = frame.values[rows]
        bad[where, column] = picked[:, NANS] + picked[:, INFS]
        seen[where, column] = True
        for which, name in enumerate(names):
            row_stat = "rms" if name == GAIN else name
            values[which, where, column] = stats.stat(row_stat, picked, _buckets(frame, rows, name))
    if GAIN in names:
        values[names.index(GAIN)] = gains(list(order), values[names.index(GAIN)])
    steps = np.array([frame.step for frame in with_kind], dtype=np.int64)
    return [Grid(kind, name, tuple(order), steps, values[i], bad, seen) for i, name in enumerate(names)]


def _buckets(frame: Frame, rows: NDArray[np.intp], name: str) -> Counts:
    """The histograms if the statistic needs them, or none: those of a stored frame must be unpacked."""
    return frame.buckets[rows] if name in stats.QUANTILES else np.zeros((len(rows), 0), dtype=np.int64)


def _forward_first(kind: str, names: list[str], frames: list[Frame]) -> list[str]:
    """Gradients are captured from the last layer to the first; they are shown in the order of activations."""
    if not kind.endswith("gradient") or kind.endswith("weight_gradient"):
        return names
    forward = kind.removesuffix("gradient") + "activation"
    tuples = {id(frame.sites): frame.sites for frame in frames}.values()
    known = dict.fromkeys(site.name for sites in tuples for site in sites if site.kind == forward)
    position = {name: i for i, name in enumerate(known)}
    return sorted(names, key=lambda name: position.get(name, len(position)))


def _integers(numbers: Iterable[int]) -> NDArray[np.intp]:
    return np.fromiter(numbers, dtype=np.intp)


@lru_cache(maxsize=1 << 16)
def is_of_site(tag: str) -> bool:
    """Whether a scalar is a statistic of one site, such as `activation.std/encoder.0`, or a summary of such ones."""
    what, slash, _ = tag.removeprefix(_SUMMARY).partition("/")
    return bool(slash) and what.rpartition(".")[0].removeprefix(EVALUATION) in RECORDED_KINDS


def own_scalars(tags: Iterable[str]) -> list[str]:
    """Scalars that are not statistics of sites: losses first, then learning rates and gradient norms, then by name.

    Metrics come last: there may be one for each layer.
    """

    def importance(tag: str) -> tuple[int, str]:
        if tag.removeprefix(EVALUATION).startswith(METRIC):
            return len(_SCALARS_FIRST) + 1, tag
        matches = (i for i, word in enumerate(_SCALARS_FIRST) if word in tag.lower())
        return (next(matches, len(_SCALARS_FIRST)), tag)

    return sorted((tag for tag in tags if not is_of_site(tag)), key=importance)
