"""Which records of a step make which row of its frame, and other things that are the same in most logged steps.

They are worked out when a step first has these calls, and kept for the next steps by the thread that makes the frames.
Equal lists are recognised by comparing them, which is a hundred times faster than going through them in Python.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tbhooks.capture.recording.calls import CallTable
from tbhooks.capture.recording.step_table import PARAMETER_KINDS, UNKNOWN_SHARD, UNSHARDED, Integers
from tbhooks.data.sites import Positions, Site, Sites

Number = TypeVar("Number", bound=np.generic)
Key = TypeVar("Key")
Made = TypeVar("Made")
Array = TypeVar("Array", bound=NDArray[np.generic])
Shards = list[tuple[Site, tuple[int, int]]]

# A loop alternates between a few lists of calls: training, evaluation, with and without some branch.
MOST_KEPT = 8
# Rows this narrow are gathered faster one by one than in runs.
_NARROW = 64


class Layout:
    """How the records of a step become the rows of a table."""

    def __init__(self, calls: CallTable, sites: Sequence[Site], shards: Shards) -> None:
        numbers, buffers, starts, stops = calls.T
        order = {number: i for i, number in enumerate(dict.fromkeys(numbers.tolist()))}
        self.sites = Sites(sites[number] for number in order)
        lengths = stops - starts
        rows = np.array([order[number] for number in numbers.tolist()], dtype=np.intp)
        before = np.cumsum(lengths) - lengths
        self.owner = np.repeat(rows, lengths)
        buffer, record = np.repeat(buffers, lengths), np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
        """For each record the row it is merged into."""
        self.is_one_each = np.array_equal(self.owner, np.arange(len(self.sites)))
        self._record, self._runs = record, _runs(buffer, record)
        self._only_buffer = int(buffer[0]) if len(buffer) and (buffer == buffer[0]).all() else None
        known = dict(shards)
        self.shards: Integers = np.array([_shard(site, known) for site in self.sites], dtype=np.int64).reshape(-1, 2)
        """For each site the index of its shard, and the number of shards."""

    def gather(self, hosts: Mapping[int, NDArray[Any]], width: int, dtype: type[Number]) -> NDArray[Number]:
        """The records in the order of `owner`, of the records of each buffer. It may be part of a buffer itself."""
        if len(self._runs) == 1:
            ((_, number, start, stop),) = self._runs
            return np.asarray(hosts[number][start:stop], dtype=dtype)
        if self._only_buffer is not None and width <= _NARROW:
            return np.asarray(hosts[self._only_buffer][self._record], dtype=dtype)
        gathered = np.empty((len(self.owner), width), dtype=dtype)  # without a copy of another type in between
        for at, number, start, stop in self._runs:
            gathered[at : at + stop - start] = hosts[number][start:stop]
        return gathered


def _runs(buffer: Positions, record: Positions) -> list[tuple[int, int, int, int]]:
    """Consecutive records: where they begin in the list, their buffer, the first one and one past the last.

    There are few: records that are not of tensors lie between them, and outputs that a module passed on unchanged.
    """
    breaks = (np.diff(buffer) != 0) | (np.diff(record) != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1]) if len(record) else np.zeros(0, np.intp)
    lengths = np.diff(np.append(starts, len(record)))
    return [
        (int(at), int(buffer[at]), int(record[at]), int(record[at] + length))
        for at, length in zip(starts, lengths, strict=True)
    ]


def _shard(site: Site, shards: Mapping[Site, tuple[int, int]]) -> tuple[int, int]:
    return shards.get(site, UNSHARDED if site.kind in PARAMETER_KINDS else UNKNOWN_SHARD)


class Shown(NamedTuple):
    """The sites that a frame has, of those of a step."""

    sites: Sites
    rows: Positions | None
    """None if it has all of them."""

    def of(self, array: Array) -> Array:
        """The rows of these sites."""
        return array if self.rows is None else array[self.rows]  # type: ignore[return-value]


def shown(sites: Sites, kinds: frozenset[str]) -> Shown:
    """The sites of these kinds."""
    if kinds.issuperset(sites.positions):
        return Shown(sites, None)
    rows = [i for i, site in enumerate(sites) if site.kind in kinds]
    return Shown(Sites(sites[i] for i in rows), np.array(rows, dtype=np.intp))


def updates_and_weights(sites: Sites) -> tuple[Positions, Positions]:
    """The positions of the updates whose weight is there, and of these weights."""
    weight = {sites[i].path: i for i in sites.positions.get("weight", ())}
    updates = [i for i in sites.positions.get("update", ()) if sites[i].path in weight]
    return np.array(updates, dtype=np.intp), np.array([weight[sites[i].path] for i in updates], dtype=np.intp)


class _Kept(threading.local):
    """What was made last in this thread, newest first."""

    def __init__(self) -> None:
        self.layouts: list[tuple[tuple[bytes, Sequence[Site], Shards], Layout]] = []
        self.sites: list[tuple[tuple[Site, ...], Sites]] = []


_kept = _Kept()


def layout(calls: CallTable, sites: Sequence[Site], shards: Mapping[Site, tuple[int, int]]) -> Layout:
    """The layout of these calls; the same object as in an earlier step if nothing has changed."""
    key = (calls.tobytes(), sites[:], list(shards.items()))
    found = _recent(_kept.layouts, key)
    return _keep(_kept.layouts, key, Layout(calls, *key[1:]) if found is None else found)


def shared_sites(sites: Sequence[Site]) -> Sites:
    """The sites as the same object as in an earlier step, if they are the same."""
    if isinstance(sites, Sites):
        return sites
    key = tuple(sites)
    found = _recent(_kept.sites, key)
    return _keep(_kept.sites, key, Sites(key) if found is None else found)


def _recent(kept: list[tuple[Key, Made]], key: Key) -> Made | None:
    """What was made of an equal key, which is taken from the list."""
    found = next((i for i, (known, _) in enumerate(kept) if known == key), None)
    return None if found is None else kept.pop(found)[1]


def _keep(kept: list[tuple[Key, Made]], key: Key, made: Made) -> Made:
    """Puts it first, with the newest of the equal keys: to compare the same objects is faster than equal ones."""
    kept.insert(0, (key, made))
    del kept[MOST_KEPT:]
    return made
