"""The ring of one device: a fixed number of rows, each with the gradient norms and the scalars of one step.

Writing a row takes one launch for all norms and one for each scalar. Nothing is copied to the host, nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tbhooks.data.stats import Floats
from tbhooks.reduction import pinned
from tbhooks.reduction.streams import StreamOrder

# How many scalars, and how many of the largest samples, a row holds on each device.
MOST_NUMBERS = 16
SAMPLES = 4


class DeviceRing:
    """The rows of one device. `slot` is the position of a row in the ring."""

    def __init__(self, like: Tensor, slots: int, norms: int) -> None:
        self.norms = norms
        # In this order in a row: norms, scalars, values of samples.
        width = norms + MOST_NUMBERS + SAMPLES
        self.columns: dict[str, int] = {}
        """The position of each scalar among the scalars of a row."""
        self._used = [0] * slots
        with torch.inference_mode(False):
            like = torch.zeros((), device="cpu") if like.device.type == "cpu" else like.detach()
            self._values = like.new_zeros((slots, width), dtype=torch.float32)
            self._ids = like.new_zeros((slots, SAMPLES), dtype=torch.int64)
        self._rows = self._values.unbind()
        self._id_rows = self._ids.unbind()
        self._order = StreamOrder(self._values.device)
        self._order.made()

    @property
    def nbytes(self) -> int:
        """The size on the device."""
        return self._values.nbytes + self._ids.nbytes

    def write_norms(self, slot: int, offset: int, norms: Sequence[Tensor]) -> int:
        """Writes norms into a row from this column on. Returns the column behind them."""
        end = offset + len(norms)
        self._order.note()
        torch.stack(list(norms), out=self._rows[slot][offset:end])
        return end

    def finish(self, slot: int, end: int) -> None:
        """The step of this slot has ended, with norms up to this column."""
        if end < self._used[slot]:  # an earlier step of this slot had more
            self._order.note()
            self._rows[slot][end : self._used[slot]].zero_()
        self._used[slot] = end

    def write_number(self, slot: int, tag: str, value: Tensor) -> bool:
        """Writes a scalar into a row. Returns False if there is no room for another tag."""
        if tag not in self.columns and len(self.columns) >= MOST_NUMBERS:
            return False
        column = self.columns.setdefault(tag, len(self.columns))
        self._order.note()
        self._rows[slot][self.norms + column].copy_(value.detach().reshape(()))
        return True

    def write_samples(self, slot: int, values: Tensor, ids: Tensor) -> int:
        """Writes the largest values, sorted, and their ids into a row. Returns how many."""
        count = min(len(values), SAMPLES)
        self._order.note()
        start = self.norms + MOST_NUMBERS
        self._rows[slot][start : start + count].copy_(values[:count])
        self._id_rows[slot][:count].copy_(ids[:count])
        return count

    def merge_samples(self, slot: int, count: int, values: Tensor, ids: Tensor) -> int:
        """Merges more samples with the first `count` of a row, and keeps the largest."""
        start = self.norms + MOST_NUMBERS
        self._order.note()
        values = torch.cat([self._rows[slot][start : start + count], values.to(torch.float32)])
        ids = torch.cat([self._id_rows[slot][:count], ids])
        largest, order = values.topk(min(len(values), SAMPLES))
        return self.write_samples(slot, largest, ids[order])

    def packed(self) -> Tensor:
        """All rows as bytes in one tensor, for one copy."""
        self._order.note()
        self._order.join([self._values, self._ids])
        packed = torch.cat([self._values.reshape(-1).view(torch.uint8), self._ids.reshape(-1).view(torch.uint8)])
        self._order.made()  # what is written from now on is written after this was read
        return packed

    def summary(self) -> Tensor:
        """[slot, 1 + scalars] The norm of all gradients and the scalars of each row, for the copy of a logged step."""
        self._order.note()
        self._order.join([self._values])
        total = torch.linalg.vector_norm(self._values[:, : self.norms], dim=1, keepdim=True)
        summary = torch.cat([total, self._values[:, self.norms : self.norms + MOST_NUMBERS]], dim=1)
        self._order.made()
        return summary

    def copied_summary(self) -> Floats:
        """The same on the host, after a wait: for the background thread."""
        with pinned.on_device(self._values.device):
            copied = pinned.download(self.summary())
        copied.wait()
        return np.asarray(copied.tensor, dtype=np.float64)
