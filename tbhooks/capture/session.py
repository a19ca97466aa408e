"""Capture of one watch: records logged steps, from the first hook to the copy to the host, and submits them.

The clock decides when a step ends, the observer records what module hooks are called with, and the parameter reader
reads weights before and after the optimizer's step. The session moves the step through its states (step/step.py). It
runs in the training thread and never waits for the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture import cuda_graphs
from tbhooks.capture.autograd import profiler_label, without_dispatch_modes
from tbhooks.capture.flight.recorder import FlightRecorder
from tbhooks.capture.hooks.collectors import Profiles
from tbhooks.capture.hooks.forward_event import ForwardEvent
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.parameters.parameter_reader import ParameterReader
from tbhooks.capture.parameters.watched_parameters import WatchedParameters
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.host_memory import HostMemory
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.step_samples import SampleCall, StepSamples
from tbhooks.capture.scalars.step_scalars import StepScalars
from tbhooks.capture.schedule import Bursts, LoggedSteps, Schedule
from tbhooks.capture.selection import Selector, unwrap
from tbhooks.capture.step.clock import Clock
from tbhooks.capture.step.evaluation import Evaluation
from tbhooks.capture.step.grad_scaler import ScalerReader
from tbhooks.capture.step.nan_replay import Replay
from tbhooks.capture.step.nonfinite_tripwire import Tripwire
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.capture.step.packing import Packer
from tbhooks.capture.step.step import Step
from tbhooks.data.self_report import Report


class CaptureSession:
    """The capture side of one watch. `Watch` calls its methods, and so do the clock, the observer and the scaler."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, bursts: Bursts,
        mode: str, context: RankContext, submit: Callable[[PackedStep], None],
        on_nonfinite: Callable[[int, Replay], None], raise_if_asked: Callable[[], None], report: Report,
    ) -> None:  # fmt: skip
        self._model = weakref.ref(unwrap(model))
        self._rank, self._rank_group = context.rank, context.rank_group
        self._submit = submit
        self._report = report
        self.raise_if_asked = raise_if_asked  # what the user has asked for with on_nonfinite("raise")
        self.schedule, self._bursts = schedule, bursts
        self._logged_steps = LoggedSteps(schedule, bursts, context)
        self.host_memory = HostMemory(self._model)
        self.recorder = Recorder(kinds)
        self.observer = Observer(model, selector, self.recorder, self, report)
        self.forwards = ForwardEvent(self._model, self.observer.gate, self.observer.graph_capture, report)
        self._groups = GroupNumbers()
        self.flight = FlightRecorder(self._model, self._groups, bursts, context.rank, report)
        self._scalars = StepScalars(
            self._model, self.recorder, self.observer, self._groups, self.forwards, self.flight, context, submit
        )
        self.metrics = self._scalars.metrics
        self.samples = StepSamples(self.recorder, self.observer, context, submit, report)
        self._packer = Packer(
            self._model, self.recorder, self.observer, self.forwards, self._scalars, self.samples, context, submit,
            self._forward_begins, report,
        )  # fmt: skip
        merges = self._rank_group is not None
        parameters = WatchedParameters(model, selector, self.recorder, report, merges)
        self.parameters = ParameterReader(parameters, self.recorder, self._groups, report, merges)
        self.clock = Clock(
            mode, context.first_step, self._model, self.observer, parameters, self.forwards, self, report
        )
        self.scaler = ScalerReader(
            self.observer, self.clock, self.recorder, self.flight, self.parameters.gradients_unscaled,
            self._step_skipped, report,
        )  # fmt: skip
        self.tripwire = Tripwire()
        self.profiles = Profiles()
        self.evaluation = Evaluation(
            self.observer, self.forwards, kinds, schedule.histograms is not False, self._submit_evaluation, report
        )
        self.replay = Replay(self._model, self.observer, on_nonfinite, report)
        self._step = Step(context.first_step)
        self._last_label = self._pauses = 0
        self._thread = threading.get_ident()

    @property
    def logged(self) -> int:
        """How many steps were logged."""
        return self._packer.logged

    # The life of the session, for the handle.

    def start(self) -> None:
        self.scaler.start()
        self.clock.start()
        self.observer.placement.start()
        cuda_graphs.begin(self, self.observer.graph_capture)
        with self._report.guarded("finding parameters"):
            self.parameters.prepare()
        self._open_step(self.clock.count)

    def stop(self, is_failing: bool = False) -> None:
        """Ends capture and submits everything; after an exception (`is_failing`) the interrupted step as well."""
        with self._report.guarded("closing"), self.clock.lock:
            self._step_is_over()
            # The other ranks have no interrupted step. Where forwards end steps, the last one is complete.
            is_merged = self._rank_group is not None and self.clock.mode != "forward"
            if self.observer.seen is not None and self.recorder.calls and not is_merged:
                self._read_interrupted(is_failing)
                self._packer.ended, self._step.is_logged = self._step, True
                self._step.close(self.clock.count, self.recorder.scalar_tags)
                if self.clock.mode == "forward":
                    self._last_label = self.clock.count
            self.abandon()
            self._step_is_over(opens_next=False)
            self._packer.submit_late_scalars(self.clock.count)
            self._finish_evaluation()
            self._scalars.means.write_rest(self._last_label)
            self.profiles.stop(self.clock.count - 1)
        self.disconnect()

    def _read_interrupted(self, is_failing: bool) -> None:
        """Completes an interrupted step. What came after an optimizer's last step is no step: only scalars are kept."""
        if self.clock.mode == "optimizer" and self.clock.count and not is_failing:
            self.recorder.keep_scalars_only("train/")
            return
        self.observer.leave_out_unused()
        if self.clock.mode != "optimizer":  # no optimizer's step will read the parameters
            self.parameters.read_remaining()
        with without_dispatch_modes():
            self.observer.collectors.end(self.recorder)

    def disconnect(self) -> None:
        """Removes the hooks on optimizers, the wrappers of GradScaler and the forward hooks on the model itself."""
        cuda_graphs.end(self)
        self.replay.stop()
        self.scaler.stop()
        self.clock.stop()
        self.forwards.close()
        self.parameters.release()

    def abandon(self) -> None:
        """Drops the open step and removes the hooks on modules."""
        self.observer.abandon()
        self.parameters.clear()

    def forked(self) -> None:
        """Renews the locks in a forked child: the threads that may hold them do not exist there."""
        self.clock.lock = threading.RLock()
        self.observer.placement.forked()

    def settle(self, for_good: bool = False) -> None:
        """Submits every step that has ended: in the training thread, or `for_good` after the model was deleted."""
        if for_good:
            self._report.wait_for_others()
        elif threading.get_ident() != self._thread:
            return
        with self._report.guarded("submitting a step"), self.clock.lock:
            self._step_is_over()
            if self.observer.seen is None and self._rank_group is None:
                self._packer.submit_late_scalars(self.clock.count)
            self._finish_evaluation()
            if for_good:
                self._scalars.means.write_rest(self._last_label)

    def pause(self) -> None:
        """Removes every hook from the model, except those in compiled code, which do nothing then. Can be nested."""
        with self._report.guarded("pausing"), self.clock.lock:
            self._step_is_over()  # if the next step begins in the pause, no hook is called
        self._pauses, self.flight.is_paused = self._pauses + 1, True
        self.observer.detach()
        self.clock.pause()
        self.forwards.pause()
        self.replay.stop()
        self.profiles.leave_model()

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self.flight.is_paused = False
            self.clock.resume()
            self.forwards.resume()
            self.replay.start()
            if self.observer.seen is not None:
                self.observer.attach()
            elif self.observer.gate.was_compiled:
                self.observer.placement.attach()

    # Features that the user turns on, for the handle.

    def _submit_evaluation(self, recorder: Recorder) -> None:
        """Submits an evaluation after the training step that ended last, and with its label."""
        self._step_is_over()
        self._submit(recorder.pack(self._last_label, self._rank))

    def check_gradients(self) -> None:
        """From now on the gradients of every step are checked; `on_nonfinite` is called if they are not finite."""
        self.replay.enable()
        if not self._pauses:
            self.replay.start()

    def log_means(self, every: int) -> None:
        """From now on the user's scalars are written as running means, every `every` steps."""
        if self._scalars.means.every is None:
            self.forwards.subscribe(self._forward_begins, in_graph=True)
        self._scalars.means.every = every

    def burst(self, steps: int) -> None:
        """Logs so many steps from now on. If the training thread asks, the open step is the first, as long as none of
        its forwards has begun.
        """
        with self._report.guarded("burst"), self.clock.lock:
            self._bursts.ask(steps)
            is_too_late = self.observer.called or self._pauses or self._forward_is_compiled
            if threading.get_ident() == self._thread and not is_too_late:
                self._bursts.begin(self.clock.count)
                if not self._step.is_logged:
                    self._bursts.is_on_trial = True
                    self._open_step(self.clock.count)

    def log(self, values: dict[str, Tensor | float], call: SampleCall | None = None) -> None:
        """Logs scalars and samples of the user, to the open step or to the one that has just ended."""
        with self._report.guarded("log"), self.clock.lock, profiler_label("log"):
            if self.observer.graph_capture.is_running():
                return
            ended = self._packer.taking_late_scalars
            for tag, value in values.items():
                self._scalars.log(tag, value, self._step, ended)
            if call is not None:
                self.samples.add(call, self._step, ended)
            if ended is not None and ended.is_logged:
                self._packer.watch_next_forward()
                if not self._scalars.means.is_due:  # the copy has waited for these scalars
                    self._pack_closed()

    def step(self, label: int | None) -> None:
        """The user ends the step. If the clock has just ended it, the step only gets the user's label."""
        with self._report.guarded("step"), self.clock.lock:
            ended = self._packer.taking_late_scalars if self.clock.mode != "manual" else None
            self.clock.set_manual()
            if ended is None:
                self.step_ended(label)
                self.clock.count += 1
            elif label is not None:
                self._last_label = label
                ended.relabel(label)
                self.flight.relabel(label)

    # Events, called by the clock, the scaler reader and the observer.

    def is_logging(self) -> bool:
        """Whether the open step is being recorded."""
        return self.observer.seen is not None and not self._pauses

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._end_trial()
        self._step_is_over()
        self._packer.end_late_scalars()
        self.observer.optimizer_steps(self.clock.count)
        self.scaler.before_optimizer(optimizer)
        with without_dispatch_modes():
            self.tripwire.check(optimizer, self.clock.count)
        self.flight.before_optimizer(optimizer, has_closure, self.clock.count)
        self.replay.check(optimizer, self.clock.count)
        self._scalars.before_optimizer(optimizer, self.clock.count)
        if self.is_logging():
            with without_dispatch_modes(), profiler_label("parameters"):
                self.scaler.log()
                self.tripwire.log(self.recorder)
                self.parameters.before_optimizer(optimizer, has_closure)

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.flight.after_optimizer(optimizer, has_closure, self.clock.count)
        if self.is_logging():
            with without_dispatch_modes(), profiler_label("parameters"):
                self.parameters.after_optimizer(optimizer, has_closure)

    def step_ended(self, label: int | None = None) -> None:
        with profiler_label("step"):
            self._close_step(self.clock.count if label is None else label)
        self.profiles.step_ended(self.clock.count)
        if self._pauses:
            self.profiles.leave_model()

    def backward_begins(self) -> None:
        with self.clock.lock:
            self.parameters.backward_begins()

    def backward_ended(self, scale: Tensor | None) -> None:
        with self.clock.lock:
            self.parameters.backward_ended(scale)

    def next_forward_begins(self) -> None:
        with self.clock.lock:
            self._step_is_over()

    def _forward_begins(self, model: nn.Module, _count: object) -> None:
        """A forward of the model begins. If it is a training forward, the step that has ended is submitted."""
        if self.observer.is_training_pass(model):
            with self.clock.lock:
                self._step_is_over()
                self._finish_evaluation()
                self._packer.end_late_scalars()

    def _step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler skipped the optimizer's step. If no other optimizer stepped, what was recorded is dropped."""
        if self.clock.optimizer_skipped(optimizer):
            self._step_is_over()
            self._packer.end_late_scalars()
            self._step.was_skipped = True
            self.observer.start_over()
            self.parameters.clear()
        elif self.clock.mode in ("manual", "forward") and self.observer.seen is not None:
            self.scaler.log()

    # Transitions between the states of a step.

    def _open_step(self, number: int) -> None:
        """Begins to record the open step, if it is a logged one. The recorder is free."""
        if self._step.number != number:  # the clock has restarted its count
            self._step = Step(number)
        self._step.is_logged = self._logged_steps.logs(number)
        self._step.is_extra = self._logged_steps.is_extra(number)
        if self._step.is_logged:
            self.clock.parameters_may_have_changed()
            self.recorder.begin(self._logged_steps.takes_histograms(number, self.logged))
            self.observer.begin(attach=not self._pauses)
            for tag, value in self._step.early.items():
                self.recorder.scalar(tag, value)
            for part in self._step.early_parts:
                self.recorder.part(part)

    def _close_step(self, label: int) -> None:
        """Closes the open step, or abandons it if it is not a logged one, and opens the next one."""
        self._thread = threading.get_ident()
        self._end_trial()
        if self.clock.mode != "forward":  # there the forward that has just begun finishes the evaluation
            self._finish_evaluation()
        self._step_is_over()
        self._packer.end_late_scalars()
        self._last_label = label
        self._groups.step_ended()
        self.replay.step_ended()
        self._scalars.step_ends(self.clock.count)
        ended = self._packer.ended = self._step
        ended.is_logged = self.observer.seen is not None
        ended.close(label, self.recorder.scalar_tags)
        next_number = self.clock.count + 1
        self.flight.step_ended(self.clock.count, label)
        if not self._pauses:
            self._bursts.begin(next_number + self._forward_is_compiled)
        self._step = Step(next_number, self._logged_steps.logs(next_number))
        if self._step.is_logged:
            self.observer.expect_forward()
        if ended.is_closed:
            if not self._pauses:
                self.observer.warn_if_blind(label)
            self._end_reading(keep_hooks=self._step.is_logged and not self._pauses)
            self.clock.logged_step_ended()
            if self._scalars.is_used or self.samples.come_late:
                self._packer.watch_next_forward()
            if self.clock.mode != "forward" and not self._pauses and self._packer.may_get_late_scalars:
                return
            self._packer.pack()
            if self._packer.other_ranks_wait(self.clock.mode):
                self._packer.submit()
        self._open_step(next_number)
        if self._forward_is_compiled:
            # The forward that ended the step already runs, in a graph with or without hooks. This is for the next one.
            self.observer.gate.open = self._logged_steps.logs(self.clock.count + 2)

    def _end_trial(self) -> None:
        """If a burst began in the middle of the open step and none of its forwards was seen, it is not logged."""
        is_on_trial, self._bursts.is_on_trial = self._bursts.is_on_trial, False
        if is_on_trial and self.observer.placement.is_attached and not self.observer.called:
            self._step.is_logged = False
            self.observer.cancel()
            self.parameters.clear()
            self.recorder.restart()
            self._bursts.postpone()

    @property
    def _forward_is_compiled(self) -> bool:
        """Whether a forward ends the step, and has been chosen before: a compiled graph with or without hooks."""
        return self.clock.mode == "forward" and self.observer.gate.was_compiled

    def _step_is_over(self, opens_next: bool = True) -> None:
        """Packs and submits the step that has ended, because something of the next step has happened."""
        self._pack_closed(opens_next)
        self._scalars.write_means(self._packer.ended, self._last_label)
        self._packer.submit()

    def _pack_closed(self, opens_next: bool = True) -> None:
        """Packs the step that has ended if that was delayed, and opens the next one."""
        if self._packer.ended is not None and self._packer.ended.is_closed:
            try:
                self._packer.pack()
            finally:
                if opens_next:
                    self._open_step(self.clock.count)

    def _end_reading(self, keep_hooks: bool) -> None:
        """Completes the records of the step, and closes it for the hooks."""
        if not self._pauses:
            self.parameters.read_remaining()
        self.parameters.clear()
        self.observer.leave_out_unused()
        with without_dispatch_modes():
            self.flight.add_to_copy(self.recorder)
            self.observer.end_reading()
        self.observer.end(keep_hooks)
        if self.recorder.overflowed:
            self._report.log_once("a step made more calls than its buffer holds; the last ones are left out")

    def _finish_evaluation(self) -> None:
        self.evaluation.finish()
        self._scalars.means.write_evaluation(self._last_label)
