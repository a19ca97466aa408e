"""Distributions of many layers below each other, from the bucket counts of one frame.

The axis is straight where all layers are of a size, else half an octave a step with zero in the middle; its label
says which. Nothing is smoothed; lines go from bin to bin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.frame import Frame
from tbhooks.data.stats import INFS, LOWER, MAX, MIDDLE, MIN, NANS, ZEROS, Counts, Floats
from tbhooks.drawing.text import cumulated, names_of
from tbhooks.views.figures import mpl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS, OVERLAP = 160, 1.7
# Layers whose sizes differ by more than this share no straight axis.
ONE_SIZE = 30.0
HALF_OCTAVES_SHOWN = 28
_HOW = "zeros left out, each as high as its own peak"
# Powers of sixteen; on a narrow figure, every second of them.
TICK_EVERY, NARROW = 8, 5.0


def ridgeline(frame: Frame, kind: str = "activation", width: float = 7.0) -> Figure:
    """All places of one kind in execution order; zeros and what is not finite are told beside each."""
    plain = frame.without_phase() if frame.is_evaluation else frame
    kinds = dict.fromkeys(site.kind for site in plain.sites)
    if kind not in kinds:
        raise ArgumentError(f"this frame has no kind {kind!r}: {nearest(str(kind), kinds)}")
    if not plain.buckets.shape[1]:
        raise ArgumentError("ridgeline() needs histograms, and this step has none: watch(..., histograms=...)")
    names = [name for name in names_of(plain, ("activation", kind)) if (name, kind) in plain]
    rows = np.array([plain._index[name, kind] for name in names])
    values, counts = plain.values[rows], plain.buckets[rows].copy()
    counts[:, MIDDLE] -= np.minimum(values[:, ZEROS].astype(np.int64), counts[:, MIDDLE])
    figure = mpl.picture(width, float(np.clip(1.1 + 0.24 * len(names), 1.8, mpl.TALLEST)))
    axis = figure.subplots()
    room = figure.get_figheight() - 0.9
    reach = np.array([np.abs(plain.stat(stat)[rows]) for stat in ("p01", "p99")]).max(axis=0)
    heights, x = _heights(axis, values, counts, reach, width)
    _draw(axis, heights, x)
    mpl.names_along(axis.yaxis, names, room)
    _beside(axis, values, mpl.every(names, room))
    axis.set_ylim(len(names) - 0.5, -OVERLAP - 0.1)
    axis.spines[["left", "top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=mpl.TINY)
    return figure


def _heights(axis: Axes, values: Floats, counts: Counts, reach: Floats, width: float) -> tuple[Floats, Floats]:
    known = reach[np.isfinite(reach) & (reach > 0)]
    if len(known) and known.max() / known.min() > ONE_SIZE:
        return _signed_log(axis, counts, width)
    return _straight(axis, values, counts, float(known.max()) if len(known) else 1.0)


def _straight(axis: Axes, values: Floats, counts: Counts, reach: float) -> tuple[Floats, Floats]:
    """One axis that holds 98 % of the widest, and no room for what nobody has."""
    low = max(float(values[:, MIN].min()), -reach)
    high = min(float(values[:, MAX].max()), reach)
    room = 0.03 * (high - low) or 0.5
    edges = np.linspace(low - room, high + room, BINS + 1)
    heights = [np.diff(cumulated(c, v[MIN], v[MAX], edges)) for c, v in zip(counts, values, strict=True)]
    axis.set_xlabel(f"value\n({_HOW})", fontsize=mpl.TINY)
    return np.array(heights), (edges[1:] + edges[:-1]) / 2


def _signed_log(axis: Axes, counts: Counts, width: float) -> tuple[Floats, Floats]:
    """Half an octave a step; what is nearest to zero is one of them."""
    used = np.flatnonzero(counts.any(axis=0)) - MIDDLE
    near = max(int(np.abs(used).max()) - HALF_OCTAVES_SHOWN, 0)
    left, right = max(-int(used.min()), near), max(int(used.max()), near)
    columns = [MIDDLE + i for i in (*range(-left, -near), 0, *range(near + 1, right + 1))]
    heights = counts[:, columns].astype(np.float64)
    heights[:, columns.index(MIDDLE)] = counts[:, MIDDLE - near : MIDDLE + near + 1].sum(axis=1)
    every, apart = (TICK_EVERY, 0.05) if width > NARROW else (2 * TICK_EVERY, 0.2)
    ticks = [i for i, column in enumerate(columns) if column == MIDDLE or abs(column - MIDDLE) % every == 1]
    shown = [i for i in ticks if columns[i] == MIDDLE or abs(i - columns.index(MIDDLE)) > len(columns) * apart]
    axis.set_xticks(shown, [_tick(columns[i]) for i in shown])
    axis.set_xlabel(f"value, half an octave a step\n({_HOW})", fontsize=mpl.TINY)
    return np.pad(heights, ((0, 0), (1, 1))), np.arange(-1.0, len(columns) + 1)


def _tick(bucket: int) -> str:
    """A bucket by its end nearer to zero; there are as many below zero as above."""
    if bucket == MIDDLE:
        return "0"
    size = LOWER[MIDDLE + abs(bucket - MIDDLE)]
    return f"{'-' if bucket < MIDDLE else ''}{size:.2g}"


def _draw(axis: Axes, heights: Floats, x: Floats) -> None:
    palette = mpl.canvas().colours()
    depth = np.linspace(0.05, 0.85, max(len(heights), 2))
    for i, height in enumerate(heights):
        axis.axhline(i, color="#999999", linewidth=0.3, zorder=i + 2)
        if height.max() > 0:
            line = i - OVERLAP * height / height.max()
            axis.fill_between(x, line, i, color=palette(depth[i]), alpha=0.8, linewidth=0, zorder=i + 2)
            edge = np.where(height > 0.01 * height.max(), line, np.nan)
            axis.plot(x, edge, color="white", linewidth=0.6, zorder=i + 2)


def _beside(axis: Axes, values: Floats, every: int) -> None:
    """What the ridge leaves out: a share of zeros, and in red what is not finite."""
    beside = axis.get_yaxis_transform()
    for i, row in enumerate(values):
        bad = int(row[NANS] + row[INFS])
        zeros = row[ZEROS] / max(row[0], 1.0)
        if bad or (zeros >= 0.005 and i % every == 0):
            told, colour = (f"{bad:,} NaN/Inf", mpl.canvas().WRONG) if bad else (f"{zeros:.0%} zeros", "#666666")
            axis.text(1.01, i, told, color=colour, fontsize=mpl.TINY, va="center", transform=beside)
