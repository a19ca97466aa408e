"""Roles: modules that do the same job at different depths, such as the `q_proj` of all layers, as one group.

Two modules have the same role if their paths differ in numbers only and their traits are equal. A trait is whatever
tells modules with such paths apart: the class, or the names of their own parameters where the class is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.stats import Floats

# A whole component of a path that is a number, before an index such as `[0]` or a function such as `:softmax`.
_NUMBER = re.compile(r"(?<![^.])\d+(?=$|[.\[:])")
# The median absolute deviation times this is the standard deviation of a normal distribution.
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class Role:
    """A group of sites of one kind that do the same job."""

    name: str
    """The path with `*` for each number, such as `layers.*.q_proj`; the trait follows if two roles share the path."""
    members: tuple[int, ...]
    """The positions of its members in the list that was grouped, which is in execution order."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A statistic over the members of a role; `least_at` and `most_at` are positions among the values, -1 if none."""

    median: float
    least: float
    most: float
    least_at: int
    most_at: int


def pattern(name: str) -> str:
    """The name of a site with `*` for each component that is a number: `layers.3.mlp` is `layers.*.mlp`."""
    return _NUMBER.sub("*", name)


def roles(names: Sequence[str], traits: Mapping[str, str] | None = None) -> tuple[Role, ...]:
    """Groups the sites of one kind into roles, in the order in which each role first occurs.

    Args:
        names: the names of the sites, path and index, in execution order.
        traits: the trait of each name; names that are missing have an empty trait.

    """
    traits = traits or {}
    groups: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault((pattern(name), traits.get(name, "")), []).append(i)
    paths = [path for path, _ in groups]
    return tuple(
        Role(path if paths.count(path) == 1 or not trait else f"{path} ({trait})", tuple(members))
        for (path, trait), members in groups.items()
    )


GAIN = "gain"
"""A statistic of gradients: what the backward pass through a module multiplies the gradient by."""


def predecessors(names: Sequence[str]) -> dict[int, int]:
    """For each site the one before it in its role, by the numbers in its name: `layers.2` for `layers.3`."""
    before: dict[int, int] = {}
    for role in roles(names):
        by_depth = sorted(role.members, key=lambda i: [int(number) for number in _NUMBER.findall(names[i])])
        before |= dict(zip(by_depth[1:], by_depth, strict=False))
    return before


def gains(names: Sequence[str], rms: Floats) -> Floats:
    """The gain of every site, from the rms of its gradient `rms[site, ...]`; NaN for the first of its role.

    It is the rms of the gradient at the module before it in its role over that at the module itself. In a chain of
    equal blocks it is 1 where the backward pass keeps the size of gradients, less where they vanish, and more where
    they explode.
    """
    found = np.full(rms.shape, np.nan)
    before = predecessors(names)
    with np.errstate(divide="ignore", invalid="ignore"):
        found[list(before)] = rms[list(before.values())] / rms[list(before)]
    return found


def parameter_traits(names: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """A trait for each module: the names of the parameters that it owns itself, such as `weight, bias`.

    It separates layers from activation functions in a Sequential, where every path is a number.
    """
    own: dict[str, list[str]] = {}
    for parameter in parameters:
        module, _, name = parameter.rpartition(".")
        own.setdefault(module, []).append(name)
    return {name: ", ".join(dict.fromkeys(own.get(name.partition("[")[0], ()))) for name in names}


class Groups:
    """Groups of numbers, which are summarised in a few array operations for all of them.

    Nearly every operation of NumPy releases the GIL: with some for each group, a training that runs beside it would be
    interrupted hundreds of times.
    """

    def __init__(self, members: Sequence[NDArray[np.intp]]) -> None:
        """`members` are the positions of the numbers of each group."""
        of_size: dict[int, list[int]] = {}
        for group, positions in enumerate(members):
            of_size.setdefault(len(positions).bit_length(), []).append(group)
        # Groups of about the same size as one matrix. Where a row ends sooner it has -1, which is the place of a NaN.
        self._blocks = [(groups, _padded([members[group] for group in groups])) for groups in of_size.values()]
        self._count = len(members)

    def summaries(self, numbers: Floats) -> list[Summary]:
        """Median, least and most of the finite numbers of each group; NaN if there is none."""
        found: list[Summary] = [Summary(np.nan, np.nan, np.nan, -1, -1)] * self._count
        padded = np.append(numbers, np.nan)
        for groups, positions in self._blocks:
            for group, one in zip(groups, _summaries(padded[positions]), strict=True):
                found[group] = one
        return found


def _padded(members: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    padded = np.full((len(members), max(map(len, members))), -1, np.intp)
    for row, positions in zip(padded, members, strict=True):
        row[: len(positions)] = positions
    return padded


def _summaries(numbers: Floats) -> list[Summary]:
    """One summary for each row of a matrix."""
    groups, width = numbers.shape
    if not width:
        return [Summary(np.nan, np.nan, np.nan, -1, -1)] * groups
    known = np.isfinite(numbers)
    ordered = np.sort(np.where(known, numbers, np.nan), axis=1)  # NaN is last
    each, count = np.arange(groups), known.sum(axis=1)
    low, high, most = (ordered[each, np.maximum(at, 0)] for at in ((count - 1) // 2, count // 2, count - 1))
    with np.errstate(over="ignore"):
        median = np.where(count % 2, low, (low + high) / 2)
    least_at = np.where(known, numbers, np.inf).argmin(axis=1)
    most_at = np.where(known, numbers, -np.inf).argmax(axis=1)
    places = np.where(count > 0, [least_at, most_at], -1)
    columns = median, ordered[:, 0], most, *places
    return [Summary(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]


def robust_z(values: Floats) -> Floats:
    """How unusual each value is within its group: its distance from the median in robust standard deviations.

    The spread is the median absolute deviation, which outliers do not raise, and at least 1 % of the median, so that
    rounding errors in a group of equal values are not unusual. NaN where a value is not finite.
    """
    known = np.isfinite(values)
    if not known.any():
        return np.full(values.shape, np.nan)
    middle = float(np.median(values[known]))
    away = np.where(known, values, np.nan) - middle
    spread = max(_NORMAL * float(np.median(np.abs(away[known]))), 0.01 * abs(middle))
    return away / spread if spread > 0 else np.where(away == 0, 0.0, np.copysign(np.inf, away))
