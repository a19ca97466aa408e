"""What a live view keeps of a run: matrices that take one column per step and never grow wider than a screen.

Frames are added one at a time and not kept, so a view costs the same at step ten and at step ten million.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import EVALUATION, Frame, Site
from tbhooks.data.grids import Grid
from tbhooks.data.stats import INFS, NANS, QUANTILES, Counts, Floats, stat
from tbhooks.drawing.heatmap import rows_to_show

MOST_COLUMNS, MOST_ROWS = 120, 60
_RECENT = 32
_SCALARS = "train/"

Rows = NDArray[np.intp]


class StepMatrix:
    """Named rows over the steps. A full matrix merges its columns in pairs, so that it always shows the whole run.

    A column covers `span` steps and holds the value furthest from zero, as `Grid.thinned` does. The first, last, least
    and greatest value of each row are exact.
    """

    def __init__(self, most_columns: int = MOST_COLUMNS) -> None:
        self.names: list[str] = []
        self.columns, self.span = 0, 1
        self.first_nonfinite: tuple[str, int] | None = None
        """The row and the exact step of the first NaN or Inf."""
        self._row: dict[str, int] = {}
        self._steps_in_column, self._step = 0, -1
        self._values = np.full((0, most_columns), np.nan)
        self._nonfinite = np.zeros((0, most_columns), dtype=np.int64)
        self._seen = np.zeros((0, most_columns), dtype=bool)
        self._first, self._last = np.zeros((2, most_columns), dtype=np.int64)
        self._ends = np.full((4, 0), np.nan)

    def rows(self, names: Sequence[str]) -> Rows:
        """The row of each name; new names get new rows at the end."""
        for name in names:
            if name not in self._row:
                self._row[name] = len(self.names)
                self.names.append(name)
        self._reserve(len(self.names))
        return np.array([self._row[name] for name in names], dtype=np.intp)

    def put(self, step: int, rows: Rows, values: Floats, nonfinite: Counts, *, late: bool = False) -> None:
        """Adds numbers of a step. There may be several calls for a step, and late ones for an earlier step."""
        is_past = late and step < self._step
        if step != self._step and not is_past:
            self._open_column(step)
        i = int(self._first[: self.columns].searchsorted(step, "right")) - 1 if is_past else self.columns - 1
        self._values[rows, i] = _furthest(self._values[rows, i], values)
        self._nonfinite[rows, i] += nonfinite
        self._seen[rows, i] = True
        if self.first_nonfinite is None and nonfinite.any():
            self.first_nonfinite = self.names[rows[(nonfinite > 0).argmax()]], step
        known = np.where(np.isfinite(values), values, np.nan)
        first, last, low, high = self._ends
        first[rows] = np.where(np.isnan(first[rows]), known, first[rows])
        last[rows] = last[rows] if is_past else values
        low[rows], high[rows] = np.fmin(low[rows], known), np.fmax(high[rows], known)

    def row(self, name: str) -> int:
        return self._row[name]

    def ends(self, row: int) -> tuple[float, float, float, float]:
        """The first, last, least and greatest value of a row; all but the last are finite, or NaN if there is none."""
        first, last, low, high = self._ends[:, row].tolist()
        return first, last, low, high

    def steps(self, column: int) -> tuple[int, int]:
        """The first and the last step that a column covers."""
        return int(self._first[column]), int(self._last[column])

    def grid(self, kind: str, stat_name: str, rows: Sequence[int]) -> Grid:
        """Returns a copy of some rows, for a heat map."""
        n, names = self.columns, tuple(self.names[row] for row in rows)
        chosen = np.array(rows, dtype=np.intp)
        steps = self._first[:n].copy()
        return Grid(
            kind, stat_name, names, steps, self._values[chosen, :n], self._nonfinite[chosen, :n], self._seen[chosen, :n]
        )

    def _open_column(self, step: int) -> None:
        if self.columns and self._steps_in_column < self.span:
            self._steps_in_column += 1
        else:
            if self.columns == self._values.shape[1]:
                self._halve()
            self._values[:, self.columns], self._nonfinite[:, self.columns] = np.nan, 0
            self._seen[:, self.columns] = False
            self._first[self.columns] = step
            self.columns, self._steps_in_column = self.columns + 1, 1
        self._last[self.columns - 1] = self._step = step

    def _halve(self) -> None:
        half = self.columns // 2
        left, right = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        self._values[:, :half] = _furthest(self._values[:, left], self._values[:, right])
        self._nonfinite[:, :half] = self._nonfinite[:, left] + self._nonfinite[:, right]
        self._seen[:, :half] = self._seen[:, left] | self._seen[:, right]
        self._first[:half], self._last[:half] = self._first[left], self._last[right]
        self.columns, self.span = half, self.span * 2

    def _reserve(self, rows: int) -> None:
        more = rows - len(self._values)
        if more > 0:
            more += rows // 2  # functional sites are found one by one
            self._values = np.pad(self._values, ((0, more), (0, 0)), constant_values=np.nan)
            self._nonfinite, self._seen = (np.pad(part, ((0, more), (0, 0))) for part in (self._nonfinite, self._seen))
            self._ends = np.pad(self._ends, ((0, 0), (0, more)), constant_values=np.nan)


def _furthest(old: Floats, new: Floats) -> Floats:
    return np.where(np.isnan(old) | (np.abs(new) > np.abs(old)), new, old)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which sites of a frame are shown, and in which rows."""

    sites: tuple[Site, ...]
    selected: Rows
    rows: Rows


class Timeline:
    """One statistic of one kind over a run, and the scalars logged with it. Frames are added oldest first."""

    def __init__(self, kind: str, stat_name: str) -> None:
        self.kind, self.stat = kind, stat_name
        self.layers, self.scalars = StepMatrix(), StepMatrix()
        self.newest: Frame | None = None
        self.kinds: dict[str, None] = {}
        self._sites: tuple[Site, ...] = ()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._began = 0.0
        self._plan = _Plan((), np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp))
        self._forward: dict[str, int] = {}

    def add(self, frame: Frame) -> None:
        """Adds the statistic and the scalars of a frame; scalars that came late have a frame without sites."""
        logged = {tag: value for tag, value in frame.scalars.items() if tag.startswith(_SCALARS)}
        if logged:
            values = np.array(list(logged.values()))
            nonfinite = (~np.isfinite(values)).astype(np.int64)
            self.scalars.put(frame.step, self.scalars.rows(list(logged)), values, nonfinite, late=not frame.sites)
        if not frame.sites:
            return
        if frame.sites is not self._sites:
            self._sites = frame.sites
            self.kinds |= dict.fromkeys(site.kind for site in frame.sites)
        if not frame.is_evaluation:
            self._began = self._began if self._recent else frame.time
            self._recent.append((frame.step, frame.time))
            self.newest = frame
        if frame.is_evaluation == self.kind.startswith(EVALUATION):
            self._add_statistic(frame)

    def _add_statistic(self, frame: Frame) -> None:
        if frame.sites is not self._plan.sites:
            self._plan = self._make_plan(frame.sites)
        selected, needs_buckets = self._plan.selected, self.stat in QUANTILES
        if len(selected) and (frame.buckets.shape[1] or not needs_buckets):
            values, no_buckets = frame.values[selected], np.zeros((len(selected), 0), dtype=np.int64)
            counts = frame.buckets[selected] if needs_buckets else no_buckets
            nonfinite = (values[:, NANS] + values[:, INFS]).astype(np.int64)
            self.layers.put(frame.step, self._plan.rows, stat(self.stat, values, counts), nonfinite)

    def _make_plan(self, sites: tuple[Site, ...]) -> _Plan:
        selected = [i for i, site in enumerate(sites) if site.kind == self.kind]
        forward = self.kind.removesuffix("gradient") + "activation"
        for site in sites:
            if site.kind == forward:
                self._forward.setdefault(site.name, len(self._forward))
        rows = self.layers.rows([sites[i].name for i in selected])
        return _Plan(sites, np.array(selected, dtype=np.intp), rows)

    @property
    def steps_per_second(self) -> float:
        """The rate over the last frames; NaN until there are two."""
        if len(self._recent) < 2:
            return float("nan")
        (first, began), (last, ended) = self._recent[0], self._recent[-1]
        return (last - first) / (ended - began) if ended > began else float("nan")

    @property
    def seconds(self) -> float:
        """From the first frame to the newest."""
        return self._recent[-1][1] - self._began if self._recent else 0.0

    def _forward_order(self) -> list[int]:
        """The rows in the order of the forward pass; gradients arrive last layer first."""
        rows = range(len(self.layers.names))
        if not self._forward or self.kind.endswith("weight_gradient"):
            return list(rows)
        return sorted(rows, key=lambda row: self._forward.get(self.layers.names[row], len(self._forward)))

    def grid(self, flagged: Collection[str] = (), most: int = MOST_ROWS) -> Grid:
        """At most so many rows: layers that are flagged or have NaN or Inf, then others from all over the model."""
        order = self._forward_order()
        if len(order) > most:
            whole = self.layers.grid(self.kind, self.stat, order)
            nonfinite = np.flatnonzero(whole.wrong.any(axis=1)).tolist()
            urgent = [i for i in range(len(order)) if whole.names[i] in flagged]
            urgent += [i for i in nonfinite if whole.names[i] not in flagged]
            order = [order[i] for i in rows_to_show(urgent, len(order), most)]
        return self.layers.grid(self.kind, self.stat, order)

    def scalar_rows(self, most: int) -> list[int]:
        """The rows of the scalars to show, losses first."""
        names = self.scalars.names
        return sorted(range(len(names)), key=lambda row: "loss" not in names[row].lower())[:most]
