"""The simulated device with no memory left for tbhooks: its allocations raise, those of the training do not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

import tbhooks
from tests.support import fake_device

_OURS = str(Path(tbhooks.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def _asks_for_it() -> str:
    """The file whose code has asked torch for memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name not in (__file__, fake_device.__file__) and not name.startswith("<"):
            return name
        frame = frame.f_back
    return ""


class FullDevice:
    """Counts the allocations of tbhooks, and how many of them have failed."""

    asked = 0
    failed = 0


@contextlib.contextmanager
def full_for_us(fails: Callable[[int], bool] = lambda _: True) -> Iterator[FullDevice]:
    """Inside, allocations of tbhooks raise `torch.OutOfMemoryError`: those for whose number `fails` returns True."""
    counts = FullDevice()
    original = fake_device._Lease.__init__

    def leased(lease: fake_device._Lease, host: Tensor) -> None:
        is_new = not fake_device._Lease._users[host.untyped_storage().data_ptr()]
        if is_new and host.nbytes and _asks_for_it().startswith(_OURS):
            counts.asked += 1
            if fails(counts.asked - 1):
                counts.failed += 1
                lease._place, lease._size = 0, 0  # what its end would give back
                fake_device._Lease._users[0] += 2
                raise torch.OutOfMemoryError("the simulated device is out of memory")
        original(lease, host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_device._Lease, "__init__", leased)
        yield counts
