"""Embeddings for TensorBoard's PROJECTOR tab, which reads files beside the run: one entry per layer and step.

Files are renamed once they are complete. Entries of SummaryWriter.add_embedding stay listed. Embeddings are written
only for a local run directory; a problem with these files is logged and does not affect the step's numbers.
"""

from __future__ import annotations

import logging
import os
import shutil
import urllib.parse
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tensorboard.plugins.projector.projector_config_pb2 import EmbeddingInfo, ProjectorConfig

from tbhooks.data.artifacts import Embedding, Pixels
from tbhooks.drawing import png
from tbhooks.sinks.tensorboard.protobuf import utf8

CONFIG, FOLDER, ENTRY = "projector_config.pbtxt", "embeddings", "entry.pbtxt"
# The number of entries per layer: the first is kept, and the newest of the others.
MAX_ENTRIES = 20
_LONGEST_NAME = 100

logger = logging.getLogger("tbhooks")


def write(embedding: Embedding, _summary: object, run: Any) -> None:
    """Writes the files of an embedding and lists it in the tab's configuration."""
    if "://" in run.directory:
        return
    try:
        where = Path(run.directory)
        embedding = replace(embedding, tag=utf8(embedding.tag))
        layer = where / FOLDER / _folder_name(embedding.tag)
        _write_entry(embedding, run.step, where, layer)
        _drop_old(layer)
        _list_all(where)
    except (OSError, text_format.ParseError) as problem:
        logger.warning("embeddings of %s are not in the PROJECTOR tab: %s", embedding.tag, problem)


def _folder_name(tag: str) -> str:
    name = urllib.parse.quote(tag, safe="")
    short = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{zlib.crc32(tag.encode()):08x}"
    return f"_{short}" if short.startswith(".") else short


def _write_entry(embedding: Embedding, step: int, where: Path, layer: Path) -> None:
    made, place = layer / f".{step}.{os.getpid()}", layer / f"{step:08d}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    info = EmbeddingInfo(tensor_name=f"{embedding.tag} (step {step})", tensor_shape=embedding.points.shape)
    below = place.relative_to(where).as_posix()
    info.tensor_path = f"{below}/tensors.tsv"
    lines = ("\t".join(f"{number:.6g}" for number in point) for point in embedding.points.tolist())
    (made / "tensors.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if embedding.labels:
        info.metadata_path = f"{below}/metadata.tsv"
        lines = (f"{label}\n" for label in embedding.labels)
        (made / "metadata.tsv").write_bytes("".join(lines).encode(errors="replace"))
    if embedding.thumbnails is not None:
        info.sprite.image_path = f"{below}/sprite.png"
        _, tall, wide, _ = embedding.thumbnails.shape
        info.sprite.single_image_dim.extend([wide, tall])
        (made / "sprite.png").write_bytes(png.from_pixels(sprite(embedding.thumbnails)))
    (made / ENTRY).write_text(text_format.MessageToString(info), encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)  # a step that was logged before, as after a resume
    made.replace(place)


def sprite(thumbnails: Pixels) -> Pixels:
    """All thumbnails in a square grid, as the tab expects them."""
    n, tall, wide, _ = thumbnails.shape
    side = int(np.ceil(np.sqrt(n)))
    canvas = np.zeros((side * side, tall, wide, 3), dtype=np.uint8)
    canvas[:n] = thumbnails
    rows = canvas.reshape(side, side, tall, wide, 3).swapaxes(1, 2)
    return np.ascontiguousarray(rows).reshape(side * tall, side * wide, 3)


def _entries(layer: Path) -> list[Path]:
    return sorted((path for path in layer.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def _drop_old(layer: Path) -> None:
    for path in _entries(layer)[1 : 1 - MAX_ENTRIES]:
        shutil.rmtree(path, ignore_errors=True)


def _list_all(where: Path) -> None:
    """Lists the entries on disk after those of others: a SummaryWriter overwrites the list with its own."""
    config, place = ProjectorConfig(), where / CONFIG
    if place.exists():
        text_format.Parse(place.read_text(encoding="utf-8"), config)
    others = [info for info in config.embeddings if not info.tensor_path.startswith(f"{FOLDER}/")]
    del config.embeddings[:]
    config.embeddings.extend([*others, *_ours(where)])
    made = where / f".{CONFIG}.{os.getpid()}"
    made.write_text(text_format.MessageToString(config), encoding="utf-8")
    made.replace(place)


def _ours(where: Path) -> Iterator[EmbeddingInfo]:
    for layer in sorted((where / FOLDER).iterdir()):
        for path in _entries(layer) if layer.is_dir() else ():
            yield text_format.Parse((path / ENTRY).read_text(encoding="utf-8"), EmbeddingInfo())
