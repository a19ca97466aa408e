"""Whether the loss or the gradient norm leaves its own recent range: a robust z-score for jumps, a CUSUM for drifts.

Plain numbers of the host, in the background thread. No torch.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

# The range is that of so many steps; before the first so many nothing is judged.
WINDOW, FEWEST = 128, 48
# A jump: so many spreads above the median, and so many times the median's distance from zero.
JUMP_SPREADS, JUMP_FACTOR = 12.0, 4.0


class _Series:
    """The recent values of one number."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._was_finite = True
        self._is_above = False

    def observe(self, step: int, value: float) -> str | None:
        """Takes the value of the next step. Returns why a dump is due, or None."""
        is_finite = math.isfinite(value)
        was_finite, self._was_finite = self._was_finite, is_finite
        if not is_finite:
            return f"the {self._name} of step {step} is not finite" if was_finite else None
        reason = self._jump(step, value) if len(self._recent) >= FEWEST else None
        self._recent.append(value)
        return reason

    def _jump(self, step: int, value: float) -> str | None:
        recent = np.array(self._recent)
        median = float(np.median(recent))
        spread = 1.4826 * float(np.median(np.abs(recent - median)))
        limit = max(median + JUMP_SPREADS * spread, JUMP_FACTOR * abs(median), float(recent.max()) * 1.5)
        was_above, self._is_above = self._is_above, value > limit
        if not self._is_above or was_above:
            return None
        return f"the {self._name} of step {step} is {value:.4g}; its median over {len(recent)} steps was {median:.4g}"


class RangeMonitor:
    """The loss and the gradient norm of a run, step by step."""

    def __init__(self) -> None:
        self._loss, self._norm = _Series("loss"), _Series("gradient norm")

    def observe(self, step: int, loss: float | None, norm: float | None) -> str | None:
        """Takes the numbers of the next step. Returns why a dump is due, or None."""
        reasons = [
            None if loss is None else self._loss.observe(step, loss),
            None if norm is None else self._norm.observe(step, norm),
        ]
        found = [reason for reason in reasons if reason is not None]
        return "; ".join(found) or None
