"""Pictures for papers and notebooks, drawn with matplotlib's objects: no pyplot, no global state, nothing shown.

Each function takes numbers and returns a figure. What is not finite is red and said in words. Widths are inches:
3.4 is a column, 7 a page.
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


# --- One pass ---------------------------------------------------------------------------------------------


def frame_figure(frame: Frame, width: float = 7.0) -> Figure:
    """The pass layer by layer, in execution order: how activations spread, gradient norms, the share of zeros."""
    plain = frame.without_phase() if frame.is_evaluation else frame
    names = names_of(plain, ("activation", "gradient"))
    if not names:
        raise ArgumentError("figure() shows activations and gradients, and this frame has neither")
    panels = [panel for panel in _PANELS if any(site.kind == panel[0] for site in plain.sites)]
    figure = mpl.picture(width, 1.0 + 1.35 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (kind, draw) in zip(axes, panels, strict=True):
        numbers = _Layers(plain, names, kind)
        draw(axis, numbers, _thickness(width, len(names)))
        _mark_wrong(axis, numbers.wrong)
        axis.tick_params(labelsize=mpl.TINY)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.set_axisbelow(True)
        _legend_outside(axis)
    axes[-1].set_xlim(-0.6, len(names) - 0.4)
    mpl.names_along(axes[-1].xaxis, names, width - 1.0, rotation=90)
    axes[-1].set_xlabel("layer, in execution order", fontsize=mpl.SMALL)
    return figure


class _Layers:
    """The statistics of one kind, a number a layer; NaN where a layer has none."""

    def __init__(self, frame: Frame, names: Sequence[str], kind: str) -> None:
        self._frame = frame
        rows = {site.name: i for i, site in enumerate(frame.sites) if site.kind == kind}
        self._rows = np.array([rows.get(name, -1) for name in names])

    def __getitem__(self, stat: str) -> Floats:
        values = np.append(self._frame.stat(stat), np.nan)
        return np.asarray(values[self._rows], dtype=np.float64)

    @property
    def wrong(self) -> NDArray[np.bool_]:
        return np.asarray(self["nan_count"] + self["inf_count"] > 0)


# What is smaller than this part of the largest activation is shown near zero, so that the axis stays legible.
DECADES = 1e3


def _thickness(width: float, n: int) -> float:
    """Of a layer's bar in points: most of the room it has."""
    return float(np.clip(0.6 * (width - 1.2) * 72 / n, 0.5, 10.0))


def _draw_spread(axis: Axes, layers: _Layers, thickness: float) -> None:
    x = np.arange(len(layers["mean"]))
    low, high = layers["p01"], layers["p99"]
    told = "1st to 99th percentile"
    if not np.isfinite(low).any():
        low, high, told = layers["min"], layers["max"], "least to greatest"
    mean, std = layers["mean"], layers["std"]
    axis.vlines(x, low, high, color=mpl.LIGHT, linewidth=thickness, label=told)
    axis.vlines(x, mean - std, mean + std, color=mpl.DARK, linewidth=max(thickness / 2.5, 0.5), label="mean ± std")
    # The dot is all there is to see of a constant.
    axis.plot(x, mean, "o", color=mpl.DARK, markersize=float(np.clip(thickness / 2, 1.0, 3.5)), markeredgewidth=0)
    axis.plot(x, mean, "_", color="white", markersize=max(thickness / 2.5, 1.0), markeredgewidth=0.8)
    reach = np.maximum(np.abs(low), np.abs(high))
    if is_wide(reach):
        positive = reach[np.isfinite(reach) & (reach > 0)]
        least, most = max(float(positive.min()), float(positive.max()) / DECADES), float(positive.max())
        axis.set_yscale("symlog", linthresh=least)
        powers = 10.0 ** np.arange(np.ceil(np.log10(3 * least)), np.floor(np.log10(most)) + 1)
        axis.set_yticks([*-powers[::-1], 0, *powers], [f"{tick:g}" for tick in (*-powers[::-1], 0, *powers)])
    axis.set_ylabel("activation", fontsize=mpl.SMALL)


def _draw_gradients(axis: Axes, layers: _Layers, thickness: float) -> None:
    norms = layers["norm"]
    x = np.arange(len(norms))
    known = np.isfinite(norms) & (norms > 0)
    if is_wide(norms):
        axis.set_yscale("log")
    if not known.any():
        axis.set_yticks([])
    axis.plot(x[known], norms[known], "-", color=mpl.TEAL, linewidth=0.7, alpha=0.7)
    axis.plot(x[known], norms[known], "o", color=mpl.TEAL, markersize=float(np.clip(thickness, 1.2, 4.0)), label="norm")
    if (norms == 0).any():
        places = x[norms == 0]
        axis.plot(places, np.full(len(places), 0.03), "x", color=mpl.DARK, markersize=4, markeredgewidth=1.0,
                  transform=axis.get_xaxis_transform(), label="exactly zero")  # fmt: skip
    axis.set_ylabel("gradient norm", fontsize=mpl.SMALL)


def _draw_zeros(axis: Axes, layers: _Layers, thickness: float) -> None:
    share = 100 * layers["zero_fraction"]
    axis.vlines(np.arange(len(share)), 0, share, color=mpl.DARK, linewidth=thickness)
    axis.set_ylim(0, 104)
    axis.set_yticks([0, 50, 100])
    axis.set_ylabel("zeros (%)", fontsize=mpl.SMALL)


_PANELS = (("activation", _draw_spread), ("gradient", _draw_gradients), ("activation", _draw_zeros))


def _mark_wrong(axis: Axes, wrong: NDArray[np.bool_]) -> None:
    """A red band behind each layer with something not finite."""
    red = mpl.canvas().WRONG
    for n, place in enumerate(np.flatnonzero(wrong)):
        axis.axvspan(place - 0.5, place + 0.5, color=red, alpha=0.35, linewidth=0, zorder=0,
                     label="NaN or Inf inside" if n == 0 else None)  # fmt: skip


def _legend_outside(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=mpl.TINY, frameon=False,
                    borderaxespad=0.1, handlelength=1.2, columnspacing=1.0)  # fmt: skip


# --- Layers over steps ------------------------------------------------------------------------------------

MOST_COLUMNS = 600
_UNITS = {"zero_fraction": "share of zeros", "ratio": "norm / norm of the weight"}


def heat_map(history: History, stat: str = "std", kind: str = "gradient", width: float = 7.0) -> Figure:
    """One statistic of all places of a kind: a row a layer in execution order, a column a logged step."""
    grid = grid_of(history, stat, kind).thinned(MOST_COLUMNS)
    values = np.where(grid.wrong | ~np.isfinite(grid.values), np.nan, grid.values)
    height = float(np.clip(0.9 + 0.15 * len(grid.names), 1.6, mpl.TALLEST))
    figure = mpl.picture(width, height)
    axis = figure.subplots()
    scale = Scale.of(values)
    image = axis.imshow(values, aspect="auto", interpolation="nearest", cmap=mpl.canvas().colours(), norm=_norm(scale))
    mpl.names_along(axis.yaxis, grid.names, height - 0.7)
    _steps_along(axis, grid.steps.tolist(), width)
    bar = figure.colorbar(image, ax=axis, pad=0.02, aspect=30 if height > 3 else 15)
    bar.set_label(f"{kind.replace('_', ' ')} {_UNITS.get(stat, stat.replace('_', ' '))}", fontsize=mpl.SMALL)
    bar.ax.tick_params(labelsize=mpl.TINY)
    if grid.wrong.any():
        _draw_wrong(axis, grid.wrong)
    return figure


def _norm(scale: Scale) -> Normalize:
    from matplotlib.colors import LogNorm, Normalize  # noqa: PLC0415  an extra

    if scale.logarithmic:
        return LogNorm(scale.low, scale.high, clip=True)
    return Normalize(scale.low, scale.high if scale.high > scale.low else scale.low + 1.0)


def _steps_along(axis: Axes, steps: Sequence[int], width: float) -> None:
    most = max(int(width), 2)
    places = sorted({round(i * (len(steps) - 1) / (most - 1)) for i in range(most)})
    axis.set_xticks(places, [f"{steps[i]:,}" for i in places], fontsize=mpl.TINY)
    axis.set_xlabel("step", fontsize=mpl.SMALL)


def _draw_wrong(axis: Axes, wrong: NDArray[np.bool_]) -> None:
    """What is not finite: red over the map, and said below it."""
    overlay = np.zeros((*wrong.shape, 4))
    overlay[wrong] = (*mpl.canvas().WRONG, 1.0)
    axis.imshow(overlay, aspect="auto", interpolation="nearest")
    axis.plot([], [], "s", color=mpl.canvas().WRONG, markersize=5, label="NaN or Inf inside")
    _legend_outside(axis)


# --- Kept tensors -----------------------------------------------------------------------------------------

MOST_TILES = 64
LABEL_HEIGHT = 0.17


def image_grid(
    tensor: Any, most: int = MOST_TILES, *, sample: int = 0, width: float = 7.0, title: str | None = None
) -> Figure:
    """Feature maps [channels, height, width] or attention maps [heads, queries, keys] as tiles on one colour scale.

    Of a batch, [samples, ...], one `sample` is shown; of many maps the first `most`. The scale spans 99 % of the
    values; what is beyond it has the colour of its end.
    """
    maps = _maps(tensor, sample)
    if not (isinstance(most, int) and most >= 1):
        raise ArgumentError(f"most is the largest number of tiles, at least 1, not {most!r}")
    shown = maps[:most]
    columns = columns_of(len(shown), maps.shape[1] / maps.shape[2])
    tall, wide = maps.shape[1], maps.shape[2]
    tile = (width - 0.8) / columns
    gap = LABEL_HEIGHT / tile * wide  # in pixels of the maps, as everything on the axis
    rows = -(-len(shown) // columns)
    figure = mpl.picture(width, min(rows * (tile * tall / wide + LABEL_HEIGHT) + 0.4, mpl.TALLEST))
    axis = figure.subplots()
    scale, beyond = _range_of(shown)
    norm = _norm(scale)
    for place, values in enumerate(shown):
        left, top = (place % columns) * wide * 1.06, (place // columns) * (tall + gap)
        image = _tile(axis, values, norm, (left, top))
        axis.text(left + wide / 2, top - gap / 8, str(place), fontsize=mpl.TINY, ha="center", va="bottom")
    axis.set_xlim(0, columns * wide * 1.06 - wide * 0.06)
    axis.set_ylim(rows * (tall + gap) - gap, -gap)
    axis.set_axis_off()
    bar = figure.colorbar(image, ax=axis, pad=0.02, shrink=0.9, aspect=30, extend=beyond)
    bar.ax.tick_params(labelsize=mpl.TINY)
    told = [*([title] if title else []), *_left_out(shown, len(maps))]
    if told:
        figure.suptitle(printable("; ".join(told)).replace("$", r"\$"), fontsize=mpl.SMALL)
    return figure


def _left_out(shown: Floats, there_are: int) -> list[str]:
    fewer = [f"{len(shown)} of {there_are} maps"] if len(shown) < there_are else []
    return fewer + ([] if np.isfinite(shown).all() else ["red: NaN or Inf"])


def _maps(tensor: Any, sample: int) -> Floats:
    """[maps, height, width] of a tensor or array; no torch is needed to ask one for its numbers."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().double().numpy()
    try:
        array = np.asarray(tensor, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"image_grid shows a tensor of numbers, not {type(tensor).__name__}") from problem
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise ArgumentError(
            "image_grid shows [height, width], [channels, height, width] or [samples, channels, height, width], "
            f"not a tensor of shape {list(array.shape)}"
        )
    if array.ndim == 4:
        if not (isinstance(sample, int) and -len(array) <= sample < len(array)):
            raise ArgumentError(f"sample is one of the {len(array)} there are, counted from 0, not {sample!r}")
        array = array[sample]
    return array if array.ndim == 3 else array[None]


def _range_of(maps: Floats) -> tuple[Scale, str]:
    """The scale, and at which of its ends there is more ("neither", "min", "max", "both")."""
    known = maps[np.isfinite(maps)]
    low, high = np.quantile(known, [0.005, 0.995]) if len(known) else (0.0, 1.0)
    less, more = bool((known < low).any()), bool((known > high).any())
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return Scale(float(low), float(high), logarithmic=False), beyond[less, more]


def _tile(axis: Axes, values: Floats, norm: Normalize, corner: tuple[float, float]) -> Any:
    """A map with its upper left corner there; red shows through where it is not finite."""
    left, top = corner
    where = (left, left + values.shape[1], top + values.shape[0], top)
    if not np.isfinite(values).all():
        red = np.broadcast_to(mpl.canvas().WRONG, (*values.shape, 3))
        axis.imshow(red, interpolation="nearest", extent=where)
    known = np.where(np.isfinite(values), values, np.nan)
    return axis.imshow(known, norm=norm, cmap=mpl.canvas().colours(), interpolation="nearest", extent=where)
