"""Issues of the values themselves: NaN and infinity, the range of a dtype, spikes of the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import NONFINITE_SINCE, SCALE, Frame, Severity, Site
from tbhooks.data.stats import COUNT, FORMATS, INFS, MAX, MIDDLE, MIN, NANS, UPPER, ZEROS, Floats
from tbhooks.rules.rule import RuleHit, describe, rule, rule_of_every_frame
from tbhooks.rules.run_view import RunView, is_bias

_GRADIENTS = ("gradient", "weight_gradient")


@rule_of_every_frame
def non_finite(view: RunView) -> Iterator[RuleHit]:
    """NaN or infinity in an activation, gradient, weight or update; names the first one in execution order.

    Reported at once, in evaluation passes too. Infinite gradients of a step that the GradScaler skipped are ignored.
    Infinity without NaN, where the gradient of the same output is finite, is reported with severity info: masks look
    like that. If weights are not finite, the cause lies in an earlier step that was not logged, and the message says
    so.
    Try a lower learning rate, gradient clipping, an epsilon in divisions, roots and logarithms; inspect the data.
    """
    frame = view.frame
    flagged = np.flatnonzero(frame.values[:, NANS] + frame.values[:, INFS] > 0)
    sites = [(int(i), frame.sites[i]) for i in flagged if _is_reported(frame.sites[i], view.was_skipped)]
    if not sites:
        yield from _nonfinite_losses(view)
        return
    i, site = sites[0]
    count, nans, infs = (int(frame.values[i, column]) for column in (COUNT, NANS, INFS))
    amounts = " and ".join(f"{word} in {n:,}" for n, word in ((nans, "NaN"), (infs, "infinity")) if n)
    origin, evidence = _origin(view, [site for _, site in sites])
    yield RuleHit(
        site,
        f"{amounts[0].upper()}{amounts[1:]} of {count:,} values of {describe(site)}",
        "Reduce the learning rate, clip gradients, or inspect its inputs" + origin,
        _severity(frame, sites),
        {"nan_count": nans, "inf_count": infs, "count": count, **evidence},
        others=len(sites) - 1,
    )


def _is_reported(site: Site, skipped: bool) -> bool:
    # The GradScaler handles a loss scale that was too large. In attention, masks are minus infinity, and fully masked
    # positions have no distribution.
    return not (skipped and site.kind in _GRADIENTS) and site.attention_stat is None


def _severity(frame: Frame, sites: list[tuple[int, Site]]) -> Severity:
    """Info for masks, which are infinite on purpose: there is no NaN, and the gradients are finite."""
    masked = not any(frame.values[i, NANS] for i, _ in sites) and all(
        (site.name, "gradient") in frame and frame[site.name, "gradient"].inf_count == 0
        for _, site in sites
        if site.kind != "functional"
    )
    return "info" if masked and all(np.isfinite(loss) for _, loss in losses(frame)) else "error"


def _origin(view: RunView, sites: list[Site]) -> tuple[str, dict[str, int]]:
    """A sentence about where it may have started, and evidence for it."""
    weights = sum(site.plain_kind == "weight" for site in sites)
    since = view.frame.scalars.get(NONFINITE_SINCE, -1.0)
    if since >= 0:
        hint = "" if since == view.frame.step else ': enable w.on_nonfinite("replay") to locate the source module'
        return f". Gradients have not been finite since step {int(since)}{hint}", {"since": int(since)}
    if not weights:
        return ". It is the first tensor affected in this step", {}
    before = view.frames[-2].step if len(view.frames) > 1 else -1
    where = f"after step {before}" if before >= 0 else "before the first logged step"
    return f". {weights} weights were not finite before this step: it started {where}", {"sick_weights": weights}


def _nonfinite_losses(view: RunView) -> Iterator[RuleHit]:
    for tag, loss in losses(view.frame):
        if not np.isfinite(loss) and not view.was_skipped:
            yield RuleHit(
                None, f"{tag} is {loss}, but all tensors of the model are finite",
                "Check the loss function for a logarithm or root of zero, or a division by an empty mask", "error",
                {"loss": loss},
            )  # fmt: skip


def losses(frame: Frame) -> list[tuple[str, float]]:
    """The user's logged scalars with "loss" in their name."""
    return [(tag, v) for tag, v in frame.scalars.items() if tag.startswith("train/") and "loss" in tag.lower()]


@rule
def loss_spike(view: RunView, *, factor: float = 5.0, reach: float = 2.0, least_frames: int = 5) -> Iterator[RuleHit]:
    """The loss is far above all previous values: a corrupt batch, a wrong label file, or a step that was too large.

    Reported when a logged `train/...loss...` exceeds its previous maximum by `factor` times the interquartile range of
    the last ten values, and is `reach` times as far from their median as the maximum, after `least_frames` frames.
    The maximum includes the untrained model's loss, so that an unlucky batch late in training stays below.
    Try to inspect the batch of that step, clip gradients, or go back to an earlier checkpoint.
    """
    for tag, loss in losses(view.frame):
        past = np.array([f.scalars[tag] for f in view.frames[:-1] if np.isfinite(f.scalars.get(tag, np.nan))])
        if len(past) < least_frames or not np.isfinite(loss):
            continue
        low, typical, high = np.percentile(past[-10:], (25, 50, 75))
        limit = max(past.max() + factor * (high - low), typical + reach * (past.max() - typical))
        if loss > limit:
            yield RuleHit(
                None, f"Loss spike: {tag} is {loss:.4g} (recent median {typical:.4g}, previous maximum "
                f"{past.max():.4g})",
                "Inspect the batch of this step, clip gradients, or go back to an earlier checkpoint",
                evidence={"loss": loss, "usual": float(typical), "largest": float(past.max()),
                          "excess": float((loss - typical) / max(limit - typical, 1e-30))},
            )  # fmt: skip


@rule
def low_precision(
    view: RunView, *, share: float = 0.5, formats: tuple[str, ...] = ("float16", "bfloat16", "float8_e5m2")
) -> Iterator[RuleHit]:
    """Values that would underflow or overflow in a narrower dtype.

    Reported with severity info when `share` of the nonzero values of a tensor would underflow, or any would overflow,
    in one of `formats`. For float8 each tensor is scaled to the range of the dtype, as in practice. A warning if a
    tensor already is in float16 and gets near the end of its range, or most of its values are subnormal and have lost
    precision.
    Try bfloat16, a GradScaler, or excluding the module from autocast.
    """
    for kind in ("activation", "gradient", "weight", "weight_gradient"):
        if view.sites(kind) and view.frame.buckets.shape[1]:
            sizes = _Sizes(view, kind)
            yield from _loss_in_float16(view, sizes, share)
            for name in formats:
                yield from _loss_in(sizes, name, share)


class _Sizes:
    """The distribution of magnitudes at the sites of one kind."""

    def __init__(self, view: RunView, kind: str) -> None:
        self.kind, self.sites = kind, view.sites(kind)
        rows, counts = view.now(kind).values[0], view.buckets(kind)
        self.peak = np.nan_to_num(view.now(kind).unmasked("abs_max")[0], nan=0.0)
        sizes = counts[:, MIDDLE:].copy()
        sizes[:, 1:] += counts[:, MIDDLE - 1 :: -1]
        sizes[:, 0] -= rows[:, ZEROS].astype(np.int64)
        # The gradients of biases before a normalisation and of key biases are rounding errors in every dtype.
        sizes[[is_bias(site) for site in self.sites]] = 0
        self._below = np.cumsum(sizes, axis=1)

    def share_below(self, limit: Floats) -> Floats:
        """The share of each site's nonzero values below its limit, with the resolution of the buckets."""
        buckets = np.searchsorted(UPPER[MIDDLE:], limit, side="right") - 1
        below = self._below[np.arange(len(limit)), np.maximum(buckets, 0)]
        return np.where(buckets >= 0, below / np.maximum(self._below[:, -1], 1), 0.0)


def _loss_in(sizes: _Sizes, name: str, share: float) -> Iterator[RuleHit]:
    """What would be lost if the tensors were in another dtype."""
    smallest, largest = FORMATS[name]
    scaled, peak = name.startswith("float8"), sizes.peak
    flushed = sizes.share_below(peak / largest * smallest if scaled else np.full(len(peak), smallest))
    over = (peak >= largest) & (not scaled)
    flagged = np.flatnonzero((flushed >= share) | over)
    if len(flagged):
        i = flagged[0]
        values = f"Values up to {peak[i]:.3g}" if over[i] else f"{flushed[i]:.0%} of the values"
        yield RuleHit(
            sizes.sites[i],
            f"{values} of {describe(sizes.sites[i])} would {'overflow' if over[i] else 'underflow'} in {name} "
            f"(not in use now{', scaled to its range' if scaled else ''})",
            "Before training in that format, consider bfloat16, a GradScaler, or excluding this module from autocast",
            "info",
            {"format": name, "abs_max": float(peak[i]), "flushed": float(flushed[i])},
            others=len(flagged) - 1,
        )


_MIN_NORMAL, _NEAR_MAXIMUM = 2.0**-14, 2.0**14


def _loss_in_float16(view: RunView, sizes: _Sizes, share: float) -> Iterator[RuleHit]:
    """What is lost now, in tensors that are in float16."""
    kind = sizes.kind
    scale = view.frame.scalars.get(SCALE, 1.0) if kind == "gradient" else 1.0
    peak = sizes.peak * scale
    subnormal = sizes.share_below(np.full(len(peak), _MIN_NORMAL / scale))
    lost = np.flatnonzero((subnormal >= share) | (peak >= _NEAR_MAXIMUM))
    in_float16 = _in_float16(view, kind) if len(lost) else set()
    flagged = [i for i in lost if sizes.sites[i].name in in_float16]
    if flagged:
        i = flagged[0]
        what = (
            f"reach {peak[i]:.3g} (maximum 65504)" if peak[i] >= _NEAR_MAXIMUM else f"are {subnormal[i]:.0%} subnormal"
        )
        yield RuleHit(
            sizes.sites[i],
            f"The float16 values of {describe(sizes.sites[i])} {what}",
            "Use bfloat16 or a GradScaler, or keep this module in float32",
            evidence={"format": "float16", "abs_max": float(peak[i]), "subnormal": float(subnormal[i])},
            others=len(flagged) - 1,
        )


def _in_float16(view: RunView, kind: str) -> set[str]:
    """Names of the sites that are in float16; a gradient has the dtype of its output or weight.

    Recognised by the minimum and maximum, which then have eleven significant bits; without float16 hardly any do.
    """
    source = {"gradient": "activation", "weight_gradient": "weight"}.get(kind, kind)
    extremes = view.now(source).values[0][:, [MIN, MAX]]
    bits = np.frexp(np.nan_to_num(extremes, nan=0.0, posinf=0.0, neginf=0.0))[0]
    half = (np.ldexp(bits, 11) % 1 == 0).all(axis=1) & ~(np.ldexp(bits, 8) % 1 == 0).all(axis=1)
    if np.count_nonzero(half) < max(0.25 * len(half), 1):
        return set()
    return {site.name for site, fits in zip(view.sites(source), half, strict=True) if fits}
