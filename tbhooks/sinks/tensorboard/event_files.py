"""The event file behind a SummaryWriter: flushing it to the operating system, and repairing it after a failed write.

Supports the stock writers of torch, TensorBoard and tensorboardX on local files. The attributes used here are private
to those writers. The constructors read each of them once, so that a writer without them counts as unknown: an unknown
writer is flushed, but not repaired.
"""
# ruff: noqa: SLF001  there is no public way to restart a writer

from __future__ import annotations

import contextlib
import io
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Protocol

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
