"""The streams of a device that use the same memory, and the order between them. The host never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _current_stream_of(device_type: str) -> Callable[[torch.device], Any] | None:
    if device_type in ("cpu", "meta"):
        return None
    found: Callable[[torch.device], Any] | None = getattr(getattr(torch, device_type, None), "current_stream", None)
    return found


def current(device: torch.device) -> Any:
    """The stream that the next operation on a device is launched on; None where there is one only."""
    get = _current_stream_of(device.type)
    return None if get is None else get(device)


class StreamOrder:
    """Orders the streams that write to the same memory in a step.

    Memory is allocated or cleared on one stream (`made`). Every other stream waits for that before its first use
    (`note`). At the end one stream waits for all of them (`join`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = _current_stream_of(device.type) is not None
        self._event: Any = None
        self._ordered: set[Any] = set()
        self._used: set[Any] = set()

    def made(self) -> None:
        """To be called after memory was allocated or cleared on the current stream."""
        if self._has_streams:
            stream = current(self._device)
            self._event = stream.record_event()
            self._ordered = {stream}

    def note(self) -> None:
        """To be called before the current stream uses the memory."""
        if not self._has_streams:
            return
        stream = current(self._device)
        if stream not in self._ordered:
            if self._event is not None:
                stream.wait_event(self._event)
            self._ordered.add(stream)
        self._used.add(stream)

    def join(self, tensors: Iterable[Tensor]) -> None:
        """Makes the current stream wait for all that have used the memory. `tensors` are what it reads then, which may
        have been allocated on another stream: their memory is not used again before it has.
        """
        if not self._has_streams:
            return
        stream = current(self._device)
        others = self._used - {stream}
        for other in others:
            stream.wait_stream(other)
        if others:
            for tensor in tensors:
                tensor.record_stream(stream)
        self._used = set()
