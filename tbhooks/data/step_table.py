"""The numbers of one logged step by site, before statistics are derived from them: of one rank, or of all merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import stats
from tbhooks.data.frame import Site
from tbhooks.data.stats import Counts, Floats

Whole = NDArray[np.int64]

UNKNOWN_PIECE = (-1, 0)
"""Of an output that says nothing about how it is spread: every rank's is its own, unless they are all the same."""
WHOLE = (0, 1)
"""Of a parameter that every rank has all of."""
OF_PARAMETERS = ("weight", "weight_gradient", "update")
RANKS = "train.ranks"
"""How many ranks a frame's numbers are of."""


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers of a logged step by site, before anything is derived from them."""

    step: int
    sites: Sequence[Site] = ()
    values: Floats = field(default_factory=lambda: stats.empty_rows(0))
    counts: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    pieces: Whole = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Of each site, which piece of the whole it is, and of how many."""
    scalars: dict[str, float] = field(default_factory=dict)
    earlier: dict[int, dict[str, float]] = field(default_factory=dict)
    group: int = 0
    """The lowest rank of those that work on the same batch."""


@dataclass(frozen=True, eq=False)
class Merged:
    """The numbers of all ranks, and how far they lie apart."""

    table: Table
    spreads: Floats
    notes: tuple[str, ...] = ()
    is_whole: bool = True
    """Whether no piece of a parameter is missing."""
