"""Counts and timers: peak bytes, device-to-host copies, synchronizations with the device, CUDA events."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

Run = Callable[[], object]


class CudaTimer:
    """Times work on a CUDA device by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._began, self._ended = (self._event() for _ in range(2))
        self._began.record(torch.cuda.current_stream(self._device))

    def stop(self) -> float:
        self._ended.record(torch.cuda.current_stream(self._device))
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1e3

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def peak_bytes(run: Run, device: torch.device) -> int:
    """The peak memory of torch's allocator during `run`, above what was allocated before."""
    return _peak_on_cuda(run, device) if device.type == "cuda" else _peak_on_host(run)


def _peak_on_cuda(run: Run, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


def _peak_on_host(run: Run) -> int:
    held = peak = 0
    for number in host_allocations(run):
        held += number
        peak = max(peak, held)
    return peak


def host_allocations(run: Run) -> list[int]:
    """The bytes of every allocation in order; releases are negative. The result is exact and reproducible."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps it from writing to stderr
    with torch.autograd.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def copies_from_cuda(run: Run) -> int:
    """The number of device-to-host copies during `run`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return copies_among([event.name for event in profiler.events() or ()])


def copies_among(names: list[str]) -> int:
    """The number of device-to-host copies among the names of profiler events."""
    return sum(name.startswith("Memcpy DtoH") for name in names)


@contextlib.contextmanager
def no_waiting_for_cuda() -> Iterator[None]:
    """Inside, every synchronization with the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


Forbidding = Callable[[], contextlib.AbstractContextManager[object]]


def waits(run_bare: Run, run_watched: Run, errors: Callable[[], int], forbidding: Forbidding) -> str:
    """Whether a watched step synchronizes with the device: "passed", or what failed.

    A watch catches its own exceptions and counts them; `errors` returns that count.
    """
    try:
        with forbidding():
            run_bare()
    except RuntimeError as problem:
        return f"unknown: the model itself synchronizes with the device ({str(problem).splitlines()[0]})"
    known = errors()
    try:
        with forbidding():
            run_watched()
    except RuntimeError as problem:
        return f"failed: {str(problem).splitlines()[0]}"
    return "passed" if errors() == known else "failed: a hook synchronized with the device"
