"""What the figures share: sizes, colours, names beside an axis, and the way to matplotlib where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import ROOT
from tbhooks.drawing.text import printable
from tbhooks.views.notebook.html import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL, TINY = 8.0, 6.5
"""Sizes of letters in points: they read at the width of a column."""
TALLEST = 9.0
LONGEST_NAME = 30
DARK, TEAL, LIGHT = "#3b518b", "#21908d", "#a9c9d6"


def canvas() -> Any:
    """The file that needs matplotlib; says how to get it where it is missing."""
    try:
        return importlib.import_module("tbhooks.views.figures.canvas")
    except ImportError as missing:
        raise ArgumentError('figures need matplotlib: pip install "tbhooks[plot]"') from missing


def picture(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    if not (isinstance(width, int | float) and 1 <= width <= 100):
        raise ArgumentError(f"width is in inches, between 1 and 100, not {width!r}")
    figure: Figure = canvas().Picture(figsize=(width, height), layout="constrained", dpi=canvas().SHOWN_DPI)
    return figure


def labels(names: Sequence[str]) -> list[str]:
    """Names that fit beside an axis: what all begin with goes first, then the letters of long words; numbers stay."""
    parts = [printable(name).split(".") for name in names if name != ROOT]
    shared = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), 0)
    return [_short(printable(name), shared) for name in names]


def _short(name: str, shared: int) -> str:
    """Nothing in it is taken for a formula."""
    words = name.split(".")
    words = words if len(words) <= shared or len(name) <= LONGEST_NAME else ["…" + words[shared], *words[shared + 1 :]]
    fitting = (".".join(word[:letters] for word in words) for letters in (99, 12, 10, 8, 6, 5, 4, 3))
    chosen = next((short for short in fitting if len(short) <= LONGEST_NAME), ".".join(words))
    return shortened(chosen, LONGEST_NAME).replace("$", r"\$")


def every(names: Sequence[str], room: float) -> int:
    """Which of the names have room for a line each, in inches: every one, every second, ..."""
    return -(-len(names) // max(int(room / (TINY * 1.25 / 72)), 2))


def names_along(axis: Any, names: Sequence[str], room: float, **how: Any) -> None:
    """As many names as fit beside an axis, evenly chosen."""
    places, short = range(0, len(names), every(names, room)), labels(names)
    axis.set_ticks(list(places), [short[i] for i in places], fontsize=TINY, **how)
