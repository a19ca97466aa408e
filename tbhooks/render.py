"""Frames as text a person reads. Numbers in, strings out; nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tbhooks.frame import Frame
from tbhooks.stats import LOWER, UPPER, Counts, Floats

# One column for each number people ask for first: heading, kind, stat.
_MODULE_COLUMNS = (
    ("act mean", "activation", "mean"),
    ("act std", "activation", "std"),
    ("zeros", "activation", "zero_fraction"),
    ("grad norm", "gradient", "norm"),
)
_PARAMETER_COLUMNS = (
    ("weight norm", "weight", "norm"),
    ("grad norm", "weight_gradient", "norm"),
    ("update/weight", "update", "ratio"),
)


def table(frame: Frame) -> str:
    """Modules in execution order, then parameters, each with the few numbers that tell most."""
    modules = _names(frame, ("activation", "gradient"))
    parameters = _names(frame, ("weight", "weight_gradient", "update"))
    parts = [f"step {frame.step}"]
    if modules:
        parts.append(_block("module", modules, _MODULE_COLUMNS, frame))
    if parameters:
        parts.append(_block("parameter", parameters, _PARAMETER_COLUMNS, frame))
    return "\n\n".join(parts)


def _names(frame: Frame, kinds: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(site.name for kind in kinds for site in frame.sites if site.kind == kind))


def _block(heading: str, names: list[str], columns: Sequence[tuple[str, str, str]], frame: Frame) -> str:
    lines = [[heading, *(title for title, _, _ in columns), "distribution"]]
    for name in names:
        cells = [_cell(frame, name, kind, stat) for _, kind, stat in columns]
        lines.append([name, *cells, sparkline(frame, name, columns[0][1])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def _cell(frame: Frame, name: str, kind: str, stat: str) -> str:
    if (name, kind) not in frame:
        return "-"
    reading = frame[name, kind]
    value = float(getattr(reading, stat))
    bad = int(reading.nan_count + reading.inf_count)
    mark = f" ({bad} NaN/Inf)" if bad else ""
    if stat == "zero_fraction":
        return f"{value:.0%}{mark}"
    return f"{value:.3g}{mark}"


_BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(frame: Frame, name: str, kind: str, width: int = 24) -> str:
    """The distribution between the exact minimum and maximum, as a row of small bars."""
    if (name, kind) not in frame or not frame.buckets.shape[1]:
        return ""
    reading = frame[name, kind]
    low, high = reading.min, reading.max
    if not np.isfinite(low) or low == high:
        return "" if not np.isfinite(low) else f"all {low:.3g}"
    heights = _rebinned(reading.counts, low, high, width)
    top = heights.max()
    bars = (_BLOCKS[0 if h == 0 else 1 + round(h / top * (len(_BLOCKS) - 2))] for h in heights)
    return f"{low:.2g} {''.join(bars)} {high:.2g}"


def _rebinned(counts: Counts, low: float, high: float, width: int) -> Floats:
    """Bucket counts spread evenly over equal bins."""
    bins = np.linspace(low, high, width + 1)
    left, right = np.clip(LOWER, low, high), np.clip(UPPER, low, high)
    heights = np.zeros(width)
    for bucket in np.flatnonzero(counts):
        span = max(right[bucket] - left[bucket], np.finfo(float).tiny)
        overlap = np.clip(np.minimum(right[bucket], bins[1:]) - np.maximum(left[bucket], bins[:-1]), 0, None)
        share = overlap / span
        if share.sum() == 0:  # a bucket that is one point
            share[min(int((left[bucket] - low) / (high - low) * width), width - 1)] = 1.0
        heights += counts[bucket] * share
    return heights
