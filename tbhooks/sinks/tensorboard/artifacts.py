"""Writes the artifacts of a frame: a table with one function per type.

Most become values of the step's event; graphs and embeddings need a separate event or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.plugins.image import metadata as image_metadata

from tbhooks.data.artifacts import (
    Artifact,
    Channels,
    Embedding,
    FlightsLeftOut,
    Graph,
    Hyperparameters,
    Picture,
    RunEnded,
    Text,
)
from tbhooks.data.artifacts.flights import Flight
from tbhooks.drawing import png
from tbhooks.sinks.tensorboard import embeddings, flights, frame_tensors, graphs
from tbhooks.sinks.tensorboard.frame_tensors import Layout
from tbhooks.sinks.tensorboard.protobuf import plugin_metadata, strings, utf8


class Run(NamedTuple):
    """The run and the step that is being written.

    `send` writes the bytes of a separate event, `flush` all events so far. `layouts` are those of the run's frame
    tensors, by kind.
    """

    directory: str
    time: float
    step: int
    send: Callable[[bytes], None]
    flush: Callable[[], None]
    layouts: dict[str, Layout]


_TYPES = {str: api_pb2.DATA_TYPE_STRING, bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64}
_FIELDS = {str: "string_value", bool: "bool_value", float: "number_value"}


def write_text(text: Text, summary: summary_pb2.Summary, _run: Run) -> None:
    """Markdown for the TEXT tab."""
    content = text.markdown.encode(errors="replace")
    summary.value.add(tag=f"{text.tag}/text_summary", tensor=strings([content]), metadata=plugin_metadata("text"))


def write_image(picture: Picture, summary: summary_pb2.Summary, _run: Run) -> None:
    """An image for the IMAGES tab, as a tensor of strings that both of TensorBoard's loaders support.

    TensorBoard shows the caption of a tag's first value.
    """
    height, width, _ = picture.pixels.shape
    described = image_metadata.create_summary_metadata(display_name="", description=utf8(picture.caption))
    described.data_class = summary_pb2.DATA_CLASS_BLOB_SEQUENCE
    content = [str(width).encode(), str(height).encode(), png.from_pixels(picture.pixels)]
    summary.value.add(tag=utf8(picture.tag), tensor=strings(content), metadata=described)


def write_start(hyperparameters: Hyperparameters, summary: summary_pb2.Summary, run: Run) -> None:
    """The hyperparameters for the HPARAMS tab; their columns have no domain, because other runs have other values."""
    values = {
        utf8(name): utf8(value) if isinstance(value, str) else value for name, value in hyperparameters.values.items()
    }
    experiment = api_pb2.Experiment(
        time_created_secs=run.time,
        hparam_infos=[api_pb2.HParamInfo(name=name, type=_TYPES[type(v)]) for name, v in values.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=utf8(tag))) for tag in hyperparameters.metrics],
    )
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=run.time)
    for name, value in values.items():
        setattr(start.hparams[name], _FIELDS[type(value)], value)
    _add(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment), summary)
    _add(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start), summary)


def write_end(ended: RunEnded, summary: summary_pb2.Summary, run: Run) -> None:
    """The status of the run for the HPARAMS tab."""
    status = api_pb2.STATUS_FAILURE if ended.failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=run.time)
    _add(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end), summary)


def _add(tag: str, content: plugin_data_pb2.HParamsPluginData, summary: summary_pb2.Summary) -> None:
    summary.value.add(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


Write = Callable[[Any, summary_pb2.Summary, Run], None]
WRITERS: dict[type, Write] = {
    Text: write_text,
    Graph: graphs.write,
    Picture: write_image,
    Channels: frame_tensors.write,
    Embedding: embeddings.write,
    Hyperparameters: write_start,
    RunEnded: write_end,
    Flight: flights.write,
    FlightsLeftOut: flights.write_left_out,
}


def _once(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Drops images and graphs that were requested twice: an event has one value per tag."""
    written: set[tuple[type, str]] = set()
    for artifact in artifacts:
        if isinstance(artifact, Picture | Graph):
            key = type(artifact), artifact.tag if isinstance(artifact, Picture) else artifact.name
            if key in written:
                continue
            written.add(key)
        yield artifact


def write(artifacts: Iterable[Artifact], summary: summary_pb2.Summary, run: Run) -> None:
    """Writes artifacts into the summary of the step's event, or beside it."""
    for artifact in frame_tensors.joined(_once(artifacts)):
        WRITERS[type(artifact)](artifact, summary, run)
