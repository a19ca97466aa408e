"""Protocol buffers as bytes: the little of the wire format that the many small values of an Event need.

A step has hundreds of scalars and histograms, and an object for each costs ten times what its bytes do.
Field numbers come from TensorBoard's own descriptors. What is rare is left to protobuf itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2

_FIXED64, _DELIMITED = 1, 2


@lru_cache(maxsize=1 << 12)
def varint(number: int) -> bytes:
    """A number that is not negative, seven bits a byte."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _key(message: Any, field: str, wire_type: int) -> bytes:
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)


def double_key(message: Any, field: str) -> bytes:
    """What comes before the eight bytes of a double."""
    return _key(message, field, _FIXED64)


def delimited_key(message: Any, field: str) -> bytes:
    """What comes before the length of a text, a message or packed numbers."""
    return _key(message, field, _DELIMITED)


VALUE = delimited_key(summary_pb2.Summary, "value")
_SUMMARY = delimited_key(event_pb2.Event, "summary")


def utf8(text: str) -> str:
    """As a protobuf takes it: of a character that is none in UTF-8, a question mark stays."""
    return text.encode(errors="replace").decode()


def tag_field(tag: str) -> bytes:
    """The tag of a value."""
    encoded: bytes = summary_pb2.Summary.Value(tag=utf8(tag)).SerializeToString()
    return encoded


def event(wall_time: float, step: int, summary: bytes) -> bytes:
    """An Event around the bytes of its summary."""
    head: bytes = event_pb2.Event(wall_time=wall_time, step=step).SerializeToString()
    return b"".join((head, _SUMMARY, varint(len(summary)), summary))
