"""What goes along with a frame, as TensorBoard shows it: a table of what writes each kind.

Most become values of the step's own event; some need an event or files of their own, for which the run is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tensorboard.compat.proto import summary_pb2

from tbhooks.exhibits import Exhibit, Graph, Text
from tbhooks.sinks import graphs, texts


class Run(NamedTuple):
    """Where a run lies, the step that is being written, and what takes the bytes of an event of its own."""

    directory: str
    time: float
    step: int
    send: Callable[[bytes], None]


Write = Callable[[Any, summary_pb2.Summary, Run], None]
WRITERS: dict[type, Write] = {
    Text: texts.write,
    Graph: graphs.write,
}


def write(exhibits: Iterable[Exhibit], summary: summary_pb2.Summary, run: Run) -> None:
    """Into the summary of the step's event, or beside it."""
    for exhibit in exhibits:
        WRITERS[type(exhibit)](exhibit, summary, run)
