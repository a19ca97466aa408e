"""Frames as text: what a reader looks for is there, in order, and odd frames do not break it."""

from __future__ import annotations

import math

import torch

import tbhooks
from tbhooks.render import sparkline, table
from tests.loops import forward, mlp, sgd, train


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
