"""The records of an event file, whatever state it is in.

A file may still be growing, be cut short by a kill, or not be an event file at all: intact records are returned, and
the rest is reported in sentences. No length field is trusted when memory is allocated.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.summary.writer import record_writer

from tbhooks.sinks.tensorboard.event_files import agrees_with, masked_crc32c

ReportProblem = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the number of bytes read so far and the total."""
HEADER, FOOTER = 12, 4
# After so many damaged records in one file the rest is counted, not listed.
MAX_LISTED = 3


def size_of(path: Path) -> int:
    """The size of a file; 0 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def records(path: Path, report: ReportProblem, progress: Progress | None = None) -> Iterator[bytes]:
    """The intact records of a file in order; `report` is called with a sentence for each damaged one."""
    try:
        size = path.stat().st_size
        if not stat.S_ISREG(path.stat().st_mode):
            report(f"{path.name}: not a file")
            return
        if size == 0:
            report(f"{path.name}: empty, nothing was written to it yet")
        with path.open("rb") as file:
            yield from _records(file, size, lambda problem: report(f"{path.name}: {problem}"), progress)
    except OSError as problem:
        report(f"{path.name}: cannot be read ({problem.strerror or problem})")


def _records(file: BinaryIO, size: int, report: ReportProblem, progress: Progress | None) -> Iterator[bytes]:
    checksum = _checksum()
    at, damaged = 0, 0
    while at < size:
        header = file.read(HEADER)
        length, length_crc = struct.unpack("<QI", header) if len(header) == HEADER else (size, None)
        if length_crc is not None and checksum(header[:8]) != length_crc:
            report(
                f"record at byte {at} has a wrong checksum, skipped the rest of the file" if at else "not an event file"
            )
            break
        if length_crc is None and not at:
            report("not an event file, or cut short before its first record")
            break
        if length_crc is None or length > size - at - HEADER - FOOTER:
            report(f"cut short at byte {at}, the last step may be missing")
            break
        data = file.read(length)
        footer = file.read(FOOTER)
        if len(footer) < FOOTER:  # the file was truncated meanwhile
            report(f"cut short at byte {at}, the last step may be missing")
            break
        if checksum(data) == struct.unpack("<I", footer)[0]:
            yield data
        else:
            damaged += 1
            if damaged <= MAX_LISTED:
                report(f"record at byte {at} has a wrong checksum, skipped")
        at += HEADER + length + FOOTER
        if progress is not None:
            progress(at, size)
    if damaged > MAX_LISTED:
        report(f"{damaged} records have a wrong checksum, skipped")


@lru_cache(maxsize=1)
def _checksum() -> Callable[[bytes], int]:
    stock: Callable[[bytes], int] = record_writer.masked_crc32c
    return masked_crc32c if agrees_with(stock) else stock


def event_of_bytes() -> Any:
    """TensorBoard's Event class with the summary left as bytes."""
    return _messages()[0]


def summary_of_bytes() -> Any:
    """TensorBoard's Summary class with the values left as bytes: parsing thousands of values would dominate reading."""
    return _messages()[1]


@lru_cache(maxsize=1)
def _messages() -> tuple[Any, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tbhooks/records.proto", package="tbhooks", syntax="proto3")
    event = file.message_type.add(name="Event")
    event.field.add(name="wall_time", number=1, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    event.field.add(name="step", number=2, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    event.field.add(name="summary", number=5, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    summary = file.message_type.add(name="Summary")
    summary.field.add(name="value", number=1, type=field.TYPE_BYTES, label=field.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"tbhooks.{name}") for name in ("Event", "Summary"))
    event_class, summary_class = map(message_factory.GetMessageClass, found)
    return event_class, summary_class
