"""Whether the loss or the gradient norm leaves its own recent range: a robust z-score for jumps, a CUSUM for drifts.

Plain numbers of the host, in the background thread. No torch. The limits are chosen so that normal trainings
(`tests/clinic/normal.py`) stay inside: gradient norms of transformers jump to twenty times their median now and then.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

# The range is that of so many steps; before the first so many nothing is judged.
WINDOW, FEWEST = 128, 48
# A jump is so many spreads above the median, and so many times the median.
JUMP_SPREADS = 12.0
LOSS_FACTOR, NORM_FACTOR = 4.0, 100.0
# A gradient norm that jumps less, in a step whose loss is so many spreads above its median.
NORM_FACTOR_WITH_LOSS, LOSS_SPREADS = 8.0, 6.0
# A drift is judged by medians of blocks: against the lowest of the last ones, each block adds its distance in spreads,
# less an allowance, to a sum (CUSUM) that must stay below the limit. The median must also have grown by a factor.
BLOCK, BLOCKS = 16, 12
ALLOWANCE, CUSUM_LIMIT, MOST_A_BLOCK = 3.0, 24.0, 10.0
LOSS_DRIFT, NORM_DRIFT = 2.0, 20.0


class _Series:
    """The recent values of one number."""

    def __init__(self, name: str, factor: float, drift: float) -> None:
        self._name, self._factor, self._drift_factor = name, factor, drift
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._was_finite = True
        self._was_above = False
        self.distance = 0.0
        """How many spreads the newest value is above the median of those before it."""
        self.ratio = 1.0
        """How many times that median it is."""
        self._block: list[float] = []
        self._blocks: deque[tuple[float, float]] = deque(maxlen=BLOCKS)
        """Median and spread of each block."""
        self._sum = 0.0

    def observe(self, step: int, value: float) -> str | None:
        """Takes the value of the next step. Returns why a dump is due, or None."""
        is_finite = math.isfinite(value)
        was_finite, self._was_finite = self._was_finite, is_finite
        if not is_finite:
            return f"the {self._name} of step {step} is not finite" if was_finite else None
        reason = self._jump(step, value) if len(self._recent) >= FEWEST else None
        self._recent.append(value)
        return self._drift(step, value) if reason is None else reason

    def _jump(self, step: int, value: float) -> str | None:
        recent = np.array(self._recent)
        median, spread = _center(recent)
        self.distance = (value - median) / max(spread, 1e-12)
        self.ratio = value / median if median > 0 else 1.0
        limit = max(median + JUMP_SPREADS * spread, self._factor * abs(median), 1.5 * float(recent.max()))
        was_above, self._was_above = self._was_above, value > limit
        if was_above or not self._was_above:
            return None
        return self.words(step, value)

    def words(self, step: int, value: float) -> str:
        """The value of a step, and what was usual before."""
        median = float(np.median(list(self._recent)[:-1] or [value]))
        return f"the {self._name} of step {step} is {value:.4g}; its median before was {median:.4g}"

    def _drift(self, step: int, value: float) -> str | None:
        self._block.append(value)
        if len(self._block) < BLOCK:
            return None
        median, spread = _center(np.array(self._block))
        self._block = []
        lowest, its_spread = min(self._blocks, default=(median, spread))
        self._blocks.append((median, spread))
        distance = (median - lowest) / max(its_spread, 0.02 * abs(lowest), 1e-12)
        self._sum = max(0.0, self._sum + min(distance - ALLOWANCE, MOST_A_BLOCK))
        if self._sum <= CUSUM_LIMIT or median <= self._drift_factor * abs(lowest):
            return None
        self._sum = 0.0
        self._blocks.clear()
        return f"the {self._name} has grown until step {step}: its median is {median:.4g} and was {lowest:.4g}"


def _center(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    """The median, and the spread as a robust estimate of the standard deviation."""
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))


class RangeMonitor:
    """The loss and the gradient norm of a run, step by step."""

    def __init__(self) -> None:
        self._loss = _Series("loss", LOSS_FACTOR, LOSS_DRIFT)
        self._norm = _Series("gradient norm", NORM_FACTOR, NORM_DRIFT)

    def observe(self, step: int, loss: float | None, norm: float | None) -> str | None:
        """Takes the numbers of the next step. Returns why a dump is due, or None."""
        reasons = [
            None if loss is None else self._loss.observe(step, loss),
            None if norm is None else self._norm.observe(step, norm),
        ]
        found = [reason for reason in reasons if reason is not None]
        if not found and loss is not None and norm is not None:
            is_high = self._loss.distance > LOSS_SPREADS and self._norm.distance > JUMP_SPREADS
            if is_high and self._norm.ratio > NORM_FACTOR_WITH_LOSS:
                found = [self._norm.words(step, norm)]
        return "; ".join(found) or None
