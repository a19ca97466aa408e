"""The user's SummaryWriter: how an Event's bytes get into its own file.

Order and locking stay the writer's. That it takes bytes is private to torch, TensorBoard and tensorboardX, so
it is tried on a stand-in first; a writer that does anything else gets the Event as the object it expects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import wrapt
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import event_file_writer, record_writer

Send = Callable[[bytes], None]


def sender(writer: Any) -> Send:
    """What takes the bytes of an Event for a writer's own file."""
    events = writer._get_file_writer().event_writer
    if not any(base.__module__.partition(".")[0] == "tensorboardX" for base in type(writer).__mro__):
        use_fast_crc()
        return _to_tensorboard(events)
    from tensorboardX import event_file_writer as theirs  # noqa: PLC0415  only if the user has it
    from tensorboardX import record_writer  # noqa: PLC0415

    use_fast_crc(record_writer)
    return _to_tensorboardx(events, theirs)


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


@cache
def use_fast_crc(module: Any = record_writer) -> bool:
    """Gives a record writer's module the C checksum instead of its own `masked_crc32c`, if the two agree."""
    masked = _masked()
    stock = getattr(module, "masked_crc32c", None)
    if masked is None or stock is None or any(masked(sample) != stock(sample) for sample in _SAMPLES):
        return False

    def fast(_wrapped: Any, _instance: Any, args: Any, _kwargs: Any) -> int:
        return masked(bytes(args[0]))

    wrapt.wrap_function_wrapper(module, "masked_crc32c", fast)
    return True


def _masked() -> Callable[[bytes], int] | None:
    try:
        import google_crc32c  # noqa: PLC0415  without it everything works, slower
    except ImportError:
        return None

    def masked(data: bytes) -> int:
        crc: int = google_crc32c.value(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    return masked
