"""Pinned host memory, from and to which a CUDA device copies without a wait of the host.

Allocating it takes milliseconds and may wait for the device. torch keeps what was freed, by powers of two. So `reserve`
has torch allocate some blocks of one size before training, and every allocation here takes them: what is larger than a
block takes several. Then the background thread reserves larger ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tbhooks.reduction import cpu

# Copies of two logged steps, and for each the tables of two types of parameters.
BLOCKS = 6
# If a step needed larger blocks, those are for copies only. What is larger than the largest is always copied in pieces.
MORE_BLOCKS = 3
LARGEST = 1 << 28
_reserved: list[int] = []
"""The sizes of the blocks that were reserved in this process, in ascending order."""


def is_used_by(device: torch.device) -> bool:
    """Whether copies from and to a device need it to be without a wait."""
    return device.type == "cuda"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one of this thread. A new thread is on the first device, where anything it does
    could cost a context of its own.
    """
    return torch.cuda.device(device) if is_used_by(device) else nullcontext()


def _allocate(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def reserve(size: int, blocks: int = BLOCKS) -> None:
    """Has torch allocate blocks of at least `size` bytes, and keep them, unless there are such blocks."""
    size = min(1 << (size - 1).bit_length(), LARGEST)
    if size > max(_reserved, default=0):
        with contextlib.suppress(RuntimeError):  # the host is short of memory: nothing is reserved
            made = [_allocate(size) for _ in range(blocks)]
            _reserved.append(size)
            del made


def empty(size: int) -> list[Tensor]:
    """So many bytes, as the smallest reserved block that holds them, or as several. If none was reserved, they are
    allocated.
    """
    block = next((reserved for reserved in _reserved if reserved >= size), max(_reserved, default=size))
    return [_allocate(block)[: size - start] for start in range(0, size, block)] or [_allocate(block)[:0]]


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A tensor on its way to the host: its bytes, in one piece or several, which are there when the event happens."""

    pieces: Sequence[Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]
    event: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def wait(self) -> None:
        """Waits, in a background thread, until the copy is done. If it took several blocks, reserves larger ones."""
        if self.event is not None:
            with on_device(self.event.device):
                self.event.synchronize()
        if len(self.pieces) > 1:
            reserve(self.nbytes, MORE_BLOCKS)

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor, after `wait`."""
        content = self.pieces[0] if len(self.pieces) == 1 else torch.cat(list(self.pieces))
        return content.view(self.dtype).view(self.shape)


def download(tensor: Tensor) -> HostCopy:
    """Starts the copy of a tensor to the host. Only where there is no pinned memory it waits for the device."""
    shape = tuple(tensor.shape)
    if not is_used_by(tensor.device):
        copied = cpu.copied(tensor) if tensor.is_cpu else torch.empty_like(tensor, device="cpu").copy_(tensor)
        return HostCopy([copied.reshape(-1).view(torch.uint8)], tensor.dtype, shape)
    content = tensor.reshape(-1).view(torch.uint8)
    pieces, start = empty(len(content)), 0
    for piece in pieces:
        piece.copy_(content[start : start + len(piece)], non_blocking=True)
        start += len(piece)
    # Blocking: the background thread sleeps until the copy is done, instead of taking a CPU core from the training.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(pieces, tensor.dtype, shape, event)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device without a wait. The memory is not used again before the copy is done."""
    if not is_used_by(device):
        return host.to(device)
    content, sent, start = host.reshape(-1).view(torch.uint8), [], 0
    for piece in empty(host.nbytes):
        piece.copy_(content[start : start + len(piece)])
        sent.append(piece.to(device, non_blocking=True))
        start += len(piece)
    return (sent[0] if len(sent) == 1 else torch.cat(sent)).view(host.dtype).view(host.shape)
