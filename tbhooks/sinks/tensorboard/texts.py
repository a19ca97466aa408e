"""Texts for TensorBoard's TEXT tab, which reads markdown."""

from __future__ import annotations

from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

from tbhooks.data.artifacts import Text


def write(text: Text, summary: summary_pb2.Summary, _run: object) -> None:
    """One value of the step's event."""
    content = text.markdown.encode(errors="replace")
    summary.value.add(tag=f"{text.tag}/text_summary", tensor=strings([content]), metadata=metadata("text"))


def strings(contents: list[bytes]) -> tensor_pb2.TensorProto:
    """A tensor of strings."""
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=len(contents))])
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=contents)


def metadata(plugin: str) -> summary_pb2.SummaryMetadata:
    """Says which tab a tensor is for."""
    return summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
