"""One logged step from its first hook to the copy: wires clock, probe, parameters and recorder together.

It lives in the training thread, hands finished steps to `submit` and never waits for anything.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import profiler_label, without_dispatch_modes
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.packed_step import PackedStep
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.scalars.running_means import Averages
from tbhooks.capture.scalars.training_metrics import Progress
from tbhooks.capture.scalars.user_scalars import Scalars
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.selection import Selector, unwrap
from tbhooks.capture.step import grad_scaler
from tbhooks.capture.step.clock import Clock
from tbhooks.capture.step.evaluation import Asides, Evaluation, ModelListener
from tbhooks.capture.step.grad_scaler import ScalerReader
from tbhooks.capture.step.nan_replay import Replay
from tbhooks.capture.step.nonfinite_tripwire import Tripwire
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.capture.step.parameters import ParameterReader
from tbhooks.capture.step.step import Step
from tbhooks.data.self_report import Report
from tbhooks.reduction import triton


class Profile(Protocol):
    """A profiler of some steps, told where steps end."""

    def step_ended(self, step: int) -> None: ...

    def leave_model(self) -> None: ...

    def stop(self, step: int) -> None: ...


class CaptureSession:
    """Listens to the clock; reads logged steps; hands each over once nothing more can belong to it."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, mode: str,
        place: RankContext, submit: Callable[[PackedStep], None], report: Report,
    ) -> None:  # fmt: skip
        self.recorder = Recorder(kinds)
        self._groups = GroupNumbers()
        self.parameters = ParameterReader(model, selector, self.recorder, self._groups, report)
        self.clock = Clock(mode, unwrap(model), self, report)
        self.observer = Observer(
            model, selector, self.recorder, report,
            backward_begins=self.clock.alone(self.parameters.backward_begins),
            backward_ended=self.clock.alone(self.parameters.backward_ended),
        )  # fmt: skip
        self.scaler = ScalerReader(self.observer, self.clock, self.recorder, report)
        self.other_optimizer_stepped = self.observer.other_optimizer_stepped
        self.scaler.unscaled = self.parameters.unscaled
        self.scaler.step_skipped = self._step_skipped
        self.tripwire = Tripwire()
        self.raises: Callable[[], None] | None = None
        """Called where an exception reaches the user's loop, for one the user asked for."""
        self.logged = 0
        self._kinds = kinds
        self._evaluation: Evaluation | None = None
        self._replay: Replay | None = None
        self._asides = Asides()
        self.profiles: list[Profile] = []
        self._last_label = 0
        self._model = weakref.ref(unwrap(model))
        self.schedule = schedule
        self._place, self._rank, self._team = place, place.rank, place.team
        self.clock.count = place.first_step
        self._submit = submit
        self._report = report
        self._thread = threading.get_ident()
        self._pauses = 0
        self._scalars = Scalars(self.recorder, self.observer, self._model, place, submit)

    def start(self) -> None:
        grad_scaler.listen(self.scaler)
        self.clock.start()
        self.observer.placement.start()
        self._begin_if_due()

    def stop(self, is_failing: bool = False) -> None:
        """Ends everything and hands over what there is. If an exception ends the process or the block (`is_failing`), a
        step that was cut short is shown as far as it came.
        """
        with self._report.guarded("closing"), self.clock.lock:
            self._step_is_over()
            # Other ranks have none that is cut short; where forwards count, it is whole.
            awaited = self._team is not None and self.clock.mode != "forward"
            if self.observer.seen is not None and self.recorder.calls and not awaited:
                self._end_cut_short(is_failing)
                self._scalars.last = Step(self.clock.count, is_logged=True)
                self._pack(self._scalars.last)
                if self.clock.mode == "forward":
                    self._last_label = self.clock.count
            self.abandon()
            self._step_is_over()
            self._hand_over_held()
            self._finish_evaluation()
            if self._scalars.averages is not None:
                self._scalars.averages.write_rest(self._last_label)
            for profile in self.profiles:
                profile.stop(self.clock.count - 1)
        self.forget_everyone()

    def _end_cut_short(self, is_failing: bool) -> None:
        """Where an optimizer ends steps, what came after its last step is none, and only numbers of the user stay."""
        if self.clock.mode == "optimizer" and self.clock.count and not is_failing:
            self.recorder.keep_scalars_only("train/")
            return
        self.observer.leave_out_unused()
        if self.clock.mode != "optimizer":  # no optimizer will come to read them at
            self.parameters.rest()
        with without_dispatch_modes():
            self.observer.collectors.end(self.recorder)

    def forget_everyone(self) -> None:
        """Nobody calls any more: no optimizer, no scaler, no forward."""
        self._asides.stop()
        self._scalars.next_forward.stop()
        grad_scaler.ignore(self.scaler)
        self.clock.stop()
        self.parameters.release()

    def abandon(self) -> None:
        """Forgets the open step and leaves no hook on the model."""
        self.observer.abandon()
        self.parameters.forget()

    def forked(self) -> None:
        """In a forked child, whoever held a lock does not exist."""
        self.clock.lock = threading.RLock()
        self.observer.placement.forked()

    def settle(self, for_good: bool = False) -> None:
        """Hands over everything that has ended: for a reader who waits, which only the training thread can do, or
        because the model is gone. Then it is done by any thread, and the clock is silent.
        """
        if for_good:
            self._report.wait_for_others()
        elif threading.get_ident() != self._thread:
            return
        with self._report.guarded("handing over a step"), self.clock.lock:
            self._step_is_over()
            if self.observer.seen is None and self._team is None:
                self._hand_over_held()
            self._finish_evaluation()
            if for_good and self._scalars.averages is not None:
                self._scalars.averages.write_rest(self._last_label)

    def pause(self) -> None:
        """Takes every hook off the model but those in compiled code, which then do nothing; pauses may be nested."""
        with self._report.guarded("pausing"), self.clock.lock:
            self._step_is_over()  # the next one may begin in the pause, unseen
        self._pauses += 1
        self.observer.detach()
        self.clock.leave_forwards()
        self._asides.stop()
        self._scalars.next_forward.stop()
        for profile in self.profiles:
            profile.leave_model()

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self.clock.watch_forwards()
            self._asides.start()
            self._scalars.watch_next_forward(self._pauses > 0)
            if self.observer.seen is not None:
                self.observer.attach()
            elif self.observer.gate.was_compiled:
                self.observer.placement.attach()

    def read_evaluations(self) -> None:
        """From now on evaluation passes are read, apart from training."""
        if self._evaluation is None:
            with_buckets = self.schedule.histograms is not False
            self._evaluation = Evaluation(
                self._model, self.observer, self._kinds, with_buckets, self._hand_over_evaluation, self._report
            )
            self._listen(self._evaluation)

    def _hand_over_evaluation(self, recorder: Recorder) -> None:
        """As of the training step that ended last, and after it."""
        self._step_is_over()
        self._submit(recorder.pack(self._last_label, self._rank))

    def replay_when(self, sick: Callable[[int, Replay], None]) -> None:
        """From now on the gradients of every step are looked at, and `sick` is called if they are not finite."""
        if self._replay is None:
            self._replay = Replay(self._model, self.observer, sick, self._report)
            self._listen(self._replay)

    def average(self, every: int) -> None:
        """From now on what is logged is written as means, on steps of its own."""
        if self._scalars.averages is None:
            self._scalars.averages = Averages(
                self._model, self.observer, self._place, self._submit, self._training_goes_on, self._report
            )
            self._listen(self._scalars.averages)
        self._scalars.averages.every = every

    def log_progress(self, parts: frozenset[str]) -> None:
        """From now on written steps tell of the optimizers, of speed and of memory."""
        if self._scalars.progress is None:
            self._scalars.progress = Progress(self._model, self._groups, self._report)
        self._scalars.progress.parts |= parts
        self._listen(self._scalars.progress)

    def _training_goes_on(self) -> None:
        """A training forward begins: the step that has ended gets nothing more, nor does an evaluation."""
        with self.clock.lock:
            self._step_is_over()
            self._finish_evaluation()
            self._scalars.no_more()

    def _listen(self, aside: ModelListener) -> None:
        self._asides.add(aside)
        if not self._pauses:
            aside.start()

    def _finish_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.finish()
        if self._scalars.averages is not None:
            self._scalars.averages.write_evaluation(self._last_label)

    def log(self, values: dict[str, Tensor | float]) -> None:
        """Numbers of the user, each to the step it belongs to: the open one, or the one that has just ended."""
        with self._report.guarded("log"), self.clock.lock, profiler_label("log"):
            for tag, value in values.items():
                self._scalars.log(tag, value)
            if self._scalars.has_all:
                self._pack_closed()
            self._scalars.watch_next_forward(self._pauses > 0)

    def step(self, label: int | None) -> None:
        """The user ends the step; one that the clock has just ended gets its label."""
        with self._report.guarded("step"), self.clock.lock:
            ended = self._scalars.still_open if self.clock.mode != "manual" else None
            self.clock.manual()
            if ended is None:
                self._step_ended(self.clock.count if label is None else label)
                self.clock.count += 1
            elif label is not None:
                self._last_label = label
                ended.relabel(label)

    # What the clock calls.

    def owned(self, optimizer: Optimizer) -> frozenset[int]:
        return self.parameters.owned(optimizer)

    def parameters_now(self) -> frozenset[int]:
        return self.parameters.now()

    def is_training_pass(self, model: nn.Module) -> bool:
        return self.observer.is_training_pass(model)

    def is_logging(self) -> bool:
        return self.observer.seen is not None and not self._pauses

    def gradients_seen(self) -> bool:
        return self.observer.gradients_seen

    def watch_root(self, told: Callable[[], None], in_graph: bool) -> RemovableHandle | None:
        return self.observer.watch_root(told, in_graph)

    def hooks_are_compiled(self) -> bool:
        return self.observer.gate.was_compiled

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._step_is_over()
        self._scalars.no_more()
        self.observer.optimizer_steps(self.clock.count)
        self.scaler.before_optimizer(optimizer)
        with without_dispatch_modes():
            self.tripwire.look(optimizer, self.clock.count)
        if self._replay is not None:
            self._replay.look(optimizer, self.clock.count)
        self._scalars.before_optimizer(optimizer, self.clock.count)
        if self.observer.seen is not None and not self._pauses:
            with without_dispatch_modes(), profiler_label("parameters"):
                self.scaler.log()
                self.tripwire.log(self.recorder)
                self.parameters.before(optimizer, has_closure)

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self.observer.seen is not None and not self._pauses:
            with without_dispatch_modes(), profiler_label("parameters"):
                self.parameters.after(optimizer, has_closure)

    def _step_skipped(self, optimizer: Optimizer) -> None:
        """A scaler kept it from stepping. If nobody stepped, what was read is not of the step that will be."""
        if self.clock.kept(optimizer):
            self._step_is_over()
            self._scalars.no_more()
            self._scalars.was_skipped = True
            self.observer.start_over()
            self.parameters.forget()
        elif self.clock.mode in ("manual", "forward") and self.observer.seen is not None:
            self.scaler.log()

    def raise_if_asked(self) -> None:
        if self.raises is not None:
            self.raises()

    def step_ended(self) -> None:
        self._step_ended(self.clock.count)

    def _step_ended(self, label: int) -> None:
        with profiler_label("step"):
            self._end_step(label)
        for profile in self.profiles:
            profile.step_ended(self.clock.count)
            if self._pauses:
                profile.leave_model()

    def _end_step(self, label: int) -> None:
        self._thread = threading.get_ident()
        if self.clock.mode != "forward":  # there a step ends when the next one begins
            self._finish_evaluation()
        self._step_is_over()
        self._last_label = label
        self._groups.step_ended()
        if self._replay is not None:
            self._replay.forget()
        next_is_logged = self._logs(self.clock.count + 1)
        ended = self._scalars.step_ends(label, self.clock.count)
        if next_is_logged:
            self.observer.call_before_next_forward(self.clock.alone(self._step_is_over))
        if ended.is_logged:
            self._warn_if_blind(label)
            self._end_reading(keep_hooks=next_is_logged and not self._pauses)
            self.clock.logged_step_ended()
            self._scalars.watch_next_forward(self._pauses > 0)
            if self._scalars.awaits_more(ended) and self.clock.mode != "forward" and not self._pauses:
                return
            self._pack(ended)
            if self._others_wait:
                self._scalars.hand_over()
        if next_is_logged:
            self._begin()
        if self.clock.mode == "forward" and self.observer.gate.was_compiled:
            # The forward that ended the step is under way, in the graph it has chosen; the next one chooses now.
            self.observer.gate.open = self._logs(self.clock.count + 2)

    @property
    def _others_wait(self) -> bool:
        """Ranks wait for the step, and may be waited for before the next forward. The first may yet get a label."""
        return self._team is not None and (self.clock.mode == "manual" or self.logged > 1)

    def _step_is_over(self) -> None:
        """Something of the next step is seen: nothing more can belong to the one that has ended."""
        self._pack_closed()
        self._scalars.write_averages(self._last_label)
        self._scalars.hand_over()

    def _pack_closed(self) -> None:
        """Copies the step that has ended, if it was still waited for, and begins the next one, if that is logged."""
        last = self._scalars.last
        if last is not None and last.is_closed:
            try:
                self._pack(last)
            finally:
                self._begin_if_due()

    def _pack(self, step: Step) -> None:
        """Whatever goes wrong, the recorder is free for the next step afterwards."""
        if self._place.has_missed_the_others:
            self._report.log_once("ranks are not merged: call init_process_group() before watch()")
        try:
            if not self._place.is_another and (self.recorder.has_something or self._team is not None):
                step.pack(self._copied(step.label))
                self.logged += 1
        finally:
            if step.is_closed:  # there was nothing, or another rank writes, or the copy failed
                self.recorder.restart()
                step.abandon()

    def _copied(self, label: int) -> PackedStep:
        self._scalars.ride()
        if triton.failure:
            self._report.log_once(f"Triton is installed and does not work; torch operations serve: {triton.failure}")
        with profiler_label("copy"):
            pending = self.recorder.pack(label, self._rank)
        return self._place.shared(pending, self._model(), self._report)

    def _logs(self, step: int) -> bool:
        """Other ranks than the first have nothing to do, or no longer."""
        is_over = self._rank != 0 and self._team is not None and self._team.is_over
        return self.schedule.logs(step) and not is_over and not self._place.is_another

    def _begin_if_due(self) -> None:
        if self._logs(self.clock.count):
            self._begin()

    def _begin(self) -> None:
        self.clock.look_again()
        self.recorder.begin(self.schedule.takes_histograms(self.logged))
        self.observer.begin(attach=not self._pauses)

    def _end_reading(self, keep_hooks: bool) -> None:
        if not self._pauses:
            self.parameters.rest()
        self.parameters.forget()
        self.observer.leave_out_unused()
        with without_dispatch_modes():
            self.observer.units.log(self.recorder)
            self.observer.collectors.end(self.recorder)
        self.observer.end(keep_hooks)
        if self.recorder.overflowed:
            self._report.log_once("a step made more calls than its buffer holds; the rest of it is not in its numbers")

    def _hand_over_held(self) -> None:
        if self._scalars.holds_some and self._rank == 0:
            self._submit(replace(self._copied(self.clock.count), merge=None))

    def _warn_if_blind(self, label: int) -> None:
        if not self._pauses and self.recorder.wants("activation", "gradient", "input") and self.observer.is_blind:
            why = self.observer.placement.why_blind()
            self._report.log_once(f"step {label} was to be logged, but {why}", once=why)
