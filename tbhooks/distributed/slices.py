"""Merging with many ranks: the sites of a step are divided among some ranks, and each of them merges its slice.

If one rank receives everything, its traffic and its time grow with the number of ranks. Here every rank sends each
slice of its table to the rank that merges it, and the first rank receives only what is merged: as much with two ranks
as with thousands. Each slice is merged by `merge.merge`, so the numbers are the same to the bit. NumPy only: no torch,
no communication.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tbhooks.capture.recording.step_table import RANKS, MergedStep, StepTable
from tbhooks.data import checksums, ranks
from tbhooks.data.artifacts import samples
from tbhooks.data.frame import RAW_GRADIENT_NORM, SAMPLED, Site
from tbhooks.distributed import merge
from tbhooks.distributed.merge import Reader, Writer

# More slices make the slices smaller, down to a few sites each; then the parts that do not shrink prevail.
MOST_SLICES = 128
BYTES_A_SLICE = 2048

_PRESENT = "tbhooks.present"
"""A scalar of the first slice, if the rank has sites."""
_LENGTHS = struct.Struct("<3q")


def slice_count(size: int, world: int) -> int:
    """How many slices a table of this many bytes has in a job of this many ranks. The first rank merges none."""
    return max(1, min(world - 1, MOST_SLICES, size // BYTES_A_SLICE))


def _slice_of(text: str, count: int) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % count


def split(table: StepTable, count: int) -> list[StepTable]:
    """The slices of a table. Sites with the same path, and what is known of them, are in the same slice."""
    place = np.array([_slice_of(site.path, count) for site in table.sites], np.intp)
    sampled = {SAMPLED + site.name: int(at) for site, at in zip(table.sites, place, strict=True)}
    scalars: list[dict[str, float]] = [{} for _ in range(count)]
    for tag, value in table.scalars.items():
        scalars[sampled.get(tag, _slice_of(tag, count))][tag] = value
    if len(table.sites):
        scalars[0][_PRESENT] = 1.0
    earlier: list[dict[int, dict[str, float]]] = [{} for _ in range(count)]
    for step, each in table.earlier.items():
        for tag, value in each.items():
            earlier[_slice_of(tag, count)].setdefault(step, {})[tag] = value
    parts = []
    for number in range(count):
        mine = np.flatnonzero(place == number)
        parts.append(
            replace(
                table, sites=[table.sites[int(i)] for i in mine], values=table.values[mine], counts=table.counts[mine],
                shards=table.shards[mine], scalars=scalars[number], earlier=earlier[number],
                samples=table.samples if number == count - 1 else samples.NO_SAMPLES,
                checksums=table.checksums[mine] if len(table.checksums) else table.checksums,
            )
        )  # fmt: skip
    return parts


class SliceWriter:
    """Writes the slices of one rank's tables, each as short as it can be."""

    def __init__(self, count: int) -> None:
        self._writers = [Writer() for _ in range(count)]

    def write(self, table: StepTable) -> list[bytes]:
        parts = split(table, len(self._writers))
        return [writer.write(part) for writer, part in zip(self._writers, parts, strict=True)]


class SliceMerger:
    """Merges one slice of all ranks, on the rank that is responsible for it."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._writer = Writer()

    def merge(self, data: Sequence[bytes]) -> tuple[bytes, str]:
        """The merged slice for the first rank, from what each rank has sent, and what is wrong, which is sent, too."""
        try:
            tables = [self._reader.read(each) for each in data]
            steps = ", ".join(f"rank {i} at {table.step}" for i, table in enumerate(tables[:8]))
            if len({table.step for table in tables}) > 1:
                raise RuntimeError(f"ranks are not at the same step: {steps}")
            present = sum(table.scalars.pop(_PRESENT, 0.0) for table in tables)
            merged = merge.merge(tables)
        except Exception as problem:  # the first rank ends the merging, and says why
            return _packed({"problem": str(problem) or repr(problem)}), str(problem) or repr(problem)
        shards = np.concatenate([table.shards for table in tables])
        notes = {
            "notes": merged.notes, "is_whole": merged.is_whole, "present": present,
            "is_sharded": bool((shards[:, 0] > 0).any() or (shards[:, 1] > 1).any()),
        }  # fmt: skip
        return _packed(notes, merged.spreads.tobytes(), self._writer.write(merged.table)), ""


def _packed(notes: dict[str, object], spreads: bytes = b"", table: bytes = b"") -> bytes:
    tail = json.dumps(notes).encode()
    return _LENGTHS.pack(len(tail), len(spreads), len(table)) + tail + spreads + table


class SliceReader:
    """Puts the merged slices together, on the first rank."""

    def __init__(self) -> None:
        self._reader = Reader()

    def read(self, data: Sequence[bytes], first: Sequence[Site]) -> MergedStep:
        """The merged step. `first` are the sites of the first rank, whose order it has. Raises if a slice failed."""
        slices = [self._read(each) for each in data]
        tables = [part.table for part, _ in slices]
        sites = [site for table in tables for site in table.sites]
        place = {site: i for i, site in enumerate(sites)}
        known = [place[site] for site in first if site in place]
        order = np.array([*known, *sorted(set(range(len(sites))) - set(known))], np.intp)
        with_sites = [table for table in tables if len(table.sites)]
        has_counts = all(table.counts.shape[1] for table in with_sites)
        counts = [table.counts if has_counts else table.counts[:, :0] for table in with_sites]
        sums = [merge.checksums_of(table) for table in with_sites] if any(len(t.checksums) for t in tables) else []
        scalars = {tag: value for table in tables for tag, value in table.scalars.items()}
        scalars[RANKS] = sum(float(notes["present"]) for _, notes in slices)
        if any(notes["is_sharded"] for _, notes in slices):
            scalars.pop(RAW_GRADIENT_NORM, None)
        steps = sorted({step for table in tables for step in table.earlier})
        table = StepTable(
            tables[0].step, [sites[i] for i in order],
            np.concatenate([table.values for table in tables])[order],
            np.concatenate(counts)[order] if counts else np.zeros((0, 0), np.int64),
            np.zeros((len(sites), 2), np.int64), scalars,
            {step: {tag: v for t in tables for tag, v in t.earlier.get(step, {}).items()} for step in steps},
            metrics={start: each for t in tables for start, each in t.metrics.items()},
            samples=tables[-1].samples,
            checksums=np.concatenate(sums)[order] if sums else checksums.empty(0),
        )  # fmt: skip
        found = [part.spreads for part, _ in slices if len(part.spreads)]
        spreads = np.concatenate(found)[order] if found else ranks.empty(0)
        notes = tuple(dict.fromkeys(note for part, _ in slices for note in part.notes))
        return MergedStep(table, spreads, notes, is_whole=all(part.is_whole for part, _ in slices))

    def _read(self, data: bytes) -> tuple[MergedStep, dict[str, Any]]:
        tail, spread_bytes, table_bytes = _LENGTHS.unpack_from(data)
        at = _LENGTHS.size + tail
        notes = json.loads(data[_LENGTHS.size : at])
        if "problem" in notes:
            raise RuntimeError(notes["problem"])
        table = self._reader.read(data[at + spread_bytes : at + spread_bytes + table_bytes])
        spreads = np.frombuffer(data, np.float64, spread_bytes // 8, at)
        shape = (len(table.sites), -1, len(ranks.FIELDS))
        spreads = spreads.reshape(shape) if len(table.sites) else ranks.empty(0)
        return MergedStep(table, spreads, tuple(notes["notes"]), notes["is_whole"]), notes
