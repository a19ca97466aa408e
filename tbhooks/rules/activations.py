"""Issues of the forward pass: in activations, attention and initial weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tbhooks.data.frame import Reading, Site, Sites
from tbhooks.data.stats import LOWER, ZEROS, Floats
from tbhooks.rules.rule import RuleHit, rule, times
from tbhooks.rules.run_view import Flags, RunView, Series, in_every_frame, median, owner

_MIN_VALUES = 16
"""The distribution of fewer values says nothing."""
_FEW_POSITIONS = 8


@rule
def exploding_activation(view: RunView, *, factor: float = 1000.0) -> Iterator[RuleHit]:
    """The output of a module has become far too large; names the first such module in execution order.

    Reported when the RMS of an output is `factor` times its reference value (the first logged step's, or the median of
    the first five, the larger), and `factor` times that of the median module and of the very first module. In the
    first frame itself: when it is `factor` times that of the first quarter of all modules. Logits that start near zero
    grow a hundredfold in normal runs. Mask values (-torch.finfo().max, -1e9) are ignored. An error once training has
    begun, a warning before.
    Try a lower learning rate, normalisation, or a smaller initial scale.
    """
    now, first = view.now("activation").unmasked("rms")[0], view.start("activation").usual_maximum("rms")
    if not np.isfinite(first).any():
        return
    if len(view.frames) == 1:
        reference = np.full_like(first, np.fmax(median(first[: max(len(first) // 4, 1)]), first[0]))
    else:
        reference = np.fmax(first, np.fmax(median(first), first[0]))
    flagged = np.flatnonzero((now > factor * reference) & (reference > 0))
    if len(flagged):
        i = flagged[0]
        site, ratio = view.sites("activation")[i], now[i] / reference[i]
        yield RuleHit(
            site,
            f"Exploding activations: RMS of the {site.name} output is {now[i]:.3g}, {times(ratio)} its reference value "
            f"({reference[i]:.3g})",
            "Reduce the learning rate, normalise its input, or reduce the initial scale",
            "error" if len(view.frames) > 1 else "warning",
            {"rms": float(now[i]), "usual": float(reference[i]), "excess": float(ratio / factor)},
            others=len(flagged) - 1,
        )


@rule
def dead_units(view: RunView, *, share: float = 0.7, frames: int = 3) -> Iterator[RuleHit]:
    """Units of a ReLU are zero for every sample, so that they receive no gradient.

    Reported when at least `share` of a ReLU's units are dead in each of the last `frames` frames, or when an entire
    output that has a gradient is zero. A fifth is common, and normal small autoencoders temporarily reach a half.
    Outputs that are initialised to zero change with the first step, hence several frames.
    Try a lower learning rate, biases initialised to zero, another initialisation, or LeakyReLU or GELU.
    """
    if len(view.frames) < frames:
        return
    dead = {**_zero_outputs(view, frames), **_dead_fractions(view, share, frames)}
    if dead:
        order = {name: i for i, name in enumerate(view.sites("activation").names)}
        sites = sorted(dead, key=lambda site: order.get(site.name, len(order)))
        site = sites[0]
        yield RuleHit(
            site,
            f"Dead units: {dead[site]:.0%} of the units of {site.name} are zero for every sample",
            "Reduce the learning rate, initialise biases to zero, or use another initialisation, LeakyReLU or GELU",
            "error" if dead[site] >= 1 else "warning",
            {"dead": {each.name: dead[each] for each in sites[:5]}, "excess": dead[site] / share},
            view.step(frames - 1),
            len(sites) - 1,
        )


def _dead_fractions(view: RunView, share: float, frames: int) -> dict[Site, float]:
    dead = {}
    for tag, newest in view.frame.scalars.items():
        kind, _, name = tag.partition(".dead_fraction/") if newest >= share else ("", "", "")
        if name and kind in ("activation", "functional"):
            least = min(frame.scalars.get(tag, 0.0) for frame in view.frames[-frames:])
            if least >= share and (name, kind) in view.frame:
                dead[view.frame[name, kind].site] = least
    return dead


def _zero_outputs(view: RunView, frames: int) -> dict[Site, float]:
    series = view.last("activation", frames)
    with_gradient = view.sites("gradient").name_set
    zero = in_every_frame(series.stat("zero_fraction") == 1) & (series.stat("count")[-1] >= _MIN_VALUES)
    return {series.sites[i]: 1.0 for i in np.flatnonzero(zero) if series.sites[i].name in with_gradient}


@rule
def saturated(view: RunView, *, slope: float = 0.1, frames: int = 3) -> Iterator[RuleHit]:
    """A hidden tanh or sigmoid operates at the flat ends of its curve and passes hardly any gradient.

    The mean slope of the curve follows from the outputs: 1 - y² for tanh, 4 y (1 - y) for sigmoid, both at most 1.
    Reported when it is below `slope` in each of the last `frames` frames, for outputs that look like one of the two:
    they reach the bounds of -1..1 or 0..1, have a gradient, and feed a later layer with weights. Softmax and
    attention weights (their mean is one over an integer), masks (no gradient) and gates or probabilities at the end
    of a model (meant to be confident) are ignored.
    Try to normalise inputs, a smaller initial scale, normalisation before it, or ReLU or GELU; for an LSTM, GRU or
    RNN a lower learning rate, gradient clipping, or smaller initial weights.
    """
    if len(view.frames) < frames:
        return
    series = view.last("activation", frames)
    curves = {"tanh": _tanh_slope(series), "sigmoid": _sigmoid_slope(series)}
    for curve, slopes in curves.items():
        flat = in_every_frame(slopes < slope) & view.frame.sites.derived(_are_hidden)
        flagged = np.flatnonzero(flat & ~_is_discrete(view) if flat.any() else flat)
        if len(flagged):
            i = flagged[0]
            site, found = series.sites[i], slopes[-1, i]
            yield RuleHit(
                site,
                f"Saturated {curve}: mean slope of {site.name} is {found:.1%} of the maximum",
                "Normalise the inputs, reduce the learning rate, clip gradients, or reduce the scale of the weights"
                if site.path in view.recurrent
                else "Normalise the inputs, reduce the initial scale, add normalisation before it, or use ReLU or GELU",
                evidence={"slope": float(found), "excess": float(slope / max(found, 1e-9))},
                since=view.step(frames - 1),
                others=len(flagged) - 1,
            )


def _tanh_slope(series: Series) -> Floats:
    low, high = series.stat("min"), series.stat("max")
    reaches = (low >= -1) & (high <= 1)
    if not reaches.any():  # as in most models
        return np.full(low.shape, np.nan)
    reaches &= (low < -0.5) & (np.fmax(high, -low) > 0.99)
    return np.where(reaches & (series.stat("std") > 0), 1 - np.square(series.stat("rms")), np.nan)


def _sigmoid_slope(series: Series) -> Floats:
    low, high, mean = series.stat("min"), series.stat("max"), series.stat("mean")
    reaches = (low >= 0) & (high <= 1) & (high > 0.99)
    if not reaches.any():  # as in most models
        return np.full(low.shape, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = 1 / mean
        is_softmax = np.abs(parts - np.round(parts)) < 1e-3
    reaches &= (low < 0.01) & (mean > 0.02) & (mean < 0.98) & ~is_softmax
    return np.where(reaches, 4 * (mean - np.square(series.stat("rms"))), np.nan)


def _are_hidden(sites: Sites) -> Flags:
    """Outputs with a gradient before the last layer with weights."""
    with_gradient, last = sites.of_kind("gradient").name_set, sites.derived(_last_with_weights)
    names = sites.of_kind("activation").names
    return np.array([name in with_gradient and i < last for i, name in enumerate(names)], dtype=bool)


def _last_with_weights(sites: Sites) -> int:
    """The index of the last output of a module that directly owns weights."""
    owners = {owner(site.path) for site in sites.of_kind("weight")}
    return max((i for i, site in enumerate(sites.of_kind("activation")) if site.path in owners), default=-1)


def _is_discrete(view: RunView) -> Flags:
    """Signs and one-hot codes: every value is exactly -1, 0 or 1."""
    rows, counts = view.now("activation").values[0], view.buckets("activation")
    if counts.shape[1] == 0:
        return np.zeros(len(rows), dtype=bool)
    ones = np.flatnonzero((LOWER == 1) | (LOWER == -1.5))
    return np.asarray(counts[:, ones].sum(axis=1) + rows[:, ZEROS] >= counts.sum(axis=1))


@rule
def collapsed_variance(view: RunView, *, share: float = 0.05, frames: int = 2) -> Iterator[RuleHit]:
    """The outputs of a layer have become nearly constant: the representation has collapsed.

    Reported when the standard deviation of the output of a module with weights, or before one, is below `share` of
    its value in the first frame and below half of its median in the first five, or below 1e-4 of its own RMS, in each
    of the last `frames` frames: it has collapsed, and the first frame was not merely a bad batch. Normal layers keep a
    third of their standard deviation or more. An error if it was above 1e-4 of the RMS at first and is below now.
    Outputs that are equal for all samples but differ between units cannot be recognised from these statistics.
    Try a stop-gradient or negatives in a contrastive loss, less weight decay, a smaller weight of the KL term.
    """
    if len(view.frames) <= frames:
        return
    series = view.last("activation", frames)
    std, rms = series.stat("std"), series.stat("rms")
    start = view.start("activation", frames)
    first, usual = start.stat("std")[0], start.usual("std")
    small = ((std < share * first) & (std < 0.5 * usual)) | (std < 1e-4 * rms)
    small &= (series.stat("count") >= _MIN_VALUES) & (rms > 0)
    # Losses come after the last weights and are meant to vanish.
    checked = np.arange(len(series.sites)) <= view.frame.sites.derived(_last_with_weights)
    checked &= ~(series.is_masked.any(axis=0) | start.is_masked.any(axis=0))
    constant = in_every_frame(std < 1e-4 * rms) & (first >= 1e-4 * start.stat("rms")[0])
    flagged = np.flatnonzero(in_every_frame(small) & checked)
    if len(flagged):
        i = flagged[0]
        yield RuleHit(
            series.sites[i],
            f"Activation variance of {series.sites[i].name} collapsed: std {std[-1, i]:.3g}, initially {first[i]:.3g}",
            "Use a stop-gradient or negatives in a contrastive loss, less weight decay, or a smaller KL weight",
            "error" if constant[i] else "warning",
            {"std": float(std[-1, i]), "first": float(first[i]),
             "excess": float(share * first[i] / max(std[-1, i], 1e-30))},
            view.step(frames - 1),
            len(flagged) - 1,
        )  # fmt: skip


@rule
def attention_collapse(
    view: RunView, *, entropy: float = 0.15, max_logit: float = 50.0, heads: float = 0.25, frames: int = 2
) -> Iterator[RuleHit]:
    """Attention is concentrated on a single position because its logits have become too large.

    Needs `kinds=(..., "functional")`. Reported when the mean entropy of a softmax or scaled_dot_product_attention is
    below `entropy` of the uniform distribution's and its largest logit is above `max_logit`, in each of the last
    `frames` frames: sharp heads are common, but not with such logits. Also reported when that is so for a share of
    `heads` of its heads.
    Try to normalise queries and keys, a lower learning rate, or warm-up; check the scale of the logits.
    """
    if len(view.frames) < frames:
        return
    flagged = []
    for site in view.sites("functional"):
        if site.attention_stat is not None:
            continue
        readings = [f[site.name, site.kind] for f in view.frames[-frames:] if (site.name, site.kind) in f]
        limit = entropy * _uniform_entropy(view, site)
        if len(readings) < frames:
            continue
        in_heads = _collapsed_heads(readings, limit, max_logit)
        if all(r.entropy < limit and r.max_logit > max_logit for r in readings) or in_heads.mean() >= heads:
            flagged.append((site, readings[-1], in_heads))
    if flagged:
        site, reading, in_heads = flagged[0]
        which = f" in {in_heads.sum()} of {len(in_heads)} heads" if in_heads.any() else ""
        yield RuleHit(
            site,
            f"Attention of {site.name} collapsed{which}: entropy {reading.entropy:.2g} nats, largest logit "
            f"{reading.max_logit:.3g}",
            "Normalise queries and keys, reduce the learning rate, use warm-up, or check the scale of the logits",
            evidence={"entropy": reading.entropy, "max_logit": reading.max_logit,
                      "heads": np.flatnonzero(in_heads).tolist(), "excess": reading.max_logit / max_logit},
            since=view.step(frames - 1),
            others=len(flagged) - 1,
        )  # fmt: skip


def _collapsed_heads(readings: Sequence[Reading], limit: float, max_logit: float) -> Flags:
    """Which heads are below the entropy and above the logit in every frame; one that is not, without heads."""
    names = ("entropy", "max_logit")
    if any(name not in reading.vectors for reading in readings for name in names):
        return np.zeros(1, dtype=bool)
    each = [(reading.vectors["entropy"] < limit) & (reading.vectors["max_logit"] > max_logit) for reading in readings]
    return in_every_frame(np.array(each)) if len({len(flags) for flags in each}) == 1 else np.zeros(1, dtype=bool)


def _uniform_entropy(view: RunView, site: Site) -> float:
    """Entropy of uniform attention; over a few positions where their number is not known."""
    inside = (f"{site.path}.entropy{site.index}", site.kind)
    positions = float(_FEW_POSITIONS)
    if inside in view.frame and site.path.endswith(":softmax"):
        positions = view.frame[site.name, site.kind].count / max(view.frame[inside].count, 1.0)
    return math.log(max(positions, 1.0))


_INIT_REMEDY = (
    "Use torch.nn.init.kaiming_normal_ or xavier_normal_ with the gain of the activation function, or add normalisation"
)


@rule
def bad_init(view: RunView, *, factor: float = 1000.0, gain: float = 10.0) -> Iterator[RuleHit]:
    """The initialisation is unsuitable: activations grow or vanish with depth, or weights are too large or constant.

    Checks the first frame only. Activations: the standard deviation in the last quarter of all layers with weights is
    `factor` times that in the first quarter, or vice versa. Weights: RMS times the root of the fan-in is between 0.03
    and 2 for every common initialisation, and up to 6 in trained models. It is too large above `gain`, or above half
    of it in the median layer; too small if the median is below a fifth of 1 / `gain`. A matrix with all weights equal
    gives all its units the same gradient; zeros are taken as intended, unless all matrices are zero.
    Try torch.nn.init with the gain of your activation function, or normalisation.
    """
    if len(view.frames) == 1:
        yield from _activations_over_depth(view, factor)
        yield from _weight_scales(view, gain)


def _activations_over_depth(view: RunView, factor: float) -> Iterator[RuleHit]:
    series = view.now("activation")
    std = np.where(series.is_masked, np.nan, series.stat("std"))[0]
    layers = [i for i, s in enumerate(series.sites) if s.path in view.owners("weight") and 0 < std[i] < np.inf]
    if len(layers) < 3:
        return
    quarter = max(len(layers) // 4, 1)
    begin, end = np.median(std[layers[:quarter]]), np.median(std[layers[-quarter:]])
    for change, word in ((end / begin, "grow"), (begin / end, "vanish")):
        if change > factor:
            # The first layer at which half of the change (in log scale) is reached.
            passed = [i for i in layers if max(std[i] / begin, begin / std[i]) > math.sqrt(change)]
            site = series.sites[passed[0] if passed else layers[-1]]
            yield RuleHit(
                site,
                f"Initial activations {word} {times(change)} over {len(layers)} layers, half of it before {site.name},",
                _INIT_REMEDY,
                evidence={"first": float(begin), "last": float(end), "excess": float(change / factor)},
            )


def _weight_scales(view: RunView, gain: float) -> Iterator[RuleHit]:
    series = view.now("weight")
    rms, std = series.stat("rms")[0], series.stat("std")[0]
    gains = _gains(series)
    nonzero = np.array([gains[i] for i in gains if gains[i] > 0])
    typical = float(np.median(nonzero)) if len(nonzero) else 1.0
    large = [i for i in gains if gains[i] > (gain / 2 if typical > gain / 2 else gain)]
    small = [i for i in gains if typical < 0.2 / gain and 0 < gains[i] < 0.2 / gain]
    # Some matrices are initialised to zero on purpose, but never all of them.
    constant = [i for i in gains if std[i] == 0 and (rms[i] > 0 or (not len(nonzero) and len(gains) > 1))]
    for flagged, words in (
        (large, "too large for its fan-in"),
        (small, "too small for its fan-in"),
        (constant, "constant, so that all its units get the same gradient"),
    ):
        if flagged:
            i = flagged[0]
            yield RuleHit(
                series.sites[i],
                f"Initial {series.sites[i].path} is {words}: RMS {rms[i]:.3g}, {times(gains[i])} the "
                "variance-preserving scale,",
                _INIT_REMEDY,
                evidence={"gain": gains[i], "rms": float(rms[i]), "excess": gains[i] / gain},
                others=len(flagged) - 1,
            )


def _gains(series: Series) -> dict[int, float]:
    """For each matrix with a bias, by its index: RMS times the root of the fan-in (weights per bias)."""
    count, rms = series.stat("count")[0], series.stat("rms")[0]
    indices = {site.path: i for i, site in enumerate(series.sites)}
    gains = {}
    for i, site in enumerate(series.sites):
        module, _, name = site.path.rpartition(".")
        bias = indices.get(f"{module}.{name.replace('weight', 'bias')}".lstrip("."), i)
        if bias != i and count[i] >= 2 * count[bias] > 0:
            gains[i] = float(rms[i] * math.sqrt(count[i] / count[bias]))
    return gains
