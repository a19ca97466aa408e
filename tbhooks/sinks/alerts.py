"""Findings as alerts of a tracker: one for each rule, not one for each tensor and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tbhooks.data.errors import ArgumentError
from tbhooks.data.findings import SEVERITIES
from tbhooks.data.frame import Finding

MOST_MESSAGES = 5


class Alert(NamedTuple):
    """A message for a tracker."""

    title: str
    text: str
    severity: str


class Alerts:
    """Decides which findings become alerts: a rule speaks once, and again if it becomes more severe.

    Args:
        least: the least severity that becomes an alert: "info", "warning" or "error"; None for no alerts.

    Raises:
        ArgumentError: for another severity.

    """

    def __init__(self, least: str | None) -> None:
        if least is not None and least not in SEVERITIES:
            raise ArgumentError(f"alerts must be one of {', '.join(map(repr, SEVERITIES))}, or None, got {least!r}")
        self._accepted = SEVERITIES[: SEVERITIES.index(least) + 1] if least is not None else ()
        self._told: dict[str, int] = {}

    def of(self, findings: Sequence[Finding]) -> Iterator[Alert]:
        """The alerts for the findings of one logged step."""
        by_rule: dict[str, list[Finding]] = {}
        for finding in findings:
            if finding.severity in self._accepted:
                by_rule.setdefault(finding.rule, []).append(finding)
        for rule, found in by_rule.items():
            worst = min(SEVERITIES.index(finding.severity) for finding in found)
            if worst < self._told.get(rule, len(SEVERITIES)):
                self._told[rule] = worst
                yield Alert(f"tbhooks: {rule}", _text(found), SEVERITIES[worst])


def _text(found: Sequence[Finding]) -> str:
    lines = [f"step {finding.step}: {finding.message}" for finding in found[:MOST_MESSAGES]]
    more = len(found) - MOST_MESSAGES
    return "\n".join([*lines, *([f"and {more} more tensors"] if more > 0 else [])])
