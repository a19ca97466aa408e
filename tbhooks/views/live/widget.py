"""The interactive live view: an anywidget widget that shows the same text and numbers as the static view.

`panel` and `timeline` decide what it shows; `static/live.js` lays it out and asks for the histogram of a clicked cell.
Nothing is loaded from a network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.data.grids import Grid
from tbhooks.data.history import MOST_WITH_BUCKETS
from tbhooks.data.stats import STAT_NAMES, Floats
from tbhooks.drawing.heatmap import PALETTE, WRONG, Scale
from tbhooks.drawing.text import number, printable, rebinned
from tbhooks.views.live import Live, panel, publish
from tbhooks.views.notebook import html

STATIC = Path(__file__).parent / "static"
MIME = "application/vnd.jupyter.widget-view+json"
MOST_ROWS = 400
BINS = 48
_SHOWN_STATS = ("mean", "std", "min", "max", "zero_fraction", "nan_count", "inf_count")


@cache
def _widget_class() -> Any:
    """Made on first use, because its base class is an extra."""
    import anywidget  # noqa: PLC0415
    import traitlets  # noqa: PLC0415

    members = {
        "_esm": (STATIC / "live.js").read_text(encoding="utf-8"),
        "_css": html.STYLE + (STATIC / "live.css").read_text(encoding="utf-8"),
        "kind": traitlets.Unicode().tag(sync=True),
        "stat": traitlets.Unicode().tag(sync=True),
        "view": traitlets.Dict().tag(sync=True),
        "palette": traitlets.Bytes(PALETTE).tag(sync=True),
        "static_class": traitlets.Unicode().tag(sync=True),
    }
    return type("LiveView", (anywidget.AnyWidget,), members)


class WidgetScreen:
    """A widget that shows a live view, and reacts to what users choose and click.

    `static_class` is the CSS class of the static view in the same cell, which the widget hides.
    """

    def __init__(self, live: Live, static_class: str) -> None:
        self._live = live
        kind, stat = live.timeline.kind, live.timeline.stat
        self._widget = _widget_class()(kind=kind, stat=stat, static_class=static_class, view=view(live))
        self._widget.observe(self._on_choice, names=["kind", "stat"])
        self._widget.on_msg(self._on_message)

    def open(self, live: Live) -> None:
        """Shows another view of the same widget."""
        bundle = self._widget._repr_mimebundle_()
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        text = "The interactive view needs a running kernel; its last state is shown above."
        publish({MIME: data[MIME], "text/plain": text})
        self._leave_main_thread()

    def update(self, live: Live, *, final: bool) -> None:
        self._widget.view = view(live)
        self._leave_main_thread()

    def _leave_main_thread(self) -> None:
        """Lets a subshell of the kernel answer the widget's messages while a cell is running.

        ipykernel 7 sends them to the thread that used the comm last, which is busy with training.
        """
        vars(self._widget.comm).pop("_reply_subshell_id", None)

    def _on_choice(self, _change: object) -> None:
        wanted, shown = (self._widget.kind, self._widget.stat), self._live.timeline
        if wanted != (shown.kind, shown.stat):
            try:
                self._live.choose(*wanted)
            except ArgumentError:  # the watch does not read it
                self._widget.kind, self._widget.stat = shown.kind, shown.stat

    def _on_message(self, _widget: object, content: Any, _buffers: object) -> None:
        if isinstance(content, dict) and content.get("ask") == "histogram":
            self._widget.send({"histogram": histogram(self._live, content)})


def view(live: Live) -> dict[str, Any]:
    """Everything the script shows: text, and matrices as row-major bytes."""
    timeline, status = live.timeline, live.status()
    flagged, layers = status.flagged(), timeline.layers
    grid = timeline.grid(flagged, MOST_ROWS)
    scale = Scale.of(np.where(grid.wrong, np.nan, grid.values))
    shown, more = panel.newest(status)
    notes = [panel.nonfinite_note(grid, layers), more, *status.notes, panel.left_out(grid, layers)]
    return {
        "headline": panel.headline(timeline, status),
        "title": panel.title(grid, layers.span),
        "lines": [
            {"name": one.name, "words": one.words, "heights": _to_json(one.heights)} for one in panel.lines(timeline)
        ],
        "kind": timeline.kind,
        "stat": timeline.stat,
        "kinds": list(timeline.kinds),
        "stats": [name for name in STAT_NAMES if name != "ratio" or timeline.kind.endswith("update")],
        "names": list(grid.names),
        "flagged": [i for i, name in enumerate(grid.names) if name in flagged],
        "steps": [layers.steps(column) for column in range(layers.columns)],
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


def _to_json(heights: Floats) -> list[float | None]:
    """NaN becomes null, which JSON has."""
    return [None if np.isnan(height) else round(height, 4) for height in heights.tolist()]


def histogram(live: Live, request: dict[str, Any]) -> dict[str, Any]:
    """What a click on a cell shows: the histogram at the newest of its steps that has one, or why there is none."""
    name, first, last = str(request.get("name")), request.get("first"), request.get("last")
    if not isinstance(first, int) or not isinstance(last, int):
        return {"title": printable(name), "why": "The request has no name or no steps."}
    kind = live.timeline.kind
    for frame in reversed(live.history[:]):
        if first <= frame.step <= last and (name, kind) in frame and frame.buckets.shape[1]:
            return _distribution(frame, name, kind)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    why = f"No histogram is kept: only the newest {MOST_WITH_BUCKETS} logged steps keep theirs."
    return {"title": printable(f"{kind} of {name} at {steps}"), "why": why}


def _distribution(frame: Frame, name: str, kind: str) -> dict[str, Any]:
    reading = frame[name, kind]
    low, high = reading.min, reading.max
    words = ", ".join(f"{stat.replace('_', ' ')} {number(getattr(reading, stat), stat)}" for stat in _SHOWN_STATS)
    shown: dict[str, Any] = {"title": printable(f"{kind} of {name} at step {frame.step}"), "words": words}
    if not np.isfinite(low):
        return {**shown, "why": "No value is finite."}
    heights = rebinned(reading.counts, low, high, BINS) if high > low else np.array([reading.count])
    return {**shown, "low": number(low), "high": number(high), "heights": heights.tolist()}
