"""What one rank saw in a logged step, as bytes of a fixed length, and what all of them saw, merged.

NumPy only: no torch, no communication. The length never depends on the numbers, because ranks whose buffers
differ in length would bring each other down.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks import spread, stats
from tbhooks.frame import NONFINITE_SINCE, RAW_GRADIENT_NORM, SKIPPED, Site
from tbhooks.plain import number, plain
from tbhooks.stats import Counts, Floats

Whole = NDArray[np.int64]

UNKNOWN_PIECE = -1
"""Of an output that says nothing about how it is spread: every rank's is its own, unless they are all the same."""
WHOLE = 0
"""Of a parameter that every rank has all of."""
OF_PARAMETERS = ("weight", "weight_gradient", "update")
RANKS = "train.ranks"
"""How many ranks a frame's numbers are of."""

_HEADER = struct.Struct("<7q")
_VERSION = 1
_ROW_BYTES = 16 + 8 * stats.WIDTH
# Of compressed bucket counts; a layer's usually take 200 to 300.
_COUNT_BYTES = 512
_NAME_BYTES = 96
_SPARE_BYTES = 64 << 10


def capacity(sites: int, with_buckets: bool) -> int:
    """Bytes for so many sites, and some more that show only when the model runs."""
    sites += sites // 4 + 64
    return _HEADER.size + sites * (_ROW_BYTES + _NAME_BYTES + (_COUNT_BYTES if with_buckets else 0)) + _SPARE_BYTES


@dataclass(frozen=True, eq=False)
class Table:
    """The numbers of a logged step by site, before anything is derived from them."""

    step: int
    sites: Sequence[Site] = ()
    values: Floats = field(default_factory=lambda: stats.empty_rows(0))
    counts: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    pieces: Whole = field(default_factory=lambda: np.zeros(0, np.int64))
    scalars: dict[str, float] = field(default_factory=dict)
    earlier: dict[int, dict[str, float]] = field(default_factory=dict)
    group: int = 0
    """The lowest rank of those that work on the same batch."""


@dataclass(frozen=True, eq=False)
class Merged:
    """The numbers of all ranks, and how far they lie apart."""

    table: Table
    spreads: Floats
    notes: tuple[str, ...] = ()
    is_whole: bool = True
    """Whether no piece of a parameter is missing."""


class Writer:
    """Turns this rank's tables into bytes. A site is named once; after that its number stands for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[Site, int] = {}
        self._named: set[int] = set()
        self.left_out: set[str] = set()
        """What did not fit, in words."""

    def write(self, table: Table) -> bytes:
        numbers = np.array([self._number(site) for site in table.sites], np.int64)
        scalars = {"scalars": plain(table.scalars), "earlier": {str(k): plain(v) for k, v in table.earlier.items()}}
        room = self.size - _HEADER.size - len(json.dumps(scalars)) - 64
        rows = min(len(numbers), max(room, 0) // _ROW_BYTES)
        if rows < len(numbers):
            self.left_out.add("sites")
        room -= rows * _ROW_BYTES
        counts = zlib.compress(table.counts[:rows].astype(np.uint64).tobytes(), 1) if table.counts.shape[1] else b""
        if len(counts) > room:
            self.left_out.add("histograms")
            counts = b""
        room -= len(counts)
        named = self._new_names(table.sites[:rows], numbers[:rows], room)
        tail = json.dumps({**scalars, "names": named}, separators=(",", ":")).encode()
        header = _HEADER.pack(_VERSION, table.step, rows, len(counts), len(tail), table.group, len(table.sites))
        arrays = (numbers[:rows], table.pieces[:rows], table.values[:rows])
        data = b"".join((header, *(array.tobytes() for array in arrays), counts, tail))
        return data.ljust(self.size, b"\0")

    def _number(self, site: Site) -> int:
        if site not in self._numbers:
            text = "\0".join((site.path, site.kind, site.index)).encode("utf-8", "surrogatepass")
            self._numbers[site] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return self._numbers[site]

    def _new_names(self, sites: Sequence[Site], numbers: Whole, room: int) -> dict[str, list[str]]:
        """As many as fit; the rows of the others are understood when their names have come."""
        found: dict[str, list[str]] = {}
        for site, value in zip(sites, numbers.tolist(), strict=True):
            if value not in self._named:
                entry = [site.path, site.kind, site.index]
                room -= len(json.dumps({value: entry})) + 1
                if room < 0:
                    self.left_out.add("names")
                    break
                found[str(value)] = entry
                self._named.add(value)
        return found


class Reader:
    """Understands the bytes of every rank."""

    def __init__(self) -> None:
        self._sites: dict[int, Site] = {}

    def read(self, data: bytes) -> Table:
        version, step, rows, count_bytes, tail_bytes, group, _ = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError("this is not what a watch of this version sends")
        at = _HEADER.size
        numbers = np.frombuffer(data, np.int64, rows, at)
        pieces = np.frombuffer(data, np.int64, rows, at + 8 * rows)
        values = np.frombuffer(data, np.float64, rows * stats.WIDTH, at + 16 * rows).reshape(rows, stats.WIDTH)
        at += rows * _ROW_BYTES
        counts = np.zeros((rows, 0), np.int64)
        if count_bytes:
            unpacked = np.frombuffer(zlib.decompress(data[at : at + count_bytes]), np.uint64)
            counts = unpacked.astype(np.int64).reshape(rows, stats.BUCKETS)
        tail = json.loads(data[at + count_bytes : at + count_bytes + tail_bytes])
        self._sites |= {int(key): Site(*entry) for key, entry in tail["names"].items()}
        known = np.array([i for i, value in enumerate(numbers.tolist()) if value in self._sites], np.intp)
        sites = [self._sites[value] for value in numbers[known].tolist()]
        return Table(
            step, sites, values[known], counts[known], pieces[known], _numbers(tail["scalars"]),
            {int(key): _numbers(each) for key, each in tail["earlier"].items()}, group,
        )  # fmt: skip


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {tag: number(value) for tag, value in data.items()}


def merge(tables: Sequence[Table]) -> Merged:
    """What all ranks saw, the first one's order first: as if one process had seen it all."""
    order = {site: i for i, site in enumerate(dict.fromkeys(site for table in tables for site in table.sites))}
    owner = np.array([order[site] for table in tables for site in table.sites], np.intp)
    rank = np.repeat(np.arange(len(tables)), [len(table.sites) for table in tables])
    values = np.concatenate([table.values for table in tables])
    pieces = np.concatenate([table.pieces for table in tables])
    groups = np.array([table.group for table in tables], np.int64)[rank]
    sites = list(order)
    kept, apart = _once_each(sites, owner, groups, pieces, values)
    counted = [table for table in tables if len(table.sites)]
    counts = np.zeros((len(sites), 0), np.int64)
    if counted and all(table.counts.shape[1] for table in counted):
        every = np.concatenate([table.counts for table in counted])
        counts = stats.merge_counts(every[kept], owner[kept], len(sites))
    together = Table(
        tables[0].step, sites, stats.merge(values[kept], owner[kept], len(sites)), counts,
        pieces=np.zeros(len(sites), np.int64), scalars=_merge_scalars([table.scalars for table in tables]),
        earlier={
            step: _merge_scalars([table.earlier.get(step, {}) for table in tables])
            for step in sorted({step for table in tables for step in table.earlier})
        },
    )  # fmt: skip
    together.scalars[RANKS] = float(len(counted))
    if (pieces > 0).any():  # every rank knows the norm of its own pieces, and nobody which of them are replicas
        together.scalars.pop(RAW_GRADIENT_NORM, None)
    spreads = _spreads(sites, owner, rank, groups, kept, values)
    return Merged(together, spreads, tuple(_told(sites, apart)))


def _spreads(
    sites: list[Site], owner: NDArray[np.intp], rank: NDArray[np.intp], groups: Whole, kept: NDArray[np.bool_],
    values: Floats,
) -> Floats:  # fmt: skip
    """Between ranks for parameters; for outputs between those that have a batch of their own, pieces put together."""
    if not len(owner):
        return spread.nothing(len(sites))
    of_parameter = np.array([site.kind in OF_PARAMETERS for site in sites])[owner]
    world = int(max(rank.max(), groups.max())) + 1
    who = np.where(of_parameter, rank, groups)
    used = kept | of_parameter
    pairs, key = np.unique(np.stack([owner, who], axis=1)[used], axis=0, return_inverse=True)
    joined = stats.merge(values[used], key.reshape(-1), len(pairs))
    return spread.measure(joined, pairs[:, 0], pairs[:, 1], len(sites), world)


def _once_each(
    sites: list[Site], owner: NDArray[np.intp], groups: Whole, pieces: Whole, values: Floats
) -> tuple[NDArray[np.bool_], list[int]]:
    """Which rows count, so that replicas do not count twice; and the parameters whose replicas are none.

    Of a parameter the same pieces are replicas, whoever holds them. Of an output they are so among ranks that
    work on one batch, where they are equal.
    """
    if not len(owner):
        return np.zeros(0, bool), []
    of_parameter = np.array([site.kind in OF_PARAMETERS for site in sites])[owner]
    scope = np.where(of_parameter, -1, groups)
    _, first, key = np.unique(np.stack([owner, scope, pieces], axis=1), axis=0, return_index=True, return_inverse=True)
    key = key.reshape(-1)
    equal = np.ones(len(first), bool)
    np.logical_and.at(equal, key, _alike(values, values[first[key]]))
    kept = ~equal[key]
    kept[first[equal]] = True
    apart = sorted({int(owner[first[k]]) for k in np.flatnonzero(~equal) if of_parameter[first[k]]})
    return kept, apart


def _alike(one: Floats, other: Floats) -> NDArray[np.bool_]:
    """Whether rows are of the same numbers; sums over many may differ in their last bits."""
    exact = [stats.COUNT, stats.ZEROS, stats.NANS, stats.INFS, stats.MIN, stats.MAX]
    same: NDArray[np.bool_] = (one[:, exact] == other[:, exact]).all(axis=1)
    size = np.sqrt(np.abs(other[:, stats.M2]) / np.maximum(other[:, stats.COUNT], 1.0)) + np.abs(other[:, stats.MEAN])
    with np.errstate(invalid="ignore"):
        same &= ~(np.abs(one[:, stats.MEAN] - other[:, stats.MEAN]) > 1e-6 * size)
        same &= ~(np.abs(one[:, stats.M2] - other[:, stats.M2]) > 1e-5 * np.abs(other[:, stats.M2]))
    return same


_APART = {
    "weight": "they have drifted apart, or were never the same",
    "weight_gradient": "the optimizers do not step with the same ones, as after no_sync() or without a wrapper",
}


def _told(sites: list[Site], apart: list[int]) -> Iterable[str]:
    for kind, why in _APART.items():
        names = [sites[i].path for i in apart if sites[i].kind == kind]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            what = f"the {kind}s of {', '.join(names[:3])}{more} differ between ranks"
            yield f"{what}: {why}. The numbers are over those of all ranks"


def _merge_scalars(scalars: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means, but for those with a better way; over the ranks that have the number."""
    merged = {}
    for tag in dict.fromkeys(tag for each in scalars for tag in each):
        found = [each[tag] for each in scalars if tag in each]
        merged[tag] = float(_way(tag)(found))
    return merged


def _way(tag: str) -> Any:
    if ".dead_fraction/" in tag:
        return min  # what is dead for all ranks is no more than that
    return {SKIPPED: max, NONFINITE_SINCE: min, RAW_GRADIENT_NORM: lambda found: found[0]}.get(tag, np.mean)
