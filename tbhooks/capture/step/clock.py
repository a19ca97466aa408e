"""When a training step ends: the optimizer that owns the parameters says so, or forwards, or the user.

The clock counts steps and calls back; it reads no tensor and writes nothing. It registers hooks on
optimizers only (all of them, once, through torch's own global hooks), never on modules.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import NO_BACKWARD, at_end_of_backward, backward_pass, in_backward, in_nested_backward
from tbhooks.capture.dynamo import dynamo_disable, dynamo_skip
from tbhooks.capture.hooks.forward_event import ForwardEvent, Subscription
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.step.manual_updates import Turns
from tbhooks.capture.step.optimizer_round import OptimizerRound, SeldomSteps
from tbhooks.capture.step.parameters import ParameterReader
from tbhooks.data.self_report import Report

MODES = ("auto", "optimizer", "forward", "manual")


class Listener(Protocol):
    """What the clock calls. None of it may raise, but for `raise_if_asked`."""

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def step_ended(self) -> None: ...

    def raise_if_asked(self) -> None: ...

    def is_logging(self) -> bool: ...


class Clock:
    """Counts the steps of one model. `mode` is what ends them; "auto" until that is known.

    Several threads may train one model at the same time, so what the hooks do is done by one thread after another.
    """

    def __init__(
        self, mode: str, first_step: int, model: weakref.ref[nn.Module], observer: Observer,
        parameters: ParameterReader, forwards: ForwardEvent, listener: Listener, report: Report,
    ) -> None:  # fmt: skip
        self.mode = mode
        self.count = first_step
        self.optimizer_steps = 0
        """How often any optimizer of the model has stepped."""
        self.lock = threading.RLock()
        self._model = model
        self._observer, self._parameters, self._forwards = observer, parameters, forwards
        self._listener = listener
        self._report = report
        self._auto = mode == "auto"
        self._round = OptimizerRound()
        self._seldom = SeldomSteps()
        # Numbers stand for optimizers, and are not given out again as addresses are.
        self._keys: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next_key = itertools.count()
        # What each optimizer steps of the model, and how many parameters it had when that was looked up.
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        # What each one that has stepped the model owned last, and those that own nothing of it any more.
        self._stepping: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
        self._orphans: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._turns = Turns(report)
        self._by_turns = False
        """Whether a forward ends a step only after a backward."""
        self._forwards_counted = 0
        self._ends_with = NO_BACKWARD
        """The backward pass at whose end the step ends."""
        self._subscription: Subscription | None = None
        self._output_hook: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = []

    def alone(self, function: Callable[..., None]) -> Callable[..., None]:
        """The same function, for one thread at a time."""

        @functools.wraps(function)
        def locked(*args: Any) -> None:
            with self.lock:
                function(*args)

        return locked

    def start(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self.watch_forwards()

    def watch_forwards(self) -> None:
        """Counts forwards from now on, if they may end steps."""
        if self._subscription is None and (self.mode == "forward" or self._looks_for_optimizer):
            # Mostly an optimizer comes, and compiled code is not to change then.
            self._subscription = self._forwards.subscribe(self._forward_begins, in_graph=not self._auto)
        model = self._model()
        if self._output_hook is None and self._looks_for_optimizer and model is not None:
            self._output_hook = self._turns.follow(model)

    @property
    def _looks_for_optimizer(self) -> bool:
        """Whether no optimizer of the model has been seen yet."""
        return self._auto and self.mode != "optimizer"

    def pause(self) -> None:
        """Takes the clock's hook off the model."""
        if self._output_hook is not None:
            self._output_hook.remove()
            self._output_hook = None

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
        if self._model() is None:  # another thread may be handing over what there was
            return
        try:
            self._listener.step_ended()
        finally:
            self.count += 1

    def kept(self, optimizer: Optimizer) -> bool:
        """A scaler kept it from stepping. Whether the iteration has thereby ended without any step."""
        with self.lock:
            self._optimizer_found()
            if self.mode != "optimizer":  # then something else ends the step, and it did happen
                return False
            self._round.is_kept(self._key(optimizer))
            if not self._round.is_over:
                return False
            stepped = self._round.has_stepped
            self._round.starts_over()
            if stepped:
                self.tick()
            return not stepped

    def logged_step_ended(self) -> None:
        """Tells of optimizers whose steps are never among the logged ones."""
        for optimizer in self._seldom.logged_step_ended():
            self._report.log_once(
                f"{type(optimizer).__name__} steps less often than another optimizer of this model, and never in a "
                "step that is logged: its gradients and updates are not in the log. Choose an `every` that shares no "
                "divisor with how often it steps, an odd one if it steps every second time",
                once=f"never logged: {self._key(optimizer)}",
            )

    @dynamo_disable
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("before the optimizer's step"), self.lock:
            parameters = self._owned_by(optimizer)
            if not parameters or self._is_nested():
                return
            key = self._key(optimizer)
            self._stepping[optimizer] = parameters
            self._optimizer_found()
            if self.mode == "optimizer":
                if not self._round.knows(key):
                    self._round.keep(set(self._keys.values()))
                    self._round.forget_those_without(self._parameters.now() | parameters)
                self._round.meets(key, parameters)
                if self._round.comes_again(key):
                    self.tick()
            is_late = self.mode == "optimizer" and self._round.is_late(key) and not self._round.is_seldom(key)
            if in_backward() or not is_late:
                self._listener.before_optimizer(optimizer, has_closure(args, kwargs))
        self._listener.raise_if_asked()

    @dynamo_disable
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("after the optimizer's step"), self.lock:
            parameters = self._owned_by(optimizer)
            if not parameters:
                self._observer.other_optimizer_stepped()
            if not parameters or self._is_nested():
                return
            self.optimizer_steps += 1
            self._listener.after_optimizer(optimizer, has_closure(args, kwargs))
            if self.mode != "optimizer":
                return
            key = self._key(optimizer)
            if self._round.is_seldom(key):
                self._seldom.stepped(optimizer, self._listener.is_logging())
            if in_backward():
                self._end_with_backward(key, parameters)
            elif self._round.ends(key, parameters):
                self.tick()
        self._listener.raise_if_asked()

    def _key(self, optimizer: Optimizer) -> int:
        if optimizer not in self._keys:
            self._keys[optimizer] = next(self._next_key)
        return self._keys[optimizer]

    def _is_nested(self) -> bool:
        """Whether the step is part of another one's (SAM, Lookahead, `super().step()`): only the outermost counts."""
        return any(self._owned_by(outer) for outer in steps_around())

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

    @dynamo_skip
    def _backward_ended(self) -> None:
        with self._report.guarded("after backward"), self.lock:
            self._round.starts_over()
            self.tick()

    def _owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        if self._model() is None:
            return frozenset()
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known, owned = self._owned.get(optimizer, (-1, frozenset()))
        if known != size:  # groups may be added at any time
            owned = self._parameters.owned(optimizer) or self._lost_by(optimizer)
            self._owned[optimizer] = size, owned
        return owned

    def _lost_by(self, optimizer: Optimizer) -> frozenset[int]:
        """What an optimizer stepped that now owns nothing of the model: it counts until another one comes."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lost = self._stepping.get(optimizer, frozenset()) & held
        if not lost or self._model() is None:
            return frozenset()
        self._orphans.add(optimizer)
        self._report.log_once(
            f"the parameters that {type(optimizer).__name__} steps are no longer the model's: they were replaced after "
            "the optimizer was made, as load_state_dict(assign=True) does, and its steps no longer change the "
            "model. Make the optimizer after that. Steps are still counted by it",
            once=f"orphan: {self._key(optimizer)}",
        )
        return lost if all(other in self._orphans for other in self._stepping) else frozenset()

    def _optimizer_found(self) -> None:
        if self._looks_for_optimizer:
            if self.mode == "forward":
                self._report.log_once("an optimizer steps this model after all: steps are counted by it, from 0")
                self.count = 0
            self.mode = "optimizer"
            if not self._observer.gate.was_compiled:  # or the places of the others would change
                self.leave_forwards()

    def _forward_begins(self, model: nn.Module, _count: object) -> None:
        with self.lock:
            if self.mode not in ("auto", "forward") or not self._observer.is_training_pass(model):
                return
            if self._auto:
                self._look_for_turn(model)
            if self.mode == "forward" and self._forwards_counted and (self._turns.backward_ran or not self._by_turns):
                self.tick()
                self._turns.step_ended()
            self._forwards_counted += 1

    def _look_for_turn(self, model: nn.Module) -> None:
        why = self._turns.forward_begins(model, self._observer.gradients_seen)
        if why is not None and self.mode == "auto":
            self.mode, self._by_turns = "forward", self._turns.saw_backward
            ends = "a forward that follows a backward begins the next step" if self._by_turns else "each forward is one"
            self._report.log_once(
                f"no torch optimizer steps this model ({why}): {ends}; updates cannot be seen. "
                'Call step() yourself, or say step="forward" to count forwards from the start'
            )

    def leave_forwards(self) -> None:
        """Counts forwards no longer."""
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None
        self.pause()


def _step_code() -> CodeType | None:
    """The code that torch puts around every optimizer's step: its frames are the steps that are running."""
    around = getattr(Optimizer, "profile_hook_step", None)
    return getattr(around(has_closure), "__code__", None) if around is not None else None


def steps_around() -> list[Optimizer]:
    """The optimizers inside whose steps the running one was called.

    They are read off the stack each time: a step that raises never says that it has ended, and a frame's address is
    soon that of another one.
    """
    running: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_CODE:
            running.append(frame)
        frame = frame.f_back
    found = [around.f_locals.get("self") for around in running[1:]]  # the first is the running one
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `optimizer.step` was given one; args[0] is the optimizer itself."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


_STEP_CODE = _step_code()
