"""Runs the rules over a growing history and decides which findings to report.

An issue is reported once for each rule and site, and again only after it has become worse, each time after twice as
many occurrences as before. Each reported finding is logged through `logging.getLogger("tbhooks")`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tbhooks.data.frame import Finding, Frame, Severity, Site
from tbhooks.data.history import History
from tbhooks.rules.rule import Rule

logger = logging.getLogger("tbhooks")

LEVELS: dict[Severity, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
WORSE = 2.0
"""By which factor the excess or the number of affected tensors must grow for an issue to count as worse."""

IssueKey = tuple[str, Site | None]


@dataclass
class _Issue:
    """The state of one issue."""

    since: int
    reported: Finding
    occurrences: int = 0
    reported_at: int = 0
    """The number of occurrences when the issue was last reported."""


class RuleEngine:
    """Checks each new frame. `findings` holds the reported findings.

    Calling the engine appends a frame to the history and returns it with its findings.
    """

    def __init__(self, rules: tuple[Rule, ...], history: History) -> None:
        self._rules = rules
        self._history = history
        self._issues: dict[IssueKey, _Issue] = {}
        # For each rule the issue that affected several tensors in the last frame: its first site may move.
        self._widespread: dict[str, IssueKey] = {}
        self.findings: list[Finding] = []

    def __call__(self, frame: Frame) -> Frame:
        self._history.append(frame)
        if not frame.sites:
            return frame
        findings = [self._track(finding) for rule in self._rules for finding in rule(self._history)]
        if not frame.is_evaluation:
            self._widespread = {f.rule: self._key(f) for f in findings if f.evidence.get("others")}
        if findings:
            frame = replace(frame, findings=tuple(findings))
            self._history.replace_newest(frame)
        return frame

    def _track(self, finding: Finding) -> Finding:
        """Adds since when and how often to a finding, and reports it if it is new or worse."""
        key = self._key(finding)
        issue = self._issues.get(key)
        if issue is None:
            issue = self._issues[key] = _Issue(finding.evidence.get("since", finding.step), finding)
        issue.occurrences += 1
        finding = replace(finding, evidence={**finding.evidence, "since": issue.since, "times": issue.occurrences})
        if issue.occurrences == 1 or _is_worse(finding, issue):
            issue.reported, issue.reported_at = finding, issue.occurrences
            self.findings.append(finding)
            logger.log(LEVELS[finding.severity], "%s: %s", finding.rule, finding.message)
        return finding

    def _key(self, finding: Finding) -> IssueKey:
        key = (finding.rule, finding.site)
        if key in self._issues or not finding.evidence.get("others"):
            return key
        return self._widespread.get(finding.rule, key)


def _is_worse(finding: Finding, issue: _Issue) -> bool:
    before = issue.reported
    if LEVELS[finding.severity] > LEVELS[before.severity]:
        return True
    if issue.occurrences < 2 * issue.reported_at:
        return False
    return any(_number(finding, name) >= WORSE * max(_number(before, name), 1.0) for name in ("excess", "others"))


def _number(finding: Finding, name: str) -> float:
    """A number of the evidence; a user's rule may store any object there."""
    value = finding.evidence.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
