"""The user's SummaryWriter: how an Event's bytes get into its own file.

Order and locking stay the writer's. That it takes bytes is private to torch, TensorBoard and tensorboardX, so
it is tried on a stand-in first; a writer that does anything else gets the Event as the object it expects.
"""

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
    """What takes the bytes of an Event for a writer's own file."""
    events = writer._get_file_writer().event_writer
    if not _is_of_tensorboardx(writer):
        return _to_tensorboard(events)
    from tensorboardX import event_file_writer as theirs  # noqa: PLC0415  only if the user has it

    return _to_tensorboardx(events, theirs)


def _is_of_tensorboardx(writer: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "tensorboardX" for base in type(writer).__mro__)


def _to_tensorboard(events: Any) -> Send:
    if _is_stock(events, event_file_writer.EventFileWriter, "add_event", "_async_writer.write"):
        return events._async_writer.write  # type: ignore[no-any-return]
    return lambda data: events.add_event(event_pb2.Event.FromString(data))


def _to_tensorboardx(events: Any, theirs: Any) -> Send:
    # Past its own queue, which its flush() does not wait for: this thread may wait.
    file = events._ev_writer
    if _is_stock(file, theirs.EventsWriter, "write_event", "_write_serialized_event"):
        return file._write_serialized_event  # type: ignore[no-any-return]
    return lambda data: file.write_event(theirs.event_pb2.Event.FromString(data))


def _is_stock(writer: Any, stock: type, method: str, inner: str) -> bool:
    """Whether a writer's method is the one it came with, and does nothing but hand the bytes to `inner`."""
    return type(writer) is stock and method not in vars(writer) and _hands_on_bytes(getattr(stock, method), inner)


@lru_cache(maxsize=4)
def _hands_on_bytes(method: Callable[[Any, Any], Any], inner: str) -> bool:
    taken: list[bytes] = []
    stand_in: Any = taken.append
    for name in reversed(inner.split(".")):
        stand_in = SimpleNamespace(**{name: stand_in})
    event = method.__globals__["event_pb2"].Event(step=7)
    try:
        method(stand_in, event)
    except Exception:  # whatever it needed, it is not what is known here
        return False
    return taken == [event.SerializeToString()]


_SAMPLES = (b"", b"\x00", b"tbhooks", bytes(range(256)) * 5)


def fast_crc(writer: Any) -> Patch:
    """The patch that has the records of this writer's package checked by the C checksum, for a sink to hold."""
    return TENSORBOARDX_CRC if _is_of_tensorboardx(writer) else TENSORBOARD_CRC


def crc_patch(module: str, tried_with: str) -> Patch:
    """Replaces the pure Python `masked_crc32c` of a module, if the C checksum gives the same bits."""
    return wrapping(module, "masked_crc32c", _fast, tried_with, accepts=_gives_the_same_bits)


def _fast(_wrapped: Any, _instance: Any, args: Any, _kwargs: Any) -> int:
    return _masked(bytes(args[0]))


def _masked(data: bytes) -> int:
    crc: int = _google_crc32c().value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _google_crc32c() -> Any:
    try:
        import google_crc32c  # noqa: PLC0415  without it everything works, slower
    except ImportError:
        return None
    return google_crc32c


def _gives_the_same_bits(stock: Callable[[bytes], int] | None) -> bool:
    if stock is None or _google_crc32c() is None:
        return False
    return all(_masked(sample) == stock(sample) for sample in _SAMPLES)


TENSORBOARD_CRC = crc_patch("tensorboard.summary.writer.record_writer", "tensorboard 2.21")
TENSORBOARDX_CRC = crc_patch("tensorboardX.record_writer", "tensorboardX 2.6")
