"""The ranks of a distributed job: how they meet at `watch()`, and the one collective of a logged step.

The collective runs in the background thread, on CPU memory and in a gloo group of its own, whatever backend the job
trains with: training never waits for it. A rank that fails or is late ends the merging, never the training.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from tbhooks.capture import sharded_tensors
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.step_table import MergedStep, StepTable
from tbhooks.data.errors import ArgumentError
from tbhooks.data.process.patching import wrapping
from tbhooks.data.process.rank import rank_and_world
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.distributed import handshake, merge, slices
from tbhooks.distributed.merge import Reader, Writer

LOCAL, MERGE = RANKS = ("local", "merge")
"""The values of `ranks=`."""
# How long a rank may be late for a collective, and for watch(), if the job's process group does not say less.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
HANDSHAKE_TIMEOUT = timedelta(minutes=2)
# Up to this many bytes in total all ranks get the data of all ranks. Beyond that only the first rank gets what is
# merged, and other ranks merge it, a slice each.
MOST_FOR_ALL_GATHER = 64 << 20


def is_in_job() -> bool:
    """Whether this process is one of several ranks, now or as soon as the process group is made."""
    return sharded_tensors.are_several() or rank_and_world()[1] > 1


def restarts() -> int:
    """How many times torchrun has restarted the workers of this job."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def join(description: handshake.Description, first_step: int) -> RankContext:
    """Waits for the other ranks, checks that all of them watch the same model with the same options, and makes a group.

    `first_step` is where the first rank begins to count; all ranks take that of the first one. Raises an
    ArgumentError if ranks differ, or if one does not call `watch()` in time.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        if rank_and_world()[1] > 1:
            raise ArgumentError('ranks="merge" needs the process group: call init_process_group() before watch()')
        return RankContext(first_step=first_step, wants_rank_group=True)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return RankContext(first_step=first_step, wants_rank_group=True)
    agreed = _shake_hands(description, rank, world, first_step)
    timeout = min(COLLECTIVE_TIMEOUT, _job_timeout())
    group = distributed.new_group(backend="gloo", timeout=timeout)
    return RankContext(rank, GlooRankGroup(group, rank, world, agreed["size"]), agreed["first_step"])


def _job_timeout() -> timedelta:
    """The time limit of the job's own collectives."""
    with suppress(Exception):  # not every backend has one
        group = distributed.distributed_c10d._get_default_group()  # noqa: SLF001  torch has no public way to the limit
        limit = group._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001
        if isinstance(limit, timedelta):
            return limit
    return COLLECTIVE_TIMEOUT


def _shake_hands(description: handshake.Description, rank: int, world: int, first_step: int) -> dict[str, Any]:
    """Compares the ranks through the job's store. A collective would hang if a rank is missing; this names it."""
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to the store
    # The store counts the calls of watch() by each rank, also of one that was restarted.
    prefix = f"tbhooks/{store.add(f'tbhooks/met/{rank}', 1)}"
    limit = min(HANDSHAKE_TIMEOUT, _job_timeout())
    details = base64.b64encode(zlib.compress(json.dumps(description.details).encode()))
    store.set(f"{prefix}/details/{rank}", details.decode())
    store.set(f"{prefix}/said/{rank}", json.dumps(description.summary))
    if rank == 0:
        verdict = _compare_ranks(store, prefix, world, limit)
        store.set(f"{prefix}/verdict", json.dumps({**verdict, "first_step": first_step}))
    else:
        try:
            store.wait([f"{prefix}/verdict"], limit * 2)
        except Exception:
            raise ArgumentError(
                f'ranks="merge": rank 0 did not call watch() within {limit.total_seconds() * 2:g} s of rank {rank}; '
                "all ranks must call it, in the same order"
            ) from None
    agreed: dict[str, Any] = json.loads(store.get(f"{prefix}/verdict"))
    if agreed["problem"]:
        raise ArgumentError(f'ranks="merge": {agreed["problem"]}')
    return agreed


def _compare_ranks(store: Any, prefix: str, world: int, limit: timedelta) -> dict[str, Any]:
    """On the first rank: the first problem, or None, and the size of the buffer that ranks exchange."""
    deadline = time.monotonic() + limit.total_seconds()
    late = []
    for rank in range(world):
        try:
            store.wait([f"{prefix}/said/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except Exception:
            late.append(rank)
    if late:
        names = ", ".join(map(str, late[:8])) + (" ..." if len(late) > 8 else "")
        seconds = f"{limit.total_seconds():g} s"
        problem = f"rank {names} did not call watch() within {seconds} of rank 0; all ranks must call it"
        return {"problem": problem, "size": 0}
    summaries = [json.loads(store.get(f"{prefix}/said/{rank}")) for rank in range(world)]

    def details(rank: int) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(store.get(f"{prefix}/details/{rank}"))))
        return stored

    size = max(merge.capacity(each["sites"], each["options"]["histograms"] is not False) for each in summaries)
    return {"problem": handshake.difference(summaries, details), "size": size}


@dataclass
class GlooRankGroup:
    """The ranks of a job that merge their statistics. Only the background thread calls the collective."""

    group: distributed.ProcessGroup | None
    rank: int
    world: int
    size: int
    collectives: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self._make_buffers()
        self._given_up = threading.Event()
        self._pending: Any = None

    def _make_buffers(self) -> None:
        self._writer = Writer(self.size)
        self._reader = Reader(with_buckets=self.rank == 0)  # only the first rank writes histograms
        self._slices = 0
        if self.world * self.size <= MOST_FOR_ALL_GATHER:  # reused for every step
            self._sent = torch.zeros(self.size, dtype=torch.uint8)
            self._received = [torch.zeros(self.size, dtype=torch.uint8) for _ in range(self.world)]
        else:
            self._slices = slices.slice_count(self.size, self.world)
            self._slice_writer = slices.SliceWriter(self._slices)
            self._slice_merger, self._slice_reader = slices.SliceMerger(), slices.SliceReader()

    def reserve(self, sites: int) -> None:
        """Makes room for more sites. All ranks do the same before they first meet; after that it is too late."""
        if not self.collectives:
            self.size += merge.capacity(sites, with_buckets=True)
            self._make_buffers()

    def merge(self, table: StepTable, report: Report) -> MergedStep | None:
        """Exchanges a step with the other ranks and merges it. None if this rank receives nothing, and after errors."""
        if self.is_over:
            return None
        try:
            self.collectives += 1
            merged = self._merge_slices(table) if self._slices else self._merge_gathered(table)
        except Exception as problem:
            self.is_over = True
            report.errors += 1
            report.log_once(
                f"merging of ranks ended at step {table.step}: {describe_exception(problem)}. "
                + ("From now on the statistics are those of rank 0" if self.rank == 0 else "Rank 0 goes on alone")
            )
            return None
        if merged is None:
            return None
        for what in self._writer.left_out:
            report.log_once(f"the buffer that ranks exchange is too small for all {what} of this model")
        for note in merged.notes if self.rank == 0 else ():
            report.log_once(note, once=note.partition(" of ")[0] + " differ between ranks")
        return merged

    def _merge_gathered(self, table: StepTable) -> MergedStep:
        """Every rank gets the tables of all ranks, and merges them."""
        self._sent.numpy()[:] = np.frombuffer(self._writer.write(table), np.uint8)
        self._wait_for(distributed.all_gather(self._received, self._sent, group=self.group, async_op=True))
        tables = [  # its own as others read it: unless something did not fit, that is the table itself
            table if rank == self.rank and not self._writer.left_out else self._reader.read(data.numpy().tobytes())
            for rank, data in enumerate(self._received)
        ]
        if len({each.step for each in tables}) > 1:
            steps = ", ".join(f"rank {i} at {each.step}" for i, each in enumerate(tables[:8]))
            raise RuntimeError(f"ranks are not at the same step: {steps}")
        return merge.merge(tables)

    def _merge_slices(self, table: StepTable) -> MergedStep | None:
        """Ranks 1, 2, ... merge a slice each, and the first rank gets what is merged; the others get None."""
        parts = self._slice_writer.write(table)
        received = self._all_to_all({1 + number: part for number, part in enumerate(parts)})
        problem, mine = "", b""
        if 1 <= self.rank <= self._slices:
            mine, problem = self._slice_merger.merge(received)
        merged = self._all_to_all({0: mine})
        if problem:
            raise RuntimeError(problem)
        return None if self.rank else self._slice_reader.read(merged[1 : 1 + self._slices], table.sites)

    def _all_to_all(self, sent: Mapping[int, bytes]) -> list[bytes]:
        """Sends bytes to some ranks, and returns what each rank has sent to this one. The lengths are sent first."""
        lengths = torch.tensor([len(sent.get(rank, b"")) for rank in range(self.world)])
        theirs = torch.zeros_like(lengths)
        self._wait_for(distributed.all_to_all_single(theirs, lengths, group=self.group, async_op=True))
        data = torch.from_numpy(np.frombuffer(b"".join(sent[rank] for rank in sorted(sent)), np.uint8).copy())
        sizes = [int(length) for length in theirs]
        received = torch.zeros(sum(sizes), dtype=torch.uint8)
        work = distributed.all_to_all_single(
            received, data, sizes, [int(length) for length in lengths], group=self.group, async_op=True
        )
        self._wait_for(work)
        content, ends = received.numpy().tobytes(), np.cumsum(sizes)
        return [content[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _wait_for(self, work: Any) -> None:
        """Waits until all ranks have arrived. Raises if the time limit of the group is over, or after `give_up()`."""
        self._pending, pause = work, 0.0005
        while not work.is_completed():
            if self._given_up.wait(pause):
                raise TimeoutError("another rank had not arrived when the watch was closed")
            pause = min(2 * pause, 0.02)
        self._pending = None
        work.wait()

    def give_up(self) -> None:
        """Ends waiting for other ranks: the first rank writes its own statistics."""
        self._given_up.set()

    def leave(self, is_idle: bool) -> None:
        """Ends the merging, and destroys the process group unless a collective is still pending."""
        self.is_over = True
        group = self.group
        # Destroying the group would wait for a pending collective. None would destroy all groups of the job.
        if is_idle and self._pending is None and group is not None:
            self.group = None  # its threads and connections live as long as it is referenced
            with suppress(Exception):  # it was destroyed before, with all others
                distributed.destroy_process_group(group)


class BeforeProcessGroupEnds:
    """Calls functions before `destroy_process_group()` destroys all groups, so that logged steps are written first.

    The function is wrapped as long as there is somebody to call.
    """

    def __init__(self) -> None:
        self._drains: dict[int, Callable[[], None]] = {}
        self._patch = wrapping("torch.distributed", "destroy_process_group", self._around, "torch 2.10 to 2.15")

    def add(self, key: int, drain: Callable[[], None]) -> None:
        self._drains[key] = drain
        self._patch.acquire(self)

    def discard(self, key: int) -> None:
        self._drains.pop(key, None)
        if not self._drains:
            self._patch.release(self)

    def _around(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is None or group is distributed.group.WORLD:  # these destroy all groups
            for drain in list(self._drains.values()):
                drain()
        return wrapped(*args, **kwargs)


before_process_group_ends = BeforeProcessGroupEnds()
