"""Graphs for TensorBoard's GRAPHS tab: a GraphDef, as TensorFlow writes them.

A run has one graph without tag, of which TensorBoard shows the newest, and any number of tagged graphs. The training
graph is written without tag unless the user has written one; all others get a tag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tensorboard.compat.proto import (
    attr_value_pb2,
    config_pb2,
    event_pb2,
    graph_pb2,
    node_def_pb2,
    summary_pb2,
    tensor_shape_pb2,
    versions_pb2,
)

from tbhooks.data.artifacts import Graph, Node
from tbhooks.sinks.tensorboard import protobuf
from tbhooks.sinks.tensorboard.protobuf import utf8

# How TensorBoard recognises a tagged graph.
_PLUGIN, _VERSION = "graph_run_metadata_graph", b"1"
TRAINING = "training"
MARK = "drawn by"
"""An attribute of the first node, which marks graphs of tbhooks."""
OURS = "tbhooks"

_GRAPH_KEY = protobuf.delimited_key(event_pb2.Event, "graph_def")
# The maximum size of what precedes an event's content: the time (9 bytes) and the step (at most 11).
_HEAD = 20


class Run(Protocol):
    """What `write` needs of the run."""

    @property
    def directory(self) -> str: ...

    @property
    def time(self) -> float: ...

    @property
    def step(self) -> int: ...

    def send(self, event: bytes, /) -> None: ...

    def flush(self) -> None: ...


def write(graph: Graph, summary: summary_pb2.Summary, run: Run) -> None:
    """Writes the training graph as a separate event, and others into the summary of the step's event."""
    content = graph_def(graph)
    run.flush()  # the user's graph may still be in the queue
    if graph.name == TRAINING and not has_graph_of_others(run.directory):
        # With its step, because of several graphs of one step one of TensorBoard's loaders shows the oldest.
        event = event_pb2.Event(wall_time=run.time, step=run.step, graph_def=content.SerializeToString())
        run.send(event.SerializeToString())
        return
    functions = config_pb2.RunMetadata.FunctionGraphs(pre_optimization_graph=content)
    metadata = protobuf.plugin_metadata(_PLUGIN, _VERSION)
    metadata.data_class = summary_pb2.DATA_CLASS_BLOB_SEQUENCE
    packed = config_pb2.RunMetadata(function_graphs=[functions]).SerializeToString()
    summary.value.add(tag=f"tbhooks/{graph.name}", tensor=protobuf.strings([packed]), metadata=metadata)


def graph_def(graph: Graph) -> graph_pb2.GraphDef:
    """The graph as a GraphDef."""
    nodes = [_node_def(node) for node in graph.nodes]
    if nodes:
        nodes[0].attr[MARK].CopyFrom(_text(OURS))
    # The newest producer version that needs no function library.
    return graph_pb2.GraphDef(node=nodes, versions=versions_pb2.VersionDef(producer=22))


def _node_def(node: Node) -> node_def_pb2.NodeDef:
    made = node_def_pb2.NodeDef(name=utf8(node.name), op=utf8(node.operation), input=map(utf8, node.inputs))
    if node.shapes:
        shapes = attr_value_pb2.AttrValue.ListValue(shape=map(_shape, node.shapes))
        made.attr["_output_shapes"].CopyFrom(attr_value_pb2.AttrValue(list=shapes))
    for name, value in node.attributes.items():
        made.attr[utf8(name)].CopyFrom(_text(value))
    return made


def _shape(sizes: tuple[int, ...]) -> tensor_shape_pb2.TensorShapeProto:
    return tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in sizes])


def _text(value: str) -> attr_value_pb2.AttrValue:
    return attr_value_pb2.AttrValue(s=value.encode(errors="replace"))


def has_graph_of_others(directory: str) -> bool:
    """Whether the run's event files have a graph that tbhooks has not written; False if they cannot be read."""
    try:
        return any(OURS.encode() not in found for path in _event_files(directory) for found in _graphs(path))
    except OSError:
        return False


def _event_files(directory: str) -> list[Path]:
    return sorted(path for path in Path(directory).glob("*tfevents*") if path.is_file())


def _graphs(path: Path) -> Iterator[bytes]:
    """The serialized graphs of an event file; of other records only the first bytes are read."""
    with path.open("rb") as file:
        while len(size := file.read(8)) == 8:
            (length,) = struct.unpack("<Q", size)
            file.seek(4, 1)
            start = file.tell()
            if _is_graph(file.read(min(length, _HEAD))):
                file.seek(start)
                yield file.read(length)
            file.seek(start + length + 4)


def _is_graph(head: bytes) -> bool:
    """Whether an event with these first bytes has a graph; time and step come first, if present."""
    place = 9 if head[:1] == b"\x09" else 0
    if head[place : place + 1] == b"\x10":
        place += 1
        while head[place : place + 1] and head[place] & 0x80:
            place += 1
        place += 1
    return head[place : place + 1] == _GRAPH_KEY
