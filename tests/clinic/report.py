"""Runs the cases and prints what was expected and what was found: the confusion table."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tbhooks.data.frame import Finding
from tests.clinic.training import FRAMES_ALLOWED, Case, train

SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Outcome:
    case: Case
    right: bool
    decisive: tuple[Finding, ...]
    """The expected findings of an affected case, the false alarms of a normal one."""
    also: tuple[str, ...]
    """Other rules that reported something in an affected case."""
    seconds: float = 0.0


def verdict(case: Case, findings: list[Finding], every: int) -> tuple[bool, list[Finding]]:
    """Whether the rules reported what they should, and the findings that decide it."""
    if not case.rules:
        alarms = [finding for finding in findings if finding.severity != "info"]
        return not alarms, alarms
    found = [next((f for f in findings if _is_expected(case, rule, f, every)), None) for rule in case.rules]
    return None not in found, [finding for finding in found if finding is not None]


def _is_expected(case: Case, rule: str, finding: Finding, every: int) -> bool:
    place = "" if finding.site is None else finding.site.path
    return (
        finding.rule == rule
        and SEVERITIES.index(finding.severity) >= SEVERITIES.index(case.severity)
        and case.onset <= finding.step <= case.onset + FRAMES_ALLOWED * every
        and any(fnmatchcase(place, allowed) for allowed in case.at)
    )


def check(case: Case, seed: int = 0) -> Outcome:
    started = time.perf_counter()
    _, findings, every = train(case, seed)
    right, decisive = verdict(case, findings, every)
    loud = dict.fromkeys(finding.rule for finding in findings if finding.severity != "info")
    also = tuple(rule for rule in loud if case.rules and rule not in case.rules)
    return Outcome(case, right, tuple(decisive), also, time.perf_counter() - started)


def rows(outcomes: Iterable[Outcome]) -> Iterator[tuple[str, ...]]:
    yield "case", "expected", "found", "at", "step", "verdict", "also reported"
    for outcome in outcomes:
        expected, decisive = outcome.case.rules, outcome.decisive
        wrong = "MISSED" if expected else "FALSE ALARM"
        yield (
            outcome.case.name,
            ", ".join(expected) or "nothing",
            ", ".join(finding.rule for finding in decisive) or "nothing",
            ", ".join(_place(finding) for finding in decisive),
            ", ".join(str(finding.step) for finding in decisive),
            "right" if outcome.right else wrong,
            ", ".join(outcome.also),
        )


def _place(finding: Finding) -> str:
    if finding.site is not None:
        return finding.site.path
    return "the loss" if finding.rule in ("loss_spike", "non_finite") else "the whole model"


def table(outcomes: list[Outcome]) -> str:
    lines = list(rows(outcomes))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    affected = [outcome for outcome in outcomes if outcome.case.rules]
    normal = [outcome for outcome in outcomes if not outcome.case.rules]
    found, alarms = sum(o.right for o in affected), sum(not o.right for o in normal)
    total = f"found {found}/{len(affected)}, false alarms {alarms}/{len(normal)}"
    return "\n".join([*shown, "", f"{total}, {sum(o.seconds for o in outcomes):.0f} s"])


def run(cases: tuple[Case, ...], seed: int = 0) -> list[Outcome]:
    outcomes = []
    for number, case in enumerate(cases, 1):
        _progress(f"{number} of {len(cases)}: {case.name}")
        outcomes.append(check(case, seed))
    _progress("")
    return outcomes


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
