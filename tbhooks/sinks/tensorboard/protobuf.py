"""The part of the protobuf wire format that is needed to encode scalars and histograms as bytes, and small helpers.

A step has hundreds of scalars and histograms, and a protobuf object for each takes ten times as long. Field numbers
come from TensorBoard's own descriptors. Everything else is encoded by protobuf itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

_FIXED64, _DELIMITED = 1, 2


@lru_cache(maxsize=1 << 12)
def varint(number: int) -> bytes:
    """A non-negative integer, seven bits per byte."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _key(message: Any, field: str, wire_type: int) -> bytes:
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)


def double_key(message: Any, field: str) -> bytes:
    """The bytes before a double."""
    return _key(message, field, _FIXED64)


def delimited_key(message: Any, field: str) -> bytes:
    """The bytes before the length of a string, a message or packed values."""
    return _key(message, field, _DELIMITED)


VALUE = delimited_key(summary_pb2.Summary, "value")
_SUMMARY = delimited_key(event_pb2.Event, "summary")


def utf8(text: str) -> str:
    """The text with question marks for characters that UTF-8, and therefore protobuf, cannot encode."""
    return text.encode(errors="replace").decode()


def tag_field(tag: str) -> bytes:
    """The encoded tag of a value."""
    encoded: bytes = summary_pb2.Summary.Value(tag=utf8(tag)).SerializeToString()
    return encoded


def event(wall_time: float, step: int, summary: bytes) -> bytes:
    """An Event with the bytes of its summary."""
    head: bytes = event_pb2.Event(wall_time=wall_time, step=step).SerializeToString()
    return b"".join((head, _SUMMARY, varint(len(summary)), summary))


def strings(contents: list[bytes]) -> tensor_pb2.TensorProto:
    """A tensor of strings."""
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=len(contents))])
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=contents)


def plugin_metadata(plugin: str, content: bytes = b"") -> summary_pb2.SummaryMetadata:
    """The metadata of a tensor that a plugin of TensorBoard shows."""
    return summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin, content=content),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
