"""The rank of this process in a distributed job, and what capture needs of the other ranks.

The communication itself is in `tbhooks.distributed`, which implements `RankGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import distributed, nn

from tbhooks.capture import sharded_tensors
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.step_table import MergedStep, StepTable
from tbhooks.data.process.rank import rank_and_world
from tbhooks.data.self_report import Report


class RankGroup(Protocol):
    """The ranks that merge their statistics."""

    world: int
    is_over: bool

    def merge(self, table: StepTable, report: Report) -> MergedStep | None: ...

    def reserve(self, sites: int) -> None: ...

    def give_up(self) -> None: ...

    def leave(self, is_idle: bool) -> None: ...


@dataclass(frozen=True)
class RankContext:
    """The rank of this process, and the group it merges with."""

    rank: int = 0
    rank_group: RankGroup | None = None
    first_step: int = 0
    wants_rank_group: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether another rank writes, and this one has nothing to do."""
        return self.rank != 0 and self.rank_group is None

    @property
    def rank_has_changed(self) -> bool:
        """Whether the rank has changed since: the process group was initialised after the watch."""
        return self.rank_group is None and this_rank() != self.rank

    @property
    def was_made_too_early(self) -> bool:
        """Whether ranks were to be merged, and the process group was initialised after the watch."""
        return self.wants_rank_group and self.rank_group is None and sharded_tensors.are_several()

    def shared(self, packed: PackedStep, model: nn.Module | None, report: Report) -> PackedStep:
        """Adds to a packed step the function that merges it with the steps of other ranks, if there are any."""
        if self.rank_group is None:
            return packed
        group = self.rank if model is None else sharded_tensors.batch_group(model, self.rank)
        return replace(packed, group=group, merge=partial(self.rank_group.merge, report=report))


def this_rank() -> int:
    """The rank of this process; 0 if there is only one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return rank_and_world()[0]
