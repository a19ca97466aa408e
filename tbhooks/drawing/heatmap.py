"""Heat maps for HTML pages: a matrix as PNG, and an SVG around it with names, an axis and a legend.

The colour map is viridis, which is readable with any colour vision and in print. Values that are not finite have a
colour that is not part of it, and are explained in the legend. Returns strings and opens no file.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.stats import Floats
from tbhooks.drawing import png
from tbhooks.drawing.names import shorten_all
from tbhooks.drawing.png import Bytes
from tbhooks.drawing.text import is_wide, number

_VIRIDIS = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129),
            (92, 200, 99), (170, 220, 50), (253, 231, 37))  # fmt: skip
NOT_FINITE = (255, 45, 60)
LEVELS = 254
_ABSENT, WRONG = 255, 254


def _palette() -> bytes:
    anchors = np.linspace(0, LEVELS - 1, len(_VIRIDIS))
    ramp = [np.interp(np.arange(LEVELS), anchors, channel) for channel in zip(*_VIRIDIS, strict=True)]
    colours = np.round(np.stack(ramp, axis=1)).astype(np.uint8).tobytes()
    return colours + bytes(NOT_FINITE) + bytes((128, 128, 128))


PALETTE = _palette()


@dataclass(frozen=True, slots=True)
class Scale:
    """How values become colours: the values at the ends, on a linear or logarithmic scale."""

    low: float
    high: float
    logarithmic: bool
    beyond: int = 0
    """How many values are outside of the ends, and have the colour of the nearer one."""

    @classmethod
    def robust(cls, values: Floats) -> Scale:
        """The scale of all but the lowest and highest hundredth, if those would take more than half of the colours."""
        whole, known = cls.of(values), values[np.isfinite(values)]
        inner = known[known > 0] if whole.logarithmic else known
        if not len(inner):
            return whole
        low, high = np.quantile(inner, [0.01, 0.99])
        ends = np.array([whole.low, low, high, whole.high])
        with np.errstate(divide="ignore"):
            ends = np.log(ends) if whole.logarithmic else ends
        if not 0 < ends[2] - ends[1] < 0.5 * (ends[3] - ends[0]):
            return whole
        return cls(float(low), float(high), whole.logarithmic, int(((known < low) | (known > high)).sum()))

    @classmethod
    def of(cls, values: Floats) -> Scale:
        known = values[np.isfinite(values)]
        if is_wide(known):
            positive = known[known > 0]
            return cls(float(positive.min()), float(positive.max()), logarithmic=True)
        if not len(known):
            return cls(0.0, 0.0, logarithmic=False)
        return cls(float(known.min()), float(known.max()), logarithmic=False)

    @property
    def words(self) -> str:
        beyond = f", {self.beyond} beyond" if self.beyond else ""
        return f"{number(self.low)} to {number(self.high)}" + (", logarithmic" if self.logarithmic else "") + beyond

    def levels(self, values: Floats) -> Bytes:
        """The palette index of each value. Infinities, and zeros on a logarithmic scale, are clipped to the ends."""
        with np.errstate(all="ignore"):
            scaled = np.log(np.maximum(values, self.low)) if self.logarithmic else values
            ends = np.log([self.low, self.high]) if self.logarithmic else np.array([self.low, self.high])
            span = ends[1] - ends[0]
            share = (scaled - ends[0]) / span if span > 0 else np.full(values.shape, 0.5) + 0 * values
            level = np.clip(np.nan_to_num(share, nan=0.0, posinf=1.0, neginf=0.0), 0, 1) * (LEVELS - 1)
        return np.where(np.isnan(values), _ABSENT, np.round(level)).astype(np.uint8)


def picture(values: Floats, wrong: NDArray[np.bool_], scale: Scale) -> str:
    """A matrix as the data URI of a PNG, one pixel per value. `wrong` marks values that are not finite."""
    levels = scale.levels(values)
    levels[wrong] = WRONG
    return "data:image/png;base64," + base64.b64encode(_png(levels)).decode()


def _png(levels: Bytes) -> bytes:
    """A PNG from palette indices. Missing values are transparent."""
    return png.from_palette(levels, PALETTE, opacity=b"\xff" * _ABSENT + b"\x00", compression=9)


def rows_to_show(urgent: Sequence[int], rows: int, most: int) -> list[int]:
    """Which `most` of so many rows a map shows, in order: the urgent ones, and evenly spaced others."""
    kept = list(urgent[:most])
    others = sorted(set(range(rows)) - set(kept))
    evenly = np.linspace(0, len(others) - 1, most - len(kept)).round().astype(int)
    return sorted({*kept, *(others[i] for i in evenly)})


# --- The SVG around it --------------------------------------------------------------------------------

NAME_WIDTH, PLOT_WIDTH, AXIS_HEIGHT, SIDE, TOP = 240, 640, 22, 10, 6
TALLEST_ROW, TALLEST_MAP, LABEL_EVERY, LONGEST_LABEL = 16, 1000, 12, 34


def row_height(rows: int) -> int:
    """The height of a row in pixels, smaller if there are many."""
    return min(max(TALLEST_MAP // max(rows, 1), 1), TALLEST_ROW)


def svg(label: str, image: str, names: Sequence[str], hints: Sequence[str], steps: Sequence[int], row: int) -> str:
    """A heat map with names on the left and steps below it. `hints` are tooltips of the rows."""
    height = row * len(names)
    box = f"0 -{TOP} {NAME_WIDTH + PLOT_WIDTH + SIDE} {TOP + height + AXIS_HEIGHT}"
    size = f'width="{PLOT_WIDTH}" height="{height}" preserveAspectRatio="none"'
    every = max(1, -(-LABEL_EVERY // row))
    labels, _ = shorten_all(names, LONGEST_LABEL)
    return "".join([
        f'<svg role="img" aria-label="{html.escape(label)}" viewBox="{box}">',
        f'<image x="{NAME_WIDTH}" y="0" {size} href="{image}"/>',
        *(_name_beside(labels[i], row * (i + 0.5)) for i in range(0, len(names), every)),
        *(_hint_on(hint, row * i, row) for i, hint in enumerate(hints)),
        _axis(steps, height),
        "</svg>",
    ])  # fmt: skip


def _name_beside(name: str, middle: float) -> str:
    return f'<text x="{NAME_WIDTH - 6}" y="{middle + 3.5:g}" text-anchor="end">{html.escape(name)}</text>'


def _hint_on(hint: str, top: int, height: int) -> str:
    area = f'x="0" y="{top}" width="{NAME_WIDTH + PLOT_WIDTH}" height="{height}"'
    return f"<rect {area}><title>{html.escape(hint)}</title></rect>"


def _axis(steps: Sequence[int], height: int) -> str:
    """Up to seven steps, each below its column."""
    n = len(steps)
    chosen = sorted({round(i * (n - 1) / 6) for i in range(7)}) if n > 1 else [0]
    labels: list[str] = []
    for i in chosen:
        x, label = NAME_WIDTH + PLOT_WIDTH * (i + 0.5) / n, steps[i] if labels else f"step {steps[i]}"
        labels.append(f'<text x="{x:.1f}" y="{height + 15}" text-anchor="middle">{label}</text>')
    return "".join(labels)


def legend(scale: Scale, *, wrong: bool) -> str:
    """The values at the ends of the scale, and its colours between them."""
    ramp = np.arange(LEVELS, dtype=np.uint8)[None, ::4]
    bar = "data:image/png;base64," + base64.b64encode(_png(ramp)).decode()
    colour = "#{:02x}{:02x}{:02x}".format(*NOT_FINITE)
    marks = f' <span class="swatch" style="background:{colour}"></span> NaN or infinite inside' if wrong else ""
    by = " (logarithmic)" if scale.logarithmic else ""
    by += f"; {scale.beyond} cells beyond these ends have their colours" if scale.beyond else ""
    return (
        f'<p class="legend">{number(scale.low)} <img class="ramp" alt="to" src="{bar}"> {number(scale.high)}{by}'
        f"{marks}</p>"
    )
