"""What can be counted instead of timed: bytes at the peak, copies to the host, waits for the device.

Each count is of something that runs; which something is the caller's business. The CUDA parts are few lines each,
as they can be tried only where there is such a device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

Run = Callable[[], object]


class CudaTimer:
    """For models on a CUDA device: events in its stream, so nothing is counted that it did not wait for."""

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
    """The most that torch's allocator gave out at once while it ran, beside what was held before."""
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
    """Bytes of every allocation, and less than 0 of every release, in order: exact, and the same every time."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell on stderr that it starts and stops
    with torch.autograd.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def copies_from_cuda(run: Run) -> int:
    """How many copies from the device to the host ran."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return copies_among([event.name for event in profiler.events() or ()])


def copies_among(names: list[str]) -> int:
    """Device-to-host copies among the names of what a CUDA device did."""
    return sum(name.startswith("Memcpy DtoH") for name in names)


@contextlib.contextmanager
def no_waiting_for_cuda() -> Iterator[None]:
    """Whatever makes the host wait for the device raises inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


Forbidding = Callable[[], contextlib.AbstractContextManager[object]]


def waits(run_bare: Run, run_watched: Run, errors: Callable[[], int], forbidding: Forbidding) -> str:
    """Whether a watched step waits for the device: "passed", or what is wrong.

    A watch keeps its own exceptions from training and counts them; `errors` is that count.
    """
    try:
        with forbidding():
            run_bare()
    except RuntimeError as problem:
        return f"cannot be told: the model waits for the device itself ({str(problem).splitlines()[0]})"
    known = errors()
    try:
        with forbidding():
            run_watched()
    except RuntimeError as problem:
        return f"failed: {str(problem).splitlines()[0]}"
    return "passed" if errors() == known else "failed: a hook waited for the device"
