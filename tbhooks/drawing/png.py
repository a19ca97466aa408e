"""PNG files: pixels as bytes. With up to 256 colours a file has a palette, which takes a third of the bytes."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_COLOURS, _PALETTE = 2, 3


def from_pixels(pixels: Bytes) -> bytes:
    """A PNG of [height, width, 3] pixels."""
    height, width, _ = pixels.shape
    packed = pixels[..., 0].astype(np.int32) << 16 | pixels[..., 1].astype(np.int32) << 8 | pixels[..., 2]
    # Enlarged images repeat each row: sorting one of each saves most of the work.
    is_new = np.concatenate([[True], (packed[1:] != packed[:-1]).any(axis=1)])
    used, numbers = np.unique(packed[is_new], return_inverse=True)
    if len(used) <= 256:
        colours = np.stack([used >> 16, used >> 8 & 255, used & 255], axis=1).astype(np.uint8)
        rows = numbers.astype(np.uint8).reshape(-1, width)[np.cumsum(is_new) - 1]
        return from_palette(rows, colours.tobytes())
    return _file(width, _COLOURS, pixels.reshape(height, -1), b"", 6)


def from_palette(levels: Bytes, palette: bytes, opacity: bytes = b"", compression: int = 6) -> bytes:
    """A PNG of [height, width] positions in a palette of RGB bytes; `opacity` has one byte for each colour."""
    transparency = _chunk(b"tRNS", opacity) if opacity else b""
    return _file(levels.shape[1], _PALETTE, levels, _chunk(b"PLTE", palette) + transparency, compression)


def _file(width: int, kind: int, rows: Bytes, colours: bytes, compression: int) -> bytes:
    filtered = np.zeros((len(rows), rows.shape[1] + 1), dtype=np.uint8)  # the first byte of a row is its filter: none
    filtered[:, 1:] = rows
    return b"\x89PNG\r\n\x1a\n" + b"".join([
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), 8, kind, 0, 0, 0)),
        colours,
        _chunk(b"IDAT", zlib.compress(filtered.tobytes(), compression)),
        _chunk(b"IEND", b""),
    ])  # fmt: skip


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
