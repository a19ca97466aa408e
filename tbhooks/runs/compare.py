"""Where two runs diverge: the first step at which they differ by more than their own noise, and what differs most.

Runs are compared at the steps that both have logged. The noise is the usual change of a value from one logged step to
the next, so that two runs of the same training with different batches do not diverge at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.stats import Floats
from tbhooks.runs.report_data import own_scalars, run_grids
from tbhooks.runs.run import Run

SHARE = 0.10
# Four times the usual change at three consecutive logged steps is no coincidence.
NOISES, IN_A_ROW = 4.0, 3
MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """How one value differs: since which step (None: never beyond noise), and by how much where it differs most."""

    what: str
    parted: int | None
    at: int
    first: float
    second: float
    share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared; `differences` has everything that diverged, the largest difference first."""

    runs: tuple[str, str]
    common_steps: int
    parted: int | None
    what_parted: tuple[str, ...]
    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(first: Run, second: Run) -> Comparison:
    """Compares the scalars and the main statistics of every site."""
    one, two = dict(_series(first)), dict(_series(second))
    both = [what for what in one if what in two]
    differences = [difference for what in both if (difference := _difference(what, one[what], two[what])) is not None]
    parted = [difference for difference in differences if difference.parted is not None]
    steps = [difference.parted for difference in parted if difference.parted is not None]
    start = min(steps, default=None)
    common = {step for what in both for step in _common(one[what], two[what])[0].tolist()}
    return Comparison(
        (str(first.directory), str(second.directory)), len(common), start,
        tuple(difference.what for difference in parted if difference.parted == start),
        tuple(sorted(parted, key=lambda difference: -difference.share)),
        tuple(what for what in one if what not in two), tuple(what for what in two if what not in one),
    )  # fmt: skip


Points = tuple[NDArray[np.int64], Floats]


def _series(run: Run) -> Iterator[tuple[str, Points]]:
    for tag, series in own_scalars(run).items():
        yield tag, _last_of_each_step(series.steps, series.values)
    for grid in run_grids(run):
        for name, values, seen in zip(grid.names, grid.values, grid.seen, strict=True):
            yield f"{grid.kind}.{grid.stat}/{name}", (grid.steps[seen], values[seen])


def _last_of_each_step(steps: NDArray[np.int64], values: Floats) -> Points:
    last = np.append(np.diff(steps) > 0, True)
    return steps[last], values[last]


def _common(one: Points, two: Points) -> tuple[NDArray[np.int64], Floats, Floats]:
    steps, left, right = np.intersect1d(one[0], two[0], assume_unique=True, return_indices=True)
    return steps, one[1][left], two[1][right]


def _difference(what: str, one: Points, two: Points) -> Difference | None:
    steps, left, right = _common(one, two)
    if not len(steps):
        return None
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(left - right)
        larger = np.maximum(np.abs(left), np.abs(right))
        beyond = apart > SHARE * larger + NOISES * _noise(left, right)
        share = np.where(larger > 0, apart / larger, 0.0)
    only_one_finite = np.isfinite(left) != np.isfinite(right)
    share[only_one_finite] = np.inf
    parted = _first_lasting(beyond, only_one_finite)
    worst = int(np.nanargmax(np.where(np.isnan(share), -1.0, share)))
    return Difference(
        what, None if parted is None else int(steps[parted]), int(steps[worst]),
        float(left[worst]), float(right[worst]), float(share[worst]),
    )  # fmt: skip


def _noise(left: Floats, right: Floats) -> float:
    """The median change from step to step: an explosion does not raise it."""
    changes = np.abs(np.concatenate([np.diff(left), np.diff(right)]))
    changes = changes[np.isfinite(changes)]
    return float(np.median(changes)) if len(changes) else 0.0


def _first_lasting(beyond: NDArray[np.bool_], at_once: NDArray[np.bool_]) -> int | None:
    """The first of several consecutive steps beyond the noise; a NaN in only one run counts at once."""
    row = min(IN_A_ROW, len(beyond))
    lasting = at_once.copy()
    lasting[: len(beyond) - row + 1] |= np.lib.stride_tricks.sliding_window_view(beyond, row).all(axis=1)
    return int(lasting.argmax()) if lasting.any() else None
