"""What a live view says: the pieces as words and numbers, and the whole of them as text or as HTML.

The interactive view gets the same pieces, so that the two cannot disagree. Strings out: nothing is displayed here,
and nothing is waited for. It is built while somebody trains, so it has to be quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tbhooks.data.frame import Finding
from tbhooks.data.stats import Floats
from tbhooks.drawing.heatmap import LEVELS, Scale, legend, picture, row_height, svg
from tbhooks.drawing.text import BLOCKS, number, printable, scaled
from tbhooks.runs.report_data import Grid
from tbhooks.views.live.timeline import Followed, Strip
from tbhooks.views.notebook import html
from tbhooks.views.notebook.findings import as_html

MOST_FINDINGS, MOST_SCALARS = 6, 4
_SPARK_WIDTH, _SPARK_HEIGHT = 220, 34
_TEXT_COLUMNS, _LONGEST_NAME, _LONGEST_MESSAGE = 40, 40, 600


@dataclass(frozen=True, slots=True)
class Told:
    """Everything besides the numbers of the layers."""

    findings: Sequence[Finding]
    """Oldest first."""
    notes: Sequence[str]
    """What went wrong with the watch itself."""
    state: str
    """Whether more is to come."""

    def sick(self) -> frozenset[str]:
        """Names of layers and parameters with findings; a sick parameter makes its layer sick."""
        sites = [finding.site for finding in self.findings if finding.site is not None]
        layers = (site.path.rpartition(".")[0] for site in sites if "weight" in site.kind or site.kind == "update")
        return frozenset((*(site.name for site in sites), *layers))


@dataclass(frozen=True, slots=True)
class Line:
    """A logged scalar: heights from 0 to 1, NaN where there is none."""

    name: str
    words: str
    heights: Floats


def headline(followed: Followed, told: Told) -> str:
    """Where the run is and how fast it goes."""
    if followed.newest is None:
        return "no step has been logged yet" + (f", {told.state}" if told.state else "")
    rate = followed.steps_per_second
    pace = "" if np.isnan(rate) else f", {rate:.3g} steps/s"
    return f"step {followed.newest.step:,}{pace}, {duration(followed.seconds)}, {told.state}"


def duration(seconds: float) -> str:
    """`41 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    for unit, size, smaller, part in (("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def lines(followed: Followed) -> Iterator[Line]:
    """The scalars that were logged, losses first."""
    rows = followed.told_scalars(MOST_SCALARS)
    grid = followed.scalars.grid("scalar", "value", rows)
    for row, name, values in zip(rows, grid.names, grid.values, strict=True):
        first, last, low, high = (number(value) for value in followed.scalars.ends(row))
        yield Line(printable(name), f"{last}, began at {first}, {low} to {high}", scaled(values))


def title(grid: Grid, span: int) -> str:
    """What the heat map shows, and over which steps."""
    if not len(grid.steps):
        return f"{grid.title}: nothing yet"
    column = "a step" if span == 1 else f"{span} logged steps, of which it shows the value furthest from zero"
    return f"{grid.title}, a row a layer, a column {column}"


def left_out(grid: Grid, strip: Strip) -> str:
    """Which rows are not shown, if there are any."""
    shown, there = len(grid.names), len(strip.names)
    return f"{shown} of {there} layers: those with findings, NaN or Inf, and others from all over the model"


def alarm(grid: Grid, strip: Strip) -> str:
    """What the colour of NaN and Inf says, in words; empty if there are none."""
    rows = int(grid.wrong.any(axis=1).sum())
    if not rows:
        return ""
    first = f", first in {printable(strip.first_bad[0])} at step {strip.first_bad[1]:,}" if strip.first_bad else ""
    return f"NaN or infinite values in {rows} of {len(grid.names)} rows{first}"


def heading(finding: Finding) -> str:
    """A finding without its message and severity."""
    where = "" if finding.site is None else f", {finding.site.kind} of {finding.site.name}"
    return f"{finding.rule} at step {finding.step}{where}"


def newest(told: Told) -> tuple[list[Finding], str]:
    """The findings to show, newest first, and how many are left out, in words."""
    shown = list(told.findings)[: -MOST_FINDINGS - 1 : -1]
    left = len(told.findings) - len(shown)
    return shown, f"and {html.plural(left, 'earlier finding')}: see w.findings" if left else ""


# --- As HTML ------------------------------------------------------------------------------------------


def render_html(followed: Followed, told: Told, mark: str = "") -> str:
    """The whole view, fit for a cell's output; `mark` is a class of its own."""
    parts = [f"<p><b>{html.text(headline(followed, told))}</b></p>"]
    parts += [_line(line) for line in lines(followed)]
    parts.append(_heat_map(followed, told))
    parts.append(_findings(told))
    parts += [f"<p>{html.text(note)}</p>" for note in told.notes]
    body = "".join(parts)
    return html.wrapped(f'<div class="{mark}">{body}</div>' if mark else body)


def _line(line: Line) -> str:
    known = np.flatnonzero(np.isfinite(line.heights))
    across = (known + 0.5) * (_SPARK_WIDTH / max(len(line.heights), 1))
    down = _SPARK_HEIGHT - 2 - line.heights[known] * (_SPARK_HEIGHT - 4)
    points = " ".join([f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True)])
    return (
        f'<p>{html.text(line.name)} <svg width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" style="vertical-align:middle" '
        f'aria-hidden="true"><polyline fill="none" stroke="currentColor" stroke-width="1.5" points="{points}"/></svg> '
        f"{html.text(line.words)}</p>"
    )


def _heat_map(followed: Followed, told: Told) -> str:
    sick = told.sick()
    grid = followed.grid(sick)
    what = f"<p>{html.text(title(grid, followed.heat.span))}</p>"
    if not len(grid.steps):
        return what
    scale = Scale.of(np.where(grid.wrong, np.nan, grid.values))
    names = [html.shortened(printable(name), html.LONGEST_NAME) for name in grid.names]
    labels = [f"! {name}" if known in sick else name for name, known in zip(names, grid.names, strict=True)]
    hints = [f"{name}: {words}" for name, words in zip(names, _rows_in_words(grid, followed.heat), strict=True)]
    image = svg(f"{grid.title}, {scale.words}", picture(grid.values, grid.wrong, scale), labels, hints,
                grid.steps.tolist(), row_height(len(names)))  # fmt: skip
    notes = [alarm(grid, followed.heat)]
    notes += [left_out(grid, followed.heat)] if len(names) < len(followed.heat.names) else []
    notes += ["! before a name: there is a finding"] if labels != names else []
    said = "".join(f"<p>{html.text(note)}</p>" for note in notes if note)
    return f"{what}{legend(scale, wrong=bool(notes[0]))}{image}{said}"


def _rows_in_words(grid: Grid, strip: Strip) -> Iterator[str]:
    bad = grid.wrong.sum(axis=1).tolist()
    for name, wrong in zip(grid.names, bad, strict=True):
        _, last, low, high = (number(value, grid.stat) for value in strip.ends(strip.row(name)))
        yield f"last {last}, {low} to {high}" + (f", not finite in {html.plural(wrong, 'column')}" if wrong else "")


def _findings(told: Told) -> str:
    shown, more = newest(told)
    if not shown:
        return "<p>Nothing wrong was found.</p>"
    return "".join(as_html([finding]) for finding in shown) + (f"<p>{html.text(more)}</p>" if more else "")


# --- As text ------------------------------------------------------------------------------------------


def text(followed: Followed, told: Told) -> str:
    """The whole view for a terminal."""
    said = [headline(followed, told)]
    said += [f"{line.name}  {_bars(line.heights)}  {line.words}" for line in lines(followed)]
    said += _text_map(followed, told)
    shown, more = newest(told)
    for finding in shown:
        message = html.shortened(printable(finding.message), _LONGEST_MESSAGE)
        said.append(f"{finding.severity}: {printable(heading(finding))}: {message}")
    said += [more] if more else [] if shown else ["nothing wrong was found"]
    return "\n".join([*said, *told.notes])


def _text_map(followed: Followed, told: Told) -> list[str]:
    grid = followed.grid(told.sick())
    if not len(grid.steps):
        return [title(grid, followed.heat.span)]
    thin = grid.thinned(_TEXT_COLUMNS)
    scale = Scale.of(np.where(thin.wrong, np.nan, thin.values))
    heights = np.where(np.isnan(thin.values), np.nan, scale.levels(thin.values) / (LEVELS - 1))
    names = [html.shortened(printable(name), _LONGEST_NAME) for name in grid.names]
    width = max(map(len, names))
    rows = [
        f"  {name.ljust(width)}  {_bars(heights[i], thin.wrong[i])}  {words}"
        for i, (name, words) in enumerate(zip(names, _rows_in_words(grid, followed.heat), strict=True))
    ]
    return [
        f"{grid.title}, {scale.words}, step {grid.steps[0]} to {grid.steps[-1]}",
        *rows,
        *filter(None, [alarm(grid, followed.heat)]),
    ]


def _bars(heights: Floats, wrong: Sequence[bool] | Floats | None = None) -> str:
    """Small bars for heights from 0 to 1, `!` where something is not finite."""
    most = len(heights) // _TEXT_COLUMNS + 1
    marks = np.zeros(len(heights), dtype=bool) if wrong is None else np.asarray(wrong)
    return "".join(
        "!" if mark else " " if np.isnan(height) else BLOCKS[1 + round(height * (len(BLOCKS) - 2))]
        for height, mark in zip(heights[::most].tolist(), marks[::most].tolist(), strict=True)
    )
