"""Which steps are logged, and which of those have histograms: by their numbers (`every`), and in bursts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tbhooks.capture.rank_context import RankContext

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


class Bursts:
    """Consecutive steps that are logged in addition to the schedule (`Watch.burst`).

    Any thread may ask for a burst. The training thread begins it when a step begins, so that the answer of `logs` for
    a step that has begun never changes.
    """

    def __init__(self) -> None:
        self._asked: deque[int] = deque()
        self._first = self._stop = 0
        self.is_on_trial = False
        """Whether the burst began in the middle of a step: its first forward may have been missed."""

    def ask(self, steps: int) -> None:
        """Asks for a burst of so many steps. A running burst is made longer if it would end before."""
        self._asked.append(steps)

    def begin(self, step: int) -> None:
        """Begins what was asked for with this step."""
        steps = 0
        while self._asked:
            steps = max(steps, self._asked.popleft())
        if steps:
            self._first = self._first if self.logs(step) else step
            self._stop = max(self._stop, step + steps)

    def postpone(self) -> None:
        """Begins the burst one step later: its first step could not be recorded from its beginning."""
        self._first, self._stop, self.is_on_trial = self._first + 1, self._stop + 1, False

    def logs(self, step: int) -> bool:
        return self._first <= step < self._stop


class LoggedSteps:
    """Which steps this process records: those of the schedule, and those of bursts."""

    def __init__(self, schedule: Schedule, bursts: Bursts, context: RankContext) -> None:
        self._schedule, self._bursts, self._context = schedule, bursts, context

    def logs(self, step: int) -> bool:
        """Whether this process records the step. Ranks other than 0 may have nothing to do."""
        group = self._context.rank_group
        is_over = self._context.rank != 0 and group is not None and group.is_over
        is_chosen = self._schedule.logs(step) or self._bursts.logs(step)
        return is_chosen and not is_over and not self._context.rank_has_changed

    def is_extra(self, step: int) -> bool:
        """Whether the step is logged only because of a burst."""
        return not self._schedule.logs(step)

    def takes_histograms(self, step: int, logged: int) -> bool:
        """Whether the step has histograms; `logged` steps were logged before it. Those of a burst have them."""
        if self.is_extra(step):
            return self._schedule.histograms is not False
        return self._schedule.takes_histograms(logged)
