"""The logged step that is open, and the recorder that each forward is read into.

A forward in training mode belongs to the open step. A forward in evaluation mode goes to the recorder of evaluations,
if there is one. It is read into the step as well, provisionally: it counts only if a backward pass goes through it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Set
from typing import Protocol

from torch import Tensor, nn

from tbhooks.capture.autograd import NO_BACKWARD, in_backward, running_backward
from tbhooks.capture.compile.dynamo import CompileGate
from tbhooks.capture.cuda_graphs import GraphCapture
from tbhooks.capture.functional.heads import HeadRows
from tbhooks.capture.hooks.collectors import Collectors
from tbhooks.capture.hooks.dead_units import DeadUnits
from tbhooks.capture.hooks.eager_hooks import EagerLane
from tbhooks.capture.hooks.hook_types import ForwardHook
from tbhooks.capture.hooks.passes import Admission, Pass, Passes
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.self_report import Report

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


class ActiveStep:
    """What all readers of one watch share: the open step, its recorder, and the collectors of its tensors."""

    def __init__(
        self, model: weakref.ref[nn.Module], recorder: Recorder, gate: CompileGate, listener: StepListener | None,
        report: Report,
    ) -> None:  # fmt: skip
        self.context: StepContext | None = None
        """The open step; None between logged steps."""
        self.recorder = recorder
        self.evaluation: Recorder | None = None
        """The recorder of evaluation passes, if they are read."""
        self.expects_forward = False
        """Whether the listener is called before the next training forward is read."""
        self.gate = gate
        self.passes = Passes(model)
        self.eager = EagerLane(model, recorder, report)
        """The hooks in C: whether they may read what follows."""
        self.admission = Admission(gate)
        self.collectors = Collectors(report)
        self.dead_units = DeadUnits()
        self.heads = HeadRows(report)
        self.graph_capture = GraphCapture(model, report)
        """Whether a CUDA graph is being captured: nothing is read then."""
        self._model = model
        self._listener = listener
        self._report = report
        self._lock = threading.RLock()
        self._read_before_training = False

    def open(self) -> None:
        self.eager.close()
        self.context = StepContext()
        self.passes.forget()
        self.heads.forget()
        self.collectors.begin()

    def reopen(self) -> None:
        """Begins the step again: what was recorded so far is not part of it."""
        self.open()
        self.recorder.restart()

    def drop(self, forwards: Set[Pass]) -> None:
        """These forwards are not part of the step."""
        self.dead_units.drop(forwards)
        self.heads.drop(forwards)
        self.collectors.drop(forwards)

    def end_reading(self) -> None:
        """What was kept until the step ended goes into the recorder."""
        self.dead_units.log(self.recorder)
        self.heads.log(self.recorder)
        self.collectors.end(self.recorder)

    def close(self) -> None:
        self.eager.close()
        self.dead_units.forget()
        self.heads.forget()
        self.collectors.forget()
        if self.context is not None:
            self.context.close()
            self.context = None
            self.gate.next_step()

    def active_recorder(self) -> Recorder | None:
        """The recorder of the forward that is running; None if it is not read."""
        model = self._model()
        if model is None or self.graph_capture.is_running():
            return None
        if not self.admission.is_training_pass(model):
            return self.evaluation
        current = self.passes.current()
        if current.without_grad and self.admission.backpropagates and not in_backward():
            self._report.log_once(NOT_TRAINED)
            if self.context is not None:
                self.context.left_out = True
            return None
        self._announce_forward()
        if self.context is None:
            return None
        if model.training and self._read_before_training:
            # What was read before the first training pass is not part of its step.
            self.dead_units.forget()
            self.reopen()
        self._read_before_training = not (model.training or self.admission.trained)
        current.evaluates = not model.training and self.admission.trained
        context = self.context
        if context.backward != NO_BACKWARD and not in_backward() and self.passes.has_raised(context.running):
            self._drop_backward(context)
        current.read_in = context
        return self.recorder

    def continued_forward(self) -> Pass | None:
        """The training forward of the whole model that is running, if something of it was read into the open step.

        `active_recorder` has decided then, and it is this step's recorder. Nearly all outputs are read this way.
        """
        forward, context, model = self.passes.running(), self.context, self._model()
        if forward is None or context is None or forward.read_in is not context or forward.evaluates:
            return None
        if context.backward != NO_BACKWARD or running_backward() != NO_BACKWARD or self.recorder.overflowed:
            return None
        is_trained = model is not None and model.training and not self.graph_capture.is_capturing()
        return forward if is_trained else None

    def open_eager_forward(self) -> None:
        """Lets hooks in C read the rest of the forward that is running, if it is read into the open step."""
        if self.eager.lane is None or self.graph_capture.is_possible or self.gate.was_compiled:
            return
        forward = self.continued_forward()
        if forward is not None and self.context is not None:
            self.eager.open_forward(forward, self.context, self.dead_units.place())

    def open_eager_backward(self, context: StepContext, passes: list[Pass]) -> None:
        """Lets hooks in C read the rest of the backward that is running: `passes` are those that it has reached."""
        is_eager = self.eager.lane is not None and not self.graph_capture.is_possible and len(set(passes)) == 1
        if is_eager and context.backward != NO_BACKWARD and context.scale is None:
            self.eager.open_backward(context, context.running, passes[0])

    def _announce_forward(self) -> None:
        if self.expects_forward and not in_backward():
            with self._lock:  # modules may run in several threads, and none may be read before the step has begun
                if self.expects_forward and self._listener is not None:
                    self._listener.next_forward_begins()
                    self.expects_forward = False

    def _drop_backward(self, context: StepContext) -> None:
        """A backward raised, and training goes on: the gradients it showed are not part of the step."""
        self.recorder.drop({context.running})
        self.passes.backward_raised(context.running)
        context.backward, context.scale = NO_BACKWARD, None

    def provisional_pass(self, recorder: Recorder | None) -> Pass | None:
        """The forward that is running in evaluation mode, if a backward pass may yet make it part of the step."""
        model = self._model()
        if recorder is self.recorder or model is None or self.context is None or self.recorder.overflowed:
            return None
        if self.graph_capture.is_running() or self.admission.is_training_pass(model):
            return None
        current = self.passes.current()
        current.evaluates = True
        return None if current.without_grad else current

    def is_provisional(self, forward: Pass) -> bool:
        """Whether no backward pass has gone yet through a forward in evaluation mode."""
        return forward.evaluates and not forward.reached_by and self.admission.since is None

    def current_pass(self, recorder: Recorder) -> Pass:
        """The forward that is running; it owns what is recorded now."""
        current = self.passes.current()
        return self.passes.note(current) if recorder is self.recorder else current

    def mark_called(self, recorder: Recorder, hook: ForwardHook) -> None:
        if recorder is not self.evaluation and self.context is not None:
            self.context.called.add(hook.path)
