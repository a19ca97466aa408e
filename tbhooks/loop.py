"""One logged step from its first hook to the copy: wires clock, probe, parameters and recorder together.

It lives in the training thread, hands finished steps to `submit` and never waits for anything.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks import scaling, triton_rows
from tbhooks.autograd import unrecorded
from tbhooks.buffer import Recorder
from tbhooks.clock import Clock
from tbhooks.evaluation import Evaluation
from tbhooks.parameters import ParameterReader
from tbhooks.pending import Pending
from tbhooks.probe import Probe
from tbhooks.ranks import Place
from tbhooks.replay import Replay
from tbhooks.report import Report
from tbhooks.scaling import ScalerReader
from tbhooks.schedule import Schedule
from tbhooks.seen import BLIND
from tbhooks.select import Selector, unwrap
from tbhooks.tripwire import Tripwire


@dataclass
class Ended:
    """The step that ended last: numbers may still be logged to it until something of the next one is seen."""

    label: int
    logged: bool
    tags: set[str]


class Loop:
    """Listens to the clock; reads logged steps; hands each over once nothing more can belong to it."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, mode: str,
        place: Place, submit: Callable[[Pending], None], report: Report,
    ) -> None:  # fmt: skip
        self.recorder = Recorder(kinds)
        self.probe = Probe(model, selector, self.recorder, report)
        self.parameters = ParameterReader(model, selector, self.recorder, report)
        self.clock = Clock(mode, unwrap(model), self, report)
        self.scaler = ScalerReader(self.probe, self.clock, self.recorder, report)
        self.probe.backward_begins = self.parameters.backward_begins
        self.probe.backward_ended = self.parameters.backward_ended
        self.scaler.unscaled = self.parameters.unscaled
        self.scaler.step_skipped = self._step_skipped
        self.tripwire = Tripwire()
        self.raises: Callable[[], None] | None = None
        """Called where an exception reaches the user's loop, for one the user asked for."""
        self.logged = 0
        self._kinds = kinds
        self._evaluation: Evaluation | None = None
        self._replay: Replay | None = None
        self._last_label = 0
        # An iteration made no step: what is logged until the next forward is of none.
        self._was_skipped = False
        self._model = weakref.ref(unwrap(model))
        self._schedule = schedule
        self._place, self._rank, self._team = place, place.rank, place.team
        self.clock.count = place.first_step
        self._submit = submit
        self._report = report
        self._thread = threading.get_ident()
        self._pauses = 0
        self._ended: Ended | None = None
        # Its numbers: still waiting for late scalars before the copy, or copied and not yet handed over.
        self._waiting = False
        self._packed: Pending | None = None
        # Tags that are logged after their step has ended: ever, to the last logged step, and to the one before,
        # which the last one waits for.
        self._late: set[str] = set()
        self._late_now: set[str] = set()
        self._awaited: set[str] = set()
        # Device scalars that came after the copy: they ride in the next one, under their own step.
        self._held: dict[tuple[int, str], Tensor | float] = {}

    def start(self) -> None:
        scaling.listen(self.scaler)
        self.clock.start()
        self._begin_if_due()

    def stop(self) -> None:
        """Ends everything and hands over what there is, a step cut short too."""
        with self._report.guarded("closing"):
            self._finish_step()
            # Other ranks have none that is cut short; where forwards count, it is whole.
            awaited = self._team is not None and self.clock.mode != "forward"
            if self.probe.seen is not None and self.recorder.calls and not awaited:
                if self.clock.mode != "optimizer":  # no optimizer will come to read them at
                    self.parameters.rest()
                self.probe.onlookers.end(self.recorder)
                self._pack(self.clock.count)
                if self.clock.mode == "forward":
                    self._last_label = self.clock.count
            self.abandon()
            self._finish_step()
            self._hand_over_held()
            self._finish_evaluation()
        self.forget_everyone()

    def forget_everyone(self) -> None:
        """Nobody calls any more: no optimizer, no scaler, no forward."""
        self._stop_asides()
        scaling.ignore(self.scaler)
        self.clock.stop()
        self.parameters.release()

    def abandon(self) -> None:
        """Forgets the open step and leaves no hook on the model."""
        self.probe.abandon()
        self.parameters.forget()

    def settle(self) -> None:
        """Hands over everything that has ended, for a reader who waits. Only the training thread can."""
        if threading.get_ident() == self._thread:
            with self._report.guarded("handing over a step"):
                self._finish_step()
                if self.probe.seen is None and self._team is None:
                    self._hand_over_held()
                self._finish_evaluation()

    def pause(self) -> None:
        """Takes every hook off the model but those in compiled code, which then do nothing; pauses may be nested."""
        self._pauses += 1
        self.probe.detach()
        self.clock.leave_forwards()
        self._stop_asides()

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self.clock.watch_forwards()
            self._start_asides()
            if self.probe.seen is not None:
                self.probe.attach()
            elif self.probe.gate.was_compiled:
                self.probe.placement.put_on()

    def read_evaluations(self) -> None:
        """From now on evaluation passes are read, apart from training."""
        if self._evaluation is None:
            with_buckets = self._schedule.histograms is not False
            self._evaluation = Evaluation(
                self._model, self.probe, self._kinds, with_buckets, self._hand_over_evaluation, self._report
            )
            self._evaluation.start()

    def _hand_over_evaluation(self, recorder: Recorder) -> None:
        """As of the training step that ended last, and after it."""
        self._finish_step()
        self._submit(recorder.pack(self._last_label, self._rank))

    def replay_when(self, sick: Callable[[int, Replay], None]) -> None:
        """From now on the gradients of every step are looked at, and `sick` is called if they are not finite."""
        if self._replay is None:
            self._replay = Replay(self._model, self.probe, sick, self._report)
            self._replay.start()

    def _start_asides(self) -> None:
        for aside in (self._evaluation, self._replay):
            if aside is not None:
                aside.start()

    def _stop_asides(self) -> None:
        for aside in (self._evaluation, self._replay):
            if aside is not None:
                aside.stop()

    def _finish_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.finish()

    # Numbers the user logs.

    def log(self, values: dict[str, Tensor | float]) -> None:
        """Each goes to the step it belongs to: the open one, or the one that has just ended."""
        with self._report.guarded("log"):
            for tag, value in values.items():
                self._log_one(tag, value)
            if self._waiting and self._awaited <= self.recorder.scalar_tags:
                self._pack_waiting()

    def _log_one(self, tag: str, value: Tensor | float) -> None:
        if self._was_skipped and not self.probe.called:
            return
        self._was_skipped = False
        ended = self._still_open_to_scalars()
        if ended is not None and ended.logged and tag not in ended.tags:
            ended.tags.add(tag)
            self._late.add(tag)
            self._late_now.add(tag)
            self._log_late(ended.label, tag, value)
        elif self.probe.seen is not None and (ended is None or tag not in self._late):
            # A late one before the open step has begun is of the unlogged step before it.
            self.recorder.scalar(tag, value)

    def _log_late(self, label: int, tag: str, value: Tensor | float) -> None:
        if self._waiting:
            self.recorder.scalar(tag, value)
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self._held[label, tag] = value.detach().clone()
        elif self._packed is not None:
            self._packed = replace(self._packed, scalars={**self._packed.scalars, tag: _number(value)})
        elif self._team is not None:
            self._held[label, tag] = _number(value)
        else:
            self._submit(self.recorder.scalars_alone(label, self._rank, {tag: _number(value)}))

    def _still_open_to_scalars(self) -> Ended | None:
        return None if self.probe.called else self._ended

    def step(self, label: int | None) -> None:
        """The user ends the step; one that the clock has just ended gets its label."""
        with self._report.guarded("step"):
            ended = self._still_open_to_scalars() if self.clock.mode != "manual" else None
            self.clock.manual()
            if ended is None:
                self._step_ended(self.clock.count if label is None else label)
                self.clock.count += 1
            elif label is not None:
                ended.label = self._last_label = label
                self._packed = replace(self._packed, step=label) if self._packed is not None else None

    # What the clock calls.

    def owned(self, optimizer: Optimizer) -> frozenset[int]:
        return self.parameters.owned(optimizer)

    def parameters_now(self) -> frozenset[int]:
        return self.parameters.now()

    def admits(self, model: nn.Module) -> bool:
        return self.probe.admits(model)

    def gradients_seen(self) -> bool:
        return self.probe.gradients_seen

    def watch_root(self, told: Callable[[], None], in_graph: bool) -> RemovableHandle | None:
        return self.probe.watch_root(told, in_graph)

    def hooks_are_compiled(self) -> bool:
        return self.probe.gate.was_compiled

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._finish_step()
        self._ended = None
        self.scaler.before_optimizer(optimizer)
        self.tripwire.look(optimizer, self.clock.count)
        if self._replay is not None:
            self._replay.look(optimizer, self.clock.count)
        if self.probe.seen is not None and not self._pauses:
            with unrecorded():
                self.scaler.log()
                self.tripwire.log(self.recorder)
                self.parameters.before(optimizer, has_closure)

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self.probe.seen is not None and not self._pauses:
            with unrecorded():
                self.parameters.after(optimizer, has_closure)

    def _step_skipped(self, optimizer: Optimizer) -> None:
        """A scaler kept it from stepping. If nobody stepped, what was read is not of the step that will be."""
        if self.clock.mode in ("manual", "forward"):  # then something else ends the step, and it did happen
            if self.probe.seen is not None:
                self.scaler.log()
        elif self.clock.kept(optimizer):
            self._was_skipped, self._ended = True, None
            self.probe.start_over()
            self.parameters.forget()

    def raise_if_asked(self) -> None:
        if self.raises is not None:
            self.raises()

    def step_ended(self) -> None:
        self._step_ended(self.clock.count)

    def _step_ended(self, label: int) -> None:
        self._thread = threading.get_ident()
        if self.clock.mode != "forward":  # there a step ends when the next one begins
            self._finish_evaluation()
        self._last_label, self._was_skipped = label, False
        if self._replay is not None:
            self._replay.forget()
        self._finish_step()
        next_is_logged = self._logs(self.clock.count + 1)
        self._ended = Ended(label, self.probe.seen is not None, set(self.recorder.scalar_tags))
        if next_is_logged:
            self.probe.next_forward = self._finish_step
        if self._ended.logged:
            self._warn_if_blind(label)
            self._end_reading(keep_hooks=next_is_logged and not self._pauses)
            self._awaited, self._late_now = self._late_now, set()
            if not self._awaited <= self._ended.tags and self._team is None:  # other ranks are not kept waiting
                self._waiting = True
                return
            self._pack(label)
            if self._others_wait:
                self._finish_step()
        if next_is_logged:
            self._begin()
        if self.clock.mode == "forward" and self.probe.gate.was_compiled:
            # The forward that ended the step is under way, in the graph it has chosen; the next one chooses now.
            self.probe.gate.open = self._logs(self.clock.count + 2)

    @property
    def _others_wait(self) -> bool:
        """Ranks wait for the step, and may be waited for before the next forward. The first may yet get a label."""
        return self._team is not None and (self.clock.mode == "manual" or self.logged > 1)

    def _finish_step(self) -> None:
        """Something of the next step is seen: nothing more can belong to the one that has ended."""
        if self._waiting:
            self._pack_waiting()
        if self._packed is not None:
            # Handed over before it is forgotten: a signal in between may write it twice, but never lose it.
            self._submit(self._packed)
            self._packed = None

    def _pack_waiting(self) -> None:
        if self._ended is not None:
            self._pack(self._ended.label)
        self._begin_if_due()

    def _pack(self, label: int) -> None:
        self._waiting = False
        if self._place.has_missed_the_others:
            self._report.tell("ranks are not merged: call init_process_group() before watch()")
        if self._place.is_another:  # which has nothing to do
            self.recorder.restart()
            return
        if self.recorder.has_something or self._team is not None:
            self._packed = self._copied(label)
            self.logged += 1

    def _copied(self, label: int) -> Pending:
        for (step, tag), value in self._held.items():
            self.recorder.scalar(tag, value, earlier_step=step)
        self._held = {}
        if triton_rows.failure:
            self._report.tell(f"Triton is installed and does not work; torch operations serve: {triton_rows.failure}")
        return self._place.shared(self.recorder.pack(label, self._rank), self._model(), self._report)

    def _logs(self, step: int) -> bool:
        """Other ranks than the first have nothing to do, or no longer."""
        is_over = self._rank != 0 and self._team is not None and self._team.is_over
        return self._schedule.logs(step) and not is_over and not self._place.is_another

    def _begin_if_due(self) -> None:
        if self._logs(self.clock.count):
            self._begin()

    def _begin(self) -> None:
        self.clock.look_again()
        self.recorder.begin(self._schedule.takes_histograms(self.logged))
        self.probe.begin(attach=not self._pauses)

    def _end_reading(self, keep_hooks: bool) -> None:
        if not self._pauses:
            self.parameters.rest()
        self.parameters.forget()
        with unrecorded():
            self.probe.units.log(self.recorder)
            self.probe.onlookers.end(self.recorder)
        self.probe.end(keep_hooks)
        if self.recorder.overflowed:
            self._report.tell("a step made more calls than its buffer holds; the rest of it is not in its numbers")

    def _hand_over_held(self) -> None:
        if self._held and self._rank == 0:
            self._submit(replace(self._copied(self.clock.count), merge=None))

    def _warn_if_blind(self, label: int) -> None:
        if not self._pauses and self.recorder.wants("activation", "gradient", "input") and self.probe.is_blind:
            self._report.tell(f"step {label} was to be logged, but {BLIND}", once="blind")


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
