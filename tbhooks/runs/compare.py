"""Where two runs diverge: the first step at which they differ by more than their own noise, and what differs most.

Runs are compared at the steps that both have logged. The noise is the usual change of a value from one logged step to
the next, so that two runs of the same training with different batches do not diverge at once.

Differences are ranked by effect size: how far apart two runs are, relative to the noise and to what is usual in the
same role. A gradient of 1e-13 that doubles matters less than a loss that rises by a tenth. Scalars come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.grids import is_of_site
from tbhooks.data.roles import pattern
from tbhooks.data.stats import Floats
from tbhooks.runs.bit_comparison import BitComparison, compare_bits
from tbhooks.runs.report_data import DOCUMENT_VERSION, own_scalars, run_grids
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
    effect: float = 0.0
    """The median distance since they differ, relative to the noise and to the usual size of the value in its role."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared; `differences` has everything that diverged: scalars first, then by effect size."""

    runs: tuple[str, str]
    common_steps: int
    parted: int | None
    what_parted: tuple[str, ...]
    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    common: int = 0
    """How many values both runs have."""
    bits: BitComparison | None = None
    """The first bit that differs, if both runs have checksums."""

    @property
    def are_unrelated(self) -> bool:
        """Whether less than a fifth of the values of tensors are in both runs: they are of different models."""
        alone = sum(is_of_site(what) for what in (*self.only_first, *self.only_second))
        return alone > 0 and self.common < 0.2 * (self.common + alone)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, with the version of the document: `docs/comparison.schema.json`."""
        return {"version": DOCUMENT_VERSION, **asdict(self)}


def compare(first: Run, second: Run) -> Comparison:
    """Compares the scalars and the main statistics of every site."""
    one, two = dict(_series(first)), dict(_series(second))
    both = [what for what in one if what in two]
    sizes = _usual_sizes({what: (one[what][1], two[what][1]) for what in both})
    found = (_difference(what, one[what], two[what], sizes[_group(what)]) for what in both)
    differences = [difference for difference in found if difference is not None]
    parted = [difference for difference in differences if difference.parted is not None]
    steps = [difference.parted for difference in parted if difference.parted is not None]
    start = min(steps, default=None)
    common = {step for what in both for step in _common(one[what], two[what])[0].tolist()}
    return Comparison(
        (str(first.directory), str(second.directory)), len(common), start,
        tuple(difference.what for difference in parted if difference.parted == start),
        tuple(sorted(parted, key=lambda difference: (is_of_site(difference.what), -difference.effect))),
        tuple(what for what in one if what not in two), tuple(what for what in two if what not in one),
        sum(map(is_of_site, both)), compare_bits(first, second),
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


def _group(what: str) -> str:
    """What a value is compared with in size: the same statistic of the same role."""
    return pattern(what.replace("/", ".")) if is_of_site(what) else what


def _usual_sizes(values: Mapping[str, tuple[Floats, Floats]]) -> dict[str, float]:
    """The usual size of each statistic: the median over its role, and at least a hundredth of that over all layers."""
    by_stat: dict[str, list[float]] = {}
    by_group: dict[str, list[float]] = {}
    for what, (left, right) in values.items():
        both = np.abs(np.concatenate([left, right]))
        size = float(np.median(both[np.isfinite(both)])) if np.isfinite(both).any() else 0.0
        by_stat.setdefault(what.partition("/")[0] if is_of_site(what) else what, []).append(size)
        by_group.setdefault(_group(what), []).append(size)
    usual = {stat: float(np.median(sizes)) for stat, sizes in by_stat.items()}
    floors = {_group(what): usual[what.partition("/")[0] if is_of_site(what) else what] for what in values}
    return {group: max(float(np.median(sizes)), 0.01 * floors[group]) for group, sizes in by_group.items()}


def _effect(what: str, apart: Floats, noise: float, size: float) -> float:
    """Infinite if only one run is finite. A fraction of zeros below a few percent is no effect, whatever its ratio."""
    if np.isinf(apart).any():
        return float("inf")
    least = 0.05 if ".zero_fraction/" in what else 0.0
    known = apart[np.isfinite(apart)]
    return float(np.median(known) / max(noise + SHARE * size, least, 1e-300)) if len(known) else 0.0


def _difference(what: str, one: Points, two: Points, size: float) -> Difference | None:
    steps, left, right = _common(one, two)
    if not len(steps):
        return None
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.abs(left - right)
        larger = np.maximum(np.abs(left), np.abs(right))
        noise = _noise(left, right)
        beyond = apart > SHARE * larger + NOISES * noise
        share = np.where(larger > 0, apart / larger, 0.0)
    only_one_finite = np.isfinite(left) != np.isfinite(right)
    share[only_one_finite] = np.inf
    parted = _first_lasting(beyond, only_one_finite)
    worst = int(np.nanargmax(np.where(np.isnan(share), -1.0, share)))
    return Difference(
        what, None if parted is None else int(steps[parted]), int(steps[worst]),
        float(left[worst]), float(right[worst]), float(share[worst]),
        _effect(what, np.where(only_one_finite, np.inf, apart)[parted:], noise, size),
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
