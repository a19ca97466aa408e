"""Decodes the frame tensors that the TensorBoard sink writes.

Sizes that a file claims are checked against its actual content before anything is allocated. Histograms take forty
times the space of the rest, so a frame keeps them compressed until they are read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, types_pb2

from tbhooks.data import checksums
from tbhooks.data.checksums import Checksums
from tbhooks.data.frame import EVALUATION, METRIC, Frame, Site
from tbhooks.data.stats import BUCKETS, COUNT, INFS, NANS, ZEROS, Counts, Floats
from tbhooks.sinks.tensorboard import CHECKSUMS, COLUMNS_OF_VERSION, PLUGIN, STORED_COLUMNS, decode_values

LONGEST_NAME = 1 << 16
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<type><u[248])', 'fortran_order': False, "
    rb"'shape': \((?P<rows>\d{1,12}), (?P<columns>\d{1,12})\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 1 << 10
_MUST_BE_COUNTS = (COUNT, ZEROS, NANS, INFS)


@dataclass(frozen=True, slots=True)
class Layout:
    """The metadata of a tag, stored with its first value: the kind, and the sites in the order of the rows."""

    kind: str
    sites: tuple[Site, ...]
    buckets: bool
    sampled: Mapping[str, float] = field(default_factory=dict)
    """The sites that are estimates from a sample, by name, and the fraction of the elements that was read."""
    checksums: bool = False
    """Whether the tensor has checksums, and not rows or bucket counts."""

    @classmethod
    def read(cls, metadata: summary_pb2.SummaryMetadata) -> Layout:
        """Raises ValueError for invalid metadata."""
        try:
            content = json.loads(metadata.plugin_data.content)
            if content["version"] not in COLUMNS_OF_VERSION:
                raise ValueError(f"format version {content['version']!r} is unknown to this version of tbhooks")
            kind, buckets = content["kind"], "encoding" in content
            of_bits = content.get("part") == CHECKSUMS
            if not buckets and not of_bits and tuple(content["columns"]) != COLUMNS_OF_VERSION[content["version"]]:
                raise ValueError("its columns are unknown to this version of tbhooks")
            sites = tuple(Site(_name(path), _name(kind), _name(index)) for path, index in content["sites"])
            sampled = {_name(name): float(fraction) for name, fraction in content.get("sampled", {}).items()}
        except (LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"its metadata is invalid: {problem!r}") from problem
        return cls(kind, sites, buckets, sampled, of_bits)


def metrics_of(layout: Layout) -> dict[str, str]:
    """The kind of each metric of the user, by the part of its tags before the slash."""
    if not layout.kind.startswith(METRIC):
        return {}
    kind = layout.kind.removeprefix(METRIC)
    phase = EVALUATION if kind.startswith(EVALUATION) else ""
    stats = dict.fromkeys(site.path.partition("/")[0] for site in layout.sites)
    return {phase + stat: kind for stat in stats if stat.startswith(METRIC)}


def _name(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a name")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"a name of {len(text)} characters")
    return text


def has_layout(value: summary_pb2.Summary.Value) -> bool:
    """Whether a value carries the layout of a frame tensor."""
    return bool(value.metadata.plugin_data.plugin_name == PLUGIN and value.metadata.plugin_data.content)


def belongs_to_other_plugin(value: summary_pb2.Summary.Value) -> bool:
    """Whether a value is a text, a graph or the like: those name their plugin in every value."""
    return value.metadata.plugin_data.plugin_name not in ("", PLUGIN)


def rows_of(value: summary_pb2.Summary.Value, layout: Layout) -> Floats:
    """The rows of all sites of the layout; raises ValueError if the tensor has another shape.

    The tag of a run that an older version began may have rows of both versions.
    """
    tensor = value.tensor
    shape, content = tuple(d.size for d in tensor.tensor_shape.dim), tensor.tensor_content
    known = is_shape_of_rows(shape, len(layout.sites))
    if tensor.dtype != types_pb2.DT_FLOAT or not known or len(content) != 4 * shape[0] * shape[1]:
        wanted = [len(layout.sites), len(STORED_COLUMNS)]
        raise ValueError(f"a tensor of shape {list(shape)} and {len(content)} bytes, expected {wanted}")
    with np.errstate(all="ignore"):
        return decode_values(np.frombuffer(content, "<f4").reshape(shape))


def checksums_of(value: summary_pb2.Summary.Value, layout: Layout) -> Checksums:
    """The checksums of all sites of the layout; raises ValueError if there are not as many."""
    return checksums.decode(b"".join(value.tensor.string_val[:1]), len(layout.sites))


def is_shape_of_rows(shape: tuple[int, ...], sites: int) -> bool:
    """Whether a tensor of this shape has the rows of so many sites, in any version of the format."""
    return shape in [(sites, len(columns)) for columns in COLUMNS_OF_VERSION.values()]


def recorded_sites(rows: Floats) -> NDArray[np.intp]:
    """The indices of the sites that a step has values of; rows with an invalid count are left out."""
    counts = rows[:, _MUST_BE_COUNTS]
    plausible = (np.isfinite(counts) & (counts >= 0)).all(axis=1)
    return np.flatnonzero(plausible & (rows[:, COUNT] > 0))


@dataclass(frozen=True, slots=True, eq=False)
class PackedCounts:
    """The compressed bucket counts of one kind in one step, and the number of sites they claim to have."""

    content: bytes
    sites: int

    @classmethod
    def of(cls, value: summary_pb2.Summary.Value, layout: Layout) -> PackedCounts:
        """Raises ValueError unless the content starts with the expected header."""
        strings = value.tensor.string_val
        if value.tensor.dtype != types_pb2.DT_STRING or len(strings) != 1:
            raise ValueError("not the expected histograms")
        packed = cls(strings[0], len(layout.sites))
        packed.unpack(only_header=True)
        return packed

    @property
    def unpacked_size(self) -> int:
        return self.sites * BUCKETS * 8

    def unpack(self, *, only_header: bool = False) -> Counts:
        """The counts, `[site, bucket]`. Never allocates more than the sites need."""
        expander = zlib.decompressobj()
        try:
            raw = expander.decompress(
                self.content, _LONGEST_HEADER if only_header else _LONGEST_HEADER + self.unpacked_size
            )
        except zlib.error as problem:
            raise ValueError(f"histograms that cannot be decompressed: {problem}") from problem
        dtype, start = self._header(raw)
        size = self.sites * BUCKETS
        if only_header:
            return np.zeros((0, BUCKETS), dtype=np.int64)
        if len(raw) != start + size * dtype.itemsize or not expander.eof:
            raise ValueError("histograms of another size than expected")
        counts: Counts = np.frombuffer(raw, dtype, size, start).reshape(self.sites, BUCKETS).astype(np.int64)
        if dtype.itemsize == 8 and counts.min(initial=0) < 0:
            raise ValueError("histograms with impossible counts")
        return counts

    def _header(self, raw: bytes) -> tuple[np.dtype[Any], int]:
        """The dtype of the counts and their offset. NumPy's own reader would evaluate the header."""
        match = _NPY_HEADER.match(raw)
        if match is None:
            raise ValueError("histograms that are not an array of counts")
        shape = int(match["rows"]), int(match["columns"])
        if shape != (self.sites, BUCKETS):
            raise ValueError(f"histograms of shape {shape}, expected {(self.sites, BUCKETS)}")
        return np.dtype(match["type"].decode()), match.end()


@dataclass(frozen=True, slots=True, eq=False)
class LazyCounts:
    """The bucket counts of a frame: for each kind the packed counts and the indices of the rows the frame has."""

    parts: tuple[tuple[PackedCounts | None, NDArray[np.intp]], ...]
    report: Callable[[str], None]


@lru_cache(maxsize=2)
def _unpacked(lazy: LazyCounts) -> Counts:
    total = sum(len(rows) for _, rows in lazy.parts)
    counts = np.zeros((total, BUCKETS), dtype=np.int64)
    at = 0
    for packed, rows in lazy.parts:
        if packed is not None:
            try:
                counts[at : at + len(rows)] = packed.unpack()[rows]
            except ValueError as problem:
                lazy.report(str(problem))
        at += len(rows)
    counts.flags.writeable = False
    return counts


class StoredFrame(Frame):
    """A frame whose histograms are decompressed when they are read."""

    @property
    def buckets(self) -> Counts:
        stored = self.__dict__["buckets"]
        return _unpacked(stored) if isinstance(stored, LazyCounts) else stored

    @buckets.setter
    def buckets(self, counts: Counts | LazyCounts) -> None:
        self.__dict__["buckets"] = counts

    @property
    def has_histograms(self) -> bool:
        """Whether there are histograms, without decompressing them."""
        stored = self.__dict__["buckets"]
        return isinstance(stored, LazyCounts) or bool(stored.shape[1])

    def keep(self, counts: LazyCounts) -> None:
        """Sets the histograms of a frame that was made without."""
        self.__dict__["buckets"] = counts
