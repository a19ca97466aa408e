"""A logged step of one rank as bytes of a fixed length, and the merged step of all ranks.

NumPy only: no torch, no communication. The length does not depend on the contents: a collective fails if the buffers of
ranks differ in length.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tbhooks.capture.recording.layouts import shared_sites
from tbhooks.capture.recording.step_table import PARAMETER_KINDS, RANKS, Integers, MergedStep, StepTable
from tbhooks.data import checksums, ranks, stats
from tbhooks.data.artifacts import samples
from tbhooks.data.checksums import Checksums
from tbhooks.data.frame import (
    EVALUATION_SINCE,
    NONFINITE_SINCE,
    RAW_GRADIENT_NORM,
    REPLICA_DRIFT,
    SAMPLED,
    SKIPPED,
    Site,
    Sites,
)
from tbhooks.data.jsonable import parse_number, to_jsonable
from tbhooks.data.self_report import listed
from tbhooks.data.stats import Counts, Floats

_UNUSED = -2
"""The shard of a parameter that this rank holds but does not train, while another rank trains it."""

_HEADER = struct.Struct("<7q")
_VERSION = 4
# The number of the site, its shard, its row and its checksum.
_ROW_BYTES = 24 + 8 * stats.WIDTH + 16
# Compressed histogram of one site; that of a layer of GPT-2 takes 130 bytes.
_COUNT_BYTES = 320
_NAME_BYTES = 96
_SPARE_BYTES = 16 << 10
_UNLIMITED = 1 << 62


def capacity(sites: int, with_buckets: bool) -> int:
    """The buffer size for this many sites, with room for some more that appear only when the model runs."""
    sites += sites // 8 + 32
    return _HEADER.size + sites * (_ROW_BYTES + _NAME_BYTES + (_COUNT_BYTES if with_buckets else 0)) + _SPARE_BYTES


class Writer:
    """Writes the tables of this rank as bytes: `size` of them, or without a size as many as it takes.

    A site's name is sent once, and after that only its number.
    """

    def __init__(self, size: int = _UNLIMITED) -> None:
        self.size = size
        self._numbers: dict[Site, int] = {}
        self._named: set[int] = set()
        self._last_sites: tuple[Sequence[Site], Integers] = ((), np.zeros(0, np.int64))
        self.left_out: set[str] = set()
        """What did not fit into the buffer: "sites", "histograms" or "names"."""

    def write(self, table: StepTable) -> bytes:
        numbers = self._numbers_of(table.sites)
        scalars = {
            "scalars": to_jsonable(table.scalars),
            "earlier": {str(k): to_jsonable(v) for k, v in table.earlier.items()},
            **({"samples": table.samples.to_dict()} if table.samples else {}),
            **({"metrics": table.metrics} if table.metrics else {}),
        }
        room = self.size - _HEADER.size - len(json.dumps(scalars)) - 64
        rows = min(len(numbers), max(room, 0) // _ROW_BYTES)
        if rows < len(numbers):
            self.left_out.add("sites")
        room -= rows * _ROW_BYTES
        # A buffer is sent as a whole, filled or not: only the first step, with all names, has to compress histograms.
        is_named = self._named.issuperset(numbers.tolist())
        budget = room if is_named and self.size != _UNLIMITED else 0
        counts = _packed(table.counts[:rows], budget) if table.counts.shape[1] else b""
        if len(counts) > room:
            self.left_out.add("histograms")
            counts = b""
        room -= len(counts)
        names = {} if is_named else self._new_names(table.sites[:rows], numbers[:rows], room)
        tail = json.dumps({**scalars, "names": names}, separators=(",", ":")).encode()
        header = _HEADER.pack(_VERSION, table.step, rows, len(counts), len(tail), table.group, len(table.sites))
        arrays = (numbers[:rows], table.shards[:rows], table.values[:rows], checksums_of(table)[:rows])
        data = b"".join((header, *(array.tobytes() for array in arrays), counts, tail))
        return data if self.size == _UNLIMITED else data.ljust(self.size, b"\0")

    def _numbers_of(self, sites: Sequence[Site]) -> Integers:
        if sites is not self._last_sites[0]:  # nearly always the sites of the step before
            self._last_sites = sites, np.array([self._number(site) for site in sites], np.int64)
        return self._last_sites[1]

    def _number(self, site: Site) -> int:
        if site not in self._numbers:
            text = "\0".join((site.path, site.kind, site.index)).encode("utf-8", "surrogatepass")
            self._numbers[site] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return self._numbers[site]

    def _new_names(self, sites: Sequence[Site], numbers: Integers, room: int) -> dict[str, list[str]]:
        """The names that were not sent before, as many as fit. Rows without a name are dropped by the reader."""
        names: dict[str, list[str]] = {}
        for site, value in zip(sites, numbers.tolist(), strict=True):
            if value not in self._named:
                entry = [site.path, site.kind, site.index]
                room -= len(json.dumps({value: entry})) + 1
                if room < 0:
                    self.left_out.add("names")
                    break
                names[str(value)] = entry
                self._named.add(value)
        return names


class Reader:
    """Reads the bytes of all ranks, with or without their histograms."""

    def __init__(self, with_buckets: bool = True) -> None:
        self._with_buckets = with_buckets
        self._sites: dict[int, Site] = {}

    def read(self, data: bytes) -> StepTable:
        version, step, rows, count_bytes, tail_bytes, group, _ = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError("a rank uses another version of tbhooks")
        at = _HEADER.size
        numbers = np.frombuffer(data, np.int64, rows, at)
        shards = np.frombuffer(data, np.int64, 2 * rows, at + 8 * rows).reshape(rows, 2)
        values = np.frombuffer(data, np.float64, rows * stats.WIDTH, at + 24 * rows).reshape(rows, stats.WIDTH)
        at += rows * _ROW_BYTES
        sums = np.frombuffer(data, np.uint64, 2 * rows, at - 16 * rows).reshape(rows, 2)
        counts = np.zeros((rows, 0), np.int64)
        if count_bytes and self._with_buckets:
            counts = _unpacked(data[at : at + count_bytes], rows)
        tail = json.loads(data[at + count_bytes : at + count_bytes + tail_bytes])
        self._sites |= {int(key): Site(*entry) for key, entry in tail["names"].items()}
        named = [self._sites.get(value) for value in numbers.tolist()]
        sites = [site for site in named if site is not None]
        if len(sites) < rows:  # a name is still to be sent
            known = np.array([site is not None for site in named])
            values, counts, shards, sums = values[known], counts[known], shards[known], sums[known]
        return StepTable(
            step, sites, values, counts, shards, _numbers(tail["scalars"]),
            {int(key): _numbers(each) for key, each in tail["earlier"].items()}, group,
            {start: (kind, reduce) for start, (kind, reduce) in tail.get("metrics", {}).items()},
            samples.Samples.from_dict(tail["samples"]) if "samples" in tail else samples.NO_SAMPLES,
            sums if sums.any() else checksums.empty(0),
        )  # fmt: skip


_RANGE = struct.Struct("<4q")


def _packed(counts: Counts, budget: int = 0) -> bytes:
    """The range of buckets that has counts, in as few bytes as the largest count needs; compressed if that is more than
    `budget` bytes.
    """
    used = np.flatnonzero(counts.any(axis=0))
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    most = counts.max(initial=0)
    width = 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    some = np.ascontiguousarray(counts[:, first:last], f"<u{width}")
    is_compressed = some.nbytes > budget
    header = _RANGE.pack(first, last, width, is_compressed)
    if not is_compressed:
        return header + some.tobytes()
    compressor = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_RLE)  # faster and smaller than level 1 alone
    return b"".join((header, compressor.compress(some.tobytes()), compressor.flush()))


def _unpacked(data: bytes, rows: int) -> Counts:
    first, last, width, is_compressed = _RANGE.unpack_from(data)
    content = data[_RANGE.size :]
    counts = np.zeros((rows, stats.BUCKETS), np.int64)
    some = np.frombuffer(zlib.decompress(content) if is_compressed else content, f"<u{width}")
    counts[:, first:last] = some.reshape(rows, last - first)
    return counts


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {tag: parse_number(value) for tag, value in data.items()}


def merge(tables: Sequence[StepTable]) -> MergedStep:
    """Merges the tables of all ranks, as if one process had captured everything."""
    known, owner = _all_sites([list(table.sites) for table in tables])
    sites = shared_sites(known)
    rank = np.repeat(np.arange(len(tables)), [len(table.sites) for table in tables])
    values = np.concatenate([table.values for table in tables])
    shards = np.concatenate([table.shards for table in tables])
    groups = np.array([table.group for table in tables], np.int64)[rank]
    used = _is_used(sites, owner, rank)
    estimated = {tag for table in tables for tag in table.scalars if tag.startswith(SAMPLED)}
    # Ranks may have taken samples of different sizes: these replicas are equal, although their rows are not.
    same = np.zeros(len(sites), bool)
    if estimated:
        same = np.array([site.kind == "update" and SAMPLED + site.name in estimated for site in sites], bool)
    same = same[owner]
    kept, apart = _once_each(sites, owner, groups, np.where(used, shards[:, 0], _UNUSED), values, same)
    kept &= used
    kept, missing = _without_incomplete(sites, owner, shards, kept)
    metrics = {start: each for table in tables for start, each in table.metrics.items()}
    merged = StepTable(
        tables[0].step, sites, stats.merge(values[kept], owner[kept], len(sites)),
        _merge_counts(tables, owner, kept),
        shards=np.zeros((len(sites), 2), np.int64),
        scalars=_merge_scalars([table.scalars for table in tables], metrics),
        earlier={
            step: _merge_scalars([table.earlier.get(step, {}) for table in tables], {})
            for step in sorted({step for table in tables for step in table.earlier})
        },
        metrics=metrics,
        samples=samples.merge([table.samples for table in tables]),
    )  # fmt: skip
    sums = np.concatenate([checksums_of(table) for table in tables])
    merged.scalars.update(_drifted(sites, owner, rank, shards, sums, used))
    merged.scalars[RANKS] = float(sum(len(table.sites) > 0 for table in tables))
    # Each rank knows the norm of its own shards only, and not which of them are replicas.
    if (shards[:, 0] > 0).any() or (shards[:, 1] > 1).any():
        merged.scalars.pop(RAW_GRADIENT_NORM, None)
    spreads = _spreads(sites, owner, rank, groups, kept, used, values)
    if sums.any():
        merged = replace(merged, checksums=_merge_checksums(sums[kept], owner[kept], len(sites)))
    notes = tuple(_notes(sites, apart, missing))
    if not missing:
        return MergedStep(merged, spreads, notes)
    left = [i for i in range(len(sites)) if i not in missing]
    merged = replace(
        merged, sites=[sites[i] for i in left], values=merged.values[left], counts=merged.counts[left],
        checksums=merged.checksums[left] if len(merged.checksums) else merged.checksums,
    )  # fmt: skip
    return MergedStep(merged, spreads[left], notes, is_whole=False)


def checksums_of(table: StepTable) -> Checksums:
    """The checksums of its sites: zeros if it has none."""
    return table.checksums if len(table.checksums) else checksums.empty(len(table.sites))


def _merge_checksums(sums: Checksums, owner: NDArray[np.intp], n: int) -> Checksums:
    """The checksum of a site over all ranks; none if a rank has none."""
    merged = checksums.merge(sums, owner, n)
    merged[owner[sums[:, 1] == 0]] = 0
    return merged


def _drifted(
    sites: Sites, owner: NDArray[np.intp], rank: NDArray[np.intp], shards: Integers, sums: Checksums,
    used: NDArray[np.bool_],
) -> dict[str, float]:  # fmt: skip
    """A scalar for each weight and weight gradient whose replicas differ in a bit: the lowest rank that differs from
    most ranks, or from the lowest one if there is no majority.
    """
    replicas: dict[tuple[int, int], dict[int, int]] = {}
    compared = sites.derived(_is_of_kinds, ("weight", "weight_gradient"))
    for i in np.flatnonzero(used & (sums[:, 1] > 0) & compared[owner] if len(owner) else used):
        replicas.setdefault((int(owner[i]), int(shards[i, 0])), {})[int(rank[i])] = int(sums[i, 0])
    drifted: dict[str, float] = {}
    for (number, _), by_rank in replicas.items():
        usual, _ = Counter(by_rank[each] for each in sorted(by_rank)).most_common(1)[0]
        others = [each for each in sorted(by_rank) if by_rank[each] != usual]
        if others:
            site = sites[number]
            drifted.setdefault(f"{site.kind}{REPLICA_DRIFT}{site.name}", float(others[0]))
    return drifted


def _all_sites(by_rank: list[list[Site]]) -> tuple[list[Site], NDArray[np.intp]]:
    """All sites, those of the first rank first; and the index of each rank's sites in that list, concatenated."""
    if all(theirs == by_rank[0] for theirs in by_rank):  # nearly always
        return by_rank[0], np.tile(np.arange(len(by_rank[0])), len(by_rank))
    order = {site: i for i, site in enumerate(dict.fromkeys(site for theirs in by_rank for site in theirs))}
    return list(order), np.array([order[site] for theirs in by_rank for site in theirs], np.intp)


def _merge_counts(tables: Sequence[StepTable], owner: NDArray[np.intp], kept: NDArray[np.bool_]) -> Counts:
    """The merged histograms, without columns if a rank that has sites sent none."""
    sites = int(owner.max(initial=-1)) + 1
    if not sites or not all(table.counts.shape[1] for table in tables if len(table.sites)):
        return np.zeros((sites, 0), np.int64)
    merged = np.zeros((sites, stats.BUCKETS), np.int64)
    start = 0
    for table in (table for table in tables if len(table.sites)):
        mine = slice(start, start + len(table.sites))
        if start == 0 and kept[mine].all():  # nearly always; those of the first rank are the first sites
            merged[: mine.stop] = table.counts
            start = mine.stop
            continue
        merged[owner[mine][kept[mine]]] += table.counts[kept[mine]]  # a rank has a site only once
        start = mine.stop
    return merged


def _spreads(
    sites: Sites, owner: NDArray[np.intp], rank: NDArray[np.intp], groups: Integers, kept: NDArray[np.bool_],
    used: NDArray[np.bool_], values: Floats,
) -> Floats:  # fmt: skip
    """How far ranks differ. For outputs, the ranks that work on the same batch count as one."""
    if not len(owner):
        return ranks.empty(len(sites))
    is_parameter = sites.derived(_is_of_kinds, PARAMETER_KINDS)[owner]
    world = int(max(rank.max(), groups.max())) + 1
    who = np.where(is_parameter, rank, groups)
    counted = kept | (is_parameter & used)
    owner, who = owner[counted], who[counted]
    first, key = _unique(owner, who)
    joined = stats.merge(values[counted], key, len(first))
    return ranks.measure(joined, owner[first], who[first], len(sites), world)


def _is_used(sites: Sites, owner: NDArray[np.intp], rank: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows count. A weight that a rank holds but does not train, as of another pipeline stage, does not."""
    path = sites.derived(_path_numbers)[owner]
    is_trained = sites.derived(_is_of_kinds, ("weight_gradient", "update"))[owner]
    is_weight = sites.derived(_is_of_kinds, ("weight",))[owner]
    trained = np.zeros((int(path.max(initial=-1)) + 1, int(rank.max(initial=0)) + 1), bool)
    trained[path[is_trained], rank[is_trained]] = True
    anywhere = np.asarray(trained.any(axis=1))
    return np.asarray(~(is_weight & anywhere[path] & ~trained[path, rank]))


def _path_numbers(sites: Sites) -> NDArray[np.intp]:
    """A number for each path."""
    paths: dict[str, int] = {}
    return np.array([paths.setdefault(site.path, len(paths)) for site in sites], np.intp)


def _is_of_kinds(sites: Sites, kinds: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([site.kind in kinds for site in sites], bool)


def _unique(*columns: NDArray[np.integer[Any]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For each different row of the columns, in ascending order, its first position; and for each row which it is.

    As np.unique with an axis, but as one number a row, which sorts ten times as fast.
    """
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:  # of sites, ranks and shards: the product is far from the largest integer
        least = column.min(initial=0)
        key = key * (int(column.max(initial=0)) - least + 1) + (column - least)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def _once_each(
    sites: Sites, owner: NDArray[np.intp], groups: Integers, shards: Integers, values: Floats,
    same: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], list[int]]:  # fmt: skip
    """Which rows count, so that replicas count once; and the parameters whose replicas differ.

    The same shard of a parameter on two ranks is a replica. Outputs are replicas if they are equal, among ranks that
    work on the same batch. `same` are rows whose replicas are known to be equal.
    """
    if not len(owner):
        return np.zeros(0, bool), []
    is_parameter = sites.derived(_is_of_kinds, PARAMETER_KINDS)[owner]
    scope = np.where(is_parameter, -1, groups)
    first, key = _unique(owner, scope, shards)
    equal = np.ones(len(first), bool)
    np.logical_and.at(equal, key, same | _alike(values, values[first[key]]))
    kept = ~equal[key]
    kept[first[equal]] = True
    blamed = ~equal & is_parameter[first] & (shards[first] != _UNUSED)
    apart = sorted({int(owner[i]) for i in first[blamed]})
    return kept, apart


def _without_incomplete(
    sites: Sites, owner: NDArray[np.intp], shards: Integers, kept: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], set[int]]:
    """Leaves out parameters with a missing shard: a rank did not capture it, or dropped the step."""
    missing = set()
    for i in np.unique(owner[shards[:, 1] > 1]):
        mine = (owner == i) & kept
        if len(np.unique(shards[mine, 0])) < shards[mine, 1].max(initial=1) and sites[i].kind in PARAMETER_KINDS:
            missing.add(int(i))
    return kept & ~np.isin(owner, list(missing)), missing


def _alike(one: Floats, other: Floats) -> NDArray[np.bool_]:
    """Whether rows are statistics of the same values. Sums may differ in their last bits."""
    exact = [stats.COUNT, stats.ZEROS, stats.NANS, stats.INFS, stats.MIN, stats.MAX]
    same: NDArray[np.bool_] = (one[:, exact] == other[:, exact]).all(axis=1)
    size = np.sqrt(np.abs(other[:, stats.M2]) / np.maximum(other[:, stats.COUNT], 1.0)) + np.abs(other[:, stats.MEAN])
    with np.errstate(invalid="ignore"):
        same &= ~(np.abs(one[:, stats.MEAN] - other[:, stats.MEAN]) > 1e-6 * size)
        same &= ~(np.abs(one[:, stats.M2] - other[:, stats.M2]) > 1e-5 * np.abs(other[:, stats.M2]))
    return same


_APART = {
    "weight": "they have drifted apart, or never were the same",
    "weight_gradient": "the optimizers use different gradients, as after no_sync() or without DDP",
}


def _notes(sites: Sites, apart: list[int], missing: set[int]) -> Iterable[str]:
    if missing:
        yield "shards of weights are missing in a step that a rank dropped or did not capture: they are left out"
    for kind, why in _APART.items():
        names = [sites[i].path for i in apart if sites[i].kind == kind]
        if names:
            yield f"the {kind}s of {listed(names, most=3)} differ between ranks: {why}. Statistics are over all of them"


def _merge_scalars(scalars: Sequence[dict[str, float]], metrics: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Scalars over the ranks that have them: the mean, except for metrics and the tags that `_reduction` knows."""
    merged = {}
    for tag in dict.fromkeys(tag for each in scalars for tag in each):
        how = _OF_METRICS[metrics[start][1]] if (start := tag.partition("/")[0]) in metrics else _reduction(tag)
        merged[tag] = float(how([each[tag] for each in scalars if tag in each]))
    return merged


_OF_METRICS: dict[str, Any] = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}
_REDUCTIONS: dict[str, Any] = {
    SKIPPED: max,
    NONFINITE_SINCE: min,
    EVALUATION_SINCE: min,
    RAW_GRADIENT_NORM: lambda values: values[0],
}


def _reduction(tag: str) -> Any:
    """A unit is dead in the job if it is dead on all ranks: at most the smallest fraction."""
    return min if ".dead_fraction/" in tag else _REDUCTIONS.get(tag, np.mean)
