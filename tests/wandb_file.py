"""What a wandb run stored offline: its file is a log in blocks, of records that are wandb's own messages.

The package has no reader in Python any more, so the blocks are taken apart here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

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
        parts += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def records(directory: Path) -> Iterator[Any]:
    """Every record of the one run there is."""
    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    for content in _contents(data):
        yield wandb_internal_pb2.Record.FromString(content)


def rows(directory: Path) -> list[dict[str, Any]]:
    """The run's history, a dict a row."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(directory)
        if record.WhichOneof("record_type") == "history"
    ]


def axes(directory: Path) -> dict[str, str]:
    """Over what each metric is drawn, by its name or pattern."""
    metrics = [record.metric for record in records(directory) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


def summary(directory: Path) -> dict[str, Any]:
    """The run's summary as it was left."""
    found: dict[str, Any] = {}
    for record in records(directory):
        if record.WhichOneof("record_type") == "summary":
            found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
    return found
