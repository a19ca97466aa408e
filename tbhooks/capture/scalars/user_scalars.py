"""Numbers the user logs: each goes to the step it belongs to, the open one or the one that has just ended.

Device scalars stay on their device until a step's one copy; those that come after it ride in the next one. Knows when
a step has ended, and when it is too late for it, from the loop alone; step.py says which states it goes through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import in_backward
from tbhooks.capture.dynamo import dynamo_skip
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.packed_step import PackedStep
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.scalars.running_means import Averages
from tbhooks.capture.scalars.training_metrics import Progress
from tbhooks.capture.step.step import Step


class NextForward:
    """Calls once when the next training forward begins, where no hooks are on that would tell.

    After a logged step that is followed by an unlogged one, a number that is logged before the next forward belongs to
    the logged step, and one that is logged after it does not. The one hook this takes comes off with that forward.
    Inside a compiled model no hook can be added: there the next optimizer's step tells.
    """

    def __init__(self, model: weakref.ref[nn.Module], observer: Observer, told: Callable[[], None]) -> None:
        self._model, self._observer = model, observer
        self._told = told
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        if self._handle is None and not self._observer.gate.was_compiled:
            self._handle = self._observer.watch_root(self._begins, in_graph=False)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @dynamo_skip
    def _begins(self) -> None:
        model = self._model()
        if model is not None and self._observer.is_training_pass(model) and not in_backward():
            self.stop()
            self._told()


class Scalars:
    """What was logged to the step that ended last, and to the open one."""

    def __init__(
        self, recorder: Recorder, observer: Observer, model: weakref.ref[nn.Module], place: RankContext,
        submit: Callable[[PackedStep], None],
    ) -> None:  # fmt: skip
        self.last: Step | None = None
        """The step that ended last."""
        self.is_used = False
        """Whether the user has ever logged anything."""
        self.was_skipped = False
        """An iteration made no step: what is logged until the next forward is of none."""
        self.next_forward = NextForward(model, observer, self.no_more)
        self.averages: Averages | None = None
        """Where numbers go if `log_every` was asked for."""
        self.progress: Progress | None = None
        """What else written steps tell, if it was asked for."""
        self._recorder = recorder
        self._observer = observer
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
        self.is_used = True
        if self.averages is not None:
            self.averages.add(tag, value)
            return
        if self.was_skipped and not self._observer.called:
            return
        self.was_skipped = False
        ended = self.still_open
        if ended is not None and ended.is_logged and tag not in ended.tags:
            ended.tags.add(tag)
            self._late.add(tag)
            self._late_now.add(tag)
            self.log_late(ended, tag, value)
        elif self._observer.seen is not None and (ended is None or tag not in self._late):
            # A late one before the open step has begun is of the unlogged step before it.
            self._recorder.scalar(tag, value)

    def log_late(self, ended: Step, tag: str, value: Tensor | float) -> None:
        """To a logged step that has ended, as its copy may have been made already."""
        if ended.is_closed:
            self._recorder.scalar(tag, value)
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self._held[ended.label, tag] = value.detach().clone()
        elif ended.is_packed:
            ended.add(tag, _number(value))
        elif self._has_team:
            self._held[ended.label, tag] = _number(value)
        else:
            self._submit(self._recorder.scalars_alone(ended.label, self._rank, {tag: _number(value)}))

    @property
    def still_open(self) -> Step | None:
        """The step that ended last, as long as nothing of the next one was seen."""
        return self.last if self.last is not None and self.last.takes_more and not self._observer.called else None

    def no_more(self) -> None:
        """Something of the next step was seen."""
        self.next_forward.stop()
        if self.last is not None:
            self.last.takes_more = False

    def watch_next_forward(self, is_paused: bool) -> None:
        """Whoever logs numbers may log some after a step has ended, and must not log those of the next one to it."""
        last = self.still_open
        if self.is_used and last is not None and last.is_logged and not is_paused:
            self.next_forward.watch()

    @property
    def has_all(self) -> bool:
        """Whether everything has come that a step waits for with its copy; of means nobody knows."""
        waits = self.last is not None and self.last.is_closed
        return waits and self.averages is None and self._awaited <= self._recorder.scalar_tags

    def _writes(self, step: int) -> bool:
        """Whether anything is written of the open step: it is logged, or means are due."""
        return self._observer.seen is not None or (self.averages is not None and self.averages.writes(step))

    def before_optimizer(self, optimizer: Optimizer, step: int) -> None:
        if self.progress is not None and self._writes(step):
            self.progress.before_optimizer(optimizer)

    def step_ends(self, label: int, step: int) -> Step:
        """The open step, by the label it gets and by its own number."""
        self.was_skipped = False
        if self.averages is not None:
            self.averages.step_ends(step)
        if self.progress is not None and self._writes(step):
            self._log_progress(self.progress.numbers(step))
        self.last = Step(label, self._observer.seen is not None, set(self._recorder.scalar_tags))
        return self.last

    def _log_progress(self, numbers: dict[str, Tensor | float]) -> None:
        if self._observer.seen is None and self.averages is not None:
            self.averages.extra = numbers
            return
        for tag, number in numbers.items():
            self._recorder.scalar(tag, number)

    def awaits_more(self, ended: Step) -> bool:
        """Whether a logged step that has just ended is to wait; the others of a team are not kept waiting."""
        self._awaited, self._late_now = self._late_now, set()
        more_may_come = self.averages is not None and self.averages.is_due
        return not self._has_team and (more_may_come or not self._awaited <= ended.tags)

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
        if self.last is not None and self.last.is_packed:
            # Handed over before it is forgotten: a signal in between may write it twice, but never lose it.
            self._submit(self.last.pending)
            self.last.submitted()

    def write_averages(self, label: int) -> None:
        """Nothing more can belong to the step that has ended: what is due of it, and was not in its copy."""
        if self.averages is None or not self.averages.is_due:
            return
        means = self.averages.take()
        if self.last is not None and self.last.is_logged and self.last.label == label:
            for tag, mean in means.items():
                self.log_late(self.last, tag, mean)
        else:
            self.averages.write(label, means)


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
