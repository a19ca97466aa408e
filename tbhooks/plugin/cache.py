"""A thread-safe LRU cache of decoded data, within a budget of bytes.

An entry is valid for one version of its source and is replaced by a newer version. The first thread that needs an entry
makes it; other threads wait for that instead of doing the same work.
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
    """Evicts the least recently used entries; a value larger than the whole budget is never kept."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        # A few shared locks; one per key would have to be deleted at some time.
        self._making = [threading.Lock() for _ in range(_STRIPES)]

    @property
    def nbytes(self) -> int:
        return self._held

    def get(self, key: Hashable, version: Hashable, make: Callable[[Value | None], Value]) -> Value:
        """Returns the value of this version. If there is none, `make` is called with the older value, or None."""
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
                _, evicted = self._entries.popitem(last=False)
                self._held -= evicted.nbytes
