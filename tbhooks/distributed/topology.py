"""The processes of one job: who writes, whether all agree, and the one collective of a logged step.

The collective runs in the pump's thread, on CPU memory and a gloo group of its own, whatever the job trains with, so
that training never waits for it. A rank that fails or is late ends the merging, never the training.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from tbhooks.capture import sharded_tensors
from tbhooks.capture.rank_context import RankContext
from tbhooks.data.errors import ArgumentError
from tbhooks.data.patching import wrapping
from tbhooks.data.process_rank import rank_and_world
from tbhooks.data.self_report import Report
from tbhooks.data.step_table import MergedStep, StepTable
from tbhooks.distributed import handshake, merge
from tbhooks.distributed.merge import Reader, Writer

LOCAL, MERGE = WAYS = ("local", "merge")
# How long a rank may be late, if the job's own process group does not say less.
LONGEST_WAIT = timedelta(minutes=5)
# How long the others are waited for at watch(), likewise.
LONGEST_MEETING = timedelta(minutes=2)
# Up to so many bytes in all, every rank gets what every rank sent; beyond that only the first does.
MOST_FOR_EVERYONE = 64 << 20


def is_of_a_job() -> bool:
    """Whether there are other ranks, or will be."""
    return sharded_tensors.are_several() or rank_and_world()[1] > 1


def restarts() -> int:
    """How many times torchrun has started the workers of this job again."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def join(described: handshake.Described, first_step: int) -> RankContext:
    """Meets the other ranks and makes sure that all watch the same in the same way.

    `first_step` is the number the first rank counts from, which all take over.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        if rank_and_world()[1] > 1:
            raise ArgumentError('ranks="merge" needs the process group: call init_process_group() before watch()')
        return RankContext(first_step=first_step, wants_team=True)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return RankContext(first_step=first_step, wants_team=True)
    agreed = _meet(described, rank, world, first_step)
    wait = min(LONGEST_WAIT, _patience())
    group = distributed.new_group(backend="gloo", timeout=wait)
    return RankContext(rank, GlooRankGroup(group, rank, world, agreed["size"]), agreed["first_step"])


def _patience() -> timedelta:
    """The job's own time limit of a collective."""
    with suppress(Exception):  # not every backend says
        limit = distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        if isinstance(limit, timedelta):
            return limit
    return LONGEST_WAIT


def _meet(described: handshake.Described, rank: int, world: int, first_step: int) -> dict[str, Any]:
    """Through the job's store, not by a collective: a rank that does not come is named, and nobody hangs."""
    store = distributed.distributed_c10d._get_default_store()
    # Counted by the store, which knows a rank again that was started anew.
    place = f"tbhooks/{store.add(f'tbhooks/met/{rank}', 1)}"
    limit = min(LONGEST_MEETING, _patience())
    details = base64.b64encode(zlib.compress(json.dumps(described.details).encode()))
    store.set(f"{place}/details/{rank}", details.decode())
    store.set(f"{place}/said/{rank}", json.dumps(described.summary))
    if rank == 0:
        verdict = _judge(store, place, world, limit)
        store.set(f"{place}/verdict", json.dumps({**verdict, "first_step": first_step}))
    else:
        try:
            store.wait([f"{place}/verdict"], limit * 2)
        except Exception:
            raise ArgumentError(
                f'ranks="merge": rank 0 did not call watch() within {limit.total_seconds() * 2:g} s of rank {rank}; '
                "all ranks call it, in the same order"
            ) from None
    agreed: dict[str, Any] = json.loads(store.get(f"{place}/verdict"))
    if agreed["problem"]:
        raise ArgumentError(f'ranks="merge": {agreed["problem"]}')
    return agreed


def _judge(store: Any, place: str, world: int, limit: timedelta) -> dict[str, Any]:
    """At the first rank: what it makes of what all have said."""
    deadline = time.monotonic() + limit.total_seconds()
    late = []
    for rank in range(world):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{place}/said/{rank}"], timedelta(seconds=left))
        except Exception:
            late.append(rank)
    if late:
        names = ", ".join(map(str, late[:8])) + (" ..." if len(late) > 8 else "")
        problem = f"rank {names} did not call watch() within {limit.total_seconds():g} s of rank 0; all ranks call it"
        return {"problem": problem, "size": 0}
    said = [json.loads(store.get(f"{place}/said/{rank}")) for rank in range(world)]

    def details(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(store.get(f"{place}/details/{rank}"))))
        return found

    size = max(merge.capacity(each["sites"], each["options"]["histograms"] is not False) for each in said)
    return {"problem": handshake.difference(said, details), "size": size}


@dataclass
class GlooRankGroup:
    """The ranks of a job that have agreed to merge. Its collective is called by the pump's thread alone."""

    group: distributed.ProcessGroup | None
    rank: int
    world: int
    size: int
    collectives: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self._writer = Writer(self.size)
        self._reader = Reader(with_buckets=self.rank == 0)  # only the first writes
        self._everyone = self.world * self.size <= MOST_FOR_EVERYONE
        self._given_up = threading.Event()
        self._under_way: Any = None
        self._mine = torch.zeros(self.size, dtype=torch.uint8)
        # Kept from step to step; where others read, there is nothing to keep.
        reads = self._everyone or self.rank == 0
        self._theirs = [torch.zeros(self.size, dtype=torch.uint8) for _ in range(self.world if reads else 0)]

    def merge(self, table: StepTable, report: Report) -> MergedStep | None:
        """What all ranks saw of the step; None where that is another's to know, or there is no team any more."""
        if self.is_over:
            return None
        try:
            tables = self._exchanged(table)
            if tables is None:
                return None
            steps = {each.step for each in tables}
            if len(steps) > 1:
                apart = ", ".join(f"rank {i} at {each.step}" for i, each in enumerate(tables[:8]))
                raise RuntimeError(f"ranks are not at the same step: {apart}")
            merged = merge.merge(tables)
        except Exception as problem:
            self.is_over = True
            report.errors += 1
            report.log_once(
                f"ranks are merged no longer, since step {table.step}: {_short(problem)}. "
                + ("From now on the numbers are those of rank 0" if self.rank == 0 else "Rank 0 goes on alone")
            )
            return None
        for what in self._writer.left_out:
            report.log_once(f"the buffer that ranks exchange is too small for all {what} of this model")
        for note in merged.notes if self.rank == 0 else ():
            report.log_once(note, once=note.partition(" of ")[0] + " differ between ranks")
        return merged

    def _exchanged(self, table: StepTable) -> list[StepTable] | None:
        self._mine.numpy()[:] = np.frombuffer(self._writer.write(table), np.uint8)
        self.collectives += 1
        if self._everyone:
            work = distributed.all_gather(self._theirs, self._mine, group=self.group, async_op=True)
        else:
            work = distributed.gather(self._mine, self._theirs or None, dst=0, group=self.group, async_op=True)
        self._wait_for(work)
        return [self._reader.read(theirs.numpy().tobytes()) for theirs in self._theirs] or None

    def _wait_for(self, work: Any) -> None:
        """Until all ranks have come, the job's own time limit is over, or nobody is to be waited for any longer."""
        self._under_way, pause = work, 0.0005
        while not work.is_completed():
            if self._given_up.wait(pause):
                raise TimeoutError("another rank had not come when the watch was closed")
            pause = min(2 * pause, 0.02)
        self._under_way = None
        work.wait()

    def give_up(self) -> None:
        """Other ranks are waited for no longer: the first writes what it has seen itself."""
        self._given_up.set()

    def leave(self, is_idle: bool) -> None:
        """Ends it, and lets go of the group, unless it is still being waited for."""
        self.is_over = True
        group = self.group
        is_idle = is_idle and self._under_way is None  # a collective that nobody waits for would be waited for here
        if is_idle and group is not None:  # None would be all groups of the job
            self.group = None  # its threads and connections live as long as it is held
            with suppress(Exception):  # destroyed already, with all others
                distributed.destroy_process_group(group)


def _short(problem: BaseException) -> str:
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:200]}" if text else type(problem).__name__


# The job's own end: what has been logged goes first. --------------------------------------------------------------


class BeforeTheEnd:
    """Calls everybody who asked for it before the process group is destroyed."""

    def __init__(self) -> None:
        self._drains: dict[int, Callable[[], None]] = {}
        self._patch = wrapping("torch.distributed", "destroy_process_group", self._around, "torch 2.9 to 2.13")

    def add(self, key: int, drain: Callable[[], None]) -> None:
        self._drains[key] = drain
        self._patch.acquire(self)

    def discard(self, key: int) -> None:
        self._drains.pop(key, None)
        if not self._drains:
            self._patch.release(self)

    def _around(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is None or group is distributed.group.WORLD:  # then all of them go
            for drain in list(self._drains.values()):
                drain()
        return wrapped(*args, **kwargs)


before_the_end = BeforeTheEnd()
