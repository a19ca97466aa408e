"""Numbers over the steps, from frames alone: grids of one statistic by site and step, and which scalars matter first.

The report, the page, the comparison of runs and the notebook's views all show these, so that they cannot disagree.
Numbers only: how they look is decided elsewhere, and nothing here needs torch or TensorBoard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.frame import ALL_KINDS, EVALUATION, Frame
from tbhooks.data.stats import INFS, NANS, Counts, Floats

TELLING: Mapping[str, tuple[str, ...]] = {
    "activation": ("std", "zero_fraction"),
    "gradient": ("norm",),
    "weight": ("norm",),
    "weight_gradient": ("norm",),
    "update": ("ratio",),
    "input": ("std", "zero_fraction"),
    "functional": ("std", "zero_fraction"),
}
_OTHERWISE = ("std",)
_SCALARS_FIRST = ("loss", "train.lr", "train.grad_norm")


@dataclass(frozen=True, eq=False)
class Grid:
    """One statistic of every site of a kind, a row a site in execution order, a column a step.

    A value is NaN where the site was not seen or the statistic has none; `bad` counts NaN and infinite elements.
    """

    kind: str
    stat: str
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    values: Floats
    bad: Counts
    seen: NDArray[np.bool_]

    @property
    def title(self) -> str:
        return f"{self.kind} {self.stat.replace('_', ' ')}"

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        """Where something was seen that is not finite; a ratio to a weight of zero is nothing wrong."""
        return self.bad > 0 if self.stat == "ratio" else (self.bad > 0) | (self.seen & ~np.isfinite(self.values))

    def row(self, name: str) -> int | None:
        return self._rows.get(name)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def thinned(self, most: int) -> Grid:
        """At most so many columns; each shows the value furthest from zero of the steps it stands for."""
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
    """The telling statistics of every kind there is, in the order the kinds came; evaluations after training."""
    found = []
    for phase in (False, True):
        chosen = [frame for frame in frames if frame.is_evaluation == phase]
        kinds = dict.fromkeys(site.kind for sites in {id(f.sites): f.sites for f in chosen}.values() for site in sites)
        for kind in kinds:
            found += grids_of(kind, chosen, TELLING.get(kind.removeprefix(EVALUATION), _OTHERWISE))
    return found


def grids_of(kind: str, frames: list[Frame], names: tuple[str, ...]) -> list[Grid]:
    """Statistics of one kind; quantiles are known where a frame has its buckets."""
    tuples = {id(frame.sites): frame.sites for frame in frames}
    places = {key: [(i, s) for i, s in enumerate(sites) if s.kind == kind] for key, sites in tuples.items()}
    order: dict[str, int] = {}
    for found in places.values():
        for _, site in found:
            order.setdefault(site.name, len(order))
    order = {name: i for i, name in enumerate(_forward_first(kind, list(order), frames))}
    targets = {
        key: (_integers(i for i, _ in found), _integers(order[site.name] for _, site in found))
        for key, found in places.items()
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
            values[which, where, column] = stats.stat(name, picked, _buckets(frame, rows, name))
    steps = np.array([frame.step for frame in with_kind], dtype=np.int64)
    return [Grid(kind, name, tuple(order), steps, values[i], bad, seen) for i, name in enumerate(names)]


def _buckets(frame: Frame, rows: NDArray[np.intp], name: str) -> Counts:
    """None unless they are needed: those of a stored frame are unpacked first."""
    return frame.buckets[rows] if name in stats.QUANTILES else np.zeros((len(rows), 0), dtype=np.int64)


def _forward_first(kind: str, names: list[str], frames: list[Frame]) -> list[str]:
    """Gradients come last layer first; beside activations they are read in the same order."""
    if not kind.endswith("gradient") or kind.endswith("weight_gradient"):
        return names
    forward = kind.removesuffix("gradient") + "activation"
    tuples = {id(frame.sites): frame.sites for frame in frames}.values()
    known = dict.fromkeys(site.name for sites in tuples for site in sites if site.kind == forward)
    place = {name: i for i, name in enumerate(known)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _integers(numbers: Iterable[int]) -> NDArray[np.intp]:
    return np.fromiter(numbers, dtype=np.intp)


@lru_cache(maxsize=1 << 16)
def is_of_site(tag: str) -> bool:
    """Whether a scalar speaks of one site: `activation.std/encoder.0`."""
    what, slash, _ = tag.partition("/")
    return bool(slash) and what.rpartition(".")[0].removeprefix(EVALUATION) in ALL_KINDS


def own_scalars(tags: Iterable[str]) -> list[str]:
    """Scalars besides the statistics of sites: losses first, then rates and norms, then the rest by name."""

    def importance(tag: str) -> tuple[int, str]:
        places = [i for i, word in enumerate(_SCALARS_FIRST) if word in tag.lower()]
        return (places[0] if places else len(_SCALARS_FIRST), tag)

    return sorted((tag for tag in tags if not is_of_site(tag)), key=importance)
