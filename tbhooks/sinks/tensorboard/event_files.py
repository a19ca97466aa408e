"""The file behind a SummaryWriter: what was sent is handed to the operating system, and a failed write is mended.

Works on the stock writers of torch, TensorBoard and tensorboardX, on local files. Everything touched here is private
to them, so each is looked for first; another writer is flushed where it writes to a local directory, and not mended.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Protocol

_LENGTH = struct.Struct("<Q")
_BEFORE, _BEHIND = 12, 4
"""Bytes of a record around its data: the length and its checksum, and the checksum of the data."""
# About what a step takes: with less room a writer is not started again.
ROOM = 16 << 10


class EventFile(Protocol):
    """What a sink asks of it, from one thread."""

    def mend(self) -> None:
        """Makes a writer that failed usable again, or raises what is still in the way."""

    def hand_over(self) -> None:
        """Hands everything sent so far to the operating system: a killed process loses none of it."""

    def failed(self) -> None:
        """Tells of a write that may have been cut off somewhere in a record."""


class Remote:
    """Not a local file. Some file systems upload all of it at each flush, so that is left to the writer."""

    def mend(self) -> None:
        """It is not known how."""

    def hand_over(self) -> None:
        """When the writer does."""

    def failed(self) -> None:
        """The writer's own affair."""


class Unknown(Remote):
    """A local writer that is none of the stock ones."""

    def __init__(self, events: Any) -> None:
        self._events = events

    def hand_over(self) -> None:
        self._events.flush()


class TensorBoardFile:
    """Of torch's and TensorBoard's EventFileWriter: a queue, and a thread that ends with the first failed write."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self._queue = events._async_writer
        self._path = Path(os.fsdecode(events._file_name)).absolute()
        # TensorFlow's files keep a place of their own, from which nothing may be cut off.
        self._opens_anew = bool(getattr(events._general_file_writer, "fs_supports_append", False))
        thread = self._queue._worker
        thread._flush_secs, thread.exception, self._queue._byte_queue, self._queue._lock  # noqa: B018  are there

    def mend(self) -> None:
        if self._queue._worker.exception is None or not self._opens_anew:
            return
        with self._queue._lock:
            thread = self._queue._worker
            if thread.exception is None or self._queue._closed:
                return
            # A thread that fails at once again would print its exception every time.
            with tempfile.TemporaryFile(dir=self._path.parent) as trial:
                trial.write(bytes(ROOM))
            thread.join(5)
            cut_torn_record(self._path)
            self._queue._worker = type(thread)(self._queue._byte_queue, self._queue._writer, thread._flush_secs)
            self._queue._worker.start()

    def hand_over(self) -> None:
        self._events.flush()  # every record is written to the file and closed; this waits for the queue

    def failed(self) -> None:
        """Its thread knows."""


class TensorBoardXFile:
    """Of tensorboardX's EventFileWriter: a file with a buffer of its own, which flush() would force to the disk."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self._writer = events._ev_writer
        self._records = self._writer._py_recordio_writer
        self._has_failed = False
        if not isinstance(self._records._writer, io.BufferedWriter):
            raise AttributeError("it writes to something else than a file")
        self._path = Path(self._records.path).absolute()

    def mend(self) -> None:
        """What was not written is forgotten, and the file is opened anew behind its last whole record."""
        if not self._has_failed:
            return
        with self._writer._lock:
            cut_torn_record(self._path)
            fresh = self._path.open("ab")
            stale, self._records._writer = self._records._writer, fresh
            stale.raw.close()  # the buffer goes with it
        self._has_failed = False

    def hand_over(self) -> None:
        with self._writer._lock:
            file = self._records._writer
            if not os.fstat(file.fileno()).st_nlink:
                self._has_failed = True
                raise FileNotFoundError(f"{self._path} was deleted while it was being written")
            file.flush()

    def failed(self) -> None:
        """Its buffer knows nothing of records."""
        self._has_failed = True


def event_file(writer: Any, destination: str) -> EventFile:
    """What is known of a writer's file."""
    if "://" in destination:
        return Remote()
    events = writer._get_file_writer().event_writer
    for kind in (TensorBoardFile, TensorBoardXFile):
        with contextlib.suppress(AttributeError):
            return kind(events)
    return Unknown(events)


def cut_torn_record(path: Path) -> None:
    """Cuts off what a failed write left of a record: nothing behind it could be read."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size, whole = os.fstat(file.fileno()).st_size, 0
        while len(head := file.read(_BEFORE)) == _BEFORE:
            end = whole + _BEFORE + _LENGTH.unpack_from(head)[0] + _BEHIND
            if end > size:
                break
            whole = file.seek(end)
        file.truncate(whole)
