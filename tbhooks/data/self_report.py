"""What a watch reports about itself: what it skipped and why, its errors, dropped steps and time spent.

Each problem is counted, and logged once through `logging`. Nothing is printed or raised.
"""

from __future__ import annotations

import contextlib
import logging
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

logger = logging.getLogger("tbhooks")
logger.addHandler(logging.NullHandler())

# A message that changes with every step must not fill the memory of a long run.
MOST_MESSAGES = 200
_SKIPPED = "skipped: "


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _by_value(mapping: dict[str, str]) -> dict[str, list[str]]:
    """The keys of each value."""
    grouped: dict[str, list[str]] = {}
    for key, value in mapping.items():
        grouped.setdefault(value, []).append(key)
    return grouped


@dataclass(frozen=True)
class Stats:
    """What a watch reports about itself, as a snapshot: returned by `Watch.stats`.

    Printing it gives one line per topic. Everything that was skipped is listed by its reason.
    """

    steps: int
    """Steps that have ended, logged or not."""
    logged: int
    """Logged steps that were passed to the background thread."""
    hooks_fired: int
    """Calls of the hooks of this watch."""
    unseen: dict[str, str]
    """The modules, tensors and parameters without statistics, and the reason for each."""
    aliases: dict[str, str]
    """Further paths of modules that occur more than once in the model, and the path they are logged under."""
    errors: int
    """Exceptions inside tbhooks. They were caught; `messages` has their texts."""
    dropped: int
    """Logged steps that were not written, because the queue was full (512 steps or 64 MB) or because every sink failed.
    """
    messages: tuple[str, ...]
    """What was logged through `logging.getLogger("tbhooks")`, each message once."""
    seconds_training: float
    """Time that tbhooks spent in the training thread."""
    seconds_pump: float
    """Time that tbhooks spent in its background thread."""
    seconds_views: float
    """The part of `seconds_pump` that live views took."""
    clock: str
    """What ends a step: "optimizer", "forward" or "manual"; "auto" until that is known."""
    skipped: int
    """Optimizer steps that a GradScaler skipped because of infinite gradients."""
    kernel: str
    """What reduces CPU tensors: "C", or "torch" where the package was built without a compiler. "torch: " and the
    reason where the library that was built cannot be used."""
    device_kernel: str
    """What reduces CUDA tensors: "triton" or "torch", followed by the error if Triton failed."""

    def __repr__(self) -> str:
        views = f"of which {self.seconds_views:.3g} for views"
        lines = [
            f"steps: {self.steps}, counted by: {self.clock}",
            f"logged: {self.logged}, dropped: {self.dropped}, skipped by a GradScaler: {self.skipped}",
            f"seconds: {self.seconds_training:.3g} in training, {self.seconds_pump:.3g} in the background, {views}",
            f"hooks fired: {self.hooks_fired}; kernel: {self.kernel}, for CUDA {self.device_kernel}",
            f"errors of tbhooks: {self.errors}",
        ]
        lines += [f"{_SKIPPED}{listed(names)}: {why}" for why, names in _by_value(self.unseen).items()]
        lines += [f"also called {listed(others)}: {name}" for name, others in _by_value(self.aliases).items()]
        lines += [f"message: {message}" for message in self.messages if not message.startswith(_SKIPPED)]
        return "\n".join(lines)


@dataclass(eq=False)
class Report:
    """The counters and messages behind `Stats`, shared by all parts of one watch. Its methods are thread-safe."""

    is_quiet: bool = False
    """Whether only errors are logged. Set on all ranks but the first, so that a message appears once per job."""
    hooks_fired: int = 0
    errors: int = 0
    dropped: int = 0
    seconds_training: float = 0.0
    seconds_pump: float = 0.0
    seconds_views: float = 0.0
    unseen: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    _all: ClassVar[tuple[weakref.ref[Report], ...]] = ()
    # The id of the thread that executes code of tbhooks right now.
    _busy_thread: int | None = None
    _logged: set[str] = field(default_factory=set)
    _not_yet_logged: dict[str, list[str]] = field(default_factory=dict)
    # Re-entrant: a signal handler may log while a message is being logged.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        Report._all = (*(other for other in Report._all if other() is not None), weakref.ref(self))

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Catches and counts every exception of the block, and adds its duration to `seconds_training`."""
        started = self.enter()
        try:
            yield
        except Exception as problem:  # training must not see an exception of tbhooks
            self.error(where, problem)
        finally:
            self.leave(started)

    @property
    def is_at_work(self) -> bool:
        """Whether this thread executes code of tbhooks right now, for this watch or for another one."""
        return any(report.busy_thread == threading.get_ident() for ref in Report._all if (report := ref()) is not None)

    @property
    def busy_thread(self) -> int | None:
        """The id of the thread inside `guarded`, or None."""
        return self._busy_thread

    def enter(self) -> float | None:
        """Starts measuring and returns the start time; returns None if a measurement is already running.

        `enter` and `leave` are the two halves of `guarded`, for places where microseconds count.
        """
        if self._busy_thread is not None:
            return None
        self._busy_thread = threading.get_ident()
        return time.perf_counter()

    def leave(self, started: float | None) -> None:
        """Adds the time since `enter`, which returned `started`."""
        if started is not None:
            self._busy_thread = None
            self.seconds_training += time.perf_counter() - started

    def forked(self) -> None:
        """Renews the lock in a forked child: the thread that held it may not exist there."""
        self._lock = threading.RLock()

    def wait_for_others(self, timeout_s: float = 5.0) -> None:
        """Waits until no other thread executes code of tbhooks for this watch."""
        deadline = time.monotonic() + timeout_s
        while self._busy_thread not in (None, threading.get_ident()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def error(self, where: str, problem: BaseException) -> None:
        """Counts a caught exception and logs it, each type at each place once."""
        with self._lock:  # the training thread and the background thread both count
            self.errors += 1
        self.log_once(
            f"{where}: {describe_exception(problem)}", level=logging.ERROR, once=f"{where}: {type(problem).__name__}"
        )

    def drop(self, why: str, steps: int = 1) -> None:
        """Counts logged steps that are not written."""
        with self._lock:
            self.dropped += steps
        self.log_once(f"a logged step was dropped: {why}", level=logging.WARNING)

    def log_once(self, message: str, level: int = logging.WARNING, once: str | None = None) -> None:
        """Logs a message and adds it to `messages`, unless it was logged before.

        `once` identifies messages that vary from time to time: the first one with this text is logged.
        """
        with self._lock:
            if (once or message) in self._logged or len(self._logged) > MOST_MESSAGES:
                return
            self._logged.add(once or message)
            self.messages.append(message)
        if level >= logging.ERROR or not self.is_quiet:
            logger.log(level, "%s", message)

    def mark_unseen(self, name: str, why: str, *, replace: bool = False) -> None:
        """Notes that there are no statistics of `name`. The first reason stays, unless `replace` is set."""
        with self._lock:
            if name not in self.unseen or (replace and self.unseen[name] != why):
                self.unseen[name] = why
                self._not_yet_logged.setdefault(why, []).append(name)

    def mark_seen(self, name: str) -> None:
        """Notes that there are statistics of `name`, which may have been marked as unseen."""
        self.unseen.pop(name, None)

    def log_unseen(self) -> None:
        """Logs one line per reason for everything that was marked as unseen since the last call."""
        with self._lock:
            not_yet_logged, self._not_yet_logged = self._not_yet_logged, {}
        for why, names in not_yet_logged.items():
            self.log_once(f"{_SKIPPED}{listed(names)}: {why}", level=logging.INFO)


def describe_exception(problem: BaseException) -> str:
    """The type and the text of an exception. The text is shortened: some of torch's fill pages."""
    text = textwrap.shorten(str(problem), 300)
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
