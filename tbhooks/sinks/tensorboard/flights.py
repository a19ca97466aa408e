"""Dumps of the flight recorder in event files: as one value that is read back, and as curves and a map of their steps.

The curves are the scalars `flight.loss` and `flight.grad_norm`, the map is the kind `flight` of the TBHOOKS tab. Both
are written under the steps they are about, in events of their own, once for each step.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tensorboard.compat.proto import summary_pb2

from tbhooks.data import stats
from tbhooks.data.artifacts import FlightsLeftOut
from tbhooks.data.artifacts.flights import FLIGHT, LOSS_TAG, NORM_TAG, Flight, encode
from tbhooks.data.frame import Frame, Site, Sites
from tbhooks.sinks.scalar_selection import indices_of
from tbhooks.sinks.tensorboard import protobuf
from tbhooks.sinks.tensorboard.findings import plain_text
from tbhooks.sinks.tensorboard.frame_tensors import STORED_COLUMNS, Layout, number_rows
from tbhooks.sinks.tensorboard.protobuf import plugin_metadata, strings

DATA_TAG = "tbhooks/flights"
LEFT_OUT_TAG = "tbhooks/flights_left_out"
TEXT_TAG = "tbhooks/flights/text_summary"
# The map of one dump takes at most so many bytes: of a large model it has fewer steps, the newest ones.
MOST_MAP_BYTES = 16 << 20


def write(flight: Flight, summary: summary_pb2.Summary, run: Any) -> None:
    """Adds a dump to the event of its step, and writes the events of its rows."""
    _add(summary, DATA_TAG, encode(flight))
    text = plain_text(str(flight)).encode(errors="replace")
    summary.value.add(tag=TEXT_TAG, tensor=strings([text]), metadata=plugin_metadata("text"))
    if flight.rank != 0:  # curves and map are those of the first rank
        return
    fitting = MOST_MAP_BYTES // max(4 * len(STORED_COLUMNS) * len(flight.parameters), 1)
    for row in np.flatnonzero(flight.steps > flight.new_after).tolist():
        content = _row(flight, row, run, with_map=len(flight.steps) - row <= fitting)
        if content.value:
            run.send(protobuf.event(flight.time, int(flight.steps[row]), content.SerializeToString()))


def write_left_out(left_out: FlightsLeftOut, summary: summary_pb2.Summary, _run: Any) -> None:
    """Adds the list of dumps that were not made."""
    _add(summary, LEFT_OUT_TAG, json.dumps(list(left_out.reasons)).encode())


def _add(summary: summary_pb2.Summary, tag: str, content: bytes) -> None:
    summary.value.add(tag=tag, tensor=strings([content]), metadata=plugin_metadata("tbhooks"))


def _row(flight: Flight, row: int, run: Any, with_map: bool) -> summary_pb2.Summary:
    content = summary_pb2.Summary()
    if flight.loss_logged is not None and flight.loss_logged[row]:
        content.value.add(tag=LOSS_TAG, simple_value=flight.loss[row])
    if not np.isnan(flight.grad_norm[row]):
        content.value.add(tag=NORM_TAG, simple_value=flight.grad_norm[row])
    if with_map and not np.isnan(flight.norms[row]).all():
        layout = run.layouts.setdefault(FLIGHT, Layout(FLIGHT))
        sites = Sites(Site(path, FLIGHT) for path in flight.parameters)
        frame = Frame(
            int(flight.steps[row]), flight.time, 0, sites, _stored(flight.norms[row]),
            np.zeros((len(sites), 0), dtype=np.int64),
        )  # fmt: skip
        layout.add(frame, indices_of(range(len(sites))), layout.positions(sites), content)
    return content


def _stored(norms: stats.Floats) -> stats.Floats:
    """Each norm as a row; none where there was no gradient."""
    values = number_rows(norms)
    values[np.isnan(norms)] = stats.empty_rows(1)
    return values
