"""The part of a tensor that an image shows: a few maps of a few samples, subsampled if they are large.

Decided by shapes alone; nothing here copies, reads values or waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_TILES = 36
MOST_FILTERS = 64
MOST_SAMPLES = 16
# The longer side of one map among others, and of a single map.
LONGEST, LONGEST_ALONE = 56, 256
SHOWN_AS_COLOURS = (1, 3)


class Tiles(NamedTuple):
    """A part of a tensor, [n, height, width] or [n, channels, height, width] for true colours, and a description."""

    numbers: Tensor
    natural: bool
    description: str


def is_shown(tensor: Tensor, kind: str) -> bool:
    """Whether a tensor can be shown: it has floating-point values, or bytes if it is an input."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.numel() == 0:
        return False
    return tensor.is_floating_point() or (kind == "input" and tensor.dtype is torch.uint8)


def of_output(tensor: Tensor) -> Tiles | None:
    """Feature maps and attention maps of the first sample; a sequence or a batch of vectors as one map."""
    if tensor.dim() == 5:
        middle = tensor.size(2) // 2
        return _named(of_output(tensor[:, :, middle]), f"depth {middle}")
    if tensor.dim() == 4 and tensor.shape[2:].numel() > 1:
        return _maps(tensor[0], MOST_TILES, "sample 0", "maps")
    if tensor.dim() == 4:
        return _matrix(tensor.flatten(1), "samples by channels")
    if tensor.dim() == 3:
        return _matrix(tensor[0], "sample 0")
    return _matrix(tensor, "samples by units") if tensor.dim() == 2 else None


def of_weights(tensor: Tensor) -> Tiles | None:
    """Attention weights, [heads, queries, keys] or with samples before that."""
    if tensor.dim() == 3:
        return _maps(tensor, MOST_TILES, "queries by keys", "maps")
    return _named(of_output(tensor), "queries by keys") if tensor.dim() == 4 else None


def of_input(tensor: Tensor) -> Tiles | None:
    """Images of the first samples, in true colours."""
    if tensor.dim() == 4 and tensor.size(1) in SHOWN_AS_COLOURS:
        return _natural(tensor, MOST_SAMPLES, "samples")
    if tensor.dim() == 3:
        return _maps(tensor, MOST_SAMPLES, "", "samples")
    return of_output(tensor)


def of_filters(tensor: Tensor) -> Tiles | None:
    """The kernels of a convolution over one channel, or over three colours."""
    if tensor.dim() != 4 or tensor.size(1) not in SHOWN_AS_COLOURS or tensor.shape[2:].numel() == 1:
        return None
    if tensor.size(1) == 1:
        return _maps(tensor[:, 0], MOST_FILTERS, "", "filters")
    return _natural(tensor, MOST_FILTERS, "filters")


def _natural(tensor: Tensor, most: int, what: str) -> Tiles:
    part, subsampling = _subsampled(tensor[:most], LONGEST)
    return Tiles(part, True, _joined(_share(part, tensor, what), subsampling))


def _maps(tensor: Tensor, most: int, before: str, what: str) -> Tiles:
    part, subsampling = _subsampled(tensor[:most], LONGEST if len(tensor) > 1 else LONGEST_ALONE)
    return Tiles(part, False, _joined(before, _share(part, tensor, what), subsampling))


def _matrix(tensor: Tensor, what: str) -> Tiles:
    part, subsampling = _subsampled(tensor[None], LONGEST_ALONE)
    return Tiles(part, False, _joined(what, subsampling))


def _named(tiles: Tiles | None, what: str) -> Tiles | None:
    return None if tiles is None else tiles._replace(description=_joined(tiles.description, what))


def _subsampled(tensor: Tensor, longest: int) -> tuple[Tensor, str]:
    down, across = (-(-size // longest) for size in tensor.shape[-2:])
    subsampling = f"every {down}. row and {across}. column" if max(down, across) > 1 else ""
    return tensor[..., ::down, ::across], subsampling


def _share(some: Tensor, of: Tensor, what: str) -> str:
    return f"{len(some)} of {len(of)} {what}"


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))
