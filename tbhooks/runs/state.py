"""Whether a run is still written to, from the times of its logged steps.

Files do not say how a training ended: a finished run, a failed one and a killed one are all "ended".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

State = Literal["empty", "running", "ended"]
# A logged step may take longer than usual, as one after an evaluation does.
PATIENCE, LEAST_SECONDS = 10.0, 60.0


def state_of(times: Sequence[float], now: float | None = None) -> State:
    """The state of a run.

    Args:
        times: when each logged step ended, in seconds since the epoch, in order.
        now: the time to compare with; the current time by default.

    Returns "running" if the newest step is no older than ten usual intervals between logged steps and than a minute,
    "ended" if it is older, and "empty" if no step was logged.

    """
    if not len(times):
        return "empty"
    usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    age = (time.time() if now is None else now) - times[-1]
    return "running" if age <= max(PATIENCE * usual, LEAST_SECONDS) else "ended"
