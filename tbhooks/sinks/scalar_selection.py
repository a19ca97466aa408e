"""Which statistics of a frame become scalars, with their tags and values: the same for all sinks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.data.frame import BELOW_EPSILON, GRADIENT_COSINE, RECORDED_KINDS, SAMPLED, Frame, Site
from tbhooks.data.stats import QUANTILES, STAT_NAMES, Floats
from tbhooks.sinks.scalar_summaries import MOST_TAGS, NonfiniteTensors, Summaries

CORE_SCALARS = {
    "activation": ("mean", "std", "zero_fraction"),
    "gradient": ("norm",),
    "weight": ("norm",),
    "weight_gradient": ("norm",),
    "update": ("ratio",),
    "input": ("mean", "std", "zero_fraction"),
    "functional": ("mean", "std", "zero_fraction"),
    "first_moment": ("norm",),
    "second_moment": ("rms",),
    "normalized_gradient": ("rms",),
    "proposed_update": ("rms",),
}
# Logged for every kind on the steps where they are not zero, so that no NaN goes unnoticed.
NONFINITE_COUNTS = ("nan_count", "inf_count")
# The distributions of updates are in the frame tensors; few readers need their histograms.
HISTOGRAM_KINDS = frozenset(RECORDED_KINDS) - {"update", "normalized_gradient", "proposed_update"}
_OF_STATE = (f"first_moment.{GRADIENT_COSINE}/", f"second_moment.{BELOW_EPSILON}/")

ScalarTable = dict[str, tuple[str, ...]]


class AutoTable(ScalarTable):
    """The table of `scalars="auto"`: the core scalars of every layer, or summaries if those are too many."""


def scalar_table(scalars: object) -> ScalarTable:
    """The statistics of each kind that the `scalars` argument of `watch` selects.

    Raises:
        ArgumentError: for unknown names.

    """
    if isinstance(scalars, str):
        if scalars == "core":
            return dict(CORE_SCALARS)
        if scalars == "auto":
            return AutoTable(CORE_SCALARS)
        if scalars == "all":
            return {k: tuple(name for name in STAT_NAMES if name != "ratio" or k == "update") for k in RECORDED_KINDS}
        scalars = (scalars,)
    if not isinstance(scalars, Iterable):
        raise ArgumentError(f'scalars must be "auto", "core", "all", a list of stat names, or (), got {scalars!r}')
    names = tuple(scalars)
    check_names("stat", names, (*STAT_NAMES, *(f"{kind}.{name}" for kind in RECORDED_KINDS for name in STAT_NAMES)))
    return {
        kind: tuple(name for name in STAT_NAMES if name in names or f"{kind}.{name}" in names)
        for kind in RECORDED_KINDS
    }


class _Entry(NamedTuple):
    """A scalar: its tag, the statistic, and the row it is computed from."""

    tag: str
    stat: str
    row: int


class Scalars(Protocol):
    """A list of tags, and how their values are computed from a frame."""

    tags: list[str]

    def read(self, frame: Frame) -> Floats: ...


def is_summarised(sites: Sequence[Site], table: ScalarTable) -> bool:
    """Whether summaries take the place of the scalars and histograms of these sites: there are too many of them."""
    if not isinstance(table, AutoTable):
        return False
    return sum(1 if site.attention_stat else len(table[site.plain_kind]) for site in sites) > MOST_TAGS


def selected(sites: Sequence[Site], table: ScalarTable) -> Scalars:
    """The scalars that a table selects; only finite values are shown."""
    if is_summarised(sites, table):
        return Summaries(sites, table)
    return Columns([entry for row, site in enumerate(sites) for entry in _selected_of(row, site, table)])


def nonfinite_counts(sites: Sequence[Site], table: ScalarTable) -> Scalars:
    """The counts of NaN and infinity, which are shown where they are not zero."""
    if is_summarised(sites, table):
        return NonfiniteTensors(sites)
    return Columns([entry for row, site in enumerate(sites) for entry in _nonfinite_counts_of(row, site, table)])


def shown_scalars(frame: Frame) -> dict[str, float]:
    """The scalars of a frame that become charts: not the marks of sampled updates, one for each parameter; and those of
    optimizers' states only if they are few.
    """
    of_state = tuple(tag for tag in frame.scalars if tag.startswith(_OF_STATE))
    hidden = (SAMPLED, *_OF_STATE) if len(of_state) > MOST_TAGS else SAMPLED
    return {tag: value for tag, value in frame.scalars.items() if not tag.startswith(hidden)}


def scalars_of(frame: Frame, table: ScalarTable) -> dict[str, float]:
    """All scalars of a frame by their tags, the logged ones first."""
    scalars = shown_scalars(frame)
    chosen, counts = selected(frame.sites, table), nonfinite_counts(frame.sites, table)
    scalars.update((tag, x) for tag, x in zip(chosen.tags, chosen.read(frame).tolist(), strict=True) if np.isfinite(x))
    scalars.update((tag, x) for tag, x in zip(counts.tags, counts.read(frame).tolist(), strict=True) if x)
    return scalars


def _selected_of(row: int, site: Site, table: ScalarTable) -> Iterable[_Entry]:
    """The scalars of a site; entropy and logits of attention have one each, under the name of the attention."""
    names = table[site.plain_kind]
    attention = site.attention_stat if names else None
    if attention is None:
        return [_Entry(f"{site.kind}.{name}/{site.name}", name, row) for name in names]
    name, stat, whose = attention
    return [_Entry(f"{site.kind}.{name}/{whose.name}", stat, row)]


def _nonfinite_counts_of(row: int, site: Site, table: ScalarTable) -> Iterable[_Entry]:
    if site.attention_stat is not None:  # masks are minus infinity there
        return []
    names = [name for name in NONFINITE_COUNTS if name not in table[site.plain_kind]]
    return [_Entry(f"{site.kind}.{name}/{site.name}", name, row) for name in names]


class Columns:
    """Computes the values of scalars from a frame, each statistic once for all rows."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self.tags = [entry.tag for entry in entries]
        self._by_stat: list[tuple[str, Indices, Indices]] = []
        for name in dict.fromkeys(entry.stat for entry in entries):
            positions = [i for i, entry in enumerate(entries) if entry.stat == name]
            self._by_stat.append((name, indices_of(positions), indices_of([entries[i].row for i in positions])))

    def read(self, frame: Frame) -> Floats:
        values = np.empty(len(self.tags))
        for name, positions, rows in self._by_stat:
            counts = frame.buckets[rows] if name in QUANTILES else frame.buckets
            values[positions] = stats.stat(name, frame.values[rows], counts)
        return values


Indices = NDArray[np.intp] | slice


def indices_of(numbers: Sequence[int]) -> Indices:
    """An index of these rows: a slice if they are consecutive, which saves copies."""
    start = numbers[0] if numbers else 0
    if list(numbers) == list(range(start, start + len(numbers))):
        return slice(start, start + len(numbers))
    return np.array(numbers, dtype=np.intp)
