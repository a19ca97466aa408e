"""The interactive live view: a widget of anywidget fed with the same words and numbers as the static one.

What it shows is decided in `panel` and `strip`; the script in `static/live.js` lays it out and asks for what a click
needs. Made only where anywidget is installed; nothing of it is loaded from a network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.data.history import MOST_WITH_BUCKETS
from tbhooks.data.stats import STAT_NAMES, Floats
from tbhooks.drawing.heatmap import PALETTE, WRONG, Scale
from tbhooks.drawing.text import number, printable, rebinned
from tbhooks.runs.report_data import Grid
from tbhooks.views.live import Live, panel, publish
from tbhooks.views.notebook import html

STATIC = Path(__file__).parent / "static"
MIME = "application/vnd.jupyter.widget-view+json"
MOST_ROWS = 400
BINS = 48
_READ = ("mean", "std", "min", "max", "zero_fraction", "nan_count", "inf_count")


@cache
def _widget_class() -> Any:
    """Built on first use: its base class is an extra."""
    import anywidget  # noqa: PLC0415
    import traitlets  # noqa: PLC0415

    members = {
        "_esm": (STATIC / "live.js").read_text(encoding="utf-8"),
        "_css": html.STYLE + (STATIC / "live.css").read_text(encoding="utf-8"),
        "kind": traitlets.Unicode().tag(sync=True),
        "stat": traitlets.Unicode().tag(sync=True),
        "view": traitlets.Dict().tag(sync=True),
        "palette": traitlets.Bytes(PALETTE).tag(sync=True),
        "twin": traitlets.Unicode().tag(sync=True),
    }
    return type("LiveView", (anywidget.AnyWidget,), members)


class WidgetScreen:
    """A widget that shows a live view, and answers what its readers choose and click."""

    def __init__(self, live: Live, twin: str) -> None:
        self._live = live
        followed = live.followed
        self._widget = _widget_class()(kind=followed.kind, stat=followed.stat, twin=twin, view=view(live))
        self._widget.observe(self._chosen, names=["kind", "stat"])
        self._widget.on_msg(self._asked)

    def open(self, live: Live) -> None:
        """Another view of the one widget."""
        shown = self._widget._repr_mimebundle_()
        data = shown[0] if isinstance(shown, tuple) else shown
        told = "The interactive view needs a running kernel; the last state it had is above."
        publish({MIME: data[MIME], "text/plain": told})
        self._leave_main_thread()

    def renew(self, live: Live, *, whole: bool) -> None:
        self._widget.view = view(live)
        self._leave_main_thread()

    def _leave_main_thread(self) -> None:
        """Lets the notebook choose where its messages are answered, as its subshells allow while a cell is running.

        ipykernel 7 notes who spoke last and gives them to that thread, which is busy with training.
        """
        vars(self._widget.comm).pop("_reply_subshell_id", None)

    def _chosen(self, _change: object) -> None:
        wanted, shown = (self._widget.kind, self._widget.stat), self._live.followed
        if wanted != (shown.kind, shown.stat):
            try:
                self._live.choose(*wanted)
            except ArgumentError:  # what a watch does not read, it does not show
                self._widget.kind, self._widget.stat = shown.kind, shown.stat

    def _asked(self, _widget: object, content: Any, _buffers: object) -> None:
        if isinstance(content, dict) and content.get("ask") == "histogram":
            self._widget.send({"histogram": histogram(self._live, content)})


def view(live: Live) -> dict[str, Any]:
    """Everything the script shows: words, and matrices as bytes, a row after the other."""
    followed, told = live.followed, live.told()
    sick = told.sick()
    grid = followed.grid(sick, MOST_ROWS)
    scale = Scale.of(np.where(grid.wrong, np.nan, grid.values))
    shown, more = panel.newest(told)
    notes = [panel.alarm(grid, followed.heat), more, *told.notes]
    if len(grid.names) < len(followed.heat.names):
        notes.append(panel.left_out(grid, followed.heat))
    return {
        "headline": panel.headline(followed, told),
        "title": panel.title(grid, followed.heat.span),
        "lines": [
            {"name": line.name, "words": line.words, "heights": _plain(line.heights)} for line in panel.lines(followed)
        ],
        "kind": followed.kind,
        "stat": followed.stat,
        "kinds": list(followed.kinds),
        "stats": [name for name in STAT_NAMES if name != "ratio" or followed.kind.endswith("update")],
        "names": list(grid.names),
        "sick": [i for i, name in enumerate(grid.names) if name in sick],
        "steps": [followed.heat.steps(column) for column in range(followed.heat.columns)],
        "values": grid.values.astype(np.float32).tobytes(),
        "levels": _levels(grid, scale).tobytes(),
        "scale": {"low": number(scale.low), "high": number(scale.high), "logarithmic": scale.logarithmic},
        "findings": [
            {"severity": each.severity, "heading": panel.heading(each), "message": each.message} for each in shown
        ],
        "notes": [note for note in notes if note],
    }  # fmt: skip


def _levels(grid: Grid, scale: Scale) -> Any:
    levels = scale.levels(grid.values)
    levels[grid.wrong] = WRONG
    return levels


def _plain(heights: Floats) -> list[float | None]:
    """JSON has no NaN."""
    return [None if np.isnan(height) else round(height, 4) for height in heights.tolist()]


def histogram(live: Live, asked: dict[str, Any]) -> dict[str, Any]:
    """What a click on a cell shows: the distribution at the newest of its steps that has one, or why there is none."""
    name, first, last = str(asked.get("name")), asked.get("first"), asked.get("last")
    if not isinstance(first, int) or not isinstance(last, int):
        return {"title": printable(name), "why": "A histogram is asked for by name and steps."}
    kind = live.followed.kind
    for frame in reversed(live.history[:]):
        if first <= frame.step <= last and (name, kind) in frame and frame.buckets.shape[1]:
            return _distribution(frame, name, kind)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    why = f"No histogram is kept: the newest {MOST_WITH_BUCKETS} frames have theirs, if their step took one."
    return {"title": printable(f"{kind} of {name} at {steps}"), "why": why}


def _distribution(frame: Frame, name: str, kind: str) -> dict[str, Any]:
    reading = frame[name, kind]
    low, high = reading.min, reading.max
    words = ", ".join(f"{stat.replace('_', ' ')} {number(getattr(reading, stat), stat)}" for stat in _READ)
    told = {"title": printable(f"{kind} of {name} at step {frame.step}"), "words": words}
    if not np.isfinite(low):
        return {**told, "why": "There is no finite value."}
    heights = rebinned(reading.counts, low, high, BINS) if high > low else np.array([reading.count])
    return {**told, "low": number(low), "high": number(high), "heights": heights.tolist()}
