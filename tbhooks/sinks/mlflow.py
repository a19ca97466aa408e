"""Frames into an MLflow run: scalars as metrics, findings as a tag. It has no histograms.

The run is looked up when the sink is made: another thread has no active run, and MLflow would start a new one there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.sinks.findings_text import Told
from tbhooks.sinks.scalar_selection import numbers_of, scalar_table

MOST_METRICS = 1000
MOST_CHARACTERS = 250
MOST_OF_A_TAG = 5000
FINDINGS = "tbhooks.findings"
_REFUSED = re.compile(r"[^\w.\- /]")


class MlflowSink:
    """Writes to a run: the module `mlflow` for the active one, or a run as `start_run` gives it, or its id."""

    def __init__(self, run: Any, scalars: object = "core") -> None:
        self._table = scalar_table(scalars)
        self._run_id = _run_id(run)
        self._client = _client()
        self._names = Names()
        self._told = Told()

    @property
    def destination(self) -> str:
        """The run's id."""
        return f"MLflow run {self._run_id}"

    def drain_before_close(self, drain: Callable[[], None]) -> None:
        """A run takes numbers after its end, too."""

    def write(self, frame: Frame) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415  only where it is used

        moment = int(frame.time * 1000)
        numbers = numbers_of(frame, self._table)
        named = zip(self._names.of(numbers), numbers.values(), strict=True)
        metrics = [Metric(name, number, moment, frame.step) for name, number in named]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_METRICS])
        if self._told.hears(frame.findings):
            self._client.set_tag(self._run_id, FINDINGS, self._told.text[:MOST_OF_A_TAG])

    def flush(self) -> None:
        """Every write has arrived when it returns."""

    def close(self) -> None:
        """The run stays the user's to end."""


def _run_id(run: Any) -> str:
    if isinstance(run, str):
        return run
    active = run.active_run() if isinstance(run, ModuleType) else run
    if active is None:
        raise ArgumentError("mlflow has no active run in this thread: call mlflow.start_run() before watch()")
    found: str = active.info.run_id
    return found


def _client() -> Any:
    from mlflow import MlflowClient  # noqa: PLC0415

    return MlflowClient()  # of the store that is set now, whatever is set later


class Names:
    """Names as MLflow takes them, and never one for two tags."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, tags: Collection[str]) -> list[str]:
        """The names of these tags, in their order. Those that can stay as they are come first to theirs."""
        for tag in sorted((tag for tag in tags if tag not in self._given), key=lambda tag: cleaned(tag) != tag):
            name = cleaned(tag)
            while name in self._taken:
                name = f"{name[: MOST_CHARACTERS - 9]}-{zlib.crc32((name + tag).encode(errors='replace')):08x}"
            self._taken.add(name)
            self._given[tag] = name
        return [self._given[tag] for tag in tags]


def cleaned(tag: str) -> str:
    """A tag with what MLflow refuses made underscores: most punctuation, and what means something in a path."""
    parts = _REFUSED.sub("_", tag).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MOST_CHARACTERS]
