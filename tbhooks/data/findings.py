"""Lists of findings: shown in notebooks, sorted, and grouped by issue with its first, worst and newest step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tbhooks.data.display import mimebundle
from tbhooks.data.frame import Finding, Frame, Severity, Site

SEVERITIES = ("error", "warning", "info")


class Findings(list[Finding]):
    """A list of `Finding`s that shows itself as a table in notebooks. Returned by `Watch.findings`."""

    _repr_mimebundle_ = mimebundle("findings")

    def __str__(self) -> str:
        """One sentence per finding, or that there is none."""
        return str(self._repr_mimebundle_()["text/plain"])

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
    """Each problem once: its first finding, or the first one with its highest severity."""
    return [issue.first_at_worst for issue in issues(findings)]


@dataclass(frozen=True, slots=True)
class Issue:
    """One problem over the whole run, from all of its findings."""

    findings: tuple[Finding, ...]
    """In the order in which they were found; at least one."""

    @property
    def rule(self) -> str:
        return self.findings[0].rule

    @property
    def site(self) -> Site | None:
        """The site at which it was first found."""
        return self.findings[0].site

    @property
    def severity(self) -> Severity:
        """The highest one."""
        return min((finding.severity for finding in self.findings), key=SEVERITIES.index)

    @property
    def onset(self) -> int:
        """The step since which there is the problem, which may be before the step at which it was found."""
        return min(min(finding.step, _since(finding)) for finding in self.findings)

    @property
    def peak(self) -> Finding:
        """The finding at which it was worst: by severity, then by the excess over the threshold."""
        return min(self.findings, key=lambda one: (SEVERITIES.index(one.severity), -_excess(one)))

    @property
    def last(self) -> Finding:
        """The newest finding."""
        return max(self.findings, key=lambda finding: finding.step)

    @property
    def count(self) -> int:
        """At how many logged steps it was found."""
        return max(len({finding.step for finding in self.findings}), *map(_times, self.findings))

    @property
    def first_at_worst(self) -> Finding:
        """The first finding with the highest severity."""
        return next(finding for finding in self.findings if finding.severity == self.severity)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values: `rule`, `site`, `severity`, `onset`, `peak`, `last` (steps), `count`, and the message,
        evidence and section of the documentation (`doc`) of the peak.
        """
        site = None if self.site is None else [self.site.path, self.site.kind, self.site.index]
        peak = self.peak
        return {
            "rule": self.rule, "site": site, "severity": self.severity, "onset": self.onset, "peak": peak.step,
            "last": self.last.step, "count": self.count, "message": peak.message, "evidence": dict(peak.evidence),
            "doc": peak.doc,
        }  # fmt: skip


def issues(findings: Iterable[Finding]) -> list[Issue]:
    """The findings of a run, in the order of the steps, grouped by problem.

    A problem is identified by rule and site. If it affects many sites, the first of them may change from step to step;
    it is then identified by rule and first step.
    """
    problems: dict[tuple[str, Site | None], list[Finding]] = {}
    keys: dict[tuple[str, Any], tuple[str, Site | None]] = {}
    for finding in findings:
        key, since = (finding.rule, finding.site), (finding.rule, _hashable(finding.evidence.get("since")))
        if key not in problems and finding.evidence.get("times") not in (None, 1):
            key = keys.get(since, key)
        keys.setdefault(since, key)
        problems.setdefault(key, []).append(finding)
    return [Issue(tuple(group)) for group in problems.values()]


def _since(finding: Finding) -> int:
    since = finding.evidence.get("since")
    return since if isinstance(since, int) else finding.step


def _times(finding: Finding) -> int:
    times = finding.evidence.get("times")
    return times if isinstance(times, int) else 1


def _excess(finding: Finding) -> float:
    excess = finding.evidence.get("excess")
    return float(excess) if isinstance(excess, int | float) else 0.0


def _hashable(value: Any) -> Any:
    """The value, or None if it cannot be a key: the rules of users may put anything into the evidence."""
    return value if isinstance(value, int | float | str) else None
