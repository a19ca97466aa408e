"""One thread everywhere: bit-for-bit comparisons are of the watch, not of a thread pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Processes that tests start share the cores with other tests: threads that wait for each other would wait long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tbhooks.api.lifecycle import open_watches
from tbhooks.reduction import cpu

torch.set_num_threads(1)
# In CI the same examples every time: a change must not fail for what somebody else's dice find.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


TESTS = Path(__file__).parent
# Of these long lists of cases `make test` takes one of so many, told by their names; `make test-slow` has the others.
ONE_OF = {
    "clinic/test_clinic": 4,
    "unit/reduction/test_device": 2,
    "unit/reduction/test_cpu_kernel": 2,
    "loops/test_accumulation": 2,
    "loops/test_checkpointing": 4,
    "loops/test_compile": 4,
    "loops/test_compile_combined": 4,
    "loops/test_compile_edges": 3,
    "loops/test_contexts": 2,
    "loops/test_evaluation": 2,
    "loops/test_functional": 2,
    "loops/test_inputs": 2,
    "loops/test_mixed_precision": 2,
    "loops/test_optimizers": 2,
    "loops/test_transforms": 2,
    "unit/views/test_figures": 2,
    "unit/collectors/test_graph": 2,
    "unit/collectors/test_model_summary": 4,
    "loops/test_zoo": 3,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        share = ONE_OF.get(item.path.with_suffix("").relative_to(TESTS).as_posix(), 1)
        if "[" in item.name and zlib.crc32(item.name.encode()) % share:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB, where mounting is allowed."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    may = mount and os.geteuid() == 0
    if not may or subprocess.run(command, check=False, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting a tiny file system is not allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=10)


@pytest.fixture(autouse=True)
def _no_watch_left_open() -> Iterator[None]:
    """A test that forgets to close its watch must not disturb the next one."""
    yield
    for watching in list(open_watches):
        watching.close()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Nothing is left of what torch.compile did in an earlier test, nor for a later one."""
    from tests.support.compiling import reset

    reset()
    yield
    reset()


@pytest.fixture
def no_function_mode_left() -> Iterator[None]:
    """A test that leaves a torch function mode on the stack fails, and does not disturb the next one."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode

    assert not _get_current_function_mode_stack()
    yield
    left = _get_current_function_mode_stack()
    for _ in left:
        _pop_mode()
    assert not left


@pytest.fixture(scope="module", params=["C", "torch"])
def both_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests twice: with the C kernel, and with the torch operations that replace it."""
    library = cpu.library
    if request.param == "torch":
        cpu.library = None
    elif library is None:
        pytest.skip("built without the C kernel")
    yield request.param
    cpu.library = library
