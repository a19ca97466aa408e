"""The statistics of one logged step as a table with one row per site: of one rank, or of all ranks merged.

A step is in this form between the device-to-host copy and the `Frame`, where ranks exchange and merge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import checksums, stats
from tbhooks.data.artifacts.samples import NO_SAMPLES, Samples
from tbhooks.data.checksums import Checksums
from tbhooks.data.frame import OPTIMIZER_KINDS, OPTIMIZER_PARTS, Site
from tbhooks.data.stats import Counts, Floats

Integers = NDArray[np.int64]

UNKNOWN_SHARD = (-1, 0)
"""The shard of an output. Nothing says how it is sharded: each rank has its own, unless all of them are equal."""
UNSHARDED = (0, 1)
"""The shard of a parameter that every rank holds as a whole."""
PARAMETER_KINDS = ("weight", "weight_gradient", "update", *OPTIMIZER_KINDS, *OPTIMIZER_PARTS)
RANKS = "train.ranks"
"""The scalar that says how many ranks a frame was merged from."""


@dataclass(frozen=True, eq=False)
class StepTable:
    """One logged step of one rank, or of all ranks merged."""

    step: int
    sites: Sequence[Site] = ()
    values: Floats = field(default_factory=lambda: stats.empty_rows(0))
    counts: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    shards: Integers = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """For each site the index of its shard, and the number of shards."""
    scalars: dict[str, float] = field(default_factory=dict)
    earlier: dict[int, dict[str, float]] = field(default_factory=dict)
    """Scalars of earlier steps, which were logged after those had been submitted."""
    group: int = 0
    """The lowest of the ranks that work on the same batch."""
    metrics: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The metrics, by the part of their tags before the slash: their kind, and how ranks are merged ("mean", ...)."""
    samples: Samples = NO_SAMPLES
    """The samples that the user has shown."""
    checksums: Checksums = field(default_factory=lambda: checksums.empty(0))
    """Of each site, or empty if there are none."""

    def with_rows(self, sites: Sequence[Site], values: Floats) -> StepTable:
        """Returns the table with more rows, without histograms. Ranks merge them as they merge those of outputs."""
        return replace(
            self, sites=[*self.sites, *sites], values=np.concatenate([self.values, values]),
            counts=np.concatenate([self.counts, np.zeros((len(sites), self.counts.shape[1]), np.int64)]),
            shards=np.concatenate([self.shards, np.full((len(sites), 2), UNKNOWN_SHARD)]),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MergedStep:
    """One logged step of all ranks, and how far the ranks differ."""

    table: StepTable
    spreads: Floats
    notes: tuple[str, ...] = ()
    is_whole: bool = True
    """False if a shard of a parameter is missing."""
