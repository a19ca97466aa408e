"""What a watch knows about itself: what it saw, what it could not see and why, what went wrong, what it cost.

Trouble is counted here and told once through `logging`; nothing is printed and nothing is raised.
"""

from __future__ import annotations

import contextlib
import logging
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

logger = logging.getLogger("tbhooks")
logger.addHandler(logging.NullHandler())


# A message that changes with every step must not fill the memory of a long run.
MOST_MESSAGES = 200
_NOT_SEEN = "not seen: "


def listed(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _by_value(mapping: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in mapping.items():
        found.setdefault(value, []).append(key)
    return found


@dataclass(frozen=True)
class Stats:
    """A snapshot of a watch's self-report (`Watch.stats`)."""

    steps: int
    """Steps that have ended, logged or not."""
    logged: int
    """Steps handed to the pump."""
    hooks_fired: int
    unseen: dict[str, str]
    """What could not be seen, and why."""
    aliases: dict[str, str]
    """Further names of shared modules, and the name they are logged under."""
    errors: int
    """Exceptions of ours, caught; their texts are in `messages`."""
    dropped: int
    """Logged steps not written: the queue was full (512 steps or 64 MB waited for a slow sink), or every sink failed.
    It counts as it happens."""
    messages: tuple[str, ...]
    seconds_training: float
    """Time spent in the training thread."""
    seconds_pump: float
    """Time spent in the background thread."""
    seconds_views: float
    """The part of it that live views took."""
    clock: str
    """What ends a step: "optimizer", "forward" or "manual"; "auto" until that is known."""
    skipped: int
    """Steps that a GradScaler left out because of infinite gradients."""
    kernel: str
    """What reduces CPU tensors: "C", or "torch" where the package was built without a compiler."""
    device_kernel: str
    """What reduces CUDA tensors: "triton" where it is installed, or "torch", followed by why if it failed."""

    def __repr__(self) -> str:
        """Line by line; what could not be seen is listed once, by its reason."""
        views = f"of which {self.seconds_views:.3g} for views"
        lines = [
            f"steps: {self.steps}, counted by: {self.clock}",
            f"logged: {self.logged}, dropped: {self.dropped}, skipped by a GradScaler: {self.skipped}",
            f"seconds: {self.seconds_training:.3g} in training, {self.seconds_pump:.3g} in the background, {views}",
            f"hooks fired: {self.hooks_fired}; kernel: {self.kernel}, for CUDA {self.device_kernel}",
            f"errors of tbhooks: {self.errors}",
        ]
        lines += [f"not seen: {listed(names)}: {why}" for why, names in _by_value(self.unseen).items()]
        lines += [f"also called {listed(others)}: {name}" for name, others in _by_value(self.aliases).items()]
        lines += [f"message: {message}" for message in self.messages if not message.startswith(_NOT_SEEN)]
        return "\n".join(lines)


@dataclass(eq=False)
class Report:
    """The counters behind `Stats`, shared by everything that belongs to one watch."""

    is_quiet: bool = False
    """Whether only errors are logged: the first rank speaks for the others."""
    hooks_fired: int = 0
    errors: int = 0
    dropped: int = 0
    seconds_training: float = 0.0
    seconds_pump: float = 0.0
    seconds_views: float = 0.0
    unseen: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    _all: ClassVar[tuple[weakref.ref[Report], ...]] = ()
    # The thread in which our work is being done.
    _at_work: int | None = None
    _told: set[str] = field(default_factory=set)
    _untold: dict[str, list[str]] = field(default_factory=dict)
    # Re-entrant: a signal may be handled in the middle of a message.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        Report._all = (*(other for other in Report._all if other() is not None), weakref.ref(self))

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Keeps every exception of ours away from training, and adds up the time spent."""
        started = self.enter()
        try:
            yield
        except Exception as problem:  # whatever it is, it is ours and not the user's
            self.error(where, problem)
        finally:
            self.leave(started)

    @property
    def is_at_work(self) -> bool:
        """Whether what runs in this thread now is ours, or that of another watch."""
        here = threading.get_ident()
        return any((report := other()) is not None and report._at_work == here for other in Report._all)

    def enter(self) -> float | None:
        """The time at which our work in the training thread begins; None inside work that has begun already."""
        if self._at_work is not None:
            return None
        self._at_work = threading.get_ident()
        return time.perf_counter()

    def leave(self, started: float | None) -> None:
        """Adds up the time since `enter`. The two spell `guarded` out where microseconds count."""
        if started is not None:
            self._at_work = None
            self.seconds_training += time.perf_counter() - started

    def forked(self) -> None:
        """In a forked child, whoever held the lock does not exist."""
        self._lock = threading.RLock()

    def wait_for_others(self, timeout_s: float = 5.0) -> None:
        """Waits until no other thread is in the middle of our work."""
        deadline = time.monotonic() + timeout_s
        while self._at_work not in (None, threading.get_ident()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def error(self, where: str, problem: BaseException) -> None:
        """Counts an exception of ours and tells each kind of it once."""
        with self._lock:  # training and the background thread count here
            self.errors += 1
        self.log_once(f"{where}: {described(problem)}", level=logging.ERROR, once=f"{where}: {type(problem).__name__}")

    def drop(self, why: str, steps: int = 1) -> None:
        with self._lock:
            self.dropped += steps
        self.log_once(f"a logged step was dropped: {why}", level=logging.WARNING)

    def log_once(self, message: str, level: int = logging.WARNING, once: str | None = None) -> None:
        """Says something once, to the log and to `Stats.messages`; `once` stands for what may vary in it."""
        with self._lock:
            if (once or message) in self._told or len(self._told) > MOST_MESSAGES:
                return
            self._told.add(once or message)
            self.messages.append(message)
        if level >= logging.ERROR or not self.is_quiet:
            logger.log(level, "%s", message)

    def mark_unseen(self, name: str, why: str, *, replace: bool = False) -> None:
        """Notes that there are no statistics of `name`. The first reason stays, unless `replace` is set."""
        with self._lock:
            if name not in self.unseen or (replace and self.unseen[name] != why):
                self.unseen[name] = why
                self._untold.setdefault(why, []).append(name)

    def mark_seen(self, name: str) -> None:
        """Notes that there are statistics of `name`, which may have been marked as unseen."""
        self.unseen.pop(name, None)

    def log_unseen(self) -> None:
        """One line for each reason that is new since the last call."""
        with self._lock:  # another thread may be adding to it
            untold, self._untold = self._untold, {}
        for why, names in untold.items():
            self.log_once(f"{_NOT_SEEN}{listed(names)}: {why}", level=logging.INFO)


def described(problem: BaseException) -> str:
    """Its type and text; torch can fill pages with one."""
    text = textwrap.shorten(str(problem), 300)
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
