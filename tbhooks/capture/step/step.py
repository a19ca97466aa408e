"""One training step, from its end to the pump: read this first to know where in a step a watch is.

The clock (clock.py) says when a step ends. What is read until then, by hooks and around the optimizer, lies in the
recorder (buffer.py): that is the open step. When it ends it becomes a `Step`, which goes through these states in order:

    CLOSED      nothing more is read into it. Its records still lie in the recorder, because values are expected
                that are logged after the optimizer's step; they go into the same copy.
    PACKED      its one copy to the host has been started, and the recorder is free for the next step.
    SUBMITTED   the pump has it.
    ABANDONED   there was nothing to write, or it is another rank's.

A step that is not logged is abandoned as soon as it ends. At most one step is CLOSED or PACKED: it is submitted, under
its own label, when something of the next step is seen (a training forward, an optimizer's step, a skipped one), on a
flush, on a pause and on close. Only then may anything be read into the recorder again. So no event between two steps
can lose a step or give its records to another one.

Until something of the next step is seen, numbers may still be logged to a step, whatever its state (`takes_more`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from tbhooks.capture.packed_step import PackedStep


class State(Enum):
    """Where a step that has ended is; the module's docstring says what follows what."""

    CLOSED = "closed"
    PACKED = "packed"
    SUBMITTED = "submitted"
    ABANDONED = "abandoned"


@dataclass
class Step:
    """A step that has ended."""

    label: int
    is_logged: bool
    tags: set[str] = field(default_factory=set)
    """The numbers that were logged to it."""
    takes_more: bool = True
    """Whether nothing of the next step has been seen, so that a number that is logged now may belong to this one."""
    _pending: PackedStep | None = None
    _state: State = State.CLOSED

    def __post_init__(self) -> None:
        if not self.is_logged:
            self._state = State.ABANDONED

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_closed(self) -> bool:
        return self._state is State.CLOSED

    @property
    def is_packed(self) -> bool:
        return self._state is State.PACKED

    def abandon(self) -> None:
        """There is nothing to write of it."""
        assert self.is_closed
        self._state = State.ABANDONED

    def pack(self, pending: PackedStep) -> None:
        """Its copy has been started."""
        assert self.is_closed
        self._pending, self._state = pending, State.PACKED

    def add(self, tag: str, number: float) -> None:
        """A number on the host, after the copy was started."""
        assert self._pending is not None
        self._pending = replace(self._pending, scalars={**self._pending.scalars, tag: number})

    def relabel(self, label: int) -> None:
        self.label = label
        if self._pending is not None:
            self._pending = replace(self._pending, step=label)

    @property
    def pending(self) -> PackedStep:
        assert self._pending is not None
        return self._pending

    def submitted(self) -> None:
        """The pump has it now."""
        assert self.is_packed
        self._pending, self._state = None, State.SUBMITTED
