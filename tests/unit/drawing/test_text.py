"""Frames as text: what a reader looks for is there, in order, and odd frames do not break it."""

from __future__ import annotations

import math

import numpy as np
import torch

import tbhooks
from tbhooks.data.frame import Site
from tbhooks.drawing.text import number, printable, sparkline, table, trend
from tests.support.frames import make_frame
from tests.support.loops import forward, mlp, sgd, train


def test_the_table_shows_modules_in_execution_order_and_parameters() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
    lines = table(watching.latest).splitlines()
    first_words = [line.split()[0] for line in lines if line]
    modules, parameters = ["0", "1", "2", "(root)"], ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first_words == ["step", "module", *modules, "parameter", *parameters]
    assert f"{watching.latest['0', 'activation'].std:.3g}" in lines[3]


def test_a_table_of_one_kind_without_histograms_has_dashes_and_no_bars() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, kinds="gradient", histograms=False) as watching:
        train(model, 1)
    shown = table(watching.latest)
    assert "parameter" not in shown
    assert " - " in shown


def test_nan_is_shown_in_words() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        (forward(model) * math.nan).backward()
        sgd(model).step()
    assert "NaN/Inf" in table(watching.latest)


def test_the_bars_stand_where_the_numbers_are() -> None:
    model = torch.nn.Identity()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(torch.cat([torch.zeros(1), torch.full((100,), 9.0), torch.full((10,), 3.2), torch.full((1,), 10.0)]))
        watching.step()
    drawn = sparkline(watching.latest, "(root)", "activation", width=10)
    assert drawn.startswith("0 ")
    assert drawn.endswith(" 10")
    bars = drawn[2:-3]
    assert bars[0] != " "
    assert bars[1] == " "
    assert bars.index("█") in (8, 9)


def test_constants_are_said_in_words() -> None:
    model = torch.nn.Identity()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(torch.full((5,), 2.5))
        watching.step()
    assert sparkline(watching.latest, "(root)", "activation") == "all 2.5"


def test_a_trend_rises_with_its_numbers_and_marks_what_is_not_finite() -> None:
    fine = np.zeros(8, dtype=bool)
    assert trend(np.arange(8.0), fine, 8) == "▁▂▃▄▅▆▇█"
    assert trend(np.array([1.0, math.nan, 3.0]), np.array([False, True, False]), 3) == "▁!█"
    assert trend(np.array([1.0, math.nan, 3.0]), np.array([False] * 3), 3) == "▁ █"
    assert trend(np.full(5, 2.0), fine[:5], 5) == "▅▅▅▅▅"
    assert trend(np.full(5, math.nan), fine[:5], 5) == "     "
    assert trend(np.zeros(0), fine[:0], 5) == trend(np.ones(3), fine[:3], 0) == ""


def test_a_trend_of_positive_numbers_far_apart_is_logarithmic() -> None:
    assert trend(10.0 ** np.arange(8), np.zeros(8, dtype=bool), 8) == "▁▂▃▄▅▆▇█"
    assert trend(np.array([0.0, 1e-4, 1.0]), np.zeros(3, dtype=bool), 3) == "▁▁█"


def test_a_trend_put_together_keeps_the_value_furthest_from_zero_and_every_mark() -> None:
    values, wrong = np.zeros(1000), np.zeros(1000, dtype=bool)
    values[501], wrong[901] = -5.0, True
    assert trend(values, wrong, 10) == "█████▁███!"


def test_numbers_and_names_are_written_so_that_they_can_be_read() -> None:
    assert number(0.1234) == "0.123"
    assert number(0.5, "zero_fraction") == "50%"
    assert number(math.nan, "zero_fraction", 3) == "nan (3 NaN/Inf)"
    assert printable("a\x1b[31m\n\u202eé") == "a\\x1b[31m\\n\\u202eé"


def test_a_table_of_hostile_names_has_no_control_characters() -> None:
    shown = table(make_frame(0, {Site("a\x1b[2J\nb", "activation"): [1.0]}))
    assert "\x1b" not in shown
    assert "a\\x1b[2J\\nb" in shown
