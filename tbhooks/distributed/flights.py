"""Dumps of the flight recorders of all ranks: the first rank asks, the others answer, through the store of the job.

Only background threads use the store, at most once a second, so that no rank's training waits for another. An answer is
a file in the directory of the run; where a rank cannot reach that directory, it sends the bytes and the first rank
writes the file. A rank that ends alone writes its file without being asked.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed

from tbhooks.data.artifacts.flights import DIRECTORY, SUFFIX, Flight, Named, as_named, encode

# How long the first rank waits for the answers to one dump.
PATIENCE_S = 20.0
# How long a watch that closes waits for the last answers, or for the first rank to say that it has no more requests.
CLOSING_S = 3.0
_BETWEEN_LOOKS_S = 0.02


@dataclass
class _Asked:
    """A dump that the other ranks were asked for."""

    step: int
    left: set[int]
    deadline: float


@dataclass
class FlightExchange:
    """One rank's side. `request` asks this rank's recorder for a dump, for a reason and about a step and a parameter;
    `missing` is called if a rank is silent.
    """

    rank: int
    world: int
    request: Callable[[str, Named | None], None]
    missing: Callable[[str], None]
    directory: Path | None = None
    """Where the run is written; known to the first rank."""
    _store: Any = field(init=False)
    _prefix: str = field(init=False)
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _count: int = 0
    _answers: dict[str, int] = field(default_factory=dict)
    """The number of each request that this rank has not answered yet, by its reason."""

    def __post_init__(self) -> None:
        self._store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  no public way to the store
        self._prefix = f"tbhooks/flights/{self._store.add(f'tbhooks/flights/{self.rank}', 1)}"
        if self.rank == 0:
            self._store.set(f"{self._prefix}/directory", "" if self.directory is None else str(self.directory))

    def poll(self) -> None:
        """Called by the background thread: looks for requests, or on the first rank for answers."""
        if self.rank == 0:
            self._collect()
            return
        key = f"{self._prefix}/asked/{self._count}"
        if self._store.check([key]):
            asked = json.loads(self._store.get(key))
            reason = str(asked["reason"])
            self._answers[reason] = self._count
            self._count += 1
            self.request(reason, as_named(asked.get("named")))

    def dumped(self, flight: Flight) -> None:
        """Called when this rank has made a dump: the first one asks the others, another one answers."""
        if self.rank == 0:
            request = json.dumps({"reason": f"{flight.reason} (asked by rank 0)", "named": flight.named})
            self._store.set(f"{self._prefix}/asked/{self._count}", request)
            deadline = time.monotonic() + PATIENCE_S
            self._asked[self._count] = _Asked(flight.step, set(range(1, self.world)), deadline)
            self._count += 1
            return
        content = encode(flight)
        is_written = self._write(content, flight.rank, flight.step)
        number = self._answers.pop(flight.reason, None)
        if number is not None:
            sent = "" if is_written else base64.b64encode(content).decode()
            answer = json.dumps({"step": flight.step, "content": sent})
            self._store.set(f"{self._prefix}/answer/{number}/{self.rank}", answer)

    def take_last_requests(self) -> None:
        """When this rank closes: takes requests until the first rank has said that it has no more, or is gone."""
        deadline = time.monotonic() + CLOSING_S
        while self.rank != 0 and time.monotonic() < deadline:
            try:
                is_last = self._store.check([f"{self._prefix}/closed"])
                self.poll()
            except RuntimeError:  # the process that has the store is gone
                return
            if is_last and not self._store.check([f"{self._prefix}/asked/{self._count}"]):
                return
            time.sleep(_BETWEEN_LOOKS_S)

    def _collect(self) -> None:
        for number, asked in list(self._asked.items()):
            for rank in sorted(asked.left):
                key = f"{self._prefix}/answer/{number}/{rank}"
                if self._store.check([key]):
                    answer = json.loads(self._store.get(key))
                    asked.left.discard(rank)
                    if answer["content"]:
                        self._write(base64.b64decode(answer["content"]), rank, int(answer["step"]))
            if asked.left and time.monotonic() > asked.deadline:
                names = ", ".join(map(str, sorted(asked.left)))
                self.missing(f"step {asked.step}: rank {names} did not answer in time")
                asked.left.clear()
            if not asked.left:
                del self._asked[number]

    def close(self) -> None:
        """On the first rank: waits shortly for the last answers, and names the ranks that have not answered."""
        if self.rank != 0:
            return
        self._store.set(f"{self._prefix}/closed", "1")
        latest = time.monotonic() + CLOSING_S
        for asked in self._asked.values():
            asked.deadline = min(asked.deadline, latest)
        while self._asked:
            self._collect()
            time.sleep(_BETWEEN_LOOKS_S if self._asked else 0)

    def _write(self, content: bytes, rank: int, step: int) -> bool:
        """Writes a dump into the directory of the run. Returns whether that was possible."""
        if self.directory is None and self._store.check([f"{self._prefix}/directory"]):
            where = self._store.get(f"{self._prefix}/directory").decode()
            self.directory = Path(where) if where else None
        if self.directory is None or not self.directory.is_dir():
            return False
        try:
            place = self.directory / DIRECTORY
            place.mkdir(exist_ok=True)
            part = place / f".rank-{rank}-step-{step}"
            part.write_bytes(content)
            part.replace(place / f"rank-{rank}-step-{step}{SUFFIX}")
        except OSError:
            return False
        return True
