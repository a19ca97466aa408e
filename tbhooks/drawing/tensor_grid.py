"""Tensors as pixels: maps side by side on one colour scale, with a strip below them that shows the scale.

NumPy only. The colours are those of the heat map; input images keep their own. Values that are not finite are red, and
counted in the strip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.artifacts import Pixels
from tbhooks.data.stats import Floats
from tbhooks.drawing.heatmap import LEVELS, NOT_FINITE, PALETTE

# The approximate width or height of an image in pixels. Small maps are enlarged: each value becomes a square.
WIDTH = 480
GAP = 2
THUMBNAIL = 24
"""The size to which smaller thumbnails are enlarged."""
LOW, HIGH = 0.005, 0.995
"""The quantiles at the ends of the scale: with the extremes, outliers would leave the rest in one colour."""
WHITE, INK = (255, 255, 255), (68, 1, 84)
_RAMP: Pixels = np.frombuffer(PALETTE, dtype=np.uint8)[: 3 * LEVELS].reshape(-1, 3)
_GREYS: Pixels = np.repeat(np.linspace(0, 255, LEVELS).round().astype(np.uint8)[:, None], 3, axis=1)


@dataclass(frozen=True)
class Scale:
    """The values at the ends of the colour scale, and the number of values that are not finite."""

    low: float
    high: float
    wrong: int = 0

    @classmethod
    def of(cls, values: NDArray[Any]) -> Scale:
        known = values[np.isfinite(values)]
        if not known.size:
            return cls(0.0, 0.0, values.size)
        low, high = np.quantile(known.astype(np.float64), [LOW, HIGH])
        return cls(float(low), float(high), values.size - known.size)

    def levels(self, values: Floats) -> NDArray[np.intp]:
        """Values as levels from 0 to LEVELS - 1, clipped at the ends."""
        span = self.high - self.low
        with np.errstate(all="ignore"):
            share = (values - self.low) / span if span > 0 else np.full(values.shape, 0.5)
        return np.round(np.clip(np.nan_to_num(share), 0.0, 1.0) * (LEVELS - 1)).astype(np.intp)


def painted(tiles: NDArray[Any], *, natural: bool = False) -> tuple[Pixels, Scale]:
    """Draws tiles in a grid on one scale: [n, height, width], or [n, height, width, 3] for RGB.

    `natural` draws from black to white instead of the heat map's colours. Returns the pixels and the scale.
    """
    values = tiles.astype(np.float64)
    scale = Scale.of(values)
    levels = scale.levels(values)
    in_colours = tiles.ndim == 4
    pixels = _GREYS[levels, 0] if in_colours else (_GREYS if natural else _RAMP)[levels]
    wrong = ~np.isfinite(values)
    pixels[wrong.any(-1) if in_colours else wrong] = NOT_FINITE
    drawn = _grid(pixels)
    return np.concatenate([drawn, _strip(scale, drawn.shape[1], _GREYS if natural or in_colours else _RAMP)]), scale


def columns_of(tiles: int, tallness: float) -> int:
    """The number of columns: the grid is about a third wider than tall, with few empty cells."""
    ideal = round(float(np.sqrt(tiles * tallness * 1.3)))
    near = range(min(max(ideal + 2, 1), tiles), max(ideal - 3, 0), -1)
    return min(near, key=lambda columns: -tiles % columns + abs(columns - ideal) / 2)


def _grid(tiles: Pixels) -> Pixels:
    n, tall, wide, _ = tiles.shape
    columns = columns_of(n, tall / wide)
    rows = -(-n // columns)
    zoom = max(1, round(WIDTH / max(columns * wide, rows * tall)))
    larger = tiles.repeat(zoom, axis=1).repeat(zoom, axis=2)
    tall, wide = tall * zoom, wide * zoom
    canvas = np.full((rows * (tall + GAP) - GAP, max(columns * (wide + GAP) - GAP, WIDTH - 2 * GAP), 3), 255, np.uint8)
    for i, tile in enumerate(larger):
        top, left = i // columns * (tall + GAP), i % columns * (wide + GAP)
        canvas[top : top + tall, left : left + wide] = tile
    return canvas


# --- The strip ----------------------------------------------------------------------------------------

_BITS = {
    "0": "0E11131519110E", "1": "040C040404040E", "2": "0E11010204081F", "3": "1F02040201110E", "4": "02060A121F0202",
    "5": "1F101E0101110E", "6": "0608101E11110E", "7": "1F010204080808", "8": "0E11110E11110E", "9": "0E11110F01020C",
    "-": "0000000E000000", "+": "0004041F040400", ".": "00000000000C0C", " ": "00000000000000", "e": "00000E111F100E",
    "N": "11111915131111", "I": "0E04040404040E", "a": "00000E010F110F", "n": "00001619111111", "f": "0609081C080808",
    "o": "00000E1111110E", "r": "00001619101010",
}  # fmt: skip
"""Glyphs of five by seven pixels, two hexadecimal digits per row: the characters of numbers, NaN and Inf."""
_TALL, _LETTER, _ZOOM = 7, 6, 2
STRIP = _TALL * _ZOOM + 10
_LONGEST = 9 * _LETTER * _ZOOM


def _strip(scale: Scale, width: int, ramp: Pixels) -> Pixels:
    """The ends of the scale with its colours between them, and the number of values that are not finite."""
    rows = [_scale_row(scale, width, ramp)]
    if scale.wrong:
        rows.append(_empty(width))
        _write(rows[-1], f"{scale.wrong} NaN or Inf", 0, NOT_FINITE)
    return np.concatenate(rows)


def _scale_row(scale: Scale, width: int, ramp: Pixels) -> Pixels:
    row = _empty(width)
    low, high = (_number(value) for value in (scale.low, scale.high))
    _write(row, low, 0, INK)
    _write(row, high, width - _length(high), INK)
    start, stop = _length(low) + 8, width - _length(high) - 8
    if stop - start >= 16:
        levels = np.linspace(0, LEVELS - 1, stop - start).round().astype(np.intp)
        row[6 : 6 + _TALL * _ZOOM, start:stop] = ramp[levels]
    return row


def _empty(width: int) -> Pixels:
    return np.full((STRIP, width, 3), WHITE, np.uint8)


def _number(value: float) -> str:
    short = f"{value:.3g}"
    return short if len(short) * _LETTER * _ZOOM <= _LONGEST else f"{value:.1e}"


def _length(text: str) -> int:
    return len(text) * _LETTER * _ZOOM


def _write(row: Pixels, text: str, left: int, colour: Sequence[int]) -> None:
    for i, letter in enumerate(text):
        lines = bytes.fromhex(_BITS[letter])
        marks = np.array([[line >> (4 - x) & 1 for x in range(5)] for line in lines], dtype=np.bool_)
        marks = marks.repeat(_ZOOM, axis=0).repeat(_ZOOM, axis=1)
        start = left + i * _LETTER * _ZOOM
        area = row[6 : 6 + len(marks), start : start + marks.shape[1]]
        area[marks[:, : area.shape[1]]] = colour


def thumbnails_of(pictures: NDArray[Any]) -> Pixels:
    """Images [n, channels, height, width] with 1 or 3 channels, or [n, height, width], as pixels on one scale."""
    values = (pictures if pictures.ndim == 4 else pictures[:, None]).astype(np.float64)
    levels = Scale.of(values).levels(values)
    zoom = max(1, THUMBNAIL // max(values.shape[2:]))
    pixels = _GREYS[levels, 0].transpose(0, 2, 3, 1).repeat(zoom, axis=1).repeat(zoom, axis=2)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:3], 3)))
