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
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.data import rank_spread, stats
from tbhooks.data.frame import EVALUATION_SINCE, NONFINITE_SINCE, RAW_GRADIENT_NORM, SKIPPED, Site
from tbhooks.data.jsonable import parse_number, to_jsonable
from tbhooks.data.stats import Counts, Floats
from tbhooks.data.step_table import PARAMETER_KINDS, RANKS, Integers, MergedStep, StepTable

_UNUSED = -2
"""Of a parameter that a rank has and does not train, while another does."""

_HEADER = struct.Struct("<7q")
_VERSION = 1
_ROW_BYTES = 24 + 8 * stats.WIDTH
# Of compressed bucket counts; those of a layer of GPT-2 take 130.
_COUNT_BYTES = 320
_NAME_BYTES = 96
_SPARE_BYTES = 16 << 10


def capacity(sites: int, with_buckets: bool) -> int:
    """Bytes for so many sites, and some more that show only when the model runs."""
    sites += sites // 8 + 32
    return _HEADER.size + sites * (_ROW_BYTES + _NAME_BYTES + (_COUNT_BYTES if with_buckets else 0)) + _SPARE_BYTES


class Writer:
    """Turns this rank's tables into bytes. A site is named once; after that its number stands for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[Site, int] = {}
        self._named: set[int] = set()
        self.left_out: set[str] = set()
        """What did not fit, in words."""

    def write(self, table: StepTable) -> bytes:
        numbers = np.array([self._number(site) for site in table.sites], np.int64)
        scalars = {
            "scalars": to_jsonable(table.scalars),
            "earlier": {str(k): to_jsonable(v) for k, v in table.earlier.items()},
        }
        room = self.size - _HEADER.size - len(json.dumps(scalars)) - 64
        rows = min(len(numbers), max(room, 0) // _ROW_BYTES)
        if rows < len(numbers):
            self.left_out.add("sites")
        room -= rows * _ROW_BYTES
        counts = _packed(table.counts[:rows]) if table.counts.shape[1] else b""
        if len(counts) > room:
            self.left_out.add("histograms")
            counts = b""
        room -= len(counts)
        named = self._new_names(table.sites[:rows], numbers[:rows], room)
        tail = json.dumps({**scalars, "names": named}, separators=(",", ":")).encode()
        header = _HEADER.pack(_VERSION, table.step, rows, len(counts), len(tail), table.group, len(table.sites))
        arrays = (numbers[:rows], table.shards[:rows], table.values[:rows])
        data = b"".join((header, *(array.tobytes() for array in arrays), counts, tail))
        return data.ljust(self.size, b"\0")

    def _number(self, site: Site) -> int:
        if site not in self._numbers:
            text = "\0".join((site.path, site.kind, site.index)).encode("utf-8", "surrogatepass")
            self._numbers[site] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return self._numbers[site]

    def _new_names(self, sites: Sequence[Site], numbers: Integers, room: int) -> dict[str, list[str]]:
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
    """Understands the bytes of every rank; `with_buckets`, their histograms, too."""

    def __init__(self, with_buckets: bool = True) -> None:
        self._with_buckets = with_buckets
        self._sites: dict[int, Site] = {}

    def read(self, data: bytes) -> StepTable:
        version, step, rows, count_bytes, tail_bytes, group, _ = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError("this is not what a watch of this version sends")
        at = _HEADER.size
        numbers = np.frombuffer(data, np.int64, rows, at)
        pieces = np.frombuffer(data, np.int64, 2 * rows, at + 8 * rows).reshape(rows, 2)
        values = np.frombuffer(data, np.float64, rows * stats.WIDTH, at + 24 * rows).reshape(rows, stats.WIDTH)
        at += rows * _ROW_BYTES
        counts = np.zeros((rows, 0), np.int64)
        if count_bytes and self._with_buckets:
            counts = _unpacked(data[at : at + count_bytes], rows)
        tail = json.loads(data[at + count_bytes : at + count_bytes + tail_bytes])
        self._sites |= {int(key): Site(*entry) for key, entry in tail["names"].items()}
        found = [self._sites.get(value) for value in numbers.tolist()]
        sites = [site for site in found if site is not None]
        if len(sites) < rows:  # a name is still to come
            known = np.array([site is not None for site in found])
            values, counts, pieces = values[known], counts[known], pieces[known]
        return StepTable(
            step, sites, values, counts, pieces, _numbers(tail["scalars"]),
            {int(key): _numbers(each) for key, each in tail["earlier"].items()}, group,
        )  # fmt: skip


_RANGE = struct.Struct("<3q")


def _packed(counts: Counts) -> bytes:
    """Only the buckets in between are sent, in as few bytes as the largest count needs."""
    used = np.flatnonzero(counts.any(axis=0))
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    width = 4 if counts.max(initial=0) < 1 << 32 else 8
    some = counts[:, first:last].astype(f"<u{width}")
    return _RANGE.pack(first, last, width) + zlib.compress(some.tobytes(), 1)


def _unpacked(data: bytes, rows: int) -> Counts:
    first, last, width = _RANGE.unpack_from(data)
    counts = np.zeros((rows, stats.BUCKETS), np.int64)
    some = np.frombuffer(zlib.decompress(data[_RANGE.size :]), f"<u{width}")
    counts[:, first:last] = some.reshape(rows, last - first)
    return counts


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {tag: parse_number(value) for tag, value in data.items()}


def merge(tables: Sequence[StepTable]) -> MergedStep:
    """What all ranks saw, the first one's order first: as if one process had seen it all."""
    sites, owner = _all_sites([list(table.sites) for table in tables])
    rank = np.repeat(np.arange(len(tables)), [len(table.sites) for table in tables])
    values = np.concatenate([table.values for table in tables])
    pieces = np.concatenate([table.shards for table in tables])
    groups = np.array([table.group for table in tables], np.int64)[rank]
    used = _is_used(sites, owner, rank)
    kept, apart = _once_each(sites, owner, groups, np.where(used, pieces[:, 0], _UNUSED), values)
    kept &= used
    kept, missing = _without_torn(sites, owner, pieces, kept)
    together = StepTable(
        tables[0].step, sites, stats.merge(values[kept], owner[kept], len(sites)),
        _merge_counts(tables, owner, kept),
        shards=np.zeros((len(sites), 2), np.int64), scalars=_merge_scalars([table.scalars for table in tables]),
        earlier={
            step: _merge_scalars([table.earlier.get(step, {}) for table in tables])
            for step in sorted({step for table in tables for step in table.earlier})
        },
    )  # fmt: skip
    together.scalars[RANKS] = float(sum(len(table.sites) > 0 for table in tables))
    if (pieces[:, 0] > 0).any() or (
        pieces[:, 1] > 1
    ).any():  # every rank knows the norm of its own pieces, and nobody which of them are replicas
        together.scalars.pop(RAW_GRADIENT_NORM, None)
    spreads = _spreads(sites, owner, rank, groups, kept, used, values)
    left = [i for i in range(len(sites)) if i not in missing]
    together = replace(
        together, sites=[sites[i] for i in left], values=together.values[left], counts=together.counts[left]
    )
    return MergedStep(together, spreads[left], tuple(_told(sites, apart, missing)), is_whole=not missing)


def _all_sites(of_ranks: list[list[Site]]) -> tuple[list[Site], NDArray[np.intp]]:
    """All there are, the first rank's first, and for each of each rank which one it is."""
    if all(theirs == of_ranks[0] for theirs in of_ranks):  # nearly always, and told by addresses
        return of_ranks[0], np.tile(np.arange(len(of_ranks[0])), len(of_ranks))
    order = {site: i for i, site in enumerate(dict.fromkeys(site for theirs in of_ranks for site in theirs))}
    return list(order), np.array([order[site] for theirs in of_ranks for site in theirs], np.intp)


def _merge_counts(tables: Sequence[StepTable], owner: NDArray[np.intp], kept: NDArray[np.bool_]) -> Counts:
    """Without columns if any rank that saw something sent none."""
    sites = int(owner.max(initial=-1)) + 1
    if not sites or not all(table.counts.shape[1] for table in tables if len(table.sites)):
        return np.zeros((sites, 0), np.int64)
    merged = np.zeros((sites, stats.BUCKETS), np.int64)
    start = 0
    for table in (table for table in tables if len(table.sites)):
        mine = slice(start, start + len(table.sites))
        merged[owner[mine][kept[mine]]] += table.counts[kept[mine]]  # a rank has a site only once
        start = mine.stop
    return merged


def _spreads(
    sites: list[Site], owner: NDArray[np.intp], rank: NDArray[np.intp], groups: Integers, kept: NDArray[np.bool_],
    used: NDArray[np.bool_], values: Floats,
) -> Floats:  # fmt: skip
    """Between ranks for parameters; for outputs between those that have a batch of their own, pieces put together."""
    if not len(owner):
        return rank_spread.empty(len(sites))
    of_parameter = np.array([site.kind in PARAMETER_KINDS for site in sites])[owner]
    world = int(max(rank.max(), groups.max())) + 1
    who = np.where(of_parameter, rank, groups)
    shown = kept | (of_parameter & used)
    pairs, key = np.unique(np.stack([owner, who], axis=1)[shown], axis=0, return_inverse=True)
    joined = stats.merge(values[shown], key.reshape(-1), len(pairs))
    return rank_spread.measure(joined, pairs[:, 0], pairs[:, 1], len(sites), world)


def _is_used(sites: list[Site], owner: NDArray[np.intp], rank: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Not the weights that a rank only has, as of another's stage of a pipeline: there others have a gradient of it."""
    paths: dict[str, int] = {}
    path = np.array([paths.setdefault(site.path, len(paths)) for site in sites], np.intp)[owner]
    kind = np.array([site.kind for site in sites], dtype=object)[owner]
    trained = np.zeros((len(paths), int(rank.max(initial=0)) + 1), bool)
    of_training = (kind == "weight_gradient") | (kind == "update")
    trained[path[of_training], rank[of_training]] = True
    somewhere = np.asarray(trained.any(axis=1))
    return np.asarray(~((kind == "weight") & somewhere[path] & ~trained[path, rank]))


def _once_each(
    sites: list[Site], owner: NDArray[np.intp], groups: Integers, pieces: Integers, values: Floats
) -> tuple[NDArray[np.bool_], list[int]]:
    """Which rows count, so that replicas do not count twice; and the parameters whose replicas are none.

    Of a parameter the same pieces are replicas, whoever holds them. Of an output they are so among ranks that
    work on one batch, where they are equal.
    """
    if not len(owner):
        return np.zeros(0, bool), []
    of_parameter = np.array([site.kind in PARAMETER_KINDS for site in sites])[owner]
    scope = np.where(of_parameter, -1, groups)
    _, first, key = np.unique(np.stack([owner, scope, pieces], axis=1), axis=0, return_index=True, return_inverse=True)
    key = key.reshape(-1)
    equal = np.ones(len(first), bool)
    np.logical_and.at(equal, key, _alike(values, values[first[key]]))
    kept = ~equal[key]
    kept[first[equal]] = True
    blamed = ~equal & of_parameter[first] & (pieces[first] != _UNUSED)
    apart = sorted({int(owner[i]) for i in first[blamed]})
    return kept, apart


def _without_torn(
    sites: list[Site], owner: NDArray[np.intp], pieces: Integers, kept: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], set[int]]:
    """Without parameters of which a piece is missing, because a rank did not read or has dropped it."""
    missing = set()
    for i in np.unique(owner[pieces[:, 1] > 1]):
        mine = (owner == i) & kept
        if len(np.unique(pieces[mine, 0])) < pieces[mine, 1].max(initial=1) and sites[i].kind in PARAMETER_KINDS:
            missing.add(int(i))
    return kept & ~np.isin(owner, list(missing)), missing


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


def _told(sites: list[Site], apart: list[int], missing: set[int]) -> Iterable[str]:
    if missing:
        yield "pieces of weights are missing in a step, as a rank did not read or has dropped it: they are not shown"
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
    return {SKIPPED: max, NONFINITE_SINCE: min, EVALUATION_SINCE: min, RAW_GRADIENT_NORM: lambda found: found[0]}.get(
        tag, np.mean
    )
