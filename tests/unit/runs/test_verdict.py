"""The verdict on a run: issues grouped by cause, what led to what, and one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np

from tbhooks.data.findings import issues
from tbhooks.data.frame import Finding, Severity, Site
from tbhooks.rules import SHIPPED
from tbhooks.runs.verdict import CAUSES, TITLES, causes, loss_trend, verdict

BLOCK = Site("h.0", "activation")


def found(step: int, rule: str, severity: Severity = "error", site: Site | None = BLOCK, **evidence: Any) -> Finding:
    return Finding(step, site, rule, severity, rule, evidence)


def points(*values: float, every: int = 1) -> tuple[Any, Any]:
    return np.arange(len(values), dtype=np.int64) * every, np.array(values)


BLOW_UP = [
    found(12, "non_finite"),
    found(0, "update_ratio"),
    found(5, "update_ratio", since=0),
    found(9, "exploding_activation", others=3),
]


def test_what_a_learning_rate_did_is_one_cause_with_a_chain_that_ends_in_nan() -> None:
    (cause,) = causes(issues(BLOW_UP))
    assert [issue.rule for issue in cause.issues] == ["update_ratio", "exploding_activation", "non_finite"]
    chain = cause.chain({"train.lr/0": points(*[0.5] * 13)})
    assert [(link.step, link.what) for link in chain] == [
        (0, "learning rate 0.5"),
        (0, "unsuitable update-to-weight ratio in h.0"),
        (9, "exploding activations in h.0 and 3 more"),
        (12, "NaN or infinity in h.0"),
    ]


def test_a_nan_that_nothing_announced_is_not_blamed_on_the_learning_rate() -> None:
    (cause,) = causes(issues([found(12, "non_finite")]))
    assert [link.what for link in cause.chain({"train.lr/0": points(*[0.5] * 13)})] == ["NaN or infinity in h.0"]


def test_the_sentence_of_a_verdict_tells_the_chain_and_the_loss() -> None:
    given = verdict(BLOW_UP, {"train/loss": points(*[3.0] * 10, *[64.0] * 3)}, 13)
    assert given.level == "error"
    assert given.sentence == (
        "Problem: unsuitable update-to-weight ratio in h.0 (step 0) → exploding activations in h.0 and 3 more (step 9)"
        " → NaN or infinity in h.0 (step 12). train/loss rose from 3 to 64."
    )


def test_a_run_without_issues_says_so_with_its_loss() -> None:
    given = verdict([], {"train/loss": points(2.3, 1.0, 0.5)}, 3)
    assert (given.level, given.sentence) == (
        "ok",
        "No issues found in 3 logged steps. train/loss fell from 2.3 to 0.5.",
    )


def test_notes_are_never_the_cause_of_errors_and_are_not_a_problem() -> None:
    notes = [found(0, "low_precision", "info"), found(0, "low_precision", "info", Site("fc", "gradient"))]
    assert len(causes(issues(notes))) == 1
    assert verdict(notes, {}, 5).sentence == "No issues found in 5 logged steps (1 note)."
    assert [cause.severity for cause in causes(issues([*notes, found(3, "non_finite")]))] == ["error", "info"]


def test_an_issue_that_was_over_long_before_is_not_the_cause() -> None:
    late = [found(0, "update_ratio"), found(10_000, "non_finite")]
    assert len(causes(issues(late))) == 2
    assert len(causes(issues([found(0, "bad_init", "warning"), found(10_000, "non_finite")]))) == 1


def test_issues_that_cannot_lead_to_one_another_stay_apart() -> None:
    assert len(causes(issues([found(3, "missing_gradient"), found(3, "sick_rank"), found(4, "a_rule_of_mine")]))) == 3


def test_a_cause_is_never_later_than_what_it_led_to() -> None:
    assert len(causes(issues([found(2, "non_finite"), found(9, "update_ratio")]))) == 2


def test_every_shipped_rule_has_a_title_and_causes_come_before_effects() -> None:
    order = list(TITLES)
    assert {rule.name for rule in SHIPPED} <= set(order)
    for effect, allowed in CAUSES.items():
        assert all(order.index(cause) < order.index(effect) for cause in allowed), effect


def test_a_loss_that_is_not_finite_at_the_end_is_said() -> None:
    assert loss_trend({"train/loss": points(1.0, 2.0, float("nan"))}) == "train/loss is not finite."
    assert loss_trend({"train/loss": points(1.0, 1.001)}) == "train/loss stayed at 1."
    assert loss_trend({"train.lr/0": points(1.0, 2.0)}) == ""


def test_a_verdict_as_plain_values_has_the_steps_of_each_issue() -> None:
    (cause,) = verdict(BLOW_UP, {}, 13).to_dict()["causes"]
    assert [link["rule"] for link in cause["chain"]] == ["update_ratio", "exploding_activation", "non_finite"]
    first = cause["issues"][0]
    assert (first["onset"], first["last"], first["count"]) == (0, 5, 2)
