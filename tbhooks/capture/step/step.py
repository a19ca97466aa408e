"""One training step and its states. Read this first to understand the capture session.

The clock (clock.py) decides when a step ends. There is always one open step, and at most one that has ended and is not
submitted yet. A step has these states, in this order:

    OPEN        The step is running. If it is a logged one, hooks write to the recorder.
    CLOSED      The step has ended, and hooks write nothing more. Its records are still in the recorder.
    PACKED      The one copy to the host has been started. The recorder is free for the next step.
    SUBMITTED   The background thread has the step.
    ABANDONED   There is nothing to write: the step is not a logged one, or is empty, or another rank writes it.

A packed step is held back until something of the next step happens (a training forward, an optimizer's step, a step
that a GradScaler skips), or until a flush, a pause or close(). Until then the user may log scalars to it, after
`optimizer.step()`, or give it another label. Scalars on the host are added to the packed step. Scalars on a device need
a copy: if the user has logged such a scalar after the end of a step before, or if running means are due, the step stays
CLOSED until the next call of `Watch.log` (for means, as long as it is held back), so that they are in its one copy.

The next step may use the recorder only after this one is packed. So no order of events can lose a step or mix its
records with those of another one. If ranks are merged, steps are not held back, because other ranks wait for them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from tbhooks.capture.recording.packed_step import PackedStep, TablePart


class State(Enum):
    """The states of a step; the module's docstring explains them."""

    OPEN = "open"
    CLOSED = "closed"
    PACKED = "packed"
    SUBMITTED = "submitted"
    ABANDONED = "abandoned"


@dataclass(eq=False)
class Step:
    """One training step of a watch."""

    number: int
    """How many steps the clock had counted when this one began."""
    is_logged: bool = False
    is_extra: bool = False
    """Whether it is logged only because of a burst. Other ranks do not log it."""
    state: State = State.OPEN
    label: int = -1
    """The step number that is written; known when the step has ended."""
    tags: set[str] = field(default_factory=set)
    """The tags of its scalars. Another value of the same tag belongs to the next step."""
    early: dict[str, Tensor | float] = field(default_factory=dict)
    """Scalars that were logged to it while the step before it still used the recorder."""
    early_parts: list[TablePart] = field(default_factory=list)
    """Samples that were given to it while the step before it still used the recorder."""
    has_samples: bool = False
    """Whether samples were given to it."""
    was_skipped: bool = False
    """A GradScaler has skipped the optimizer: until the next forward, scalars belong to no step."""
    takes_late_scalars: bool = True
    """The step has ended, and nothing of the next one has happened: what is logged now may still belong to it."""
    closed_at: float = 0.0
    _packed: PackedStep | None = None

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def is_packed(self) -> bool:
        return self.state is State.PACKED

    def close(self, label: int, tags: frozenset[str]) -> None:
        """The step has ended, with the scalars that are in the recorder."""
        assert self.state is State.OPEN
        self.label, self.closed_at = label, time.time()
        self.tags |= tags
        self.state = State.CLOSED if self.is_logged else State.ABANDONED

    def abandon(self) -> None:
        """There is nothing to write."""
        assert self.is_closed
        self.state = State.ABANDONED

    def pack(self, packed: PackedStep) -> None:
        """The copy to the host has been started."""
        assert self.is_closed
        self._packed, self.state = replace(packed, time=self.closed_at), State.PACKED

    def add(self, tag: str, number: float) -> None:
        """Adds a scalar of the host, after the copy was started."""
        assert self._packed is not None
        self._packed = replace(self._packed, scalars={**self._packed.scalars, tag: number})

    def add_part(self, part: TablePart) -> None:
        """Adds samples that were given after the copy was started."""
        assert self._packed is not None
        self._packed = replace(self._packed, parts=[*self._packed.parts, part])

    def relabel(self, label: int) -> None:
        self.label = label
        if self._packed is not None:
            self._packed = replace(self._packed, step=label)

    @property
    def packed(self) -> PackedStep:
        assert self._packed is not None
        return self._packed

    def submitted(self) -> None:
        """The background thread has the step now."""
        assert self.is_packed
        self._packed, self.state = None, State.SUBMITTED
