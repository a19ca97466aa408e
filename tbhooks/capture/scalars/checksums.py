"""The checksums of one watch (`Watch.checksums`): of the bits of every tensor that a logged step records.

The sums stay on the device until the one copy of the step. A failure switches checksums off, and costs no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tbhooks.capture import sharded_tensors
from tbhooks.capture.autograd import without_dispatch_modes
from tbhooks.capture.recording.calls import Span
from tbhooks.capture.recording.packed_step import Attached, Read, TablePart
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.data import checksums
from tbhooks.data.frame import Site
from tbhooks.data.self_report import Report
from tbhooks.reduction import checksum

Attach = Callable[[Tensor], Attached]


@dataclass(frozen=True, slots=True)
class _Sums:
    """The sums of one tensor, where they will be after the copy; the number of its elements, and of its type."""

    attached: Attached
    count: int
    dtype: int

    def checksum(self, read: Read) -> int:
        words, squares = map(int, read(self.attached))
        return checksums.combine(words, squares, self.count)


class StepChecksums:
    """The checksums of the open step. The recorder of the step has it, and copies it with its records."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._is_off = False
        self._sums: dict[Span, _Sums] = {}

    def read(self, span: Span, tensor: Tensor, attach: Attach) -> None:
        """Adds up the bits of a tensor whose records are in `span`. Raises nothing."""
        if self._is_off or span[1] == span[2]:
            return
        try:
            local = sharded_tensors.local_tensor(tensor)
            with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
                words = None if local is None else checksum.bits_of(local)
                if local is not None and words is not None:
                    sums = attach(checksum.sums(words))
                    self._sums[span] = _Sums(sums, words.numel(), checksum.dtype_of(local))
        except Exception as problem:
            self._is_off = True
            self._report.error("checksums are switched off", problem)

    def forget(self) -> None:
        self._sums = {}

    def part(self, sites: Sequence[Site], calls: Sequence[tuple[int, Span]]) -> TablePart | None:
        """What adds the checksums of these calls to the table of the step."""
        sums, self._sums = self._sums, {}
        return partial(self._build, sums, sites, calls) if sums else None

    def _build(
        self, sums: dict[Span, _Sums], sites: Sequence[Site], calls: Sequence[tuple[int, Span]], table: StepTable,
        read: Read,
    ) -> StepTable:  # fmt: skip
        """In the background, after the copy."""
        try:
            known: dict[Span, tuple[int, int]] = {span: (of.checksum(read), of.dtype) for span, of in sums.items()}
            made: dict[Site, tuple[int, int]] = {}
            unknown = set()
            for number, span in calls:
                if span not in known:
                    unknown.add(sites[number])
                else:
                    total, dtype = made.get(sites[number], (0, 0))
                    made[sites[number]] = (total + known[span][0]) % 2**64, max(dtype, known[span][1])
            rows: list[Any] = [(0, 0) if site in unknown else made.get(site, (0, 0)) for site in table.sites]
            return replace(table, checksums=checksums.of_rows(rows))
        except Exception as problem:  # it must not cost the logged step
            self._report.error("checksums", problem)
            return table
