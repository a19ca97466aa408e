"""Issues of the backward pass and the optimizer step: in gradients, weights and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tbhooks.data.frame import GRADIENT_NORM, Frame, Severity, Site
from tbhooks.data.stats import BASE, Floats
from tbhooks.rules.losses import losses
from tbhooks.rules.rule import RuleHit, rule, times
from tbhooks.rules.run_view import (
    Flags,
    Indices,
    RunView,
    Series,
    in_every_frame,
    is_bias,
    median,
    total_gradient,
    usual_maximum,
)

LOOK_BACK = 20
"""How many frames suffice to say that something has always been so."""
_MIN_VALUES = 2
_EXPLOSION_REMEDY = (
    "Reduce the learning rate, clip gradients (torch.nn.utils.clip_grad_norm_), or use warm-up or normalisation"
)


@rule
def exploding_gradient(
    view: RunView, *, factor: float = 30.0, depth: float = 1e4, least_frames: int = 4
) -> Iterator[RuleHit]:
    """Gradients are far larger than before, or grow from layer to layer during backward.

    Reported when the norm of all weight gradients is `factor` times its reference value: the largest of the first
    logged step's, the median of the first five, and the median of all so far, at least `least_frames`; or when the
    gradients of outputs (RMS) grow `depth`-fold from the loss to the first layers. If the script clips gradients, the
    norm after clipping is checked; the norm before clipping is reported with severity info. Normal runs stay within
    10x. The first logged step counts because in a converged run one hard batch can exceed the median a thousandfold
    and still be smaller than at the start. Names the last module in forward order that is affected: backward reaches
    it first.
    Try a lower learning rate, gradient clipping, warm-up, or normalisation.
    """
    if not view.was_skipped:
        yield from _growth_over_time(view, factor, least_frames)
        yield from _growth_over_depth(view, depth)


def _growth_over_time(view: RunView, factor: float, least_frames: int) -> Iterator[RuleHit]:
    used = float(view.frame.scalars.get(GRADIENT_NORM, np.nan))
    is_clipped = used < 0.99 * total_gradient(view.frame)
    growth = _growth(view, _used_gradient if is_clipped else total_gradient, factor, least_frames)
    if growth is not None:
        yield _explosion(view, factor, *growth, "", _EXPLOSION_REMEDY, "error")
    elif is_clipped:
        growth = _growth(view, total_gradient, factor, least_frames)
        if growth is not None:
            yield _explosion(
                view, factor, *growth, f" before clipping (to {used:.3g})",
                "The update was limited by clipping. Inspect the batches of such steps if they are frequent", "info",
            )  # fmt: skip


def _used_gradient(frame: Frame) -> float:
    return float(frame.scalars.get(GRADIENT_NORM, np.nan))


def _growth(
    view: RunView, norm_of: Callable[[Frame], float], factor: float, least_frames: int
) -> tuple[float, float] | None:
    """The newest norm and its reference value, if the ratio is above `factor`."""
    past, now = view.column(norm_of)[:-1], norm_of(view.frame)
    if np.count_nonzero(np.isfinite(past)) < least_frames or not np.isfinite(now):
        return None
    early = np.array([[norm_of(frame)] for frame in view.early()])
    reference = float(np.fmax(usual_maximum(early)[0], np.nanmedian(past)))
    return (float(now), reference) if reference > 0 and now > factor * reference else None


def _explosion(
    view: RunView, factor: float, now: float, reference: float, which: str, remedy: str, severity: Severity
) -> RuleHit:
    site, others = _first_growth(view, factor)
    return RuleHit(
        site,
        f"Exploding gradients: total norm{which} is {now:.3g}, {times(now / reference)} its reference value "
        f"({reference:.3g})" + (f", first in {site.name}," if site is not None else ""),
        remedy, severity,
        {"norm": now, "usual": reference, "excess": now / reference / factor}, others=others,
    )  # fmt: skip


def _first_growth(view: RunView, factor: float) -> tuple[Site | None, int]:
    """The first site, in backward order, whose gradient has grown, and the number of others."""
    for kind in ("gradient", "weight_gradient"):
        now, first = view.now(kind).stat("rms")[0], usual_maximum(view.start(kind).stat("rms"))
        growth = np.where(first > 0, now / np.where(first > 0, first, 1.0), np.nan)
        if np.isfinite(growth).any():
            grown = np.flatnonzero(growth >= min(factor, 0.5 * float(np.nanmax(growth))))
            # Gradients of outputs are recorded in backward order, those of weights in forward order.
            return view.sites(kind)[grown[0 if kind == "gradient" else -1]], len(grown) - 1
    return None, 0


def _growth_over_depth(view: RunView, depth: float) -> Iterator[RuleHit]:
    series = view.last("gradient", 2)
    rms = series.stat("rms")
    quarter = rms.shape[1] // 4
    if quarter < 2:
        return
    near, far = median(rms[:, :quarter]), median(rms[:, -quarter:])
    if ((far > depth * near) & (near > 0)).all():
        site = series.sites[int(np.argmax(rms[-1] > np.sqrt(near[-1] * far[-1])))]
        yield RuleHit(
            site,
            f"Exploding gradients: RMS grows from {near[-1]:.3g} near the loss to {far[-1]:.3g} in the first layers, "
            f"half of it after {site.name},",
            _EXPLOSION_REMEDY,
            evidence={"near_loss": float(near[-1]), "rms": float(far[-1]),
                      "excess": float(far[-1] / near[-1] / depth)},
        )  # fmt: skip


@rule
def vanishing_gradient(
    view: RunView, *, share: float = 1e-5, frames: int = 2, zero_frames: int = 4
) -> Iterator[RuleHit]:
    """Gradients vanish during backward, so that the first layers do not learn; or all gradients are exactly zero.

    Reported when the gradients of at least three outputs, up to the very first, are below `share` of the gradient at
    the loss (the largest in the last quarter of all outputs), by RMS and by norm, in each of the last `frames` frames.
    Normal models of any depth keep about a hundredth; a branch that is
    initialised to zero has none at first. Names the module, in backward order, at which they fall below. An error when
    all weight gradients are exactly zero in each of the last `zero_frames` frames and always were; a warning if they
    were not before, and info if the logged loss is zero as well.
    Try residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, another initialisation.
    """
    yield from _all_gradients_zero(view, zero_frames)
    series = view.last("gradient", frames)
    rms = series.stat("rms")
    if len(rms) < frames or rms.shape[1] < 6:
        return
    near, near_norm = (_at_the_loss(series, stat) for stat in ("rms", "norm"))
    flagged = _tail(in_every_frame((rms < share * near) & (series.stat("norm") < share * near_norm)))
    if len(flagged) < 3 or (rms[-1, flagged] == 0).all():
        return  # zero from one layer to the next is a cut: left to missing_gradient and dead_units
    i, last = flagged[0], flagged[-1]
    site = series.sites[i]
    yield RuleHit(
        site,
        f"Vanishing gradients: RMS falls from {near[-1, 0]:.3g} near the loss to {rms[-1, i]:.3g} at {site.name} and "
        f"{rms[-1, last]:.3g} at {series.sites[last].name}",
        "Use an LSTM or GRU instead of a plain RNN, shorter sequences, or orthogonal recurrent weights"
        if site.path in view.recurrent
        else "Use residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, or another "
        "initialisation",
        evidence={"near_loss": float(near[-1, 0]), "rms": float(rms[-1, last]),
                  "excess": float(share * near[-1, 0] / max(rms[-1, last], 1e-300))},
        since=view.step(frames - 1),
        others=len(flagged) - 1,
    )  # fmt: skip


def _at_the_loss(series: Series, stat: str) -> Floats:
    """The largest gradient in the first quarter of the outputs in backward order, without losses and other scalars.

    The median would have vanished itself where only the last layers still have a gradient.
    """
    quarter = max(len(series.sites) // 4, 1)
    values = np.where(series.stat("count") >= _MIN_VALUES, series.stat(stat), np.nan)
    known = values[:, :quarter] if np.isfinite(values[:, :quarter]).any() else values
    return np.asarray(np.fmax.reduce(known, axis=1))[:, None]


def _all_gradients_zero(view: RunView, frames: int) -> Iterator[RuleHit]:
    series = view.last("weight_gradient", frames)
    if len(view.frames) < frames or not series.sites or view.was_skipped:
        return
    if not ((series.stat("zero_fraction") == 1) | (series.stat("count") == 0)).all():
        return
    was_nonzero = any(total_gradient(frame) > 0 for frame in view.frames)
    loss_is_zero = any(loss == 0 for _, loss in losses(view.frame))
    yield RuleHit(
        None,
        "All weight gradients are exactly zero" + (", unlike before," if was_nonzero else ""),
        "Check the loss (cross entropy over a single class, all labels ignored, a zero mask or factor, a constant), "
        "then look for layers whose units are all dead",
        ("info" if loss_is_zero else "warning") if was_nonzero else "error",
        {"weights": len(series.sites)},
        view.step(frames - 1),
    )


def _tail(flags: Flags) -> Indices:
    """The indices of the consecutive flags at the end."""
    clear = np.flatnonzero(~flags)
    return np.arange(clear[-1] + 1 if len(clear) else 0, len(flags))


@rule
def update_ratio(view: RunView, *, large: float = 1.0, small: float = 1e-6, frames: int = 3) -> Iterator[RuleHit]:
    """Updates are so large that they overwrite the weights, or so small that they have no effect.

    Checks the norm of each update relative to its weight, as the median over all weight matrices that have a gradient.
    About 1e-3 is typical, 0.1 the largest in normal runs. Above `large`, in the median and for all weights together,
    a single step overwrites what was learnt, which is an error. Below `small` in every frame so far, at least `frames`,
    a million steps would hardly change the weights; not reported while the learning rate rises. A schedule that ends at
    zero and a converged run had larger ratios before.
    Try a learning rate at least 10x lower or higher.
    """
    trained = view.flags_at("update", have_gradient(view, 1), "weight_gradient")
    series = view.now("update")
    chosen = np.flatnonzero(matrices(series) & trained)
    ratio = _finite_ratios(series, chosen)[0]
    if not np.isfinite(ratio).any():
        return
    typical = float(median(ratio))
    severity: Severity
    if typical > large and _ratio_of_all(series, chosen) > large:
        i, severity, since = int(np.nanargmax(ratio)), "error", view.frame.step
        level, remedy = "high", "Reduce the learning rate by at least 10x, or use warm-up"
    elif typical < small and len(view.frames) >= frames and _was_always_slow(view, chosen, small):
        i, severity, since = 0, "warning", view.step(frames - 1)
        level, remedy = "low", "Increase the learning rate by 10x to 1,000x"
    else:
        return
    site = series.sites[chosen[i]]
    yield RuleHit(
        site,
        f"Update-to-weight ratio too {level}: median {typical:.2g} (typical 1e-3), {ratio[i]:.2g} in {site.path},",
        remedy,
        severity,
        {"ratio": typical, "excess": max(typical / large, small / max(typical, 1e-300))},
        since,
        len(chosen) - 1,
    )


@rule
def stale_second_moment(view: RunView, *, factor: float = 6.0, growth: float = 2.0) -> Iterator[RuleHit]:
    """The gradient of a weight is far above what the second moment of its optimizer expects, so that the update is too
    large: the known forerunner of loss spikes with Adam.

    Needs `w.optimizer_state()`. Checks the RMS of g / max(sqrt(v), eps), with the gradient g and the second moment v
    after the step, bias-corrected: about 1 where gradients stay the same. Reported for weight matrices when it is above
    `factor`, and `growth` times the largest of the last 20 frames. Most normal trainings stay below 5. After t steps
    it is at most sqrt(t), and never above sqrt(1 / (1 - beta2)).
    Try gradient clipping, a smaller beta2 such as 0.95, warm-up, or update clipping as in StableAdamW.
    """
    series = view.now("normalized_gradient")
    if not series.sites or view.was_skipped:
        return
    rms = series.stat("rms")[0]
    past = view.last("normalized_gradient", LOOK_BACK + 1).stat("rms")[:-1]
    usual = np.fmax.reduce(past, axis=0, initial=1.0)
    flagged = np.flatnonzero(matrices(series) & (rms > factor) & (rms > growth * usual))
    if len(flagged):
        i = int(flagged[np.argmax(rms[flagged])])
        site = series.sites[i]
        yield RuleHit(
            site,
            f"Stale second moment: the gradient of {site.path} is {times(rms[i])} what the second moment of its "
            "optimizer expects",
            "Clip gradients, use a smaller beta2 (0.95) or warm-up, and inspect the batch of this step",
            evidence={"rms": float(rms[i]), "usual": float(usual[i]), "excess": float(rms[i] / factor)},
            others=len(flagged) - 1,
        )


def matrices(series: Series) -> Flags:
    """Weights without biases and scales: those start at zero or one, where a relative change means little."""
    return np.asarray(~is_bias(series.sites) & (series.stat("count")[-1] >= 64))


def _ratio_of_all(series: Series, chosen: Indices) -> float:
    """The ratio of all weights taken as one vector: weights near zero, as in heads and adapters, matter little."""
    change, weight = series.stat("norm")[0, chosen], np.sqrt(series.values[0, chosen, BASE])
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(np.nan_to_num(change)) / max(float(np.linalg.norm(weight)), 1e-300))


def _finite_ratios(series: Series, chosen: Indices) -> Floats:
    """The ratios; NaN for weights that are zero, which have none."""
    ratio = series.stat("ratio")[:, chosen]
    return np.where(np.isfinite(ratio), ratio, np.nan)


def _typical_ratio(series: Series, chosen: bytes) -> float:
    return float(median(_finite_ratios(series, np.frombuffer(chosen, np.intp))[0]))


def _was_always_slow(view: RunView, chosen: Indices, small: float) -> bool:
    first, now = learning_rate(view.frames[0]), learning_rate(view.frame)
    if now > first or now == 0:
        return False
    is_known = False
    for frame in reversed(view.frames[-LOOK_BACK:]):
        typical = view.of_frame("update", frame).derived(_typical_ratio, chosen.tobytes())
        if typical >= small:
            return False
        is_known |= typical < small
    return is_known


def learning_rate(frame: Frame) -> float:
    """The largest of all parameter groups; NaN where none is known."""
    return max((rate for tag, rate in frame.scalars.items() if tag.startswith("train.lr/")), default=np.nan)


def have_gradient(view: RunView, frames: int) -> Flags:
    """Of the sites of weight gradients, whether each is there and mostly nonzero in each of the last frames."""
    series = view.last("weight_gradient", frames)
    with np.errstate(invalid="ignore"):
        return in_every_frame((series.stat("norm") > 0) & (series.stat("zero_fraction") < 0.9))
