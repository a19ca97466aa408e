"""Findings as a text that grows, for tools that keep one text of a run: each rule and place once."""

from __future__ import annotations

from collections.abc import Sequence

from tbhooks.data.frame import Finding, Site


class Told:
    """What has been found so far, a line a finding."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, Site | None], str] = {}

    @property
    def text(self) -> str:
        return "\n".join(self._lines.values())

    def hears(self, findings: Sequence[Finding]) -> bool:
        """Whether any of these is new."""
        known = len(self._lines)
        for finding in findings:
            line = f"{finding.severity}, step {finding.step}: {finding.message}"
            self._lines.setdefault((finding.rule, finding.site), line)
        return len(self._lines) > known
