"""Figures show the frame's own numbers, are legible at the width of a column, and touch nothing global."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.text import Text

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame, Site
from tbhooks.data.history import History
from tbhooks.drawing.heatmap import NOT_FINITE
from tbhooks.views import figures
from tbhooks.views.figures import mpl as figure_parts
from tests.support.frames import make_frame
from tests.support.slow import slow

RED = tuple(channel / 255 for channel in NOT_FINITE)
LONG = [f"transformer.encoder.layers.{i // 6}.attention.part{i % 6}.output_projection" for i in range(60)]


def a_frame(names: list[str], spread: float = 0.0, *, broken: str | None = None) -> Frame:
    """Activations and gradients of layers whose sizes differ by `spread` decades; one may have a NaN."""
    rng = np.random.default_rng(0)
    data: dict[Site, Any] = {}
    for kind in ("activation", "gradient"):
        for i, name in enumerate(names):
            values = rng.normal(0, 10 ** (spread * i / max(len(names) - 1, 1)), 200) * (rng.random(200) > 0.4)
            data[Site(name, kind)] = [*values, math.nan] if name == broken else values
    return make_frame(3, data)


def a_history(*, broken: bool = False, steps: int = 8) -> History:
    history = History()
    for step in range(steps):
        frame = a_frame(["a", "b.c", "d"], 3.0, broken="d" if broken and step > 4 else None)
        history.append(replace(frame, step=10 * step))
    return history


def drawn(figure: Figure) -> Figure:
    FigureCanvasAgg(figure).draw()
    return figure


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in drawn(figure).findobj(Text) if text.get_visible() and text.get_text()]


ALL = {
    "frame": lambda names, width: a_frame(names, 3.0, broken=names[-1]).figure(width),
    "ridgeline, straight": lambda names, width: a_frame(names).ridgeline(width=width),
    "ridgeline, by octaves": lambda names, width: a_frame(names, 3.0, broken=names[0]).ridgeline("gradient", width),
    "history": lambda names, width: history_of(names).figure(width=width),
    "image grid": lambda names, width: figures.image_grid(
        np.random.default_rng(0).normal(size=(len(names), 5, 7)), width=width
    ),
}


def history_of(names: list[str]) -> History:
    history = History()
    for step in (0, 100, 100_000):
        history.append(replace(a_frame(names, 3.0), step=step))
    return history


@pytest.mark.parametrize("names", [["fc1", "relu", "fc2"], LONG], ids=["3 layers", "60 layers of long names"])
@pytest.mark.parametrize("width", [3.4, pytest.param(7.0, marks=slow("there is more room than in 3.4 inches"))])
@pytest.mark.parametrize("what", ALL)
def test_no_word_is_cut_off_and_no_name_covers_another(what: str, width: float, names: list[str]) -> None:
    figure = drawn(ALL[what](names, width))
    assert figure.get_figwidth() == width
    assert figure.get_figheight() <= figure_parts.TALLEST + 1
    box = figure.get_tightbbox()
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < figure.get_figheight() + 0.02
    for axis in (axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)):
        labels = [label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)]
        boxes = [label.get_window_extent() for label in labels if label.get_visible() and label.get_text()]
        for one, other in pairwise(boxes):
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            along = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert across < 2 or along < 2, [label.get_text() for label in labels]


# --- One pass ----------------------------------------------------------------------------------------


def test_a_frames_figure_shows_spread_gradients_and_zeros_of_every_layer() -> None:
    frame = a_frame(["fc1", "relu", "fc2"])
    spread, norms, zeros = drawn(frame.figure()).axes
    assert [label.get_text() for label in zeros.get_xticklabels()] == ["fc1", "relu", "fc2"]
    assert [axis.get_ylabel() for axis in (spread, norms, zeros)] == ["activation", "gradient norm", "zeros (%)"]
    bars = [path.vertices[:, 1].tolist() for path in spread.collections[0].get_paths()]
    readings = [frame[name, "activation"] for name in ("fc1", "relu", "fc2")]
    assert bars == [[reading.p01, reading.p99] for reading in readings]
    inner = [path.vertices[:, 1].tolist() for path in spread.collections[1].get_paths()]
    assert inner == [[reading.mean - reading.std, reading.mean + reading.std] for reading in readings]
    assert norms.lines[1].get_ydata().tolist() == [frame[name, "gradient"].norm for name in ("fc1", "relu", "fc2")]
    tops = [path.vertices[1, 1] for path in zeros.collections[0].get_paths()]
    assert tops == [100 * reading.zero_fraction for reading in readings]


def test_wide_numbers_are_on_a_logarithm_and_narrow_ones_are_not() -> None:
    spread, norms, _ = a_frame(["a", "b", "c"], 4.0).figure().axes
    assert (spread.get_yscale(), norms.get_yscale()) == ("symlog", "log")
    spread, norms, _ = a_frame(["a", "b", "c"]).figure().axes
    assert (spread.get_yscale(), norms.get_yscale()) == ("linear", "linear")


def test_a_layer_that_is_not_finite_has_a_red_band_and_words() -> None:
    figure = a_frame(["a", "b", "c"], broken="b").figure()
    (band,) = figure.axes[0].patches
    assert tuple(band.get_facecolor()[:3]) == pytest.approx(RED)
    assert band.get_x() < 1 < band.get_x() + band.get_width()
    assert "NaN or Inf inside" in words(figure)
    assert "NaN or Inf inside" not in words(a_frame(["a", "b", "c"]).figure())


def test_a_gradient_of_exactly_zero_is_marked_and_not_lost_on_a_logarithm() -> None:
    data = {Site("a", "activation"): [1.0, 2.0], Site("a", "gradient"): [0.0, 0.0], Site("b", "gradient"): [1e-3, 3.0]}
    assert "exactly zero" in words(make_frame(0, data).figure())


def test_a_pass_without_gradients_histograms_or_anything_finite_is_drawn_all_the_same() -> None:
    assert len(make_frame(0, {Site("a", "activation"): [1.0, 2.0]}).figure().axes) == 2
    without = make_frame(0, {Site("a", "activation"): [1.0, 2.0]}, histograms=False).figure()
    assert "min to max" in words(without)
    drawn(make_frame(0, {Site("a", "activation"): [math.nan] * 3, Site("a", "gradient"): [math.inf]}).figure())
    evaluated = make_frame(0, {Site("a", "eval.activation"): [1.0, 2.0]})
    assert "a" in words(evaluated.figure())


def test_a_frame_of_parameters_alone_has_no_figure_and_says_so() -> None:
    with pytest.raises(ArgumentError, match="neither"):
        make_frame(0, {Site("w", "weight"): [1.0]}).figure()


# --- Ridgelines --------------------------------------------------------------------------------------


def test_a_ridge_peaks_where_the_numbers_are_and_zeros_are_written_beside_it() -> None:
    rng = np.random.default_rng(0)
    high = np.concatenate([rng.normal(5, 0.1, 300), np.zeros(100)])
    figure = make_frame(
        0, {Site("low", "activation"): rng.normal(-5, 0.1, 300), Site("high", "activation"): high}
    ).ridgeline()
    (axis,) = figure.axes
    for ridge, middle in zip(axis.collections, (-5.0, 5.0), strict=True):
        vertices = ridge.get_paths()[0].vertices
        peak = vertices[vertices[:, 1].argmin(), 0]
        assert peak == pytest.approx(middle, abs=1.3), "to half an octave"
    assert "25% zeros" in words(figure)
    assert "without zeros" in axis.get_xlabel()


def test_layers_of_many_sizes_share_an_axis_of_octaves() -> None:
    (axis,) = drawn(a_frame(["a", "b", "c"], 5.0).ridgeline()).axes
    assert "half an octave" in axis.get_xlabel()
    ticks = [float(label.get_text()) for label in axis.get_xticklabels()]
    assert ticks == sorted(ticks)
    assert 0 in ticks
    (axis,) = a_frame(["a", "b", "c"]).ridgeline().axes
    assert "octave" not in axis.get_xlabel()


def test_the_ridges_of_gradients_come_in_forward_order_and_nan_is_red() -> None:
    data = {Site(name, "activation"): [1.0, 2.0] for name in ("first", "last")}
    data |= {Site("last", "gradient"): [1.0, 2.0], Site("first", "gradient"): [1.0, 3.0, math.nan]}
    figure = drawn(make_frame(0, data).ridgeline("gradient"))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["first", "last"]
    (message,) = [text for text in figure.axes[0].texts if text.get_text() == "1 NaN/Inf"]
    assert message.get_color() == pytest.approx(RED)


def test_a_ridgeline_that_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'gradient'"):
        a_frame(["a"]).ridgeline("gradeint")
    with pytest.raises(ArgumentError, match="needs histograms"):
        make_frame(0, {Site("a", "activation"): [1.0]}, histograms=False).ridgeline()
    drawn(make_frame(0, {Site("a", "activation"): [0.0, 0.0], Site("b", "activation"): [math.nan]}).ridgeline())


# --- Layers by steps ---------------------------------------------------------------------------------


def test_a_heat_map_has_the_numbers_of_the_series() -> None:
    history = a_history()
    axis, bar = drawn(history.figure("std", "gradient")).axes
    shown = axis.images[0].get_array()
    for row, name in enumerate(("a", "b.c", "d")):
        assert shown[row].tolist() == history.series(name, "gradient", "std")[1].tolist()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b.c", "d"]
    assert [label.get_text() for label in axis.get_xticklabels()][:1] == ["0"]
    assert [label.get_text() for label in axis.get_xticklabels()][-1:] == ["70"]
    assert bar.get_ylabel() == "gradient std"
    assert isinstance(axis.images[0].norm, LogNorm)


def test_a_heat_map_marks_what_is_not_finite_in_red_and_words() -> None:
    figure = a_history(broken=True).figure("std", "activation")
    overlay = figure.axes[0].images[1].get_array()
    assert overlay.shape == (3, 8, 4)
    assert (overlay[..., 3] > 0).tolist() == [[False] * 8, [False] * 8, [False] * 5 + [True] * 3]
    assert tuple(overlay[2, 7, :3]) == pytest.approx(RED)
    assert "NaN or Inf inside" in words(figure)
    assert len(a_history().figure("std", "activation").axes[0].images) == 1


def test_a_heat_map_of_one_step_or_one_value_is_drawn() -> None:
    drawn(a_history(steps=1).figure("mean", "activation"))
    constant = History()
    constant.append(make_frame(0, {Site("a", "activation"): [2.0, 2.0]}))
    drawn(constant.figure("mean", "activation"))


def test_a_heat_map_that_cannot_be_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ArgumentError, match="'norm'"):
        a_history().figure("nrom")
    with pytest.raises(ArgumentError, match="there is none"):
        History().figure()


# --- Kept tensors ------------------------------------------------------------------------------------


def tiles(figure: Figure) -> list[Any]:
    """The maps in the order they stand in, top to bottom and left to right."""
    images = [image for image in figure.axes[0].images if image.get_array().ndim == 2]
    placed = sorted(images, key=lambda image: (image.get_extent()[3], image.get_extent()[0]))
    return [np.asarray(image.get_array()) for image in placed]


def test_an_image_grid_shows_every_map_of_one_sample() -> None:
    batch = torch.randn(2, 6, 4, 5)
    assert np.array_equal(tiles(figures.image_grid(batch)), batch[0].double())
    assert np.array_equal(tiles(figures.image_grid(batch, sample=1)), batch[1].double())
    assert np.array_equal(tiles(figures.image_grid(batch[0], most=4)), batch[0, :4].double())
    assert np.array_equal(tiles(figures.image_grid(batch[0, 0].bfloat16())), batch[0, :1].bfloat16().double())
    attention = torch.softmax(torch.randn(8, 12, 12, requires_grad=True), dim=-1)
    assert len(tiles(figures.image_grid(attention))) == 8


def test_an_image_grid_says_what_it_leaves_out_and_what_is_not_finite() -> None:
    maps = torch.randn(9, 4, 4)
    maps[0, 1, 2] = math.nan
    figure = figures.image_grid(maps, most=4, title="conv1 of $x")
    assert figure.get_suptitle() == r"conv1 of \$x; 4 of 9 maps; red: NaN or Inf"
    assert tuple(figure.axes[0].images[0].get_array()[1, 2]) == pytest.approx(RED)
    assert np.ma.getmaskarray(np.ma.masked_invalid(tiles(figure)[0]))[1, 2]
    drawn(figures.image_grid(torch.full((2, 3, 3), math.nan)))
    drawn(figures.image_grid(torch.ones(2, 3, 3)))


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.zeros(4), {}, "shape [4]"),
        (torch.zeros(1, 2, 3, 4, 5), {}, "shape [1, 2, 3, 4, 5]"),
        (torch.zeros(0, 3, 3), {}, "shape [0, 3, 3]"),
        (["a"], {}, "not list"),
        (torch.zeros(2, 1, 3, 3), {"sample": 2}, "the 2 samples"),
        (torch.zeros(1, 3, 3), {"most": 0}, "must be an integer >= 1"),
        (torch.zeros(1, 3, 3), {"width": 0}, "inches"),
    ],
)
def test_an_image_grid_of_something_else_is_refused_in_words(
    tensor: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        figures.image_grid(tensor, **options)


# --- Names, and what is left alone -------------------------------------------------------------------


def test_labels_fit_and_stay_different() -> None:
    short = figure_parts.labels(LONG)
    assert max(map(len, short)) <= figure_parts.LONGEST_NAME
    assert len(set(short)) == len(LONG)
    assert short[7] == "…1.attention.part1.output_pro"
    assert figure_parts.labels(["encoder.0", "encoder.1", "(root)"]) == ["encoder.0", "encoder.1", "(root)"]
    assert figure_parts.labels(["a$b$", "x" * 5000, "a\nb"])[0] == r"a\$b\$"
    assert len(figure_parts.labels(["y" * 5000])[0]) <= figure_parts.LONGEST_NAME


def test_a_figure_shows_itself_without_pyplot_and_changes_no_setting() -> None:
    program = """
import sys
import matplotlib
def settings():  # reading the backend would choose one
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if not name.startswith("backend")}
before = settings()
import numpy as np
from tbhooks import Frame, Site
row = [2, 1, 2, 0, 2, 1, 0, 0, 0.0]
frame = Frame(0, 0.0, 0, (Site("a", "activation"),), np.array([row]), np.zeros((1, 0), int))
assert frame.figure()._repr_png_().startswith(b"\\x89PNG")
print("matplotlib.pyplot" in sys.modules, "torch" in sys.modules, settings() == before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "False False True\n"), done.stderr


def test_missing_matplotlib_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("tbhooks.views.figures")]:
        monkeypatch.delitem(sys.modules, name)
    for draw in (a_frame(["a"]).figure, a_frame(["a"]).ridgeline, a_history().figure):
        with pytest.raises(ArgumentError, match=re.escape('pip install "tbhooks[plot]"')):
            draw()


def test_the_colours_are_those_of_the_pages() -> None:
    from tbhooks.drawing.heatmap import LEVELS, PALETTE

    palette = figure_parts.COLOURS
    assert palette.N == LEVELS
    assert [round(255 * channel) for channel in palette(0)[:3]] == list(PALETTE[:3])
    assert mpl.colors.to_rgb(figure_parts.RED) == pytest.approx(RED)
