"""Pictures read back without the code that made them: from event files, and PNG files into arrays."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2


def decoded(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as image:
        return np.array(image.convert("RGB"))


def values(directory: Path) -> list[tuple[int, Any]]:
    """Every value of a run's files, with its step."""
    found = []
    for path in sorted(directory.glob("*tfevents*")):
        for record in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(record)
            found += [(event.step, value) for value in event.summary.value]
    return found


def written(directory: Path) -> dict[str, dict[int, NDArray[np.uint8]]]:
    """The pictures of a run, by tag and step."""
    found: dict[str, dict[int, NDArray[np.uint8]]] = {}
    for step, value in values(directory):
        if value.metadata.plugin_data.plugin_name == "images":
            found.setdefault(value.tag, {})[step] = decoded(value.tensor.string_val[2])
    return found
