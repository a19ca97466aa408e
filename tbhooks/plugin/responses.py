"""The response bodies of the tab's routes: pure functions over the decoded arrays.

Names are sent unescaped; the page shows them as text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def matrix_bytes(names: dict[str, str], sites: Sequence[Site], rows: Rows, matrix: Matrix, after: int | None) -> bytes:
    """The length of the header, the header padded to a multiple of 8 bytes, and the numbers as float32."""
    later = slice(None) if after is None else rows.steps[matrix.at] > after
    at, values = matrix.at[later], matrix.values[later]
    pairs, more = _nonfinite(rows, at, sites)
    without = _undefined(names["stat"], rows, at)
    header = {
        **names, "sites": len(sites), "steps": rows.steps[at].tolist(), "times": to_jsonable(rows.times[at].tolist()),
        "nonfinite": pairs, **({"nonfinite_more": True} if more else {}), **({"undefined": without} if without else {}),
        **({"thinned": True} if rows.thinned else {}),
    }  # fmt: skip
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return len(text).to_bytes(4, "little") + text + np.ascontiguousarray(values, dtype="<f4").tobytes()


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


def _metric_history(metrics: Mapping[str, Rows], steps: NDArray[np.int64]) -> dict[str, list[float | None]]:
    """Each metric of one site at these steps; None where it has no value."""
    found: dict[str, list[float | None]] = {}
    for name, metric in metrics.items():
        by_step = dict(zip(*(array.tolist() for array in _metric_series(metric)), strict=True))
        found[name] = [by_step.get(step) for step in steps.tolist()]
    return found


def _gain_history(kind: Kind, rows: Rows, position: int) -> dict[str, list[float | None]]:
    if position not in kind.before:
        return {}
    pair = Rows(rows.steps, rows.times, rows.columns[:, :, [kind.before[position], position]], rows.seen, rows.thinned)
    known = rows.seen[:, position] & rows.seen[:, kind.before[position]]
    return {GAIN: _where_known(gain_matrix(pair, {1: 0}).values[:, 1], known)}


def _where_known(values: Stored, known: NDArray[np.bool_]) -> list[float | None]:
    """The values, and None where they are not known."""
    listed: list[float | None] = values.tolist()
    if not known.all():
        listed = [value if is_known else None for value, is_known in zip(listed, known.tolist(), strict=True)]
    return listed


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


def history(
    kind: Kind, rows: Rows, histograms: Histograms, metrics: Mapping[str, Rows], position: int
) -> dict[str, Any]:
    """All stats of one site over the steps, its quantiles, and a sample of its histograms."""
    # A copy, because the numbers of one site are far from each other in memory.
    own, seen = np.ascontiguousarray(rows.columns[:, :, position]), rows.seen[:, position]
    drawn, which = _seen_with_histogram(rows, histograms, position)
    counts = np.array([histograms.each[i].of_site(position) for i in which], dtype=np.int64).reshape(-1, BUCKETS)
    some = np.unique(np.linspace(0, len(drawn) - 1, min(len(drawn), MOST_RIDGES)).round().astype(np.intp))
    edges, heights = trimmed(counts[some], own[:, drawn[some]])
    used = used_buckets(counts)
    return {
        "steps": rows.steps.tolist(),
        "stats": {
            name: _where_known(row_stat(name, own), seen & ~undefined(name, own))
            for name in kind.stats
            if name in STATS
        }
        | _gain_history(kind, rows, position)
        | _metric_history(metrics, rows.steps),
        "quantile_steps": rows.steps[drawn].tolist(),
        "quantiles": {name: quantile(name, own[:, drawn], counts[:, used], used.start).tolist() for name in QUANTILES},
        "ridges": {"steps": rows.steps[drawn[some]].tolist(), "edges": edges, "counts": heights},
    }
