"""Which steps are logged, and which of those have histograms: decided by their numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

# Histograms of each of the first logged steps, then half as often with every doubling.
HISTOGRAMS_IN_FULL = 100


def thinned(logged: int, in_full: int) -> bool:
    """Whether the n-th logged step, counted from 0, is chosen: all of the first `in_full`, then half as many with every
    doubling.
    """
    doublings = (logged // in_full).bit_length()
    return logged % (1 << doublings) == 0


@dataclass(frozen=True)
class Schedule:
    """Which steps are logged, and which of those have histograms."""

    every: int
    histograms: bool | int

    def logs(self, step: int) -> bool:
        return step % self.every == 0

    def takes_histograms(self, logged: int) -> bool:
        """Whether the n-th logged step has histograms, counted from 0."""
        if self.histograms is True:
            return thinned(logged, HISTOGRAMS_IN_FULL)
        return self.histograms is not False and logged % self.histograms == 0
