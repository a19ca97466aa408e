"""The checks of what is read and of what it changes: kernels, waits, copies, numbers, bits."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tbhooks
from tbhooks.api.watch import Watch, watch
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.cli.bench import cuda_counters
from tbhooks.cli.selftest.check import MODES, Failed, Mode, NotPossible, Passed, Setup, small_model, train
from tbhooks.data.frame import KINDS, Reading, Site
from tbhooks.reduction import cpu, triton

STEPS = 3
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A tensor of more elements than a 32-bit integer can count, made of repetitions so that its statistics are known.
BASE, REPEATS = 1 << 20, 2048
RELATIVE = 1e-5


def environment(setup: Setup) -> Passed:
    """The versions and the device."""
    parts = [f"tbhooks {tbhooks.__version__}", f"Python {platform.python_version()}", platform.system()]
    parts += [f"torch {torch.__version__}", f"C kernel: {'yes' if cpu.library is not None else 'no'}"]
    numbers: dict[str, float] = {"threads": torch.get_num_threads()}
    if setup.on_cuda:
        properties: Any = torch.cuda.get_device_properties(setup.device)
        parts += [f"CUDA {torch.version.cuda}", properties.name, f"sm_{properties.major}{properties.minor}"]
        parts.append(f"Triton: {triton.name()}")
        numbers |= {"devices": torch.cuda.device_count(), "memory_gb": properties.total_memory / 1e9}
    return Passed(", ".join(parts), numbers)


def kernels_compile(setup: Setup) -> Passed:
    """The first logged steps, in which kernels are compiled, and which kernels reduce tensors."""
    started = time.perf_counter()
    model = small_model(setup.device)
    with watch(model, every=1) as watching:
        train(model, setup.device, MODES[0], 2)
        watching.flush()
    seconds = time.perf_counter() - started
    _no_errors(watching, "the first steps")
    used = watching.stats.device_kernel if setup.on_cuda else watching.stats.kernel
    if setup.on_cuda and triton.is_installed() and triton.failure:
        raise Failed(f"Triton is installed but fails, and torch operations are used: {triton.failure}")
    return Passed(f"{used}; watch() and two steps took {seconds:.1f} s", {"seconds": seconds})


def no_waits(setup: Setup) -> Passed:
    """No wait for the device from the first step on, in every mode of training."""
    for mode in MODES:
        setup.log(f"training: {mode.name}")
        if setup.on_cuda:
            train(small_model(setup.device), setup.device, mode, 1)  # what torch itself sets up may wait
        model = small_model(setup.device)
        errors, frames = _train_watched(setup, model, mode)
        if errors:
            raise Failed(f"{mode.name}: {errors[0]}")
        if not frames:
            raise Failed(f"{mode.name}: nothing was logged")
    names = ", ".join(mode.name for mode in MODES)
    if not setup.on_cuda:
        return Passed(f"no errors in: {names}; a CPU has nothing to wait for")
    return Passed(f"every wait was forbidden: {names}")


def _train_watched(setup: Setup, model: torch.nn.Module, mode: Mode) -> tuple[list[str], int]:
    watching = watch(model, every=2)
    if mode.asks_for_more:
        watching.evaluation()
        watching.per_channel("0")
        watching.graph()
    elif mode.evaluates:
        watching.evaluation()
    try:
        if setup.on_cuda:
            with cuda_counters.no_waiting_for_cuda():
                train(model, setup.device, mode, STEPS, watching)
        else:
            train(model, setup.device, mode, STEPS, watching)
    except RuntimeError as problem:
        return [f"it waited in the training loop: {str(problem).splitlines()[0]}"], 0
    finally:
        watching.close()
    return list(watching.stats.messages) if watching.stats.errors else [], len(watching.history)


def copies(setup: Setup) -> Passed:
    """What crosses between host and device in a logged step, and how many kernels it launches."""
    setup.need_cuda("only a device has copies to count")
    model = small_model(setup.device)
    bare = _events(lambda: train(model, setup.device, MODES[0], 4))
    with watch(model, every=1) as watching:
        train(model, setup.device, MODES[0], 1)
        watching.flush()
        watched = _events(lambda: train(model, setup.device, MODES[0], 4))
    _no_errors(watching, "training")
    return judge_copies(bare, watched, steps=4)


def judge_copies(bare: Sequence[str], watched: Sequence[str], steps: int) -> Passed:
    """Judges what ran on the device in so many steps, all of them logged, beside what runs without a watch.

    Each step may have one copy to the host. Copies to the device have to come from pinned memory, which takes no wait:
    Triton's tables of parameters.
    """

    def extra(start: str) -> int:
        return sum(name.startswith(start) for name in watched) - sum(name.startswith(start) for name in bare)

    down, up, pageable = extra("Memcpy DtoH"), extra("Memcpy HtoD"), extra("Memcpy HtoD (Pageable")
    is_pinned = all("Pinned" in name for name in watched if name.startswith("Memcpy DtoH"))
    launches = (len(watched) - len(bare) - down - up) / steps
    numbers = {"copies_to_host": down / steps, "copies_to_device": up / steps, "launches": launches}
    if down != steps or pageable or not is_pinned:
        raise Failed(
            f"in {steps} logged steps {down} copies to the host (pinned: {is_pinned}), and {up} to the device; "
            f"{pageable} of those are from memory that is not pinned"
        )
    return Passed(
        f"a logged step has one copy to pinned memory, {up / steps:.3g} tables copied from pinned memory, and "
        f"{launches:.0f} launches", numbers
    )  # fmt: skip


def _events(run: Callable[[], object]) -> list[str]:
    """The names of everything that ran on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    return [event.name for event in events if str(event.device_type).endswith("CUDA")]


def numbers(setup: Setup) -> Passed:
    """Statistics of tensors of every type and many sizes, against NumPy in float64."""
    sizes = (1, 1000, 300_001) if setup.quick else (1, 63, 1000, 300_001, 1 << 22)
    done = 0
    for dtype in TYPES:
        for size in sizes:
            setup.log(f"{dtype}, {size} elements")
            tensor = _with_nonfinite(size).to(dtype)
            _compare(_read(tensor.to(setup.device)), tensor, f"{dtype} of {size} elements")
            done += 1
    largest = _largest(setup)
    return Passed(f"{done} tensors of {len(TYPES)} types equal NumPy's float64; {largest}")


def _with_nonfinite(size: int) -> Tensor:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3 + 1
    if size > 100:
        tensor[7], tensor[11], tensor[13:17] = torch.nan, torch.inf, 0.0
    return tensor


def _read(tensor: Tensor) -> Reading:
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=True)
    if recorder.record(recorder.number(Site("tensor", "activation")), tensor) is None:
        raise Failed(f"a tensor of {tensor.dtype} was not read")
    return recorder.pack(0, 0).frames()[-1]["tensor", "activation"]


def _compare(reading: Reading, tensor: Tensor, what: str) -> None:
    wide = tensor.double().numpy()
    finite = wide[np.isfinite(wide)]
    expected = {
        "count": wide.size, "nan_count": np.isnan(wide).sum(), "inf_count": np.isinf(wide).sum(),
        "min": finite.min(), "max": finite.max(), "zero_fraction": (wide == 0).mean(),
        "mean": finite.mean(), "std": finite.std(), "norm": np.linalg.norm(finite),
    }  # fmt: skip
    for name, value in expected.items():
        found = getattr(reading, name)
        if not np.isclose(found, value, rtol=RELATIVE, atol=RELATIVE * float(np.abs(finite).max())):
            raise Failed(f"{name} of {what} is {found}, NumPy has {value}")
    if reading.counts.sum() != finite.size:
        raise Failed(f"the histogram of {what} has {reading.counts.sum()} elements, not {finite.size}")


def _largest(setup: Setup) -> str:
    """Reads a tensor of 2**31 elements, where there is memory for it."""
    if setup.quick or not setup.on_cuda:
        return "2**31 elements were not tried (a GPU without --quick does)"
    needed = 2 * BASE * REPEATS * 3 // 2
    if torch.cuda.mem_get_info(setup.device)[0] < needed:
        return f"2**31 elements need {needed / 1e9:.0f} GB of free memory"
    setup.log("2**31 elements")
    base = torch.randn(BASE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    reading = _read(base.to(setup.device).repeat(REPEATS))
    wide = base.double().numpy()
    if reading.count != BASE * REPEATS or not np.isclose(reading.std, wide.std(), rtol=RELATIVE):
        raise Failed(f"of 2**31 elements: count {reading.count}, std {reading.std} instead of {wide.std()}")
    return "2**31 elements as well"


def bits(setup: Setup) -> Passed:
    """The weights after training with and without a watch, to the last bit."""
    for mode in MODES:
        setup.log(f"training twice: {mode.name}")
        weights = []
        for is_watched in (False, True):
            model = small_model(setup.device)
            watching = watch(model, every=1) if is_watched else None
            weights.append(train(model, setup.device, mode, STEPS, watching))
            if watching is not None:
                watching.close()
                _no_errors(watching, mode.name)
        if not torch.equal(*weights):
            raise Failed(f"{mode.name}: the weights differ by up to {(weights[0] - weights[1]).abs().max():.3g}")
    return Passed(f"equal weights after {STEPS} steps: {', '.join(mode.name for mode in MODES)}")


def memory(setup: Setup) -> Passed:
    """Training with 95 % of the device's memory taken."""
    setup.need_cuda("only a device has memory of its own to fill")
    free, _ = torch.cuda.mem_get_info(setup.device)
    model = small_model(setup.device)
    train(model, setup.device, MODES[0], 2)
    if free < 1 << 30:
        raise NotPossible("less than 1 GB of the device's memory is free")
    held = torch.empty(int(0.95 * free), dtype=torch.uint8, device=setup.device)
    try:
        with watch(model, every=1) as watching:
            train(model, setup.device, MODES[0], STEPS)
    finally:
        del held
        torch.cuda.empty_cache()
    unseen = sum(name.startswith("update/") for name in watching.stats.unseen)
    return Passed(f"training went on; {watching.stats.errors} errors of tbhooks, {unseen} updates were left out")


def _no_errors(watching: Watch, what: str) -> None:
    if watching.stats.errors:
        raise Failed(f"{what}: {watching.stats.errors} errors inside tbhooks: {watching.stats.messages[-1]}")
