"""Pinned host memory, from and to which a CUDA device copies without a wait of the host.

Allocating it takes milliseconds and may wait for the device. torch keeps what was freed, by powers of two. So `reserve`
has torch allocate some blocks of one size before training, and every smaller allocation here takes one of them.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

# Copies of two logged steps, and for each the tables of two types of parameters.
BLOCKS = 6
_reserved = [0]
"""The bytes of the largest blocks that were reserved in this process."""


def is_used_by(device: torch.device) -> bool:
    """Whether copies from and to a device need it to be without a wait."""
    return device.type == "cuda"


def _allocate(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def reserve(size: int) -> None:
    """Has torch allocate blocks of at least `size` bytes, and keep them."""
    size = 1 << (size - 1).bit_length()
    if size > _reserved[0]:
        with contextlib.suppress(RuntimeError):  # the host is short of memory: nothing is reserved
            blocks = [_allocate(size) for _ in range(BLOCKS)]
            _reserved[0] = size
            del blocks


def empty(size: int) -> Tensor:
    """So many bytes, of a reserved block if they fit."""
    return _allocate(max(size, _reserved[0]))[:size]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device without a wait. The memory is not used again before the copy is done."""
    if not is_used_by(device):
        return host.to(device)
    pinned = empty(host.nbytes).view(host.dtype).view(host.shape)
    return pinned.copy_(host).to(device, non_blocking=True)


def wait_for(event: torch.cuda.Event) -> None:
    """Waits, in a background thread, until a copy is done.

    A new thread is on the first device, where waiting could cost a context of its own.
    """
    with torch.cuda.device(event.device):
        event.synchronize()
