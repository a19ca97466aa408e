"""Frames and numbers as text. Returns strings and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.frame import Frame
from tbhooks.data.peek_result import Output, Peeked
from tbhooks.data.stats import LOWER, MIDDLE, UPPER, Counts, Floats

# The columns of the tables: heading, kind, statistic.
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
    """Two tables: modules in execution order, and parameters, with their main statistics."""
    modules = names_of(frame, ("activation", "gradient"))
    parameters = names_of(frame, ("weight", "weight_gradient", "update"))
    parts = [f"step {frame.step}"]
    if modules:
        parts.append(_block("module", modules, _MODULE_COLUMNS, frame))
    if parameters:
        parts.append(_block("parameter", parameters, _PARAMETER_COLUMNS, frame))
    return "\n\n".join(parts)


def outputs_of(frame: Frame) -> Mapping[str, Output]:
    """The outputs of modules, which only frames of `peek` have."""
    return frame.outputs if isinstance(frame, Peeked) else {}


def shape(sizes: tuple[int, ...]) -> str:
    """A shape as `8x16x4`, or "one number" for a scalar."""
    return "x".join(map(str, sizes)) or "one number"


def names_of(frame: Frame, kinds: Sequence[str]) -> list[str]:
    """The names of all sites with one of these kinds, in the order of the first kind."""
    return list(dict.fromkeys(site.name for kind in kinds for site in frame.sites if site.kind == kind))


def _block(heading: str, names: list[str], columns: Sequence[tuple[str, str, str]], frame: Frame) -> str:
    outputs = outputs_of(frame) if heading == "module" else {}
    known = ["type", "output", "dtype"] if outputs else []
    lines = [[heading, *known, *(title for title, _, _ in columns), "distribution"]]
    for name in names:
        cells = [_cell(frame, name, kind, stat) for _, kind, stat in columns]
        lines.append([printable(name), *_output(outputs, name), *cells, sparkline(frame, name, columns[0][1])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {*range(len(known) + 1), len(widths) - 1}
    return "\n".join(
        "  ".join(cell.ljust(width) if i in left else cell.rjust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def _output(outputs: Mapping[str, Output], name: str) -> list[str]:
    if not outputs:
        return []
    known = outputs.get(name)
    return ["-"] * 3 if known is None else [printable(known.module), shape(known.shape), known.dtype]


def _cell(frame: Frame, name: str, kind: str, stat: str) -> str:
    if (name, kind) not in frame:
        return "-"
    reading = frame[name, kind]
    value = float(getattr(reading, stat))
    return number(value, stat, int(reading.nan_count + reading.inf_count))


BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(frame: Frame, name: str, kind: str, width: int = 24) -> str:
    """The histogram between the minimum and the maximum as a line of bars."""
    if (name, kind) not in frame or not frame.buckets.shape[1]:
        return ""
    reading = frame[name, kind]
    low, high = reading.min, reading.max
    if not np.isfinite(low) or low == high:
        return "" if not np.isfinite(low) else f"all {low:.3g}"
    heights = rebinned(reading.counts, low, high, width)
    top = heights.max()
    bars = (BLOCKS[0 if h == 0 else 1 + round(h / top * (len(BLOCKS) - 2))] for h in heights)
    return f"{low:.2g} {''.join(bars)} {high:.2g}"


def rebinned(counts: Counts, low: float, high: float, width: int) -> Floats:
    """Bucket counts as counts in bins of equal width between the minimum and the maximum."""
    return np.diff(cumulated(counts, low, high, np.linspace(low, high, width + 1)))


def cumulated(counts: Counts, low: float, high: float, points: Floats) -> Floats:
    """The number of elements below each point, if they are spread evenly in their bucket, from the minimum on."""
    ends = np.clip(np.append(LOWER, UPPER[-1]), low, high)
    below = np.interp(points, ends, np.concatenate([[0], np.cumsum(counts)]))
    # Clipping can make a bucket a single point, at the minimum or the maximum, where interp is ambiguous.
    return np.where(points <= low, 0.0, np.where(points >= high, counts.sum(), below))


def bucket_label(bucket: int) -> str:
    """The edge of a histogram bucket that is nearer to zero."""
    edge = 0.0 if bucket == MIDDLE else LOWER[bucket] if bucket > MIDDLE else UPPER[bucket]
    return f"{edge:.2g}"


def trend(values: Floats, wrong: NDArray[np.bool_], width: int) -> str:
    """Values over steps as a line of bars, with `!` for values that are not finite. Logarithmic for wide ranges."""
    if width < 1 or not len(values):
        return ""
    chunks = np.array_split(np.arange(len(values)), min(width, len(values)))
    known = np.where(np.isfinite(values), values, np.nan)
    tops = np.array([_furthest(known[chunk]) for chunk in chunks])
    heights = scaled(tops)
    marks = (any(wrong[chunk]) for chunk in chunks)
    return "".join(
        "!" if mark else " " if np.isnan(height) else BLOCKS[1 + round(height * (len(BLOCKS) - 2))]
        for mark, height in zip(marks, heights, strict=True)
    )


def _furthest(values: Floats) -> float:
    """The value furthest from zero."""
    size = np.where(np.isnan(values), -1.0, np.abs(values))
    return float(values[size.argmax()])


WIDE = 100.0
NO_REFERENCE = "no reference yet"


def is_wide(values: Floats) -> bool:
    """Whether the values are positive and span so wide a range that they need a logarithmic scale."""
    known = values[np.isfinite(values)]
    positive = known[known > 0]
    return bool(len(positive)) and bool((known >= 0).all()) and positive.max() / positive.min() > WIDE


def scaled(values: Floats) -> Floats:
    """Values scaled to the range from 0 to 1, logarithmically if the range is wide."""
    if is_wide(values):
        with np.errstate(divide="ignore"):
            values = np.log(values)
        values = np.where(np.isneginf(values), np.nanmin(values[np.isfinite(values)]), values)
    known = values[np.isfinite(values)]
    if not len(known):
        return np.full(len(values), np.nan)
    low, high = float(known.min()), float(known.max())
    with np.errstate(over="ignore", invalid="ignore"):
        return np.full(len(values), 0.5) + values * 0 if high == low else np.clip((values - low) / (high - low), 0, 1)


def printable(text: str) -> str:
    """A name for a terminal: control characters, which could move the cursor or change colours, are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: float, stat: str = "", bad: int = 0) -> str:
    """A number with three digits, a fraction in percent, and how many values are not finite.

    The ratio of an update to a weight that was zero is undefined: "no reference yet".
    """
    if stat == "ratio" and np.isnan(value) and not bad:
        return NO_REFERENCE
    mark = f" ({bad} NaN/Inf)" if bad else ""
    return (f"{value:.0%}" if stat == "zero_fraction" and np.isfinite(value) else f"{value:.3g}") + mark
