"""When a training step ends: the optimizer that owns the parameters says so, or forwards, or the user.

The clock counts steps and calls back; it reads no tensor and writes nothing. It registers hooks on
optimizers only (all of them, once, through torch's own global hooks), never on modules.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tbhooks.autograd import NO_BACKWARD, at_end_of_backward, backward_pass, in_backward, in_nested_backward
from tbhooks.compiled import never_compiled, runs_as_python
from tbhooks.report import Report

MODES = ("auto", "optimizer", "forward", "manual")
# In "auto", this many forwards with no optimizer step mean that no optimizer is coming. Longer
# accumulations than this are rarer than loops without an optimizer.
FORWARDS_WITHOUT_OPTIMIZER = 256


class Listener(Protocol):
    """What the clock calls."""

    def owned(self, optimizer: Optimizer) -> frozenset[int]: ...

    def parameters_now(self) -> frozenset[int]: ...

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def other_optimizer_stepped(self) -> None: ...

    def step_ended(self) -> None: ...

    def raise_if_asked(self) -> None: ...

    def watch_root(self, told: Callable[[], None], in_graph: bool) -> RemovableHandle | None: ...

    def hooks_are_compiled(self) -> bool: ...

    def admits(self, model: nn.Module) -> bool: ...

    def gradients_seen(self) -> bool: ...


class Round:
    """Which optimizer's step ends a training step, when one model has several optimizers.

    A step is over when every optimizer that took part in the last one has stepped again. One first seen
    right after that belongs to the step just ended, and is waited for from then on; one that comes round
    a second time shows that the others are not coming; one that takes over another's parameters replaces it.
    """

    def __init__(self) -> None:
        self._members: dict[int, frozenset[int]] = {}
        self._stepped: set[int] = set()
        self._kept: set[int] = set()

    def meets(self, key: int, parameters: frozenset[int]) -> None:
        """Tells of an optimizer about to step, and of the parameters it steps."""
        self._leave_out(lambda other, theirs: other != key and bool(theirs & parameters))

    def knows(self, key: int) -> bool:
        return key in self._members

    def forget_those_without(self, parameters: frozenset[int]) -> None:
        """Of the model's parameters as they are now, some optimizers may step none any more."""
        self._leave_out(lambda _, theirs: not theirs & parameters)

    def _leave_out(self, gone: Callable[[int, frozenset[int]], bool]) -> None:
        for other, theirs in list(self._members.items()):
            if gone(other, theirs):
                del self._members[other]
                self._stepped.discard(other)

    def is_late(self, key: int) -> bool:
        """Whether this optimizer belongs to the step that has just ended."""
        return bool(self._members) and not self._stepped and key not in self._members

    def comes_again(self, key: int) -> bool:
        """Whether the open step ended before this optimizer's step began."""
        if key not in self._stepped:
            return False
        self._members = {member: self._members[member] for member in self._stepped}
        self._stepped = set()
        return True

    def steps(self, key: int, parameters: frozenset[int]) -> None:
        """Tells of a step that cannot be the last of the training step."""
        self._members[key] = parameters
        self._stepped.add(key)

    def starts_over(self) -> None:
        self._stepped, self._kept = set(), set()

    def is_kept(self, key: int) -> None:
        """Tells of an optimizer that a scaler kept from stepping: it is not waited for."""
        self._kept.add(key)

    @property
    def is_over(self) -> bool:
        return self._stepped | self._kept >= self._members.keys()

    @property
    def has_stepped(self) -> bool:
        return bool(self._stepped)

    def ends(self, key: int, parameters: frozenset[int]) -> bool:
        """Whether this optimizer's step has ended the training step."""
        late = self.is_late(key)
        self._members[key] = parameters
        if late:
            return False
        self._stepped.add(key)
        if self.is_over:
            self.starts_over()
            return True
        return False


class Inside:
    """Steps that are part of another optimizer's step (SAM, Lookahead, `super().step()`): only the outermost counts."""

    def __init__(self) -> None:
        self._running: list[tuple[int, int]] = []

    def enter(self, key: int) -> bool:
        """Whether the step that begins is inside another one."""
        frames = set()
        frame: FrameType | None = sys._getframe(2)
        callers = id(frame)
        while self._running and frame is not None:
            frames.add(id(frame))
            frame = frame.f_back
        # A step that raised has never left: it is no longer among the callers.
        while self._running and self._running[-1][1] not in frames:
            self._running.pop()
        self._running.append((key, callers))
        return len(self._running) > 1

    def leave(self, key: int) -> bool:
        """Whether the step that has ended was."""
        if any(running == key for running, _ in self._running):
            while self._running.pop()[0] != key:
                pass
        return bool(self._running)


class Clock:
    """Counts the steps of one model. `mode` is what ends them; "auto" until that is known."""

    def __init__(self, mode: str, model: nn.Module, listener: Listener, report: Report) -> None:
        self.mode = mode
        self.count = 0
        self.optimizer_steps = 0
        """How often any optimizer of the model has stepped."""
        self._model = weakref.ref(model)
        self._listener = listener
        self._report = report
        self._auto = mode == "auto"
        self._round = Round()
        self._inside = Inside()
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._forwards = 0
        self._versions = -1
        self._ends_with = NO_BACKWARD
        """The backward pass at whose end the step ends."""
        self._root: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self.watch_forwards()

    def watch_forwards(self) -> None:
        """Puts the one hook on the model that counting its forwards needs, if they are counted."""
        if self.mode in ("auto", "forward") and self._root is None:
            # Mostly there is an optimizer; a compiled graph is not to change when it comes.
            self._root = self._listener.watch_root(self._forward_begins, in_graph=self.mode == "forward")

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._owned.clear()
        self.leave_forwards()

    def manual(self) -> None:
        """From now on only the user ends steps."""
        self.mode, self._auto = "manual", False
        self.leave_forwards()

    def look_again(self) -> None:
        """Parameters may have been replaced: which optimizers own them is found out anew."""
        self._owned.clear()

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps any parameter of the model."""
        return bool(self._owned_by(optimizer))

    def tick(self) -> None:
        try:
            self._listener.step_ended()
        finally:
            self.count += 1

    def kept(self, optimizer: Optimizer) -> bool:
        """A scaler kept it from stepping. Whether the iteration has thereby ended without any step."""
        self._round.is_kept(id(optimizer))
        if not self._round.is_over:
            return False
        stepped = self._round.has_stepped
        self._round.starts_over()
        if stepped:
            self.tick()
        return not stepped

    @never_compiled
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("before the optimizer's step"):
            parameters = self._owned_by(optimizer)
            if not parameters or self._inside.enter(id(optimizer)):
                return
            self._optimizer_found()
            if self.mode == "optimizer":
                if not self._round.knows(id(optimizer)):
                    self._round.forget_those_without(self._listener.parameters_now())
                self._round.meets(id(optimizer), parameters)
                if self._round.comes_again(id(optimizer)):
                    self.tick()
            if self.mode != "optimizer" or in_backward() or not self._round.is_late(id(optimizer)):
                self._listener.before_optimizer(optimizer, has_closure(args, kwargs))
        self._listener.raise_if_asked()

    @never_compiled
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("after the optimizer's step"):
            parameters = self._owned_by(optimizer)
            if not parameters:
                self._listener.other_optimizer_stepped()
            if not parameters or self._inside.leave(id(optimizer)):
                return
            self.optimizer_steps += 1
            self._listener.after_optimizer(optimizer, has_closure(args, kwargs))
            if self.mode != "optimizer":
                return
            if in_backward():
                self._end_with_backward(id(optimizer), parameters)
            elif self._round.ends(id(optimizer), parameters):
                self.tick()
        self._listener.raise_if_asked()

    def _end_with_backward(self, key: int, parameters: frozenset[int]) -> None:
        """Optimizers that step inside backward, one a parameter: the step ends when backward does.

        From a pass inside a pass the end of the outer one cannot be heard of. If no optimizer steps in the outer
        one, the step ends when the first comes round again.
        """
        if in_nested_backward():
            self._round.steps(key, parameters)
        elif self._ends_with != backward_pass():  # a pass that failed never calls back
            self._ends_with = backward_pass()
            at_end_of_backward(self._backward_ended)

    @runs_as_python
    def _backward_ended(self) -> None:
        with self._report.guarded("after backward"):
            self._round.starts_over()
            self.tick()

    def _owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known, owned = self._owned.get(optimizer, (-1, frozenset()))
        if known != size:  # groups may be added at any time
            owned = self._listener.owned(optimizer)
            self._owned[optimizer] = size, owned
        return owned

    def _optimizer_found(self) -> None:
        if self._auto and self.mode != "optimizer":
            if self.mode == "forward":
                self._report.tell("an optimizer steps this model after all: steps are counted by it, from 0")
                self.count = 0
            self.mode = "optimizer"
            if not self._listener.hooks_are_compiled():  # or the places of the others would change
                self.leave_forwards()

    @runs_as_python
    def _forward_begins(self) -> None:
        with self._report.guarded("before the model's forward"):
            model = self._model()
            if self.mode not in ("auto", "forward") or model is None or in_backward():
                return
            if not self._listener.admits(model):
                return
            if self.mode == "auto" and self._forwards and self._no_optimizer_is_coming(model):
                self.mode = "forward"
            if self.mode == "forward" and self._forwards:
                self.tick()
            self._forwards += 1
            self._versions = _versions(model)

    def _no_optimizer_is_coming(self, model: nn.Module) -> bool:
        # After a backward, so that loading a checkpoint between two forwards is not taken for a training step.
        changed = self._listener.gradients_seen() and -1 != self._versions != _versions(model)
        if changed or self._forwards >= FORWARDS_WITHOUT_OPTIMIZER:
            why = "weights change without one" if changed else f"none stepped in {self._forwards} forwards"
            self._report.tell(
                f"no torch optimizer steps this model ({why}): each forward counts as a step; updates cannot be seen. "
                'Call step() yourself, or say step="forward" to count forwards from the start'
            )
            return True
        return False

    def leave_forwards(self) -> None:
        """Takes that hook off."""
        if self._root is not None:
            self._root.remove()
            self._root = None


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `optimizer.step` was given one; args[0] is the optimizer itself."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _versions(model: nn.Module) -> int:
    """Changes whenever a parameter is written in place; -1 while some have yet to be made."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return -1
    return sum(parameter._version for parameter in model.parameters())
