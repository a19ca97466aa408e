"""A history as HTML: its findings, its scalars, and one heat map of layers by steps for each key statistic.

The report page shows the same tables and maps. Every map has a table with its numbers, for readers who cannot see it.
"""

from __future__ import annotations

import html as std_html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tbhooks.data import grids
from tbhooks.data.errors import ArgumentError, check_names, nearest
from tbhooks.data.findings import first_of_each
from tbhooks.data.grids import Grid
from tbhooks.data.history import History
from tbhooks.data.roles import GAIN
from tbhooks.data.stats import QUANTILES, STAT_NAMES, Floats
from tbhooks.drawing.heatmap import Scale, legend, picture, row_height, rows_to_show, svg
from tbhooks.drawing.names import shorten_all
from tbhooks.drawing.text import NO_REFERENCE, number, printable, trend
from tbhooks.views.notebook import findings as findings_view
from tbhooks.views.notebook import html

# Larger maps no longer read well, and six of them have to fit into a notebook.
MOST_ROWS, MOST_COLUMNS = 120, 100
OPEN_MAPS = {("activation", "std"), ("gradient", "norm"), ("update", "ratio")}
TREND_WIDTH = 24
ScalarSeries = Mapping[str, tuple[Sequence[int], Floats]]


def grid_of(history: History, stat: str, kind: str) -> Grid:
    """One statistic of one kind by layer and step.

    Raises ArgumentError, naming the nearest valid name, for a statistic or kind that the history does not have.
    """
    check_names("stat", (stat,), (*STAT_NAMES, GAIN))
    frames = [frame for frame in history if any(site.kind == kind for site in frame.sites)]
    if not frames:
        known = dict.fromkeys(site.kind for frame in history for site in frame.sites)
        raise ArgumentError(f"no logged step has the kind {kind!r}: {nearest(str(kind), known)}")
    wanted = {"ratio": "update", GAIN: "gradient"}.get(stat, kind)
    if kind != wanted:
        raise ArgumentError(f"only the kind {wanted!r} has a {stat}, not {kind!r}")
    (grid,) = grids.grids_of(kind, frames, (stat,))
    if stat in QUANTILES:  # older frames no longer have their histograms
        grid = replace(grid, seen=grid.seen & np.isfinite(grid.values))
    return grid


def _scalars_of(history: History) -> ScalarSeries:
    tags = dict.fromkeys(tag for frame in history for tag in frame.scalars)
    return {tag: history.scalar(tag) for tag in grids.own_scalars(tags)}


def as_text(history: History) -> str:
    """The history's repr, its findings, and its scalars with their trend."""
    rows = [["scalar", "first", "last", "trend"]]
    for tag, (_, values) in _scalars_of(history).items():
        rows.append([printable(tag), number(values[0]), number(values[-1]), _trend(values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    findings = first_of_each(history)
    parts = [repr(history), findings_view.as_text(findings) if findings else "", "\n".join(lines) if rows[1:] else ""]
    return "\n\n".join(filter(None, parts))


def as_html(history: History) -> str:
    """Findings, scalars, and a heat map for each key statistic."""
    frames, findings = history[:], first_of_each(history)
    steps = [frame.step for frame in frames if not frame.is_evaluation]
    flagged = {finding.site.name for finding in findings if finding.site is not None}
    maps = "".join(_folded_map(grid, flagged) for grid in grids.grids(frames))
    headline = f"{logged_steps(steps, len(frames) - len(steps))}; {findings_view.counted(findings)}"
    scalars = _scalars_of(history)
    explained = "In each map one row is a layer, in execution order, and one column a logged step." if maps else ""
    parts = [
        f"<p><b>History</b>: {headline}.</p>", findings_view.as_html(findings),
        scalar_table(scalars) if scalars else "", html.paragraph(explained), maps,
    ]  # fmt: skip
    return "".join(parts)


def logged_steps(steps: Sequence[int], evaluations: int) -> str:
    """`6 logged steps, 0 to 50, 2 evaluations`."""
    span = f"{html.plural(len(steps), 'logged step')}, {steps[0]} to {steps[-1]}" if steps else "no tbhooks data found"
    return span + (f", {html.plural(evaluations, 'evaluation')}" if evaluations else "")


def scalar_table(scalars: ScalarSeries, width: int = TREND_WIDTH) -> str:
    """First and last value of each scalar, and its trend as small bars."""
    names = html.escape_names(list(scalars))
    rows = [
        [name, number(values[0]), number(values[-1]), str(steps[-1]), html.escape(_trend(values, width))]
        for name, (steps, values) in zip(names, scalars.values(), strict=True)
    ]
    return html.table(("scalar", "first", "last", "at step", "<trend"), rows)


def _trend(values: Floats, width: int = TREND_WIDTH) -> str:
    return trend(values, ~np.isfinite(values), width)


def _folded_map(grid: Grid, flagged: set[str]) -> str:
    shown, note = _fewer_rows(grid, flagged)
    body = heat_map(shown, MOST_COLUMNS, [note, nonfinite_note(grid)])
    return html.details(grid.title, body, is_open=(grid.kind, grid.stat) in OPEN_MAPS)


def heat_map(grid: Grid, most_columns: int, notes: Collection[str] = (), *, has_details: bool = False) -> str:
    """A heat map with its legend, notes, and a folded table of its numbers.

    With `has_details` every row has a tooltip, and the table a column with the trend.
    """
    thin = grid.thinned(most_columns)
    if len(thin.steps) < len(grid.steps):
        columns = f"{len(grid.steps)} steps in {len(thin.steps)} columns; each shows the value furthest from zero."
        notes = [*notes, columns]
    if grid.undefined.any():
        notes = [*notes, f"Blank where there is {NO_REFERENCE}: the weight was zero before the update."]
    scale = Scale.robust(np.where(thin.wrong, np.nan, thin.values))
    names, _ = shorten_all([printable(name) for name in grid.names], html.LONGEST_NAME)
    tooltips = [f"{name}: {_range_of(grid, i)}" for i, name in enumerate(names)] if has_details else ()
    image = svg(printable(f"{grid.title}, {scale.words}"), picture(thin.values, thin.wrong, scale), names, tooltips,
                thin.steps.tolist(), row_height(len(names)))  # fmt: skip
    said = "".join(html.paragraph(note) for note in notes)
    return legend(scale, wrong=bool(grid.wrong.any())) + said + image + _in_numbers(grid, names, has_details)


def _fewer_rows(grid: Grid, flagged: set[str]) -> tuple[Grid, str]:
    """At most MOST_ROWS rows, those with findings or non-finite values first; and a note on what was left out."""
    n = len(grid.names)
    if n <= MOST_ROWS:
        return grid, ""
    urgent = [i for i in range(n) if grid.names[i] in flagged or grid.wrong[i].any()]
    rows = rows_to_show(urgent[: MOST_ROWS // 2], n, MOST_ROWS)
    names = tuple(grid.names[i] for i in rows)
    fewer = replace(grid, names=names, values=grid.values[rows], bad=grid.bad[rows], seen=grid.seen[rows])
    return fewer, f"{len(rows)} of {n} rows, those with findings among them."


def nonfinite_note(grid: Grid) -> str:
    """Says in how many rows there is NaN or Inf, and where first; empty if in none."""
    columns = np.flatnonzero(grid.wrong.any(axis=0))
    if not len(columns):
        return ""
    first = grid.names[int(grid.wrong[:, columns[0]].argmax())]
    rows = int(grid.wrong.any(axis=1).sum())
    where = f"first in {first} at step {grid.steps[columns[0]]}"
    return f"NaN or infinite values in {rows} of {len(grid.names)} rows, {where}."


def _range_of(grid: Grid, row: int) -> str:
    known = _finite(grid, row)
    if not len(known):
        return "no finite value"
    last, low, high = (number(value, grid.stat) for value in (known[-1], known.min(), known.max()))
    nonfinite = int(grid.wrong[row].sum())
    return f"last {last}, {low} to {high}" + (f", not finite at {nonfinite} steps" if nonfinite else "")


def _in_numbers(grid: Grid, names: Sequence[str], has_trends: bool) -> str:
    rows = []
    for i, name in enumerate(names):
        known = _finite(grid, i)
        ends = (known[0], known[-1], known.min(), known.max()) if len(known) else ()
        cells = [number(float(value), grid.stat) for value in ends] or ["-"] * 4
        bars = [std_html.escape(trend(grid.values[i], grid.wrong[i], TREND_WIDTH))] if has_trends else []
        rows.append([std_html.escape(name), *cells, *bars])
    header = [html.escape(grid.kind), "first", "last", "min", "max", *(["<trend"] if has_trends else [])]
    return html.details(f"{grid.title} in numbers", html.table(header, rows))


def _finite(grid: Grid, row: int) -> Floats:
    values: Floats = grid.values[row]
    return values[np.isfinite(values)]
