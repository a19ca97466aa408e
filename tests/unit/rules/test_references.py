"""What rules compare with: references that one bad batch does not move and a long run does not lose, and divergence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tbhooks import rules
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.history import MOST_FRAMES, History
from tbhooks.rules import RuleEngine
from tests.support.frames import make_frame

OUTPUT, GRADIENT = Site("fc", "activation"), Site("fc", "gradient")
WEIGHT = {Site("fc.weight", "weight"): [0.5, -0.25]}


def judged(rule: rules.Rule, frames: Iterable[Frame], formats: tuple[str, ...] = ()) -> list[Finding]:
    history = History(formats=formats)
    for frame in frames:
        history.append(frame)
    return list(rule(history))


def wave(rms: float, count: int = 64) -> np.ndarray:
    return rms * np.resize([1.0, -1.0], count)


def losses(*values: float, norms: Iterable[float] = (), tag: str = "train/loss") -> list[Frame]:
    norms = list(norms) or [1.0] * len(values)
    return [
        make_frame(10 * i, {OUTPUT: wave(1.0)}, scalars={tag: value, "train.grad_norm": norm})
        for i, (value, norm) in enumerate(zip(values, norms, strict=True))
    ]


# --- References -----------------------------------------------------------------------------------


def test_a_bad_first_batch_is_no_reference_for_the_variance() -> None:
    spreads = [100.0, *[1.0] * 20]
    frames = [make_frame(i, {OUTPUT: wave(spread), **WEIGHT}) for i, spread in enumerate(spreads)]
    assert judged(rules.collapsed_variance, frames) == []


@pytest.mark.parametrize("rule", [rules.collapsed_variance, rules.exploding_activation], ids=lambda rule: rule.name)
def test_the_reference_is_that_of_the_first_steps_although_their_frames_are_long_gone(rule: rules.ShippedRule) -> None:
    """The oldest frame that is still kept is a bad batch: it must not become the reference."""
    history, found = History(), []
    length = MOST_FRAMES + 300
    for step in range(length):
        bad = 300 <= step < 302
        scale = (100.0 if rule is rules.collapsed_variance else 1e-4) if bad else 1.0
        history.append(make_frame(step, {OUTPUT: wave(scale), **WEIGHT}, histograms=False))
        if step >= length - 2:
            found += rule(history)
    assert history[0].step == 300
    assert found == []


def test_an_exploding_gradient_is_measured_by_the_first_steps_although_their_frames_are_long_gone() -> None:
    history = History()
    for step in range(MOST_FRAMES + 30):
        norm = 1.0 if step < 20 else 1e-3
        history.append(make_frame(step, {GRADIENT: wave(1.0)}, scalars={"train.grad_norm_raw": norm}, histograms=False))
    history.append(make_frame(9999, {GRADIENT: wave(1.0)}, scalars={"train.grad_norm_raw": 0.5}, histograms=False))
    assert rules.exploding_gradient(history) == []


def test_frames_in_which_an_explosion_was_found_are_no_reference_so_that_it_stays_found() -> None:
    engine = RuleEngine((rules.exploding_activation,), History())
    sizes = [1.0, 5e3, 5e3, 5e3, 5e3, 5e3, 5e3, 5e3]
    data = [{Site("a", "activation"): wave(1.0), OUTPUT: wave(size)} for size in sizes]
    flagged = [bool(engine(make_frame(i, one)).findings) for i, one in enumerate(data)]
    assert flagged == [False, *[True] * 7]


def test_a_loss_logged_after_its_step_is_part_of_the_reference() -> None:
    history = History()
    history.append(make_frame(0, {OUTPUT: wave(1.0)}))
    history.append(make_frame(0, {}, scalars={"train/loss": 3.0}))
    assert history.early[0].scalars == {"train/loss": 3.0}


# --- divergence -----------------------------------------------------------------------------------


def test_a_loss_that_rises_slowly_is_a_divergence_and_an_error() -> None:
    rising = np.geomspace(3.4, 64.0, 12)
    (finding,) = judged(rules.divergence, losses(*rising))
    assert (finding.severity, finding.site, finding.rule) == ("error", None, "divergence")
    assert finding.message.startswith("Divergence: train/loss is 64, ")
    assert finding.evidence["usual"] == pytest.approx(rising[2])
    assert finding.evidence["since"] > 0
    assert "Reduce the learning rate" in finding.message


def test_a_loss_is_high_in_three_logged_steps_before_it_is_a_divergence() -> None:
    usual = [2.0] * 6
    assert judged(rules.divergence, losses(*usual, 10.1, 10.1)) == []
    assert judged(rules.divergence, losses(*usual, 9.9, 9.9, 9.9)) == []
    (finding,) = judged(rules.divergence, losses(*usual, 10.1, 10.1, 10.1))
    assert finding.evidence["since"] == 60
    assert judged(rules.divergence(frames=2), losses(*usual, 10.1, 10.1))
    assert judged(rules.divergence(factor=3.0), losses(*usual, 6.1, 6.1, 6.1))


def test_twice_the_loss_is_a_divergence_if_the_gradients_grow_as_well() -> None:
    values = [2.0] * 6 + [4.1] * 3
    assert judged(rules.divergence, losses(*values)) == []
    assert judged(rules.divergence, losses(*values, norms=[1.0] * 6 + [5.1] * 3))
    assert judged(rules.divergence, losses(*values, norms=[1.0] * 6 + [4.9] * 3)) == []


def test_progress_that_is_lost_again_is_a_divergence() -> None:
    falling = [10.0, 8.0, 5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    start = float(np.median(falling[:5]))
    assert judged(rules.divergence, losses(*falling, *[start * 0.7] * 3)) == []
    (finding,) = judged(rules.divergence, losses(*falling, *[start * 0.9] * 3))
    assert "after 1 at best and 5 at first" in finding.message
    assert judged(rules.divergence(lost=0.5), losses(*falling, *[start * 0.7] * 3))


@pytest.mark.parametrize(
    "values",
    [
        [2.3] * 12,
        list(np.geomspace(2.3, 1e-3, 12)),
        [2.3, 2.0, 1.5, 1e-6, 1e-6, 1e-6, 1e-5, 1e-5, 1e-5, 1e-5],
        [0.7, 0.7, 0.7, 0.8, 1.2, 1.9, 2.4, 2.8, 3.0, 3.1],
        [1.0, 0.9, 0.8, 40.0, 0.8, 0.8, 0.7],
        [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    ],
    ids=["flat", "falling", "converged", "a GAN's generator", "one spike", "negative"],
)
def test_what_is_no_divergence(values: list[float]) -> None:
    frames = losses(*values)
    assert [f for n in range(1, len(frames) + 1) for f in judged(rules.divergence, frames[:n])] == []


def test_the_loss_that_a_model_returns_is_looked_at_where_none_is_logged() -> None:
    site = Site("(root)", "activation", "[loss]")
    frames = [make_frame(i, {OUTPUT: wave(1.0), site: [value]}) for i, value in enumerate(np.geomspace(3.4, 64, 12))]
    (finding,) = judged(rules.divergence, frames)
    assert "loss returned by the model" in finding.message


# --- vanishing_gradient ---------------------------------------------------------------------------


def test_blocks_without_gradient_are_named_although_the_layers_near_the_loss_have_lost_theirs_too() -> None:
    """A GPT whose blocks have gradients of 1e-6 beside 1 at the last norm: even the last quarter has vanished."""
    sizes = {"ln_f": 1.0, **{f"h.{i}": 1e-6 for i in reversed(range(12))}}
    data = {Site(path, "gradient"): wave(size) for path, size in sizes.items()}
    (finding,) = judged(rules.vanishing_gradient, [make_frame(i, data) for i in range(2)])
    assert finding.site == Site("h.11", "gradient")
    assert "RMS falls from 1 near the loss to 1e-06 at h.11" in finding.message


def test_the_gradient_of_a_loss_that_is_one_number_is_not_compared_with() -> None:
    sizes = {"(root)": 1.0, **{f"h.{i}": 1e-6 for i in reversed(range(12))}}
    data = {Site(path, "gradient"): wave(size, 1 if path == "(root)" else 64) for path, size in sizes.items()}
    assert judged(rules.vanishing_gradient, [make_frame(i, data) for i in range(2)]) == []


def test_a_large_tensor_with_small_values_has_not_vanished() -> None:
    data = {Site("head", "gradient"): wave(1.0, 2)}
    data |= {Site(f"conv.{i}", "gradient"): wave(9e-6, 200_000) for i in range(8)}
    assert judged(rules.vanishing_gradient, [make_frame(i, data, histograms=False) for i in range(2)]) == []


# --- low_precision --------------------------------------------------------------------------------

TINY = {**{Site(f"l.{i}", "gradient"): wave(1e-12) for i in range(4)}, OUTPUT: [0.1, 0.2, 0.3]}


def test_formats_that_nobody_uses_are_not_spoken_of() -> None:
    assert judged(rules.low_precision, [make_frame(0, TINY)]) == []


def rounded(*values: float, bits: int) -> np.ndarray:
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissas, bits)), exponents - bits)


def test_a_format_is_in_use_if_outputs_have_its_bits_or_a_grad_scaler_its_scale() -> None:
    autocast = {**TINY, OUTPUT: rounded(0.1, 0.2, 0.3123, bits=8), Site("in", "gradient"): wave(3.4e38)}
    (finding,) = judged(rules.low_precision, [make_frame(0, autocast)])
    assert (finding.evidence["format"], finding.severity) == ("bfloat16", "info")
    assert "in use elsewhere in this model" in finding.message
    (finding,) = judged(rules.low_precision, [make_frame(0, TINY, scalars={"train.scale": 65536.0})])
    assert finding.evidence["format"] == "float16"


@pytest.mark.parametrize("asked", ["low_precision", rules.low_precision], ids=["by name", "as a function"])
def test_formats_that_are_not_in_use_are_spoken_of_when_asked_for(asked: object) -> None:
    (rule,) = rules.choose([asked])
    assert {f.evidence["format"] for f in judged(rule, [make_frame(0, TINY)])} == {"float16"}
    chosen = rules.choose(["default", asked])
    assert [each for each in chosen if each.name == "low_precision"] == [rule]
    assert rules.choose("default")[9] is rules.low_precision


# One value of a hundred is a thousand times the others: scaled to it, they are all zero in int8, but not in float8.
OUTLIER = np.array([1000.0, *np.linspace(-1, 1, 99)])


@pytest.mark.parametrize("asked", ["default", "low_precision"])
@pytest.mark.parametrize(
    ("formats", "found"),
    [((), set()), (("int8",), {("out", "int8")}), (("float8_e5m2",), {("far", "float8_e5m2")})],
    ids=["none", "int8", "float8"],
)
def test_what_quantizers_of_the_model_lose_is_said(asked: str, formats: tuple[str, ...], found: set[object]) -> None:
    (rule,) = (each for each in rules.choose(asked) if getattr(each, "name", "") == "low_precision")
    far = np.array([1.0, *[1e-11] * 63])
    frame = make_frame(0, {Site("out", "activation"): OUTLIER, Site("far", "gradient"): far})
    judged_by = [finding for finding in judged(rule, [frame], formats) if "by its quantizers" in finding.message]
    assert {(finding.site.path, finding.evidence["format"]) for finding in judged_by if finding.site} == found
    assert all("excluding this module from quantization" in finding.message for finding in judged_by)


# --- The second moment of optimizers --------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "is_found"), [((1, 1, 1, 8), True), ((1, 1, 1, 5), False), ((8,), True), ((1, 7, 1, 8), False)]
)
def test_a_gradient_far_above_its_second_moment(ratios: tuple[float, ...], is_found: bool) -> None:
    """Above 6, and above twice the largest before."""
    sites = [Site("fc.weight", "normalized_gradient"), Site("fc.bias", "normalized_gradient")]
    frames = [make_frame(10 * i, {site: wave(ratio) for site in sites}) for i, ratio in enumerate(ratios)]
    found = judged(rules.stale_second_moment, frames)
    assert [(finding.site, finding.severity) for finding in found] == ([(sites[0], "warning")] if is_found else [])
