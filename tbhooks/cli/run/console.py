"""Lines in the terminal while a script runs: what `logging` is told by tbhooks, beside the script's progress bars.

Few, on stderr, and only from the process that was started: neither other ranks nor forked children speak.
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

from tbhooks.data.remote import is_remote
from tbhooks.data.self_report import logger

PREFIX = "tbhooks: "
# So many lines in so many seconds; the others are counted.
MOST_LINES, WINDOW_S = 10, 60.0


class Terminal(logging.Handler):
    """Between `start` and `stop` the handler of what tbhooks logs, and the only one."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0
        """Lines that would have been too many."""
        self._process = os.getpid()
        self._times: deque[float] = deque(maxlen=MOST_LINES)
        self._propagated = logger.propagate

    def start(self) -> None:
        logger.addHandler(self)
        logger.propagate = False  # or a script that sets logging up would show every line twice

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
        self.say(record.getMessage())

    def say(self, text: str) -> None:
        """One line for each of the text. A rich display that is live has taken stderr over, and makes room itself."""
        lines = "\n".join(PREFIX + line for line in text.splitlines())
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with suppress(Exception):  # closed, none at all, or one of the script's that fails in its own way
            if bars is not None and getattr(bars, "_instances", None):
                bars.write(lines, file=sys.stderr)
            else:
                sys.stderr.write(lines + "\n")
                sys.stderr.flush()


if TYPE_CHECKING:
    from tbhooks.api.handle import Watch
    from tbhooks.cli.run.destinations import Destination
    from tbhooks.data.frame import Finding

# More findings than this are better read in a report.
MOST_FINDINGS = 10


def told(watched: list[tuple[Watch, Destination]], why_nothing: str) -> str:
    """Nothing where this process is not the first of its job."""
    if any(_rank(watching) != 0 for watching, _ in watched):
        return ""
    written = [(watching, destination) for watching, destination in watched if destination.directories]
    if not written:
        return f"nothing was logged: {why_nothing}"
    lines = [line for watching, destination in written for line in _of_one(watching, destination)]
    return "\n".join([*lines, _how_to_look([path for _, destination in written for path in destination.directories])])


def _rank(watching: Watch) -> int:
    from tbhooks.api.handle import lifecycle_of  # noqa: PLC0415  loads torch, which is there by then

    return lifecycle_of(watching).context.rank


def _of_one(watching: Watch, destination: Destination) -> list[str]:
    from tbhooks.data.findings import by_severity  # noqa: PLC0415  loads NumPy, which is there by then

    stats, findings = watching.stats, by_severity(watching.findings)
    found = f"{len(findings)} {'finding' if len(findings) == 1 else 'findings'}" if findings else "nothing found wrong"
    begun = max(stats.steps, stats.logged)  # the last one may have been cut short
    where = ", ".join(map(_short, destination.directories))
    lines = [f"{where}: {stats.logged} of {begun} steps logged, {found}"]
    lines += [f"  {_line(finding)}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        lines.append(f"  and {len(findings) - MOST_FINDINGS} more")
    if stats.dropped or stats.errors:
        lines.append(f"  {stats.dropped} logged steps were dropped, {stats.errors} errors of tbhooks itself")
    return lines


def _line(finding: Finding) -> str:
    from tbhooks.drawing.text import printable  # noqa: PLC0415  loads NumPy, which is there by then

    return printable(f"{finding.severity}: step {finding.step}: {finding.rule}: {finding.message}")


def _how_to_look(directories: list[str]) -> str:
    """Runs that are elsewhere are for TensorBoard alone; nothing here reads them."""
    here = [path for path in directories if not is_remote(path)]
    elsewhere = [path for path in directories if is_remote(path)]
    together = [*([_short(os.path.commonpath(here))] if here else []), *dict.fromkeys(elsewhere)]
    look = [f"tensorboard --logdir {shlex.quote(path)}" for path in together]
    report = [f"tbhooks report {shlex.quote(_short(path))}" for path in here[:1]]
    return f"to look: {', or '.join([*look, *report])}"


def _short(path: str) -> str:
    """Relative to here if it lies below."""
    try:
        here = path if is_remote(path) else os.path.relpath(path)
    except (OSError, ValueError):  # here is gone, or on another drive
        return path
    return path if here.startswith(os.pardir) else here
