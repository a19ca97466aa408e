"""Frames into TensorBoard: one Event a step, through the user's own SummaryWriter.

A second event file in the same run would hide the user's scalars under TensorBoard's Python loader,
so nothing is opened beside what the user gave. Stock scalars and histograms are few and readable; the
rest of the frame goes into one tensor a kind (see `encode_values` and `encode_counts`), for tools.
"""

from __future__ import annotations

import io
import json
import math
import weakref
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import wrapt
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer import record_writer

from tbhooks import stats
from tbhooks.errors import ArgumentError, check_names
from tbhooks.frame import ALL_KINDS, Frame, Site
from tbhooks.sinks.findings import FindingWriter
from tbhooks.stats import BASE, M2, STAT_NAMES, Counts, Floats

PLUGIN = "tbhooks"
VERSION = 1

CORE_SCALARS = {
    "activation": ("mean", "std", "zero_fraction"),
    "gradient": ("norm",),
    "weight": ("norm",),
    "weight_gradient": ("norm",),
    "update": ("ratio",),
    "input": ("mean", "std", "zero_fraction"),
    "functional": ("mean", "std", "zero_fraction"),
}
# Logged for any kind on the steps where they are not zero, so that a NaN is never out of sight.
ALARMS = ("nan_count", "inf_count")
# An update's distribution is in the frame tensors; its stock histogram would tell few readers anything.
HISTOGRAM_KINDS = frozenset(ALL_KINDS) - {"update"}
# On TensorBoard's linear axis, everything within 1/1024 of the range around zero is one line.
FINEST_SHARE = 2.0**-10

# The row as it is stored: std and base_norm instead of sums of squares, which float32 cannot always hold.
STORED_COLUMNS = ("count", "mean", "std", "min", "max", "zeros", "nans", "infs", "base_norm")


def scalar_table(scalars: object) -> dict[str, tuple[str, ...]]:
    """Which stats of each kind become stock scalars, from what the user asked for."""
    if isinstance(scalars, str):
        if scalars == "core":
            return dict(CORE_SCALARS)
        if scalars == "all":
            return {k: tuple(name for name in STAT_NAMES if name != "ratio" or k == "update") for k in ALL_KINDS}
        scalars = (scalars,)
    if not isinstance(scalars, Iterable):
        raise ArgumentError(f'scalars is "core", "all", a list of stat names, or (), not {scalars!r}')
    asked = tuple(scalars)
    check_names("stat", asked, (*STAT_NAMES, *(f"{kind}.{name}" for kind in ALL_KINDS for name in STAT_NAMES)))
    return {
        kind: tuple(name for name in STAT_NAMES if name in asked or f"{kind}.{name}" in asked) for kind in ALL_KINDS
    }


class TensorBoardSink:
    """Writes to a torch or tensorboardX SummaryWriter, or to one of its own when given a directory."""

    def __init__(self, writer: Any, scalars: object = "core") -> None:
        self._scalars = scalar_table(scalars)
        self._owned = isinstance(writer, str | Path)
        self._writer = _open(writer) if self._owned else writer
        self._events = self._writer._get_file_writer().event_writer
        self._event_class = _event_class(self._writer)
        self._layouts: dict[str, _Layout] = {}
        self._findings = FindingWriter()
        self._unhook: Callable[[], None] | None = None
        use_fast_crc()

    @property
    def destination(self) -> str:
        """The run's directory."""
        return str(getattr(self._writer, "log_dir", None) or self._writer.logdir)

    def drain_before_close(self, drain: Callable[[], None]) -> None:
        """Has `drain` called when the user flushes or closes the writer, so that nothing comes too late."""
        if not self._owned:
            self._unhook = _drain_first(self._writer, drain)

    def write(self, frame: Frame) -> None:
        event = event_pb2.Event(wall_time=frame.time, step=frame.step)
        add = event.summary.value.add
        for tag, value in frame.scalars.items():
            add(tag=tag, simple_value=value)
        self._add_scalars(frame, add)
        if frame.buckets.shape[1]:
            _add_histograms(frame, add)
        for kind in dict.fromkeys(site.kind for site in frame.sites):
            rows = [i for i, site in enumerate(frame.sites) if site.kind == kind]
            if rows:
                self._layouts.setdefault(kind, _Layout(kind)).add(frame, rows, event.summary)
        self._findings.add(frame.findings, event.summary)
        if event.summary.value:
            self._send(event)

    def flush(self) -> None:
        if not self._is_closed():
            self._events.flush()

    def close(self) -> None:
        if self._unhook is not None:
            self._unhook()
        if self._owned:
            self._writer.close()
        else:
            self.flush()

    def _send(self, event: event_pb2.Event) -> None:
        if self._is_closed():
            raise OSError("the SummaryWriter was closed before the watch")
        if self._event_class is event_pb2.Event:
            self._events.add_event(event)
        else:
            # Past tensorboardX's own queue, which its flush() does not wait for: this thread may wait.
            self._events._ev_writer.write_event(self._event_class.FromString(event.SerializeToString()))

    def _is_closed(self) -> bool:
        inner = getattr(self._events, "_async_writer", self._events)
        return bool(getattr(inner, "_closed", False))

    def _add_scalars(self, frame: Frame, add: Callable[..., Any]) -> None:
        wanted = {name for names in self._scalars.values() for name in names}
        columns = {name: frame.stat(name).tolist() for name in (*wanted, *ALARMS)}
        # Inside attention, masks are minus infinity.
        alarming = [
            i for i, site in enumerate(frame.sites)
            if any(columns[name][i] for name in ALARMS) and site.attention_stat is None
        ]  # fmt: skip
        for i, site in enumerate(frame.sites):
            for name, value, whose in self._shown(frame, i, site, columns):
                if math.isfinite(value):
                    add(tag=f"{site.kind}.{name}/{whose.name}", simple_value=value)
        for i in alarming:
            site = frame.sites[i]
            for name in ALARMS:
                if columns[name][i] and name not in self._scalars[site.plain_kind]:
                    add(tag=f"{site.kind}.{name}/{site.name}", simple_value=columns[name][i])

    def _shown(
        self, frame: Frame, i: int, site: Site, columns: dict[str, list[float]]
    ) -> Iterable[tuple[str, float, Site]]:
        """The scalars of a site; what is inside attention is summed up in one, under the attention's own name."""
        attention = site.attention_stat if self._scalars[site.plain_kind] else None
        if attention is None:
            return [(name, columns[name][i], site) for name in self._scalars[site.plain_kind]]
        name, stat, whose = attention
        return [(name, float(stats.stat(stat, frame.values[i : i + 1], frame.buckets[i : i + 1])[0]), whose)]


def _open(directory: str | Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import, and not always needed

    where = str(directory)
    # Every record opens the file anew: a later chdir must not send it elsewhere.
    return SummaryWriter(where if "://" in where else str(Path(where).expanduser().absolute()))


def _event_class(writer: Any) -> Any:
    """The Event class of the writer's own package: tensorboardX carries its own protocol buffers."""
    if not any(base.__module__.partition(".")[0] == "tensorboardX" for base in type(writer).__mro__):
        return event_pb2.Event
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415  only if the user has it

    return Event


# What to call before a writer is flushed or closed; several watches may share one writer.
_drains: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
_DRAINED = ("flush", "close")


def _drain_first(writer: Any, drain: Callable[[], None]) -> Callable[[], None]:
    """Has `drain` called before the writer's own flush and close; returns what undoes it."""
    drains = _drains.setdefault(writer, [])
    if not drains:
        for name in _DRAINED:
            wrapt.wrap_function_wrapper(writer, name, lambda f, _, args, kwargs: _draining(writer, f, args, kwargs))
    drains.append(drain)

    def undo() -> None:
        drains.remove(drain)
        if not drains:
            for name in _DRAINED:
                _unwrap(writer, name)

    return undo


def _unwrap(writer: Any, name: str) -> None:
    """Puts back what was there: the class's own method, or one that was set on this writer."""
    wrapped = writer.__dict__.pop(name).__wrapped__
    if getattr(wrapped, "__func__", None) is not getattr(type(writer), name):
        setattr(writer, name, wrapped)


def _draining(writer: Any, wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for drain in list(_drains.get(writer, ())):
        drain()
    return wrapped(*args, **kwargs)


def _add_histograms(frame: Frame, add: Callable[..., Any]) -> None:
    drawn = [i for i, site in enumerate(frame.sites) if site.plain_kind in HISTOGRAM_KINDS]
    for i, proto in zip(drawn, histograms(frame.values[drawn], frame.buckets[drawn]), strict=True):
        if proto is not None:
            add(tag=str(frame.sites[i]), histo=proto)


def histograms(values: Floats, counts: Counts) -> list[summary_pb2.HistogramProto | None]:
    """Stock histograms whose edges lie within the exact finite range, which both loaders draw right.

    Buckets too close to zero to be told apart become one, and empty ends are left out. A row with
    nothing finite has none: one infinite edge would blank its card for all steps.
    """
    if not len(values):
        return []
    finest = FINEST_SHARE * np.maximum(np.abs(values[:, stats.MIN]), np.abs(values[:, stats.MAX]))
    inner = np.searchsorted(stats.UPPER[stats.MIDDLE + 1 :], finest, side="right")
    used = counts > 0
    first, last = used.argmax(axis=1), stats.BUCKETS - 1 - used[:, ::-1].argmax(axis=1)
    n = stats.finite(values)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = n * values[:, stats.MEAN]
        squares = values[:, M2] + n * np.square(values[:, stats.MEAN])
    columns = (values[:, stats.MIN], values[:, stats.MAX], n, sums, squares)
    rows = zip(*(column.tolist() for column in (*columns, inner, first, last)), counts.tolist(), strict=True)
    return [_histogram(*row) if row[2] > 0 else None for row in rows]


def _histogram(
    low: float, high: float, n: float, total: float, squares: float,
    inner: int, first: int, last: int, counts: list[int],
) -> summary_pb2.HistogramProto:  # fmt: skip
    left, right, end = stats.MIDDLE - inner, stats.MIDDLE + inner + 1, last + 1
    heights, limits = counts[first : min(left, end)], _UPPER[first : min(left, end)]
    if first < right and last >= left:
        heights.append(sum(counts[max(first, left) : right]))
        limits.append(_UPPER[right - 1])
    heights += counts[max(first, right) : end]
    limits += _UPPER[max(first, right) : end]
    limits[-1] = high
    return summary_pb2.HistogramProto(
        min=low, max=high, num=n, sum=total, sum_squares=squares, bucket_limit=limits, bucket=heights
    )


_UPPER: list[float] = stats.UPPER.tolist()


class _Layout:
    """The order of one kind's sites in its frame tensors.

    TensorBoard keeps a tag's metadata from its first value only, so a site that turns up later starts
    a new tag (`tbhooks/activation`, `tbhooks/activation.2`) with the longer list.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._position: dict[Site, int] = {}
        self._generation = 0
        self._described: set[str] = set()

    def add(self, frame: Frame, rows: list[int], summary: summary_pb2.Summary) -> None:
        if any(frame.sites[i] not in self._position for i in rows):
            for i in rows:
                self._position.setdefault(frame.sites[i], len(self._position))
            self._generation += 1
        where = [self._position[frame.sites[i]] for i in rows]
        values = stats.empty_rows(len(self._position))
        values[where] = frame.values[rows]
        self._add_tensor(summary, "", encode_values(values))
        if frame.buckets.shape[1]:
            counts = np.zeros((len(self._position), stats.BUCKETS), dtype=np.int64)
            counts[where] = frame.buckets[rows]
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


def encode_counts(counts: Counts) -> tensor_pb2.TensorProto:
    """Bucket counts as one compressed string: most of the 385 buckets of a site are empty."""
    smallest = np.uint32 if counts.max(initial=0) < 2**32 else np.uint64
    raw = io.BytesIO()
    np.save(raw, counts.astype(smallest), allow_pickle=False)
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    content = zlib.compress(raw.getvalue(), level=1)
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=[content])


def decode_counts(content: bytes) -> Counts:
    """Bucket counts from a stored string."""
    return np.load(io.BytesIO(zlib.decompress(content)), allow_pickle=False).astype(np.int64)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def use_fast_crc() -> bool:
    """Gives TensorBoard's record writer a C checksum instead of its pure-Python one, if the two agree.

    The Python one costs 150 ns a byte, in a thread but under the GIL, so training would pay for it.
    """
    try:
        import google_crc32c  # noqa: PLC0415  without it everything works, slower
    except ImportError:
        return False

    def masked(data: bytes) -> int:
        crc: int = google_crc32c.value(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    samples = (b"", b"\x00", b"tbhooks", bytes(range(256)) * 5)
    if any(masked(sample) != record_writer.masked_crc32c(sample) for sample in samples):
        return False

    def fast(_wrapped: Any, _instance: Any, args: Any, _kwargs: Any) -> int:
        return masked(bytes(args[0]))

    wrapt.wrap_function_wrapper(record_writer, "masked_crc32c", fast)
    return True
