"""One thread everywhere: bit-for-bit comparisons are of the watch, not of a thread pool."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Processes that tests start share the cores with other tests: threads that wait for each other would wait long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from tbhooks.api.lifecycle import open_watches
from tbhooks.reduction import cpu
from tests.support.process_pool import ProcessPool
from tests.support.script_host import ScriptHost
from tests.support.slow import COLLECTED

LONG = ("tests/distributed/", "tests/loops/", "tests/unit/test_", "tests/unit/cli/", "tests/unit/api/")
torch.set_num_threads(1)
# In CI the same examples every time: a change must not fail for what somebody else's dice find.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps everything that was collected, before `-m` removes some, for the test of the marker `slow`.

    Files that take long come first: a process that begins one when the others are done would keep them waiting.
    """
    config.stash[COLLECTED] = list(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


class ByFile(LoadGroupScheduling):
    """All tests of a file run in one process of xdist, in which what they share is made once: fixtures, reference runs,
    processes that scripts are forked from. Files with the same `xdist_group` share a process.
    """

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Leaves the objects of imported packages out of garbage collections, of which tests make many.

    There are a million of them, and a collection that visits them takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """One process that forks the ranks of every test."""
    with contextlib.closing(ProcessPool()) as made:
        yield made


@pytest.fixture(scope="session")
def scripts() -> Iterator[ScriptHost]:
    """One process that has imported torch and forks the scripts of every test."""
    with contextlib.closing(ScriptHost()) as made:
        yield made


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
