"""Mistakes of the training loop: weights without optimizer, gradient or change, and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tbhooks.data.frame import EVALUATION_SINCE, MISSING_GRADIENT, Frame, Site, Sites
from tbhooks.data.stats import COUNT, M2, MAX, MEAN, MIN, ZEROS
from tbhooks.rules.gradients import LOOK_BACK, have_gradient, learning_rate, matrices
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import Flags, Indices, RunView, Series, in_every_frame, owner, total_gradient


@rule
def unchanged_weight(view: RunView, *, frames: int = 3, idle_frames: int = 4) -> Iterator[RuleHit]:
    """A weight has a gradient but does not change: it is not in the optimizer, or its updates are rounded away.

    Reported when a weight is identical in each of the last `frames` frames although its gradient is not zero, no
    optimizer has stepped it, and other weights change; or when 99 % of its values stay the same in every step because
    the change is below their precision. Frozen weights have no gradient, and a learning rate of zero for some groups
    is taken as intended. An error when all learning rates are zero in each of the last `idle_frames` frames and always
    were; a warning if they were not before, as after the end of a schedule.
    Try to pass it to the optimizer, requires_grad_(False) if it is to stay, or float32 weights.
    """
    yield from _zero_learning_rate(view, idle_frames)
    if len(view.frames) < frames:
        return
    weights, with_gradient = view.last("weight", frames), have_gradient(view, frames)
    same = _is_same(weights)
    left_out = np.flatnonzero(same & view.flags_at("weight", with_gradient, "weight_gradient")).tolist()
    if left_out:
        updated = _names(view.frames[-LOOK_BACK:], "update")
        left_out = [i for i in left_out if weights.sites.names[i] not in updated]
    if left_out and not same.all():
        yield _unchanged(view, weights, left_out, frames, "it has a gradient but is in no optimizer",
                         "Pass it to the optimizer, or call requires_grad_(False) if it is to stay fixed")  # fmt: skip
    if view.sites("update") and not _may_rest(view, frames):
        updates = view.last("update", frames)
        # The bias of a layer before a normalisation has a gradient of rounding errors alone.
        still = in_every_frame(updates.stat("zero_fraction") >= 0.99) & matrices(updates)
        rounded = np.flatnonzero(still & view.flags_at("update", with_gradient, "weight_gradient")).tolist()
        if rounded:
            yield _unchanged(view, updates, rounded, frames, "each update is below the precision of its dtype",
                             "Use float32 weights, a larger learning rate, or stochastic rounding")  # fmt: skip


def _zero_learning_rate(view: RunView, frames: int) -> Iterator[RuleHit]:
    if len(view.frames) < frames or any(learning_rate(frame) != 0 for frame in view.frames[-frames:]):
        return
    if not (view.last("update", frames).stat("zero_fraction") == 1).all():
        return  # an optimizer that interprets its learning rate differently
    has_ended = any(learning_rate(frame) > 0 for frame in view.frames)
    yield RuleHit(
        None,
        "The learning rate is zero: no weight changes" + (" any more" if has_ended else ""),
        "Stop here, or use a schedule that is as long as the training" if has_ended
        else "Check the schedule: its number of steps, a warm-up that never ends, a factor of zero",
        "warning" if has_ended else "error",
        since=view.step(frames - 1),
    )  # fmt: skip


def _may_rest(view: RunView, frames: int) -> bool:
    """Whether a learning rate is zero or the run has converged, so that small updates are expected."""
    rates = [v for f in view.frames[-frames:] for tag, v in f.scalars.items() if tag.startswith("train.lr/")]
    return 0 in rates or total_gradient(view.frame) < 1e-3 * total_gradient(view.early()[0])


def _is_same(weights: Series) -> Flags:
    rows = weights.values[..., [COUNT, MEAN, M2, MIN, MAX, ZEROS]]
    return np.asarray((rows == rows[-1]).all(axis=(0, 2)))


def _unchanged(view: RunView, series: Series, indices: Sequence[int], frames: int, why: str, remedy: str) -> RuleHit:
    site = series.sites[indices[0]]
    return RuleHit(
        site, f"{site.path} does not change: {why},", remedy,
        evidence={"unchanged": [series.sites[i].path for i in indices[:5]]},
        since=view.step(frames - 1), others=len(indices) - 1,
    )  # fmt: skip


@rule
def missing_gradient(view: RunView, *, frames: int = 3) -> Iterator[RuleHit]:
    """A layer in the optimizer gets no gradient, or only zeros: it was detached, or its output is not used.

    Reported when in each of the last `frames` frames a layer ran, none of its weights had a gradient when their
    optimizer stepped, and neither had its output; or when all gradients of a layer are exactly zero. Weights that do
    not require a gradient are frozen on purpose. Names the last layer in forward order: the gradient is cut off right
    after it. An error when no weight of the model has a gradient.
    Try to search for detach(), .data, no_grad(), .item(), argmax or NumPy after it; or remove it from the optimizer.
    """
    if len(view.frames) < frames:
        return
    missing = _without_gradient(view, frames)
    since = view.step(frames - 1)
    if missing and not view.sites("weight_gradient"):
        yield RuleHit(
            None, "The optimizer steps, but no watched weight has a gradient,",
            "Check that loss.backward() is called, and that zero_grad() is not called before the step", "error",
            {"missing": sorted(missing)[:6]}, since,
        )  # fmt: skip
        return
    cut = _cut_off(view, missing, frames)
    if cut:
        yield RuleHit(
            cut[-1],
            f"No gradient reaches {cut[-1].name}, although the optimizer holds its weights and they require one,",
            "Search for detach(), .data, no_grad(), argmax or NumPy after it, and check that its output is used",
            evidence={"missing": [site.name for site in cut[-6:]]},
            since=since,
            others=len(cut) - 1,
        )
    zero = _all_zero(view, frames)
    if zero:
        yield RuleHit(
            zero[-1],
            f"The gradient of {zero[-1].path} is exactly zero",
            "Search for a dead ReLU, a zero factor or a mask after it, or for weights initialised to zero",
            evidence={"zero": [site.path for site in zero[-6:]]},
            since=since,
            others=len(zero) - 1,
        )


def _without_gradient(view: RunView, frames: int) -> set[str]:
    """Paths of the weights in an optimizer that had no gradient in any of the last frames."""
    tags = [tag for tag in view.frame.scalars if tag.startswith(MISSING_GRADIENT)]
    recent = view.frames[-frames:]
    return {tag.removeprefix(MISSING_GRADIENT) for tag in tags if all(tag in frame.scalars for frame in recent)}


def _names(frames: Sequence[Frame], kind: str) -> frozenset[str]:
    """The names of the sites of a kind in any of these frames, which mostly share their sites."""
    each = {id(frame.sites): frame.sites for frame in frames}.values()
    return frozenset[str]().union(*(sites.of_kind(kind).name_set for sites in each))


def _cut_off(view: RunView, missing: set[str], frames: int) -> list[Site]:
    """The modules that ran, in forward order, whose weights in an optimizer all have no gradient."""
    each = {id(frame.sites): frame.sites for frame in view.frames[-frames:]}.values() if missing else ()
    with_gradient, trained = (
        frozenset[str]().union(*(sites.of_kind(kind).path_set for sites in each))
        for kind in ("gradient", "weight_gradient")
    )
    if not missing - trained:
        return []
    without = _modules_around(missing - trained) - _modules_around(trained) - with_gradient
    ran = view.last("activation", frames)
    always = in_every_frame(ran.present)
    return [site for i, site in enumerate(ran.sites) if always[i] and site.path in without]


def _modules_around(parameters: Iterable[str]) -> set[str]:
    """Every module that contains one of these parameters."""
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
    owners, has_run = view.frame.sites.derived(_owners_of_gradients)
    alive = np.isin(owners, owners[~zero])
    return [series.sites[i] for i in np.flatnonzero(zero & ~alive & has_run)]


def _owners_of_gradients(sites: Sites) -> tuple[Indices, Flags]:
    """For each weight gradient the number of the module that owns the weight, and whether that module has run."""
    owners = [owner(site.path) for site in sites.of_kind("weight_gradient")]
    number = {path: i for i, path in enumerate(dict.fromkeys(owners))}
    ran = sites.of_kind("activation").path_set
    return np.array([number[path] for path in owners], np.intp), np.array([path in ran for path in owners], bool)


@rule
def evaluation_mode(view: RunView) -> Iterator[RuleHit]:
    """The model is trained in evaluation mode after it was in training mode: model.train() was probably forgotten.

    Dropout then has no effect, and BatchNorm neither uses nor updates the statistics of the batch. Reported when a
    backward went through a forward of the whole model in evaluation mode and the optimizer stepped. Parts in evaluation
    mode (frozen BatchNorm) and models that were never in training mode are ignored.
    Try to call model.train() after each evaluation.
    """
    since = view.frame.scalars.get(EVALUATION_SINCE)
    if since is not None:
        yield RuleHit(
            None,
            "The model is trained in evaluation mode",
            "Call model.train() after each evaluation",
            evidence={"since": int(since)},
            since=int(since),
        )
