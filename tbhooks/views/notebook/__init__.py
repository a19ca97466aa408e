"""How tbhooks objects look in a notebook: text and self-contained HTML.

Nothing here needs torch. pandas is imported by the one function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from tbhooks.data.frame import Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Stats
from tbhooks.drawing import model_table
from tbhooks.drawing.model_table import Summary
from tbhooks.drawing.names import shorten
from tbhooks.drawing.text import printable
from tbhooks.views.notebook import findings as findings_view
from tbhooks.views.notebook import frame_table, html
from tbhooks.views.notebook import history as history_view

MimeTypes = Collection[str] | None


class Watching(Protocol):
    """The properties of a watch that its view shows."""

    @property
    def latest(self) -> Frame | None: ...

    @property
    def findings(self) -> Sequence[Finding]: ...

    @property
    def stats(self) -> Stats: ...


def mimebundle(text: str, page: str, include: MimeTypes = None, exclude: MimeTypes = None) -> dict[str, str]:
    """What `_repr_mimebundle_` returns: text and HTML, restricted to the MIME types IPython asked for."""
    bundle = {"text/plain": text, "text/html": page}
    return {
        kind: content
        for kind, content in bundle.items()
        if (include is None or kind in include) and (exclude is None or kind not in exclude)
    }


def render_frame(frame: Frame) -> tuple[str, str]:
    """A frame as text and HTML."""
    return frame_table.as_text(frame), html.wrap(frame_table.as_html(frame))


def render_findings(findings: Sequence[Finding]) -> tuple[str, str]:
    """Findings as text and HTML, the most severe first."""
    headline = f"<p><b>Findings</b>: {findings_view.counted(findings)}.</p>"
    return findings_view.as_text(findings), html.wrap(headline + findings_view.as_html(findings))


def render_history(history: History) -> tuple[str, str]:
    """A history as text and HTML."""
    return history_view.as_text(history), html.wrap(history_view.as_html(history))


def render_watch(watching: Watching) -> tuple[str, str]:
    """A watch as text and HTML: its state, its findings, the newest frame, and its `stats`."""
    latest, findings = watching.latest, watching.findings
    state, numbers = repr(watching).strip("<>"), _stats_cells(watching.stats)
    parts = [state, findings_view.as_text(findings)]
    body = [f"<p><b>{html.escape(state)}</b>: {findings_view.counted(findings)}.</p>", findings_view.as_html(findings)]
    if latest is not None:
        parts.append(frame_table.as_text(latest))
        body.append(html.details(f"Newest logged step, {latest.step}", frame_table.as_html(latest)))
    parts.append("\n".join(f"{name}: {value}" for name, value in numbers))
    cells = [[html.escape(name), html.escape(value)] for name, value in numbers]
    body.append(html.details("Statistics of the watch itself", html.table(("stats", "<"), cells)))
    return "\n\n".join(parts), html.wrap("".join(body))


def render_summary(summary: Summary) -> tuple[str, str]:
    """A model's layers as text and HTML; of a long table both ends."""
    layers = summary.layers
    first, last, between = model_table.ends(model_table.cells(layers))
    gap = [[f"{between:,} more", *[""] * (len(model_table.COLUMNS) - 1)]] if between else []
    rows = [*first, *gap, *last]
    names = html.escape_names([row[0] for row in rows])
    cells = [[name, *map(html.escape_name, row[1:])] for name, row in zip(names, rows, strict=True)]
    headline = f"<p><b>{html.escape(layers.model)}</b>: {html.plural(len(layers.layers), 'layer')}.</p>"
    table = html.table([title for title, _ in model_table.COLUMNS], cells)
    return str(summary), html.wrap(headline + table + "".join(map(html.paragraph, model_table.totals(layers))))


def _stats_cells(stats: Stats) -> list[tuple[str, str]]:
    formats: dict[type, Callable[[Any], str]] = {
        dict: lambda many: "; ".join(f"{name}: {why}" for name, why in many.items()),
        tuple: "; ".join,
    }
    pairs = ((name.replace("_", " "), value) for name, value in asdict(stats).items())
    texts = ((name, str(formats.get(type(value), str)(value))) for name, value in pairs)
    return [(name, printable(shorten(text, 1000)) or "none") for name, text in texts]


def _bundle(render: Callable[[Any], tuple[str, str]]) -> Callable[..., dict[str, str]]:
    def bundle(shown: Any, include: MimeTypes = None, exclude: MimeTypes = None) -> dict[str, str]:
        return mimebundle(*render(shown), include, exclude)

    return bundle


# Called as `bundle(shown, include, exclude)`.
frame_bundle = _bundle(render_frame)
findings_bundle = _bundle(render_findings)
history_bundle = _bundle(render_history)
watch_bundle = _bundle(render_watch)
summary_bundle = _bundle(render_summary)
