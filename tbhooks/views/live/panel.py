"""The contents of a live view as text or as HTML. The interactive view is made of the same pieces.

Returns strings and displays nothing. It runs while a model trains, so it has to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tbhooks.data.frame import Finding
from tbhooks.data.grids import Grid
from tbhooks.data.stats import Floats
from tbhooks.drawing.heatmap import LEVELS, Scale, legend, picture, row_height, svg
from tbhooks.drawing.names import shorten, shorten_all
from tbhooks.drawing.text import BLOCKS, number, printable, scaled
from tbhooks.views.live.timeline import StepMatrix, Timeline
from tbhooks.views.notebook import html
from tbhooks.views.notebook.findings import NONE_FOUND, block

MOST_FINDINGS, MOST_SCALARS = 6, 4
_SPARK_WIDTH, _SPARK_HEIGHT = 220, 34
_TEXT_COLUMNS, _LONGEST_NAME, _LONGEST_MESSAGE = 40, 40, 600


@dataclass(frozen=True, slots=True)
class Status:
    """What a view shows besides the numbers of the layers."""

    findings: Sequence[Finding]
    """Oldest first."""
    notes: Sequence[str]
    """What went wrong with the watch itself."""
    state: str
    """"following" or "ended"."""

    def flagged(self) -> frozenset[str]:
        """Names of layers and parameters with findings, and of the layers that own these parameters."""
        sites = [finding.site for finding in self.findings if finding.site is not None]
        layers = (site.path.rpartition(".")[0] for site in sites if "weight" in site.kind or site.kind == "update")
        return frozenset((*(site.name for site in sites), *layers))


@dataclass(frozen=True, slots=True)
class Line:
    """A logged scalar as a line: heights from 0 to 1, NaN where there is no value."""

    name: str
    words: str
    heights: Floats


def headline(timeline: Timeline, status: Status) -> str:
    """The step, the speed, the time and the state of the run."""
    if timeline.newest is None:
        return "no step has been logged yet" + (f", {status.state}" if status.state else "")
    rate = timeline.steps_per_second
    pace = "" if np.isnan(rate) else f", {rate:.3g} steps/s"
    return f"step {timeline.newest.step:,}{pace}, {duration(timeline.seconds)}, {status.state}"


def duration(seconds: float) -> str:
    """`41 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    for unit, size, smaller, part in (("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def lines(timeline: Timeline) -> Iterator[Line]:
    """The logged scalars, losses first."""
    rows = timeline.scalar_rows(MOST_SCALARS)
    grid = timeline.scalars.grid("scalar", "value", rows)
    for row, name, values in zip(rows, grid.names, grid.values, strict=True):
        first, last, low, high = (number(value) for value in timeline.scalars.ends(row))
        yield Line(printable(name), f"{last}, began at {first}, {low} to {high}", scaled(values))


def title(grid: Grid, span: int) -> str:
    """What the heat map shows, and over which steps."""
    if not len(grid.steps):
        return f"{grid.title}: no logged step yet"
    column = "one column per logged step"
    if span > 1:
        column = f"one column per {span} logged steps, which shows the value furthest from zero"
    return f"{grid.title}, one row per layer, {column}"


def left_out(grid: Grid, layers: StepMatrix) -> str:
    """Says that not all layers are shown, and which are; empty if all are."""
    if len(grid.names) == len(layers.names):
        return ""
    shown = "those with findings, NaN or Inf, and others from all over the model"
    return f"{len(grid.names)} of {len(layers.names)} layers: {shown}"


def nonfinite_note(grid: Grid, layers: StepMatrix) -> str:
    """Says in how many rows there is NaN or Inf, and where first; empty if in none."""
    rows = int(grid.wrong.any(axis=1).sum())
    if not rows:
        return ""
    first = ""
    if layers.first_nonfinite is not None:
        name, step = layers.first_nonfinite
        first = f", first in {printable(name)} at step {step:,}"
    return f"NaN or infinite values in {rows} of {len(grid.names)} rows{first}"


def heading(finding: Finding) -> str:
    """A finding without its message and severity."""
    where = "" if finding.site is None else f", {finding.site.kind} of {finding.site.name}"
    return f"{finding.rule} at step {finding.step}{where}"


def newest(status: Status) -> tuple[list[Finding], str]:
    """The findings to show, newest first, and a sentence on how many are left out."""
    shown = list(status.findings)[: -MOST_FINDINGS - 1 : -1]
    left = len(status.findings) - len(shown)
    return shown, f"and {html.plural(left, 'earlier finding')}: see w.findings" if left else ""


# --- As HTML ------------------------------------------------------------------------------------------


def render_html(timeline: Timeline, status: Status, css_class: str = "") -> str:
    """The whole view for a cell's output; `css_class` lets a style sheet find it."""
    parts = [f"<p><b>{html.escape(headline(timeline, status))}</b></p>"]
    parts += [_line(line) for line in lines(timeline)]
    parts += [_heat_map(timeline, status), _findings(status)]
    parts += [html.paragraph(note, css="") for note in status.notes]
    body = "".join(parts)
    return html.wrap(f'<div class="{css_class}">{body}</div>' if css_class else body)


def _line(line: Line) -> str:
    known = np.flatnonzero(np.isfinite(line.heights))
    across = (known + 0.5) * (_SPARK_WIDTH / max(len(line.heights), 1))
    down = _SPARK_HEIGHT - 2 - line.heights[known] * (_SPARK_HEIGHT - 4)
    points = " ".join([f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True)])
    size = f'width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}"'
    return (
        f'<p>{html.escape(line.name)} <svg {size} style="vertical-align:middle" '
        f'aria-hidden="true"><polyline fill="none" stroke="currentColor" stroke-width="1.5" points="{points}"/></svg> '
        f"{html.escape(line.words)}</p>"
    )


def _heat_map(timeline: Timeline, status: Status) -> str:
    flagged, layers = status.flagged(), timeline.layers
    grid = timeline.grid(flagged)
    heading = html.paragraph(title(grid, layers.span), css="")
    if not len(grid.steps):
        return heading
    scale = Scale.of(np.where(grid.wrong, np.nan, grid.values))
    names, _ = shorten_all([printable(name) for name in grid.names], html.LONGEST_NAME)
    labels = [f"! {name}" if full in flagged else name for name, full in zip(names, grid.names, strict=True)]
    tooltips = [f"{name}: {words}" for name, words in zip(names, _row_ranges(grid, layers), strict=True)]
    image = svg(f"{grid.title}, {scale.words}", picture(grid.values, grid.wrong, scale), labels, tooltips,
                grid.steps.tolist(), row_height(len(names)))  # fmt: skip
    flag = "! before a name: the layer has a finding" if labels != names else ""
    nonfinite = nonfinite_note(grid, layers)
    notes = "".join(html.paragraph(note, css="") for note in (nonfinite, left_out(grid, layers), flag))
    return f"{heading}{legend(scale, wrong=bool(nonfinite))}{image}{notes}"


def _row_ranges(grid: Grid, layers: StepMatrix) -> Iterator[str]:
    for name, columns in zip(grid.names, grid.wrong.sum(axis=1).tolist(), strict=True):
        _, last, low, high = (number(value, grid.stat) for value in layers.ends(layers.row(name)))
        nonfinite = f", not finite in {html.plural(columns, 'column')}" if columns else ""
        yield f"last {last}, {low} to {high}{nonfinite}"


def _findings(status: Status) -> str:
    shown, more = newest(status)
    if not shown:
        return f"<p>{NONE_FOUND.capitalize()}.</p>"
    return "".join(map(block, shown)) + html.paragraph(more, css="")


# --- As text ------------------------------------------------------------------------------------------


def text(timeline: Timeline, status: Status) -> str:
    """The whole view for a terminal."""
    parts = [headline(timeline, status)]
    parts += [f"{line.name}  {_bars(line.heights)}  {line.words}" for line in lines(timeline)]
    parts += _text_map(timeline, status)
    shown, more = newest(status)
    for finding in shown:
        message = shorten(printable(finding.message), _LONGEST_MESSAGE)
        parts.append(f"{finding.severity}: {printable(heading(finding))}: {message}")
    parts += [more] if more else [] if shown else [NONE_FOUND]
    return "\n".join([*parts, *status.notes])


def _text_map(timeline: Timeline, status: Status) -> list[str]:
    grid, layers = timeline.grid(status.flagged()), timeline.layers
    if not len(grid.steps):
        return [title(grid, layers.span)]
    thin = grid.thinned(_TEXT_COLUMNS)
    scale = Scale.of(np.where(thin.wrong, np.nan, thin.values))
    heights = np.where(np.isnan(thin.values), np.nan, scale.levels(thin.values) / (LEVELS - 1))
    names, _ = shorten_all([printable(name) for name in grid.names], _LONGEST_NAME)
    width = max(map(len, names))
    rows = [
        f"  {name.ljust(width)}  {_bars(heights[i], thin.wrong[i])}  {words}"
        for i, (name, words) in enumerate(zip(names, _row_ranges(grid, layers), strict=True))
    ]
    heading = f"{grid.title}, {scale.words}, step {grid.steps[0]} to {grid.steps[-1]}"
    return [heading, *rows, *filter(None, [nonfinite_note(grid, layers)])]


def _bars(heights: Floats, nonfinite: Sequence[bool] | Floats | None = None) -> str:
    """Small bars for heights from 0 to 1; `!` stands for NaN or Inf."""
    stride = len(heights) // _TEXT_COLUMNS + 1
    marks = np.zeros(len(heights), dtype=bool) if nonfinite is None else np.asarray(nonfinite)
    return "".join(
        "!" if mark else " " if np.isnan(height) else BLOCKS[1 + round(height * (len(BLOCKS) - 2))]
        for height, mark in zip(heights[::stride].tolist(), marks[::stride].tolist(), strict=True)
    )
