"""The engine reports each issue once, again when it has become worse, and logs what it reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tbhooks.data.frame import Finding, Frame, Severity, Site
from tbhooks.data.history import History
from tbhooks.rules import choose, non_finite, vanishing_gradient
from tbhooks.rules.engine import RuleEngine
from tbhooks.rules.rule import Rule
from tests.support.frames import make_frame

FIRST, SECOND, THIRD = (Site(path, "activation") for path in ("embed", "attention", "head"))
GOOD, NAN = np.ones(4), np.array([1.0, np.nan, np.nan, np.inf])


def says(at: Callable[[int], Sequence[Finding]]) -> Rule:
    """A rule whose findings depend on the step alone."""
    return lambda history: at(history[-1].step)


def issue(step: int, site: Site | None = FIRST, severity: Severity = "warning", **evidence: float) -> Finding:
    return Finding(step, site, "some_rule", severity, f"issue at {step}", evidence)


def run_steps(rule: Rule, steps: int) -> RuleEngine:
    engine = RuleEngine((rule,), History())
    for step in range(steps):
        engine(make_frame(step))
    return engine


def reported_steps(engine: RuleEngine) -> list[int]:
    return [finding.step for finding in engine.findings]


# --- Once -----------------------------------------------------------------------------------------


def test_the_engine_reports_once_a_rule_and_site() -> None:
    engine = RuleEngine(choose(["non_finite"]), History())
    for step in range(3):
        engine(make_frame(step, {FIRST: GOOD, SECOND: NAN}))
    engine(make_frame(3, {FIRST: NAN, SECOND: NAN}))
    assert [(finding.step, finding.site) for finding in engine.findings] == [(0, SECOND), (3, FIRST)]


def test_two_rules_may_speak_of_one_site() -> None:
    other = says(lambda step: [Finding(step, FIRST, "other", "info", "too", {})] if step else [])
    engine = RuleEngine((other, non_finite), History())
    for step in range(3):
        engine(make_frame(step, {FIRST: NAN}))
    assert [(finding.step, finding.rule) for finding in engine.findings] == [(0, "non_finite"), (1, "other")]


def test_a_issue_that_comes_and_goes_is_reported_once() -> None:
    engine = run_steps(says(lambda step: [issue(step)] if step % 2 else []), 20)
    assert reported_steps(engine) == [1]


def test_a_issue_that_stays_the_same_is_reported_once() -> None:
    assert reported_steps(run_steps(says(lambda step: [issue(step, excess=3.0, others=5)]), 50)) == [0]


# --- Again ----------------------------------------------------------------------------------------


def test_what_gets_worse_and_worse_is_reported_again_after_twice_as_many_frames() -> None:
    engine = run_steps(says(lambda step: [issue(step, excess=10.0**step)]), 40)
    assert reported_steps(engine) == [0, 1, 3, 7, 15, 31]


@pytest.mark.parametrize("measure", ["excess", "others"])
def test_worse_is_twice_as_much(measure: str) -> None:
    def growing(factor: float) -> Rule:
        return says(lambda step: [issue(step, **{measure: 4.0 * (factor if step == 5 else 1.0)})])

    assert reported_steps(run_steps(growing(2.0), 8)) == [0, 5]
    assert reported_steps(run_steps(growing(1.99), 8)) == [0]


def test_a_severity_that_rises_is_reported_at_once_and_one_that_falls_is_not() -> None:
    severities: list[Severity] = ["info", "info", "error", "warning", "error"]
    engine = run_steps(says(lambda step: [issue(step, severity=severities[step])]), 5)
    assert reported_steps(engine) == [0, 2]


def test_evidence_says_since_when_and_how_often() -> None:
    engine = run_steps(says(lambda step: [issue(step, excess=10.0**step)] if step >= 2 else []), 7)
    known = [(finding.evidence["since"], finding.evidence["times"]) for finding in engine.findings]
    assert known == [(2, 1), (2, 2), (2, 4)]


def test_a_rule_that_knows_better_since_when_is_believed() -> None:
    engine = run_steps(says(lambda step: [issue(step, since=-5, excess=10.0**step)]), 2)
    assert [finding.evidence["since"] for finding in engine.findings] == [-5, -5]


# --- One cause ------------------------------------------------------------------------------------


def test_a_widespread_issue_whose_first_place_moves_is_reported_once() -> None:
    places = [Site(f"layers.{i}", "gradient") for i in range(6)]
    engine = run_steps(says(lambda step: [issue(step, places[step], others=3)]), 6)
    assert reported_steps(engine) == [0]
    assert engine.findings[0].evidence["times"] == 1


def test_single_places_are_issues_of_their_own() -> None:
    places = [Site(f"layers.{i}", "gradient") for i in range(4)]
    assert reported_steps(run_steps(says(lambda step: [issue(step, places[step])]), 4)) == [0, 1, 2, 3]


def test_sixty_layers_without_gradient_are_one_finding() -> None:
    fading = {Site(f"layers.{i}", "gradient"): [10.0**-i, -(10.0**-i)] for i in range(60)}
    engine = RuleEngine((vanishing_gradient,), History())
    for step in range(4):
        engine(make_frame(step, fading))
    (finding,) = engine.findings
    assert finding.evidence["others"] == 60 - 1 - int(finding.site.path.removeprefix("layers."))
    assert "53 other tensors affected" in finding.message


def test_nan_everywhere_is_one_finding_that_counts_the_others() -> None:
    engine = RuleEngine(choose(["non_finite"]), History())
    engine(make_frame(0, {FIRST: GOOD, SECOND: NAN, THIRD: NAN, Site("head", "gradient"): NAN}))
    (finding,) = engine.findings
    assert (finding.site, finding.evidence["others"]) == (SECOND, 2)
    assert "; 2 other tensors affected" in finding.message


# --- Frames and history ---------------------------------------------------------------------------


def test_the_frame_carries_all_that_was_found_in_it() -> None:
    engine = RuleEngine(choose(["non_finite"]), History())
    clean, affected = make_frame(0, {FIRST: GOOD}), make_frame(1, {FIRST: NAN})
    assert engine(clean) is clean
    assert [finding.rule for finding in engine(affected).findings] == ["non_finite"]
    assert [finding.step for finding in engine(make_frame(2, {FIRST: NAN})).findings] == [2]
    assert reported_steps(engine) == [1]


def test_the_history_carries_what_was_found() -> None:
    history = History()
    RuleEngine(choose("default"), history)(make_frame(0, {FIRST: NAN}))
    assert [finding.rule for finding in history[-1].findings] == ["non_finite"]


def test_rules_see_the_whole_history() -> None:
    seen: list[list[int]] = []

    def look(history: History) -> list[Finding]:
        seen.append([each.step for each in history])
        return []

    run_steps(look, 3)
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_a_frame_of_scalars_alone_is_kept_but_not_engined() -> None:
    history = History()
    engine = RuleEngine((says(lambda step: [issue(step)]),), history)
    engine(make_frame(0, {}, scalars={"loss": 1.0}))
    assert history.scalar("loss")[0] == [0]
    assert engine.findings == []


def test_without_rules_nothing_is_found() -> None:
    history = History()
    engine = RuleEngine((), history)
    engine(make_frame(0, {FIRST: NAN}))
    assert engine.findings == []
    assert len(history) == 1


def test_an_evaluation_between_does_not_end_a_widespread_issue() -> None:
    places = [Site(f"layers.{i}", "gradient") for i in range(6)]
    rule = says(lambda step: [issue(step, places[step], others=3)] if step % 2 == 0 else [])
    engine = RuleEngine((rule,), History())
    for step in range(6):
        frame = make_frame(step)
        engine(frame if step % 2 == 0 else _evaluated(frame))
    assert reported_steps(engine) == [0]


def _evaluated(frame: Frame) -> Frame:
    return replace(frame, sites=tuple(replace(site, kind=f"eval.{site.kind}") for site in frame.sites))


# --- Logging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severity", "level"), [("info", logging.INFO), ("warning", logging.WARNING), ("error", logging.ERROR)]
)
def test_each_reported_finding_is_logged_once(severity: Severity, level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="tbhooks"):
        run_steps(says(lambda step: [issue(step, severity=severity)]), 10)
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("tbhooks", level, "some_rule: issue at 0")
    ]


def test_what_is_reported_again_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    run_steps(says(lambda step: [issue(step, excess=10.0**step)]), 8)
    assert [record.getMessage() for record in caplog.records] == [
        f"some_rule: issue at {step}" for step in (0, 1, 3, 7)
    ]
