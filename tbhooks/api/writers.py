"""What `writer=` accepts, the sink that each kind of writer gets, and the names of run directories."""

from __future__ import annotations

import importlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tbhooks.data.errors import invalid_argument
from tbhooks.data.process import remote
from tbhooks.data.process.remote import is_remote
from tbhooks.sinks import Sink
from tbhooks.sinks.memory import FunctionSink
from tbhooks.sinks.scalar_selection import scalar_table

ACCEPTED = (
    "a SummaryWriter (torch or tensorboardX), a directory (str or Path), a run of wandb, mlflow, aim, trackio or "
    "swanlab (or one of the modules wandb, mlflow, trackio, swanlab), a function that takes a frame, an object with "
    "write, flush and close, a list of those, or None"
)


def make_sinks(writer: Any, scalars: Any, model_name: str) -> tuple[Sink, ...]:
    """Returns one sink for each writer. `model_name` is for run directories that have no name of their own."""
    scalar_table(scalars)
    check_writers(writer)
    return tuple(_sink(run_directory(each, model_name), scalars) for each in _listed(writer))


def check_writers(writer: Any) -> None:
    """Raises an ArgumentError for a writer of the wrong type, or for a URL that TensorBoard cannot write to."""
    for each in _listed(writer):
        if isinstance(each, str | Path):
            remote.check(each)
        is_function = callable(each) and not isinstance(each, type | nn.Module)
        is_sink = isinstance(each, Sink) and not isinstance(each, type | io.IOBase)
        if not (_sink_class(each) or is_function or is_sink):
            raise invalid_argument("writer", ACCEPTED, each)


def _listed(writer: Any) -> list[Any]:
    return list(writer) if isinstance(writer, list | tuple) else [] if writer is None else [writer]


def _sink(writer: Any, scalars: Any) -> Sink:
    path = _sink_class(writer)
    if path is not None:
        module, _, name = path.partition(":")
        made: Sink = getattr(importlib.import_module(f"tbhooks.sinks.{module}"), name)(writer, scalars)
        return made
    return writer if isinstance(writer, Sink) else FunctionSink(writer)


def _sink_class(writer: Any) -> str | None:
    return next((path for matches, path in SINKS if matches(writer)), None)


def _is_for_tensorboard(writer: Any) -> bool:
    return isinstance(writer, str | Path) or (hasattr(writer, "_get_file_writer") and not isinstance(writer, type))


def _is_module(name: str) -> Callable[[Any], bool]:
    return lambda writer: isinstance(writer, ModuleType) and writer.__name__ == name


def _is_run_of(package: str) -> Callable[[Any], bool]:
    """Whether an object is a run of this package. Decided by names, so that the package need not be installed."""
    return lambda writer: any(
        base.__name__ == "Run" and base.__module__.partition(".")[0] == package for base in type(writer).__mro__
    )


# What a writer is, and the sink that writes to it: module and class in tbhooks.sinks, imported when needed.
SINKS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_is_for_tensorboard, "tensorboard:TensorBoardSink"),
    (_is_module("wandb"), "wandb:WandbSink"),
    (_is_run_of("wandb"), "wandb:WandbSink"),
    (_is_module("mlflow"), "mlflow:MlflowSink"),
    (_is_run_of("mlflow"), "mlflow:MlflowSink"),
    (_is_run_of("aim"), "aim:AimSink"),
    (_is_module("trackio"), "trackio:TrackioSink"),
    (_is_run_of("trackio"), "trackio:TrackioSink"),
    (_is_module("swanlab"), "swanlab:SwanlabSink"),
    (_is_run_of("swanlab"), "swanlab:SwanlabSink"),
)


# Run directories.


def run_directory(writer: Any, model_name: str) -> Any:
    """Makes a directory in a parent directory: `runs/` becomes `runs/<model>-<time>`. Returns other writers as is."""
    if not isinstance(writer, str) or not is_parent_directory(writer):
        return writer
    name = f"{writer}{model_name}-{timestamp()}"
    return name if is_remote(writer) else _make_directory(name)


def timestamp() -> str:
    """The time as it is part of the names of runs."""
    return time.strftime("%Y%m%d-%H%M%S")


def is_parent_directory(directory: str) -> bool:
    """Whether the name ends with a slash: runs get directories of their own in it."""
    separators = ("/",) if is_remote(directory) else tuple(filter(None, (os.sep, os.altsep)))
    return directory.endswith(separators)


def _make_directory(name: str) -> str:
    """Creates it at once, with a number if it exists: another run may start in the same second."""
    number = 1
    while True:
        path = Path(name if number == 1 else f"{name}-{number}").expanduser()
        try:
            path.mkdir(parents=True)
            return str(path)
        except FileExistsError:
            number += 1
