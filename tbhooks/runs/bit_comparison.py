"""The first bit in which two runs differ, from the checksums of their tensors (`Watch.checksums`).

A checksum means the same on every device and with every version. So any two tensors of the same type can be compared;
whether equal bits are to be expected depends on what computed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tbhooks.data.checksums import DTYPES
from tbhooks.data.frame import OPTIMIZER_KINDS, Frame, Site
from tbhooks.runs.run import Run

# In which order a step computes: weights are read by the forward, and an update is the weight after the optimizer.
_ORDER = {
    kind: i for i, kind in enumerate(("weight", "forward", "gradient", "weight_gradient", *OPTIMIZER_KINDS, "update"))
}
# What makes other bits, of what `Watch.environment` writes.
_DECIDES_BITS = ("torch", "CUDA", "system", "devices", "dtypes")


@dataclass(frozen=True, slots=True)
class BitComparison:
    """The first logged step, and the first tensor in it, in which the bits of two runs differ."""

    steps: int
    """How many logged steps both runs have with checksums."""
    step: int | None = None
    """None if no bit differs."""
    site: Site | None = None
    """The tensor that was computed first: weights, forward, backward, update."""
    others: int = 0
    """How many other tensors differ in that step."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """How many tensors of each kind differ in that step."""
    last_equal: int | None = None
    """The logged step before it: all its tensors are equal."""
    other_types: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tensors that have another type in the second run, which cannot be compared, with both types."""
    environments: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What differs between the runs of what decides about bits: versions, devices, threads."""
    is_environment_known: bool = True


def compare_bits(first: Run, second: Run) -> BitComparison | None:
    """Compares the checksums of both runs; None if a run has none."""
    one, two = _by_step(first), _by_step(second)
    if not one or not two:
        return None
    common = sorted(one.keys() & two.keys())
    other_types: dict[str, tuple[str, str]] = {}
    found = BitComparison(
        len(common), other_types=other_types, environments=_environments(first, second),
        is_environment_known=bool(first.environment and second.environment),
    )  # fmt: skip
    for step in common:
        different = sorted(_different(one[step], two[step], other_types), key=_when)
        if different:
            kinds = Counter(site.kind for site in different)
            return replace(found, step=step, site=different[0], others=len(different) - 1, kinds=dict(kinds))
        found = replace(found, last_equal=step)
    return found


def _by_step(run: Run) -> dict[int, Frame]:
    return {frame.step: frame for frame in run.training if len(frame.checksums)}


def _different(one: Frame, two: Frame, other_types: dict[str, tuple[str, str]]) -> Iterator[Site]:
    """The tensors of a step that differ, in the order in which they were recorded."""
    for i, site in enumerate(one.sites):
        j = two.position(site.name, site.kind)
        (checksum, dtype), (other, other_dtype) = one.checksums[i], two.checksums[j] if j is not None else (0, 0)
        if not dtype or not other_dtype:
            continue
        if dtype != other_dtype:
            other_types[str(site)] = DTYPES[int(dtype)], DTYPES[int(other_dtype)]
        elif np.not_equal(checksum, other):
            yield site


def _when(site: Site) -> int:
    return _ORDER.get(site.kind, _ORDER["forward"])  # inputs, activations, taps, functional operations


def _environments(first: Run, second: Run) -> dict[str, tuple[str, str]]:
    one, two = first.environment, second.environment
    if not one or not two:
        return {}
    pairs = {name: (one.get(name, "none"), two.get(name, "none")) for name in _DECIDES_BITS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
