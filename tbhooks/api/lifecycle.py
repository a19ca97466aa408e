"""Nothing handed over is lost when the process ends: open watches are closed at exit and at SIGTERM.

A forked child inherits none of them. The last one to close leaves the process as the first one found it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol


class Open(Protocol):
    """What has to be closed in time."""

    def _begin_close(self) -> None:
        """Hands over everything there is and waits for nothing."""

    def close(self, timeout_s: float = ...) -> None: ...

    def abandon(self) -> None: ...


open_watches: set[Open] = set()
_prepared = threading.Event()
_failed = threading.Event()
# For all watches together. Whoever sends SIGTERM usually sends SIGKILL some ten seconds later.
EXIT_DEADLINE_S = 30.0
SIGTERM_DEADLINE_S = 5.0


def prepare(is_of_a_job: bool) -> None:
    """To be called before a watch opens. A rank of a job dies of SIGTERM at once, also when it waits for another."""
    if not _prepared.is_set():
        _prepared.set()
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_abandon_all)
    if not is_of_a_job and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _handle_sigterm(_on_sigterm)


def tidy() -> None:
    """To be called when one has closed."""
    if not open_watches and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _handle_sigterm(signal.SIG_DFL)


def close_together(watches: Iterable[Open], timeout_s: float = EXIT_DEADLINE_S) -> None:
    """Closes several within one deadline: all write at the same time, so that a hung one costs the others nothing."""
    deadline = time.monotonic() + timeout_s
    watches = list(watches)
    for watching in watches:
        watching._begin_close()
    for watching in watches:
        watching.close(max(0.0, deadline - time.monotonic()))


def is_failing() -> bool:
    """Whether an exception is on its way right now, or one or a signal ends the process."""
    return sys.exc_info()[0] is not None or _failed.is_set()


def _handle_sigterm(handler: Any) -> None:
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, handler)


def _close_all() -> None:
    if getattr(sys, "last_value", None) is not None:  # nobody caught it
        _failed.set()
    close_together(open_watches, EXIT_DEADLINE_S)


def _abandon_all() -> None:
    for watching in list(open_watches):
        watching.abandon()
    open_watches.clear()
    tidy()


def _on_sigterm(number: int, _frame: Any) -> None:
    """Writes what was handed over, then dies of the signal as the process would have without us."""
    _failed.set()
    close_together(open_watches, SIGTERM_DEADLINE_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
