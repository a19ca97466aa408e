"""Leaves the step counter of a tracker's run as the user knows it.

Trackers number the rows of a script that logs without `step=` by a counter, and a row that is logged with `step=` moves
it. Frames have steps of their own, which must not renumber what the script logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unmoved(owner: Any, counter: str, step: int) -> Iterator[None]:
    """Sets this attribute back to what it was, unless something else has moved it beyond `step` meanwhile.

    Does nothing if there is no such attribute, as it may be in other versions of the tracker.
    """
    before = getattr(owner, counter, None)
    yield
    if isinstance(before, int) and before < getattr(owner, counter) <= step:
        setattr(owner, counter, before)
