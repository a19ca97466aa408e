"""What a live view remembers of a run: a matrix that takes a column a step and never grows wide.

Frames come one at a time and are forgotten at once, so a view costs the same at step ten and at step ten million.
Numbers only: how they look is decided elsewhere, and nothing here waits for anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import EVALUATION, Frame, Site
from tbhooks.data.stats import INFS, NANS, QUANTILES, Counts, Floats, stat
from tbhooks.runs.report_data import Grid

MOST_COLUMNS, MOST_ROWS = 120, 60
_RECENT = 32
_SCALARS = "train/"

Rows = NDArray[np.intp]


class Strip:
    """Named rows over the steps. A full strip adds up its columns in pairs, so that it always shows the whole run.

    A column stands for `span` steps and holds the value furthest from zero, as `Grid.thinned` does; the last, least and
    greatest value of each row are exact.
    """

    def __init__(self, most_columns: int = MOST_COLUMNS) -> None:
        self.names: list[str] = []
        self.columns, self.span = 0, 1
        self.first_bad: tuple[str, int] | None = None
        """Where and at which step something was not finite first, however many steps its column stands for."""
        self._row: dict[str, int] = {}
        self._held, self._step = 0, -1
        self._values = np.full((0, most_columns), np.nan)
        self._bad = np.zeros((0, most_columns), dtype=np.int64)
        self._seen = np.zeros((0, most_columns), dtype=bool)
        self._first, self._last = np.zeros((2, most_columns), dtype=np.int64)
        self._ends = np.full((4, 0), np.nan)

    def rows(self, names: Sequence[str]) -> Rows:
        """The row of each name; new names get new ones, below the others."""
        for name in names:
            if name not in self._row:
                self._row[name] = len(self.names)
                self.names.append(name)
        self._make_room(len(self.names))
        return np.array([self._row[name] for name in names], dtype=np.intp)

    def put(self, step: int, rows: Rows, values: Floats, bad: Counts, *, late: bool = False) -> None:
        """The numbers of a step; more of it may follow, and late ones may belong to a column that is past."""
        past = late and step < self._step
        if step != self._step and not past:
            self._open_column(step)
        i = int(self._first[: self.columns].searchsorted(step, "right")) - 1 if past else self.columns - 1
        self._values[rows, i] = _further(self._values[rows, i], values)
        self._bad[rows, i] += bad
        self._seen[rows, i] = True
        if self.first_bad is None and bad.any():
            self.first_bad = self.names[rows[(bad > 0).argmax()]], step
        known = np.where(np.isfinite(values), values, np.nan)
        first, last, low, high = self._ends
        first[rows] = np.where(np.isnan(first[rows]), known, first[rows])
        last[rows] = last[rows] if past else values
        low[rows], high[rows] = np.fmin(low[rows], known), np.fmax(high[rows], known)

    def row(self, name: str) -> int:
        return self._row[name]

    def ends(self, row: int) -> tuple[float, float, float, float]:
        """Of a row the first, last, least and greatest value; all but the last are finite, or NaN if there is none."""
        first, last, low, high = self._ends[:, row].tolist()
        return first, last, low, high

    def steps(self, column: int) -> tuple[int, int]:
        """The first and the last step a column stands for."""
        return int(self._first[column]), int(self._last[column])

    def grid(self, kind: str, stat_name: str, rows: Sequence[int]) -> Grid:
        """A copy of some rows, for a heat map."""
        n, names = self.columns, tuple(self.names[row] for row in rows)
        chosen = np.array(rows, dtype=np.intp)
        steps = self._first[:n].copy()
        return Grid(
            kind, stat_name, names, steps, self._values[chosen, :n], self._bad[chosen, :n], self._seen[chosen, :n]
        )

    def _open_column(self, step: int) -> None:
        if self.columns and self._held < self.span:
            self._held += 1
        else:
            if self.columns == self._values.shape[1]:
                self._halve()
            self._values[:, self.columns], self._bad[:, self.columns] = np.nan, 0
            self._seen[:, self.columns] = False
            self._first[self.columns] = step
            self.columns, self._held = self.columns + 1, 1
        self._last[self.columns - 1] = self._step = step

    def _halve(self) -> None:
        half = self.columns // 2
        left, right = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        self._values[:, :half] = _further(self._values[:, left], self._values[:, right])
        self._bad[:, :half] = self._bad[:, left] + self._bad[:, right]
        self._seen[:, :half] = self._seen[:, left] | self._seen[:, right]
        self._first[:half], self._last[:half] = self._first[left], self._last[right]
        self.columns, self.span = half, self.span * 2

    def _make_room(self, rows: int) -> None:
        more = rows - len(self._values)
        if more > 0:
            more += rows // 2  # functional sites come one by one
            self._values = np.pad(self._values, ((0, more), (0, 0)), constant_values=np.nan)
            self._bad, self._seen = (np.pad(part, ((0, more), (0, 0))) for part in (self._bad, self._seen))
            self._ends = np.pad(self._ends, ((0, 0), (0, more)), constant_values=np.nan)


def _further(old: Floats, new: Floats) -> Floats:
    return np.where(np.isnan(old) | (np.abs(new) > np.abs(old)), new, old)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the numbers of a frame with these sites go."""

    sites: tuple[Site, ...]
    taken: Rows
    rows: Rows


class Followed:
    """One statistic of one kind over a run, and what was logged beside it. Fed with frames, oldest first."""

    def __init__(self, kind: str, stat_name: str) -> None:
        self.kind, self.stat = kind, stat_name
        self.heat, self.scalars = Strip(), Strip()
        self.newest: Frame | None = None
        self.kinds: dict[str, None] = {}
        self._sites: tuple[Site, ...] = ()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._began = 0.0
        self._plan = _Plan((), np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp))
        self._forward: dict[str, int] = {}

    def take(self, frame: Frame) -> None:
        """Adds what the frame has of it; scalars that came late have a frame without sites."""
        logged = {tag: value for tag, value in frame.scalars.items() if tag.startswith(_SCALARS)}
        if logged:
            values = np.array(list(logged.values()))
            bad = (~np.isfinite(values)).astype(np.int64)
            self.scalars.put(frame.step, self.scalars.rows(list(logged)), values, bad, late=not frame.sites)
        if not frame.sites:
            return
        if frame.sites is not self._sites:
            self._sites = frame.sites
            self.kinds |= dict.fromkeys(site.kind for site in frame.sites)
        if not frame.is_evaluation:
            self._tick(frame)
        if frame.is_evaluation == self.kind.startswith(EVALUATION):
            self._take_statistic(frame)

    def _tick(self, frame: Frame) -> None:
        self._began = self._began if self._recent else frame.time
        self._recent.append((frame.step, frame.time))
        self.newest = frame

    def _take_statistic(self, frame: Frame) -> None:
        if frame.sites is not self._plan.sites:
            self._plan = self._planned(frame.sites)
        taken = self._plan.taken
        if len(taken) and (frame.buckets.shape[1] or self.stat not in QUANTILES):
            values, no_buckets = frame.values[taken], np.zeros((len(taken), 0), dtype=np.int64)
            counts = frame.buckets[taken] if self.stat in QUANTILES else no_buckets
            bad = (values[:, NANS] + values[:, INFS]).astype(np.int64)
            self.heat.put(frame.step, self._plan.rows, stat(self.stat, values, counts), bad)

    def _planned(self, sites: tuple[Site, ...]) -> _Plan:
        taken = [i for i, site in enumerate(sites) if site.kind == self.kind]
        forward = self.kind.removesuffix("gradient") + "activation"
        for site in sites:
            if site.kind == forward:
                self._forward.setdefault(site.name, len(self._forward))
        rows = self.heat.rows([sites[i].name for i in taken])
        return _Plan(sites, np.array(taken, dtype=np.intp), rows)

    @property
    def steps_per_second(self) -> float:
        """Over the last frames; NaN while there is one."""
        if len(self._recent) < 2:
            return float("nan")
        (first, began), (last, ended) = self._recent[0], self._recent[-1]
        return (last - first) / (ended - began) if ended > began else float("nan")

    @property
    def seconds(self) -> float:
        """From the first frame to the newest."""
        return self._recent[-1][1] - self._began if self._recent else 0.0

    def order(self) -> list[int]:
        """The rows as a forward pass meets them: gradients come last layer first."""
        rows = range(len(self.heat.names))
        if not self._forward or self.kind.endswith("weight_gradient"):
            return list(rows)
        return sorted(rows, key=lambda row: self._forward.get(self.heat.names[row], len(self._forward)))

    def grid(self, sick: Collection[str] = (), most: int = MOST_ROWS) -> Grid:
        """At most so many rows: those that are sick or have NaN or Inf, then others from all over the model."""
        order = self.order()
        if len(order) > most:
            whole = self.heat.grid(self.kind, self.stat, order)
            wrong = whole.wrong.any(axis=1)
            urgent = [i for i in range(len(order)) if whole.names[i] in sick]
            urgent += [i for i in np.flatnonzero(wrong).tolist() if whole.names[i] not in sick]
            chosen = _spread(urgent, len(order), most)
            order = [order[i] for i in chosen]
        return self.heat.grid(self.kind, self.stat, order)

    def told_scalars(self, most: int) -> list[int]:
        """Rows of the scalars to show, losses first."""
        names = self.scalars.names
        return sorted(range(len(names)), key=lambda row: "loss" not in names[row].lower())[:most]


def _spread(urgent: Sequence[int], n: int, most: int) -> list[int]:
    """The urgent ones, and as many of the others as there is room for, evenly spread; in order."""
    kept = list(urgent[:most])
    others = sorted(set(range(n)) - set(kept))
    places = np.linspace(0, len(others) - 1, most - len(kept)).round().astype(int)
    return sorted({*kept, *(others[place] for place in places)})
