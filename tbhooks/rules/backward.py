"""Illnesses that show on the way back: in gradients, weights and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tbhooks.frame import Frame, Site
from tbhooks.rules.diagnosis import Symptom, rule
from tbhooks.rules.patient import Flags, Indices, Patient, Series, in_every_frame, is_bias, middle, owner
from tbhooks.stats import BASE, COUNT, M2, MAX, MEAN, MIN, ZEROS, Floats

LOOK_BACK = 20
"""How many frames are enough to say that something has never been otherwise."""


@rule
def exploding_gradient(patient: Patient, *, factor: float = 30.0, depth: float = 1e4) -> Iterator[Symptom]:
    """Gradients are far larger than they were, or grow without bound on their way back through the layers.

    Speaks when the norm of all weight gradients, before clipping, is `factor` times the larger of the first frame's
    and the median so far; or when gradients of outputs (rms) grow `depth`-fold from the loss to the first layers.
    Healthy runs stay within ten times. The first frame counts because in a run that has converged one hard batch is
    a thousand times the usual, and still less than at the start. Names the last module in forward order where it
    shows: backward begins there.
    Try a lower learning rate, gradient clipping, warm-up, or normalisation.
    """
    if patient.was_skipped:
        return
    remedy = "a lower learning rate, gradient clipping (torch.nn.utils.clip_grad_norm_), warm-up, or normalisation"
    yield from _grown_over_time(patient, factor, remedy)
    yield from _grown_through_depth(patient, depth, remedy)


def _grown_over_time(patient: Patient, factor: float, remedy: str) -> Iterator[Symptom]:
    totals = np.array([_total_gradient(frame) for frame in patient.frames])
    past, now = totals[:-1], totals[-1]
    if not np.isfinite(past).any() or not np.isfinite(now):
        return
    usual = float(np.fmax(past[0], np.nanmedian(past)))
    if usual > 0 and now > factor * usual:
        site, others = _where_it_grew(patient, factor)
        yield Symptom(
            site,
            f"the norm of all gradients is {now:.3g}, {now / usual:.3g} times its usual {usual:.3g}"
            + (f", first at {site.name}" if site is not None else ""),
            remedy, "error",
            {"norm": float(now), "usual": usual, "excess": float(now / usual / factor)}, others=others,
        )  # fmt: skip


def _total_gradient(frame: Frame) -> float:
    """As backward left it, or as the optimizer used it where that is unknown."""
    return float(frame.scalars.get("train.grad_norm_raw", frame.scalars.get("train.grad_norm", np.nan)))


def _where_it_grew(patient: Patient, factor: float) -> tuple[Site | None, int]:
    for kind in ("gradient", "weight_gradient"):
        now, first = patient.now(kind).stat("rms")[0], patient.first(kind).stat("rms")[0]
        growth = np.where(first > 0, now / np.where(first > 0, first, 1.0), np.nan)
        if np.isfinite(growth).any():
            grown = np.flatnonzero(growth >= min(factor, 0.5 * float(np.nanmax(growth))))
            # Gradients of outputs come in backward order, those of weights in forward order.
            return patient.sites(kind)[grown[0 if kind == "gradient" else -1]], len(grown) - 1
    return None, 0


def _grown_through_depth(patient: Patient, depth: float, remedy: str) -> Iterator[Symptom]:
    series = patient.last("gradient", 2)
    rms = series.stat("rms")
    quarter = rms.shape[1] // 4
    if quarter < 2:
        return
    near, far = middle(rms[:, :quarter]), middle(rms[:, -quarter:])
    if ((far > depth * near) & (near > 0)).all():
        place = int(np.argmax(rms[-1] > np.sqrt(near[-1] * far[-1])))
        yield Symptom(
            series.sites[place],
            f"gradients grow on their way back: rms {near[-1]:.3g} near the loss, {far[-1]:.3g} at the first layers, "
            f"half of it after {series.sites[place].name}",
            remedy,
            evidence={"near_loss": float(near[-1]), "rms": float(far[-1]),
                      "excess": float(far[-1] / near[-1] / depth)},
        )  # fmt: skip


@rule
def vanishing_gradient(patient: Patient, *, share: float = 1e-5, frames: int = 2) -> Iterator[Symptom]:
    """Gradients die out on their way back, so that the first layers learn nothing.

    Speaks when the gradients (rms) of at least three outputs, up to the very first, are below `share` of those near
    the loss in each of the last `frames` frames. Healthy models, however deep, keep a hundredth or so; a branch that
    starts at zero has none at first. Names the module at which they fall below, on the way back.
    Try residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, another initialisation.
    """
    series = patient.last("gradient", frames)
    rms = series.stat("rms")
    if len(rms) < frames or rms.shape[1] < 6:
        return
    near = middle(rms[:, : max(rms.shape[1] // 4, 1)])[:, None]
    faint = in_every_frame(rms < share * near)
    sick = _tail(faint)
    if len(sick) < 3 or (rms[-1, sick] == 0).all():
        return  # zero at once is a cut, not a fading: missing_gradient's or dead_units'
    i, last = sick[0], sick[-1]
    yield Symptom(
        series.sites[i],
        f"gradients fade on their way back: rms {near[-1, 0]:.3g} near the loss, {rms[-1, i]:.3g} at "
        f"{series.sites[i].name}, {rms[-1, last]:.3g} at {series.sites[last].name}",
        "residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, another initialisation",
        evidence={"near_loss": float(near[-1, 0]), "rms": float(rms[-1, last]),
                  "excess": float(share * near[-1, 0] / max(rms[-1, last], 1e-300))},
        since=patient.step(frames - 1),
        others=len(sick) - 1,
    )  # fmt: skip


def _tail(flags: Flags) -> Indices:
    """The places of the run of flags that reaches the end."""
    clear = np.flatnonzero(~flags)
    return np.arange(clear[-1] + 1 if len(clear) else 0, len(flags))


@rule
def update_ratio(patient: Patient, *, large: float = 1.0, small: float = 1e-6, frames: int = 3) -> Iterator[Symptom]:
    """Steps are so large that they rewrite the weights, or so small that they do not matter.

    Looks at the norm of each update over that of its weight, the median over all weight matrices that have a
    gradient. About 1e-3 is usual, a tenth the most in healthy runs. Above `large`, in the median and in all weights
    taken as one, a single step replaces what was learnt. Below `small` in every frame so far, of at least `frames`,
    a million steps would hardly move the weights; unless the learning rate is rising. A schedule that ends at zero
    and a run that has converged have had larger ones before.
    Try a learning rate ten times lower or higher, or more.
    """
    trained = _pulled(patient, 1)
    series = patient.now("update")
    chosen = np.flatnonzero(_matrices(series) & np.array([site.name in trained for site in series.sites], dtype=bool))
    ratio = _finite_ratios(series, chosen)[0]
    if not np.isfinite(ratio).any():
        return
    found = float(middle(ratio))
    too_large = found > large and _ratio_of_all(series, chosen) > large
    too_slow = found < small and len(patient.frames) >= frames and _was_always_slow(patient, chosen, small)
    for sick, word, remedy, place in (
        (too_large, "rewrites", "a learning rate a tenth of this or less, or warm-up", int(np.nanargmax(ratio))),
        (too_slow, "hardly moves", "a learning rate ten to a thousand times this", 0),
    ):
        if sick:
            site = series.sites[chosen[place]]
            yield Symptom(
                site,
                f"a step {word} the weights: it changes the median one by {found:.2g} of its norm, "
                f"{site.path} by {ratio[place]:.2g}",
                remedy,
                evidence={"ratio": found, "excess": max(found / large, small / max(found, 1e-300))},
                since=patient.step(frames - 1) if too_slow else None,
                others=len(chosen) - 1,
            )


def _matrices(series: Series) -> Flags:
    """Weights proper: biases and scales start at zero or one, and tell nothing by their relative change."""
    named = np.array([not is_bias(site) for site in series.sites], dtype=bool)
    return np.asarray(named & (series.stat("count")[-1] >= 64))


def _ratio_of_all(series: Series, chosen: Indices) -> float:
    """Of all weights as one: those that start near zero, as heads and adapters do, weigh little in it."""
    change, weight = series.stat("norm")[0, chosen], np.sqrt(series.values[0, chosen, BASE])
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(np.nan_to_num(change)) / max(float(np.linalg.norm(weight)), 1e-300))


def _finite_ratios(series: Series, chosen: Indices) -> Floats:
    """Weights that start at zero change infinitely, which says nothing."""
    ratio = series.stat("ratio")[:, chosen]
    return np.where(np.isfinite(ratio), ratio, np.nan)


def _was_always_slow(patient: Patient, chosen: Indices, small: float) -> bool:
    rates = [_learning_rate(frame) for frame in patient.frames]
    if rates[-1] > rates[0] or rates[-1] == 0:
        return False
    return bool(np.nanmax(middle(_finite_ratios(patient.last("update", LOOK_BACK), chosen))) < small)


def _learning_rate(frame: Frame) -> float:
    return max((rate for tag, rate in frame.scalars.items() if tag.startswith("train.lr/")), default=np.nan)


@rule
def unchanged_weight(patient: Patient, *, frames: int = 3) -> Iterator[Symptom]:
    """A weight has a gradient and does not move: it was not given to the optimizer, or its steps round to nothing.

    Speaks when a weight is the very same in each of the last `frames` frames although its gradient is not zero, no
    optimizer has stepped it, and others do move; or when 99 % of its numbers stay as they are in every step because
    the change is smaller than their precision. Frozen weights have no gradient, and a learning rate of zero is
    taken for meant.
    Try to pass it to the optimizer, requires_grad_(False) if it is to stay, or float32 weights.
    """
    if len(patient.frames) < frames:
        return
    weights = patient.last("weight", frames)
    pulled = _pulled(patient, frames)
    same = _same(weights)
    left_out = [int(i) for i in np.flatnonzero(same) if weights.sites[i].name in pulled]
    if left_out:
        moved = {site.name for frame in patient.frames[-LOOK_BACK:] for site in frame.sites if site.kind == "update"}
        left_out = [i for i in left_out if weights.sites[i].name not in moved]
    if left_out and not same.all():
        yield _stays(patient, weights, left_out, frames, "no optimizer has it, though it has a gradient",
                     "to pass it to the optimizer, or requires_grad_(False) if it is to stay as it is")  # fmt: skip
    if patient.sites("update") and not _may_rest(patient, frames):
        updates = patient.last("update", frames)
        # The bias of a layer before a normalisation has a gradient of rounding errors alone.
        still = in_every_frame(updates.stat("zero_fraction") >= 0.99) & _matrices(updates)
        places = [int(i) for i in np.flatnonzero(still) if updates.sites[i].name in pulled]
        if places:
            yield _stays(patient, updates, places, frames, "each step is smaller than the precision of its numbers",
                         "float32 weights, a larger learning rate, or stochastic rounding")  # fmt: skip


def _may_rest(patient: Patient, frames: int) -> bool:
    """Whether a learning rate is zero, or the run has converged: then no step is too small."""
    rates = [v for f in patient.frames[-frames:] for tag, v in f.scalars.items() if tag.startswith("train.lr/")]
    return 0 in rates or _total_gradient(patient.frame) < 1e-3 * _total_gradient(patient.frames[0])


def _same(weights: Series) -> Flags:
    rows = weights.values[..., [COUNT, MEAN, M2, MIN, MAX, ZEROS]]
    return np.asarray((rows == rows[-1]).all(axis=(0, 2)))


def _pulled(patient: Patient, frames: int) -> set[str]:
    """Weights whose gradient is there and mostly not zero in each of the frames."""
    series = patient.last("weight_gradient", frames)
    with np.errstate(invalid="ignore"):
        there = in_every_frame((series.stat("norm") > 0) & (series.stat("zero_fraction") < 0.9))
    return {series.sites[i].name for i in np.flatnonzero(there)}


def _stays(patient: Patient, series: Series, places: Sequence[int], frames: int, why: str, remedy: str) -> Symptom:
    site = series.sites[places[0]]
    return Symptom(
        site, f"{site.path} does not change: {why}", remedy,
        evidence={"unchanged": [series.sites[i].path for i in places[:5]]},
        since=patient.step(frames - 1), others=len(places) - 1,
    )  # fmt: skip


@rule
def missing_gradient(patient: Patient, *, frames: int = 3) -> Iterator[Symptom]:
    """A layer that the optimizer holds gets no gradient, or one of zeros: it was detached, or nobody uses its output.

    Speaks when in each of the last `frames` frames a layer ran, none of its weights had a gradient, its output
    had none, and a layer that ran before it had one; or when all gradients of a layer are exactly zero. Layers frozen
    on purpose are let be: at the bottom of a model nothing before them has a gradient, elsewhere one flows
    through them. Names the last layer in forward order: what cuts the gradient off comes right after it.
    Try to look for detach(), .data, no_grad(), .item(), argmax or NumPy after it; or leave it out of the optimizer.
    """
    if len(patient.frames) < frames:
        return
    cut = _cut_off(patient, frames)
    if cut:
        site = cut[-1]
        yield Symptom(
            site,
            f"no gradient reaches {site.name}, though layers before it have one",
            "to look for detach(), .data, no_grad(), argmax or NumPy after it, or whether its output is used at all",
            evidence={"missing": [place.name for place in cut[-6:]]},
            since=patient.step(frames - 1),
            others=len(cut) - 1,
        )
    zero = _all_zero(patient, frames)
    if zero:
        yield Symptom(
            zero[-1],
            f"the gradient of {zero[-1].path} is exactly zero",
            "to look for a dead ReLU, a factor of zero or a mask after it, or zeros as initial weights",
            evidence={"zero": [place.path for place in zero[-6:]]},
            since=patient.step(frames - 1),
            others=len(zero) - 1,
        )


def _cut_off(patient: Patient, frames: int) -> list[Site]:
    """Modules that ran, in forward order, and hold weights of an optimizer, yet have no gradient at all."""
    recent = patient.frames[-frames:]
    with_gradient = {site.path for frame in recent for site in frame.sites if site.kind == "gradient"}
    trained = {site.path for frame in recent for site in frame.sites if site.kind == "weight_gradient"}
    held = {site.path for site in patient.sites("update")}
    if not with_gradient or held <= trained:
        return []
    without = _modules_around(held - trained) - _modules_around(trained)
    ran = patient.last("activation", frames)
    always = in_every_frame(ran.present)
    begins = next((i for i, site in enumerate(ran.sites) if site.path in with_gradient), len(ran.sites))
    return [
        site
        for i, site in enumerate(ran.sites)
        if i > begins and always[i] and site.path in without and site.path not in with_gradient
    ]


def _modules_around(parameters: Iterable[str]) -> set[str]:
    """Every module that has one of these parameters somewhere inside."""
    modules: set[str] = set()
    for path in {owner(parameter) for parameter in parameters}:
        parts = path.split(".")
        modules.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return modules


def _all_zero(patient: Patient, frames: int) -> list[Site]:
    series = patient.last("weight_gradient", frames)
    zero = in_every_frame(series.stat("zero_fraction") == 1)
    if not zero.any() or zero.all():
        return []
    alive = {owner(series.sites[i].path) for i in np.flatnonzero(~zero)}
    ran = {site.path for site in patient.sites("activation")}
    return [
        site
        for i, site in enumerate(series.sites)
        if zero[i] and owner(site.path) not in alive and owner(site.path) in ran
    ]
