"""Histograms as small SVGs for the cells of a table, on a linear axis between the exact minimum and maximum."""

from __future__ import annotations

import math

import numpy as np

from tbhooks.data.frame import Reading
from tbhooks.data.stats import Counts, Floats
from tbhooks.drawing.text import cumulated, number, rebinned

BARS, BAR, HEIGHT = 16, 5, 15


def draw(counts: Counts, low: float, high: float) -> str:
    """The histogram of one tensor; as text if all values are equal, empty if there are none."""
    if not counts.any():
        return ""
    if low == high:
        return f"all {number(low)}"
    return _svg(f"{number(low)} to {number(high)}, linear", f'<path d="{_bars(rebinned(counts, low, high, BARS))}z"/>')


def draw_both(first: Reading, second: Reading) -> str:
    """Two histograms on one axis: the first filled, the second as a line."""
    if not (first.counts.any() and second.counts.any()):
        return ""
    low, high = min(first.min, second.min), max(first.max, second.max)
    if low == high:
        return f"all {number(low)}"
    edges = np.linspace(low, high, BARS + 1)
    edges[-1] = math.inf  # counts a constant at the upper end, too
    one, two = (
        _bars(np.diff(cumulated(reading.counts, reading.min, reading.max, edges))) for reading in (first, second)
    )
    title = f"first filled, second a line; {number(low)} to {number(high)}, linear"
    return _svg(title, f'<path d="{one}z"/><path class="o" d="{two}"/>')


def _svg(title: str, content: str) -> str:
    return f'<svg width="{BARS * BAR}" height="{HEIGHT}"><title>{title}</title>{content}</svg>'


def _bars(heights: Floats) -> str:
    """The outline of the bars as an SVG path. A bar that is not empty is at least one pixel high."""
    tops = [HEIGHT - math.ceil(share * HEIGHT) for share in heights / heights.max()]
    parts, start = [f"M0 {HEIGHT}"], 0
    for i in range(1, len(tops) + 1):
        if i == len(tops) or tops[i] != tops[start]:
            parts.append(f"V{tops[start]}h{(i - start) * BAR}")
            start = i
    return "".join(parts) + f"V{HEIGHT}"
