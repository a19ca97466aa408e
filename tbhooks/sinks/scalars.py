"""Stock scalars: which statistics of a frame become one, and all of a step's as bytes.

From one step to the next only the numbers change. So the bytes around them are made once for a list of
sites, and the numbers are put into their places all together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2

from tbhooks import stats
from tbhooks.errors import ArgumentError, check_names
from tbhooks.frame import ALL_KINDS, Frame, Site
from tbhooks.sinks import wire
from tbhooks.sinks.places import Places, places_of
from tbhooks.stats import QUANTILES, STAT_NAMES, Floats

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


class Template:
    """The bytes of scalars with these tags, one after the other, with room for their numbers."""

    def __init__(self, tags: Sequence[str]) -> None:
        scalars = [_scalar(tag) for tag in tags]
        self._sizes = np.array([len(scalar) for scalar in scalars], dtype=np.intp)
        self._places = (np.cumsum(self._sizes)[:, None] + np.arange(-4, 0)).ravel()
        self._text = np.frombuffer(b"".join(scalars), np.uint8)

    def filled(self, numbers: Floats, shown: NDArray[np.bool_] | None = None) -> bytes:
        """With these numbers; only the scalars to be shown, all if nothing is said."""
        text = self._text.copy()
        with np.errstate(over="ignore"):
            text[self._places] = numbers.astype("<f4").view(np.uint8)
        return (text if shown is None or shown.all() else text[np.repeat(shown, self._sizes)]).tobytes()


def _scalar(tag: str) -> bytes:
    value: bytes = wire.tag_field(tag) + summary_pb2.Summary.Value(simple_value=0.0).SerializeToString()
    return wire.VALUE + wire.varint(len(value)) + value


class _Entry(NamedTuple):
    """A scalar: a statistic of a row, and what it is called."""

    tag: str
    stat: str
    row: int


class SiteScalars:
    """The scalars of a list of sites: those asked for, then the alarms."""

    def __init__(self, sites: Sequence[Site], table: ScalarTable) -> None:
        self._asked = _Columns([entry for row, site in enumerate(sites) for entry in _asked_of(row, site, table)])
        self._alarms = _Columns([entry for row, site in enumerate(sites) for entry in _alarms_of(row, site, table)])

    def encoded(self, frame: Frame) -> bytes:
        asked = self._asked.read(frame)
        alarms = self._alarms.read(frame)
        text = self._asked.template.filled(asked, np.isfinite(asked))
        return text + self._alarms.template.filled(alarms, alarms != 0) if alarms.any() else text


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


class _Columns:
    """Reads the numbers of scalars from a frame, each statistic once for all rows that need it."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self.template = Template([entry.tag for entry in entries])
        self._length = len(entries)
        self._places = [(name, *_where(name, entries)) for name in dict.fromkeys(entry.stat for entry in entries)]

    def read(self, frame: Frame) -> Floats:
        numbers = np.empty(self._length)
        for name, places, rows in self._places:
            counts = frame.buckets[rows] if name in QUANTILES else frame.buckets
            numbers[places] = stats.stat(name, frame.values[rows], counts)
        return numbers


def _where(name: str, entries: Sequence[_Entry]) -> tuple[Places, Places]:
    """At which places of the scalars a statistic stands, and of which rows it is."""
    places = [place for place, entry in enumerate(entries) if entry.stat == name]
    rows = [entries[place].row for place in places]
    return places_of(places), places_of(rows)
