"""What goes along with a frame, as TensorBoard shows it: a table of what writes each kind.

Most become values of the step's own event; some need an event or files of their own, for which the run is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tensorboard.compat.proto import summary_pb2

from tbhooks.exhibits import Channels, Embedding, Ended, Exhibit, Graph, Hyperparameters, Picture, Text
from tbhooks.sinks import channels, graphs, hparams, pictures, projector, texts
from tbhooks.sinks.tensors import Layout


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


Write = Callable[[Any, summary_pb2.Summary, Run], None]
WRITERS: dict[type, Write] = {
    Text: texts.write,
    Graph: graphs.write,
    Picture: pictures.write,
    Channels: channels.write,
    Embedding: projector.write,
    Hyperparameters: hparams.write_start,
    Ended: hparams.write_end,
}


def _once(exhibits: Iterable[Exhibit]) -> Iterator[Exhibit]:
    """Of pictures and graphs that two calls asked for, one: an event has one value a tag."""
    written: set[tuple[type, str]] = set()
    for exhibit in exhibits:
        if isinstance(exhibit, Picture | Graph):
            key = type(exhibit), exhibit.tag if isinstance(exhibit, Picture) else exhibit.name
            if key in written:
                continue
            written.add(key)
        yield exhibit


def write(exhibits: Iterable[Exhibit], summary: summary_pb2.Summary, run: Run) -> None:
    """Into the summary of the step's event, or beside it."""
    for exhibit in channels.joined(_once(exhibits)):
        WRITERS[type(exhibit)](exhibit, summary, run)
