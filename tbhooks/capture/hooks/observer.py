"""The observer of one watch: what its hooks call, in logged steps.

It is composed of parts that share the open step (active_step.py): outputs.py reads what eager hooks are called with,
graph_outputs.py what comes out of compiled graphs, gradients.py what backward passes bring. manager.py registers the
hooks. Whatever fails here is counted and logged once; training never sees an exception, and results never change.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from tbhooks.capture import selection
from tbhooks.capture.autograd import (
    count_dispatch_modes,
    in_backward,
    is_traced,
    profiler_label,
    tracing_state,
    without_dispatch_modes,
)
from tbhooks.capture.compile import dynamo
from tbhooks.capture.compile.dynamo import CompileGate
from tbhooks.capture.compile.graph_operations import HEADS, OPERATION
from tbhooks.capture.compile.graph_outputs import GraphReader
from tbhooks.capture.functional.function_mode import FunctionalObserver
from tbhooks.capture.hooks.active_step import NOT_TRAINED, ActiveStep, StepListener
from tbhooks.capture.hooks.collectors import Collector
from tbhooks.capture.hooks.eager_hooks import EagerGradientHook
from tbhooks.capture.hooks.gradients import GradientReader
from tbhooks.capture.hooks.hook_types import ForwardHook, read_gradient
from tbhooks.capture.hooks.manager import HookManager
from tbhooks.capture.hooks.outputs import OutputReader
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.retries import Retries
from tbhooks.data.frame import EVALUATION_SINCE
from tbhooks.data.self_report import Report, describe_exception


class Observer:
    """The hooks of one watch and what reads for them. `begin` opens a logged step, `end` closes it."""

    def __init__(
        self, model: nn.Module, selector: selection.Selector, recorder: Recorder, listener: StepListener | None,
        report: Report,
    ) -> None:  # fmt: skip
        self._model = weakref.ref(selection.unwrap(model))
        self._recorder = recorder
        self._report = report
        self._failing: Retries[str] = Retries()
        self.gate = CompileGate(self._assign_hook_ids)
        self.number = recorder.number
        self._step = ActiveStep(self._model, recorder, self.gate, listener, report)
        self._gradients = GradientReader(self._step, listener, report)
        self._outputs = OutputReader(self._step, self._gradients, report)
        self._step.eager.connect(self._gradients, read_gradient, self._outputs.count_units, self._on_eager_failure)
        self._graphs = GraphReader(self._step, self._outputs, self._gradients, report)
        self.collectors = self._step.collectors
        self.graph_capture = self._step.graph_capture
        self._functional = (
            FunctionalObserver(self._on_operation, self._on_heads, self._collect_inside, report)
            if recorder.wants("functional")
            else None
        )
        self.placement = HookManager(
            self, self._model, selector, recorder.kinds, self._functional, self.collectors, self._step.eager, report
        )

    def _assign_hook_ids(self) -> None:
        self.placement.assign_hook_ids()

    # The open step.

    @property
    def seen(self) -> StepContext | None:
        """The open step; None between logged steps."""
        return self._step.context

    @seen.setter
    def seen(self, context: StepContext | None) -> None:
        self._step.context = context

    @property
    def gradients_seen(self) -> bool:
        """Whether a backward pass has reached the open step."""
        return self.seen is not None and self.seen.gradients

    @property
    def called(self) -> bool:
        """Whether any watched module was called in the open step."""
        return self.seen is not None and bool(self.seen.called)

    def warn_if_blind(self, label: int) -> None:
        """Warns if no module of the model was seen running in a logged step, or only the outermost one."""
        if not self._recorder.wants("activation", "gradient", "input") or self.seen is None:
            return
        if self.called and self.seen.called.issuperset(self.placement.reading):
            return
        is_blind = not self.seen.left_out if not self.called else self.seen.is_blind_below(self.placement.hooks)
        if is_blind:
            why = self.placement.why_blind()
            self._report.log_once(f"step {label} was to be logged, but {why}", once=why)

    def begin(self, attach: bool) -> None:
        """Opens a logged step and attaches the hooks."""
        self._step.open()
        if self._functional is not None:
            self._functional.begin_step()
        if self._failing:
            self._failing.next_step()
            for path, hook in self.placement.hooks.items():
                hook.broken = not self._failing.may_try(path)
                hook.update_eager()
        if attach:
            self.attach()

    def end(self, keep_hooks: bool) -> None:
        """Closes a step that ran to its end, and reports what was expected in it and did not come."""
        if self._functional is not None and self.gate.was_compiled:
            reason = "inside compiled code only attention is read, in submodules of the module that was compiled"
            self._report.mark_unseen("functional", reason)
        if self.seen is not None:
            self.placement.report_lost(self.seen.called)
            watched = self.placement.reading
            self.seen.report_missing(self._report, watched, self._recorder.sites, self._step.passes.unused())
            self._forgive(self.seen)
        self._close()
        if not keep_hooks:
            self.detach()

    def start_over(self) -> None:
        """Forgets what was read in the open step: the step did not happen."""
        if self.seen is not None:
            self._close()
            self._step.reopen()

    def cancel(self) -> None:
        """Closes a step that is not logged after all."""
        self._close()
        self.detach()

    def abandon(self) -> None:
        """Closes a step that was cut short, and leaves no hook behind."""
        self._step.expects_forward = False
        self.placement.stop()
        self._close()
        self.remove()
        self.placement.sweep()

    def _close(self) -> None:
        self._step.close()
        if self.gate.was_compiled:
            dynamo.restore_calls([])
        if self._functional is not None:
            self._functional.abandon()

    def expect_forward(self) -> None:
        """Announces the next training forward to the listener, once, before any of it is read."""
        self._step.expects_forward = True

    # Which forwards belong to the step.

    def is_training_pass(self, model: nn.Module) -> bool:
        """Evaluation passes are not part of a step, unless that is how the model is trained."""
        return self._step.admission.is_training_pass(model)

    def active_recorder(self) -> Recorder | None:
        """The recorder of the forward that is running; None if it is not read."""
        return self._step.active_recorder()

    @property
    def evaluation(self) -> Recorder | None:
        """The recorder of evaluation passes, if they are read."""
        return self._step.evaluation

    def read_evaluations(self, recorder: Recorder) -> None:
        """From now on evaluation passes are read into this recorder."""
        self._step.evaluation = recorder
        self.gate.evaluation = True

    def leave_out_unused(self) -> None:
        """Forwards that no backward went through are no part of the step, if others are."""
        unused = self._step.passes.unused()
        self._step.drop(unused)
        if self._recorder.drop(unused) and not all(forward.raised or forward.evaluates for forward in unused):
            self._report.log_once(NOT_TRAINED)
        since = self._step.admission.since
        if self._step.passes.evaluation_was_trained and since is not None:
            self._recorder.scalar(EVALUATION_SINCE, since)

    def end_reading(self) -> None:
        """What was kept until the step ended goes into the recorder."""
        self._step.end_reading()

    def other_optimizer_stepped(self) -> None:
        """An optimizer has stepped that owns no parameter of the model."""
        if self.seen is not None:
            self._step.passes.another_optimizer_stepped()

    def optimizer_steps(self, step: int) -> None:
        """An optimizer of the model is about to step: gradients that were made for other optimizers are gone by now."""
        model = self._model()
        if model is not None:
            self._step.admission.optimizer_steps(model, step)
        if self.seen is not None:
            cleared = self._step.passes.cleared()
            if cleared:
                self._recorder.drop(cleared)

    # Attaching and detaching hooks.

    def attach(self) -> None:
        """From now on what runs is read."""
        self.placement.attach()
        self.gate.open = True

    def detach(self) -> None:
        """Nothing is read from now on. Hooks that are part of compiled code stay, and only ask the gate."""
        self.gate.open = False
        if not self.gate.was_compiled:
            self.remove()

    def remove(self) -> None:
        """Leaves no hook on any module."""
        self.gate.open = False
        self.placement.detach()

    def add_collector(self, collector: Collector) -> None:
        """Shows tensors to one more collector, from the open step on if there is one."""
        self.collectors.add(collector)
        if self.seen is not None:
            collector.begin()
        self.placement.reattach()

    def watch_scaled_loss(self, loss: Tensor, scale: Tensor) -> None:
        """Gradients of the backward pass that starts from this loss are divided by its scale."""
        self._gradients.hook_loss(loss, scale)

    # What the hooks call.

    def on_output(self, hook: ForwardHook, output: object, args: tuple[Any, ...] = ()) -> None:
        if tracing_state() is not None:
            return
        report, step = self._report, self._step
        started = report.enter()
        step.eager.close()
        try:
            forward = step.continued_forward()
            if forward is None or count_dispatch_modes():
                with without_dispatch_modes():
                    self._begin_reading(hook, output, args)
            else:
                report.hooks_fired += 1
                self._read_output(forward, hook, output, args)
            step.open_eager_forward()
        except Exception as problem:
            self._on_failure(hook, problem)
        finally:
            report.leave(started)

    def _begin_reading(self, hook: ForwardHook, output: object, args: tuple[Any, ...]) -> None:
        """Reads an output after deciding which recorder its forward belongs to."""
        step = self._step
        recorder = step.active_recorder()
        provisional = step.provisional_pass(recorder)
        if (recorder is None or recorder.overflowed) and provisional is None:
            return
        self._report.hooks_fired += 1
        if recorder is not None and recorder is step.evaluation:
            self._outputs.read_evaluation(recorder, hook, output, args)
        if recorder is self._recorder or provisional is not None:
            self._read_output(step.passes.note(provisional or step.passes.current()), hook, output, args)

    def _read_output(self, forward: Pass, hook: ForwardHook, output: object, args: tuple[Any, ...]) -> None:
        context = self._step.context
        if context is not None and self._outputs.read_output(context, forward, hook, output, args):
            self.placement.come_last(hook)  # parallelize_module registers its hooks after ours

    def _on_failure(self, hook: ForwardHook, problem: Exception) -> None:
        """A hook that failed is called again on the next logged step, and given up after several in a row."""
        hook.broken = True
        hook.update_eager()
        why = f"its hook failed: {describe_exception(problem)}{self._failing.failed(hook.path)}"
        self._report.mark_unseen(hook.path, why, replace=True)
        self._report.error(f"hook on {hook.path}", problem)

    def _on_eager_failure(self, hook: ForwardHook | EagerGradientHook, problem: Exception) -> None:
        """The same for hooks in C."""
        self._step.eager.close()
        if isinstance(hook, ForwardHook):
            self._on_failure(hook, problem)
        else:
            hook.failure = f"its gradient hook failed: {describe_exception(problem)}"
            self._report.error("gradient hook", problem)

    def _forgive(self, context: StepContext) -> None:
        """Resets the count of hooks that failed before and did not fail in this step."""
        for path in context.called if self._failing else ():
            if path in self.placement.hooks and not self.placement.hooks[path].broken:
                self._failing.worked(path)
        for path in self._failing.next_step() if self._failing else ():
            self._report.mark_seen(path)

    def on_inputs(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        with self._report.guarded(f"reading inputs of {hook.path}"):
            recorder = self._step.active_recorder()
            if recorder is not None and not recorder.overflowed and not in_backward():
                self._step.mark_called(recorder, hook)
                self._outputs.read_inputs(recorder, hook, args, kwargs)

    def on_call(self, hook: ForwardHook) -> None:
        with self._report.guarded(f"call of {hook.path}"):
            recorder = self._step.active_recorder() if not is_traced() else None
            if recorder is not None:
                self._step.mark_called(recorder, hook)

    def on_forward_begin(self) -> None:
        """A forward of the whole model begins."""
        with self._report.guarded("before the model's forward"):
            self._step.eager.close()
            self._step.passes.begin()
            if self.gate.was_compiled:  # gradients from compiled parts are assigned to their forward by it
                self.gate.next_step()

    def on_forward_end(self, output: object) -> None:
        """It has ended; there is no output if it raised."""
        with self._report.guarded("after the model's forward"):
            self._step.eager.close()
            self._step.passes.end(output)

    def on_graph_tensor(
        self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int
    ) -> None:  # fmt: skip
        if kind.startswith((OPERATION, HEADS)):
            with self._report.guarded(f"attention in compiled code of {hook.path}"):
                self._graphs.on_operation(hook, tensor, kind, index)
            return
        kind, _, tapped = kind.partition(":")
        reader = self.placement.tap_hook(hook.path, tapped) if tapped else hook
        if reader is not None and not reader.broken:
            with self._report.guarded(f"compiled hook on {reader.path}"):
                self._graphs.on_tensor(reader, tensor, kind, index, gradient, step_id)

    def on_tap(self, module: nn.Module, name: str, value: object) -> bool:
        """A forward of this module has named a value. Returns whether the module is part of the model."""
        with self._report.guarded(f"tap {name!r}"):
            path = self.placement.path_of(module)
            hook = None if path is None else self.placement.tap_hook(path, str(name))
            if hook is not None and hook.broken:
                self.on_call(hook)
            elif hook is not None:
                with profiler_label("tap"):
                    self.on_output(hook, value)
            return path is not None
        return False

    def hook_of(self, module: nn.Module) -> ForwardHook | None:
        """The hook of a module; None if the module is not watched."""
        return self.placement.hook_of(module)

    def _collect_inside(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        self.collectors.on_tensor(path, kind, index, tensor, self._step.passes.current())

    def _on_heads(self, path: str, index: str, numbers: Tensor) -> None:
        hook = self.placement.hooks.get(path.rpartition(":")[0])
        recorder = None if hook is None or not hook.reads_operations or in_backward() else self.active_recorder()
        if recorder is self._recorder and not recorder.overflowed:
            self._step.heads.add(path + index, numbers, self._step.current_pass(recorder))

    def _on_operation(self, path: str, index: str, tensor: Tensor) -> bool:
        hook = self.placement.hooks.get(path.rpartition(":")[0])
        recorder = None if hook is None or not hook.reads_operations or in_backward() else self.active_recorder()
        if hook is None or recorder is None or recorder.overflowed:
            return False
        return self._outputs.read_operation(recorder, hook, path, index, tensor)
