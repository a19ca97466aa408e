"""Rules judge by frames alone; the judge tells each trouble once."""

from __future__ import annotations

import numpy as np
import pytest

from tbhooks import stats
from tbhooks.errors import ArgumentError
from tbhooks.frame import Finding, Frame, Site
from tbhooks.history import History
from tbhooks.rules import RULES, Judge, choose, non_finite
from tests.test_stats import row_of

FIRST, SECOND, THIRD = (Site(path, "activation") for path in ("embed", "attention", "head"))
GOOD, NAN = np.ones(4), np.array([1.0, np.nan, np.nan, np.inf])


def frame(step: int, data: dict[Site, np.ndarray]) -> Frame:
    values = np.array([row_of(x) for x in data.values()]).reshape(-1, stats.WIDTH)
    return Frame(step, 0.0, 0, tuple(data), values, np.zeros((len(data), 0), dtype=np.int64))


def judged(*frames: Frame) -> list[Finding]:
    history = History()
    for each in frames:
        history.append(each)
    return non_finite(history)


# --- non_finite -----------------------------------------------------------------------------------


def test_non_finite_names_the_first_site_in_execution_order() -> None:
    (finding,) = judged(frame(12, {FIRST: GOOD, THIRD: NAN, SECOND: NAN}))
    assert finding.site == THIRD
    assert (finding.step, finding.rule, finding.severity) == (12, "non_finite", "error")


def test_non_finite_says_what_where_and_when() -> None:
    (finding,) = judged(frame(12, {FIRST: GOOD, SECOND: NAN}))
    assert finding.message.startswith("2 NaN and 1 infinite of 4 values in the activation of attention at step 12")
    assert finding.evidence == {"nan_count": 2, "inf_count": 1, "count": 4}


@pytest.mark.parametrize(
    ("data", "words"), [([np.nan, 1.0], "1 NaN of 2 values"), ([np.inf, -np.inf], "2 infinite of 2 values")]
)
def test_non_finite_names_only_what_there_is(data: list[float], words: str) -> None:
    (finding,) = judged(frame(0, {FIRST: np.array(data)}))
    assert finding.message.startswith(words)


@pytest.mark.parametrize("kind", ["activation", "gradient", "weight", "weight_gradient", "update"])
def test_non_finite_looks_at_every_kind(kind: str) -> None:
    (finding,) = judged(frame(0, {FIRST: GOOD, Site("head.weight", kind): NAN}))
    assert finding.site == Site("head.weight", kind)
    assert kind in finding.message


def test_finite_numbers_are_fine_however_large() -> None:
    assert judged(frame(0, {FIRST: np.array([1e150, -1e150]), SECOND: np.zeros(0)})) == []


def test_only_the_newest_frame_is_judged() -> None:
    assert judged(frame(0, {FIRST: NAN}), frame(1, {FIRST: GOOD})) == []


# --- Choosing -------------------------------------------------------------------------------------


def a_rule(history: History) -> list[Finding]:
    return [Finding(history[-1].step, None, "a_rule", "info", "always", {})]


def test_default_means_all_rules() -> None:
    assert choose("default") == tuple(RULES.values())
    assert non_finite in choose("default")


@pytest.mark.parametrize("nothing", [(), [], set()])
def test_no_rules_may_be_chosen(nothing: object) -> None:
    assert choose(nothing) == ()


def test_rules_are_chosen_by_name_and_as_functions() -> None:
    assert choose("non_finite") == (non_finite,)
    assert choose(["non_finite"]) == (non_finite,)
    assert choose([a_rule, "non_finite"]) == (a_rule, non_finite)
    assert choose(rule for rule in (a_rule,)) == (a_rule,)


def test_default_may_be_one_of_a_list() -> None:
    assert choose(["default", a_rule]) == (*RULES.values(), a_rule)


@pytest.mark.parametrize("wrong", ["non_finit", ["non_finit"], [a_rule, "non_finit"]])
def test_an_unknown_rule_names_the_nearest(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"unknown rule 'non_finit': did you mean 'non_finite'"):
        choose(wrong)


@pytest.mark.parametrize("wrong", [None, 3, 1.5, [3], [None]])
def test_what_is_no_rule_is_rejected(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="rule"):
        choose(wrong)


# --- The judge ------------------------------------------------------------------------------------


def test_the_judge_tells_once_a_rule_and_site() -> None:
    judge = Judge(choose("default"), History())
    for step in range(3):
        judge(frame(step, {FIRST: GOOD, SECOND: NAN}))
    judge(frame(3, {FIRST: NAN, SECOND: NAN}))
    assert [(finding.step, finding.site) for finding in judge.findings] == [(0, SECOND), (3, FIRST)]


def test_two_rules_may_speak_of_one_site() -> None:
    def other(history: History) -> list[Finding]:
        step = history[-1].step
        return [Finding(step, FIRST, "other", "info", "too", {})] if step else []

    judge = Judge((other, non_finite), History())
    for step in range(3):
        judge(frame(step, {FIRST: NAN}))
    assert [(finding.step, finding.rule) for finding in judge.findings] == [(0, "non_finite"), (1, "other")]


def test_the_frame_carries_what_was_found_in_it() -> None:
    judge = Judge(choose("default"), History())
    clean, sick = frame(0, {FIRST: GOOD}), frame(1, {FIRST: NAN})
    assert judge(clean) is clean
    assert [finding.rule for finding in judge(sick).findings] == ["non_finite"]
    assert [finding.step for finding in judge(frame(2, {FIRST: NAN})).findings] == [2]


def test_the_history_carries_what_was_found() -> None:
    history = History()
    Judge(choose("default"), history)(frame(0, {FIRST: NAN}))
    assert [finding.rule for finding in history[-1].findings] == ["non_finite"]


def test_rules_see_the_whole_history() -> None:
    seen: list[list[int]] = []

    def look(history: History) -> list[Finding]:
        seen.append([each.step for each in history])
        return []

    judge = Judge((look,), History())
    for step in range(3):
        judge(frame(step, {FIRST: GOOD}))
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_a_frame_of_scalars_alone_is_kept_but_not_judged() -> None:
    history = History()
    judge = Judge((a_rule,), history)
    judge(frame(0, {}))
    assert len(history) == 1
    assert judge.findings == []


def test_without_rules_nothing_is_found() -> None:
    history = History()
    judge = Judge((), history)
    judge(frame(0, {FIRST: NAN}))
    assert judge.findings == []
    assert len(history) == 1
