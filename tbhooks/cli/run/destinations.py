"""Where the runs of a script's models are written: into the script's own SummaryWriter, or into a directory.

A single model is written where the script writes. Each of several models gets a directory below that one, which
TensorBoard shows as a separate run: in one run, tags of the same name would mix.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tbhooks.api import writers
from tbhooks.cli.run.options import Target
from tbhooks.data.frame import Frame
from tbhooks.data.process.remote import below, is_remote
from tbhooks.sinks.flush_hooks import call_before
from tbhooks.sinks.tensorboard import TensorBoardSink

# The modules in which one writer makes another.
_WRITER_MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class Destinations:
    """The writers that the script has made, and the directory to use if it made none."""

    def __init__(self, logdir: str | None, target: Target, start: Path) -> None:
        """`start` is the working directory at the start of the script."""
        parent = logdir if logdir is not None and writers.is_parent_directory(logdir) else None
        self._default = below(_absolute(parent or "runs", start), f"{_name(target, start)}-{writers.timestamp()}")
        self._requested = None if logdir is None else self._default if parent else _absolute(logdir, start)
        self._created: str | None = None
        self._writers: list[weakref.ref[Any]] = []

    def add_writer(self, writer: Any, drain: Callable[[], None]) -> None:
        """Adds a SummaryWriter of the script; `drain` is called before the script flushes or closes it."""
        self._writers.append(weakref.ref(writer))
        call_before(writer, ("flush", "close"), drain)

    def of(self, name: str) -> Any:
        """The writer or directory for a model; if it has a name, a directory below the script's."""
        writer = self._writer()
        if not name:
            return self._directory() if writer is None else writer
        return below(self._directory() if writer is None else _absolute(_directory_of(writer)), name)

    def _writer(self) -> Any:
        """The first open writer, or else the last one, among those in the directory that the user asked for."""
        made = [writer for writer in (reference() for reference in self._writers) if writer is not None]
        fit = [writer for writer in made if self._requested in (None, _absolute(_directory_of(writer)))]
        return next((writer for writer in fit if writer.file_writer is not None), fit[-1] if fit else None)

    def _directory(self) -> str:
        if self._requested is not None:
            return self._requested
        directory, times = self._default, 1
        while Path(directory).exists() and directory != self._created:
            times += 1
            directory = f"{self._default}-{times}"
        self._created = directory
        return directory


def _absolute(directory: str, start: Path | None = None) -> str:
    """An absolute path: the script may change the working directory."""
    return directory if is_remote(directory) else str(Path(start or "", Path(directory).expanduser()).absolute())


def _directory_of(writer: Any) -> str:
    return str(getattr(writer, "log_dir", None) or writer.logdir)


def _name(target: Target, start: Path) -> str:
    if target.module is not None:
        return target.module
    path = start / (target.path or "")
    return path.parent.name if path.name == "__main__.py" else path.stem


def is_made_by_script() -> bool:
    """Whether the patched constructor was called by the script, not by tbhooks or by a writer's `add_hparams`."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tbhooks.cli.run."):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith(("tbhooks.", *_WRITER_MODULES))


class Destination:
    """A sink that is opened at the first write, so that the script has time to make its writer.

    It is opened again if the script has closed that writer, as some do between trainings.
    """

    def __init__(self, destinations: Destinations, name: str, is_unwanted: Callable[[], bool]) -> None:
        self.name = name
        self.is_muted = False
        """Whether nothing is written, because the script watches the model itself."""
        self._destinations = destinations
        self._is_unwanted = is_unwanted
        self._sink: TensorBoardSink | None = None
        self.directories: list[str] = []
        """The directories written to, in order."""

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
