"""What tbhooks objects look like in a notebook: text and self-contained HTML, figures, tables of pandas.

Nothing here needs torch. matplotlib, pandas and IPython are imported by the functions that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from tbhooks.data.frame import Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Stats
from tbhooks.drawing.model_table import Summary
from tbhooks.drawing.text import printable
from tbhooks.views.notebook import findings as told
from tbhooks.views.notebook import frame_table
from tbhooks.views.notebook import history as over_time
from tbhooks.views.notebook import html as page

Names = Collection[str] | None


def mimebundle(text: str, html: str, include: Names = None, exclude: Names = None) -> dict[str, str]:
    """What `_repr_mimebundle_` returns: both forms, less what was not asked for."""
    bundle = {"text/plain": text, "text/html": html}
    return {
        kind: content
        for kind, content in bundle.items()
        if (include is None or kind in include) and (exclude is None or kind not in exclude)
    }


class Watching(Protocol):
    """What is shown of a watch."""

    @property
    def latest(self) -> Frame | None: ...

    @property
    def findings(self) -> Sequence[Finding]: ...

    @property
    def stats(self) -> Stats: ...


def frame_bundle(frame: Frame, include: Names = None, exclude: Names = None) -> dict[str, str]:
    """The MIME bundle of a frame."""
    return mimebundle(*of_frame(frame), include, exclude)


def findings_bundle(findings: Sequence[Finding], include: Names = None, exclude: Names = None) -> dict[str, str]:
    """The MIME bundle of some findings."""
    return mimebundle(*of_findings(findings), include, exclude)


def history_bundle(history: History, include: Names = None, exclude: Names = None) -> dict[str, str]:
    """The MIME bundle of a history."""
    return mimebundle(*of_history(history), include, exclude)


def watch_bundle(watching: Watching, include: Names = None, exclude: Names = None) -> dict[str, str]:
    """The MIME bundle of a watch."""
    return mimebundle(*of_watch(watching), include, exclude)


def summary_bundle(summary: Summary, include: Names = None, exclude: Names = None) -> dict[str, str]:
    """The MIME bundle of a model's layers."""
    return mimebundle(str(summary), page.as_html(summary.layers), include, exclude)


def of_frame(frame: Frame) -> tuple[str, str]:
    """A frame as text and HTML."""
    return frame_table.as_text(frame), page.wrapped(frame_table.as_html(frame))


def of_findings(findings: Sequence[Finding]) -> tuple[str, str]:
    """Findings as text and HTML, the worst first."""
    headline = f"<p><b>Findings</b>: {told.counted(findings)}.</p>"
    return told.as_text(findings), page.wrapped(headline + told.as_html(findings))


def of_history(history: History) -> tuple[str, str]:
    """A history as text and HTML."""
    return over_time.as_text(history), page.wrapped(over_time.as_html(history))


def of_watch(watching: Watching) -> tuple[str, str]:
    """A watch as text and HTML: its state, what was found, the newest frame and what it says of itself."""
    latest, findings, stats = watching.latest, watching.findings, watching.stats
    state, numbers = repr(watching).strip("<>"), _of_stats(stats)
    lines = "\n".join(f"{name}: {value}" for name, value in numbers)
    parts = [state, told.as_text(findings), *([frame_table.as_text(latest)] if latest is not None else []), lines]
    body = [f"<p><b>{page.text(state)}</b>: {told.counted(findings)}.</p>", told.as_html(findings)]
    cells = [[page.text(name), page.text(value)] for name, value in numbers]
    if latest is not None:
        body.append(page.folded(f"The newest frame, step {latest.step}", frame_table.as_html(latest), unfolded=False))
    body.append(page.folded("What it says of itself", page.table(("stats", "<"), cells), unfolded=False))
    return "\n\n".join(parts), page.wrapped("".join(body))


def _of_stats(stats: Stats) -> list[tuple[str, str]]:
    told_as: dict[type, Callable[[Any], str]] = {
        dict: lambda many: "; ".join(f"{name}: {why}" for name, why in many.items()),
        tuple: "; ".join,
    }
    pairs = ((name.replace("_", " "), value) for name, value in asdict(stats).items())
    words = ((name, str(told_as.get(type(value), str)(value))) for name, value in pairs)
    return [(name, printable(page.shortened(value, 1000)) or "none") for name, value in words]
