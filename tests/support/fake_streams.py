"""Streams of the simulated device, checked by torch's own CUDA sanitizer.

Operations run at once, one after the other. Which streams they would run on is noted, and `Sanitizer` reports accesses
to the same memory from two streams that nothing orders. Reuse of freed memory is not checked.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler, zip_arguments

_numbers = itertools.count(1)
_open: list[Sanitizer] = []


class Event:
    """An event that a stream has recorded."""

    def __init__(self, stream: Stream) -> None:
        self.number = next(_numbers)
        for sanitizer in _open:
            sanitizer.handler._handle_event_creation(self.number)
            sanitizer.handler._handle_event_record(self.number, stream.number)


class Stream:
    """A stream of the device, with the methods of torch.cuda.Stream that order streams."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        for sanitizer in _open:
            sanitizer.handler.syncs.create_stream(self.number)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        for sanitizer in _open:
            sanitizer.handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


_current = [Stream()]


def current_stream(_device: Any = None) -> Stream:
    """What torch.fakegpu.current_stream returns."""
    return _current[-1]


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Operations of the block are launched on `stream`, in every thread."""
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


class Sanitizer:
    """Finds unordered accesses while the ``with`` block is open."""

    def __init__(self, host_of: Callable[[Any], Tensor | None]) -> None:
        self.handler = EventHandler()
        self.races: list[str] = []
        self._host_of = host_of
        self._kept: list[Any] = []  # so that no address is used twice

    def __enter__(self) -> Self:
        _open.append(self)
        for stream in _current:
            self.handler.syncs.create_stream(stream.number)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)

    def launched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Notes a kernel that reads and writes these tensors, on the current stream."""
        reads: set[int] = set()
        writes: set[int] = set()
        for argument, value in zip_arguments(func._schema, args, kwargs):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _values(value):
                (writes if is_written else reads).update(self._places(tensor))
        for tensor in _values(out):
            writes |= self._places(tensor)
        names: dict[int, list[str]] = {place: [] for place in reads | writes}
        found = self.handler._handle_kernel_launch(
            current_stream().number, reads - writes, writes, set(), str(func), names
        )  # fmt: skip
        self.races += [
            f"{race.current_access.operator} at {_line(race.current_access.stack_trace)} is not ordered after "
            f"{race.previous_access.operator} at {_line(race.previous_access.stack_trace)}"
            for race in found
        ]

    def _places(self, tensor: Any) -> set[int]:
        """The memory of a tensor, in units of 8 bytes."""
        host = self._host_of(tensor)
        if host is None or host.numel() == 0:
            return set()
        self._kept.append(host.untyped_storage())
        start = host.data_ptr()
        if host.dim() == 2 and host.stride(1) == 1 and host.stride(0) > host.size(1):  # part of each row
            row, step = host.size(1) * host.itemsize, host.stride(0) * host.itemsize
            return {
                place
                for i in range(host.size(0))
                for place in range((start + i * step) // 8, (start + i * step + row - 1) // 8 + 1)
            }
        span = 1 + sum((n - 1) * abs(s) for n, s in zip(host.shape, host.stride(), strict=True))
        return set(range(start // 8, (start + span * host.itemsize - 1) // 8 + 1))


def _values(given: Any) -> Sequence[Any]:
    """An argument or a result of an operation is a value, or a list or tuple of values."""
    return given if isinstance(given, list | tuple) else (given,)


def _line(stack: traceback.StackSummary) -> str:
    """The innermost line of ours, or "the training"."""
    for frame in reversed(stack):
        if "/tbhooks/" in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.rpartition('/tbhooks/')[2]}:{frame.lineno}"
    return "the training"


def notify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Called by the simulated device after each kernel."""
    for sanitizer in _open:
        with torch._C._DisableTorchDispatch():
            sanitizer.launched(func, args, kwargs, out)
