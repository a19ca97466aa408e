"""Rows with one per attention head, of numbers that every query has: its largest logit, its entropy and others.

Tensors are reduced at once on their device, without waiting for it. Rows are merged in the background.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tbhooks.capture.recording.packed_step import Attached, Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.data import stats
from tbhooks.data.artifacts.vectors import HEADS
from tbhooks.data.frame import CHANNEL, Site
from tbhooks.data.self_report import Report
from tbhooks.reduction.channel_rows import Sums, reduce_channels, rows_of

MOST_HEADS, MOST_CALLS = 512, 256

_Attached = tuple[str, int, list[tuple[Attached, int, bool]]]
"""The name of what was reduced, the number of heads, and its pieces in the copy."""


class HeadRows:
    """The rows of all heads of one step, by the forward they belong to."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.forget()

    def add(self, name: str, numbers: Tensor, forward: object) -> None:
        """Adds numbers of shape [..., heads, queries]. `name` is such as `attention:softmax.entropy`."""
        by_head = numbers.detach().movedim(-2, 0)[:MOST_HEADS]
        sums = self._by_forward.setdefault(forward, {}).setdefault(name, Sums(len(by_head)))
        if by_head.numel() and sums.channels == len(by_head) and len(sums.pieces) < MOST_CALLS:
            with torch.no_grad(), torch.autocast(numbers.device.type, enabled=False):
                reduce_channels(by_head.reshape(len(by_head), -1), sums, with_buckets=False)

    def drop(self, forwards: Set[object]) -> None:
        """Removes what was added in these forwards."""
        for forward in forwards:
            self._by_forward.pop(forward, None)

    def forget(self) -> None:
        self._by_forward: dict[object, dict[str, Sums]] = {}

    def log(self, recorder: Recorder) -> None:
        """Puts the rows into the copy of the step, and forgets them."""
        attached: dict[tuple[str, int], list[tuple[Attached, int, bool]]] = {}
        for by_name in self._by_forward.values():
            for name, sums in by_name.items():
                pieces = attached.setdefault((name, sums.channels), [])
                pieces += [(recorder.attach(piece.numbers), piece.size, piece.finished) for piece in sums.pieces]
        self.forget()
        if attached:
            every = [(name, heads, pieces) for (name, heads), pieces in attached.items() if pieces]
            recorder.part(partial(self._add_to, every))

    def _add_to(self, every: list[_Attached], table: StepTable, read: Read) -> StepTable:
        """In the background, after the copy: merges the calls of each head."""
        try:
            sites, values = [], []
            for name, heads, pieces in every:
                rows = [rows_of(read(what).astype(np.float64), size, finished) for what, size, finished in pieces]
                sites += [Site(name, CHANNEL + HEADS, f"[head {i}]") for i in range(heads)]
                values.append(stats.merge(np.concatenate(rows), np.tile(np.arange(heads), len(rows)), heads))
            return table.with_rows(sites, np.concatenate(values))
        except Exception as problem:  # it must not cost the logged step
            self._report.error("numbers of attention heads", problem)
            return table
