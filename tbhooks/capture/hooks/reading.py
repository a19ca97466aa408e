"""Which forwards and gradients are read in a logged step, and what is done with a tensor: reduced at once, detached,
and not kept.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from tbhooks.capture import dynamo, selection, sharded_tensors
from tbhooks.capture.autograd import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_pass,
    capture_check,
    in_backward,
    without_dispatch_modes,
)
from tbhooks.capture.dynamo import CompileGate, dynamo_skip
from tbhooks.capture.hooks.collectors import Collectors
from tbhooks.capture.hooks.dead_units import Units
from tbhooks.capture.hooks.hook_types import ForwardHook, GradientHook, ScaledLossHook, is_hooked
from tbhooks.capture.hooks.manager import hook_tensor
from tbhooks.capture.hooks.passes import Admission, Pass, Passes
from tbhooks.capture.hooks.reducing import note_readable, reduced
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recorder import NO_SITE, Recorder
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.reduction.torch_rows import has_no_data

NOT_TRAINED = (
    "forwards that no backward went through (rollouts, generation, torch.no_grad) are left out of the numbers of "
    "training steps"
)


class StepListener(Protocol):
    """What the observer calls when something happens that matters to the step."""

    def next_forward_begins(self) -> None:
        """After `expect_forward`: a module runs in training, and nothing of it has been read yet."""

    def backward_begins(self) -> None:
        """A backward pass has reached the open step."""

    def backward_ended(self, scale: Tensor | None) -> None:
        """That pass has ended; `scale` is what its loss was multiplied by."""


class Reader:
    """Reads the passes of one watch into its recorder."""

    def __init__(
        self, model: nn.Module, recorder: Recorder, listener: StepListener | None, report: Report
    ) -> None:  # fmt: skip
        self.seen: StepContext | None = None
        """The open step; None between logged steps."""
        self._listener = listener
        self._expects_forward = False
        self.evaluation: Recorder | None = None
        """Where evaluation passes are read into, if they are."""
        self.gate = CompileGate()
        self._model = weakref.ref(selection.unwrap(model))
        self.passes = Passes(self._model)
        self.admission = Admission(self.gate)
        self._recorder = recorder
        self.number = recorder.number
        self._report = report
        self.collectors = Collectors(report)
        self.units = Units()
        self._lock = threading.RLock()
        self._is_captured = capture_check()
        self._read_evaluation = False

    def expect_forward(self) -> None:
        """Announces the next training forward to the listener, once, before any of it is read."""
        self._expects_forward = True

    def is_training_pass(self, model: nn.Module) -> bool:
        """Evaluation passes are not part of a step, unless that is how the model is trained."""
        return self.admission.is_training_pass(model)

    def destination(self) -> Recorder | None:
        """Where the forward that is running is read into; None where it is not."""
        model = self._model()
        if model is None or self._is_captured():
            return None
        if not self.is_training_pass(model):
            return self.evaluation
        current = self.passes.current()
        if current.without_grad and self.admission.backpropagates and not in_backward():
            self._report.log_once(NOT_TRAINED)
            if self.seen is not None:
                self.seen.left_out = True
            return None
        if self._expects_forward and not in_backward():
            with self._lock:  # modules may run in several threads, and none may be read before the step has begun
                if self._expects_forward and self._listener is not None:
                    self._listener.next_forward_begins()
                    self._expects_forward = False
        if self.seen is None:
            return None
        if model.training and self._read_evaluation:
            # What was read before the first training pass is not of its step.
            self.units.forget()
            self._open_anew()
        self._read_evaluation = not (model.training or self.admission.trained)
        current.evaluates = not model.training and self.admission.trained
        if self.seen.backward != NO_BACKWARD and not in_backward() and self.passes.is_over_here(self.seen.running):
            self._backward_raised(self.seen)
        return self._recorder

    def _tried(self, recorder: Recorder | None) -> Pass | None:
        """The forward that is running in evaluation mode: it is of the step only if a backward goes through it."""
        model = self._model()
        if recorder is self._recorder or model is None or self.seen is None or self._recorder.overflowed:
            return None
        if self._is_captured() or self.is_training_pass(model):
            return None
        current = self.passes.current()
        current.evaluates = True
        return None if current.without_grad else current

    def _backward_raised(self, seen: StepContext) -> None:
        """It never called back, and training goes on: what it has shown is not of the step."""
        self._recorder.drop({seen.running})
        self.passes.backward_raised(seen.running)
        seen.backward, seen.scale = NO_BACKWARD, None

    def _is_doubtful(self, of: Pass) -> bool:
        """A forward in evaluation mode that may yet be trained."""
        return of.evaluates and not of.reached_by and self.admission.since is None

    def _owner(self, recorder: Recorder) -> Pass:
        current = self.passes.current()
        return self.passes.note(current) if recorder is self._recorder else current

    def _note_called(self, recorder: Recorder, hook: ForwardHook) -> None:
        if recorder is not self.evaluation and self.seen is not None:
            self.seen.called.add(hook.path)

    def _see_anew(self) -> None:
        self.seen = StepContext()
        self.passes.forget()
        self.collectors.begin()

    def _open_anew(self) -> None:
        self._see_anew()
        self._recorder.restart()

    def _saw_tensor(
        self, seen: StepContext, of: Pass, hook: ForwardHook, index: str, tensor: Tensor, hidden: bool
    ) -> None:  # fmt: skip
        if has_no_data(tensor):
            self._report.mark_unseen(hook.path + index, "it holds no data: a tracing or torch.func stand-in")
            return
        activation, gradient = hook.site_numbers(index)
        span, placed = seen.lookup(tensor)
        recomputed = in_backward()
        if activation != NO_SITE and not recomputed:
            if span is not None:
                self._recorder.share(activation, span, of)
            else:
                span = reduced(self._recorder, activation, tensor, of)
            if span is None or self._report.unseen:
                note_readable(self._report, hook.path + index, tensor, span is not None)
        if (hook.has_units or hook.shows_outputs) and not recomputed and not self._is_doubtful(of):
            self._look_closer(hook, index, tensor)
        if hidden and gradient != NO_SITE:
            gradient = NO_SITE
            self._report.mark_unseen(f"gradient/{hook.path}{index}", dynamo.GRADIENTS_INSIDE)
        wanted = tensor.requires_grad and (gradient != NO_SITE or hook.ends_backward)
        # A recomputed block is called with tensors that are hooked already, not with copies of them.
        if wanted and not (recomputed and (tensor.is_leaf or is_hooked(tensor, seen, gradient))):
            if placed is None:
                placed = self._place(seen, tensor)
            placed.passes.append(of)
            of.hooked = of.hooked or not placed.is_view
            if gradient != NO_SITE:
                placed.sites.append(gradient)
        seen.remember(tensor, span, placed)

    def _look_closer(self, hook: ForwardHook, index: str, tensor: Tensor) -> None:
        local = sharded_tensors.here(tensor) if hook.has_units and hook.reads_outputs else None
        if local is not None:
            self.units.see(f"activation/{hook.path}{index}", local)
        if hook.shows_outputs:
            self._show(hook.path, "activation", index, tensor)

    def _show(self, path: str, kind: str, index: str, tensor: Tensor) -> bool:
        """To those who look on: what of it is on this rank, if anything is."""
        local = sharded_tensors.here(tensor)
        if local is None or has_no_data(local):
            return False
        self.collectors.saw(path, kind, index, local)
        return True

    def _place(self, seen: StepContext, tensor: Tensor) -> GradientHook:
        hook = GradientHook(self, seen, tensor._is_view())
        handle = hook_tensor(tensor, hook)
        if tensor.is_leaf:  # it outlives the step, and so would the hook
            seen.leaf_handles.append(handle)
        seen.placed.append(hook)
        return hook

    def saw_gradient(self, hook: GradientHook, gradient: Tensor) -> None:
        seen = self.seen
        if seen is None or hook.step is not seen or self._is_captured():
            return
        report = self._report
        started = report.enter()
        try:
            hook.fired = True
            self._note_backward(seen)
            self._reach(seen, hook.passes)
            if hook.sites:
                report.hooks_fired += 1
                first, *others = hook.sites
                if has_no_data(gradient):
                    report.mark_unseen(str(self._recorder.sites[first]), "it holds no data: a torch.func stand-in")
                    return
                with without_dispatch_modes():
                    span = self._recorder.record(first, gradient, seen.scale, seen.running)
                if span is not None:
                    for site in others:
                        self._recorder.share(site, span, seen.running)
        except Exception as problem:
            hook.failure = f"its gradient hook failed: {describe_exception(problem)}"
            report.error("gradient hook", problem)
        finally:
            report.leave(started)

    def saw_scaled_loss(self, hook: ScaledLossHook) -> None:
        if self.seen is not None and hook.step is self.seen:
            with self._report.guarded("reading the loss scale"):
                self.seen.scale = hook.scale
                self._note_backward(self.seen)

    def _reach(self, seen: StepContext, passes: list[Pass]) -> None:
        """A backward goes through these forwards: they are of the step, whatever mode the model was in."""
        self.admission.backpropagates = True
        for each in passes:
            if self._is_doubtful(each) and self.evaluation is not None:
                self.evaluation.drop({each})
            each.reached_by.add(seen.running)
            seen.called |= each.paths

    def _note_backward(self, seen: StepContext) -> None:
        """Once a backward pass: passes inside passes (reentrant checkpoints) are part of it."""
        if self._listener is None or seen.backward != NO_BACKWARD or not in_backward():
            return
        seen.backward = backward_pass()
        seen.running = self.passes.begin_backward()
        self._listener.backward_begins()
        at_end_of_backward(partial(self._backward_ends, seen))

    @dynamo_skip
    def _backward_ends(self, seen: StepContext) -> None:
        seen.backward, seen.running.ended = NO_BACKWARD, True
        if self.seen is seen and self._listener is not None:
            with self._report.guarded("after backward"), without_dispatch_modes():
                self._listener.backward_ended(seen.scale)
        seen.scale = None
