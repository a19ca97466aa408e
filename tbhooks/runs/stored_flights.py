"""The dumps of the flight recorder in a run: those in its event files, and those that single ranks have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tbhooks.data.artifacts.flights import DIRECTORY, SUFFIX, Flight, decode
from tbhooks.sinks.tensorboard.flights import DATA_TAG

# A file of a rank that is larger is not one of ours.
_LARGEST = 256 << 20


class StoredFlights:
    """Collects the dumps of one run, and the list of those that were left out."""

    def __init__(self) -> None:
        self._flights: list[Flight] = []
        self.left_out: list[str] = []

    def add(self, tag: str, content: bytes) -> None:
        """Adds the value of a tag. Raises ValueError if it is invalid."""
        if tag == DATA_TAG:
            self._flights.append(decode(content))
            return
        reasons = json.loads(content)
        if not isinstance(reasons, list):
            raise ValueError("not a list of dumps")
        self.left_out += [str(reason) for reason in reasons]

    def clear(self) -> None:
        """Another run begins."""
        self._flights, self.left_out = [], []

    def with_files(self, run: Path, report: Callable[[str], None]) -> list[Flight]:
        """All dumps, oldest first, with those in files below the directory of the run."""
        known = {(flight.rank, flight.step, flight.reason) for flight in self._flights}
        found = list(self._flights)
        for file in sorted((run / DIRECTORY).glob(f"*{SUFFIX}")) if run.is_dir() else ():
            try:
                flight = decode(file.read_bytes() if file.stat().st_size <= _LARGEST else b"")
            except (OSError, ValueError) as problem:
                report(f"{DIRECTORY}/{file.name}: {problem}, skipped")
                continue
            if (flight.rank, flight.step, flight.reason) not in known:
                found.append(flight)
        return sorted(found, key=lambda flight: (flight.step, flight.rank))
