"""Frame tensors: all numbers of a frame, with one tensor per kind for the rows and one for the bucket counts.

The plugin and `tbhooks.runs` read them; TensorBoard's own tabs do not show them. The format may only change together
with `tbhooks.runs.stored_frames`, and with `VERSION` if older readers would misread it.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

from tbhooks.data import checksums, stats
from tbhooks.data.artifacts import Artifact, Channels
from tbhooks.data.artifacts.vectors import EXPERTS
from tbhooks.data.frame import AS_SCALARS, CHANNEL, EVALUATION, METRIC, RECORDED_KINDS, SAMPLED, Frame, Site, Sites
from tbhooks.data.stats import BASE, M2, M3, M4, Counts, Floats, Rows
from tbhooks.sinks.scalar_selection import Indices, indices_of
from tbhooks.sinks.tensorboard.histograms import SiteHistograms
from tbhooks.sinks.tensorboard.protobuf import plugin_metadata, strings

PLUGIN = "tbhooks"
VERSION = 2
# The stored row has std, base_norm, skewness and kurtosis instead of sums of powers, which may overflow float32.
STORED_COLUMNS = (
    "count", "mean", "std", "min", "max", "zeros", "nans", "infs", "base_norm", "skewness", "kurtosis",
)  # fmt: skip
COLUMNS_OF_VERSION = {1: STORED_COLUMNS[:9], VERSION: STORED_COLUMNS}
"""The columns of every version that can be read."""
CHECKSUMS = ".checksums"
"""In the tag of the tensor with the checksums of a kind."""


class Layout:
    """The order of one kind's sites in its frame tensors.

    TensorBoard keeps only the metadata of a tag's first value. A site that appears later therefore starts a new tag
    (`tbhooks/activation`, `tbhooks/activation.2`) with the longer list. So does a change of which sites are sampled.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._position: dict[Site, int] = {}
        self._generation = 0
        self._sampled: dict[str, float] = {}
        self._described: set[str] = set()

    def positions(self, sites: Sequence[Site]) -> Indices:
        """The rows of these sites in the tensor; adds new sites at the end."""
        if any(site not in self._position for site in sites):
            for site in sites:
                self._position.setdefault(site, len(self._position))
            self._generation += 1
        return indices_of([self._position[site] for site in sites])

    def describe_again(self) -> None:
        """Makes the next value of each tag carry its metadata again."""
        self._described.clear()

    def add(self, frame: Frame, rows: Indices, positions: Indices, summary: summary_pb2.Summary) -> None:
        sampled = sampled_fractions(frame) if self._kind == "update" else {}
        if sampled != self._sampled:
            self._sampled = sampled
            self._generation += bool(self._described)
        size = len(self._position)
        is_whole = isinstance(positions, slice) and positions == slice(0, size)
        values = frame.values[rows] if is_whole else stats.empty_rows(size)
        if not is_whole:
            values[positions] = frame.values[rows]
        self._add_tensor(summary, "", encode_values(values))
        if frame.buckets.shape[1]:
            taken = frame.buckets[rows]
            if is_whole:
                counts = taken
            else:
                counts = np.zeros((size, stats.BUCKETS), dtype=_smallest(taken))
                counts[positions] = taken
            self._add_tensor(summary, ".buckets", encode_counts(counts))
        if len(frame.checksums):
            made = checksums.empty(len(self._position))
            made[positions] = frame.checksums[rows]
            self._add_tensor(summary, CHECKSUMS, strings([checksums.encode(made)]))

    def _add_tensor(self, summary: summary_pb2.Summary, what: str, tensor: tensor_pb2.TensorProto) -> None:
        suffix = "" if self._generation == 1 else f".{self._generation}"
        tag = f"{PLUGIN}/{self._kind}{what}{suffix}"
        value = summary.value.add(tag=tag, tensor=tensor)
        if tag not in self._described:
            self._described.add(tag)
            value.metadata.CopyFrom(self._metadata(what))

    def _metadata(self, what: str) -> summary_pb2.SummaryMetadata:
        content: dict[str, Any] = {
            "version": VERSION, "kind": self._kind, "sites": [[site.path, site.index] for site in self._position],
        }  # fmt: skip
        if what == CHECKSUMS:
            content["part"] = CHECKSUMS
        elif what:
            content["encoding"] = "zlib of a .npy array [sites, buckets]"
        else:
            content["columns"] = list(STORED_COLUMNS)
            if self._sampled:
                content["sampled"] = self._sampled
        return plugin_metadata(PLUGIN, json.dumps(content, separators=(",", ":")).encode())


def sampled_fractions(frame: Frame) -> dict[str, float]:
    """The parameters whose updates are estimates from a sample, and the fraction of the elements that was read."""
    tags = (tag for tag in frame.scalars if tag.startswith(SAMPLED))
    return {tag.removeprefix(SAMPLED): frame.scalars[tag] for tag in tags}


def encode_values(values: Floats) -> tensor_pb2.TensorProto:
    """Rows as a float32 tensor [sites, STORED_COLUMNS]; a site that was not recorded in the step has count 0."""
    stored = values.copy()
    rows = Rows(values)
    stored[:, M2] = np.sqrt(values[:, M2] / rows.divisor)
    stored[:, BASE] = np.sqrt(values[:, BASE])
    stored[:, M3], stored[:, M4] = rows.stat("skewness"), rows.stat("kurtosis")
    with np.errstate(over="ignore"):
        content = stored.astype("<f4").tobytes()
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in stored.shape]
    shape = tensor_shape_pb2.TensorShapeProto(dim=dims)
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape, tensor_content=content)


def decode_values(array: NDArray[np.float32], *, shape: bool = True) -> Floats:
    """Rows from a stored float32 tensor; m3 and m4 are NaN if it has version 1, and undecoded without `shape`."""
    values = stats.widened(array.astype(np.float64))
    n, std = np.maximum(stats.finite(values), 0.0), values[:, M2].copy()
    values[:, M2] = np.square(std) * n
    if shape:
        values[:, M3] = np.where(std == 0, 0.0, values[:, M3] * std**3 * n)
        values[:, M4] = np.where(std == 0, 0.0, values[:, M4] * std**4 * n)
    values[:, BASE] = np.square(values[:, BASE])
    return values


def _smallest(counts: NDArray[np.integer[Any]]) -> str:
    """The narrowest type that holds the counts. Half the width saves a quarter of the compressed bytes."""
    most = counts.max(initial=0)
    return "<u2" if most < 2**16 else "<u4" if most < 2**32 else "<u8"


def encode_counts(counts: NDArray[np.integer[Any]]) -> tensor_pb2.TensorProto:
    """Bucket counts as one compressed string: most of the 385 buckets of a site are empty.

    Run-length encoding of the zeros is faster and smaller than zlib's level 1.
    """
    counts = np.ascontiguousarray(counts, dtype=_smallest(counts))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(counts))
    compressor = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_RLE)
    content = b"".join((compressor.compress(head.getvalue()), compressor.compress(counts.data), compressor.flush()))
    return strings([content])


def decode_counts(content: bytes) -> Counts:
    """Bucket counts from a stored string."""
    return np.load(io.BytesIO(zlib.decompress(content)), allow_pickle=False).astype(np.int64)  # type: ignore[no-any-return]


def number_rows(numbers: Floats) -> Floats:
    """Each number as the row of a tensor with that one element."""
    rows = stats.empty_rows(len(numbers))
    rows[:, stats.COUNT], rows[:, stats.NANS], rows[:, stats.INFS] = 1, np.isnan(numbers), np.isinf(numbers)
    finite = np.isfinite(numbers)
    for column in (stats.MEAN, stats.MIN, stats.MAX):
        rows[finite, column] = numbers[finite]
    return rows


def add_metrics(frame: Frame, layouts: dict[str, Layout], summary: summary_pb2.Summary) -> None:
    """Adds the numbers of single sites that are no statistics of a row, such as metrics, for the TBHOOKS tab.

    The tag of the kind `activation` is `tbhooks/metric.activation`. A number has a row whose path is the name of the
    metric, a slash and the name of the site; the index is the position of one of several numbers.
    """
    by_kind: dict[str, dict[Site, float]] = {}
    for tag, number in frame.scalars.items():
        site = _metric_site(frame, tag)
        if site is not None:
            by_kind.setdefault(site.kind, {})[site] = number
    for kind, numbers in by_kind.items():
        sites, values = Sites(numbers), number_rows(np.array(list(numbers.values())))
        layout = layouts.setdefault(kind, Layout(kind))
        one = Frame(frame.step, frame.time, 0, sites, values, np.zeros((len(sites), 0), dtype=np.int64))
        layout.add(one, indices_of(range(len(sites))), layout.positions(sites), summary)


_KINDS = (*RECORDED_KINDS, EXPERTS)
_ELEMENT = re.compile(r"(.*)(\[\d+\])", re.DOTALL)


def _metric_site(frame: Frame, tag: str) -> Site | None:
    start, slash, name = tag.partition("/")
    kind, stat = frame.metrics.get(start), start.removeprefix(EVALUATION)
    if kind is None:
        kind, _, stat = start.rpartition(".")
        if not slash or stat not in AS_SCALARS or kind.removeprefix(EVALUATION) not in _KINDS:
            return None  # a scalar of the user may have any name
    element = _ELEMENT.fullmatch(name) if frame.position(name, kind) is None else None
    name, index = (name, "") if element is None else (element[1], element[2])
    return Site(f"{stat}/{name}", METRIC + kind, index)


# The number of histograms per layer in TensorBoard: each is a tag, and thousands of tags make TensorBoard slow.
MAX_HISTOGRAMS = 64


def joined(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Merges the channels of one kind, each channel once: an event has one value per tag."""
    kinds: dict[str, list[Channels]] = {}
    for artifact in artifacts:
        if isinstance(artifact, Channels):
            kinds.setdefault(artifact.kind, []).append(artifact)
        else:
            yield artifact
    yield from map(_join, kinds.values())


def _join(several: list[Channels]) -> Channels:
    if len(several) == 1:
        return several[0]
    names = [name for one in several for name in one.names]
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    rows = sorted(first.values())
    values, counts = (
        np.concatenate(arrays)[rows] for arrays in zip(*((o.values, o.counts) for o in several), strict=True)
    )
    drawn = frozenset[str]().union(*(one.drawn for one in several))
    return Channels(several[0].kind, tuple(names[i] for i in rows), values, counts, drawn)


def write(channels: Channels, summary: summary_pb2.Summary, run: Any) -> None:
    """Adds channels to the step's event; the TBHOOKS tab shows them as a map of channels by steps."""
    kind = CHANNEL + channels.kind
    layout = run.layouts.setdefault(kind, Layout(kind))
    frame = Frame(run.step, run.time, 0, _sites(channels, kind), channels.values, channels.counts)
    layout.add(frame, indices_of(range(len(frame.sites))), layout.positions(frame.sites), summary)
    if channels.drawn and channels.counts.shape[1]:
        summary.MergeFromString(_histograms(channels, frame))


def _sites(channels: Channels, kind: str) -> Sites:
    return Sites(Site(path, kind, index) for path, index in channels.names)


def _histograms(channels: Channels, frame: Frame) -> bytes:
    drawn: Counter[str] = Counter()
    rows = []
    for i, (path, _) in enumerate(channels.names):
        if path in channels.drawn and drawn[path] < MAX_HISTOGRAMS:
            drawn[path] += 1
            rows.append(i)
    sites = Sites(Site(channels.names[i][0], channels.kind, channels.names[i][1]) for i in rows)
    return SiteHistograms(sites).encode(
        Frame(frame.step, frame.time, 0, sites, frame.values[rows], frame.buckets[rows])
    )
