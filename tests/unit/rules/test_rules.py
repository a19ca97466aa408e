"""Each rule on frames made by hand: where it begins to speak, what it says, and when it keeps silent."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tbhooks import rules
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import RECORDED_KINDS, Finding, Frame, Site
from tbhooks.data.history import History
from tbhooks.rules import RULES, SHIPPED, choose, non_finite
from tbhooks.rules.rule import ShippedRule
from tests.support.frames import SOME, make_frame

FIRST, SECOND, THIRD = (Site(path, "activation") for path in ("embed", "attention", "head"))
GOOD, NAN = np.ones(4), np.array([1.0, np.nan, np.nan, np.inf])
NAMES = [
    "non_finite", "exploding_gradient", "vanishing_gradient", "exploding_activation", "dead_units", "saturated",
    "update_ratio", "unchanged_weight", "missing_gradient", "low_precision", "loss_spike", "collapsed_variance",
    "attention_collapse", "bad_init", "sick_rank", "replica_drift", "evaluation_mode",
    "divergence", "stale_second_moment", "expert_collapse",
]  # fmt: skip

Data = Mapping[Site, Any]


def judged(rule: rules.Rule, frames: Iterable[Frame]) -> list[Finding]:
    history = History()
    for frame in frames:
        history.append(frame)
    return list(rule(history))


def alike(rule: rules.Rule, data: Data, count: int = 4, **scalars: float) -> list[Finding]:
    """What a rule says of the last of some frames that are all the same."""
    tags = {name.replace("__", "/"): value for name, value in scalars.items()}
    return judged(rule, [make_frame(10 * step, data, scalars=tags) for step in range(count)])


def wave(rms: float, count: int = 64) -> np.ndarray:
    """Numbers of this rms and standard deviation, with mean zero."""
    return rms * np.resize([1.0, -1.0], count)


def activation(path: str) -> Site:
    return Site(path, "activation")


def gradient(path: str) -> Site:
    return Site(path, "gradient")


def of_parameter(path: str, weight: Any, gradient: Any = None, update: Any = None) -> dict[Site, Any]:
    given = {"weight": weight, "weight_gradient": gradient, "update": update}
    return {Site(path, kind): data for kind, data in given.items() if data is not None}


# --- Rules as objects -----------------------------------------------------------------------------


def test_the_table_has_the_rules_by_their_names() -> None:
    assert list(RULES) == NAMES
    assert [rule.name for rule in SHIPPED] == NAMES
    assert all(getattr(rules, name) is RULES[name] for name in NAMES)


@pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.name)
def test_a_rule_explains_itself_and_all_its_thresholds(rule: ShippedRule) -> None:
    assert "Try " in (rule.__doc__ or "")
    assert [name for name in rule.thresholds if name != "formats" and f"`{name}`" not in rule.__doc__] == []


def test_a_rule_shows_its_thresholds() -> None:
    assert repr(rules.exploding_gradient) == "exploding_gradient(factor=30.0, depth=10000.0, least_frames=4)"
    assert repr(non_finite) == "non_finite()"


def test_a_threshold_makes_a_copy() -> None:
    stricter = rules.exploding_gradient(factor=20)
    assert repr(stricter) == "exploding_gradient(factor=20, depth=10000.0, least_frames=4)"
    assert rules.exploding_gradient.thresholds["factor"] == 30.0
    assert (stricter.name, stricter.__doc__) == ("exploding_gradient", rules.exploding_gradient.__doc__)


def test_an_unknown_threshold_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"unknown threshold of dead_units 'shares': did you mean 'share'"):
        rules.dead_units(shares=0.1)


@pytest.mark.parametrize("wrong", [None, "much", True, 0, -1.0, float("nan")])
def test_a_threshold_is_a_positive_number(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="factor of exploding_gradient"):
        rules.exploding_gradient(factor=wrong)


def test_a_number_of_frames_is_whole() -> None:
    with pytest.raises(ArgumentError, match="frames of dead_units"):
        rules.dead_units(frames=2.5)
    assert rules.dead_units(frames=2).thresholds["frames"] == 2


@pytest.mark.parametrize("call", [lambda: non_finite(3), lambda: rules.dead_units(History(), share=0.1)])
def test_a_rule_takes_a_history_or_thresholds(call: Any) -> None:
    with pytest.raises(ArgumentError, match="takes a history, or thresholds"):
        call()


# --- All rules ------------------------------------------------------------------------------------

every_rule = pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.name)


@every_rule
def test_nothing_to_judge_is_nothing_wrong(rule: ShippedRule) -> None:
    assert rule(History()) == []
    assert judged(rule, [make_frame(0, {})]) == []
    assert judged(rule, [make_frame(0, {}, scalars={"train/loss": 1.0})] * 9) == []


@every_rule
@pytest.mark.parametrize("histograms", [True, False])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_frame_with_nothing_wrong(rule: ShippedRule, count: int, histograms: bool) -> None:
    frames = [make_frame(step, SOME, histograms=histograms) for step in range(count)]
    assert [finding for finding in judged(rule, frames) if finding.severity != "info"] == []


@every_rule
@pytest.mark.parametrize("kind", RECORDED_KINDS)
def test_any_kind_may_be_all_there_is(rule: ShippedRule, kind: str) -> None:
    data = {Site(f"layer.{i}", kind): wave(1.0) for i in range(9)}
    if kind == "update":
        data = {Site(f"layer.{i}", k): wave(s) for i in range(9) for k, s in (("weight", 1.0), ("update", 1e-3))}
    assert [finding for finding in alike(rule, data) if finding.severity != "info"] == []


@pytest.mark.parametrize("rule", SHIPPED[1:], ids=lambda rule: rule.name)
def test_evaluations_are_judged_for_finite_numbers_only(rule: ShippedRule) -> None:
    affected = affected_by_everything()
    assert judged(rule, [evaluated(frame) for frame in affected]) == []
    assert judged(rule, [*affected, evaluated(affected[-1])]) == []


def test_an_evaluation_is_judged_for_finite_numbers() -> None:
    (finding,) = judged(non_finite, [make_frame(0), evaluated(make_frame(1, {FIRST: NAN}))])
    assert finding.site == Site("embed", "eval.activation")


def test_an_evaluation_between_two_training_steps_is_not_compared_with() -> None:
    training = [make_frame(step, {gradient("a"): wave(1.0)}, scalars={"train.grad_norm": 1.0}) for step in range(4)]
    exploded = make_frame(9, {gradient("a"): wave(99.0)}, scalars={"train.grad_norm": 99.0})
    between = evaluated(make_frame(2, {activation("a"): wave(1.0)}))
    assert judged(rules.exploding_gradient, [*training, between, exploded])


def evaluated(frame: Frame) -> Frame:
    return replace(frame, sites=tuple(replace(site, kind=f"eval.{site.kind}") for site in frame.sites))


def affected_by_everything() -> list[Frame]:
    return [
        make_frame(
            step,
            {
                **{activation(f"l.{i}"): np.zeros(64) if i == 1 else wave(10.0**i) for i in range(9)},
                **{gradient(f"l.{i}"): wave(10.0**-i) for i in range(9)},
                **of_parameter("l.0.weight", wave(1.0), wave(1.0), wave(9.0)),
            },
            scalars={"train/loss": 10.0**step, "train.grad_norm": 10.0**step},
        )
        for step in range(6)
    ]


@every_rule
@pytest.mark.parametrize("seed", range(6))
def test_no_frame_makes_a_rule_fail(rule: ShippedRule, seed: int) -> None:
    frames = random_frames(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in range(1, 7):
            for finding in judged(rule, frames[:count]):
                assert finding.rule == rule.name
                assert finding.step == frames[count - 1].step
                assert f" at step {finding.step}" in finding.message
                assert ". " in finding.message
                assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@cache
def random_frames(seed: int) -> list[Frame]:
    dice = np.random.default_rng(seed)
    return [random_frame(dice, 10 * step) for step in range(6)]


def random_frame(dice: np.random.Generator, step: int) -> Frame:
    """Anything a watch may hand over, and more: empty tensors, NaN, infinities, zeros, sites that come and go."""
    special = ([], [0.0], [np.nan], [np.inf, -np.inf, np.nan], [0.0] * 40, [1.0] * 40, [1e300, -1e300], [1e-300])
    data: dict[Site, Any] = {}
    for i in range(12):
        for kind in RECORDED_KINDS:
            path = f"l.{i}.weight" if kind in ("weight", "weight_gradient", "update") else f"l.{i}"
            if dice.random() < 0.7 and (kind != "update" or Site(path, "weight") in data):
                numbers = dice.normal(size=80) * 10.0 ** dice.integers(-30, 30)
                data[Site(path, kind)] = special[dice.integers(len(special))] if dice.random() < 0.3 else numbers
    scalars = {"train/loss": 10.0 ** dice.integers(-5, 5), "train.grad_norm": 10.0 ** dice.integers(-30, 30)}
    scalars["activation.dead_fraction/l.3"] = float(dice.random())
    scalars["train.lr/0"] = float(dice.choice([0.0, 0.1, np.nan]))
    return make_frame(step, data, scalars=scalars, histograms=bool(dice.random() < 0.7))


# --- non_finite -----------------------------------------------------------------------------------


def of_one(*data: Data) -> list[Finding]:
    return judged(non_finite, [make_frame(12 + i, each) for i, each in enumerate(data)])


def test_non_finite_names_the_first_site_in_execution_order() -> None:
    (finding,) = of_one({FIRST: GOOD, THIRD: NAN, SECOND: NAN})
    assert finding.site == THIRD
    assert (finding.step, finding.rule, finding.severity) == (12, "non_finite", "error")


def test_non_finite_says_what_where_and_when() -> None:
    (finding,) = of_one({FIRST: GOOD, SECOND: NAN})
    assert finding.message.startswith("NaN in 2 and infinity in 1 of 4 values of the attention output at step 12")
    assert finding.evidence == {"nan_count": 2, "inf_count": 1, "count": 4}


@pytest.mark.parametrize(
    ("data", "words"), [([np.nan, 1.0], "NaN in 1 of 2 values"), ([np.inf, -np.inf], "Infinity in 2 of 2 values")]
)
def test_non_finite_names_only_what_there_is(data: list[float], words: str) -> None:
    (finding,) = of_one({FIRST: data})
    assert finding.message.startswith(words)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("activation", "the head.weight output"),
        ("gradient", "the gradient of the head.weight output"),
        ("weight", "values of head.weight"),
        ("weight_gradient", "the gradient of head.weight"),
        ("update", "the update of head.weight"),
        ("input", "the head.weight input"),
    ],
)
def test_non_finite_checks_every_kind(kind: str, tensor: str) -> None:
    path = "head.weight"
    (finding,) = of_one(
        {FIRST: GOOD, **({Site(path, "weight"): GOOD} if kind == "update" else {}), Site(path, kind): NAN}
    )
    assert finding.site == Site(path, kind)
    assert tensor in finding.message


def test_finite_numbers_are_fine_however_large() -> None:
    assert of_one({FIRST: [1e150, -1e150], SECOND: []}) == []


def test_only_the_newest_frame_is_judged() -> None:
    assert of_one({FIRST: NAN}, {FIRST: GOOD}) == []


def test_weights_that_were_not_finite_before_put_the_cause_between_two_frames() -> None:
    good = {FIRST: GOOD, **of_parameter("embed.weight", GOOD)}
    (finding,) = of_one(good, {FIRST: NAN, **of_parameter("embed.weight", NAN)})
    assert "1 weights were not finite before this step: it started after step 12" in finding.message
    (at_once,) = of_one({FIRST: NAN, **of_parameter("embed.weight", NAN)})
    assert "it started before the first logged step" in at_once.message


def test_the_step_it_began_at_is_said_where_it_is_known() -> None:
    (finding,) = judged(non_finite, [make_frame(150, {FIRST: NAN}, scalars={"train.nonfinite_since": 137.0})])
    assert "not been finite since step 137" in finding.message
    assert finding.evidence["since"] == 137


def test_a_mask_is_infinite_on_purpose() -> None:
    mask = {FIRST: [1.0, -np.inf], gradient("embed"): [0.1, 0.0]}
    assert [finding.severity for finding in of_one(mask)] == ["info"]
    assert [finding.severity for finding in of_one({**mask, gradient("embed"): NAN})] == ["error"]
    assert [finding.severity for finding in of_one({**mask, SECOND: NAN})] == ["error"]
    assert [finding.severity for finding in of_one({FIRST: [1.0, -np.inf]})] == ["error"]


def test_a_loss_that_is_not_finite_is_found_though_the_model_is() -> None:
    (finding,) = judged(non_finite, [make_frame(3, {FIRST: GOOD}, scalars={"train/loss": np.inf})])
    assert finding.site is None
    assert finding.message.startswith("train/loss is inf, but all tensors of the model are finite")


def test_gradients_of_a_step_the_scaler_skipped_are_not_blamed() -> None:
    affected = {FIRST: GOOD, gradient("embed"): NAN}
    frames = [make_frame(step, affected, scalars={"train.skipped": float(step)}) for step in range(3)]
    assert judged(non_finite, frames) == []
    assert judged(non_finite, [*frames, make_frame(3, affected, scalars={"train.skipped": 2.0})])


# --- exploding_gradient ---------------------------------------------------------------------------


def norms(*totals: float, data: Data | None = None) -> list[Frame]:
    given = {gradient("head"): wave(1.0)} if data is None else data
    return [make_frame(i, given, scalars={"train.grad_norm_raw": total}) for i, total in enumerate(totals)]


def test_a_gradient_explodes_at_thirty_times_its_usual_norm() -> None:
    usual = [1.0] * 4
    assert judged(rules.exploding_gradient, norms(*usual, 30.0)) == []
    (finding,) = judged(rules.exploding_gradient, norms(*usual, 30.1))
    assert finding.severity == "error"
    assert finding.evidence["usual"] == 1.0
    assert judged(rules.exploding_gradient(factor=20), norms(*usual, 20.1))


def test_a_usual_norm_is_known_after_four_logged_steps() -> None:
    assert judged(rules.exploding_gradient, norms(1e-3, 99.0)) == []
    assert judged(rules.exploding_gradient, norms(1e-3, 1e-3, 1e-3, 99.0)) == []
    assert judged(rules.exploding_gradient, norms(1e-3, 1e-3, 1e-3, np.nan, 99.0)) == []
    assert judged(rules.exploding_gradient, norms(1e-3, 1e-3, 1e-3, 1e-3, 99.0))
    assert judged(rules.exploding_gradient(least_frames=2), norms(1.0, 1.0, 99.0))


def test_one_hard_batch_after_convergence_is_no_explosion() -> None:
    assert judged(rules.exploding_gradient, norms(1.0, *[1e-6] * 20, 10.0)) == []


def clipped(*pairs: tuple[float, float]) -> list[Frame]:
    """Norms of all gradients, as the optimizer used them and before."""
    return [
        make_frame(i, {FIRST: GOOD}, scalars={"train.grad_norm": used, "train.grad_norm_raw": raw})
        for i, (used, raw) in enumerate(pairs)
    ]


def test_where_the_script_clips_the_norm_before_it_is_information() -> None:
    (finding,) = judged(rules.exploding_gradient, clipped(*[(1.0, 1.0)] * 4, (1.0, 99.0)))
    assert finding.severity == "info"
    assert finding.message.startswith("Exploding gradients: total norm before clipping (to 1) is 99")
    assert "clip gradients" not in finding.message
    assert judged(rules.exploding_gradient, clipped(*[(1.0, 20.0)] * 4, (1.0, 99.0))) == []


def test_where_clipping_leaves_too_much_it_is_an_explosion() -> None:
    (finding,) = judged(rules.exploding_gradient, clipped(*[(1.0, 1.0)] * 4, (50.0, 99.0)))
    assert finding.severity == "error"
    assert "is 50, 50x its reference value (1)" in finding.message
    (finding,) = judged(rules.exploding_gradient, clipped(*[(1.0, 1.0)] * 4, (99.0, 99.0)))
    assert finding.severity == "error"


def test_an_explosion_is_placed_at_the_first_module_on_the_way_back() -> None:
    calm = {gradient(path): wave(1.0) for path in ("head", "body", "stem")}
    wild = {gradient("head"): wave(2.0), gradient("body"): wave(50.0), gradient("stem"): wave(60.0)}
    frames = [*norms(*[1.0] * 4, data=calm), *norms(*[1.0] * 4, 50.0, data=wild)[4:]]
    (finding,) = judged(rules.exploding_gradient, frames)
    assert (finding.site, finding.evidence["others"]) == (gradient("body"), 1)


@pytest.mark.parametrize(("growth", "found"), [(1e4, 0), (1.1e4, 1)])
def test_gradients_that_grow_through_depth(growth: float, found: int) -> None:
    sizes = np.repeat([1.0, 10.0, 100.0, growth], 3)
    data = {gradient(f"l.{i}"): wave(size) for i, size in enumerate(sizes)}
    assert len(alike(rules.exploding_gradient, data, 2)) == found
    assert alike(rules.exploding_gradient, dict(reversed(data.items())), 2) == []


# --- vanishing_gradient ---------------------------------------------------------------------------


def fading(*sizes: float) -> dict[Site, np.ndarray]:
    return {gradient(f"l.{i}"): wave(size) for i, size in enumerate(sizes)}


def test_a_gradient_vanishes_below_a_hundred_thousandth_in_two_frames() -> None:
    assert alike(rules.vanishing_gradient, fading(1, 1, 1, 1.1e-5, 1.1e-5, 1.1e-5), 2) == []
    affected = fading(1, 1, 1e-2, 9e-6, 1e-9, 1e-12)
    assert alike(rules.vanishing_gradient, affected, 1) == []
    (finding,) = alike(rules.vanishing_gradient, affected, 2)
    assert (finding.site, finding.evidence["others"]) == (gradient("l.3"), 2)
    assert "since step 0" in finding.message


def test_a_faint_branch_is_no_vanishing_when_the_first_layers_are_reached() -> None:
    assert alike(rules.vanishing_gradient, fading(1, 1, 0, 1e-9, 1e-9, 1e-9, 1)) == []


NOTHING = {**of_parameter("a.weight", wave(1.0), np.zeros(64)), **of_parameter("b.weight", wave(1.0), np.zeros(8))}


def test_gradients_that_are_all_zero_from_the_start_are_an_error() -> None:
    assert alike(rules.vanishing_gradient, NOTHING, 3) == []
    (finding,) = alike(rules.vanishing_gradient, NOTHING, 4)
    assert (finding.severity, finding.site) == ("error", None)
    assert finding.message.startswith("All weight gradients are exactly zero at step 30 (since step 0)")
    some = {**NOTHING, Site("b.weight", "weight_gradient"): [0.0] * 7 + [1e-30]}
    assert alike(rules.vanishing_gradient, some, 4) == []
    assert alike(rules.vanishing_gradient, {activation("a"): wave(1.0)}, 4) == []


@pytest.mark.parametrize(("loss", "severity"), [(None, "warning"), (2.3, "warning"), (0.0, "info")])
def test_gradients_that_have_become_zero_are_a_warning_unless_the_loss_is_zero_too(
    loss: float | None, severity: str
) -> None:
    logged = {} if loss is None else {"train/loss": loss}
    frames = [make_frame(i, NOTHING, scalars={"train.grad_norm": float(i == 0), **logged}) for i in range(5)]
    (finding,) = judged(rules.vanishing_gradient, frames)
    assert finding.severity == severity
    assert "unlike before" in finding.message


def test_a_gradient_that_is_cut_off_does_not_fade() -> None:
    assert alike(rules.vanishing_gradient, fading(1, 1, 1, 0, 0, 0)) == []


def test_two_faint_outputs_are_not_enough() -> None:
    assert alike(rules.vanishing_gradient, fading(1, 1, 1, 1, 1e-9, 1e-9)) == []


# --- exploding_activation -------------------------------------------------------------------------


def outputs(*sizes: float) -> dict[Site, np.ndarray]:
    return {activation(f"l.{i}"): wave(size) for i, size in enumerate(sizes)}


def test_an_output_explodes_at_a_thousand_times_what_it_was() -> None:
    first = make_frame(0, outputs(1, 1, 1, 1))
    assert judged(rules.exploding_activation, [first, make_frame(1, outputs(1, 1, 1000, 1000))]) == []
    (finding,) = judged(rules.exploding_activation, [first, make_frame(1, outputs(1, 1, 1001, 2000))])
    assert (finding.site, finding.evidence["others"]) == (activation("l.2"), 1)


def test_an_output_that_started_near_zero_is_measured_by_the_others() -> None:
    frames = [make_frame(0, outputs(1, 1, 1, 0.0)), make_frame(1, outputs(1, 1, 1, 900))]
    assert judged(rules.exploding_activation, frames) == []


def test_the_first_frame_explodes_by_depth() -> None:
    assert [f.site for f in judged(rules.exploding_activation, [make_frame(0, outputs(1, 9, 99, 999, 1001))])] == [
        activation("l.4")
    ]
    assert judged(rules.exploding_activation, [make_frame(0, outputs(1000, 100, 1, 0.01, 0.001))]) == []


FINFO_MAX = [65504.0, 3.3895313892515355e38, 3.4028234663852886e38]


@pytest.mark.parametrize("value", [*FINFO_MAX, *(v / 2 for v in FINFO_MAX), 1e4, 1e9, 1e30, 4.25e37])
def test_a_mask_is_no_explosion(value: float) -> None:
    scores = {activation("scores"): [-value] * 9 + [0.5, -0.25, 3.0]}
    assert judged(rules.exploding_activation, [make_frame(0, {**outputs(1, 1, 1, 1), **scores})]) == []
    later = [make_frame(0, outputs(1, 1, 1, 1)), make_frame(1, {**outputs(1, 1, 1, 1), **scores})]
    assert judged(rules.exploding_activation, later) == []
    assert judged(rules.exploding_activation, [make_frame(0, {activation("scores"): [-value] * 9, **outputs(1)})]) == []


def test_a_mask_does_not_hide_an_explosion() -> None:
    masked = {activation("scores"): [-FINFO_MAX[2], 0.5, 1.0]}
    grown = {activation("scores"): [-FINFO_MAX[2], 0.5, 5000.0]}
    frames = [make_frame(0, {**masked, **outputs(1, 1, 1)}), make_frame(1, {**grown, **outputs(1, 1, 1)})]
    (finding,) = judged(rules.exploding_activation, frames)
    assert finding.site == activation("scores")
    frames[1] = make_frame(1, {**masked, **outputs(1, 1, 5000)})
    (finding,) = judged(rules.exploding_activation, frames)
    assert finding.site == activation("l.2")


@pytest.mark.parametrize("values", [[-3e38, 3e38], [0.0, 3.4e38], [-123456.0, 1.0], [-65504.0, 9e3]])
def test_large_numbers_are_no_mask(values: list[float]) -> None:
    frame = make_frame(0, {**outputs(1, 1, 1, 1), activation("scores"): values})
    assert judged(rules.exploding_activation, [frame])


def test_a_mask_that_is_gone_is_no_collapse_and_one_in_float16_not_near_its_end() -> None:
    held = {Site("a.weight", "weight"): GOOD}
    masked, free = [-3.4028234663852886e38] * 8 + [1.0, -1.0] * 4, [1.0, -1.0] * 8
    frames = [make_frame(i, {activation("a"): free if i else masked, **held}) for i in range(4)]
    assert judged(rules.collapsed_variance, frames) == []
    usual = {activation(f"l.{i}"): halves(0.1 + i, -0.7 * i - 0.3) for i in range(3)}
    found = alike(rules.low_precision, {**usual, activation("l.2"): halves(0.1, 2.3, -65504.0)})
    assert [finding.severity for finding in found if finding.severity != "info"] == []


def test_an_explosion_is_an_error_once_training_has_begun() -> None:
    at_first = make_frame(0, outputs(1, 1, 1, 1001))
    assert [f.severity for f in judged(rules.exploding_activation, [at_first])] == ["warning"]
    later = [make_frame(0, outputs(1, 1, 1, 1)), make_frame(1, outputs(1, 1, 1, 1001))]
    assert [f.severity for f in judged(rules.exploding_activation, later)] == ["error"]


# --- dead_units -----------------------------------------------------------------------------------

RELU = {activation("relu"): [0.0, 1.0], activation("late"): [0.0, 1.0]}


def with_dead(*shares: float, path: str = "relu") -> list[Frame]:
    return [make_frame(i, RELU, scalars={f"activation.dead_fraction/{path}": v}) for i, v in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "found"),
    [((0.7, 0.7, 0.7), 1), ((0.69, 0.7, 0.7), 0), ((0.7, 0.7, 0.69), 0), ((1.0, 1.0), 0), ((0.0, 0.9, 0.9, 0.9), 1)],
)
def test_units_are_dead_at_seven_tenths_in_three_frames(shares: tuple[float, ...], found: int) -> None:
    assert len(judged(rules.dead_units, with_dead(*shares))) == found


def test_a_layer_that_is_all_dead_is_an_error() -> None:
    (finding,) = judged(rules.dead_units, with_dead(1.0, 1.0, 1.0))
    assert (finding.severity, finding.site) == ("error", activation("relu"))
    assert "100% of the units of relu" in finding.message


def test_the_first_dead_layer_is_named() -> None:
    tags = {"activation.dead_fraction/late": 0.8, "activation.dead_fraction/relu": 0.9}
    frames = [make_frame(i, RELU, scalars=tags) for i in range(3)]
    (finding,) = judged(rules.dead_units, frames)
    assert (finding.site, finding.evidence["others"]) == (activation("relu"), 1)


def test_an_output_of_zeros_is_dead_if_it_has_a_gradient() -> None:
    zeros = {activation("relu"): np.zeros(16), gradient("relu"): wave(1.0)}
    assert len(alike(rules.dead_units, zeros, 3)) == 1
    assert alike(rules.dead_units, zeros, 2) == []
    assert alike(rules.dead_units, {activation("relu"): np.zeros(16)}, 3) == []
    assert alike(rules.dead_units, {**zeros, activation("relu"): np.zeros(15)}, 3) == []
    assert alike(rules.dead_units, {**zeros, activation("relu"): [0.0] * 15 + [1e-9]}, 3) == []


# --- saturated ------------------------------------------------------------------------------------


def hidden(output: Any) -> dict[Site, Any]:
    """An output between two layers with weights, with a gradient."""
    return {
        activation("a"): wave(1.0), activation("curve"): output, activation("b"): wave(1.0),
        gradient("curve"): wave(1.0), Site("a.weight", "weight"): wave(1.0), Site("b.weight", "weight"): wave(1.0),
    }  # fmt: skip


def tanh_with(slope: float) -> np.ndarray:
    inside = np.resize([0.5, -0.5], round(1000 * slope / 0.75))
    return np.concatenate([inside, np.resize([1.0, -1.0], 1000 - len(inside))])


def sigmoid_with(slope: float) -> np.ndarray:
    inside = np.full(round(1000 * slope), 0.5)
    rest = np.zeros(1000 - len(inside))
    rest[: round(0.37 * len(rest))] = 1.0
    return np.concatenate([inside, rest])


@pytest.mark.parametrize("output", [tanh_with, sigmoid_with])
def test_a_curve_is_saturated_below_a_tenth_of_its_slope(output: Any) -> None:
    assert len(alike(rules.saturated, hidden(output(0.09)), 3)) == 1
    assert alike(rules.saturated, hidden(output(0.09)), 2) == []
    assert alike(rules.saturated, hidden(output(0.11)), 3) == []


def test_saturation_names_curve_and_place() -> None:
    (finding,) = alike(rules.saturated, hidden(tanh_with(0.03)), 3)
    assert finding.site == activation("curve")
    assert finding.message.startswith("Saturated tanh: mean slope of curve is 3.0% of the maximum")


def test_an_lstm_is_not_advised_to_become_a_relu() -> None:
    data = {
        activation("lstm"): tanh_with(0.03), gradient("lstm"): wave(1.0), activation("head"): wave(1.0),
        Site("lstm.weight_ih_l0", "weight"): wave(1.0), Site("lstm.weight_hh_l0", "weight"): wave(1.0),
        Site("head.weight", "weight"): wave(1.0),
    }  # fmt: skip
    (finding,) = alike(rules.saturated, data, 3)
    assert finding.site == activation("lstm")
    assert "ReLU" not in finding.message
    assert "clip gradients" in finding.message
    (finding,) = alike(rules.saturated, hidden(tanh_with(0.03)), 3)
    assert "ReLU" in finding.message
    fades = {gradient("lstm" if i == 3 else f"l.{i}"): wave(10.0 ** (-3 * i)) for i in range(6)}
    weights = {Site("lstm.weight_hh_l0", "weight"): wave(1.0)}
    (finding,) = alike(rules.vanishing_gradient(share=1e-8), {**fades, **weights}, 2)
    assert "ReLU" not in finding.message


def one_hot(positions: int, confident: float) -> np.ndarray:
    rows = np.full((64, positions), (1 - confident) / (positions - 1))
    rows[:, 0] = confident
    return rows


@pytest.mark.parametrize(
    "innocent",
    [
        one_hot(2, 0.999), one_hot(4, 0.9999), one_hot(100, 0.9999), one_hot(1000, 0.002),
        np.resize([1.0, -1.0], 99), np.resize([0.0, 1.0, 0.0, 0.0, 1.0], 99), np.ones(64), np.zeros(64),
        np.resize([0.0, 2.0], 64), np.linspace(-1, 1, 99), np.linspace(0, 1, 99), wave(0.01), np.resize([0.0, 0.9], 99),
        wave(3.0), np.linspace(0.97, 1.0, 99),
    ],
    ids=["softmax of 2", "of 4", "of 100", "of 1000, uniform", "signs", "one-hot", "ones", "zeros", "dropout", "ramp",
         "half ramp", "small", "short of one", "beyond the bounds", "near one"],
)  # fmt: skip
def test_what_is_no_saturated_curve(innocent: np.ndarray) -> None:
    assert alike(rules.saturated, hidden(innocent), 3) == []


def test_the_end_of_a_model_may_be_as_sure_as_it_likes() -> None:
    data = hidden(sigmoid_with(0.01))
    last = {**data, activation("probabilities"): sigmoid_with(0.01), gradient("probabilities"): wave(1.0)}
    del last[activation("curve")]
    assert alike(rules.saturated, last, 3) == []


def test_a_mask_without_gradient_is_no_curve() -> None:
    data = hidden(sigmoid_with(0.01))
    del data[gradient("curve")]
    assert alike(rules.saturated, data, 3) == []


# --- update_ratio ---------------------------------------------------------------------------------


def stepped(ratio: float, path: str = "a.weight", gradient: Any = None) -> dict[Site, Any]:
    return of_parameter(path, wave(1.0), wave(1.0) if gradient is None else gradient, wave(ratio))


def test_a_step_larger_than_the_weights_is_too_large() -> None:
    assert alike(rules.update_ratio, stepped(1.0), 1) == []
    (finding,) = alike(rules.update_ratio, stepped(1.01), 1)
    assert (finding.site, finding.severity) == (Site("a.weight", "update"), "error")
    assert "Update-to-weight ratio too high" in finding.message


def test_steps_below_a_millionth_are_too_small_in_every_frame() -> None:
    assert alike(rules.update_ratio, stepped(1.01e-6), 3) == []
    assert alike(rules.update_ratio, stepped(0.99e-6), 2) == []
    assert len(alike(rules.update_ratio, stepped(0.99e-6), 3)) == 1


def test_a_run_that_has_converged_had_larger_steps_before() -> None:
    frames = [make_frame(i, stepped(ratio)) for i, ratio in enumerate((1e-3, 1e-7, 1e-8, 1e-9))]
    assert judged(rules.update_ratio, frames) == []


@pytest.mark.parametrize("rates", [(0.0, 1e-6, 2e-6), (1e-6, 1e-7, 0.0)])
def test_warm_up_and_a_rate_of_zero_are_meant(rates: tuple[float, ...]) -> None:
    frames = [make_frame(i, stepped(1e-9), scalars={"train.lr/0": rate}) for i, rate in enumerate(rates)]
    assert judged(rules.update_ratio, frames) == []


def test_biases_frozen_weights_and_those_that_start_at_zero_do_not_count() -> None:
    usual = {**stepped(1e-3, "a.weight"), **stepped(1e-3, "b.weight"), **stepped(1e-3, "c.weight")}
    several = {f"{n}{i}": n for n in ("bias", "weight") for i in range(4)}
    biases = {s: d for name in several for s, d in stepped(9.0, f"x.bias{name}").items()}
    frozen = {s: d for name in several for s, d in of_parameter(f"x.{name}", wave(1.0), None, wave(0.0)).items()}
    assert alike(rules.update_ratio, {**usual, **biases}) == []
    assert alike(rules.update_ratio, {**usual, **frozen}) == []

    def grown(size: float) -> dict[Site, Any]:
        return {s: d for name in several for s, d in of_parameter(f"x.{name}", wave(size), wave(1), wave(0.02)).items()}

    frames = [make_frame(0, {**usual, **grown(0.0)}), make_frame(1, {**usual, **grown(0.01)})]
    assert judged(rules.update_ratio, frames) == []


# --- unchanged_weight -----------------------------------------------------------------------------


def left_out(count: int, moved: bool = True, gradient: Any = None) -> list[Frame]:
    pull = wave(1.0) if gradient is None else gradient
    return [
        make_frame(i, {**of_parameter("still.weight", wave(1.0), pull),
                       **of_parameter("moves.weight", wave(1.0 + moved * i), wave(1.0), wave(0.1))})
        for i in range(count)
    ]  # fmt: skip


def test_a_weight_with_a_gradient_that_no_optimizer_has() -> None:
    assert judged(rules.unchanged_weight, left_out(2)) == []
    (finding,) = judged(rules.unchanged_weight, left_out(3))
    assert finding.site == Site("still.weight", "weight")
    assert "is in no optimizer" in finding.message


def test_the_first_of_several_weights_left_out_is_named() -> None:
    still = {**of_parameter("a.weight", wave(1.0), wave(1.0)), **of_parameter("b.weight", wave(1.0), wave(1.0))}
    moves = [of_parameter("moves.weight", wave(1.0 + i), wave(1.0), wave(0.1)) for i in range(3)]
    frames = [make_frame(i, {**still, **moves[i]}) for i in range(3)]
    (finding,) = judged(rules.unchanged_weight, frames)
    assert (finding.site, finding.evidence["others"]) == (Site("a.weight", "weight"), 1)


def test_without_a_gradient_a_weight_may_stay() -> None:
    assert judged(rules.unchanged_weight, left_out(4, gradient=np.zeros(64))) == []
    frozen = [make_frame(i, {**of_parameter("still.weight", wave(1.0)), **stepped(0.1)}) for i in range(4)]
    assert judged(rules.unchanged_weight, frozen) == []


def test_where_nothing_moves_nobody_trains() -> None:
    data = of_parameter("still.weight", wave(1.0), wave(1.0))
    assert alike(rules.unchanged_weight, data) == []


def test_a_weight_that_was_stepped_before_is_stepped_more_rarely() -> None:
    seldom = [make_frame(0, stepped(0.1, "still.weight")), *left_out(4)[1:]]
    assert judged(rules.unchanged_weight, seldom) == []


def updates(zeros: int) -> dict[Site, Any]:
    return of_parameter("a.weight", wave(1.0, 100), wave(1.0, 100), np.where(np.arange(100) < zeros, 0.0, 1e-3))


def test_steps_that_round_to_nothing() -> None:
    assert alike(rules.unchanged_weight, updates(98), 3) == []
    assert alike(rules.unchanged_weight, updates(99), 2) == []
    (finding,) = alike(rules.unchanged_weight, updates(99), 3)
    assert "below the precision" in finding.message


def at_rates(*rates: float, update: float = 0.0) -> list[Finding]:
    data = of_parameter("a.weight", wave(1.0), wave(1.0), wave(update))
    frames = [make_frame(i, data, scalars={"train.lr/0": rate, "train.lr/1": rate}) for i, rate in enumerate(rates)]
    return judged(rules.unchanged_weight, frames)


def test_a_learning_rate_of_zero_from_the_start_is_an_error() -> None:
    assert at_rates(0.0, 0.0, 0.0) == []
    (finding,) = at_rates(0.0, 0.0, 0.0, 0.0)
    assert (finding.severity, finding.site) == ("error", None)
    assert finding.message.startswith("The learning rate is zero: no weight changes at step 3 (since step 0)")


def test_a_warm_up_that_begins_at_zero_is_meant() -> None:
    assert at_rates(0.0, 1e-4, 2e-4, 3e-4, update=1e-3) == []
    assert at_rates(0.0, 0.0, 0.0, 1e-4, update=1e-3) == []


def test_training_on_after_the_schedule_has_ended_is_a_warning() -> None:
    assert at_rates(1e-3, 1e-4, 0.0, 0.0, 0.0) == []
    (finding,) = at_rates(1e-3, 1e-4, 0.0, 0.0, 0.0, 0.0)
    assert finding.severity == "warning"
    assert "any more" in finding.message


def test_an_optimizer_that_moves_weights_at_a_rate_of_zero_is_believed() -> None:
    assert at_rates(0.0, 0.0, 0.0, 0.0, update=1e-3) == []


def test_a_rate_of_zero_and_a_run_that_has_converged_may_rest() -> None:
    zero = {"train.lr/0": 0.0, "train.lr/1": 0.1}
    assert judged(rules.unchanged_weight, [make_frame(i, updates(100), scalars=zero) for i in range(4)]) == []
    norms = [{"train.grad_norm": norm} for norm in (1.0, 1e-4, 1e-4, 0.99e-3)]
    assert judged(rules.unchanged_weight, [make_frame(i, updates(100), scalars=n) for i, n in enumerate(norms)]) == []
    norms[-1] = {"train.grad_norm": 1.01e-3}
    assert judged(rules.unchanged_weight, [make_frame(i, updates(100), scalars=n) for i, n in enumerate(norms)])


# --- missing_gradient -----------------------------------------------------------------------------


def branches() -> dict[Site, Any]:
    """A stem and a head that train, and between them a branch whose output is detached."""
    return {  # the branch's weight is one of `without_gradient`
        activation("stem"): wave(1.0), activation("branch.0"): wave(1.0), activation("branch"): wave(1.0),
        activation("head"): wave(1.0), gradient("head"): wave(1.0), gradient("stem"): wave(1.0),
        **of_parameter("stem.weight", wave(1.0), wave(1.0), wave(0.1)),
        **of_parameter("branch.0.weight", wave(1.0), None, wave(0.0)),
        **of_parameter("head.weight", wave(1.0), wave(1.0), wave(0.1)),
    }  # fmt: skip


def without_gradient(*paths: str) -> dict[str, float]:
    """What tells of weights that require a gradient and had none when their optimizer stepped."""
    return {f"weight_gradient.missing/{path}": 1.0 for path in paths}


def cut_off(data: Data, *paths: str, count: int = 3) -> list[Finding]:
    frames = [make_frame(10 * step, data, scalars=without_gradient(*paths)) for step in range(count)]
    return judged(rules.missing_gradient, frames)


def test_a_branch_that_is_detached_has_no_gradient() -> None:
    assert cut_off(branches(), "branch.0.weight", count=2) == []
    (finding,) = cut_off(branches(), "branch.0.weight")
    assert (finding.site, finding.evidence["others"]) == (activation("branch"), 1)
    assert "No gradient reaches branch" in finding.message
    assert finding.severity == "warning"


def test_a_stem_that_is_detached_has_no_gradient() -> None:
    data = {
        activation("stem.0"): wave(1.0), activation("stem"): wave(1.0), activation("head"): wave(1.0),
        gradient("head"): wave(1.0), **of_parameter("stem.0.weight", wave(1.0), None, wave(0.0)),
        **of_parameter("head.weight", wave(1.0), wave(1.0), wave(0.1)),
    }  # fmt: skip
    (finding,) = cut_off(data, "stem.0.weight")
    assert (finding.site, finding.evidence["others"]) == (activation("stem"), 1)
    assert cut_off(data) == [], "frozen on purpose, or in no optimizer"


@pytest.mark.parametrize(
    "meant",
    [
        {gradient("branch.0"): wave(1.0), gradient("branch"): wave(1.0)},
        {activation("branch"): None, activation("branch.0"): None},
    ],
    ids=["its output has a gradient", "did not run"],
)
def test_a_layer_without_gradient_on_purpose(meant: dict[Site, Any]) -> None:
    data = {site: value for site, value in {**branches(), **meant}.items() if value is not None}
    assert cut_off(data, "branch.0.weight") == []
    assert cut_off(branches()) == [], "frozen on purpose, or in no optimizer"


def test_a_branch_that_has_a_gradient_now_and_then_is_used() -> None:
    used = make_frame(1, {**branches(), Site("branch.0.weight", "weight_gradient"): wave(1.0)})
    missing = [make_frame(i, branches(), scalars=without_gradient("branch.0.weight")) for i in range(3)]
    assert judged(rules.missing_gradient, missing)
    assert judged(rules.missing_gradient, [missing[0], used, missing[2]]) == []


def test_an_optimizer_that_steps_without_any_gradient_is_an_error() -> None:
    data = {activation("a"): wave(1.0), **of_parameter("a.weight", wave(1.0), None, wave(0.0))}
    assert cut_off(data, "a.weight", count=2) == []
    (finding,) = cut_off(data, "a.weight")
    assert (finding.severity, finding.site) == ("error", None)
    assert "loss.backward()" in finding.message
    assert cut_off(data) == [], "everything is frozen"


def test_a_gradient_of_zeros_is_missing() -> None:
    zero = {Site("branch.0.weight", "weight_gradient"): np.zeros(64), gradient("branch"): np.zeros(64)}
    data = {**branches(), **zero, gradient("branch.0"): np.zeros(64)}
    assert alike(rules.missing_gradient, data, 2) == []
    (finding,) = alike(rules.missing_gradient, data, 3)
    assert finding.message.startswith("The gradient of branch.0.weight is exactly zero")
    assert alike(rules.missing_gradient, {**data, Site("branch.0.weight", "weight_gradient"): [0.0, 1e-30]}, 3) == []


# --- low_precision --------------------------------------------------------------------------------


def precision(data: Any, kind: str = "gradient", **thresholds: Any) -> list[tuple[str, str]]:
    found = alike(rules.low_precision(**thresholds), {Site("a", kind): data}, 1)
    return [(finding.severity, finding.evidence["format"]) for finding in found]


def test_values_that_float16_would_flush_or_overflow_are_reported_as_information() -> None:
    small, fine = 2.0**-26 * 1.1, 1.1e-3
    only = {"formats": ("float16",)}
    assert precision([small] * 5 + [fine] * 5, **only) == [("info", "float16")]
    assert precision([small] * 4 + [fine] * 6, **only) == []
    assert precision([0.0] * 9 + [fine], **only) == []
    assert precision([0.0] * 8 + [fine, small], **only) == [("info", "float16")]
    assert precision([fine, 65519.0], **only) == []
    assert precision([fine, 65520.0], **only) == [("info", "float16")]


def test_the_first_of_several_places_without_precision_is_named() -> None:
    data = {gradient("fine"): [1.1], gradient("first"): [1e-12], gradient("second"): [1e-12]}
    (finding,) = alike(rules.low_precision(formats=("float16",)), data, 1)
    assert (finding.site, finding.evidence["others"]) == (gradient("first"), 1)


def test_the_gradients_of_biases_are_no_matter_of_precision() -> None:
    data = {Site("a.weight", "weight_gradient"): [1.1], Site("a.bias", "weight_gradient"): [1e-12]}
    assert alike(rules.low_precision, data, 1) == []


def test_bfloat16_has_the_range_of_float32() -> None:
    assert precision([1.1e-30, 1e30], formats=("bfloat16",)) == []
    assert precision([1e39, 1.0], formats=("bfloat16",)) == [("info", "bfloat16")]


def test_float8_is_judged_scaled_to_its_range() -> None:
    only = {"formats": ("float8_e5m2",)}
    assert precision(1e-9 * np.geomspace(1, 1e3, 50), **only) == []
    assert precision([1.0] + [1e-12] * 9, **only) == [("info", "float8_e5m2")]


def test_without_histograms_nothing_is_known_of_precision() -> None:
    assert judged(rules.low_precision, [make_frame(0, {gradient("a"): [1e-12]}, histograms=False)]) == []


def halves(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float16).astype(np.float64)


def test_a_model_in_float16_near_its_end_is_warned_of() -> None:
    usual = {activation(f"l.{i}"): halves(0.1 + i, -0.7 * i - 0.3) for i in range(3)}
    assert alike(rules.low_precision, {**usual, activation("l.2"): halves(0.1, 16370.0)}) == []
    (finding,) = alike(rules.low_precision, {**usual, activation("l.2"): halves(0.1, 16390.0)})
    assert (finding.severity, finding.site) == ("warning", activation("l.2"))
    in_float32 = {site: np.asarray(data) * 1.0001 for site, data in usual.items()}
    assert alike(rules.low_precision, {**in_float32, activation("l.2"): [0.1, 16390.1]}) == []


def test_subnormal_gradients_of_a_float16_model_are_warned_of_unless_they_are_scaled() -> None:
    outputs = {activation(f"l.{i}"): halves(0.1 + i, -0.7 * i - 0.3) for i in range(3)}
    data = {**outputs, gradient("l.1"): halves(1e-5, -2e-5, 1e-3)}
    rule = rules.low_precision(formats=())
    assert [finding.severity for finding in alike(rule, data)] == ["warning"]
    assert judged(rule, [make_frame(0, data, scalars={"train.scale": 1024.0})]) == []


# --- loss_spike -----------------------------------------------------------------------------------


def losses(*values: float, tag: str = "train/loss") -> list[Frame]:
    return [make_frame(i, {FIRST: GOOD}, scalars={tag: value}) for i, value in enumerate(values)]


def test_a_spike_is_above_all_there_was_by_five_times_the_spread() -> None:
    past = (2.0, 1.0, 0.5, 0.4, 0.3)  # quartiles 0.4 and 1.0
    assert judged(rules.loss_spike, losses(*past, 5.0)) == []
    (finding,) = judged(rules.loss_spike, losses(*past, 5.01))
    assert (finding.site, finding.severity) == (None, "warning")
    assert "train/loss is 5.01" in finding.message


def test_an_unlucky_batch_is_no_spike() -> None:
    assert judged(rules.loss_spike, losses(2.3, *[0.0] * 20, 2.2)) == []
    assert judged(rules.loss_spike, losses(2.3, *[0.0] * 20, 4.6)) == []
    assert judged(rules.loss_spike, losses(2.3, *[0.0] * 20, 4.61))


def test_five_frames_must_have_been() -> None:
    assert judged(rules.loss_spike, losses(1, 1, 1, 1, 99)) == []
    assert judged(rules.loss_spike, losses(1, 1, 1, 1, 1, 99))


@pytest.mark.parametrize(("tag", "found"), [("train/Loss_total", 1), ("train/accuracy", 0), ("validation/loss", 0)])
def test_only_losses_are_looked_at(tag: str, found: int) -> None:
    assert len(judged(rules.loss_spike, losses(*[1.0] * 9, 99.0, tag=tag))) == found


def test_a_loss_may_be_negative() -> None:
    assert judged(rules.loss_spike, losses(-5, -6, -7, -8, -9, -6)) == []
    assert judged(rules.loss_spike, losses(-5, -6, -7, -8, -9, 20))


# --- collapsed_variance ---------------------------------------------------------------------------


def spreads(*stds: float, mean: float = 1.0, weights: bool = True, count: int = 16) -> list[Frame]:
    held = {Site("a.weight", "weight"): GOOD} if weights else {}
    return [make_frame(i, {activation("a"): mean + wave(std, count), **held}) for i, std in enumerate(stds)]


def test_outputs_have_collapsed_below_a_twentieth_of_their_first_spread_in_two_frames() -> None:
    assert judged(rules.collapsed_variance, spreads(1, 0.051, 0.051)) == []
    assert judged(rules.collapsed_variance, spreads(1, 1, 0.049)) == []
    (finding,) = judged(rules.collapsed_variance, spreads(1, 0.049, 0.049))
    assert (finding.site, finding.severity) == (activation("a"), "warning")
    assert finding.evidence["since"] == 1
    (finding,) = judged(rules.collapsed_variance, spreads(1, 0.9e-4, 0.9e-4))
    assert finding.severity == "error"


def test_small_outputs_zeros_and_modules_without_weights_do_not_collapse() -> None:
    assert judged(rules.collapsed_variance, spreads(1, 1e-3, 1e-3, count=15)) == []
    assert judged(rules.collapsed_variance, spreads(1, 1e-3, 1e-3, weights=False)) == []
    assert judged(rules.collapsed_variance, spreads(1, 0, 0, mean=0.0)) == []


# --- attention_collapse ---------------------------------------------------------------------------


def attention(entropy: float, logit: float, positions: int = 8) -> dict[Site, Any]:
    return {
        Site("block:softmax", "functional"): np.full(4 * positions, 1 / positions),
        Site("block:softmax.entropy", "functional"): np.full(4, entropy),
        Site("block:softmax.logits", "functional"): [0.0, logit],
    }


def test_attention_has_collapsed_when_it_is_sharp_for_large_logits() -> None:
    limit = 0.15 * np.log(8)
    (finding,) = alike(rules.attention_collapse, attention(0.99 * limit, 50.1), 2)
    assert finding.site == Site("block:softmax", "functional")
    assert alike(rules.attention_collapse, attention(0.99 * limit, 50.1), 1) == []
    assert alike(rules.attention_collapse, attention(1.01 * limit, 50.1), 2) == []
    assert alike(rules.attention_collapse, attention(0.99 * limit, 50.0), 2) == []


def test_attention_has_collapsed_when_a_quarter_of_its_heads_has() -> None:
    def frames(sharp: int, count: int = 2) -> list[Frame]:
        entropies = np.where(np.arange(8) < sharp, 0.01, 2.0)
        heads = {"functional.entropy/block:softmax": entropies, "functional.max_logit/block:softmax": np.full(8, 60.0)}
        made = make_frame(0, attention(1.5, 60.0))
        return [replace(made, step=10 * step, vectors=heads) for step in range(count)]

    (finding,) = judged(rules.attention_collapse, frames(2))
    assert finding.evidence["heads"] == [0, 1]
    assert "in 2 of 8 heads" in finding.message
    assert judged(rules.attention_collapse, frames(1)) == []
    assert judged(rules.attention_collapse, frames(2, count=1)) == []


def test_attention_whose_positions_are_unknown_is_judged_as_over_eight() -> None:
    def fused(entropy: float) -> dict[Site, Any]:
        parts = attention(entropy, 99.0, positions=64)
        return {replace(site, path=site.path.replace("softmax", "sdpa")): data for site, data in parts.items()}

    assert alike(rules.attention_collapse, fused(0.99 * 0.15 * np.log(8)), 2)
    assert alike(rules.attention_collapse, fused(1.01 * 0.15 * np.log(8)), 2) == []


def test_a_softmax_without_entropy_is_not_judged() -> None:
    assert alike(rules.attention_collapse, {Site("block:softmax", "functional"): GOOD}, 3) == []


# --- expert_collapse ------------------------------------------------------------------------------


COLLAPSED, EVEN = (0.4, 0.4, 0.15, 0.05, 0, 0, 0, 0), (0.25, 0.25, 0.3, 0.19, 0.01)
SEVERELY = (0.5, 0.49, 0.01, 0, 0, 0, 0, 0)
STARVED = (0.25, 0.25, 0.3, 0.2, 0)


def routed(*shares: float, total: int = 1000, count: int = 51, first: int = 10, every: int = 10) -> list[Frame]:
    """Frames of a router; the default ones span the 500 steps that an issue must last, and begin after step 0."""
    tokens = np.round(np.array(shares) * total)
    kept = tokens[tokens > 0] / tokens.sum()
    entropy = float(-(kept * np.log(kept)).sum() / np.log(len(tokens)))
    scalars = {"experts.entropy/gate": entropy, "experts.max_load/gate": float(tokens.max() / tokens.mean())}
    frame = make_frame(0, {activation("gate"): GOOD}, scalars=scalars)
    steps = range(first, first + count * every, every)
    return [replace(frame, step=step, vectors={"experts.tokens/gate": tokens}) for step in steps]


def test_a_router_that_uses_three_of_eight_experts_for_500_steps_has_collapsed() -> None:
    (finding,) = judged(rules.expert_collapse, routed(*COLLAPSED))
    assert (finding.site, finding.severity) == (Site("gate", "experts"), "error")
    assert finding.message.startswith("Experts collapsed: gate sends 95% of its tokens to 3 of 8 experts (entropy 0.56")
    assert (finding.step, finding.evidence["since"]) == (510, 10)
    assert judged(rules.expert_collapse(entropy=0.2), routed(0.5, 0.4, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01)) == []


def test_a_router_that_uses_two_of_eight_experts_is_reported_after_three_frames() -> None:
    assert judged(rules.expert_collapse, routed(*SEVERELY, count=2)) == []
    (finding,) = judged(rules.expert_collapse, routed(*SEVERELY, count=3))
    assert (finding.severity, finding.evidence["since"]) == ("error", 10)
    mild = routed(*COLLAPSED, count=1, first=20)
    assert (
        judged(rules.expert_collapse, [*routed(*SEVERELY, count=1), *mild, *routed(*SEVERELY, count=2, first=30)]) == []
    )


def test_an_expert_without_a_token_since_step_0_is_reported_after_three_frames() -> None:
    assert judged(rules.expert_collapse, routed(*STARVED, first=0, count=2)) == []
    (finding,) = judged(rules.expert_collapse, routed(*STARVED, first=0, count=3))
    assert (finding.severity, finding.evidence["dead"], finding.evidence["since"]) == ("warning", [4], 0)
    assert judged(rules.expert_collapse, routed(*STARVED, first=0, count=3, total=100)) == []  # 60 tokens are too few
    assert judged(rules.expert_collapse, [*routed(*EVEN, first=0, count=1), *routed(*STARVED, count=30)]) == []


def test_a_router_that_collapsed_less_than_500_steps_ago_is_not_reported() -> None:
    assert judged(rules.expert_collapse, routed(*COLLAPSED, count=50)) == []
    assert judged(rules.expert_collapse(steps=490), routed(*COLLAPSED, count=50))
    even = [1 / 8] * 8
    later = routed(*COLLAPSED, first=600)
    assert judged(rules.expert_collapse, [*routed(*even, count=60), *later[:-1]]) == []
    (finding,) = judged(rules.expert_collapse, [*routed(*even, count=60), *later])
    assert finding.evidence["since"] == 600


def test_one_frame_with_even_shares_ends_a_collapse() -> None:
    frames = routed(*COLLAPSED)
    frames[30] = routed(*[1 / 8] * 8)[30]
    assert judged(rules.expert_collapse, frames) == []


def test_an_expert_without_a_token_for_500_steps_is_dead() -> None:
    (finding,) = judged(rules.expert_collapse, routed(*STARVED))
    assert (finding.severity, finding.evidence["dead"], finding.evidence["since"]) == ("warning", [4], 10)
    assert judged(rules.expert_collapse, routed(*EVEN)) == []


def test_an_expert_that_got_no_token_only_early_in_training_is_not_reported() -> None:
    early, later = routed(*STARVED, count=40), routed(*EVEN, count=40, first=400)
    history = History()
    for frame in [*early, *later]:
        history.append(frame)
        assert rules.expert_collapse(history) == [], frame.step


def test_an_expert_that_dies_after_it_had_tokens_is_reported_since_then() -> None:
    frames = [*routed(*EVEN, count=30), *routed(*STARVED, first=300)]
    assert judged(rules.expert_collapse, frames[:-1]) == []
    (finding,) = judged(rules.expert_collapse, frames)
    assert (finding.evidence["dead"], finding.evidence["since"]) == ([4], 300)


def test_an_expert_that_had_a_token_in_one_of_the_frames_is_not_dead() -> None:
    frames = routed(*STARVED)
    frames[1] = routed(*EVEN)[1]
    assert judged(rules.expert_collapse, frames) == []


def test_an_expert_is_not_dead_before_even_shares_would_have_given_it_2000_tokens() -> None:
    # An even share is 20 tokens a frame: 100 frames are needed, twice as many as 500 steps have.
    assert judged(rules.expert_collapse, routed(*STARVED, total=100, count=99)) == []
    (finding,) = judged(rules.expert_collapse, routed(*STARVED, total=100, count=100))
    assert finding.evidence["even_share"] == 2000
    assert judged(rules.expert_collapse(min_tokens=1000), routed(*STARVED, total=100))


@pytest.mark.parametrize("shares", [COLLAPSED, STARVED])
def test_experts_are_judged_by_steps_whatever_every_is_and_by_five_frames_at_least(shares: tuple[float, ...]) -> None:
    assert judged(rules.expert_collapse, routed(*shares, total=10_000, count=500, every=1)) == []
    assert judged(rules.expert_collapse, routed(*shares, total=10_000, count=501, every=1))
    assert judged(rules.expert_collapse, routed(*shares, total=10_000, count=4, every=1000)) == []
    assert judged(rules.expert_collapse, routed(*shares, total=10_000, count=5, every=1000))


def test_frames_without_the_router_do_not_count_and_do_not_end_an_issue() -> None:
    frames = routed(*STARVED)
    without = make_frame(0, {activation("gate"): GOOD})
    assert judged(rules.expert_collapse, [*frames[:25], replace(without, step=250), *frames[26:]])
    assert judged(rules.expert_collapse, [replace(without, step=0), *frames[1:]]) == []


# --- bad_init -------------------------------------------------------------------------------------


def layers(*sizes: float) -> dict[Site, Any]:
    sites = {activation(f"l.{i}"): wave(size) for i, size in enumerate(sizes)}
    return {**sites, **{Site(f"l.{i}.weight", "weight"): wave(0.1) for i in range(len(sizes))}}


@pytest.mark.parametrize(("last", "found"), [(1000.0, 0), (1001.0, 1), (1e-3, 0), (0.99e-3, 1), (0.0, 0)])
def test_a_signal_that_changes_a_thousandfold_through_the_layers(last: float, found: int) -> None:
    assert len(alike(rules.bad_init, layers(1, 1, 1, last), 1)) == found
    assert alike(rules.bad_init, layers(1, 1, 1, last), 2) == []


def test_the_signal_is_placed_where_half_of_the_way_is_done() -> None:
    (finding,) = alike(rules.bad_init, layers(1, 10, 100, 1e3, 1e4), 1)
    assert finding.site == activation("l.3")
    assert "grow 10,000x over 5 layers, half of it before l.3" in finding.message


def started(*weights: np.ndarray) -> list[Finding]:
    """Layers of 64 weights and 4 biases, so that the fan-in is 16 and the gain four times the rms."""
    pairs = [
        {**of_parameter(f"{i}.weight", w), **of_parameter(f"{i}.bias", np.zeros(4))} for i, w in enumerate(weights)
    ]
    return alike(rules.bad_init, {site: data for pair in pairs for site, data in pair.items()}, 1)


def test_weights_too_large_for_their_fan_in() -> None:
    usual = wave(0.25)
    assert started(wave(2.5), usual, usual) == []
    (finding,) = started(usual, wave(2.51), usual)
    assert finding.site == Site("1.weight", "weight")
    assert "too large for its fan-in: RMS 2.51, 10x the variance-preserving scale" in finding.message


def test_half_as_much_is_too_large_for_the_median_layer() -> None:
    assert started(wave(1.25), wave(1.25), wave(1.25)) == []
    (finding,) = started(wave(0.25), wave(1.26), wave(1.26))
    assert (finding.site, finding.evidence["others"]) == (Site("1.weight", "weight"), 1)


def test_weights_too_small_for_their_fan_in() -> None:
    usual, small, zero = wave(0.25), wave(0.0049), wave(0.0)
    assert started(wave(0.0051), wave(0.0051), zero) == []
    assert started(usual, usual, small) == []
    (finding,) = started(small, small, zero, usual)
    assert "too small" in finding.message
    assert finding.evidence["others"] == 1


def test_weights_that_are_all_alike() -> None:
    (finding,) = started(np.full(64, 0.1))
    assert "Initial 0.weight is constant" in finding.message
    assert started(np.zeros(64)) == []
    assert started(np.zeros(64), np.zeros(64), wave(0.25)) == []
    assert started(np.zeros(64), np.zeros(64))
    assert (
        alike(rules.bad_init, {**of_parameter("n.weight", np.ones(4)), **of_parameter("n.bias", np.zeros(4))}, 1) == []
    )


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


def test_a_rule_with_thresholds_takes_the_place_of_the_default_one() -> None:
    stricter = rules.exploding_gradient(factor=20)
    chosen = choose(["default", stricter])
    assert len(chosen) == len(RULES)
    assert stricter in chosen
    assert rules.exploding_gradient not in chosen
    assert choose([non_finite, stricter, "dead_units"]) == (non_finite, stricter, rules.dead_units)


@pytest.mark.parametrize("wrong", ["non_finit", ["non_finit"], [a_rule, "non_finit"]])
def test_an_unknown_rule_names_the_nearest(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"unknown rule 'non_finit': did you mean 'non_finite'"):
        choose(wrong)


@pytest.mark.parametrize("wrong", [None, 3, 1.5, [3], [None]])
def test_what_is_no_rule_is_rejected(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="rule"):
        choose(wrong)


# --- replica_drift ---


def ranks_frame(step: int, *drifted: str, weights: int = 4, rank: int = 1) -> Frame:
    """A merged frame with checksums, in which copies of these weights differ."""
    made = make_frame(step, {Site(f"{i}.weight", "weight"): GOOD for i in range(weights)})
    scalars = {f"weight.replica_drift/{name}": float(rank) for name in drifted}
    return replace(made, scalars=scalars, checksums=np.ones((weights, 2), np.uint64))


def test_a_copy_that_differs_is_named_with_its_rank() -> None:
    (finding,) = judged(RULES["replica_drift"], [ranks_frame(0), ranks_frame(10, "2.weight", rank=3)])
    assert finding.site == Site("2.weight", "weight")
    assert (finding.severity, finding.step, finding.evidence["rank"]) == ("error", 10, 3)
    assert "Rank 3: the bits of 2.weight are not those of the other ranks at step 10" in finding.message


def test_one_copy_that_differs_from_the_start_is_found_and_tensors_split_by_hand_are_not() -> None:
    every = [f"{i}.weight" for i in range(4)]
    assert judged(RULES["replica_drift"], [ranks_frame(0, "0.weight")])
    assert not judged(RULES["replica_drift"], [ranks_frame(0, *every), ranks_frame(10, *every)])
    (finding,) = judged(RULES["replica_drift"], [ranks_frame(0), ranks_frame(10, *every)])
    assert finding.evidence["others"] == 3
