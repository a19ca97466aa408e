"""Sends serialized Events to the user's SummaryWriter, which keeps their order and does the locking.

Which method takes bytes is private to torch, TensorBoard and tensorboardX, so it is first tried on a stand-in. Any
other writer gets the Event as an object.
"""
# ruff: noqa: SLF001  the public methods take objects, which would have to be serialized a second time

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import event_file_writer

from tbhooks.data.patching import Patch, wrapping

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
