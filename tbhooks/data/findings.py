"""Lists of findings: shown in notebooks, sorted, and without repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tbhooks.data.display import mimebundle
from tbhooks.data.frame import Finding, Frame, Site

SEVERITIES = ("error", "warning", "info")


class Findings(list[Finding]):
    """A list of `Finding`s that shows itself as a table in notebooks. Returned by `Watch.findings`."""

    _repr_mimebundle_ = mimebundle("findings")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython in a terminal, which would print any list in its own way."""
        printer.text(self._repr_mimebundle_()["text/plain"])


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts by severity, errors first, and then by step."""
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.step))


def first_of_each(frames: Iterable[Frame]) -> list[Finding]:
    """The findings of these frames, each problem once. A problem is in every frame in which it was found."""
    return once_each(finding for frame in frames for finding in frame.findings)


def once_each(findings: Iterable[Finding]) -> list[Finding]:
    """Each problem once: its first finding, or the first one with its highest severity.

    A problem is identified by rule and site. If it affects many sites, the first of them may change from step to step;
    it is then identified by rule and first step.
    """
    problems: dict[tuple[str, Site | None], Finding] = {}
    keys: dict[tuple[str, Any], tuple[str, Site | None]] = {}
    for finding in findings:
        key, since = (finding.rule, finding.site), (finding.rule, _hashable(finding.evidence.get("since")))
        if key not in problems and finding.evidence.get("times") not in (None, 1):
            key = keys.get(since, key)
        keys.setdefault(since, key)
        first = problems.setdefault(key, finding)
        if SEVERITIES.index(finding.severity) < SEVERITIES.index(first.severity):
            problems[key] = finding
    return list(problems.values())


def _hashable(value: Any) -> Any:
    """The value, or None if it cannot be a key: the rules of users may put anything into the evidence."""
    return value if isinstance(value, int | float | str) else None
