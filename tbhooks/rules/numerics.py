"""Issues of the values themselves: NaN and infinity, and the range of a dtype."""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from tbhooks.data.frame import NONFINITE_SINCE, SCALE, Frame, Severity, Site
from tbhooks.data.stats import COUNT, FORMATS, INFS, MAX, MIDDLE, MIN, NANS, UPPER, ZEROS, Floats
from tbhooks.rules.losses import losses
from tbhooks.rules.rule import RuleHit, describe, rule, rule_of_every_frame
from tbhooks.rules.run_view import RunView, Series, is_bias

_GRADIENTS = ("gradient", "weight_gradient", "normalized_gradient")
IN_USE = "in use"
_ELSEWHERE, _NOT_NOW, _BY_QUANTIZERS = "in use elsewhere in this model", "not in use now", "in use by its quantizers"
_REMEDY = "Before training in that format, consider bfloat16, a GradScaler, or excluding this module from autocast"
_REMEDY_QUANTIZED = "Consider one scale per channel or group, or excluding this module from quantization"
ASKED_FORMATS = (IN_USE, "float16", "bfloat16", "float8_e5m2")
"""The formats that `rules=["low_precision"]` asks about."""
_ALL_FORMATS = {**FORMATS, "int8": (0.5, 127.0)}
"""Half of the smallest positive value, and the largest one; between them a value is rounded to a value above zero."""
_FORWARD, _BACKWARD = ("activation", "weight"), ("gradient", "weight_gradient")
_QUANTIZED = {"int8": _FORWARD, "float8_e4m3fn": _FORWARD, "float8_e5m2": _BACKWARD}
"""The kinds of tensors that quantizers cast to a format."""


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
    return f". {weights} weights were not finite before this step: it started {where}", {"affected_weights": weights}


def _nonfinite_losses(view: RunView) -> Iterator[RuleHit]:
    for tag, loss in losses(view.frame):
        if not np.isfinite(loss) and not view.was_skipped:
            yield RuleHit(
                None, f"{tag} is {loss}, but all tensors of the model are finite",
                "Check the loss function for a logarithm or root of zero, or a division by an empty mask", "error",
                {"loss": loss},
            )  # fmt: skip


@rule
def low_precision(view: RunView, *, share: float = 0.5, formats: tuple[str, ...] = (IN_USE,)) -> Iterator[RuleHit]:
    """Values that underflow or overflow in a narrower dtype which is in use, as with autocast or a quantizer.

    Reported with severity info when `share` of the nonzero values of a tensor would underflow, or any would overflow,
    in one of `formats`. "in use" stands for float16 and bfloat16 where a quarter of the outputs or weights have such
    values, for float16 with a GradScaler, and for int8 and float8 where the model has quantizers of torch.ao, torchao
    or bitsandbytes. `rules=["default", "low_precision"]` asks about float16, bfloat16 and float8_e5m2 whether or not
    they are in use. For int8 and float8 each tensor is scaled to the range of the dtype. A warning if a tensor already
    is in float16 and gets near the end of its range, or most of its values are subnormal and have lost precision.
    Try bfloat16, a GradScaler, or excluding the module from autocast.
    """
    if not view.frame.buckets.shape[1]:
        return
    in_use = _formats_in_use(view) if IN_USE in formats else []
    asked = [name for name in formats if name != IN_USE]
    for kind in ("activation", "gradient", "weight", "weight_gradient"):
        quantized = [name for name in view.formats if IN_USE in formats and kind in _QUANTIZED.get(name, ())]
        uses = dict.fromkeys(asked, _NOT_NOW) | dict.fromkeys(in_use, _ELSEWHERE)
        uses |= dict.fromkeys(quantized, _BY_QUANTIZERS)
        in_float16 = _in_format(view, kind, _SIGNIFICANT_BITS["float16"])
        if view.sites(kind) and (in_float16 or uses):
            sizes = _Sizes(view, kind)
            yield from _loss_in_float16(view, sizes, share, in_float16)
            for name, use in uses.items():
                yield from _loss_in(sizes, name, share, use)


def _formats_in_use(view: RunView) -> list[str]:
    """The narrow dtypes of the model: those of a quarter of its outputs or weights; float16 with a GradScaler."""
    found = ["float16"] if SCALE in view.frame.scalars else []
    for name, bits in _SIGNIFICANT_BITS.items():
        if any(_in_format(view, kind, bits) for kind in ("activation", "weight")):
            found.append(name)
    return list(dict.fromkeys(found))


class _Sizes:
    """The distribution of magnitudes at the sites of one kind."""

    def __init__(self, view: RunView, kind: str) -> None:
        self.kind, self.sites = kind, view.sites(kind)
        rows, counts = view.now(kind).values[0], view.buckets(kind)
        self.peak = np.nan_to_num(view.now(kind).unmasked("abs_max")[0], nan=0.0)
        sizes = counts[:, MIDDLE:].astype(np.int64)
        sizes[:, 1:] += counts[:, MIDDLE - 1 :: -1]
        sizes[:, 0] -= rows[:, ZEROS].astype(np.int64)
        # The gradients of biases before a normalisation and of key biases are rounding errors in every dtype.
        sizes[is_bias(self.sites)] = 0
        self._below = np.cumsum(sizes, axis=1)

    def share_below(self, limit: Floats) -> Floats:
        """The share of each site's nonzero values below its limit, with the resolution of the buckets."""
        buckets = np.searchsorted(UPPER[MIDDLE:], limit, side="right") - 1
        below = self._below[np.arange(len(limit)), np.maximum(buckets, 0)]
        return np.where(buckets >= 0, below / np.maximum(self._below[:, -1], 1), 0.0)


def _loss_in(sizes: _Sizes, name: str, share: float, use: str) -> Iterator[RuleHit]:
    """What would be lost if the tensors were in another dtype."""
    smallest, largest = _ALL_FORMATS[name]
    scaled, peak = name.startswith(("float8", "int")), sizes.peak
    flushed = sizes.share_below(peak / largest * smallest if scaled else np.full(len(peak), smallest))
    over = (peak >= largest) & (not scaled)
    flagged = np.flatnonzero((flushed >= share) | over)
    if len(flagged):
        i = flagged[0]
        values = f"Values up to {peak[i]:.3g}" if over[i] else f"{flushed[i]:.0%} of the values"
        yield RuleHit(
            sizes.sites[i],
            f"{values} of {describe(sizes.sites[i])} would {'overflow' if over[i] else 'underflow'} in {name} "
            f"({use}{', scaled to its range' if scaled else ''})",
            _REMEDY_QUANTIZED if use == _BY_QUANTIZERS else _REMEDY,
            "info",
            {"format": name, "abs_max": float(peak[i]), "flushed": float(flushed[i])},
            others=len(flagged) - 1,
        )


_MIN_NORMAL, _NEAR_MAXIMUM = 2.0**-14, 2.0**14


def _loss_in_float16(view: RunView, sizes: _Sizes, share: float, in_float16: Set[str]) -> Iterator[RuleHit]:
    """What is lost now, in tensors that are in float16."""
    scale = view.frame.scalars.get(SCALE, 1.0) if sizes.kind == "gradient" else 1.0
    peak = sizes.peak * scale
    subnormal = sizes.share_below(np.full(len(peak), _MIN_NORMAL / scale))
    lost = np.flatnonzero((subnormal >= share) | (peak >= _NEAR_MAXIMUM))
    flagged = [i for i in lost if sizes.sites.names[i] in in_float16]
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


# How many bits a value has, and how many the next narrower dtype has: fewer bits say nothing.
_SIGNIFICANT_BITS = {"float16": (11, 8), "bfloat16": (8, 4)}


def _in_format(view: RunView, kind: str, bits: tuple[int, int]) -> frozenset[str]:
    """Names of the sites with so many significant bits; a gradient has the dtype of its output or weight.

    Recognised by the minimum and maximum: those of float32 tensors hardly ever have so few bits. Empty if these are
    less than a quarter of all sites.
    """
    source = {"gradient": "activation", "weight_gradient": "weight"}.get(kind, kind)
    return view.now(source).derived(_with_bits, bits)


def _with_bits(series: Series, bits: tuple[int, int]) -> frozenset[str]:
    most, fewest = bits
    extremes = series.values[0][:, [MIN, MAX]]
    mantissas = np.frexp(np.nan_to_num(extremes, nan=0.0, posinf=0.0, neginf=0.0))[0]
    fits = (np.ldexp(mantissas, most) % 1 == 0).all(axis=1) & ~(np.ldexp(mantissas, fewest) % 1 == 0).all(axis=1)
    if np.count_nonzero(fits) < max(0.25 * len(fits), 1):
        return frozenset()
    return frozenset(series.sites.names[i] for i in np.flatnonzero(fits))
