"""Weights that do not learn: left out of the optimizer, cut off from the loss, or not moved by their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tbhooks.data.frame import MISSING_GRADIENT, Site
from tbhooks.data.stats import COUNT, M2, MAX, MEAN, MIN, ZEROS
from tbhooks.rules.gradients import LOOK_BACK, learning_rate, matrices, total_gradient, weights_with_gradient
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import Flags, RunView, Series, in_every_frame, owner


@rule
def unchanged_weight(view: RunView, *, frames: int = 3, idle_frames: int = 4) -> Iterator[RuleHit]:
    """A weight has a gradient and does not move: it was not given to the optimizer, or its steps round to nothing.

    Speaks when a weight is the very same in each of the last `frames` frames although its gradient is not zero, no
    optimizer has stepped it, and others do move; or when 99 % of its numbers stay as they are in every step because
    the change is smaller than their precision. Frozen weights have no gradient, and a learning rate of zero for some
    of them is taken for meant. An error when all learning rates are zero in each of the last `idle_frames` frames and
    ever before; a warning if they were not before, as after the end of a schedule.
    Try to pass it to the optimizer, requires_grad_(False) if it is to stay, or float32 weights.
    """
    yield from _idle(view, idle_frames)
    if len(view.frames) < frames:
        return
    weights = view.last("weight", frames)
    pulled = weights_with_gradient(view, frames)
    same = _same(weights)
    left_out = [int(i) for i in np.flatnonzero(same) if weights.sites[i].name in pulled]
    if left_out:
        moved = {site.name for frame in view.frames[-LOOK_BACK:] for site in frame.sites if site.kind == "update"}
        left_out = [i for i in left_out if weights.sites[i].name not in moved]
    if left_out and not same.all():
        yield _stays(view, weights, left_out, frames, "no optimizer has it, though it has a gradient",
                     "to pass it to the optimizer, or requires_grad_(False) if it is to stay as it is")  # fmt: skip
    if view.sites("update") and not _may_rest(view, frames):
        updates = view.last("update", frames)
        # The bias of a layer before a normalisation has a gradient of rounding errors alone.
        still = in_every_frame(updates.stat("zero_fraction") >= 0.99) & matrices(updates)
        places = [int(i) for i in np.flatnonzero(still) if updates.sites[i].name in pulled]
        if places:
            yield _stays(view, updates, places, frames, "each step is smaller than the precision of its numbers",
                         "float32 weights, a larger learning rate, or stochastic rounding")  # fmt: skip


def _idle(view: RunView, frames: int) -> Iterator[RuleHit]:
    rates = [learning_rate(frame) for frame in view.frames]
    if len(rates) < frames or any(rate != 0 for rate in rates[-frames:]):
        return
    if not (view.last("update", frames).stat("zero_fraction") == 1).all():
        return  # an optimizer that makes something else of its learning rate
    has_ended = any(rate > 0 for rate in rates)
    yield RuleHit(
        None,
        "the learning rate is zero, so that no weight changes" + (" any more" if has_ended else ""),
        "to stop here, or a schedule that is as long as the training" if has_ended
        else "a look at the schedule: its number of steps, a warm-up that never goes on, a factor of zero",
        "warning" if has_ended else "error",
        since=view.step(frames - 1),
    )  # fmt: skip


def _may_rest(view: RunView, frames: int) -> bool:
    """Whether a learning rate is zero, or the run has converged: then no step is too small."""
    rates = [v for f in view.frames[-frames:] for tag, v in f.scalars.items() if tag.startswith("train.lr/")]
    return 0 in rates or total_gradient(view.frame) < 1e-3 * total_gradient(view.frames[0])


def _same(weights: Series) -> Flags:
    rows = weights.values[..., [COUNT, MEAN, M2, MIN, MAX, ZEROS]]
    return np.asarray((rows == rows[-1]).all(axis=(0, 2)))


def _stays(view: RunView, series: Series, places: Sequence[int], frames: int, why: str, remedy: str) -> RuleHit:
    site = series.sites[places[0]]
    return RuleHit(
        site, f"{site.path} does not change: {why}", remedy,
        evidence={"unchanged": [series.sites[i].path for i in places[:5]]},
        since=view.step(frames - 1), others=len(places) - 1,
    )  # fmt: skip


@rule
def missing_gradient(view: RunView, *, frames: int = 3) -> Iterator[RuleHit]:
    """A layer that the optimizer holds gets no gradient, or one of zeros: it was detached, or nobody uses its output.

    Speaks when in each of the last `frames` frames a layer ran, and none of its weights had a gradient when the
    optimizer that holds them stepped, nor had its output one; or when all gradients of a layer are exactly zero.
    Weights that do not require a gradient are frozen on purpose. Names the last layer in forward order: what cuts the
    gradient off comes right after it. An error when no weight of the model has a gradient.
    Try to look for detach(), .data, no_grad(), .item(), argmax or NumPy after it; or leave it out of the optimizer.
    """
    if len(view.frames) < frames:
        return
    missing = _without_gradient(view, frames)
    if missing and not view.sites("weight_gradient"):
        yield RuleHit(
            None, "the optimizer steps, and no weight that is watched has a gradient",
            "to look whether loss.backward() is called, and zero_grad() not between it and the step", "error",
            {"missing": sorted(missing)[:6]}, view.step(frames - 1),
        )  # fmt: skip
        return
    cut = _cut_off(view, missing, frames)
    if cut:
        site = cut[-1]
        yield RuleHit(
            site,
            f"no gradient reaches {site.name}, though the optimizer holds its weights and they require one",
            "to look for detach(), .data, no_grad(), argmax or NumPy after it, or whether its output is used at all",
            evidence={"missing": [place.name for place in cut[-6:]]},
            since=view.step(frames - 1),
            others=len(cut) - 1,
        )
    zero = _all_zero(view, frames)
    if zero:
        yield RuleHit(
            zero[-1],
            f"the gradient of {zero[-1].path} is exactly zero",
            "to look for a dead ReLU, a factor of zero or a mask after it, or zeros as initial weights",
            evidence={"zero": [place.path for place in zero[-6:]]},
            since=view.step(frames - 1),
            others=len(zero) - 1,
        )


def _without_gradient(view: RunView, frames: int) -> set[str]:
    """Paths of the weights that an optimizer was to step and that had no gradient in any of the last frames."""
    recent = view.frames[-frames:]
    tags = set(recent[-1].scalars).intersection(*(frame.scalars for frame in recent))
    return {tag.removeprefix(MISSING_GRADIENT) for tag in tags if tag.startswith(MISSING_GRADIENT)}


def _cut_off(view: RunView, missing: set[str], frames: int) -> list[Site]:
    """Modules that ran, in forward order, all of whose weights in an optimizer have no gradient."""
    recent = view.frames[-frames:]
    with_gradient = {site.path for frame in recent for site in frame.sites if site.kind == "gradient"}
    trained = {site.path for frame in recent for site in frame.sites if site.kind == "weight_gradient"}
    if not missing - trained:
        return []
    without = _modules_around(missing - trained) - _modules_around(trained) - with_gradient
    ran = view.last("activation", frames)
    always = in_every_frame(ran.present)
    return [site for i, site in enumerate(ran.sites) if always[i] and site.path in without]


def _modules_around(parameters: Iterable[str]) -> set[str]:
    """Every module that has one of these parameters somewhere inside."""
    modules: set[str] = set()
    for path in {owner(parameter) for parameter in parameters}:
        parts = path.split(".")
        modules.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return modules


def _all_zero(view: RunView, frames: int) -> list[Site]:
    series = view.last("weight_gradient", frames)
    zero = in_every_frame(series.stat("zero_fraction") == 1)
    if not zero.any() or zero.all():
        return []
    alive = {owner(series.sites[i].path) for i in np.flatnonzero(~zero)}
    ran = {site.path for site in view.sites("activation")}
    return [
        site
        for i, site in enumerate(series.sites)
        if zero[i] and owner(site.path) not in alive and owner(site.path) in ran
    ]
