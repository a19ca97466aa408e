"""Images for TensorBoard's IMAGES tab, as a tensor of strings that both of its loaders support."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.image import metadata

from tbhooks.data.artifacts import Picture, Pixels
from tbhooks.drawing.heatmap import chunk
from tbhooks.sinks.tensorboard.protobuf import strings, utf8

_COLOURS, _PALETTE = 2, 3


def write(picture: Picture, summary: summary_pb2.Summary, _run: object) -> None:
    """Adds an image to the step's event. TensorBoard shows the caption of a tag's first value."""
    height, width, _ = picture.pixels.shape
    summary_metadata = metadata.create_summary_metadata(display_name="", description=utf8(picture.caption))
    summary_metadata.data_class = summary_pb2.DATA_CLASS_BLOB_SEQUENCE
    content = [str(width).encode(), str(height).encode(), png(picture.pixels)]
    summary.value.add(tag=utf8(picture.tag), tensor=strings(content), metadata=summary_metadata)


def png(pixels: Pixels) -> bytes:
    """A PNG file; with up to 256 colours it has a palette, which takes a third of the bytes."""
    height, width, _ = pixels.shape
    packed = pixels[..., 0].astype(np.int32) << 16 | pixels[..., 1].astype(np.int32) << 8 | pixels[..., 2]
    # Enlarged images repeat each row: sorting one of each saves most of the work.
    is_new = np.concatenate([[True], (packed[1:] != packed[:-1]).any(axis=1)])
    used, numbers = np.unique(packed[is_new], return_inverse=True)
    if len(used) <= 256:
        colours = np.stack([used >> 16, used >> 8 & 255, used & 255], axis=1).astype(np.uint8)
        rows = numbers.astype(np.uint8).reshape(-1, width)[np.cumsum(is_new) - 1]
        return _file(width, height, _PALETTE, rows, chunk(b"PLTE", colours.tobytes()))
    return _file(width, height, _COLOURS, pixels.reshape(height, -1), b"")


def _file(width: int, height: int, kind: int, rows: Pixels, palette: bytes) -> bytes:
    filtered = np.zeros((height, rows.shape[1] + 1), dtype=np.uint8)  # the first byte of a row is its filter: none
    filtered[:, 1:] = rows
    return b"\x89PNG\r\n\x1a\n" + b"".join([
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        palette,
        chunk(b"IDAT", zlib.compress(filtered.tobytes(), 6)),
        chunk(b"IEND", b""),
    ])  # fmt: skip
