"""Frame tensors: everything a frame holds, one tensor a kind for the rows and one for the bucket counts.

They are for tools; TensorBoard's own tabs do not show them. `tbhooks.runs.stored_frames` reads what is written here:
what is stored may only change together with it, and with `VERSION` where old readers would read it wrongly.
"""

from __future__ import annotations

import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact, Channels
from tbhooks.data.frame import CHANNEL, Frame, Site
from tbhooks.data.stats import BASE, M2, Counts, Floats
from tbhooks.sinks.scalar_selection import Places, places_of
from tbhooks.sinks.tensorboard.histograms import SiteHistograms

PLUGIN = "tbhooks"
VERSION = 1
# The row as it is stored: std and base_norm instead of sums of squares, which float32 cannot always hold.
STORED_COLUMNS = ("count", "mean", "std", "min", "max", "zeros", "nans", "infs", "base_norm")


class Layout:
    """The order of one kind's sites in its frame tensors.

    TensorBoard keeps a tag's metadata from its first value only, so a site that turns up later starts
    a new tag (`tbhooks/activation`, `tbhooks/activation.2`) with the longer list.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._position: dict[Site, int] = {}
        self._generation = 0
        self._described: set[str] = set()

    def places(self, sites: Sequence[Site]) -> Places:
        """Where the rows of these sites stand, from now on."""
        if any(site not in self._position for site in sites):
            for site in sites:
                self._position.setdefault(site, len(self._position))
            self._generation += 1
        return places_of([self._position[site] for site in sites])

    def describe_again(self) -> None:
        """The next value of each tag carries its description once more."""
        self._described.clear()

    def add(self, frame: Frame, rows: Places, places: Places, summary: summary_pb2.Summary) -> None:
        values = stats.empty_rows(len(self._position))
        values[places] = frame.values[rows]
        self._add_tensor(summary, "", encode_values(values))
        if frame.buckets.shape[1]:
            taken = frame.buckets[rows]
            counts = np.zeros((len(self._position), stats.BUCKETS), dtype=_smallest(taken))
            counts[places] = taken
            self._add_tensor(summary, ".buckets", encode_counts(counts))

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
        if what:
            content["encoding"] = "zlib of a .npy array [sites, buckets]"
        else:
            content["columns"] = list(STORED_COLUMNS)
        return summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(
                plugin_name=PLUGIN, content=json.dumps(content, separators=(",", ":")).encode()
            ),
            data_class=summary_pb2.DATA_CLASS_TENSOR,
        )


def encode_values(values: Floats) -> tensor_pb2.TensorProto:
    """Rows as a float32 tensor [sites, STORED_COLUMNS]; a site not seen in the step has count 0."""
    stored = values.copy()
    stored[:, M2] = np.sqrt(values[:, M2] / np.maximum(stats.finite(values), 1.0))
    stored[:, BASE] = np.sqrt(values[:, BASE])
    with np.errstate(over="ignore"):
        content = stored.astype("<f4").tobytes()
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in stored.shape]
    shape = tensor_shape_pb2.TensorShapeProto(dim=dims)
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape, tensor_content=content)


def decode_values(array: NDArray[np.float32]) -> Floats:
    """Rows from a stored float32 tensor."""
    values = array.astype(np.float64)
    values[:, M2] = np.square(values[:, M2]) * np.maximum(stats.finite(values), 0.0)
    values[:, BASE] = np.square(values[:, BASE])
    return values


def _smallest(counts: NDArray[np.integer[Any]]) -> str:
    return "<u4" if counts.max(initial=0) < 2**32 else "<u8"


def encode_counts(counts: NDArray[np.integer[Any]]) -> tensor_pb2.TensorProto:
    """Bucket counts as one compressed string: most of the 385 buckets of a site are empty.

    What repeats is zeros. To look for nothing else is faster, and smaller than what level 1 finds.
    """
    counts = np.ascontiguousarray(counts, dtype=_smallest(counts))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(counts))
    squeeze = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_RLE)
    content = b"".join((squeeze.compress(head.getvalue()), squeeze.compress(counts.data), squeeze.flush()))
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=[content])


def decode_counts(content: bytes) -> Counts:
    """Bucket counts from a stored string."""
    return np.load(io.BytesIO(zlib.decompress(content)), allow_pickle=False).astype(np.int64)  # type: ignore[no-any-return]


# Stock histograms of one layer: each is a tag of its own, and TensorBoard grows slow with thousands of those.
MOST_HISTOGRAMS = 64


def joined(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Those of one kind together, each channel once: an event has one value a tag."""
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
    """Into the step's event; TensorBoard's TBHOOKS tab shows it as a map of channels by steps."""
    kind = CHANNEL + channels.kind
    layout = run.layouts.setdefault(kind, Layout(kind))
    frame = Frame(run.step, run.time, 0, _sites(channels, kind), channels.values, channels.counts)
    layout.add(frame, places_of(range(len(frame.sites))), layout.places(frame.sites), summary)
    if channels.drawn and channels.counts.shape[1]:
        summary.MergeFromString(_histograms(channels, frame))


def _sites(channels: Channels, kind: str) -> tuple[Site, ...]:
    return tuple(Site(path, kind, index) for path, index in channels.names)


def _histograms(channels: Channels, frame: Frame) -> bytes:
    so_far: Counter[str] = Counter()
    rows = []
    for i, (path, _) in enumerate(channels.names):
        if path in channels.drawn and so_far[path] < MOST_HISTOGRAMS:
            so_far[path] += 1
            rows.append(i)
    sites = tuple(Site(channels.names[i][0], channels.kind, channels.names[i][1]) for i in rows)
    return SiteHistograms(sites).encoded(
        Frame(frame.step, frame.time, 0, sites, frame.values[rows], frame.buckets[rows])
    )
