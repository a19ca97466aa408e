"""What tbhooks objects look like in a notebook: text and self-contained HTML, figures, tables of pandas.

Nothing here needs torch. matplotlib, pandas and IPython are imported by the functions that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from tbhooks.frame import Finding, Frame
from tbhooks.history import History
from tbhooks.notebook import over_time, page, table, told
from tbhooks.render import printable
from tbhooks.report import Stats


def mimebundle(
    text: str, html: str, include: Collection[str] | None = None, exclude: Collection[str] | None = None
) -> dict[str, str]:
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


def of_frame(frame: Frame) -> tuple[str, str]:
    """A frame as text and HTML."""
    return table.as_text(frame), page.wrapped(table.as_html(frame))


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
    parts = [state, told.as_text(findings), *([table.as_text(latest)] if latest is not None else []), lines]
    body = [f"<p><b>{page.text(state)}</b>: {told.counted(findings)}.</p>", told.as_html(findings)]
    cells = [[page.text(name), page.text(value)] for name, value in numbers]
    if latest is not None:
        body.append(page.folded(f"The newest frame, step {latest.step}", table.as_html(latest), unfolded=False))
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
