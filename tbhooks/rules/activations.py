"""Illnesses that show on the way forward: in activations, attention and the first weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import Site
from tbhooks.data.stats import LOWER, ZEROS, Floats
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import Flags, RunView, Series, in_every_frame, middle

_FEWEST_VALUES = 16
"""Of fewer values a distribution cannot be judged."""
_FEW_POSITIONS = 8


@rule
def exploding_activation(view: RunView, *, factor: float = 1000.0) -> Iterator[RuleHit]:
    """The output of a module has grown out of all proportion; names the first such module in execution order.

    Speaks when the rms of an output is `factor` times what it was in the first frame, and `factor` times that of the
    median module and of the very first module in that frame. In the first frame itself, when it is `factor` times
    that of the first quarter of all modules. Logits that start near zero grow a hundredfold in healthy runs. Values
    that masks are made of (-torch.finfo().max, -1e9) are left out. An error once training has begun, before a warning.
    Try a lower learning rate, normalisation, or a smaller initial scale.
    """
    now, first = view.now("activation").unmasked("rms")[0], view.first("activation").unmasked("rms")[0]
    if not np.isfinite(first).any():
        return
    if len(view.frames) == 1:
        reference = np.full_like(first, np.fmax(middle(first[: max(len(first) // 4, 1)]), first[0]))
    else:
        reference = np.fmax(first, np.fmax(middle(first), first[0]))
    flagged = np.flatnonzero((now > factor * reference) & (reference > 0))
    if len(flagged):
        i = flagged[0]
        yield RuleHit(
            view.sites("activation")[i],
            f"the output of {view.sites('activation')[i].name} has rms {now[i]:.3g}, "
            f"{now[i] / reference[i]:.3g} times its usual {reference[i]:.3g}",
            "a lower learning rate, normalisation before it, or a smaller initial scale",
            "error" if len(view.frames) > 1 else "warning",
            {"rms": float(now[i]), "usual": float(reference[i]),
                      "excess": float(now[i] / reference[i] / factor)},
            others=len(flagged) - 1,
        )  # fmt: skip


@rule
def dead_units(view: RunView, *, share: float = 0.7, frames: int = 3) -> Iterator[RuleHit]:
    """Units of a ReLU that are zero for every sample: they learn nothing any more.

    Speaks when at least `share` of a ReLU's units are dead in each of the last `frames` frames, or when a
    whole output that has a gradient is zero. A fifth is common, and healthy small autoencoders reach a half for a
    while. Outputs that start at zero leave it with the first step, hence several frames.
    Try a lower learning rate, biases that start at zero, another initialisation, or LeakyReLU or GELU.
    """
    if len(view.frames) < frames:
        return
    dead = {**_dead_outputs(view, frames), **_dead_shares(view, share, frames)}
    order = {site.name: i for i, site in enumerate(view.sites("activation"))}
    places = sorted(dead, key=lambda site: order.get(site.name, len(order)))
    if places:
        site = places[0]
        yield RuleHit(
            site,
            f"{dead[site]:.0%} of the units of {site.name} are zero for every sample",
            "a lower learning rate, biases that start at zero, another initialisation, or LeakyReLU or GELU",
            "error" if dead[site] >= 1 else "warning",
            {"dead": {place.name: dead[place] for place in places[:5]}, "excess": dead[site] / share},
            view.step(frames - 1),
            len(places) - 1,
        )


def _dead_shares(view: RunView, share: float, frames: int) -> dict[Site, float]:
    dead = {}
    for tag in view.frame.scalars:
        kind, _, name = tag.partition(".dead_fraction/")
        if name and kind in ("activation", "functional"):
            least = min(frame.scalars.get(tag, 0.0) for frame in view.frames[-frames:])
            if least >= share and (name, kind) in view.frame:
                dead[view.frame[name, kind].site] = least
    return dead


def _dead_outputs(view: RunView, frames: int) -> dict[Site, float]:
    series = view.last("activation", frames)
    with_gradient = {site.name for site in view.sites("gradient")}
    zero = in_every_frame(series.stat("zero_fraction") == 1) & (series.stat("count")[-1] >= _FEWEST_VALUES)
    return {series.sites[i]: 1.0 for i in np.flatnonzero(zero) if series.sites[i].name in with_gradient}


@rule
def saturated(view: RunView, *, slope: float = 0.1, frames: int = 3) -> Iterator[RuleHit]:
    """A hidden tanh or sigmoid works at the flat ends of its curve, where hardly any gradient passes.

    The mean slope of the curve follows from the outputs: 1 - y² for tanh, 4 y (1 - y) for sigmoid, both 1 at best.
    Speaks when it is below `slope` in each of the last `frames` frames, for outputs that look like one of the two:
    they fill -1..1 or 0..1 to the bounds, have a gradient, and feed a later layer with weights. Softmax and
    attention weights (their mean is one over a whole number), masks (no gradient) and gates or probabilities at the
    end of a model (confident on purpose) are left alone.
    Try to normalise inputs, a smaller initial scale, a normalisation before it, or ReLU or GELU; for an LSTM, GRU or
    RNN a lower learning rate, gradient clipping, or a smaller scale of its weights.
    """
    if len(view.frames) < frames:
        return
    series = view.last("activation", frames)
    curves = {"tanh": _slope_of_tanh(series), "sigmoid": _slope_of_sigmoid(series)}
    judged = _is_judged_for_saturation(view)
    for curve, slopes in curves.items():
        flagged = np.flatnonzero(in_every_frame(slopes < slope) & judged)
        if len(flagged):
            i = flagged[0]
            yield RuleHit(
                series.sites[i],
                f"{series.sites[i].name} looks like a {curve} with {slopes[-1, i]:.1%} of its slope left",
                "normalised inputs, a lower learning rate, gradient clipping, or a smaller scale of its weights"
                if series.sites[i].path in view.recurrent
                else "normalised inputs, a smaller initial scale, a normalisation before it, or ReLU or GELU",
                evidence={"slope": float(slopes[-1, i]), "excess": float(slope / max(slopes[-1, i], 1e-9))},
                since=view.step(frames - 1),
                others=len(flagged) - 1,
            )


def _slope_of_tanh(series: Series) -> Floats:
    low, high = series.stat("min"), series.stat("max")
    reaches = (low >= -1) & (high <= 1) & (low < -0.5) & (np.fmax(high, -low) > 0.99)
    return np.where(reaches & (series.stat("std") > 0), 1 - np.square(series.stat("rms")), np.nan)


def _slope_of_sigmoid(series: Series) -> Floats:
    low, high, mean = series.stat("min"), series.stat("max"), series.stat("mean")
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = 1 / mean
        is_softmax = np.abs(parts - np.round(parts)) < 1e-3
    reaches = (low >= 0) & (low < 0.01) & (high <= 1) & (high > 0.99) & (mean > 0.02) & (mean < 0.98) & ~is_softmax
    return np.where(reaches, 4 * (mean - np.square(series.stat("rms"))), np.nan)


def _is_judged_for_saturation(view: RunView) -> Flags:
    sites = view.sites("activation")
    with_gradient = {site.name for site in view.sites("gradient")}
    last = _last_with_weights(view)
    hidden = np.array([site.name in with_gradient and i < last for i, site in enumerate(sites)], dtype=bool)
    return hidden & ~_is_two_valued(view)


def _last_with_weights(view: RunView) -> int:
    """The place of the last output of a module that has weights of its own."""
    owners = view.owners("weight")
    return max((i for i, site in enumerate(view.sites("activation")) if site.path in owners), default=-1)


def _is_two_valued(view: RunView) -> Flags:
    """Signs and one-hot codes: every value is -1, 0 or 1 exactly."""
    rows, counts = view.now("activation").values[0], view.buckets("activation")
    if counts.shape[1] == 0:
        return np.zeros(len(rows), dtype=bool)
    ones = np.flatnonzero((LOWER == 1) | (LOWER == -1.5))
    return np.asarray(counts[:, ones].sum(axis=1) + rows[:, ZEROS] >= counts.sum(axis=1))


@rule
def collapsed_variance(view: RunView, *, share: float = 0.05, frames: int = 2) -> Iterator[RuleHit]:
    """The outputs of a layer have become all the same: the representation has collapsed.

    Speaks when the standard deviation of the output of a module with weights, or before one, is below `share` of
    what it was in the first frame, or a ten-thousandth of its own rms, in each of the last `frames` frames. Healthy
    layers keep a third of their spread or more. An error if it was not so at first and the spread is a ten-thousandth
    now: nothing is told apart any more. Outputs that are alike for all samples, but not in all units, cannot
    be told apart from healthy ones by what a frame holds.
    Try a stop-gradient or negatives in a contrastive loss, less weight decay, a smaller weight of the KL term.
    """
    if len(view.frames) <= frames:
        return
    series = view.last("activation", frames)
    std, rms = series.stat("std"), series.stat("rms")
    begin = view.first("activation")
    first = begin.stat("std")[0]
    small = ((std < share * first) | (std < 1e-4 * rms)) & (series.stat("count") >= _FEWEST_VALUES) & (rms > 0)
    # Behind the last weights come losses, which are meant to vanish.
    judged = np.arange(len(series.sites)) <= _last_with_weights(view)
    judged &= ~(series.is_masked.any(axis=0) | begin.is_masked[0])
    constant = in_every_frame(std < 1e-4 * rms) & (first >= 1e-4 * begin.stat("rms")[0])
    flagged = np.flatnonzero(in_every_frame(small) & judged)
    if len(flagged):
        i = flagged[0]
        yield RuleHit(
            series.sites[i],
            f"the outputs of {series.sites[i].name} have become alike: std {std[-1, i]:.3g}, at first {first[i]:.3g}",
            "a stop-gradient or negatives in a contrastive loss, less weight decay, a smaller weight of the KL term",
            "error" if constant[i] else "warning",
            {"std": float(std[-1, i]), "first": float(first[i]),
                      "excess": float(share * first[i] / max(std[-1, i], 1e-30))},
            since=view.step(frames - 1),
            others=len(flagged) - 1,
        )  # fmt: skip


@rule
def attention_collapse(
    view: RunView, *, entropy: float = 0.15, max_logit: float = 50.0, frames: int = 2
) -> Iterator[RuleHit]:
    """Attention looks at one position only, because its logits have blown up.

    Needs `kinds=(..., "functional")`. Speaks when the mean entropy of a softmax or scaled_dot_product_attention is
    below `entropy` of what a uniform one has and its largest logit is above `max_logit`, in each of the last `frames`
    frames: sharp heads are common, but not with such logits.
    Try to normalise queries and keys, a lower learning rate, warm-up, or a look at the scale of the logits.
    """
    if len(view.frames) < frames:
        return
    flagged = []
    for site in view.sites("functional"):
        if site.attention_stat is not None:
            continue
        readings = [f[site.name, site.kind] for f in view.frames[-frames:] if (site.name, site.kind) in f]
        uniform = _uniform_entropy(view, site)
        if len(readings) == frames and all(r.entropy < entropy * uniform and r.max_logit > max_logit for r in readings):
            flagged.append((site, readings[-1]))
    if flagged:
        site, reading = flagged[0]
        yield RuleHit(
            site,
            f"attention of {site.name} has collapsed: entropy {reading.entropy:.2g} nats, "
            f"logits up to {reading.max_logit:.3g}",
            "normalised queries and keys, a lower learning rate, warm-up, or a look at the scale of the logits",
            evidence={"entropy": reading.entropy, "max_logit": reading.max_logit,
                      "excess": reading.max_logit / max_logit},
            since=view.step(frames - 1),
            others=len(flagged) - 1,
        )  # fmt: skip


def _uniform_entropy(view: RunView, site: Site) -> float:
    """Entropy of attention that looks everywhere alike; where the output does not tell over how much, over a little."""
    inside = (f"{site.path}.entropy{site.index}", site.kind)
    positions = float(_FEW_POSITIONS)
    if inside in view.frame and site.path.endswith(":softmax"):
        positions = view.frame[site.name, site.kind].count / max(view.frame[inside].count, 1.0)
    return math.log(max(positions, 1.0))


@rule
def bad_init(view: RunView, *, factor: float = 1000.0, gain: float = 10.0) -> Iterator[RuleHit]:
    """The model starts badly: its signal grows or dies on the way, or its weights are far too large or all alike.

    Speaks of the first frame only. The signal: outputs of the last quarter of all layers with weights are `factor`
    times as wide as those of the first quarter, or as narrow. The weights: rms times the root of the fan-in is
    between 0.03 and 2 for every usual initialisation, and up to 6 in trained models. It is too large beyond `gain`, or
    beyond half of it in the median layer; too small if the median is below a fifth of 1 / `gain`. A matrix whose
    weights are all the same number gives all its units the same gradient for ever; zero is meant, unless all are.
    Try torch.nn.init with the gain of your activation function, or a normalisation.
    """
    if len(view.frames) > 1:
        return
    remedy = "torch.nn.init.kaiming_normal_ or xavier_normal_ with the gain of the activation, or a normalisation"
    yield from _signal_through_depth(view, factor, remedy)
    yield from _sizes_of_weights(view, gain, remedy)


def _signal_through_depth(view: RunView, factor: float, remedy: str) -> Iterator[RuleHit]:
    series = view.now("activation")
    std = np.where(series.is_masked, np.nan, series.stat("std"))[0]
    layers = [i for i, s in enumerate(series.sites) if s.path in view.owners("weight") and 0 < std[i] < np.inf]
    if len(layers) < 3:
        return
    quarter = max(len(layers) // 4, 1)
    begin, end = np.median(std[layers[:quarter]]), np.median(std[layers[-quarter:]])
    for change, word in ((end / begin, "grows"), (begin / end, "fades")):
        if change > factor:
            # The root of the way is the first layer at which the half of it is done.
            passed = [i for i in layers if max(std[i] / begin, begin / std[i]) > math.sqrt(change)]
            site = series.sites[passed[0] if passed else layers[-1]]
            yield RuleHit(
                site,
                f"the signal {word} by {change:.3g} through {len(layers)} layers, half of it before {site.name}",
                remedy,
                evidence={"first": float(begin), "last": float(end), "excess": float(change / factor)},
            )


def _sizes_of_weights(view: RunView, gain: float, remedy: str) -> Iterator[RuleHit]:
    series = view.now("weight")
    rms, std = series.stat("rms")[0], series.stat("std")[0]
    gains = _gains(series)
    known = np.array([gains[i] for i in gains if gains[i] > 0])
    usual = float(np.median(known)) if len(known) else 1.0
    large = [i for i in gains if gains[i] > (gain / 2 if usual > gain / 2 else gain)]
    small = [i for i in gains if usual < 0.2 / gain and 0 < gains[i] < 0.2 / gain]
    # Many start at zero on purpose, but not all.
    alike = [i for i in gains if std[i] == 0 and (rms[i] > 0 or (not len(known) and len(gains) > 1))]
    for flagged, words in (
        (large, "far too large for their fan-in"),
        (small, "far too small for their fan-in"),
        (alike, "all the same number, so that its units stay alike"),
    ):
        if flagged:
            i = flagged[0]
            yield RuleHit(
                series.sites[i],
                f"the weights of {series.sites[i].path} are {words}: rms {rms[i]:.3g}, {gains[i]:.3g} times what "
                "keeps the size of its inputs",
                remedy,
                evidence={"gain": gains[i], "rms": float(rms[i]), "excess": gains[i] / gain},
                others=len(flagged) - 1,
            )


def _gains(series: Series) -> dict[int, float]:
    """Of each matrix with a bias, by its place: rms times the root of the fan-in, which is weights over biases."""
    count, rms = series.stat("count")[0], series.stat("rms")[0]
    places = {site.path: i for i, site in enumerate(series.sites)}
    gains = {}
    for i, site in enumerate(series.sites):
        module, _, name = site.path.rpartition(".")
        bias = places.get(f"{module}.{name.replace('weight', 'bias')}".lstrip("."), i)
        if bias != i and count[i] >= 2 * count[bias] > 0:
            gains[i] = float(rms[i] * math.sqrt(count[i] / count[bias]))
    return gains
