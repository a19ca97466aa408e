"""A run boiled down to what people look at: a few statistics of every site over the steps, and one document.

The text report, the page and the comparison all show these grids, so that they cannot disagree. Numbers
only: how they look is decided elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks import stats
from tbhooks.frame import EVALUATION, Finding, Frame, Site
from tbhooks.plain import plain
from tbhooks.runs import Run
from tbhooks.runs.scalars import Series, is_of_site
from tbhooks.stats import INFS, NANS, Counts, Floats

DOCUMENT_VERSION = 1
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
SEVERITIES = ("error", "warning", "info")
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


def grids(run: Run) -> list[Grid]:
    """The telling statistics of every kind there is, in the order the kinds came."""
    found = []
    for frames in (run.training, run.evaluations):
        kinds = dict.fromkeys(site.kind for sites in {id(f.sites): f.sites for f in frames}.values() for site in sites)
        for kind in kinds:
            found += _grids_of(kind, frames, TELLING.get(kind.removeprefix(EVALUATION), _OTHERWISE))
    return found


def _grids_of(kind: str, frames: list[Frame], names: tuple[str, ...]) -> list[Grid]:
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
    nothing = np.zeros((0, 0), dtype=np.int64)
    for column, frame in enumerate(with_kind):
        rows, where = targets[id(frame.sites)]
        picked = frame.values[rows]
        bad[where, column] = picked[:, NANS] + picked[:, INFS]
        seen[where, column] = True
        for which, name in enumerate(names):
            values[which, where, column] = stats.stat(name, picked, nothing)
    steps = np.array([frame.step for frame in with_kind], dtype=np.int64)
    return [Grid(kind, name, tuple(order), steps, values[i], bad, seen) for i, name in enumerate(names)]


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


def own_scalars(run: Run) -> dict[str, Series]:
    """What was logged besides the statistics of sites: losses first, then rates and norms, then the rest by name."""

    def importance(tag: str) -> tuple[int, str]:
        places = [i for i, word in enumerate(_SCALARS_FIRST) if word in tag.lower()]
        return (places[0] if places else len(_SCALARS_FIRST), tag)

    tags = (tag for tag, series in run.scalars.items() if len(series.steps) and not is_of_site(tag))
    return {tag: run.scalars[tag] for tag in sorted(tags, key=importance)}


def by_severity(run: Run) -> list[Finding]:
    """The worst first, and of those the earliest."""
    return sorted(run.findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.step))


def document(run: Run) -> dict[str, Any]:
    """The run for machines. Keys:

    - `version`, `run` (the directory), `steps` (`first`, `last`, `logged`; null if there is none), `evaluations`
    - `scalars`: by tag `count`, `first`, `last`, `min`, `max`, `last_step`
    - `sites`: in execution order `path`, `kind`, `index`, `last_step`, and `stats` all statistics of the row there
    - `findings`: the worst first, each as `Finding.to_dict` gives it
    - `problems`: what was wrong with the files, in sentences

    NaN and infinities are the strings "nan", "inf" and "-inf"; a statistic without a value is "nan".
    """
    steps = [frame.step for frame in run.training]
    told: dict[str, Any] = plain({
        "version": DOCUMENT_VERSION,
        "run": str(run.directory),
        "steps": {"first": steps[0], "last": steps[-1], "logged": len(steps)} if steps else None,
        "evaluations": len(run.evaluations),
        "scalars": {tag: _scalar(series) for tag, series in own_scalars(run).items()},
        "sites": _sites(run),
        "findings": [finding.to_dict() for finding in by_severity(run)],
        "problems": list(run.problems),
    })  # fmt: skip
    return told


def as_json(value: Mapping[str, Any]) -> str:
    """One document; other programs' parsers know no NaN."""
    return json.dumps(plain(value), allow_nan=False, indent=1)


def _scalar(series: Series) -> dict[str, float | int]:
    values = series.values
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    return {
        "count": len(values), "first": float(values[0]), "last": float(values[-1]), "min": low, "max": high,
        "last_step": int(series.steps[-1]),
    }  # fmt: skip


def _sites(run: Run) -> list[dict[str, Any]]:
    newest: dict[Site, tuple[Frame, int]] = {}
    for frame in {id(frame.sites): frame for frame in run.frames}.values():
        for i, site in enumerate(frame.sites):
            if site not in newest or newest[site][0].step < frame.step:
                newest[site] = frame, i
    told = []
    columns: dict[int, dict[str, list[float]]] = {}
    for site, (frame, i) in newest.items():
        if id(frame) not in columns:
            columns[id(frame)] = {name: function(frame.values).tolist() for name, function in stats.STATS.items()}
        numbers = {name: column[i] for name, column in columns[id(frame)].items()}
        if site.plain_kind != "update":
            del numbers["ratio"]
        told.append({
            "path": site.path, "kind": site.kind, "index": site.index, "last_step": frame.step, "stats": numbers,
        })  # fmt: skip
    return told
