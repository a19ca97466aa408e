"""A history as HTML: its scalars, and the telling statistics as heat maps of layers by steps.

The grids are those of the report on a run, so that the two cannot disagree; every map says in numbers what it
shows in colours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tbhooks.data import grids
from tbhooks.data.errors import ArgumentError, check_names, nearest
from tbhooks.data.findings import first_of_each
from tbhooks.data.grids import Grid
from tbhooks.data.history import History
from tbhooks.data.stats import QUANTILES, STAT_NAMES, Floats
from tbhooks.drawing.heatmap import Scale, legend, picture, row_height, svg
from tbhooks.drawing.text import number, printable, trend
from tbhooks.views.notebook import findings as told
from tbhooks.views.notebook import html as page

# So large a map still reads, and six of them stay within a notebook's means.
MOST_ROWS, MOST_COLUMNS = 120, 100
UNFOLDED = {("activation", "std"), ("gradient", "norm"), ("update", "ratio")}


def grid_of(history: History, stat: str, kind: str) -> Grid:
    """One statistic of one kind over the steps; raises with the nearest name for what there is not."""
    check_names("stat", (stat,), STAT_NAMES)
    frames = [frame for frame in history if any(site.kind == kind for site in frame.sites)]
    if not frames:
        known = dict.fromkeys(site.kind for frame in history for site in frame.sites)
        raise ArgumentError(f"no frame has the kind {kind!r}: {nearest(str(kind), known)}")
    if stat == "ratio" and kind != "update":
        raise ArgumentError(f"only the kind 'update' has a ratio, not {kind!r}")
    (grid,) = grids.grids_of(kind, frames, (stat,))
    if stat in QUANTILES:  # older frames have let go of their buckets
        grid = replace(grid, seen=grid.seen & np.isfinite(grid.values))
    return grid


def _scalars_of(history: History) -> dict[str, tuple[list[int], Floats]]:
    tags = dict.fromkeys(tag for frame in history for tag in frame.scalars)
    return {tag: history.scalar(tag) for tag in grids.own_scalars(tags)}


def as_text(history: History) -> str:
    """What there is, and the scalars with their trend."""
    rows = [["scalar", "first", "last", "trend"]]
    rows += [[printable(tag), *_ends(values), _trend(values)] for tag, (_, values) in _scalars_of(history).items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    findings = first_of_each(history)
    found = [told.as_text(findings)] if findings else []
    return "\n\n".join([repr(history), *found, *(["\n".join(lines)] if len(rows) > 1 else [])])


def _ends(values: Floats) -> list[str]:
    return [number(values[0]), number(values[-1])]


def _trend(values: Floats) -> str:
    return trend(values, ~np.isfinite(values), 24)


def as_html(history: History) -> str:
    """Findings, scalars, and a heat map for each telling statistic."""
    frames, findings = history[:], first_of_each(history)
    steps = [frame.step for frame in frames if not frame.is_evaluation]
    evaluations = len(frames) - len(steps)
    span = f"{page.plural(len(steps), 'logged step')}, {steps[0]} to {steps[-1]}" if steps else "no frames of training"
    evaluated = f", {page.plural(evaluations, 'evaluation')}" if evaluations else ""
    sick = {finding.site.name for finding in findings if finding.site is not None}
    maps = "".join(_map(grid, sick) for grid in grids.grids(frames))
    headline = f"<p><b>History</b>: {span}{evaluated}; {told.counted(findings)}.</p>"
    how = '<p class="soft">In each map a row is a layer, in execution order, and a column a step.</p>' if maps else ""
    return headline + told.as_html(findings) + _scalars(history) + how + maps


def _scalars(history: History) -> str:
    rows = [
        [page.name(tag), *_ends(values), str(steps[-1]), page.text(_trend(values))]
        for tag, (steps, values) in _scalars_of(history).items()
    ]
    return page.table(("scalar", "first", "last", "at step", "<trend"), rows) if rows else ""


def _map(grid: Grid, sick: set[str]) -> str:
    shown, note = _fewer_rows(grid, sick)
    thin = shown.thinned(MOST_COLUMNS)
    if len(thin.steps) < len(grid.steps):
        note += (
            f" {len(grid.steps)} steps in {len(thin.steps)} columns, each the value furthest from zero of its steps."
        )
    scale = Scale.of(np.where(thin.wrong, np.nan, thin.values))
    names = [printable(page.shortened(name, page.LONGEST_NAME)) for name in shown.names]
    image = svg(printable(f"{grid.title}, {scale.words}"), picture(thin.values, thin.wrong, scale), names, (),
                thin.steps.tolist(), row_height(len(names)))  # fmt: skip
    words = f'<p class="soft">{page.text(note.strip())}</p>' if note else ""
    body = legend(scale, wrong=bool(shown.wrong.any())) + _alarm(grid) + words + image + _in_numbers(shown, names)
    return page.folded(grid.title, body, unfolded=(grid.kind, grid.stat) in UNFOLDED)


def _fewer_rows(grid: Grid, sick: set[str]) -> tuple[Grid, str]:
    """Those with findings or something not finite, and of the others evenly as many as there is room for."""
    n = len(grid.names)
    if n <= MOST_ROWS:
        return grid, ""
    chosen = [i for i in range(n) if grid.names[i] in sick or grid.wrong[i].any()][: MOST_ROWS // 2]
    others = sorted(set(range(n)) - set(chosen))
    evenly = np.linspace(0, len(others) - 1, MOST_ROWS - len(chosen)).round().astype(int)
    rows = np.array(sorted({*chosen, *(others[i] for i in evenly)}))
    names = tuple(grid.names[i] for i in rows)
    fewer = replace(grid, names=names, values=grid.values[rows], bad=grid.bad[rows], seen=grid.seen[rows])
    return fewer, f"{len(rows)} of {n} rows, those with findings among them."


def _alarm(grid: Grid) -> str:
    """What the colour of its own says, in words."""
    columns = np.flatnonzero(grid.wrong.any(axis=0))
    if not len(columns):
        return ""
    first = page.name(grid.names[int(grid.wrong[:, columns[0]].argmax())])
    rows = int(grid.wrong.any(axis=1).sum())
    since = f"the first is <bdi>{first}</bdi> at step {grid.steps[columns[0]]}"
    return f"<p>NaN or infinite values in {rows} of {len(grid.names)} rows; {since}.</p>"


def _in_numbers(grid: Grid, names: Sequence[str]) -> str:
    """The map's first, last and extreme values, for readers who do not see it."""
    rows = []
    for i, name in enumerate(names):
        known = grid.values[i][np.isfinite(grid.values[i])]
        ends = (known[0], known[-1], known.min(), known.max()) if len(known) else ()
        rows.append([html.escape(name), *([number(float(value), grid.stat) for value in ends] or ["-"] * 4)])
    table = page.table(("place", "first", "last", "least", "most"), rows)
    return page.folded(f"{grid.title} in numbers", table, unfolded=False)
