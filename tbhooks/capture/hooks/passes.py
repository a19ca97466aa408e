"""Which forward a record belongs to, and whether a backward went through that forward.

A pass is one forward of the whole model. Calls of its modules outside of one make a pass, too, until the next backward.
Passes that no backward went through (rollouts, generation, a forward that raised) are left out of a step that has
others. Everything is known on the host, from hooks that fire; no tensor is kept.
"""

from __future__ import annotations

import sys
import threading
import weakref

from torch import Tensor, nn

from tbhooks.capture.autograd import call_stack, in_backward, may_reach_backward
from tbhooks.capture.compile.dynamo import CompileGate
from tbhooks.capture.functional.function_mode import MODULE_CALL

# The gradients of this many parameters are compared, to find out whether they were cleared.
MOST_COMPARED = 8


class Backward:
    """One backward pass of a step; it owns the gradients that were recorded in it."""

    __slots__ = ("_left", "ended", "is_of_another_optimizer", "thread", "was_cleared")

    def __init__(self) -> None:
        self.ended = self.was_cleared = False
        self.is_of_another_optimizer = False
        self.thread = threading.get_ident()
        self._left: list[tuple[weakref.ref[nn.Parameter], weakref.ref[Tensor], int]] = []

    def remember_gradients(self, model: nn.Module) -> None:
        """An optimizer of other parameters has stepped: the gradients of this model may have been a by-product."""
        if not self.is_of_another_optimizer:
            self.is_of_another_optimizer = True
            for parameter in model.parameters():
                gradient = parameter.grad
                if gradient is not None and len(self._left) < MOST_COMPARED:
                    self._left.append((weakref.ref(parameter), weakref.ref(gradient), gradient._version))

    def check_cleared(self, in_place: bool) -> None:
        """Sets `was_cleared` if all gradients it left are gone, or there were none; `in_place`, also if they were
        written to.
        """
        if self.is_of_another_optimizer and not self.was_cleared:
            self.was_cleared = not any(self._is_there(*left, in_place=in_place) for left in self._left)

    @staticmethod
    def _is_there(one: weakref.ref[nn.Parameter], then: weakref.ref[Tensor], version: int, in_place: bool) -> bool:
        parameter = one()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and gradient is then() and (gradient._version == version or not in_place)


class Pass:
    """One forward; it owns the activations that were recorded in it."""

    __slots__ = ("evaluates", "hooked", "paths", "raised", "reached_by", "read_in", "without_grad")

    def __init__(self) -> None:
        self.without_grad = not may_reach_backward()
        self.evaluates = False
        """Whether the model was in evaluation mode; then it belongs to the step only if a backward goes through it."""
        self.hooked = False
        """Whether a gradient that reaches it would be noticed."""
        self.raised = False
        self.read_in: object = None
        """The step that it is part of as a training forward, once something of it was read."""
        self.paths: set[str] = set()
        self.reached_by: set[Backward] = set()

    @property
    def is_unused(self) -> bool:
        """Whether a step with other passes leaves it out. A frozen model needs no gradient, and may belong to it."""
        return not self.reached_by and (self.without_grad or self.hooked)


class Admission:
    """Decides whether a forward belongs to training, by the mode the model is in."""

    def __init__(self, gate: CompileGate) -> None:
        self.trained = False
        """Whether the model was ever in training mode."""
        self.since: int | None = None
        """Since which step an optimizer steps the model in evaluation mode, after it was in training mode."""
        self.backpropagates = False
        """Whether there ever was a backward."""
        self._gate = gate

    def is_training_pass(self, model: nn.Module) -> bool:
        """Evaluation passes are not part of a step, unless that is how the model is trained."""
        if model.training:
            self.trained, self.since = True, None
            return True
        if not (self.trained or self._gate.evaluation):
            return True
        return self.since is not None and may_reach_backward()

    def optimizer_steps(self, model: nn.Module, step: int) -> None:
        """An optimizer steps the model. model.train() may have been forgotten after an evaluation."""
        if model.training:
            self.trained, self.since = True, None
        elif self.trained and self.since is None:
            self.since = step


class Passes:
    """The passes of one logged step."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model
        self._open: dict[int, list[Pass]] = {}
        self._threads: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """A step begins. A forward that is running continues as a pass of it."""
        self._all: dict[Pass, None] = {}
        self._loose: dict[bool, Pass] = {}
        self.backwards: list[Backward] = []

    # Called by the hooks on the whole model.

    def begin(self) -> None:
        if in_backward():  # a checkpoint is being recomputed
            return
        running = self._open.setdefault(threading.get_ident(), [])
        if running:  # it calls itself, or the last one was interrupted, which calls no hook
            depth = _calls_of(self._model())
            for cut_short in running[max(0, depth - 1) :]:
                cut_short.raised = True
            del running[max(0, depth - 1) :]
        running.append(Pass())

    def end(self, output: object) -> None:
        running = self._open.get(threading.get_ident())
        if running and not in_backward():
            ended = running.pop()
            ended.raised = output is None and sys.exc_info()[1] is not None
            if not running:
                del self._open[threading.get_ident()]

    def end_loose(self) -> None:
        """Modules called from now on, outside of the model's own forward, make another pass."""
        self._loose = {}

    # Called by the readers.

    def running(self) -> Pass | None:
        """The innermost forward of the whole model that is running in this thread."""
        running = self._open.get(threading.get_ident())
        return running[-1] if running else None

    def current(self) -> Pass:
        """The pass that is running in this thread, or in the thread that has started this one."""
        thread = threading.get_ident()
        self._threads.add(thread)
        running = self._open.get(thread) or next(reversed(list(self._open.values())), None)
        if running:
            return running[-1]
        with_grad = may_reach_backward()
        return self._loose.get(with_grad) or self._loose.setdefault(with_grad, Pass())

    def note(self, forward: Pass) -> Pass:
        """Something of this pass was recorded in the step."""
        self._all[forward] = None
        return forward

    def has_raised(self, backward: Backward) -> bool:
        """Whether a backward that has not ended must have raised: it ran in this thread, or in one of torch's own."""
        return backward.thread == threading.get_ident() or backward.thread not in self._threads

    def backward_raised(self, backward: Backward) -> None:
        """The passes it reached count only if another backward reaches them."""
        for each in self._all:
            each.reached_by.discard(backward)

    def another_optimizer_stepped(self) -> None:
        """An optimizer of other parameters, as of a generator whose loss goes through this discriminator."""
        model = self._model()
        for backward in self.backwards:
            if backward.ended and model is not None:
                backward.remember_gradients(model)

    def begin_backward(self) -> Backward:
        for earlier in self.backwards:
            earlier.check_cleared(in_place=True)
        self.end_loose()
        self.backwards.append(Backward())
        return self.backwards[-1]

    def cleared(self) -> set[Backward]:
        """Backward passes for another optimizer: their gradients were cleared before the model's own one steps."""
        for earlier in self.backwards:
            earlier.check_cleared(in_place=False)
        gone = {backward for backward in self.backwards if backward.was_cleared}
        for each in self._all if gone else ():
            each.reached_by -= gone
        self.backwards = [backward for backward in self.backwards if backward not in gone]
        return gone

    def unused(self) -> set[Pass]:
        """The passes to be left out of the step that has ended."""
        trained = any(each.reached_by for each in self._all)
        return {
            each
            for each in self._all
            if each.raised or (each.evaluates and not each.reached_by) or (trained and each.is_unused)
        }

    @property
    def evaluation_was_trained(self) -> bool:
        """Whether a backward went through a forward in evaluation mode."""
        return any(each.evaluates and each.reached_by for each in self._all)


def _calls_of(model: nn.Module | None) -> int:
    """How many calls of the model are running in this thread, including the one whose hooks are being called."""
    return sum(frame.f_code is MODULE_CALL and frame.f_locals.get("self") is model for frame in call_stack())
