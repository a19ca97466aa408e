"""Figures for papers and notebooks, made with matplotlib's classes: no pyplot, no global state, nothing is displayed.

Each function takes numbers and returns a figure. NaN and Inf are red, with a legend. Widths are in inches: 3.4 is the
width of a column, 7 that of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.data.history import History
from tbhooks.data.stats import Floats
from tbhooks.drawing.heatmap import Scale
from tbhooks.drawing.tensor_grid import columns_of
from tbhooks.drawing.text import is_wide, names_of, printable
from tbhooks.views.figures import mpl
from tbhooks.views.notebook.history import grid_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

# --- One frame ---------------------------------------------------------------------------------------------


def frame_figure(frame: Frame, width: float = 7.0) -> Figure:
    """One frame layer by layer in execution order: range of the activations, gradient norms, fraction of zeros.

    Raises ArgumentError if the frame has neither activations nor gradients.
    """
    plain = frame.without_phase() if frame.is_evaluation else frame
    names = names_of(plain, ("activation", "gradient"))
    if not names:
        raise ArgumentError("figure() shows activations and gradients; this logged step has neither")
    panels = [panel for panel in _PANELS if any(site.kind == panel[0] for site in plain.sites)]
    figure = mpl.new_figure(width, 1.0 + 1.35 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (kind, draw) in zip(axes, panels, strict=True):
        layers = _Layers(plain, names, kind)
        draw(axis, layers, _bar_width(width, len(names)))
        _mark_nonfinite(axis, layers.has_nonfinite)
        axis.tick_params(labelsize=mpl.TINY)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.set_axisbelow(True)
        _legend_outside(axis)
    axes[-1].set_xlim(-0.6, len(names) - 0.4)
    mpl.set_names(axes[-1].xaxis, names, width - 1.0, rotation=90)
    axes[-1].set_xlabel("layer, in execution order", fontsize=mpl.SMALL)
    return figure


class _Layers:
    """The statistics of one kind as one number per layer; NaN for a layer that has none."""

    def __init__(self, frame: Frame, names: Sequence[str], kind: str) -> None:
        self._frame = frame
        rows = {site.name: i for i, site in enumerate(frame.sites) if site.kind == kind}
        self._rows = np.array([rows.get(name, -1) for name in names])

    def __getitem__(self, stat: str) -> Floats:
        values = np.append(self._frame.stat(stat), np.nan)
        return np.asarray(values[self._rows], dtype=np.float64)

    @property
    def has_nonfinite(self) -> NDArray[np.bool_]:
        return np.asarray(self["nan_count"] + self["inf_count"] > 0)


# The axis is linear below the largest activation divided by this, so that it stays legible.
LARGEST_TO_LINEAR = 1e3


def _bar_width(width: float, n: int) -> float:
    """The width of one layer's bar in points: most of the room it has."""
    return float(np.clip(0.6 * (width - 1.2) * 72 / n, 0.5, 10.0))


def _draw_spread(axis: Axes, layers: _Layers, bar_width: float) -> None:
    x = np.arange(len(layers["mean"]))
    low, high = layers["p01"], layers["p99"]
    label = "1st to 99th percentile"
    if not np.isfinite(low).any():
        low, high, label = layers["min"], layers["max"], "min to max"
    mean, std = layers["mean"], layers["std"]
    axis.vlines(x, low, high, color=mpl.LIGHT, linewidth=bar_width, label=label)
    axis.vlines(x, mean - std, mean + std, color=mpl.DARK, linewidth=max(bar_width / 2.5, 0.5), label="mean ± std")
    # Of a constant, only the dot is visible.
    axis.plot(x, mean, "o", color=mpl.DARK, markersize=float(np.clip(bar_width / 2, 1.0, 3.5)), markeredgewidth=0)
    axis.plot(x, mean, "_", color="white", markersize=max(bar_width / 2.5, 1.0), markeredgewidth=0.8)
    reach = np.maximum(np.abs(low), np.abs(high))
    if is_wide(reach):
        positive = reach[np.isfinite(reach) & (reach > 0)]
        least, most = max(float(positive.min()), float(positive.max()) / LARGEST_TO_LINEAR), float(positive.max())
        axis.set_yscale("symlog", linthresh=least)
        powers = 10.0 ** np.arange(np.ceil(np.log10(3 * least)), np.floor(np.log10(most)) + 1)
        axis.set_yticks([*-powers[::-1], 0, *powers], [f"{tick:g}" for tick in (*-powers[::-1], 0, *powers)])
    axis.set_ylabel("activation", fontsize=mpl.SMALL)


def _draw_gradients(axis: Axes, layers: _Layers, bar_width: float) -> None:
    norms = layers["norm"]
    x = np.arange(len(norms))
    known = np.isfinite(norms) & (norms > 0)
    if is_wide(norms):
        axis.set_yscale("log")
    if not known.any():
        axis.set_yticks([])
    axis.plot(x[known], norms[known], "-", color=mpl.TEAL, linewidth=0.7, alpha=0.7)
    axis.plot(x[known], norms[known], "o", color=mpl.TEAL, markersize=float(np.clip(bar_width, 1.2, 4.0)), label="norm")
    if (norms == 0).any():
        zeros = x[norms == 0]
        axis.plot(zeros, np.full(len(zeros), 0.03), "x", color=mpl.DARK, markersize=4, markeredgewidth=1.0,
                  transform=axis.get_xaxis_transform(), label="exactly zero")  # fmt: skip
    axis.set_ylabel("gradient norm", fontsize=mpl.SMALL)


def _draw_zeros(axis: Axes, layers: _Layers, bar_width: float) -> None:
    share = 100 * layers["zero_fraction"]
    axis.vlines(np.arange(len(share)), 0, share, color=mpl.DARK, linewidth=bar_width)
    axis.set_ylim(0, 104)
    axis.set_yticks([0, 50, 100])
    axis.set_ylabel("zeros (%)", fontsize=mpl.SMALL)


_PANELS = (("activation", _draw_spread), ("gradient", _draw_gradients), ("activation", _draw_zeros))


def _mark_nonfinite(axis: Axes, nonfinite: NDArray[np.bool_]) -> None:
    """A red band behind each layer with NaN or Inf."""
    for n, i in enumerate(np.flatnonzero(nonfinite)):
        axis.axvspan(i - 0.5, i + 0.5, color=mpl.RED, alpha=0.35, linewidth=0, zorder=0,
                     label="NaN or Inf inside" if n == 0 else None)  # fmt: skip


def _legend_outside(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=mpl.TINY, frameon=False,
                    borderaxespad=0.1, handlelength=1.2, columnspacing=1.0)  # fmt: skip


# --- Layers over steps ------------------------------------------------------------------------------------

MOST_COLUMNS = 600
_UNITS = {"zero_fraction": "fraction of zeros", "ratio": "norm / norm of the weight"}


def heat_map(history: History, stat: str = "std", kind: str = "gradient", width: float = 7.0) -> Figure:
    """One statistic of one kind as a heat map: one row per layer in execution order, one column per logged step."""
    grid = grid_of(history, stat, kind).thinned(MOST_COLUMNS)
    values = np.where(grid.wrong | ~np.isfinite(grid.values), np.nan, grid.values)
    height = float(np.clip(0.9 + 0.15 * len(grid.names), 1.6, mpl.TALLEST))
    figure = mpl.new_figure(width, height)
    axis = figure.subplots()
    scale = Scale.of(values)
    image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap=mpl.COLOURS, norm=mpl.norm_of(scale))
    mpl.set_names(axis.yaxis, grid.names, height - 0.7)
    _steps_along(axis, grid.steps.tolist(), width)
    bar = figure.colorbar(image, ax=axis, pad=0.02, aspect=30 if height > 3 else 15)
    bar.set_label(f"{kind.replace('_', ' ')} {_UNITS.get(stat, stat.replace('_', ' '))}", fontsize=mpl.SMALL)
    bar.ax.tick_params(labelsize=mpl.TINY)
    if grid.wrong.any():
        _draw_nonfinite(axis, grid.wrong)
    return figure


def _steps_along(axis: Axes, steps: Sequence[int], width: float) -> None:
    most = max(int(width), 2)
    ticks = sorted({round(i * (len(steps) - 1) / (most - 1)) for i in range(most)})
    axis.set_xticks(ticks, [f"{steps[i]:,}" for i in ticks], fontsize=mpl.TINY)
    axis.set_xlabel("step", fontsize=mpl.SMALL)


def _draw_nonfinite(axis: Axes, nonfinite: NDArray[np.bool_]) -> None:
    """Red over the cells with NaN or Inf, and a legend."""
    overlay = np.zeros((*nonfinite.shape, 4))
    overlay[nonfinite] = (*mpl.RED, 1.0)
    axis.imshow(overlay, aspect="auto", interpolation="nearest")
    axis.plot([], [], "s", color=mpl.RED, markersize=5, label="NaN or Inf inside")
    _legend_outside(axis)


# --- Kept tensors -----------------------------------------------------------------------------------------

MOST_TILES = 64
LABEL_HEIGHT = 0.17


def image_grid(
    tensor: Any, most: int = MOST_TILES, *, sample: int = 0, width: float = 7.0, title: str | None = None
) -> Figure:
    """Feature maps [channels, height, width] or attention maps [heads, queries, keys] as tiles on one colour scale.

    Of a batch [samples, ...] one `sample` is shown, and of many maps the first `most`. The scale spans 99 % of the
    values. Raises ArgumentError for anything else than numbers in two to four dimensions.
    """
    maps = _maps(tensor, sample)
    if not (isinstance(most, int) and most >= 1):
        raise ArgumentError(f"most must be an integer >= 1, got {most!r}")
    shown = maps[:most]
    columns = columns_of(len(shown), maps.shape[1] / maps.shape[2])
    tall, wide = maps.shape[1], maps.shape[2]
    tile = (width - 0.8) / columns
    gap = LABEL_HEIGHT / tile * wide  # the axis is in pixels of the maps
    rows = -(-len(shown) // columns)
    figure = mpl.new_figure(width, min(rows * (tile * tall / wide + LABEL_HEIGHT) + 0.4, mpl.TALLEST))
    axis = figure.subplots()
    scale, beyond = _range_of(shown)
    norm = mpl.norm_of(scale)
    for i, values in enumerate(shown):
        left, top = (i % columns) * wide * 1.06, (i // columns) * (tall + gap)
        image = _tile(axis, values, norm, (left, top))
        axis.text(left + wide / 2, top - gap / 8, str(i), fontsize=mpl.TINY, ha="center", va="bottom")
    axis.set_xlim(0, columns * wide * 1.06 - wide * 0.06)
    axis.set_ylim(rows * (tall + gap) - gap, -gap)
    axis.set_axis_off()
    bar = figure.colorbar(image, ax=axis, pad=0.02, shrink=0.9, aspect=30, extend=beyond)
    bar.ax.tick_params(labelsize=mpl.TINY)
    fewer = f"{len(shown)} of {len(maps)} maps" if len(shown) < len(maps) else ""
    titles = [title or "", fewer, "" if np.isfinite(shown).all() else "red: NaN or Inf"]
    if any(titles):
        figure.suptitle(printable("; ".join(filter(None, titles))).replace("$", r"\$"), fontsize=mpl.SMALL)
    return figure


def _maps(tensor: Any, sample: int) -> Floats:
    """[maps, height, width] of a torch tensor or of an array."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().double().numpy()
    try:
        array = np.asarray(tensor, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"image_grid takes a tensor of numbers, not {type(tensor).__name__}") from problem
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise ArgumentError(
            "image_grid takes [height, width], [channels, height, width] or [samples, channels, height, width], "
            f"not a tensor of shape {list(array.shape)}"
        )
    if array.ndim == 4:
        if not (isinstance(sample, int) and -len(array) <= sample < len(array)):
            raise ArgumentError(f"sample must be an index into the {len(array)} samples, got {sample!r}")
        array = array[sample]
    return array if array.ndim == 3 else array[None]


def _range_of(maps: Floats) -> tuple[Scale, str]:
    """The scale, and beyond which of its ends there are values ("neither", "min", "max", "both")."""
    known = maps[np.isfinite(maps)]
    low, high = np.quantile(known, [0.005, 0.995]) if len(known) else (0.0, 1.0)
    less, more = bool((known < low).any()), bool((known > high).any())
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return Scale(float(low), float(high), logarithmic=False), beyond[less, more]


def _tile(axis: Axes, values: Floats, norm: Normalize, corner: tuple[float, float]) -> Any:
    """Draws a map with its upper left corner there; red shows through at NaN and Inf."""
    left, top = corner
    extent = (left, left + values.shape[1], top + values.shape[0], top)
    if not np.isfinite(values).all():
        red = np.broadcast_to(mpl.RED, (*values.shape, 3))
        axis.imshow(red, interpolation="nearest", extent=extent)
    known = np.where(np.isfinite(values), values, np.nan)
    return axis.imshow(known, norm=norm, cmap=mpl.COLOURS, interpolation="nearest", extent=extent)
