"""What failed in a logged step is tried again on the next one, and given up after several in a row."""

from __future__ import annotations

from typing import Generic, TypeVar

# What has failed on this many logged steps in a row is no longer tried.
MOST_FAILURES = 3
GIVEN_UP = f"; given up after {MOST_FAILURES} logged steps in a row"
Reader = TypeVar("Reader")


class Retries(Generic[Reader]):
    """The readers that have failed, each with the number of logged steps in a row in which it did.

    While nothing has failed it is empty, and false.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Reader, int] = {}
        self._now: set[Reader] = set()
        self._worked: set[Reader] = set()

    def __bool__(self) -> bool:
        return bool(self._in_a_row)

    def failed(self, reader: Reader) -> str:
        """It has failed in this step. Returns what a message adds to the reason: whether it is given up."""
        if reader not in self._now:
            self._now.add(reader)
            self._in_a_row[reader] = self._in_a_row.get(reader, 0) + 1
        return GIVEN_UP if self.is_given_up(reader) else ""

    def worked(self, reader: Reader) -> None:
        """It has worked in this step."""
        if reader in self._in_a_row:
            self._worked.add(reader)

    def may_try(self, reader: Reader) -> bool:
        """Whether it has neither failed in this step nor been given up."""
        return reader not in self._now and not self.is_given_up(reader)

    def is_given_up(self, reader: Reader) -> bool:
        return self._in_a_row.get(reader, 0) >= MOST_FAILURES

    def next_step(self) -> list[Reader]:
        """The step has ended. Returns what works again: it has not failed in this step, and is forgotten here."""
        recovered = [reader for reader in self._in_a_row if reader in self._worked - self._now]
        for reader in recovered:
            del self._in_a_row[reader]
        self._now, self._worked = set(), set()
        return recovered
