"""Fixed-width records on one device, and the one copy that moves them to the host.

Every reduced tensor takes the next record of a preallocated buffer. `pinned.download` is the only function that copies
from a device to the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tbhooks.capture.recording.calls import ADDRESS, ROOM, USED
from tbhooks.capture.recording.host_memory import FEWEST
from tbhooks.capture.recording.packed_step import Attached, Copy
from tbhooks.data import stats
from tbhooks.reduction import cpu, histogram, pinned, torch_rows, triton
from tbhooks.reduction.cpu import NULL, Address
from tbhooks.reduction.finalize import Block
from tbhooks.reduction.streams import StreamOrder

# A step that never ends must not fill the device: past this many bytes of records, calls are not recorded.
MOST_BYTES = 256 << 20

IN_NUMPY = {
    torch.float64: "f8", torch.float32: "f4", torch.float16: "f2", torch.int64: "i8", torch.int32: "i4",
    torch.int16: "i2", torch.int8: "i1", torch.uint8: "u1", torch.bool: "?",
}  # fmt: skip
"""The types in which tensors are attached; others are converted to float32."""


class Buffer:
    """Records of one device, taken in order and copied to the host together."""

    def __init__(self, like: Tensor, with_buckets: bool, capacity: int) -> None:
        self.device = device = like.device
        self.with_buckets = with_buckets
        # Tensors are made from an existing one, which works on every device. On a CPU it could be a subclass that makes
        # tensors of its own type.
        self._like = torch.zeros((), device="cpu") if device.type == "cpu" else like.detach().new_zeros(())
        self.row_type = torch_rows.row_type(device)
        unit = self.row_type.itemsize
        row_bytes = stats.WIDTH * unit
        count_bytes = -(-histogram.SLOTS * 4 // unit) * unit if with_buckets else 0
        self.row_bytes, self.record_bytes = row_bytes, row_bytes + count_bytes
        self._chunks: list[Tensor] = []
        # Views of records, which only torch operations need: made when they are asked for, kept for later steps.
        self._rows: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self.header = array("q", [0, 0, NULL])
        """How many records are used, how many there are, and the address that the first would have if all were where
        the next one is. Hooks in C take records from it (eager_hooks.c). Its own address never changes.
        """
        self.overflowed = False
        self.unfinished = Unfinished()
        self.order = StreamOrder(device)
        self.scratch = triton.Scratch(device, self.order.made)
        self._attached: list[Tensor] = []
        self._attached_bytes = 0
        self._grow(max(capacity, FEWEST))

    @property
    def used(self) -> int:
        """How many records are used."""
        return self.header[USED]

    def take(self) -> int | None:
        """The number of an unused record; None if a step has made more calls than may be held."""
        used = self.header[USED]
        if used >= self.header[ROOM]:
            room = MOST_BYTES // self.record_bytes - used
            if room <= 0:
                self.overflowed = True
                return None
            self._grow(min(max(used, FEWEST), room))
        self.header[USED] = used + 1
        return used

    def take_together(self, number: int) -> int | None:
        """The first of so many unused records that lie one after the other; None if a step may not hold so many."""
        used = self.header[USED]
        if used + number > self.header[ROOM]:  # in a new chunk: what is left of the last one stays unused
            used = self.header[ROOM]
            if (used + number) * self.record_bytes > MOST_BYTES:
                return None
            self._grow(max(number, min(used, MOST_BYTES // self.record_bytes - used)))
        self.header[USED] = used + number
        return used

    def row(self, record: int) -> Tensor:
        if record not in self._rows:
            self._rows[record] = self._view(record, 0, self.row_bytes, self.row_type)
        return self._rows[record]

    def counts(self, record: int) -> Tensor:
        if record not in self._counts:
            self._counts[record] = self._view(record, self.row_bytes, 4 * histogram.SLOTS, torch.int32)
        return self._counts[record]

    def _view(self, record: int, start: int, size: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # a tensor made inside it could not be written outside
            for chunk in self._chunks:
                if record < len(chunk):
                    return chunk[record, start : start + size].view(dtype)
                record -= len(chunk)
        raise IndexError(record)

    def addresses(self, record: int) -> tuple[Address, Address]:
        """The addresses of the row and of the counts of the record that was taken last, on a CPU."""
        row = self.header[ADDRESS] + record * self.record_bytes
        return row, row + self.row_bytes if self.with_buckets else NULL

    def attach(self, number: int, tensor: Tensor, is_own: bool = False) -> Attached:
        """Copies a tensor as it is now to the host with the records. `number` is that of this buffer. With `is_own`
        nothing else will change the tensor.
        """
        with torch.inference_mode(False), torch.no_grad():
            readable = tensor.detach() if tensor.dtype in IN_NUMPY else tensor.detach().float()
            content = readable if is_own else readable.clone(memory_format=torch.contiguous_format)
            content = content.reshape(-1).view(torch.uint8)
        start = self._attached_bytes
        self._attached_bytes += len(content)
        self._attached.append(content)
        return Attached(number, start, len(content), IN_NUMPY[readable.dtype], tuple(tensor.shape))

    @property
    def is_empty(self) -> bool:
        return not self.used and not self._attached

    def pack(self) -> tuple[Tensor, int, int]:
        """All used records as one tensor on the device, and how many bytes of parts and of tensors follow them."""
        self.order.join([*self._chunks, *self.unfinished.held, *self._attached, *self.scratch.tensors])
        self.scratch.merge()
        left, packed = self.used, []
        for chunk in self._chunks:
            packed.append(chunk[: min(left, len(chunk))])
            left = max(0, left - len(chunk))
        parts = self.unfinished.packed()
        if not parts and not self._attached:
            return (packed[0] if len(packed) == 1 else torch.cat(packed)), 0, 0
        sizes = sum(map(len, parts)), self._attached_bytes
        return torch.cat([*(chunk.view(-1) for chunk in packed), *parts, *self._attached]), *sizes

    def reset(self) -> None:
        """Makes all records unused, in one chunk that fits what the last step needed."""
        if len(self._chunks) > 1:
            needed, self.header[ROOM], self.header[USED] = self.header[ROOM], 0, 0
            self._chunks, self._rows, self._counts = [], {}, {}
            self._grow(needed)
        elif self.with_buckets:
            cpu.clear(self._chunks[0][: self.used])
        self.header[USED], self.overflowed = 0, False
        self.unfinished.forget()
        self.scratch.forget()
        self._attached, self._attached_bytes = [], 0
        self.order.made()

    def _grow(self, records: int) -> None:
        with torch.inference_mode(False):
            chunk = self._like.new_zeros((records, self.record_bytes), dtype=torch.uint8)
        self._chunks.append(chunk)
        # The address that record 0 would have if all were in this chunk: those taken from now on are.
        self.header[ADDRESS] = chunk.data_ptr() - self.header[ROOM] * self.record_bytes
        self.header[ROOM] += records
        self.order.made()


def copy_out(buffer: Buffer) -> Copy:
    """Starts the copy of all its records, and returns where they will be."""
    packed, part_bytes, attached_bytes = buffer.pack()
    blocks = buffer.unfinished.blocks
    return Copy(
        pinned.download(packed), buffer.row_type, blocks, buffer.record_bytes, part_bytes, attached_bytes
    )  # fmt: skip


class Unfinished:
    """The partial results on one device in one step, of which finalize.py makes rows on the host."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.blocks: list[Block] = []
        self.held: list[Tensor] = []

    def hold(self, block: Block, parts: Sequence[Tensor]) -> None:
        """Keeps the partial results of records until they are packed."""
        self.blocks.append(block)
        self.held += parts

    def packed(self) -> list[Tensor]:
        """All partial results as bytes, in the order of the blocks: first those in float64, then those in float32."""
        by_type = ([part.reshape(-1) for part in self.held if part.dtype is t] for t in (torch.float64, torch.float32))
        return [torch.cat(parts).view(torch.uint8) for parts in by_type if parts]
