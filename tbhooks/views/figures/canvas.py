"""The one file that needs matplotlib to be imported: a figure that shows itself, with or without pyplot."""

from __future__ import annotations

import io

from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure

from tbhooks.drawing.heatmap import LEVELS, NOT_FINITE, PALETTE

SHOWN_DPI = 110


class Picture(Figure):
    """A matplotlib figure. Notebooks draw figures only once pyplot was imported; this one draws itself."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png", dpi=SHOWN_DPI)
        return drawn.getvalue()


def colours() -> Colormap:
    """The heat map's own palette; what is not finite in the colour it has there, what is absent see-through."""
    ramp = [tuple(PALETTE[3 * i + c] / 255 for c in range(3)) for i in range(LEVELS)]
    return ListedColormap(ramp, name="tbhooks").with_extremes(bad=(0, 0, 0, 0))


WRONG = tuple(channel / 255 for channel in NOT_FINITE)
