"""Findings grouped by problem: since when, when it was worst, when it was last seen, and how often."""

from __future__ import annotations

from typing import Any

from tbhooks.data.findings import issues, once_each
from tbhooks.data.frame import Finding, Severity, Site

DEAD = Site("relu", "activation")


def found(
    step: int, severity: Severity = "warning", site: Site | None = DEAD, rule: str = "dead_units", **evidence: Any
) -> Finding:
    return Finding(step, site, rule, severity, f"{rule} at {step}", evidence)


def test_the_onset_of_a_repeated_finding_is_its_first_step_and_not_its_newest() -> None:
    (issue,) = issues(
        [found(step, since=9, times=i + 1, excess=1 + (step == 30)) for i, step in enumerate((10, 30, 241))]
    )
    assert (issue.onset, issue.peak.step, issue.last.step, issue.count) == (9, 30, 241, 3)


def test_the_peak_is_the_most_severe_finding_and_then_the_one_farthest_beyond_its_threshold() -> None:
    (issue,) = issues([found(1, excess=9.0), found(2, "error", excess=2.0), found(3, "error", excess=4.0), found(4)])
    assert (issue.severity, issue.peak.step, issue.first_at_worst.step) == ("error", 3, 2)


def test_a_run_read_in_part_still_knows_how_often_it_was_found() -> None:
    (issue,) = issues([found(10, times=1), found(500, since=10, times=50)])
    assert issue.count == 50


def test_a_problem_whose_first_site_moves_stays_one_problem() -> None:
    other = Site("relu2", "activation")
    assert len(issues([found(1, since=1, times=1, others=3), found(2, site=other, since=1, times=2, others=2)])) == 1
    assert len(issues([found(1, since=1, times=1), found(2, site=other, since=2, times=1)])) == 2


def test_evidence_of_a_rule_of_the_user_may_be_any_object() -> None:
    (issue,) = issues([found(3, since=object(), times="many", excess=[1])])
    assert (issue.onset, issue.count, issue.peak.step) == (3, 1, 3)
    assert once_each(issue.findings) == list(issue.findings)


def test_an_issue_as_plain_values_has_its_steps_and_the_message_of_its_peak() -> None:
    (issue,) = issues([found(5, excess=1.0), found(6, excess=2.0)])
    encoded = issue.to_dict()
    assert (encoded["onset"], encoded["peak"], encoded["last"], encoded["count"]) == (5, 6, 6, 2)
    assert encoded["message"] == "dead_units at 6"
    assert encoded["site"] == ["relu", "activation", ""]
