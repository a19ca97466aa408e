"""What was decoded once and may be asked for again, within a budget of bytes, for many threads at a time.

An entry is good for one version of its source; a newer version takes its place. Whoever asks first makes
it, everybody else who asks for the same waits for that instead of doing the work again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

_STRIPES = 32


class Sized(Protocol):
    """Something that knows how much memory it takes."""

    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


@dataclass(frozen=True, slots=True)
class _Entry:
    version: Hashable
    value: Any
    nbytes: int


class Cache:
    """Least recently used first to go; what is larger than the whole budget is never kept."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        # A lock for each key would have to be thrown away some time; a few shared ones need not.
        self._making = [threading.Lock() for _ in range(_STRIPES)]

    @property
    def nbytes(self) -> int:
        return self._held

    def get(self, key: Hashable, version: Hashable, make: Callable[[Value | None], Value]) -> Value:
        """The value of this version; if it is not here, `make` makes it, out of an older one if that helps."""
        with self._making[hash(key) % _STRIPES]:
            entry = self._find(key)
            if entry is None or entry.version != version:
                value = make(None if entry is None else entry.value)
                self._keep(key, _Entry(version, value, value.nbytes))
                return value
            found: Value = entry.value
            return found

    def _find(self, key: Hashable) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def _keep(self, key: Hashable, entry: _Entry) -> None:
        with self._lock:
            old = self._entries.pop(key, None)
            self._held -= old.nbytes if old is not None else 0
            if entry.nbytes > self._budget:
                return
            self._entries[key] = entry
            self._held += entry.nbytes
            while self._held > self._budget:
                _, gone = self._entries.popitem(last=False)
                self._held -= gone.nbytes
