"""The event file behind the user's SummaryWriter: sending events to it, flushing it, repairing it after a failed write.

Supports the stock writers of torch, TensorBoard and tensorboardX. Their methods that take bytes are private, and so are
the attributes used to repair a local file. A method is first tried on a stand-in, and the constructors read each
attribute once. Any other writer gets each Event as an object, and is flushed but not repaired.
"""
# ruff: noqa: SLF001  the public methods take objects, which would have to be serialized a second time; none restarts one

from __future__ import annotations

import contextlib
import io
import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import event_file_writer

from tbhooks.data.process.patching import Patch, wrapping

_LENGTH = struct.Struct("<Q")
_HEADER, _FOOTER = 12, 4
"""Bytes around the data of a record: the length with its checksum, and the checksum of the data."""
# About the size of one step: with less free space a writer is not restarted.
MIN_FREE = 16 << 10


class EventFile(Protocol):
    """The operations of a sink on its event file, all from one thread."""

    def repair(self) -> None:
        """Makes a writer usable again after a failed write, or raises the cause that persists."""

    def flush(self) -> None:
        """Passes all events to the operating system, so that a killed process loses none of them."""

    def mark_failed(self) -> None:
        """Called after a failed write, which may have left part of a record."""


class RemoteFile:
    """A file that is not local. Some file systems upload all of it at each flush, so flushing is left to the writer."""

    def repair(self) -> None:
        """Not possible."""

    def flush(self) -> None:
        """Left to the writer."""

    def mark_failed(self) -> None:
        """Left to the writer."""


class UnknownFile(RemoteFile):
    """The local file of a writer that is not one of the stock ones."""

    def __init__(self, events: Any) -> None:
        self._events = events

    def flush(self) -> None:
        self._events.flush()


class TensorBoardFile:
    """The file of torch's and TensorBoard's EventFileWriter, whose thread ends at the first failed write."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self._queue = events._async_writer
        self._path = Path(os.fsdecode(events._file_name)).absolute()
        # TensorFlow's files keep their own position and must not be truncated.
        self._reopens = bool(getattr(events._general_file_writer, "fs_supports_append", False))
        thread = self._queue._worker
        thread._flush_secs, thread.exception, self._queue._byte_queue, self._queue._lock  # noqa: B018  must exist

    def repair(self) -> None:
        if self._queue._worker.exception is None or not self._reopens:
            return
        with self._queue._lock:
            thread = self._queue._worker
            if thread.exception is None or self._queue._closed:
                return
            # Tried first, because a thread that fails again at once prints its exception every time.
            with tempfile.TemporaryFile(dir=self._path.parent) as trial:
                trial.write(bytes(MIN_FREE))
            thread.join(5)
            cut_torn_record(self._path)
            self._queue._worker = type(thread)(self._queue._byte_queue, self._queue._writer, thread._flush_secs)
            self._queue._worker.start()

    def flush(self) -> None:
        self._events.flush()  # waits until the queue is empty; each record is written and closed

    def mark_failed(self) -> None:
        """Not needed: the thread keeps its exception."""


class TensorBoardXFile:
    """The file of tensorboardX's EventFileWriter, which is buffered, and whose own flush() calls fsync."""

    def __init__(self, events: Any) -> None:
        self._writer = events._ev_writer
        self._records = self._writer._py_recordio_writer
        self._has_failed = False
        if not isinstance(self._records._writer, io.BufferedWriter):
            raise AttributeError("it does not write to a file")
        self._path = Path(self._records.path).absolute()

    def repair(self) -> None:
        """Reopens the file after its last complete record and drops the buffer."""
        if not self._has_failed:
            return
        with self._writer._lock:
            cut_torn_record(self._path)
            reopened = self._path.open("ab")
            broken, self._records._writer = self._records._writer, reopened
            broken.raw.close()  # without flushing the buffer
        self._has_failed = False

    def flush(self) -> None:
        with self._writer._lock:
            file = self._records._writer
            if not os.fstat(file.fileno()).st_nlink:
                self._has_failed = True
                raise FileNotFoundError(f"{self._path} was deleted while it was being written")
            file.flush()

    def mark_failed(self) -> None:
        self._has_failed = True


def event_file(writer: Any, destination: str) -> EventFile:
    """The event file of a SummaryWriter."""
    if "://" in destination:
        return RemoteFile()
    events = writer._get_file_writer().event_writer
    for kind in (TensorBoardFile, TensorBoardXFile):
        with contextlib.suppress(AttributeError):
            return kind(events)
    return UnknownFile(events)


def cut_torn_record(path: Path) -> None:
    """Truncates a file after its last complete record: readers stop at an incomplete one."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size, complete = os.fstat(file.fileno()).st_size, 0
        while len(header := file.read(_HEADER)) == _HEADER:
            end = complete + _HEADER + _LENGTH.unpack_from(header)[0] + _FOOTER
            if end > size:
                break
            complete = file.seek(end)
        file.truncate(complete)


# --- Sending events ---------------------------------------------------------------------------------

Send = Callable[[bytes], None]


def sender(writer: Any) -> Send:
    """A function that sends the bytes of an Event to a writer's file."""
    events = writer._get_file_writer().event_writer
    if not _is_tensorboardx(writer):
        return _to_tensorboard(events)
    from tensorboardX import event_file_writer as theirs  # noqa: PLC0415  only if the user has it

    return _to_tensorboardx(events, theirs)


def _is_tensorboardx(writer: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "tensorboardX" for base in type(writer).__mro__)


def _to_tensorboard(events: Any) -> Send:
    if _is_stock(events, event_file_writer.EventFileWriter, "add_event", "_async_writer.write"):
        return events._async_writer.write  # type: ignore[no-any-return]
    return lambda data: events.add_event(event_pb2.Event.FromString(data))


def _to_tensorboardx(events: Any, theirs: Any) -> Send:
    # Bypasses its queue, which its flush() does not wait for. The worker thread may block.
    file = events._ev_writer
    if _is_stock(file, theirs.EventsWriter, "write_event", "_write_serialized_event"):
        return file._write_serialized_event  # type: ignore[no-any-return]
    return lambda data: file.write_event(theirs.event_pb2.Event.FromString(data))


def _is_stock(writer: Any, stock: type, method: str, inner: str) -> bool:
    """Whether a writer's method is the original one and only passes the bytes to `inner`."""
    return type(writer) is stock and method not in vars(writer) and _passes_bytes(getattr(stock, method), inner)


@lru_cache(maxsize=4)
def _passes_bytes(method: Callable[[Any, Any], Any], inner: str) -> bool:
    received: list[bytes] = []
    stand_in: Any = received.append
    for name in reversed(inner.split(".")):
        stand_in = SimpleNamespace(**{name: stand_in})
    event = method.__globals__["event_pb2"].Event(step=7)
    try:
        method(stand_in, event)
    except Exception:  # it needs something else: not the known method
        return False
    return received == [event.SerializeToString()]


_SAMPLES = (b"", b"\x00", b"tbhooks", bytes(range(256)) * 5)


def fast_crc(writer: Any) -> Patch:
    """The patch that replaces the Python checksum of this writer's package by the one in C."""
    return TENSORBOARDX_CRC if _is_tensorboardx(writer) else TENSORBOARD_CRC


def crc_patch(module: str, tried_with: str) -> Patch:
    """Replaces `masked_crc32c` of a module by the C implementation, if the two agree.

    TensorBoard computes the checksum in Python, which takes most of the time of a write.
    """
    return wrapping(module, "masked_crc32c", _fast, tried_with, accepts=agrees_with)


def _fast(_wrapped: Any, _instance: Any, args: Any, _kwargs: Any) -> int:
    return masked_crc32c(bytes(args[0]))


def masked_crc32c(data: bytes) -> int:
    """The checksum of records in event files, computed in C; needs google_crc32c."""
    crc: int = _google_crc32c().value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _google_crc32c() -> Any:
    try:
        import google_crc32c  # noqa: PLC0415  optional: only faster
    except ImportError:
        return None
    return google_crc32c


def agrees_with(stock: Callable[[bytes], int] | None) -> bool:
    """Whether the C implementation is available and gives the same checksums."""
    if stock is None or _google_crc32c() is None:
        return False
    return all(masked_crc32c(sample) == stock(sample) for sample in _SAMPLES)


TENSORBOARD_CRC = crc_patch("tensorboard.summary.writer.record_writer", "tensorboard 2.21")
TENSORBOARDX_CRC = crc_patch("tensorboardX.record_writer", "tensorboardX 2.6")
