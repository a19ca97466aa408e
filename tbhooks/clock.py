"""When a training step ends: the optimizer that owns the parameters says so, or forwards, or the user.

The clock counts steps and calls back; it reads no tensor and writes nothing. It registers hooks on
optimizers only (all of them, once, through torch's own global hooks), never on modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tbhooks.probe import NO_BACKWARD, backward_pass, in_backward
from tbhooks.report import Report

MODES = ("auto", "optimizer", "forward", "manual")
# In "auto", this many forwards with no optimizer step mean that no optimizer is coming. Longer
# accumulations than this are rarer than loops without an optimizer.
FORWARDS_WITHOUT_OPTIMIZER = 256


class Listener(Protocol):
    """What the clock calls."""

    def owned(self, optimizer: Optimizer) -> frozenset[int]: ...

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def step_ended(self) -> None: ...

    def watch_root(self, told: Callable[[], None]) -> RemovableHandle | None: ...

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

    def meets(self, key: int, parameters: frozenset[int]) -> None:
        """Tells of an optimizer about to step, and of the parameters it steps."""
        for other, theirs in list(self._members.items()):
            if other != key and theirs & parameters:
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

    def ends(self, key: int, parameters: frozenset[int]) -> bool:
        """Whether this optimizer's step has ended the training step."""
        late = self.is_late(key)
        self._members[key] = parameters
        if late:
            return False
        self._stepped.add(key)
        if self._stepped >= self._members.keys():
            self._stepped = set()
            return True
        return False


class Clock:
    """Counts the steps of one model. `mode` is what ends them; "auto" until that is known."""

    def __init__(self, mode: str, model: nn.Module, listener: Listener, report: Report) -> None:
        self.mode = mode
        self.count = 0
        self._model = weakref.ref(model)
        self._listener = listener
        self._report = report
        self._auto = mode == "auto"
        self._round = Round()
        self._owned: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
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
            self._root = self._listener.watch_root(self._forward_begins)

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

    def tick(self) -> None:
        try:
            self._listener.step_ended()
        finally:
            self.count += 1

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("before the optimizer's step"):
            parameters = self._owned_by(optimizer)
            if not parameters:
                return
            self._optimizer_found()
            if self.mode == "optimizer":
                self._round.meets(id(optimizer), parameters)
                if self._round.comes_again(id(optimizer)):
                    self.tick()
            if self.mode != "optimizer" or not self._round.is_late(id(optimizer)):
                self._listener.before_optimizer(optimizer, _has_closure(args, kwargs))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("after the optimizer's step"):
            parameters = self._owned_by(optimizer)
            if not parameters:
                return
            self._listener.after_optimizer(optimizer, _has_closure(args, kwargs))
            if self.mode != "optimizer":
                return
            if in_backward():
                self._end_with_backward()
            elif self._round.ends(id(optimizer), parameters):
                self.tick()

    def _end_with_backward(self) -> None:
        """Optimizers that step inside backward, one a parameter: the step ends when backward does."""
        if self._ends_with != backward_pass():  # a pass that failed never calls back
            self._ends_with = backward_pass()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        with self._report.guarded("after backward"):
            self.tick()

    def _owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        owned = self._owned.get(optimizer)
        if owned is None:
            owned = self._owned[optimizer] = self._listener.owned(optimizer)
        return owned

    def _optimizer_found(self) -> None:
        if self._auto and self.mode != "optimizer":
            if self.mode == "forward":
                self._report.tell("an optimizer steps this model after all: steps are counted by it, from 0")
                self.count = 0
            self.mode = "optimizer"
            self.leave_forwards()

    def _forward_begins(self) -> None:
        with self._report.guarded("before the model's forward"):
            model = self._model()
            if model is None or in_backward() or not self._listener.admits(model):
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


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `optimizer.step` was given one; args[0] is the optimizer itself."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _versions(model: nn.Module) -> int:
    """Changes whenever a parameter is written in place; -1 while some have yet to be made."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return -1
    return sum(parameter._version for parameter in model.parameters())
