"""One thread everywhere: bit-for-bit comparisons are of the watch, not of a thread pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

from tbhooks import kernel
from tbhooks.process import open_watches

torch.set_num_threads(1)
# In CI the same examples every time: a change must not fail for what somebody else's dice find.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _no_watch_left_open() -> Iterator[None]:
    """A test that forgets to close its watch must not disturb the next one."""
    yield
    for watching in list(open_watches):
        watching.close()


@pytest.fixture(scope="module", params=["C", "torch"])
def both_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests twice: with the C kernel, and with the torch operations that serve without it."""
    library = kernel.library
    if request.param == "torch":
        kernel.library = None
    elif library is None:
        pytest.skip("built without the C kernel")
    yield request.param
    kernel.library = library
