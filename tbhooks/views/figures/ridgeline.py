"""Ridgeline plots: the histograms of many layers below each other, from the bucket counts of one frame.

The axis is linear if all layers are of similar scale; otherwise it is logarithmic on both sides of zero, half an octave
per bin. Its label says which. Nothing is smoothed.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tbhooks.data.errors import ArgumentError, nearest
from tbhooks.data.frame import Frame
from tbhooks.data.stats import INFS, MAX, MIDDLE, MIN, NANS, ZEROS, Counts, Floats
from tbhooks.drawing.text import bucket_label, cumulated, names_of
from tbhooks.views.figures import mpl

BINS, OVERLAP = 160, 1.7
# Layers whose scales differ by a larger factor than this get a logarithmic axis.
LINEAR_UP_TO = 30.0
HALF_OCTAVES_SHOWN = 28
_NOTE = "without zeros, each scaled to its own peak"
# Powers of sixteen; on a narrow figure, every second of them.
TICK_EVERY, NARROW = 8, 5.0


def ridgeline(frame: Frame, kind: str = "activation", width: float = 7.0) -> Figure:
    """The histograms of one kind in execution order; the fraction of zeros and the count of NaN/Inf stand beside each.

    Raises ArgumentError if the frame does not have the kind, or has no histograms.
    """
    plain = frame.without_phase() if frame.is_evaluation else frame
    kinds = dict.fromkeys(site.kind for site in plain.sites)
    if kind not in kinds:
        raise ArgumentError(f"this logged step has no kind {kind!r}: {nearest(str(kind), kinds)}")
    if not plain.buckets.shape[1]:
        raise ArgumentError("ridgeline() needs histograms; this step has none: watch(..., histograms=...)")
    names = [name for name in names_of(plain, ("activation", kind)) if (name, kind) in plain]
    row_of = {site.name: i for i, site in enumerate(plain.sites) if site.kind == kind}
    rows = np.array([row_of[name] for name in names])
    values, counts = plain.values[rows], plain.buckets[rows].copy()
    counts[:, MIDDLE] -= np.minimum(values[:, ZEROS].astype(np.int64), counts[:, MIDDLE])
    figure = mpl.new_figure(width, float(np.clip(1.1 + 0.24 * len(names), 1.8, mpl.TALLEST)))
    axis = figure.subplots()
    room = figure.get_figheight() - 0.9
    reach = np.array([np.abs(plain.stat(stat)[rows]) for stat in ("p01", "p99")]).max(axis=0)
    heights, x = _heights(axis, values, counts, reach, width)
    _draw(axis, heights, x)
    mpl.set_names(axis.yaxis, names, room)
    _annotate(axis, values, mpl.label_stride(names, room))
    axis.set_ylim(len(names) - 0.5, -OVERLAP - 0.1)
    axis.spines[["left", "top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=mpl.TINY)
    return figure


def _heights(axis: Axes, values: Floats, counts: Counts, reach: Floats, width: float) -> tuple[Floats, Floats]:
    known = reach[np.isfinite(reach) & (reach > 0)]
    if len(known) and known.max() / known.min() > LINEAR_UP_TO:
        return _signed_log(axis, counts, width)
    return _linear(axis, values, counts, float(known.max()) if len(known) else 1.0)


def _linear(axis: Axes, values: Floats, counts: Counts, reach: float) -> tuple[Floats, Floats]:
    """An axis that holds 98 % of the widest layer, and no more than the range of the values."""
    low = max(float(values[:, MIN].min()), -reach)
    high = min(float(values[:, MAX].max()), reach)
    room = 0.03 * (high - low) or 0.5
    edges = np.linspace(low - room, high + room, BINS + 1)
    heights = [np.diff(cumulated(c, v[MIN], v[MAX], edges)) for c, v in zip(counts, values, strict=True)]
    axis.set_xlabel(f"value\n({_NOTE})", fontsize=mpl.TINY)
    return np.array(heights), (edges[1:] + edges[:-1]) / 2


def _signed_log(axis: Axes, counts: Counts, width: float) -> tuple[Floats, Floats]:
    """An axis with half an octave per bin; all values near zero share one bin."""
    used = np.flatnonzero(counts.any(axis=0)) - MIDDLE
    near = max(int(np.abs(used).max()) - HALF_OCTAVES_SHOWN, 0)
    left, right = max(-int(used.min()), near), max(int(used.max()), near)
    columns = [MIDDLE + i for i in (*range(-left, -near), 0, *range(near + 1, right + 1))]
    heights = counts[:, columns].astype(np.float64)
    heights[:, columns.index(MIDDLE)] = counts[:, MIDDLE - near : MIDDLE + near + 1].sum(axis=1)
    every, apart = (TICK_EVERY, 0.05) if width > NARROW else (2 * TICK_EVERY, 0.2)
    ticks = [i for i, column in enumerate(columns) if column == MIDDLE or abs(column - MIDDLE) % every == 1]
    shown = [i for i in ticks if columns[i] == MIDDLE or abs(i - columns.index(MIDDLE)) > len(columns) * apart]
    axis.set_xticks(shown, [bucket_label(columns[i]) for i in shown])
    axis.set_xlabel(f"value, half an octave per bin\n({_NOTE})", fontsize=mpl.TINY)
    return np.pad(heights, ((0, 0), (1, 1))), np.arange(-1.0, len(columns) + 1)


def _draw(axis: Axes, heights: Floats, x: Floats) -> None:
    depth = np.linspace(0.05, 0.85, max(len(heights), 2))
    for i, height in enumerate(heights):
        axis.axhline(i, color="#999999", linewidth=0.3, zorder=i + 2)
        if height.max() > 0:
            line = i - OVERLAP * height / height.max()
            axis.fill_between(x, line, i, color=mpl.COLOURS(depth[i]), alpha=0.8, linewidth=0, zorder=i + 2)
            edge = np.where(height > 0.01 * height.max(), line, np.nan)
            axis.plot(x, edge, color="white", linewidth=0.6, zorder=i + 2)


def _annotate(axis: Axes, values: Floats, every: int) -> None:
    """What the ridges leave out: the fraction of zeros, and in red the count of NaN and Inf."""
    beside = axis.get_yaxis_transform()
    for i, row in enumerate(values):
        nonfinite = int(row[NANS] + row[INFS])
        zeros = row[ZEROS] / max(row[0], 1.0)
        if nonfinite or (zeros >= 0.005 and i % every == 0):
            text, colour = (f"{nonfinite:,} NaN/Inf", mpl.RED) if nonfinite else (f"{zeros:.0%} zeros", "#666666")
            axis.text(1.01, i, text, color=colour, fontsize=mpl.TINY, va="center", transform=beside)
