"""Runs the rules over a growing history, and decides what is worth telling.

A trouble is told once for a rule and place; again only when it has become worse, and each time after twice as
many frames as before. Every told finding is logged through `logging.getLogger("tbhooks")`.
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
"""How much further beyond its threshold, or in how many times as many places, makes a trouble worse."""

Place = tuple[str, Site | None]


@dataclass
class _Case:
    """What is known of one trouble."""

    since: int
    told: Finding
    times: int = 1
    told_at: int = 1
    """How many times it had been found when it was told last."""


class Judge:
    """Called with each new frame; `findings` holds what was told."""

    def __init__(self, rules: tuple[Rule, ...], history: History) -> None:
        self._rules = rules
        self._history = history
        self._cases: dict[Place, _Case] = {}
        self._widespread: dict[str, Place] = {}
        """Of each rule the trouble that had many places in the last frame: its first place may move."""
        self.findings: list[Finding] = []

    def __call__(self, frame: Frame) -> Frame:
        self._history.append(frame)
        if not frame.sites:
            return frame
        found = [self._follow(finding) for rule in self._rules for finding in rule(self._history)]
        if not frame.is_evaluation:
            self._widespread = {f.rule: self._place(f) for f in found if f.evidence.get("others")}
        if found:
            frame = replace(frame, findings=tuple(found))
            self._history.replace_newest(frame)
        return frame

    def _follow(self, finding: Finding) -> Finding:
        """The finding with what is known of its trouble, told if that is due."""
        place = self._place(finding)
        case = self._cases.get(place)
        if case is None:
            case = self._cases[place] = _Case(finding.evidence.get("since", finding.step), finding)
            case.times = case.told_at = 0
        case.times += 1
        finding = replace(finding, evidence={**finding.evidence, "since": case.since, "times": case.times})
        if case.times == 1 or _is_worse(finding, case):
            case.told, case.told_at = finding, case.times
            self.findings.append(finding)
            logger.log(LEVELS[finding.severity], "%s: %s", finding.rule, finding.message)
        return finding

    def _place(self, finding: Finding) -> Place:
        place = (finding.rule, finding.site)
        if place in self._cases or not finding.evidence.get("others"):
            return place
        return self._widespread.get(finding.rule, place)


def _is_worse(finding: Finding, case: _Case) -> bool:
    told = case.told
    if LEVELS[finding.severity] > LEVELS[told.severity]:
        return True
    if case.times < 2 * case.told_at:
        return False
    return any(_size(finding, name) >= WORSE * max(_size(told, name), 1.0) for name in ("excess", "others"))


def _size(finding: Finding, name: str) -> float:
    """A number of the evidence; a user's rule may have put anything there."""
    value = finding.evidence.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
