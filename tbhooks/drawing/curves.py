"""A scalar over the steps as a small SVG curve, for pages without scripts. Returns strings and opens no file."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from tbhooks.data.stats import Floats
from tbhooks.drawing.text import is_wide, number

WIDTH, HEIGHT, SIDE = 270, 90, 6
MOST_POINTS = 400


def curve(title: str, steps: Sequence[int], values: Floats, marks: Sequence[int] = ()) -> str:
    """A curve with its first and last value in words; `marks` are steps at which a vertical line is drawn."""
    finite = np.isfinite(values)
    if not finite.any():
        return ""
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).round().astype(int))
    x = _horizontal(np.asarray(steps, dtype=np.float64), np.asarray(steps, dtype=np.float64)[kept])
    y, logarithmic = _vertical(values, values[kept])
    lines = [
        f'<polyline fill="none" stroke="currentColor" stroke-width="1.5" points="{points}"/>' for points in _lines(x, y)
    ]
    at = _horizontal(np.asarray(steps, dtype=np.float64), np.asarray(marks, dtype=np.float64))
    ticks = [f'<line x1="{a:.1f}" x2="{a:.1f}" y1="0" y2="{HEIGHT}" stroke="#d33" stroke-dasharray="3 2"/>' for a in at]
    words = f"{number(float(values[0]))} at step {steps[0]}, {number(float(values[-1]))} at step {steps[-1]}"
    name, scale = html.escape(title), " (logarithmic)" if logarithmic else ""
    return (
        f'<figure class="curve"><figcaption><b>{name}</b>: {words}{scale}</figcaption>'
        f'<svg role="img" aria-label="{name}: {words}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(ticks + lines)}</svg>'
        "</figure>"
    )


def _horizontal(steps: Floats, chosen: Floats) -> Floats:
    span = max(float(steps[-1] - steps[0]), 1.0)
    return np.asarray(SIDE + (chosen - steps[0]) / span * (WIDTH - 2 * SIDE))


def _vertical(values: Floats, chosen: Floats) -> tuple[Floats, bool]:
    logarithmic = is_wide(values) and bool((values[np.isfinite(values)] > 0).all())
    with np.errstate(all="ignore"):
        whole, part = (np.log(values), np.log(chosen)) if logarithmic else (values, chosen)
    known = whole[np.isfinite(whole)]
    low, high = float(known.min()), float(known.max())
    share = (part - low) / (high - low) if high > low else np.where(np.isfinite(part), 0.5, np.nan)
    return HEIGHT - SIDE - share * (HEIGHT - 2 * SIDE), logarithmic


def _lines(x: Floats, y: Floats) -> list[str]:
    """The points of each piece without NaN and infinity, as SVG writes them."""
    pieces: list[list[str]] = [[]]
    for a, b in zip(x, y, strict=True):
        if np.isfinite(b):
            pieces[-1].append(f"{a:.1f},{b:.1f}")
        else:
            pieces.append([])
    return [" ".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece]
