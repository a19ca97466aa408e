"""The lines that `tbhooks run` writes to stderr: log messages while the script runs, and a summary at its end.

They do not break progress bars, their number is limited, and only the process that was started writes any: neither
other ranks nor forked children do.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from tbhooks.data.process.remote import is_remote
from tbhooks.data.self_report import logger

PREFIX = "tbhooks: "
# The most lines in so many seconds; further ones are only counted.
MOST_LINES, WINDOW_S = 10, 60.0


class Terminal(logging.Handler):
    """The only handler of tbhooks' logger between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0
        """The number of lines that were not written."""
        self._process = os.getpid()
        self._times: deque[float] = deque(maxlen=MOST_LINES)
        self._propagated = logger.propagate

    def start(self) -> None:
        logger.addHandler(self)
        logger.propagate = False  # a script that sets up logging would show every line twice

    def stop(self) -> None:
        logger.removeHandler(self)
        logger.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._process:
            return
        now = time.monotonic()
        if len(self._times) == MOST_LINES and now - self._times[0] < WINDOW_S:
            self.left_out += 1
            return
        self._times.append(now)
        self.write(record.getMessage())

    def write(self, text: str) -> None:
        """Writes each line with a prefix. tqdm's bars are redrawn below; a live display of rich does that itself."""
        lines = "\n".join(PREFIX + line for line in text.splitlines())
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with suppress(Exception):  # stderr may be closed, None, or replaced by the script
            if bars is not None and getattr(bars, "_instances", None):
                bars.write(lines, file=sys.stderr)
            else:
                sys.stderr.write(lines + "\n")
                sys.stderr.flush()


if TYPE_CHECKING:
    from tbhooks.api.handle import Watch
    from tbhooks.cli.run.destinations import Destination
    from tbhooks.data.frame import Finding

# More findings than this are for `tbhooks report`.
MOST_FINDINGS = 10


def summary(watched: list[tuple[Watch, Destination]], why_nothing: str) -> str:
    """The lines at the end of a script; empty on other ranks than the first."""
    if any(_rank(watching) != 0 for watching, _ in watched):
        return ""
    written = [(watching, destination) for watching, destination in watched if destination.directories]
    if not written:
        return f"nothing was logged: {why_nothing}"
    lines = [line for watching, destination in written for line in _summarize(watching, destination)]
    return "\n".join([*lines, _next_commands([path for _, destination in written for path in destination.directories])])


def _rank(watching: Watch) -> int:
    from tbhooks.api.handle import lifecycle_of  # noqa: PLC0415  loads torch, which is imported by then

    return lifecycle_of(watching).context.rank


def _summarize(watching: Watch, destination: Destination) -> list[str]:
    from tbhooks.data.findings import by_severity  # noqa: PLC0415  loads NumPy, which is imported by then

    stats, findings = watching.stats, by_severity(watching.findings)
    found = f"{len(findings)} {'finding' if len(findings) == 1 else 'findings'}" if findings else "no issues found"
    begun = max(stats.steps, stats.logged)  # the last step may not have ended
    where = ", ".join(map(_short, destination.directories))
    lines = [f"{where}: {stats.logged} of {begun} steps logged, {found}"]
    lines += [f"  {line}" for line in _returned_loss(watching)]
    lines += [f"  {_line(finding)}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"  and {len(findings) - MOST_FINDINGS} more")
    if stats.dropped or stats.errors:
        lines.append(f"  {stats.dropped} logged steps were dropped, {stats.errors} errors inside tbhooks")
    return lines


def _returned_loss(watching: Watch) -> list[str]:
    """A line on the loss that the model itself returns, as transformers' models do, over the steps in the history."""
    from tbhooks.drawing.text import number  # noqa: PLC0415  loads NumPy, which is imported by then
    from tbhooks.runs.report_data import RETURNED_LOSS, returned_loss  # noqa: PLC0415

    loss = returned_loss([frame for frame in watching.history if not frame.is_evaluation])
    if loss is None:
        return []
    steps, values = loss.steps.tolist(), loss.values.tolist()
    return [f"{RETURNED_LOSS}: {number(values[0])} at step {steps[0]}, {number(values[-1])} at step {steps[-1]}"]


def _line(finding: Finding) -> str:
    from tbhooks.drawing.text import printable  # noqa: PLC0415  loads NumPy, which is imported by then

    return printable(f"{finding.severity}: step {finding.step}: {finding.rule}: {finding.message}")


def _next_commands(directories: list[str]) -> str:
    """The commands that show the runs. `tbhooks report` does not read remote directories."""
    local = [path for path in directories if not is_remote(path)]
    remote = [path for path in directories if is_remote(path)]
    roots = [*([_short(os.path.commonpath(local))] if local else []), *dict.fromkeys(remote)]
    commands = [f"tensorboard --logdir {shlex.quote(path)}" for path in roots]
    commands += [f"tbhooks report {shlex.quote(_short(path))}" for path in local[:1]]
    return f"to view: {', or '.join(commands)}"


def _short(path: str) -> str:
    """The path relative to the working directory if it is below that."""
    try:
        relative = path if is_remote(path) else os.path.relpath(path)
    except (OSError, ValueError):  # the working directory was deleted, or is on another drive
        return path
    return path if relative.startswith(os.pardir) else relative
