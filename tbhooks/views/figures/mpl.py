"""The part of the figures that depends on matplotlib's classes: the figure itself, its colours, labels along an axis.

The figures are imported when the first one is drawn, so they import matplotlib as any module does. It is an extra:
where it is missing, importing this module raises an ArgumentError that says what to install.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tbhooks.data.errors import ArgumentError
from tbhooks.drawing.heatmap import LEVELS, NOT_FINITE, PALETTE, Scale
from tbhooks.drawing.names import shorten_all
from tbhooks.drawing.text import printable

try:
    from matplotlib.colors import ListedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure
except ImportError as missing:
    raise ArgumentError('figures need matplotlib: pip install "tbhooks[plot]"') from missing

SMALL, TINY = 8.0, 6.5
"""Font sizes in points, legible at the width of a column."""
TALLEST = 9.0
LONGEST_NAME = 30
SHOWN_DPI = 110
DARK, TEAL, LIGHT = "#3b518b", "#21908d", "#a9c9d6"
RED = tuple(channel / 255 for channel in NOT_FINITE)
"""Marks NaN and Inf, as on the HTML heat maps."""

_RAMP = [tuple(PALETTE[3 * i + c] / 255 for c in range(3)) for i in range(LEVELS)]
COLOURS = ListedColormap(_RAMP, name="tbhooks").with_extremes(bad=(0, 0, 0, 0))
"""The palette of the HTML heat maps; NaN is transparent."""


class SelfShowingFigure(Figure):
    """A matplotlib figure that a notebook shows even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=SHOWN_DPI)
        return image.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, sizes in inches. Raises ArgumentError for a width that is none."""
    if not (isinstance(width, int | float) and 1 <= width <= 100):
        raise ArgumentError(f"width must be between 1 and 100 inches, got {width!r}")
    return SelfShowingFigure(figsize=(width, height), layout="constrained", dpi=SHOWN_DPI)


def norm_of(scale: Scale) -> Normalize:
    """The scale of an HTML heat map as matplotlib's normalization."""
    if scale.logarithmic:
        return LogNorm(scale.low, scale.high, clip=True)
    return Normalize(scale.low, scale.high if scale.high > scale.low else scale.low + 1.0)


def labels(names: Sequence[str]) -> list[str]:
    """Names short enough to stand beside an axis; different names stay different, and "$" starts no formula.

    Words between dots lose their last letters first, so that the numbers of layers stay.
    """
    full = [printable(name) for name in names]
    short, prefix = shorten_all(full, LONGEST_NAME)
    abbreviated = [
        _abbreviate(f"…{name[len(prefix) :]}" if prefix and name.startswith(prefix) else name) for name in full
    ]
    if len(set(abbreviated)) == len(set(full)) and max(map(len, abbreviated)) <= LONGEST_NAME:
        short = abbreviated
    return [name.replace("$", r"\$") for name in short]


def _abbreviate(name: str) -> str:
    words = name.split(".")
    shorter = (".".join(word[:letters] for word in words) for letters in (99, 12, 10, 8, 6, 5, 4, 3))
    return next((text for text in shorter if len(text) <= LONGEST_NAME), name)


def label_stride(names: Sequence[str], room: float) -> int:
    """1 if every name has a line in so many inches, 2 if every second has, ..."""
    return -(-len(names) // max(int(room / (TINY * 1.25 / 72)), 2))


def set_names(axis: Any, names: Sequence[str], room: float, **options: Any) -> None:
    """Labels the ticks of an axis with as many names as fit, evenly chosen."""
    ticks, short = range(0, len(names), label_stride(names, room)), labels(names)
    axis.set_ticks(list(ticks), [short[i] for i in ticks], fontsize=TINY, **options)
