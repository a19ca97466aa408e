"""Illnesses of numbers themselves: not finite, out of a format's range, or a loss out of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import NONFINITE_SINCE, SCALE, Frame, Severity, Site
from tbhooks.data.stats import COUNT, FORMATS, INFS, MAX, MIDDLE, MIN, NANS, UPPER, ZEROS, Floats
from tbhooks.rules.rule import RuleHit, rule, rule_of_every_frame
from tbhooks.rules.run_view import RunView, is_bias

_GRADIENTS = ("gradient", "weight_gradient")


@rule_of_every_frame
def non_finite(view: RunView) -> Iterator[RuleHit]:
    """NaN or infinity in an activation, gradient, weight or update; names the first place in execution order.

    Speaks at once, of evaluation passes too. Silent about infinite gradients of a step a GradScaler has skipped.
    Infinity alone, where the gradient of the same output is finite, is told as info: masks look like that.
    If weights are not finite themselves, the cause lies in a step that was not logged, and the message says so.
    Try a lower learning rate, gradient clipping, an epsilon in divisions, roots and logarithms, or a look at the data.
    """
    frame = view.frame
    flagged = np.flatnonzero(frame.values[:, NANS] + frame.values[:, INFS] > 0)
    sites = [(int(i), frame.sites[i]) for i in flagged if _is_blamed(frame.sites[i], view.was_skipped)]
    if not sites:
        yield from _sick_losses(view)
        return
    place, site = sites[0]
    count, nans, infs = (int(frame.values[place, column]) for column in (COUNT, NANS, INFS))
    found = " and ".join(f"{n} {word}" for n, word in ((nans, "NaN"), (infs, "infinite")) if n)
    origin, evidence = _origin(view, [site for _, site in sites])
    yield RuleHit(
        site,
        f"{found} of {count} values in the {site.kind} of {site.name} at step {frame.step}",
        "a lower learning rate, gradient clipping, or a look at its inputs" + origin,
        _severity(frame, sites),
        {"nan_count": nans, "inf_count": infs, "count": count, **evidence},
        others=len(sites) - 1,
    )


def _is_blamed(site: Site, skipped: bool) -> bool:
    # A loss scale that was too large: the scaler has noticed, and lowers it. In attention a mask is minus
    # infinity, and what it hides altogether has no distribution.
    return not (skipped and site.kind in _GRADIENTS) and site.attention_stat is None


def _severity(frame: Frame, sites: list[tuple[int, Site]]) -> Severity:
    """Masks are infinite on purpose: then there is no NaN anywhere, and gradients flow past them."""
    masked = not any(frame.values[i, NANS] for i, _ in sites) and all(
        (site.name, "gradient") in frame and frame[site.name, "gradient"].inf_count == 0
        for _, site in sites
        if site.kind != "functional"
    )
    return "info" if masked and all(np.isfinite(loss) for _, loss in losses(frame)) else "error"


def _origin(view: RunView, sites: list[Site]) -> tuple[str, dict[str, int]]:
    """Where it may have begun, if that is not the first place it is seen at."""
    weights = sum(site.plain_kind == "weight" for site in sites)
    since = view.frame.scalars.get(NONFINITE_SINCE, -1.0)
    if since >= 0:
        hint = "" if since == view.frame.step else ': on_nonfinite("replay") names the module it begins in'
        return f". Gradients have not been finite since step {int(since)}{hint}", {"since": int(since)}
    if not weights:
        return ". It is the first place it is seen in this step", {}
    before = view.frames[-2].step if len(view.frames) > 1 else -1
    where = f"after step {before}" if before >= 0 else "before the first step that was logged"
    return f". {weights} weights were not finite before this step: it began {where}", {"sick_weights": weights}


def _sick_losses(view: RunView) -> Iterator[RuleHit]:
    for tag, loss in losses(view.frame):
        if not np.isfinite(loss) and not view.was_skipped:
            yield RuleHit(
                None, f"{tag} is {loss}, but everything inside the model is finite",
                "a look at the loss function: a logarithm or root of zero, a division by an empty mask", "error",
                {"loss": loss},
            )  # fmt: skip


def losses(frame: Frame) -> list[tuple[str, float]]:
    """What the user logged under a name with loss in it."""
    return [(tag, v) for tag, v in frame.scalars.items() if tag.startswith("train/") and "loss" in tag.lower()]


@rule
def loss_spike(view: RunView, *, factor: float = 5.0, reach: float = 2.0, least_frames: int = 5) -> Iterator[RuleHit]:
    """The loss is far above anything it was before: a corrupt batch, a wrong label file, a step too far.

    Speaks when a logged `train/...loss...` exceeds the largest value so far by `factor` times the spread (between
    the quartiles) of the last ten, and is `reach` times as far from their median as the largest so far was, after
    `least_frames` frames. The largest so far includes the untrained model's, so an unlucky batch late in training,
    which may well be many times the usual, stays below.
    Try to look at the batch of that step, clip gradients, or go back to an earlier checkpoint.
    """
    for tag, loss in losses(view.frame):
        past = np.array([f.scalars[tag] for f in view.frames[:-1] if np.isfinite(f.scalars.get(tag, np.nan))])
        if len(past) < least_frames or not np.isfinite(loss):
            continue
        low, usual, high = np.percentile(past[-10:], (25, 50, 75))
        allowed = max(past.max() + factor * (high - low), usual + reach * (past.max() - usual))
        if loss > allowed:
            yield RuleHit(
                None, f"{tag} is {loss:.4g}; it was {usual:.4g} of late and never more than {past.max():.4g}",
                "a look at the batch of this step, gradient clipping, or an earlier checkpoint",
                evidence={"loss": loss, "usual": float(usual), "largest": float(past.max()),
                          "excess": float((loss - usual) / max(allowed - usual, 1e-30))},
            )  # fmt: skip


@rule
def low_precision(
    view: RunView, *, share: float = 0.5, formats: tuple[str, ...] = ("float16", "bfloat16", "float8_e5m2")
) -> Iterator[RuleHit]:
    """Numbers that a narrower format would flush to zero or push to infinity.

    Information, for whoever thinks of training in that format: speaks when `share` of the nonzero values of a
    tensor would become zero, or any would be infinite. float8 is judged with each tensor scaled to its range, as it
    is always used. A warning if a tensor already is in float16 and gets near the end of its range or has most values
    in the subnormal end: half of the numbers there have lost their precision.
    Try bfloat16, a GradScaler, or leaving the module out of autocast.
    """
    for kind in ("activation", "gradient", "weight", "weight_gradient"):
        if view.sites(kind) and view.frame.buckets.shape[1]:
            sizes = _Sizes(view, kind)
            yield from _already_lost(view, sizes, share)
            for name in formats:
                yield from _would_be_lost(sizes, name, share)


class _Sizes:
    """How large the values of one kind's sites are."""

    def __init__(self, view: RunView, kind: str) -> None:
        self.kind, self.sites = kind, view.sites(kind)
        rows, counts = view.now(kind).values[0], view.buckets(kind)
        self.peak = np.nan_to_num(view.now(kind).unmasked("abs_max")[0], nan=0.0)
        sizes = counts[:, MIDDLE:].copy()
        sizes[:, 1:] += counts[:, MIDDLE - 1 :: -1]
        sizes[:, 0] -= rows[:, ZEROS].astype(np.int64)
        # The gradient of a bias before a normalisation or of a key's is rounding errors, whatever the format.
        sizes[[is_bias(site) for site in self.sites]] = 0
        self._below = np.cumsum(sizes, axis=1)

    def share_below(self, limit: Floats) -> Floats:
        """Share of the nonzero values that are smaller than a limit of each site, to the bucket."""
        buckets = np.searchsorted(UPPER[MIDDLE:], limit, side="right") - 1
        below = self._below[np.arange(len(limit)), np.maximum(buckets, 0)]
        return np.where(buckets >= 0, below / np.maximum(self._below[:, -1], 1), 0.0)


def _would_be_lost(sizes: _Sizes, name: str, share: float) -> Iterator[RuleHit]:
    smallest, largest = FORMATS[name]
    scaled, peak = name.startswith("float8"), sizes.peak
    flushed = sizes.share_below(peak / largest * smallest if scaled else np.full(len(peak), smallest))
    over = (peak >= largest) & (not scaled)
    flagged = np.flatnonzero((flushed >= share) | over)
    if len(flagged):
        i = flagged[0]
        what = f"values up to {peak[i]:.3g}" if over[i] else f"{flushed[i]:.0%} of the values"
        happens = "would be infinite" if over[i] else "would become zero"
        yield RuleHit(
            sizes.sites[i],
            f"{what} in the {sizes.kind} of {sizes.sites[i].name} {happens} in {name}"
            + (", scaled to its range" if scaled else ""),
            "bfloat16, a GradScaler, or leaving this module out of autocast, should you train in that format",
            "info",
            {"format": name, "abs_max": float(peak[i]), "flushed": float(flushed[i])},
            others=len(flagged) - 1,
        )


_LEAST_NORMAL, _NEAR_THE_END = 2.0**-14, 2.0**14


def _already_lost(view: RunView, sizes: _Sizes, share: float) -> Iterator[RuleHit]:
    kind = sizes.kind
    scale = view.frame.scalars.get(SCALE, 1.0) if kind == "gradient" else 1.0
    peak = sizes.peak * scale
    faint = sizes.share_below(np.full(len(peak), _LEAST_NORMAL / scale))
    lost = np.flatnonzero((faint >= share) | (peak >= _NEAR_THE_END))
    in_float16 = _in_float16(view, kind) if len(lost) else set()
    flagged = [i for i in lost if sizes.sites[i].name in in_float16]
    if flagged:
        i = flagged[0]
        what = f"up to {peak[i]:.3g} of at most 65504" if peak[i] >= _NEAR_THE_END else f"{faint[i]:.0%} subnormal"
        yield RuleHit(
            sizes.sites[i],
            f"the {kind} of {sizes.sites[i].name} is float16 and its values are {what}",
            "bfloat16, a GradScaler, or keeping this module in float32",
            evidence={"format": "float16", "abs_max": float(peak[i]), "subnormal": float(faint[i])},
            others=len(flagged) - 1,
        )


def _in_float16(view: RunView, kind: str) -> set[str]:
    """Names of the sites that are in float16: a gradient has the format of what it is the gradient of.

    Read off the extremes of outputs or weights, which have eleven bits; in a model without float16 hardly any does.
    """
    source = {"gradient": "activation", "weight_gradient": "weight"}.get(kind, kind)
    extremes = view.now(source).values[0][:, [MIN, MAX]]
    bits = np.frexp(np.nan_to_num(extremes, nan=0.0, posinf=0.0, neginf=0.0))[0]
    half = (np.ldexp(bits, 11) % 1 == 0).all(axis=1) & ~(np.ldexp(bits, 8) % 1 == 0).all(axis=1)
    if np.count_nonzero(half) < max(0.25 * len(half), 1):
        return set()
    return {site.name for site, fits in zip(view.sites(source), half, strict=True) if fits}
