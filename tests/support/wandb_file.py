"""What a wandb run stored offline: its file is a log in blocks, of records that are wandb's own messages.

The package has no reader in Python any more, so the blocks are taken apart here.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _RECORD_HEADER = 1 << 15, 7, 7
_FULL, _LAST = 1, 4


def _contents(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER, b""
    while place + _RECORD_HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD_HEADER:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        place += _RECORD_HEADER
        if place + length > len(data):  # still being written
            return
        parts += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def records(directory: Path) -> list[Any]:
    """Every record of the one run there is, once its service has written the last: it does so after `finish()`."""
    from wandb.proto import wandb_internal_pb2  # wandb takes a second to import

    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [wandb_internal_pb2.Record.FromString(content) for content in _contents(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.02)
    raise AssertionError("the run was never finished")


def _plain(items: Any) -> dict[str, Any]:
    """What was logged; parts of one value are stored apart."""
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found


def rows(directory: Path) -> list[dict[str, Any]]:
    """The run's history, a dict a row."""
    return [_plain(record.history.item) for record in _of_type(directory, "history")]


def axes(directory: Path) -> dict[str, str]:
    """Over what each metric is drawn, by its name or pattern."""
    metrics = [record.metric for record in _of_type(directory, "metric")]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


def summary(directory: Path) -> dict[str, Any]:
    """The run's summary as it was left."""
    found: dict[str, Any] = {}
    for record in _of_type(directory, "summary"):
        found |= _plain(record.summary.update)
    return found


def _of_type(directory: Path, name: str) -> Iterator[Any]:
    return (record for record in records(directory) if record.WhichOneof("record_type") == name)


def alerts(directory: Path) -> list[tuple[str, str, str]]:
    """Title, text and level of each alert of the run."""
    found = [record.alert for record in _of_type(directory, "alert")]
    return [(alert.title, alert.text, alert.level) for alert in found]
