"""Weights that do not learn: left out of the optimizer, cut off from the loss, or not moved by their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tbhooks.data.frame import MISSING_GRADIENT, Site
from tbhooks.data.stats import COUNT, M2, MAX, MEAN, MIN, ZEROS
from tbhooks.rules.gradients import LOOK_BACK, learning_rate, matrices, total_gradient, weights_with_gradient
from tbhooks.rules.rule import Symptom, rule
from tbhooks.rules.run_view import Flags, Patient, Series, in_every_frame, owner


@rule
def unchanged_weight(patient: Patient, *, frames: int = 3, idle_frames: int = 4) -> Iterator[Symptom]:
    """A weight has a gradient and does not move: it was not given to the optimizer, or its steps round to nothing.

    Speaks when a weight is the very same in each of the last `frames` frames although its gradient is not zero, no
    optimizer has stepped it, and others do move; or when 99 % of its numbers stay as they are in every step because
    the change is smaller than their precision. Frozen weights have no gradient, and a learning rate of zero for some
    of them is taken for meant. An error when all learning rates are zero in each of the last `idle_frames` frames and
    ever before; a warning if they were not before, as after the end of a schedule.
    Try to pass it to the optimizer, requires_grad_(False) if it is to stay, or float32 weights.
    """
    yield from _idle(patient, idle_frames)
    if len(patient.frames) < frames:
        return
    weights = patient.last("weight", frames)
    pulled = weights_with_gradient(patient, frames)
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
        still = in_every_frame(updates.stat("zero_fraction") >= 0.99) & matrices(updates)
        places = [int(i) for i in np.flatnonzero(still) if updates.sites[i].name in pulled]
        if places:
            yield _stays(patient, updates, places, frames, "each step is smaller than the precision of its numbers",
                         "float32 weights, a larger learning rate, or stochastic rounding")  # fmt: skip


def _idle(patient: Patient, frames: int) -> Iterator[Symptom]:
    rates = [learning_rate(frame) for frame in patient.frames]
    if len(rates) < frames or any(rate != 0 for rate in rates[-frames:]):
        return
    if not (patient.last("update", frames).stat("zero_fraction") == 1).all():
        return  # an optimizer that makes something else of its learning rate
    has_ended = any(rate > 0 for rate in rates)
    yield Symptom(
        None,
        "the learning rate is zero, so that no weight changes" + (" any more" if has_ended else ""),
        "to stop here, or a schedule that is as long as the training" if has_ended
        else "a look at the schedule: its number of steps, a warm-up that never goes on, a factor of zero",
        "warning" if has_ended else "error",
        since=patient.step(frames - 1),
    )  # fmt: skip


def _may_rest(patient: Patient, frames: int) -> bool:
    """Whether a learning rate is zero, or the run has converged: then no step is too small."""
    rates = [v for f in patient.frames[-frames:] for tag, v in f.scalars.items() if tag.startswith("train.lr/")]
    return 0 in rates or total_gradient(patient.frame) < 1e-3 * total_gradient(patient.frames[0])


def _same(weights: Series) -> Flags:
    rows = weights.values[..., [COUNT, MEAN, M2, MIN, MAX, ZEROS]]
    return np.asarray((rows == rows[-1]).all(axis=(0, 2)))


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

    Speaks when in each of the last `frames` frames a layer ran, and none of its weights had a gradient when the
    optimizer that holds them stepped, nor had its output one; or when all gradients of a layer are exactly zero.
    Weights that do not require a gradient are frozen on purpose. Names the last layer in forward order: what cuts the
    gradient off comes right after it. An error when no weight of the model has a gradient.
    Try to look for detach(), .data, no_grad(), .item(), argmax or NumPy after it; or leave it out of the optimizer.
    """
    if len(patient.frames) < frames:
        return
    missing = _without_gradient(patient, frames)
    if missing and not patient.sites("weight_gradient"):
        yield Symptom(
            None, "the optimizer steps, and no weight that is watched has a gradient",
            "to look whether loss.backward() is called, and zero_grad() not between it and the step", "error",
            {"missing": sorted(missing)[:6]}, patient.step(frames - 1),
        )  # fmt: skip
        return
    cut = _cut_off(patient, missing, frames)
    if cut:
        site = cut[-1]
        yield Symptom(
            site,
            f"no gradient reaches {site.name}, though the optimizer holds its weights and they require one",
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


def _without_gradient(patient: Patient, frames: int) -> set[str]:
    """Paths of the weights that an optimizer was to step and that had no gradient in any of the last frames."""
    recent = patient.frames[-frames:]
    tags = set(recent[-1].scalars).intersection(*(frame.scalars for frame in recent))
    return {tag.removeprefix(MISSING_GRADIENT) for tag in tags if tag.startswith(MISSING_GRADIENT)}


def _cut_off(patient: Patient, missing: set[str], frames: int) -> list[Site]:
    """Modules that ran, in forward order, all of whose weights in an optimizer have no gradient."""
    recent = patient.frames[-frames:]
    with_gradient = {site.path for frame in recent for site in frame.sites if site.kind == "gradient"}
    trained = {site.path for frame in recent for site in frame.sites if site.kind == "weight_gradient"}
    if not missing - trained:
        return []
    without = _modules_around(missing - trained) - _modules_around(trained) - with_gradient
    ran = patient.last("activation", frames)
    always = in_every_frame(ran.present)
    return [site for i, site in enumerate(ran.sites) if always[i] and site.path in without]


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
