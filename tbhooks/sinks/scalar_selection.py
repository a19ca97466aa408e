"""Which statistics of a frame become scalars, their tags and their numbers: the same for every destination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.data.frame import ALL_KINDS, Frame, Site
from tbhooks.data.stats import QUANTILES, STAT_NAMES, Floats

CORE_SCALARS = {
    "activation": ("mean", "std", "zero_fraction"),
    "gradient": ("norm",),
    "weight": ("norm",),
    "weight_gradient": ("norm",),
    "update": ("ratio",),
    "input": ("mean", "std", "zero_fraction"),
    "functional": ("mean", "std", "zero_fraction"),
}
# Logged for any kind on the steps where they are not zero, so that a NaN is never out of sight.
ALARMS = ("nan_count", "inf_count")
# An update's distribution is in the frame; a histogram of it would tell few readers anything.
HISTOGRAM_KINDS = frozenset(ALL_KINDS) - {"update"}

ScalarTable = dict[str, tuple[str, ...]]


def scalar_table(scalars: object) -> ScalarTable:
    """Which stats of each kind become stock scalars, from what the user asked for."""
    if isinstance(scalars, str):
        if scalars == "core":
            return dict(CORE_SCALARS)
        if scalars == "all":
            return {k: tuple(name for name in STAT_NAMES if name != "ratio" or k == "update") for k in ALL_KINDS}
        scalars = (scalars,)
    if not isinstance(scalars, Iterable):
        raise ArgumentError(f'scalars is "core", "all", a list of stat names, or (), not {scalars!r}')
    asked = tuple(scalars)
    check_names("stat", asked, (*STAT_NAMES, *(f"{kind}.{name}" for kind in ALL_KINDS for name in STAT_NAMES)))
    return {
        kind: tuple(name for name in STAT_NAMES if name in asked or f"{kind}.{name}" in asked) for kind in ALL_KINDS
    }


class _Entry(NamedTuple):
    """A scalar: a statistic of a row, and what it is called."""

    tag: str
    stat: str
    row: int


def asked_for(sites: Sequence[Site], table: ScalarTable) -> Columns:
    """The scalars a table asks for; what is not a finite number is not shown."""
    return Columns([entry for row, site in enumerate(sites) for entry in _asked_of(row, site, table)])


def alarms(sites: Sequence[Site], table: ScalarTable) -> Columns:
    """What is shown besides them, where it is not zero."""
    return Columns([entry for row, site in enumerate(sites) for entry in _alarms_of(row, site, table)])


def numbers_of(frame: Frame, table: ScalarTable) -> dict[str, float]:
    """All scalars of a step by their tags, what was logged with it first."""
    found = dict(frame.scalars)
    asked, alarming = asked_for(frame.sites, table), alarms(frame.sites, table)
    found.update((tag, x) for tag, x in zip(asked.tags, asked.read(frame).tolist(), strict=True) if np.isfinite(x))
    found.update((tag, x) for tag, x in zip(alarming.tags, alarming.read(frame).tolist(), strict=True) if x)
    return found


def _asked_of(row: int, site: Site, table: ScalarTable) -> Iterable[_Entry]:
    """The scalars of a site; what is inside attention is summed up in one, under the attention's own name."""
    names = table[site.plain_kind]
    attention = site.attention_stat if names else None
    if attention is None:
        return [_Entry(f"{site.kind}.{name}/{site.name}", name, row) for name in names]
    name, stat, whose = attention
    return [_Entry(f"{site.kind}.{name}/{whose.name}", stat, row)]


def _alarms_of(row: int, site: Site, table: ScalarTable) -> Iterable[_Entry]:
    if site.attention_stat is not None:  # masks are minus infinity there
        return []
    names = [name for name in ALARMS if name not in table[site.plain_kind]]
    return [_Entry(f"{site.kind}.{name}/{site.name}", name, row) for name in names]


class Columns:
    """Reads the numbers of scalars from a frame, each statistic once for all rows that need it."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self.tags = [entry.tag for entry in entries]
        self._places = [(name, *_where(name, entries)) for name in dict.fromkeys(entry.stat for entry in entries)]

    def read(self, frame: Frame) -> Floats:
        numbers = np.empty(len(self.tags))
        for name, places, rows in self._places:
            counts = frame.buckets[rows] if name in QUANTILES else frame.buckets
            numbers[places] = stats.stat(name, frame.values[rows], counts)
        return numbers


def _where(name: str, entries: Sequence[_Entry]) -> tuple[Places, Places]:
    """At which places of the scalars a statistic stands, and of which rows it is."""
    places = [place for place, entry in enumerate(entries) if entry.stat == name]
    rows = [entries[place].row for place in places]
    return places_of(places), places_of(rows)


Places = NDArray[np.intp] | slice


def places_of(numbers: Sequence[int]) -> Places:
    """What indexes just these rows, in this order."""
    start = numbers[0] if numbers else 0
    if list(numbers) == list(range(start, start + len(numbers))):
        return slice(start, start + len(numbers))
    return np.array(numbers, dtype=np.intp)
