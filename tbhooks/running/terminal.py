"""Lines in the terminal while a script runs: what `logging` is told by tbhooks, beside the script's progress bars.

Few, on stderr, and only from the process that was started: neither other ranks nor forked children speak.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from contextlib import suppress

from tbhooks.report import logger

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
