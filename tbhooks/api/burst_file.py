"""Requests for bursts from other processes: `tbhooks burst DIR n` writes a file, and the watch on that run finds it.

The background thread looks for the file at most once a second. No port is opened, and nothing in the file is executed.
No torch here: the command is to start at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tbhooks.data.process.remote import is_remote
from tbhooks.sinks import Sink
from tbhooks.sinks.jsonl import JsonlSink

NAME = "tbhooks-burst"
# The most digits of a number of steps.
_LONGEST = 9


def ask(directory: Path, steps: int) -> None:
    """Asks the watch that writes to this directory for a burst."""
    part = directory / f".{NAME}.{os.getpid()}"
    part.write_text(f"{steps}\n", encoding="ascii")
    part.replace(directory / NAME)


class BurstFile:
    """Looks for the file in the local directories that the sinks of one watch write to."""

    def __init__(self, sinks: Sequence[Sink], ask_for: Callable[[int], None]) -> None:
        self.files = list(dict.fromkeys(path / NAME for sink in sinks if (path := _directory(sink)) is not None))
        self._ask_for = ask_for
        for file in self.files:  # one that was meant for an earlier run
            _take(file)

    def poll(self) -> None:
        for file in self.files:
            content = _take(file)
            if content.isdigit() and len(content) <= _LONGEST and int(content) > 0:
                self._ask_for(int(content))


def _directory(sink: Sink) -> Path | None:
    """The local directory that a sink writes to; None if there is none."""
    if isinstance(sink, JsonlSink):
        return sink.path.absolute().parent
    place = getattr(sink, "destination", None)
    return Path(place).absolute() if isinstance(place, str) and not is_remote(place) else None


def _take(file: Path) -> bytes:
    """Removes the file. Returns the beginning of its content, and nothing if there is no such file."""
    content = b""
    with contextlib.suppress(OSError):
        with file.open("rb") as opened:
            content = opened.read(_LONGEST + 2).strip()
        file.unlink()
    return content
