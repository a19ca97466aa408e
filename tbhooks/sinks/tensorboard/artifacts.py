"""What goes along with a frame, as TensorBoard shows it: a table of what writes each kind.

Most become values of the step's own event; some need an event or files of their own, for which the run is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from tbhooks.data.artifacts import Artifact, Channels, Embedding, Graph, Hyperparameters, Picture, RunEnded, Text
from tbhooks.sinks.tensorboard import embeddings, frame_tensors, graphs, images, texts
from tbhooks.sinks.tensorboard.frame_tensors import Layout
from tbhooks.sinks.tensorboard.protobuf import utf8


class Run(NamedTuple):
    """Where a run lies, the step that is being written, what takes the bytes of an event of its own, and what has
    all events so far on disk.

    The layouts are those of the run's frame tensors so far, by kind.
    """

    directory: str
    time: float
    step: int
    send: Callable[[bytes], None]
    flush: Callable[[], None]
    layouts: dict[str, Layout]


_TYPES = {str: api_pb2.DATA_TYPE_STRING, bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64}
_FIELDS = {str: "string_value", bool: "bool_value", float: "number_value"}


def write_start(asked: Hyperparameters, summary: summary_pb2.Summary, run: Run) -> None:
    """Columns without a domain: other runs may have other values."""
    values = {utf8(name): utf8(value) if isinstance(value, str) else value for name, value in asked.values.items()}
    experiment = api_pb2.Experiment(
        time_created_secs=run.time,
        hparam_infos=[api_pb2.HParamInfo(name=name, type=_TYPES[type(v)]) for name, v in values.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=utf8(tag))) for tag in asked.metrics],
    )
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=run.time)
    for name, value in values.items():
        setattr(start.hparams[name], _FIELDS[type(value)], value)
    _add(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment), summary)
    _add(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start), summary)


def write_end(ended: RunEnded, summary: summary_pb2.Summary, run: Run) -> None:
    """How it went."""
    status = api_pb2.STATUS_FAILURE if ended.failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=run.time)
    _add(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end), summary)


def _add(tag: str, content: plugin_data_pb2.HParamsPluginData, summary: summary_pb2.Summary) -> None:
    summary.value.add(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


Write = Callable[[Any, summary_pb2.Summary, Run], None]
WRITERS: dict[type, Write] = {
    Text: texts.write,
    Graph: graphs.write,
    Picture: images.write,
    Channels: frame_tensors.write,
    Embedding: embeddings.write,
    Hyperparameters: write_start,
    RunEnded: write_end,
}


def _once(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Of pictures and graphs that two calls asked for, one: an event has one value a tag."""
    written: set[tuple[type, str]] = set()
    for artifact in artifacts:
        if isinstance(artifact, Picture | Graph):
            key = type(artifact), artifact.tag if isinstance(artifact, Picture) else artifact.name
            if key in written:
                continue
            written.add(key)
        yield artifact


def write(artifacts: Iterable[Artifact], summary: summary_pb2.Summary, run: Run) -> None:
    """Into the summary of the step's event, or beside it."""
    for artifact in frame_tensors.joined(_once(artifacts)):
        WRITERS[type(artifact)](artifact, summary, run)
