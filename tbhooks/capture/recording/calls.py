"""Which site the records of the open step belong to, as a table of integers.

Hooks in C write to it (eager_hooks.c). Thousands of tuples instead would have Python's garbage collector run several
times in every logged step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence, Set

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int, int]
"""The records of one reduced tensor: buffer number, first record, one past the last."""
CallTable = NDArray[np.int64]
"""[calls, FIELDS] The number of a site, and its span, in the order in which they were recorded."""

FIELDS = 4
FEWEST = 256
# Positions in `header`, as in eager_hooks.c.
USED, ROOM, ADDRESS = range(3)


def empty_table() -> CallTable:
    """The table of a step without calls."""
    return np.zeros((0, FIELDS), np.int64)


class Calls:
    """The calls of the open step, each with its owner: the forward or backward that it belongs to, or None."""

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.header = array("q", [0, 0, 0])
        """How many calls there are, how many fit, and the address of the first. Its own address never changes."""
        self._table = array("q")
        self._grow(FEWEST)

    def __len__(self) -> int:
        return self.header[USED]

    def __iter__(self) -> Iterator[tuple[int, Span]]:
        return ((site, (number, start, stop)) for site, number, start, stop in self.table().tolist())

    def append(self, site: int, span: Span, owner: object = None) -> None:
        used = self.header[USED]
        if used >= self.header[ROOM]:
            self._grow(used)
        table, at = self._table, FIELDS * used
        table[at] = site
        table[at + 1], table[at + 2], table[at + 3] = span
        self.owners.append(owner)
        self.header[USED] = used + 1

    def extend(self, sites: Sequence[int], number: int, first: int) -> None:
        """Adds one call for each site, whose records follow each other from `first` on."""
        used, more = self.header[USED], len(sites)
        if used + more > self.header[ROOM]:
            self._grow(max(used, more))
        added = self._rows()[used : used + more]
        added[:, 0], added[:, 1] = sites, number
        added[:, 2] = np.arange(first, first + more)
        added[:, 3] = added[:, 2] + 1
        self.owners += [None] * more
        self.header[USED] = used + more

    def clear(self) -> None:
        self.owners.clear()
        self.header[USED] = 0

    def drop(self, owners: Set[object]) -> bool:
        """Removes the calls of these owners. Returns whether there were any."""
        kept = [i for i, owner in enumerate(self.owners) if owner is None or owner not in owners]
        if len(kept) == len(self.owners):
            return False
        self._rows()[: len(kept)] = self._rows()[kept]
        self.owners[:] = [self.owners[i] for i in kept]
        self.header[USED] = len(kept)
        return True

    def table(self) -> CallTable:
        """A copy of what was recorded so far."""
        return self._rows()[: self.header[USED]].copy()

    def _rows(self) -> CallTable:
        return np.frombuffer(self._table, np.int64).reshape(-1, FIELDS)

    def _grow(self, more: int) -> None:
        self._table = self._table + array("q", bytes(8 * FIELDS * more))
        self.header[ROOM], self.header[ADDRESS] = len(self._table) // FIELDS, self._table.buffer_info()[0]
