"""Where the runs of a script's models go: into the script's own SummaryWriter, or a directory.

One model is written where the script writes. Of several, each has a directory of its own below, which TensorBoard
shows as a run of its own: in one run their numbers would mix wherever names are the same.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tbhooks.api import writers
from tbhooks.cli.run.options import Target
from tbhooks.data.frame import Frame
from tbhooks.data.remote import below, is_remote
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.tensorboard import TensorBoardSink

# Where writers are made by writers.
_WRITERS_OWN = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class Destinations:
    """Knows every writer the script has made, and the directory that is taken if it made none."""

    def __init__(self, logdir: str | None, target: Target, start: Path) -> None:
        """`start` is the directory the script was started in, which it may have left."""
        place = logdir if logdir is not None and writers.is_parent_directory(logdir) else None
        self._own = below(_absolute(place or "runs", start), f"{_name(target, start)}-{writers.timestamp()}")
        self._asked = None if logdir is None else self._own if place else _absolute(logdir, start)
        self._taken: str | None = None
        self._writers: list[weakref.ref[Any]] = []

    def writer_made(self, writer: Any, drain: Callable[[], None]) -> None:
        """Tells of a SummaryWriter; whatever is on its way comes before the script flushes or closes it."""
        self._writers.append(weakref.ref(writer))
        call_before(writer, ("flush", "close"), drain)

    def of(self, name: str) -> Any:
        """A writer or a directory for a model, below the others' if it has a name."""
        writer = self._writer()
        if not name:
            return self._directory() if writer is None else writer
        return below(self._directory() if writer is None else _absolute(_directory_of(writer)), name)

    def _writer(self) -> Any:
        """The first that is open, or else the last that was, of those that are where the user wants the run."""
        made = [writer for writer in (reference() for reference in self._writers) if writer is not None]
        fit = [writer for writer in made if self._asked in (None, _absolute(_directory_of(writer)))]
        return next((writer for writer in fit if writer.file_writer is not None), fit[-1] if fit else None)

    def _directory(self) -> str:
        if self._asked is not None:
            return self._asked
        directory, times = self._own, 1
        while Path(directory).exists() and directory != self._taken:
            times += 1
            directory = f"{self._own}-{times}"
        self._taken = directory
        return directory


def _absolute(directory: str, start: Path | None = None) -> str:
    """The same after the script has gone elsewhere."""
    return directory if is_remote(directory) else str(Path(start or "", Path(directory).expanduser()).absolute())


def _directory_of(writer: Any) -> str:
    return str(getattr(writer, "log_dir", None) or writer.logdir)


def _name(target: Target, start: Path) -> str:
    if target.module is not None:
        return target.module
    path = start / (target.path or "")
    return path.parent.name if path.name == "__main__.py" else path.stem


def is_made_by_script() -> bool:
    """Whether the constructor that is being told of was not called by tbhooks, nor by a writer for `add_hparams`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tbhooks.cli.run."):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith(("tbhooks.", *_WRITERS_OWN))


class Destination:
    """A sink that opens when there is something to write: until then the script may make its writer.

    It opens again after the script has closed that one, which it may do between one training and the next.
    """

    def __init__(self, destinations: Destinations, name: str, is_unwanted: Callable[[], bool]) -> None:
        self.name = name
        self.is_muted = False
        """Whether the script watches the model itself, so that nothing is written."""
        self._destinations = destinations
        self._is_unwanted = is_unwanted
        self._sink: TensorBoardSink | None = None
        self.directories: list[str] = []
        """Where something was written, first things first."""

    def last_step(self) -> int | None:
        return self._open().last_step()

    def write(self, frame: Frame) -> None:
        if self._sink is None and (self.is_muted or self._is_unwanted()):
            self.is_muted = True
        else:
            self._open().write(frame)

    def flush(self) -> None:
        if self._sink is not None:
            self._sink.flush()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def _open(self) -> TensorBoardSink:
        if self._sink is None or self._sink.is_closed:
            self._sink = TensorBoardSink(self._destinations.of(self.name))
            directory = _absolute(self._sink.destination)
            self.directories += [directory] if directory not in self.directories else []
        return self._sink
