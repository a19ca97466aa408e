"""Illnesses that show on the way back: in gradients, weights and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tbhooks.data.frame import GRADIENT_NORM, RAW_GRADIENT_NORM, Frame, Severity, Site
from tbhooks.data.stats import BASE, Floats
from tbhooks.rules.numerics import losses
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import Flags, Indices, RunView, Series, in_every_frame, is_bias, middle

LOOK_BACK = 20
"""How many frames are enough to say that something has never been otherwise."""


@rule
def exploding_gradient(
    view: RunView, *, factor: float = 30.0, depth: float = 1e4, least_frames: int = 4
) -> Iterator[RuleHit]:
    """Gradients are far larger than they were, or grow without bound on their way back through the layers.

    Speaks when the norm of all weight gradients is `factor` times the larger of the first frame's and the median of at
    least `least_frames` so far; or when gradients of outputs (rms) grow `depth`-fold from the loss to the first layers.
    Where the script clips, the norm that the optimizer uses is judged, and that before clipping is information.
    Healthy runs stay within ten times. The first frame counts because in a run that has converged one hard batch is
    a thousand times the usual, and still less than at the start. Names the last module in forward order where it
    shows: backward begins there.
    Try a lower learning rate, gradient clipping, warm-up, or normalisation.
    """
    if view.was_skipped:
        return
    remedy = "a lower learning rate, gradient clipping (torch.nn.utils.clip_grad_norm_), warm-up, or normalisation"
    yield from _grown_over_time(view, factor, least_frames, remedy)
    yield from _grown_through_depth(view, depth, remedy)


def _grown_over_time(view: RunView, factor: float, least_frames: int, remedy: str) -> Iterator[RuleHit]:
    used = float(view.frame.scalars.get(GRADIENT_NORM, np.nan))
    is_clipped = used < 0.99 * total_gradient(view.frame)
    judged = [f.scalars.get(GRADIENT_NORM, np.nan) if is_clipped else total_gradient(f) for f in view.frames]
    grown = _growth(judged, factor, least_frames)
    if grown is not None:
        yield _explosion(view, factor, *grown, "", remedy, "error")
    elif is_clipped:
        grown = _growth([total_gradient(frame) for frame in view.frames], factor, least_frames)
        if grown is not None:
            yield _explosion(
                view, factor, *grown, f" before clipping, which left {used:.3g} of it,",
                "a look at the batches of such steps if they come often; the step itself was kept small", "info",
            )  # fmt: skip


def _growth(totals: Sequence[float], factor: float, least_frames: int) -> tuple[float, float] | None:
    """The newest norm and its usual one, if it is too much."""
    past, now = np.array(totals[:-1]), totals[-1]
    if np.count_nonzero(np.isfinite(past)) < least_frames or not np.isfinite(now):
        return None
    usual = float(np.fmax(past[0], np.nanmedian(past)))
    return (float(now), usual) if usual > 0 and now > factor * usual else None


def _explosion(
    view: RunView, factor: float, now: float, usual: float, which: str, remedy: str, severity: Severity
) -> RuleHit:
    site, others = _where_it_grew(view, factor)
    return RuleHit(
        site,
        f"the norm of all gradients{which} is {now:.3g}, {now / usual:.3g} times its usual {usual:.3g}"
        + (f", first at {site.name}" if site is not None else ""),
        remedy, severity,
        {"norm": now, "usual": usual, "excess": now / usual / factor}, others=others,
    )  # fmt: skip


def total_gradient(frame: Frame) -> float:
    """As backward left it, or as the optimizer used it where that is unknown."""
    return float(frame.scalars.get(RAW_GRADIENT_NORM, frame.scalars.get(GRADIENT_NORM, np.nan)))


def _where_it_grew(view: RunView, factor: float) -> tuple[Site | None, int]:
    for kind in ("gradient", "weight_gradient"):
        now, first = view.now(kind).stat("rms")[0], view.first(kind).stat("rms")[0]
        growth = np.where(first > 0, now / np.where(first > 0, first, 1.0), np.nan)
        if np.isfinite(growth).any():
            grown = np.flatnonzero(growth >= min(factor, 0.5 * float(np.nanmax(growth))))
            # Gradients of outputs come in backward order, those of weights in forward order.
            return view.sites(kind)[grown[0 if kind == "gradient" else -1]], len(grown) - 1
    return None, 0


def _grown_through_depth(view: RunView, depth: float, remedy: str) -> Iterator[RuleHit]:
    series = view.last("gradient", 2)
    rms = series.stat("rms")
    quarter = rms.shape[1] // 4
    if quarter < 2:
        return
    near, far = middle(rms[:, :quarter]), middle(rms[:, -quarter:])
    if ((far > depth * near) & (near > 0)).all():
        place = int(np.argmax(rms[-1] > np.sqrt(near[-1] * far[-1])))
        yield RuleHit(
            series.sites[place],
            f"gradients grow on their way back: rms {near[-1]:.3g} near the loss, {far[-1]:.3g} at the first layers, "
            f"half of it after {series.sites[place].name}",
            remedy,
            evidence={"near_loss": float(near[-1]), "rms": float(far[-1]),
                      "excess": float(far[-1] / near[-1] / depth)},
        )  # fmt: skip


@rule
def vanishing_gradient(
    view: RunView, *, share: float = 1e-5, frames: int = 2, zero_frames: int = 4
) -> Iterator[RuleHit]:
    """Gradients die out on their way back, so that the first layers learn nothing; or all of them are exactly zero.

    Speaks when the gradients (rms) of at least three outputs, up to the very first, are below `share` of those near
    the loss in each of the last `frames` frames. Healthy models, however deep, keep a hundredth or so; a branch that
    starts at zero has none at first. Names the module at which they fall below, on the way back. An error when every
    gradient of every weight is exactly zero in each of the last `zero_frames` frames, and was never otherwise: nothing
    is learnt. A warning if it was otherwise before, and information if the loss that was logged is zero, too.
    Try residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, another initialisation.
    """
    yield from _nothing_but_zeros(view, zero_frames)
    series = view.last("gradient", frames)
    rms = series.stat("rms")
    if len(rms) < frames or rms.shape[1] < 6:
        return
    near = middle(rms[:, : max(rms.shape[1] // 4, 1)])[:, None]
    faint = in_every_frame(rms < share * near)
    flagged = _tail(faint)
    if len(flagged) < 3 or (rms[-1, flagged] == 0).all():
        return  # zero at once is a cut, not a fading: missing_gradient's or dead_units'
    i, last = flagged[0], flagged[-1]
    yield RuleHit(
        series.sites[i],
        f"gradients fade on their way back: rms {near[-1, 0]:.3g} near the loss, {rms[-1, i]:.3g} at "
        f"{series.sites[i].name}, {rms[-1, last]:.3g} at {series.sites[last].name}",
        "an LSTM or GRU instead of a plain RNN, shorter sequences, or orthogonal recurrent weights"
        if series.sites[i].path in view.recurrent
        else "residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, another initialisation",
        evidence={"near_loss": float(near[-1, 0]), "rms": float(rms[-1, last]),
                  "excess": float(share * near[-1, 0] / max(rms[-1, last], 1e-300))},
        since=view.step(frames - 1),
        others=len(flagged) - 1,
    )  # fmt: skip


def _nothing_but_zeros(view: RunView, frames: int) -> Iterator[RuleHit]:
    series = view.last("weight_gradient", frames)
    if len(view.frames) < frames or not series.sites or view.was_skipped:
        return
    if not ((series.stat("zero_fraction") == 1) | (series.stat("count") == 0)).all():
        return
    was_otherwise = any(total_gradient(frame) > 0 for frame in view.frames)
    is_satisfied = any(loss == 0 for _, loss in losses(view.frame))
    yield RuleHit(
        None,
        "every gradient of every weight is exactly zero" + (", and was not before" if was_otherwise else ""),
        "to look at the loss: cross entropy over a single class, labels that are all ignored, a mask or factor of "
        "zero, a constant; then at units that are all dead",
        ("info" if is_satisfied else "warning") if was_otherwise else "error",
        {"weights": len(series.sites)},
        view.step(frames - 1),
    )


def _tail(flags: Flags) -> Indices:
    """The places of the run of flags that reaches the end."""
    clear = np.flatnonzero(~flags)
    return np.arange(clear[-1] + 1 if len(clear) else 0, len(flags))


@rule
def update_ratio(view: RunView, *, large: float = 1.0, small: float = 1e-6, frames: int = 3) -> Iterator[RuleHit]:
    """Steps are so large that they rewrite the weights, or so small that they do not matter.

    Looks at the norm of each update over that of its weight, the median over all weight matrices that have a
    gradient. About 1e-3 is usual, a tenth the most in healthy runs. Above `large`, in the median and in all weights
    taken as one, a single step replaces what was learnt, which is an error. Below `small` in every frame so far, of at
    least `frames`, a million steps would hardly move the weights; unless the learning rate is rising. A schedule that
    ends at zero and a run that has converged have had larger ones before.
    Try a learning rate ten times lower or higher, or more.
    """
    trained = weights_with_gradient(view, 1)
    series = view.now("update")
    chosen = np.flatnonzero(matrices(series) & np.array([site.name in trained for site in series.sites], dtype=bool))
    ratio = _finite_ratios(series, chosen)[0]
    if not np.isfinite(ratio).any():
        return
    found = float(middle(ratio))
    too_large = found > large and _ratio_of_all(series, chosen) > large
    too_slow = found < small and len(view.frames) >= frames and _was_always_slow(view, chosen, small)
    for flagged, word, remedy, place in (
        (too_large, "rewrites", "a learning rate a tenth of this or less, or warm-up", int(np.nanargmax(ratio))),
        (too_slow, "hardly moves", "a learning rate ten to a thousand times this", 0),
    ):
        if flagged:
            site = series.sites[chosen[place]]
            yield RuleHit(
                site,
                f"a step {word} the weights: it changes the median one by {found:.2g} of its norm, "
                f"{site.path} by {ratio[place]:.2g}",
                remedy,
                "error" if too_large else "warning",
                {"ratio": found, "excess": max(found / large, small / max(found, 1e-300))},
                since=view.step(frames - 1) if too_slow else None,
                others=len(chosen) - 1,
            )


def matrices(series: Series) -> Flags:
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


def _was_always_slow(view: RunView, chosen: Indices, small: float) -> bool:
    rates = [learning_rate(frame) for frame in view.frames]
    if rates[-1] > rates[0] or rates[-1] == 0:
        return False
    return bool(np.nanmax(middle(_finite_ratios(view.last("update", LOOK_BACK), chosen))) < small)


def learning_rate(frame: Frame) -> float:
    """The largest of all parameter groups; NaN where none is known."""
    return max((rate for tag, rate in frame.scalars.items() if tag.startswith("train.lr/")), default=np.nan)


def weights_with_gradient(view: RunView, frames: int) -> set[str]:
    """Weights whose gradient is there and mostly not zero in each of the frames."""
    series = view.last("weight_gradient", frames)
    with np.errstate(invalid="ignore"):
        there = in_every_frame((series.stat("norm") > 0) & (series.stat("zero_fraction") < 0.9))
    return {series.sites[i].name for i in np.flatnonzero(there)}
