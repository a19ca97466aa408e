"""Pinned memory of the host and the events of copies, for the simulated device, as torch.cuda has them.

Blocks are handed out as torch's caching allocator does: their sizes are powers of two, and freed blocks are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tbhooks.reduction import pinned
from tests.support import fake_device, fake_streams


class HostMemory:
    """What was asked of torch.cuda while the simulated device copied from and to pinned memory."""

    def __init__(self) -> None:
        self.allocations = 0
        """Blocks that were not there yet: for these torch calls cudaHostAlloc."""
        self.in_training = 0
        """Those of them that the training thread has asked for."""
        self.is_full = False
        self.blocking: list[bool] = []
        """Of each event, whether a thread that waits for it sleeps."""
        self.copies: list[tuple[str, torch.device | None]] = []
        """Of each copy to the host, the same."""
        self.waits: list[tuple[str, torch.device | None]] = []
        """Of each wait for an event, the name of the thread and the device that it had made the current one."""
        self.current = threading.local()
        self._free: Counter[int] = Counter()

    def allocate(self, size: int) -> Tensor:
        if self.is_full:
            raise RuntimeError("CUDA error: out of memory")
        block = 1 << (size - 1).bit_length()
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.allocations += 1
            self.in_training += threading.current_thread() is threading.main_thread()
        memory = np.empty(size, np.uint8)
        weakref.finalize(memory, self._give_back, block)
        return torch.from_numpy(memory)

    def _give_back(self, block: int) -> None:
        self._free[block] += 1


@contextmanager
def installed() -> Iterator[HostMemory]:
    """The simulated device copies as a CUDA device does; nothing is reserved yet."""
    memory = HostMemory()

    class Event:
        device = fake_device.DEVICE

        def __init__(self, blocking: bool = False) -> None:
            memory.blocking.append(blocking)
            memory.copies.append((threading.current_thread().name, getattr(memory.current, "device", None)))

        def record(self, stream: Any) -> None:
            assert stream is fake_streams.current_stream()

        def synchronize(self) -> None:
            memory.waits.append((threading.current_thread().name, getattr(memory.current, "device", None)))

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        memory.current.device = chosen
        yield
        del memory.current.device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "is_used_by", lambda place: place.type == fake_device.DEVICE.type)
        patch.setattr(pinned, "_allocate", memory.allocate)
        patch.setattr(pinned, "_reserved", [])
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", fake_streams.current_stream)
        patch.setattr(torch.cuda, "device", device)
        yield memory
