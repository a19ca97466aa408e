"""Numbers the user logs: each goes to the step it belongs to, the open one or the one that has just ended.

Device scalars stay on their device until a step's one copy; those that come after it ride in the next one. Knows when
a step has ended, and when it is too late for it, from the loop alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from tbhooks.averages import Averages
from tbhooks.buffer import Recorder
from tbhooks.pending import Pending
from tbhooks.probe import Probe
from tbhooks.progress import Progress
from tbhooks.ranks import Place


@dataclass
class Ended:
    """The step that ended last: numbers may still be logged to it until something of the next one is seen."""

    label: int
    logged: bool
    tags: set[str]


class Scalars:
    """What was logged to the step that ended last, and to the open one."""

    def __init__(self, recorder: Recorder, probe: Probe, place: Place, submit: Callable[[Pending], None]) -> None:
        self.ended: Ended | None = None
        self.waiting = False
        """Whether the copy of the step that has ended waits for late ones."""
        self.packed: Pending | None = None
        """The step that has ended: copied, and not yet handed over."""
        self.was_skipped = False
        """An iteration made no step: what is logged until the next forward is of none."""
        self.averages: Averages | None = None
        """Where numbers go if `log_every` was asked for."""
        self.progress: Progress | None = None
        """What else written steps tell, if it was asked for."""
        self._recorder = recorder
        self._probe = probe
        self._rank, self._has_team = place.rank, place.team is not None
        self._submit = submit
        # Tags that are logged after their step has ended: ever, to the last logged step, and to the one before,
        # which the last one waits for.
        self._late: set[str] = set()
        self._late_now: set[str] = set()
        self._awaited: set[str] = set()
        # Device scalars that came after the copy: they ride in the next one, under their own step.
        self._held: dict[tuple[int, str], Tensor | float] = {}

    def log(self, tag: str, value: Tensor | float) -> None:
        if self.averages is not None:
            self.averages.add(tag, value)
            return
        if self.was_skipped and not self._probe.called:
            return
        self.was_skipped = False
        ended = self.still_open
        if ended is not None and ended.logged and tag not in ended.tags:
            ended.tags.add(tag)
            self._late.add(tag)
            self._late_now.add(tag)
            self.log_late(ended.label, tag, value)
        elif self._probe.seen is not None and (ended is None or tag not in self._late):
            # A late one before the open step has begun is of the unlogged step before it.
            self._recorder.scalar(tag, value)

    def log_late(self, label: int, tag: str, value: Tensor | float) -> None:
        """To a step that has ended, as its copy may have been made already."""
        if self.waiting:
            self._recorder.scalar(tag, value)
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self._held[label, tag] = value.detach().clone()
        elif self.packed is not None:
            self.packed = replace(self.packed, scalars={**self.packed.scalars, tag: _number(value)})
        elif self._has_team:
            self._held[label, tag] = _number(value)
        else:
            self._submit(self._recorder.scalars_alone(label, self._rank, {tag: _number(value)}))

    @property
    def still_open(self) -> Ended | None:
        """The step that ended last, as long as nothing of the next one was seen."""
        return None if self._probe.called else self.ended

    @property
    def has_all(self) -> bool:
        """Whether everything has come that a step waits for with its copy; of means nobody knows."""
        return self.waiting and self.averages is None and self._awaited <= self._recorder.scalar_tags

    def _writes(self, step: int) -> bool:
        """Whether anything is written of the open step: it is logged, or means are due."""
        return self._probe.seen is not None or (self.averages is not None and self.averages.writes(step))

    def before_optimizer(self, optimizer: Optimizer, step: int) -> None:
        if self.progress is not None and self._writes(step):
            self.progress.before_optimizer(optimizer)

    def step_ends(self, label: int, step: int) -> Ended:
        """The open step, by the label it gets and by its own number."""
        self.was_skipped = False
        if self.averages is not None:
            self.averages.step_ends(step)
        if self.progress is not None and self._writes(step):
            self._log_progress(self.progress.numbers(step))
        self.ended = Ended(label, self._probe.seen is not None, set(self._recorder.scalar_tags))
        return self.ended

    def _log_progress(self, numbers: dict[str, Tensor | float]) -> None:
        if self._probe.seen is None and self.averages is not None:
            self.averages.extra = numbers
            return
        for tag, number in numbers.items():
            self._recorder.scalar(tag, number)

    def awaits_more(self, ended: Ended) -> bool:
        """Whether a logged step that has just ended is to wait; the others of a team are not kept waiting."""
        self._awaited, self._late_now = self._late_now, set()
        more_may_come = self.averages is not None and self.averages.is_due
        return not self._has_team and (more_may_come or not self._awaited <= ended.tags)

    def relabel(self, ended: Ended, label: int) -> None:
        ended.label = label
        self.packed = replace(self.packed, step=label) if self.packed is not None else None

    @property
    def holds_some(self) -> bool:
        return bool(self._held)

    def ride(self) -> None:
        """Everything that waits for a copy goes along with the one that is about to be made."""
        for (step, tag), value in self._held.items():
            self._recorder.scalar(tag, value, earlier_step=step)
        self._held = {}
        if self.averages is not None:
            self.averages.ride(self._recorder)

    def hand_over(self) -> None:
        """The step that has ended, once it is copied."""
        if self.packed is not None:
            # Handed over before it is forgotten: a signal in between may write it twice, but never lose it.
            self._submit(self.packed)
            self.packed = None

    def write_averages(self, label: int) -> None:
        """Nothing more can belong to the step that has ended: what is due of it, and was not in its copy."""
        if self.averages is None or not self.averages.is_due:
            return
        means = self.averages.take()
        if self.ended is not None and self.ended.logged:
            for tag, mean in means.items():
                self.log_late(label, tag, mean)
        else:
            self.averages.write(label, means)


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
