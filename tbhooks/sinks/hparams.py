"""A run for TensorBoard's HPARAMS tab: what it was started with, and how it ended, among its other events."""

from __future__ import annotations

from typing import Protocol

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from tbhooks.exhibits import Ended, Hyperparameters
from tbhooks.sinks.wire import utf8

_TYPES = {str: api_pb2.DATA_TYPE_STRING, bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64}
_FIELDS = {str: "string_value", bool: "bool_value", float: "number_value"}


class When(Protocol):
    """The time of the step that is being written."""

    @property
    def time(self) -> float: ...


def write_start(asked: Hyperparameters, summary: summary_pb2.Summary, run: When) -> None:
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


def write_end(ended: Ended, summary: summary_pb2.Summary, run: When) -> None:
    """How it went."""
    status = api_pb2.STATUS_FAILURE if ended.failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=run.time)
    _add(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end), summary)


def _add(tag: str, content: plugin_data_pb2.HParamsPluginData, summary: summary_pb2.Summary) -> None:
    summary.value.add(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
