"""Frame tensors back into frames: the reading half of the TensorBoard sink.

What a file claims about sizes is checked against what is there before anything is allocated. Histograms
weigh forty times the rest, so a frame keeps them compressed until somebody looks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, types_pb2

from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import BUCKETS, COUNT, INFS, NANS, ZEROS, Counts, Floats
from tbhooks.sinks.tensorboard import PLUGIN, STORED_COLUMNS, VERSION, decode_values

LONGEST_NAME = 1 << 16
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<type><u[48])', 'fortran_order': False, "
    rb"'shape': \((?P<rows>\d{1,12}), (?P<columns>\d{1,12})\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 1 << 10
_MUST_BE_COUNTS = (COUNT, ZEROS, NANS, INFS)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the first value of a tag says about all of them: the kind, and the sites in the order of the rows."""

    kind: str
    sites: tuple[Site, ...]
    buckets: bool

    @classmethod
    def read(cls, metadata: summary_pb2.SummaryMetadata) -> Layout:
        """Raises ValueError for a description that is none."""
        try:
            content = json.loads(metadata.plugin_data.content)
            if content["version"] != VERSION:
                raise ValueError(f"format version {content['version']!r} is not one this tbhooks knows")
            kind, buckets = content["kind"], "encoding" in content
            if not buckets and tuple(content["columns"]) != STORED_COLUMNS:
                raise ValueError("the columns are not those this tbhooks knows")
            sites = tuple(Site(_name(path), _name(kind), _name(index)) for path, index in content["sites"])
        except (LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"the description of its sites does not read: {problem!r}") from problem
        return cls(kind, sites, buckets)


def _name(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a name")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"a name of {len(text)} characters")
    return text


def is_described(value: summary_pb2.Summary.Value) -> bool:
    """Whether a value starts a tag of frame tensors."""
    return bool(value.metadata.plugin_data.plugin_name == PLUGIN and value.metadata.plugin_data.content)


def is_for_another_tab(value: summary_pb2.Summary.Value) -> bool:
    """Whether a value says that it is a text, a graph or the like: these name their plugin in every value."""
    return value.metadata.plugin_data.plugin_name not in ("", PLUGIN)


def rows_of(value: summary_pb2.Summary.Value, layout: Layout) -> Floats:
    """The rows of every site of the layout; raises ValueError if the tensor is not of that shape."""
    tensor = value.tensor
    shape, wanted = tuple(d.size for d in tensor.tensor_shape.dim), (len(layout.sites), len(STORED_COLUMNS))
    content = tensor.tensor_content
    if tensor.dtype != types_pb2.DT_FLOAT or shape != wanted or len(content) != 4 * shape[0] * shape[1]:
        raise ValueError(f"a tensor of shape {list(shape)} and {len(content)} bytes where {list(wanted)} was announced")
    with np.errstate(all="ignore"):
        return decode_values(np.frombuffer(content, "<f4").reshape(wanted))


def seen_in(rows: Floats) -> NDArray[np.intp]:
    """Which sites a step has numbers of; a count that is none is nothing anybody wrote."""
    counts = rows[:, _MUST_BE_COUNTS]
    plausible = (np.isfinite(counts) & (counts >= 0)).all(axis=1)
    return np.flatnonzero(plausible & (rows[:, COUNT] > 0))


@dataclass(frozen=True, slots=True, eq=False)
class PackedCounts:
    """The bucket counts of one kind in one step, compressed, with how many sites they claim to be of."""

    content: bytes
    sites: int

    @classmethod
    def of(cls, value: summary_pb2.Summary.Value, layout: Layout) -> PackedCounts:
        """Raises ValueError unless the content starts like what was announced."""
        strings = value.tensor.string_val
        if value.tensor.dtype != types_pb2.DT_STRING or len(strings) != 1:
            raise ValueError("no histograms where histograms were announced")
        packed = cls(strings[0], len(layout.sites))
        packed.unpack(only_header=True)
        return packed

    @property
    def unpacked_size(self) -> int:
        return self.sites * BUCKETS * 8

    def unpack(self, *, only_header: bool = False) -> Counts:
        """Never more bytes than the sites need, whatever the content would expand to."""
        expander = zlib.decompressobj()
        try:
            raw = expander.decompress(
                self.content, _LONGEST_HEADER if only_header else _LONGEST_HEADER + self.unpacked_size
            )
        except zlib.error as problem:
            raise ValueError(f"histograms that do not decompress: {problem}") from problem
        dtype, start = self._header(raw)
        size = self.sites * BUCKETS
        if only_header:
            return np.zeros((0, BUCKETS), dtype=np.int64)
        if len(raw) != start + size * dtype.itemsize or not expander.eof:
            raise ValueError("histograms of another size than announced")
        counts: Counts = np.frombuffer(raw, dtype, size, start).reshape(self.sites, BUCKETS).astype(np.int64)
        if dtype.itemsize == 8 and counts.min(initial=0) < 0:
            raise ValueError("histograms of more than there can be")
        return counts

    def _header(self, raw: bytes) -> tuple[np.dtype[Any], int]:
        """The type of the numbers and where they start; NumPy's own reader evaluates what it finds there."""
        match = _NPY_HEADER.match(raw)
        if match is None:
            raise ValueError("histograms that are no array of counts")
        shape = int(match["rows"]), int(match["columns"])
        if shape != (self.sites, BUCKETS):
            raise ValueError(f"histograms of shape {shape} where {(self.sites, BUCKETS)} was announced")
        return np.dtype(match["type"].decode()), match.end()


@dataclass(frozen=True, slots=True, eq=False)
class LazyCounts:
    """The bucket counts of a frame: for each kind the packed counts, and which of their rows the frame has."""

    parts: tuple[tuple[PackedCounts | None, NDArray[np.intp]], ...]
    tell: Callable[[str], None]


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
                lazy.tell(str(problem))
        at += len(rows)
    counts.flags.writeable = False
    return counts


class StoredFrame(Frame):
    """A frame whose histograms are unpacked when they are looked at."""

    @property
    def buckets(self) -> Counts:
        stored = self.__dict__["buckets"]
        return _unpacked(stored) if isinstance(stored, LazyCounts) else stored

    @buckets.setter
    def buckets(self, counts: Counts | LazyCounts) -> None:
        self.__dict__["buckets"] = counts

    @property
    def has_histograms(self) -> bool:
        """Whether there are any, without unpacking them."""
        stored = self.__dict__["buckets"]
        return isinstance(stored, LazyCounts) or bool(stored.shape[1])

    def keep(self, counts: LazyCounts) -> None:
        """Takes the place of no histograms at all."""
        self.__dict__["buckets"] = counts
