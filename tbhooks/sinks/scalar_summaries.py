"""Summaries instead of one scalar per layer: median, least and most of each statistic, over a kind and over each role.

A model with hundreds of layers would fill TensorBoard with thousands of charts. The numbers of every layer are in the
frame tensors, which the TBHOOKS tab shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import Frame, Site
from tbhooks.data.roles import Groups, Role, Summary, parameter_traits, roles
from tbhooks.data.stats import INFS, NANS, Floats, Rows

PREFIX = "summary."
MOST_TAGS = 300
"""With more per-layer scalars than this, `scalars="auto"` writes summaries."""
ALL = "(all)"
_PARTS = ("median", "least", "most")


@dataclass(frozen=True)
class _Group:
    """The rows of one kind, or of one role of it."""

    kind: str
    stat: str
    name: str
    rows: NDArray[np.intp]

    @property
    def tags(self) -> list[str]:
        start = f"{PREFIX}{self.kind}.{self.stat}/{self.name}"
        return [start] if len(self.rows) == 1 else [f"{start} {part}" for part in _PARTS]


class Summaries:
    """The summaries of a list of sites, each statistic computed once for all rows."""

    def __init__(self, sites: Sequence[Site], table: Mapping[str, tuple[str, ...]]) -> None:
        groups = list(_groups(sites, table))
        if sum(len(group.tags) for group in groups) > MOST_TAGS:  # hundreds of modules that have no role in common
            groups = [group for group in groups if group.name == ALL]
        self._groups = groups
        self._stats = list(dict.fromkeys(group.stat for group in groups))
        first = {stat: i * len(sites) for i, stat in enumerate(self._stats)}
        self._numbers = Groups([first[group.stat] + group.rows for group in groups])
        # The start of each group's line in the table of extremes, and the names of its members.
        self._lines = [(f"| {g.kind}.{g.stat} | `{g.name}` |", [sites[i].name for i in g.rows]) for g in groups]
        self.tags = [tag for group in groups for tag in group.tags]
        self._last: tuple[Floats, list[tuple[_Group, Summary]]] | None = None

    def read(self, frame: Frame) -> Floats:
        """The values of the tags; NaN where no member has the statistic."""
        values: list[float] = []
        for group, found in self._summaries(frame):
            numbers = (found.median, found.least, found.most)
            values += numbers[:1] if len(group.rows) == 1 else numbers
        return np.array(values, dtype=np.float64)

    def extremes(self, frame: Frame) -> str:
        """Which layer has the least and which the most of each statistic, as a table in Markdown."""
        lines = ["| statistic | of | least | at | most | at |", "|---|---|---|---|---|---|"]
        for (start, names), (_, found) in zip(self._lines, self._summaries(frame), strict=True):
            if len(names) > 1 and found.least_at >= 0:
                least, most = names[found.least_at], names[found.most_at]
                lines.append(f"{start} {found.least:.3g} | `{least}` | {found.most:.3g} | `{most}` |")
        return "\n".join(lines)

    def _summaries(self, frame: Frame) -> list[tuple[_Group, Summary]]:
        if self._last is None or self._last[0] is not frame.values:  # asked for twice in a row
            rows = Rows(frame.values)
            columns = [rows.stat(name) for name in self._stats]
            found = self._numbers.summaries(np.concatenate(columns)) if columns else []
            self._last = frame.values, list(zip(self._groups, found, strict=True))
        return self._last[1]


class NonfiniteTensors:
    """How many tensors of each kind have NaN or infinite values; shown where it is not zero."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._rows = {
            kind: np.array([i for i, site in enumerate(sites) if site.kind == kind and site.attention_stat is None])
            for kind in dict.fromkeys(site.kind for site in sites)
        }
        self.tags = [f"{PREFIX}{kind}/tensors with NaN or infinity" for kind in self._rows]

    def read(self, frame: Frame) -> Floats:
        bad = frame.values[:, NANS] + frame.values[:, INFS] > 0
        return np.array([bad[rows.astype(np.intp)].sum() for rows in self._rows.values()], dtype=np.float64)


def _groups(sites: Sequence[Site], table: Mapping[str, tuple[str, ...]]) -> Iterator[_Group]:
    parameters = [site.path for site in sites if site.plain_kind == "weight"]
    for kind in dict.fromkeys(site.kind for site in sites):
        rows = np.array([i for i, site in enumerate(sites) if site.kind == kind and site.attention_stat is None])
        if not len(rows):
            continue
        names = [sites[i].name for i in rows]
        plain = sites[rows[0]].plain_kind
        traits = parameter_traits(names, parameters) if plain in ("activation", "gradient", "input") else {}
        of_kind = [Role(ALL, tuple(range(len(rows)))), *roles(names, traits)]
        for stat in table[plain]:
            yield from (_Group(kind, stat, role.name, rows[list(role.members)]) for role in of_kind)
