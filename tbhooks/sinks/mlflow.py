"""Writes frames to an MLflow run: scalars as metrics, findings as a tag. MLflow has no histograms.

The active run is looked up when the sink is created: the background thread has none, and MLflow would start a new one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.sinks.scalar_selection import scalar_table, scalars_of
from tbhooks.sinks.trackers import FindingsText

MAX_METRICS = 1000
MAX_NAME_LENGTH = 250
MAX_TAG_LENGTH = 5000
FINDINGS = "tbhooks.findings"
_REFUSED = re.compile(r"[^\w.\- /]")


class MlflowSink:
    """Writes to an MLflow run, which stays open.

    Args:
        run: the module `mlflow` for the active run, a run returned by `mlflow.start_run()`, or its id.
        scalars: the statistics that become metrics, as in `watch`.

    Raises:
        ArgumentError: if the module is passed and there is no active run.

    """

    def __init__(self, run: Any, scalars: object = "core") -> None:
        self._table = scalar_table(scalars)
        self._run_id = _run_id(run)
        self._client = _client()
        self._names = Names()
        self._findings = FindingsText()

    @property
    def destination(self) -> str:
        """The run's id."""
        return f"MLflow run {self._run_id}"

    def flush_before_close(self, flush: Callable[[], None]) -> None:
        """Not needed: a finished run still accepts values."""

    def write(self, frame: Frame) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415  optional

        moment = int(frame.time * 1000)
        numbers = scalars_of(frame, self._table)
        named = zip(self._names.of(numbers), numbers.values(), strict=True)
        metrics = [Metric(name, number, moment, frame.step) for name, number in named]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])
        if self._findings.add(frame.findings):
            self._client.set_tag(self._run_id, FINDINGS, str(self._findings)[:MAX_TAG_LENGTH])

    def flush(self) -> None:
        """Not needed: `write` is synchronous."""

    def close(self) -> None:
        """The run stays open: the user ends it."""


def _run_id(run: Any) -> str:
    if isinstance(run, str):
        return run
    active = run.active_run() if isinstance(run, ModuleType) else run
    if active is None:
        raise ArgumentError("mlflow has no active run in this thread: call mlflow.start_run() before watch()")
    run_id: str = active.info.run_id
    return run_id


def _client() -> Any:
    from mlflow import MlflowClient  # noqa: PLC0415

    return MlflowClient()  # of the tracking server that is set now


class Names:
    """Metric names that MLflow accepts, a different one for each tag."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, tags: Collection[str]) -> list[str]:
        """The names of these tags. Tags that are valid names keep them."""
        for tag in sorted((tag for tag in tags if tag not in self._given), key=lambda tag: cleaned(tag) != tag):
            name = cleaned(tag)
            while name in self._taken:
                name = f"{name[: MAX_NAME_LENGTH - 9]}-{zlib.crc32((name + tag).encode(errors='replace')):08x}"
            self._taken.add(name)
            self._given[tag] = name
        return [self._given[tag] for tag in tags]


def cleaned(tag: str) -> str:
    """A tag with underscores for what MLflow rejects: most punctuation, and path components like `..`."""
    parts = _REFUSED.sub("_", tag).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME_LENGTH]
