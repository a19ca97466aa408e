"""What a device has made of records in a step and the host finishes (parts.py): small tensors, put together once.

Also knows on which CUDA streams they were made, so that the one copy waits for all of them, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tbhooks.parts import Block


class Unfinished:
    """Of one device, in one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        self.blocks: list[Block] = []
        self._held: list[Tensor] = []
        self._streams: set[torch.cuda.Stream] = set()

    def hold(self, block: Block, parts: Sequence[Tensor]) -> None:
        """Keeps the parts of records until all are put together."""
        self.note_stream()
        self.blocks.append(block)
        self._held += parts

    def note_stream(self) -> None:
        """Something of the step is being written on the current stream."""
        if self._device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self._device))

    def wait_for_streams(self) -> None:
        """Makes the current stream wait for what was written on others; the host does not wait."""
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams - {current}:
            current.wait_stream(stream)
            for part in self._held:
                part.record_stream(current)

    def packed(self) -> Tensor | None:
        """All parts as bytes, in the order of the blocks."""
        if not self._held:
            return None
        return torch.cat([part.reshape(-1) for part in self._held]).view(torch.uint8)
