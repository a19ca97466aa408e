"""One thread everywhere: bit-for-bit comparisons are of the watch, not of a thread pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from tbhooks import watch as _watch  # noqa: F401  imported before any test counts what it imports
from tbhooks.watch import _open

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_watch_left_open() -> Iterator[None]:
    """A test that forgets to close its watch must not disturb the next one."""
    yield
    for watching in list(_open):
        watching.close()
