"""The response bodies of the tab's routes: pure functions over the decoded arrays.

Names are sent unescaped; the page shows them as text only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import Site
from tbhooks.data.jsonable import to_jsonable
from tbhooks.data.roles import GAIN
from tbhooks.data.stats import BUCKETS, INFS, LOWER, MAX, MIN, QUANTILES, STATS, UPPER, Counts
from tbhooks.plugin.arrays import Histograms, Indices, Rows, Stored, used_buckets
from tbhooks.plugin.index import Kind, RunIndex
from tbhooks.plugin.matrix import CAN_BE_UNDEFINED, Matrix, common, gain_matrix, quantile, row_stat, undefined

MOST_NONFINITE = 100_000
MOST_RIDGES = 60


def matrix_bytes(
    names: dict[str, str],
    sites: Sequence[Site],
    rows: Rows,
    matrix: Matrix,
    after: int | None,
    *,
    by_site: bool = False,
) -> bytes:
    """The length of the header, the header padded to a multiple of 8 bytes, and the numbers as float32.

    The numbers are those of one step after those of another, or those of one site after those of another.
    """
    later = slice(None) if after is None else rows.steps[matrix.at] > after
    at, values = matrix.at[later], matrix.values[later]
    pairs, more = _nonfinite(rows, at, sites)
    without = _undefined(names["stat"], rows, at)
    header = {
        **names, "sites": len(sites), "steps": rows.steps[at].tolist(), "times": to_jsonable(rows.times[at].tolist()),
        "nonfinite": pairs, **({"nonfinite_more": True} if more else {}), **({"undefined": without} if without else {}),
        **({"thinned": True} if rows.thinned else {}),
    }  # fmt: skip
    return _with_numbers(header, [values.T if by_site else values])


def _with_numbers(header: dict[str, Any], numbers: Iterable[Stored]) -> bytes:
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    arrays = (np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data for values in numbers)
    return b"".join((len(text).to_bytes(4, "little"), text, *arrays))


def _nonfinite(rows: Rows, at: Indices, sites: Sequence[Site]) -> tuple[list[list[int]], bool]:
    """Cells whose tensor held NaN or infinity, as [step, site] among these steps, and whether there are more."""
    bad = rows.nonfinite[at]
    bad[:, [site.attention_stat is not None for site in sites]] = False  # masks are minus infinity there
    pairs = np.argwhere(bad)
    return pairs[:MOST_NONFINITE].tolist(), len(pairs) > MOST_NONFINITE


def _undefined(stat: str, rows: Rows, at: Indices) -> list[list[int]]:
    """Cells where the statistic is undefined, as [step, site] among these steps."""
    if stat not in CAN_BE_UNDEFINED:
        return []
    pairs: list[list[int]] = np.argwhere(undefined(stat, rows.columns)[at])[:MOST_NONFINITE].tolist()
    return pairs


def dumps(value: Any) -> bytes:
    """ASCII JSON; NaN and infinities are strings."""
    return json.dumps(to_jsonable(value), allow_nan=False, separators=(",", ":")).encode()


def run_entry(run: RunIndex, state: str) -> dict[str, Any]:
    """The entry of a run in the list of runs; `state` is how it ended if no more steps arrive."""
    kinds = [
        {
            "kind": kind.name, "sites": len(kind.sites), "histograms": bool(kind.buckets),
            "last_step": kind.last_step, "stats": kind.stats,
        }
        for kind in run.kinds.values()
    ]  # fmt: skip
    return {
        "name": run.name, "kinds": kinds, "last_step": run.last_step, "last_time": run.last_time,
        "findings": None if run.findings is None else 1, "state": state, "has_ended": run.has_ended,
    }  # fmt: skip


def distribution(
    kind: Kind, rows: Rows, histograms: Histograms, metrics: Mapping[str, Rows], position: int, step: int
) -> dict[str, Any] | None:
    """A site's histogram and stats at the steps nearest to the requested one; None if it has no data."""
    seen = np.flatnonzero(rows.seen[:, position])
    if not len(seen):
        return None
    at = seen[_nearest(rows.steps[seen], step)]
    answer: dict[str, Any] = {
        "step": step, "row_step": int(rows.steps[at]), "histogram_step": None,
        "stats": _row_stats(kind, rows.columns[:, at, position]) | _metrics_at(metrics, int(rows.steps[at])),
        "edges": [], "counts": [],
        "sampled": kind.sampled.get(kind.sites[position].name),
    }  # fmt: skip
    drawn, which = _seen_with_histogram(rows, histograms, position)
    if len(drawn):
        near = _nearest(rows.steps[drawn], step)
        row, counts = rows.columns[:, drawn[near], position, None], histograms.each[which[near]].of_site(position)[None]
        edges, heights = trimmed(counts, row)
        answer |= {"histogram_step": int(rows.steps[drawn[near]]), "edges": edges, "counts": heights[0]}
        if drawn[near] == at:
            answer["stats"] |= {name: float(quantile(name, row, counts)[0]) for name in QUANTILES}
    return answer


def _nearest(steps: NDArray[np.int64], wanted: int) -> int:
    """The index of the nearest step; the earlier one on a tie."""
    after = int(np.searchsorted(steps, wanted))
    around = [i for i in (after - 1, after) if 0 <= i < len(steps)]
    return min(around, key=lambda i: abs(int(steps[i]) - wanted))


def _row_stats(kind: Kind, column: Stored) -> dict[str, float | None]:
    known = {name: float(row_stat(name, column[:, None])[0]) for name in kind.stats if name in STATS}
    return {name: None if undefined(name, column[:, None])[0] else value for name, value in known.items()}


def _metric_series(metric: Rows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The steps that have a metric of one site, and its values."""
    known, columns = metric.seen[:, 0], metric.columns[:, :, 0]
    values = np.where(columns[INFS] > 0, np.float32(np.inf), row_stat("mean", columns))
    return metric.steps[known], values[known]


def _metrics_at(metrics: Mapping[str, Rows], step: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, metric in metrics.items():
        steps, values = _metric_series(metric)
        if step in steps:
            found[name] = float(values[steps == step][0])
    return found


@dataclass(frozen=True, slots=True)
class Course:
    """One stat of a site over the steps, and where it is known."""

    values: Stored
    known: NDArray[np.bool_]

    def listed(self) -> list[float | None]:
        """The values, and None where they are not known."""
        listed: list[float | None] = self.values.tolist()
        for i in np.flatnonzero(~self.known).tolist():
            listed[i] = None
        return listed


def _metric_history(metrics: Mapping[str, Rows], steps: NDArray[np.int64]) -> dict[str, Course]:
    """Each metric of one site at these steps."""
    found = {}
    for name, metric in metrics.items():
        own, numbers = _metric_series(metric)
        course = Course(np.full(len(steps), np.nan, dtype=np.float32), np.zeros(len(steps), dtype=np.bool_))
        _, at, which = np.intersect1d(steps, own, assume_unique=True, return_indices=True)
        course.values[at], course.known[at] = numbers[which], True
        found[name] = course
    return found


def _gain_history(kind: Kind, rows: Rows, position: int) -> dict[str, Course]:
    if position not in kind.before:
        return {}
    pair = Rows(rows.steps, rows.times, rows.columns[:, :, [kind.before[position], position]], rows.seen, rows.thinned)
    known = rows.seen[:, position] & rows.seen[:, kind.before[position]]
    return {GAIN: Course(gain_matrix(pair, {1: 0}).values[:, 1], known)}


def _seen_with_histogram(rows: Rows, histograms: Histograms, position: int) -> tuple[Indices, Indices]:
    at, which = common(rows, histograms)
    seen = rows.seen[at, position]
    return at[seen], which[seen]


def trimmed(counts: Counts, columns: Stored) -> tuple[list[float], list[list[int]]]:
    """Common edges for several histograms of a site, without empty ends and within the exact range of all."""
    low, high = columns[MIN], columns[MAX]
    known = np.isfinite(low) & np.isfinite(high) & (low <= high)
    heights = np.where(known[:, None], counts, 0)
    used = np.flatnonzero(heights.any(axis=0))
    if not len(used):
        return [], [[] for _ in heights]
    first, last = int(used[0]), int(used[-1]) + 1
    edges = np.append(LOWER[first:last], UPPER[last - 1])
    return np.clip(edges, float(low[known].min()), float(high[known].max())).tolist(), heights[:, first:last].tolist()


@dataclass(frozen=True, slots=True)
class History:
    """All stats of one site over the steps, its quantiles, and a sample of its histograms."""

    steps: list[int]
    stats: dict[str, Course]
    quantile_steps: list[int]
    quantiles: dict[str, Stored]
    ridges: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Everything by name, for JSON."""
        return {
            "steps": self.steps,
            "stats": {name: course.listed() for name, course in self.stats.items()},
            "quantile_steps": self.quantile_steps,
            "quantiles": {name: values.tolist() for name, values in self.quantiles.items()},
            "ridges": self.ridges,
        }

    def to_bytes(self) -> bytes:
        """As a matrix is sent: the numbers of the stats and the quantiles follow the header, in its order."""
        unknown = [[name, np.flatnonzero(~course.known).tolist()] for name, course in self.stats.items()]
        header = {
            "steps": self.steps, "stats": unknown, "quantile_steps": self.quantile_steps,
            "quantiles": list(self.quantiles), "ridges": to_jsonable(self.ridges),
        }  # fmt: skip
        return _with_numbers(header, [*(course.values for course in self.stats.values()), *self.quantiles.values()])


def history(kind: Kind, rows: Rows, histograms: Histograms, metrics: Mapping[str, Rows], position: int) -> History:
    """What is known of one site."""
    # A copy, because the numbers of one site are far from each other in memory.
    own, seen = np.ascontiguousarray(rows.columns[:, :, position]), rows.seen[:, position]
    drawn, which = _seen_with_histogram(rows, histograms, position)
    counts = np.array([histograms.each[i].of_site(position) for i in which], dtype=np.int64).reshape(-1, BUCKETS)
    some = np.unique(np.linspace(0, len(drawn) - 1, min(len(drawn), MOST_RIDGES)).round().astype(np.intp))
    edges, heights = trimmed(counts[some], own[:, drawn[some]])
    used = used_buckets(counts)
    stats = {name: Course(row_stat(name, own), seen & ~undefined(name, own)) for name in kind.stats if name in STATS}
    return History(
        rows.steps.tolist(),
        stats | _gain_history(kind, rows, position) | _metric_history(metrics, rows.steps),
        rows.steps[drawn].tolist(),
        {name: quantile(name, own[:, drawn], counts[:, used], used.start) for name in QUANTILES},
        {"steps": rows.steps[drawn[some]].tolist(), "edges": edges, "counts": heights},
    )
