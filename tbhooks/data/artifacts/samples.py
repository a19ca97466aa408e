"""The samples of a step with the largest values, and the mean of each group: what `Watch.samples` was given.

Host memory only: no torch, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from tbhooks.data.jsonable import parse_number, to_jsonable

LOSS_BY = "train.loss_by/"
"""The tag prefix of the mean of a group."""
OTHER_GROUPS = "(other)"
"""The name of all groups together beyond those that are counted one by one."""
_LONGEST_TEXT = 200

SampleId = int | str


class Sample(NamedTuple):
    """One sample of a step, or one token of a sample."""

    id: SampleId
    """The id that `Watch.samples` was given; without ids the position among all samples of the step."""
    value: float
    """The value of the sample, usually its loss."""
    group: str = ""
    """The group of the sample; empty without groups."""
    position: int | None = None
    """The position inside the sample, such as that of a token; None if a sample has one value."""


class Group(NamedTuple):
    """The values of one group in a step: their mean and their number."""

    mean: float
    total: int


@dataclass(frozen=True)
class Samples(Sequence[Sample]):
    """The samples of one step with the largest values, the largest first; NaN comes before all numbers.

    It is a sequence of `Sample`: `frame.samples[0].id`. `groups` has the mean of every group.
    """

    worst: tuple[Sample, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    total: int = 0
    """How many values the step had."""

    @property
    def ids(self) -> tuple[SampleId, ...]:
        return tuple(sample.id for sample in self.worst)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(sample.value for sample in self.worst)

    def scalars(self) -> dict[str, float]:
        """The means of the groups, by TensorBoard tag."""
        return {f"{LOSS_BY}{name}": group.mean for name, group in self.groups.items()}

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...

    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        return self.worst[index]

    def __len__(self) -> int:
        return len(self.worst)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.worst)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; NaN and infinities are strings. `Samples.from_dict` reads them back."""
        data: dict[str, Any] = to_jsonable(
            {
                "worst": [list(sample) for sample in self.worst],
                "groups": {name: list(group) for name, group in self.groups.items()},
                "total": self.total,
            }
        )
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Samples:
        """What `to_dict` wrote. Raises ValueError for anything else."""
        try:
            worst = tuple(_sample(*entry) for entry in data["worst"])
            groups = {_text(name): Group(_number(mean), int(count)) for name, (mean, count) in data["groups"].items()}
            return cls(worst, groups, int(data["total"]))
        except (LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"not the samples of a step: {problem!r}") from problem


NO_SAMPLES = Samples()


def worst_first(samples: Iterable[Sample], most: int) -> tuple[Sample, ...]:
    """The `most` samples with the largest values, NaN before all numbers."""
    return tuple(sorted(samples, key=_badness, reverse=True)[:most])


def _badness(sample: Sample) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(sample.value) else (False, sample.value)


def merge(parts: Sequence[Samples]) -> Samples:
    """The samples of several calls or ranks as those of one step; as many as the longest part has."""
    having = [part for part in parts if part.total]
    if len(having) < 2:
        return having[0] if having else NO_SAMPLES
    sums: dict[str, tuple[float, int]] = {}
    for part in having:
        for name, (mean, count) in part.groups.items():
            total, counted = sums.get(name, (0.0, 0))
            sums[name] = total + mean * count, counted + count
    groups = {name: Group(total / count, count) for name, (total, count) in sums.items() if count}
    worst = worst_first((sample for part in having for sample in part), max(map(len, having)))
    return Samples(worst, groups, sum(part.total for part in having))


def _sample(sample_id: Any, value: Any, group: Any, position: Any) -> Sample:
    if isinstance(sample_id, bool) or not isinstance(sample_id, int | str):
        raise TypeError(f"a sample's id is {sample_id!r}")
    if not isinstance(position, int | None):
        raise TypeError(f"a sample's position is {position!r}")
    return Sample(_text(sample_id) if isinstance(sample_id, str) else sample_id, _number(value), _text(group), position)


def _number(value: Any) -> float:
    number = parse_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(number)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value[:_LONGEST_TEXT]


def as_id(value: object) -> SampleId:
    """An id as it is written: an integer, or a text that is not too long."""
    return int(value) if isinstance(value, int) else str(value)[:_LONGEST_TEXT]
