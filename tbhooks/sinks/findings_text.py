"""Findings as one growing text, for trackers that keep a text per run."""

from __future__ import annotations

from collections.abc import Sequence

from tbhooks.data.frame import Finding, Site


class FindingsText:
    """One line per rule and site: its first finding."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, Site | None], str] = {}

    def __str__(self) -> str:
        return "\n".join(self._lines.values())

    def add(self, findings: Sequence[Finding]) -> bool:
        """Adds findings; returns whether any of them is new."""
        known = len(self._lines)
        for finding in findings:
            line = f"{finding.severity}, step {finding.step}: {finding.message}"
            self._lines.setdefault((finding.rule, finding.site), line)
        return len(self._lines) > known
