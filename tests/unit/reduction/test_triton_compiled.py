"""What Triton's compiler makes of the kernels, for GPUs that are not here: no spills, few registers, loads of 16 bytes;
how many variants there are, when they are compiled, and on which device they are launched.

A fake driver stands for the GPU: everything up to the launch is real. Speed is for a GPU to show.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.data import stats
from tbhooks.reduction import cpu, histogram, pinned, triton

if TYPE_CHECKING:
    from tests.support.fake_triton_driver import FakeDriver

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs the triton package, which make test-triton installs, and not its interpreter",
)
CUDA, HIP = ("sm_80", "sm_89", "sm_90"), ("gfx942",)
TYPES = ("float32", "bfloat16", "float16")
WORDS = ("int32", "int16")
REGISTERS = 160


@pytest.fixture(scope="module", autouse=True)
def cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@cache
def compiled(architecture: str, dtype: str | None) -> Any:
    """The kernel for a type, for checksums that of integers, or with None the one that merges; ahead of time."""
    import triton as package
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tbhooks.reduction import triton_kernels as kernels

    is_cuda = architecture.startswith("sm_")
    target = GPUTarget("cuda", int(architecture[3:]), 32) if is_cuda else GPUTarget("hip", architecture, 64)
    if dtype is None:
        constants: dict[str, Any] = {"PROGRAMS": triton.MOST_PROGRAMS}
        kernel, integers, options = kernels.merge_rows, ["slots"], dict(triton.FUSION)
    else:
        element, constants = getattr(kernels.tl, dtype), {"STRETCH": triton.STRETCH}
        kernel, integers, name = (
            (kernels.sum_words, kernels.WORD_INTEGERS, "WORD") if dtype in WORDS
            else (kernels.reduce_rows, kernels.INTEGERS, "DTYPE")
        )  # fmt: skip
        constants[name] = element
        options = {k: v for k, v in triton.OPTIONS.items() if is_cuda or k != "maxnreg"}
    signature = dict.fromkeys(integers, "i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    return package.compile(source, target=target, options=options)


def disassembled(code: Any, tmp_path: Path) -> tuple[int, list[str]]:
    """Registers of a thread, and all instructions."""
    import triton.backends.nvidia as nvidia

    tools, cubin = Path(nvidia.__file__).parent / "bin", tmp_path / "kernel.cubin"
    cubin.write_bytes(code.asm["cubin"])

    def run(*command: str) -> str:
        return subprocess.run([str(tools / command[0]), *command[1:], str(cubin)], capture_output=True, text=True, check=True).stdout  # fmt: skip  # noqa: E501

    registers = re.search(r"REG:(\d+)", run("cuobjdump", "-res-usage"))
    assert registers is not None
    text = run("nvdisasm", "-c")
    return int(registers[1]), re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)


@pytest.mark.parametrize("dtype", [*TYPES, *WORDS, None])
@pytest.mark.parametrize("architecture", CUDA)
def test_it_compiles_for_nvidia_without_spills_and_in_few_registers(
    architecture: str, dtype: str | None, tmp_path: Path
) -> None:
    registers, instructions = disassembled(compiled(architecture, dtype), tmp_path)
    assert registers <= REGISTERS
    assert not [name for name in instructions if name.startswith(("STL", "LDL"))]


@pytest.mark.parametrize("dtype", [*TYPES, *WORDS])
@pytest.mark.parametrize("architecture", CUDA)
def test_whole_stretches_are_loaded_sixteen_bytes_at_a_time(architecture: str, dtype: str, tmp_path: Path) -> None:
    _, instructions = disassembled(compiled(architecture, dtype), tmp_path)
    wide = sum(name.startswith("LDG.E.128") for name in instructions)
    assert wide == _wide_loads(dtype, threads=32 * triton.OPTIONS["num_warps"])


@pytest.mark.parametrize("dtype", [*TYPES, *WORDS, None])
@pytest.mark.parametrize("architecture", HIP)
def test_it_compiles_for_amd_without_spills_and_with_wide_loads(architecture: str, dtype: str | None) -> None:
    assembly = compiled(architecture, dtype).asm["amdgcn"]
    counts = dict(re.findall(r"\.(\w+_count):\s+(\d+)", assembly))
    assert counts["vgpr_spill_count"] == counts["sgpr_spill_count"] == "0"
    assert int(counts["vgpr_count"]) <= REGISTERS
    if dtype is not None:
        wide = len(re.findall(r"\b(?:buffer|global)_load_dwordx4\b", assembly))
        assert wide == _wide_loads(dtype, threads=64 * triton.OPTIONS["num_warps"])


def _wide_loads(dtype: str, threads: int) -> int:
    """How many loads of 16 bytes a thread makes for a stretch: of the numbers, and of those that are subtracted; for
    checksums nothing is.
    """
    return (1 if dtype in WORDS else 2) * triton.STRETCH * (4 if dtype in ("float32", "int32") else 2) // (16 * threads)


# --- Variants and devices, with a fake driver -----------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """CPU tensors are launched on, as if they were a GPU's; nothing is prepared yet."""
    from tbhooks.reduction import triton_kernels as kernels
    from tests.support import fake_triton_driver

    monkeypatch.setattr(triton, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(triton, "_ready", set())
    monkeypatch.setattr(triton, "_begun", set())
    monkeypatch.setattr(triton, "failure", "")
    monkeypatch.setattr(cpu, "library", None)
    monkeypatch.setattr(triton, "_sums_words", set())
    for kernel in (kernels.reduce_rows, kernels.merge_rows, kernels.sum_words):
        kernel.device_caches.clear()
    with fake_triton_driver.installed() as made:
        yield made
        # Unloading them needs the driver that loaded them.
        for kernel in (kernels.reduce_rows, kernels.merge_rows, kernels.sum_words):
            kernel.device_caches.clear()
        gc.collect()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that are compiled meanwhile."""
    from tbhooks.reduction import triton_kernels as kernels

    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (kernels.reduce_rows, kernels.merge_rows, kernels.sum_words):
            compile_it = kernel._do_compile

            def counted(*args: Any, compile_it: Any = compile_it, kernel: Any = kernel, **options: Any) -> Any:
                found.append(kernel.fn.__name__)
                return compile_it(*args, **options)

            patch.setattr(kernel, "_do_compile", counted)
        yield found


class Mixed(nn.Module):
    """Activations of two types and many sizes, as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size + 1) for size in range(3, 40, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                total = total + layer(x[:, : layer.in_features]).sum()
        return total


def test_four_variants_serve_a_whole_model_and_none_is_compiled_in_a_step(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with compilations() as found, caplog.at_level(logging.INFO, "tbhooks"):
        model = Mixed()
        watching = tbhooks.watch(model, every=1, histograms=2)
        assert sorted(found) == ["merge_rows", *["reduce_rows"] * 3]
        optimizer = torch.optim.AdamW(model.parameters())
        for size in (4, 7, 5000):
            model(torch.randn(size, 40)).backward()
            optimizer.step()
            optimizer.zero_grad()
        watching.close()
    assert len(found) == 4
    assert {launch.kernel for launch in driver.launches[4:]} == {"reduce_rows", "merge_rows"}
    said = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert len(said) == 1
    assert re.search(r"compiled or loaded in \d+\.\d s", said[0])


def test_checksums_have_two_more_variants_which_are_compiled_when_they_are_asked_for(driver: FakeDriver) -> None:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    with compilations() as found, tbhooks.watch(model, every=1) as watching:
        before = len(found)
        watching.checksums()
        assert found[before:] == ["sum_words"] * 2
        for size in (4, 700):
            driver.launches.clear()
            model(torch.randn(size, 40)).backward()
            optimizer.step()
            optimizer.zero_grad()
        watching.flush()
    assert len(found) == before + 2
    assert watching.stats.errors == 0
    assert {launch.kernel for launch in driver.launches} == {"reduce_rows", "merge_rows", "sum_words"}


def test_rows_of_a_step_are_merged_in_one_launch_and_parameters_read_in_one(driver: FakeDriver) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1, kinds=("weight", "weight_gradient", "update")) as watching:
        for _ in range(3):
            driver.launches.clear()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        watching.flush()
    # Weights and gradients before the step of the optimizer, updates after it.
    assert sorted(launch.kernel for launch in driver.launches) == ["merge_rows", "reduce_rows", "reduce_rows"]


def test_a_launch_is_made_under_the_device_of_the_tensor(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Current:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            self._before, driver.device = driver.device, self._device.index

        def __exit__(self, *_: object) -> None:
            driver.device = self._before

    monkeypatch.setattr(torch.cuda, "device", Current)
    scratch = triton.Scratch(torch.device("cpu"))
    monkeypatch.setattr(scratch, "_device", torch.device("cuda", 1))
    monkeypatch.setattr(pinned, "upload", lambda table, _: table)
    monkeypatch.setattr(scratch, "_grow", lambda *sizes: None)
    scratch._made, scratch._slots_used = [(torch.empty(9, 8), torch.empty(9, 3))], [0]
    row, counts = torch.zeros(stats.WIDTH), torch.zeros(histogram.SLOTS)
    job = triton.Job(torch.ones(5), None, None, row.data_ptr(), counts.data_ptr())
    scratch.reduce(job)
    scratch.reduce_all([job])
    scratch.merge()
    monkeypatch.setattr(triton, "_current", lambda _: Current(torch.device("cuda", 1)))
    triton.sum_words(torch.ones(5, dtype=torch.int32))
    assert [launch.device for launch in driver.launches] == [1, 1, 1, 1]
    assert driver.device == 0


def test_without_a_c_compiler_torch_operations_serve_and_it_is_logged_once(driver: FakeDriver) -> None:
    driver.refusal = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        watching.flush()
        frame = watching.history[-1]
    assert "Failed to find C compiler" in triton.name()
    assert driver.launches == []
    assert watching.stats.errors == 0
    assert sum("Triton" in message for message in watching.stats.messages) == 1
    assert frame["0", "activation"].count == 16


def test_a_device_that_is_first_seen_in_training_is_prepared_in_the_background(driver: FakeDriver) -> None:
    assert not triton.takes(torch.ones(3))
    for thread in threading.enumerate():
        if thread.name == "tbhooks-triton":
            thread.join()
    assert triton.takes(torch.ones(3))
