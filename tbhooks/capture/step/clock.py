"""When a training step ends: after a step of the model's optimizer, with a forward, or when the user calls `step`.

The clock counts steps and calls its listener. It reads no tensor and writes nothing. It uses torch's global hooks on
optimizers.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import NO_BACKWARD, at_end_of_backward, backward_pass, in_backward, in_nested_backward
from tbhooks.capture.compile.dynamo import dynamo_disable, dynamo_skip
from tbhooks.capture.hooks.forward_event import ForwardEvent, Subscription
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.parameters.watched_parameters import WatchedParameters
from tbhooks.capture.step import zero_step
from tbhooks.capture.step.manual_updates import ManualUpdates
from tbhooks.capture.step.optimizer_round import OptimizerRound, UnloggedOptimizers, parameter_ids
from tbhooks.data.self_report import Report

_Held = tuple[int, int]
"""How many parameters an optimizer has, and the id of the first."""


@dataclass(frozen=True, slots=True)
class _Owned:
    """The model's parameters that an optimizer updates."""

    parameters: frozenset[int]
    held: _Held
    """What the optimizer held when they were found."""
    found_in: tuple[int, list[int]] | None
    """The version of the model's structure then, and all parameters of the optimizer: as long as both are the same, the
    optimizer updates the same ones. None if that depends on more.
    """


MODES = ("auto", "optimizer", "forward", "manual")


class Listener(Protocol):
    """What the clock calls. Only `raise_if_asked` may raise."""

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def step_ended(self) -> None: ...

    def raise_if_asked(self) -> None: ...

    def is_logging(self) -> bool: ...


class Clock:
    """Counts the training steps of one model. `mode` is what ends a step: one of `MODES`, "auto" until it is known.

    Several threads may train one model at the same time, so all hooks hold `lock`.
    """

    def __init__(
        self, mode: str, first_step: int, model: weakref.ref[nn.Module], observer: Observer,
        parameters: WatchedParameters, forwards: ForwardEvent, listener: Listener, report: Report,
    ) -> None:  # fmt: skip
        self.mode = mode
        self.count = first_step
        self.optimizer_steps = 0
        """How many steps the optimizers of the model have made, all together."""
        self.lock = threading.RLock()
        self._model = model
        self._observer, self._parameters, self._forwards = observer, parameters, forwards
        self._listener = listener
        self._report = report
        self._auto = mode == "auto"
        self._round = OptimizerRound()
        self._unlogged = UnloggedOptimizers()
        # A number for each optimizer. Unlike ids, numbers are not used again after an optimizer was deleted.
        self._keys: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next_key = itertools.count()
        self._owned: weakref.WeakKeyDictionary[Optimizer, _Owned] = weakref.WeakKeyDictionary()
        self._is_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers of which `_owned` is known to be current."""
        # The optimizers that have stepped in the running step of DeepSpeed ZeRO, with what they have updated.
        self._inside_zero: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
        # The same for the optimizers that have stepped, at their last step.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()
        # Optimizers that have stepped the model, and have none of its parameters any more.
        self._orphans: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._manual_updates = ManualUpdates(report)
        self._needs_backward = False
        """Whether a forward ends a step only if a backward has run since the last step."""
        self._forwards_counted = 0
        self._ends_with = NO_BACKWARD
        """The backward pass at whose end the step ends."""
        self._subscription: Subscription | None = None
        self._output_hook: RemovableHandle | None = None
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        zero_step.listen(self, self._zero_stepped)
        self.resume()

    def resume(self) -> None:
        """Counts forwards and looks for manual updates, as long as no optimizer of the model has stepped."""
        if self._subscription is None and (self.mode == "forward" or self._looks_for_optimizer):
            # Most models have an optimizer. Compiled code is not changed before it is known that there is none.
            self._subscription = self._forwards.subscribe(self._forward_begins, in_graph=not self._auto)
        model = self._model()
        if self._output_hook is None and self._looks_for_optimizer and model is not None:
            self._output_hook = self._manual_updates.watch_outputs(model)

    @property
    def _looks_for_optimizer(self) -> bool:
        """Whether no optimizer of the model has stepped yet."""
        return self._auto and self.mode != "optimizer"

    def pause(self) -> None:
        """Takes the clock's hook off the model."""
        if self._output_hook is not None:
            self._output_hook.remove()
            self._output_hook = None

    def _stop_counting_forwards(self) -> None:
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None
        self.pause()

    def stop(self) -> None:
        zero_step.forget(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._owned.clear()
        self._stop_counting_forwards()

    def set_manual(self) -> None:
        """From now on only the user ends steps."""
        self.mode, self._auto = "manual", False
        self._stop_counting_forwards()

    def parameters_may_have_changed(self) -> None:
        """Parameters may have been replaced: which optimizers update them is checked again."""
        self._is_checked.clear()

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer updates any parameter of the model."""
        return bool(self._owned_by(optimizer))

    def _tick(self) -> None:
        if self._model() is None:  # the model was deleted: another thread may be submitting the last steps
            return
        try:
            self._listener.step_ended()
        finally:
            self.count += 1

    def optimizer_skipped(self, optimizer: Optimizer) -> bool:
        """A GradScaler skipped the optimizer's step. Returns whether the iteration has ended without any step."""
        with self.lock:
            self._optimizer_found()
            if self.mode != "optimizer":  # forwards or the user end the step, whatever the optimizer does
                return False
            self._round.add_skipped(self._key(optimizer))
            if not self._round.is_over:
                return False
            has_stepped = self._round.has_stepped
            self._round.restart()
            if has_stepped:
                self._tick()
            return not has_stepped

    def logged_step_ended(self) -> None:
        """Warns of optimizers that never step in a logged step."""
        for optimizer in self._unlogged.logged_step_ended():
            self._report.log_once(
                f"{type(optimizer).__name__} steps less often than another optimizer of this model, and never in a "
                "step that is logged: its gradients and updates are not in the log. Choose an `every` that shares no "
                "divisor with how often it steps (an odd one if it makes every second step)",
                once=f"never logged: {self._key(optimizer)}",
            )

    @dynamo_disable
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The global pre-hook of `Optimizer.step`."""
        with self._report.guarded("before the optimizer's step"), self.lock:
            parameters = self._owned_by(optimizer)
            if not parameters or self._is_nested() or self._observer.graph_capture.is_running():
                return
            key = self._key(optimizer)
            self._stepped[optimizer] = parameters
            self._optimizer_found()
            if self.mode == "optimizer" and optimizer not in self._inside_zero:
                if not self._round.is_member(key):
                    self._round.keep_only(set(self._keys.values()), self._parameters.ids() | parameters)
                self._round.replace_owners(key, parameters)
                if self._round.ended_before(key):
                    self._tick()
            is_late = self.mode == "optimizer" and self._round.is_late(key) and not self._round.is_infrequent(key)
            if in_backward() or not is_late:
                self._listener.before_optimizer(optimizer, has_closure(args, kwargs))
        self._listener.raise_if_asked()

    @dynamo_disable
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._report.guarded("after the optimizer's step"), self.lock:
            parameters = self._owned_by(optimizer)
            if not parameters:
                self._observer.other_optimizer_stepped()
            if not parameters or self._is_nested() or self._observer.graph_capture.is_running():
                return
            self.optimizer_steps += 1
            self._listener.after_optimizer(optimizer, has_closure(args, kwargs))
            if self.mode != "optimizer":
                return
            key = self._key(optimizer)
            if self._round.is_infrequent(key):
                self._unlogged.stepped(optimizer, self._listener.is_logging())
            if zero_step.is_running():
                self._inside_zero[optimizer] = self._inside_zero.get(optimizer, frozenset()) | parameters
            elif in_backward():
                self._end_with_backward(key, parameters)
            elif self._round.ended_after(key, parameters):
                self._tick()
        self._listener.raise_if_asked()

    def _zero_stepped(self) -> None:
        """DeepSpeed ZeRO has stepped all groups of its partitions: only now has the optimizer stepped."""
        with self._report.guarded("after a step of DeepSpeed ZeRO"), self.lock:
            stepped, self._inside_zero = list(self._inside_zero.items()), weakref.WeakKeyDictionary()
            for optimizer, parameters in stepped:
                if self._round.ended_after(self._key(optimizer), parameters):
                    self._tick()
        self._listener.raise_if_asked()

    def _key(self, optimizer: Optimizer) -> int:
        if optimizer not in self._keys:
            self._keys[optimizer] = next(self._next_key)
        return self._keys[optimizer]

    def _is_nested(self) -> bool:
        """Whether another optimizer's step makes this one (SAM, Lookahead, `super().step()`): only that one counts."""
        return any(self._owned_by(outer) for outer in _outer_optimizers())

    def _end_with_backward(self, key: int, parameters: frozenset[int]) -> None:
        """Ends the step with the backward pass, for optimizers that step inside it (one optimizer per parameter).

        Inside a nested backward pass no callback for the end of the outer one can be registered. If no optimizer steps
        in the outer one, the step ends when an optimizer steps for the second time.
        """
        if in_nested_backward():
            self._round.add_step(key, parameters)
        elif self._ends_with != backward_pass():  # a backward pass that raised has never called back
            self._ends_with = backward_pass()
            at_end_of_backward(self._backward_ended)

    @dynamo_skip
    def _backward_ended(self) -> None:
        with self._report.guarded("after backward"), self.lock:
            self._round.restart()
            self._tick()

    def _owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Returns the ids of the model's parameters that the optimizer updates."""
        if self._model() is None:
            return frozenset()
        groups = [group["params"] for group in optimizer.param_groups]
        # Groups may be added at any time, and DeepSpeed ZeRO exchanges them.
        held = sum(map(len, groups)), next((id(group[0]) for group in groups if group), 0)
        known = self._owned.get(optimizer)
        if known is None or known.held != held or optimizer not in self._is_checked:
            known = self._owned[optimizer] = self._find_owned(optimizer, held, known)
            self._is_checked.add(optimizer)
        return known.parameters

    def _find_owned(self, optimizer: Optimizer, held: _Held, known: _Owned | None) -> _Owned:
        """Finds the parameters, unless those that are `known` must be the same."""
        version = self._parameters.structure_version()
        ids = [*map(id, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))]
        if known is not None and known.found_in == (version, ids):
            return known
        owned = self._parameters.owned_by(optimizer)
        if owned:
            return _Owned(owned, held, (version, ids) if owned.issubset(ids) else None)
        return _Owned(self._formerly_owned_by(optimizer), held, None)

    def _formerly_owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Returns the parameters that the optimizer updated while they were the model's, and warns that they are not.
        Steps are counted by such an optimizer until one steps that updates the model.
        """
        former = self._stepped.get(optimizer, frozenset()) & parameter_ids(optimizer)
        if not former or self._model() is None:
            return frozenset()
        self._orphans.add(optimizer)
        self._report.log_once(
            f"{type(optimizer).__name__} no longer updates the model: its parameters are no longer the model's. They "
            "were replaced after the optimizer was created, for example by load_state_dict(assign=True). Create the "
            "optimizer after that. Its steps are still counted",
            once=f"orphan: {self._key(optimizer)}",
        )
        return former if all(other in self._orphans for other in self._stepped) else frozenset()

    def _optimizer_found(self) -> None:
        if self._looks_for_optimizer:
            if self.mode == "forward":
                self._report.log_once("found an optimizer of this model: its steps are counted from now on, from 0")
                self.count = 0
            self.mode = "optimizer"
            if not self._observer.gate.was_compiled:  # removing a hook would make torch compile the model again
                self._stop_counting_forwards()

    def _forward_begins(self, model: nn.Module, _count: object) -> None:
        with self.lock:
            if self.mode not in ("auto", "forward") or not self._observer.is_training_pass(model):
                return
            if self._auto:
                self._check_for_manual_updates(model)
            has_trained = self._manual_updates.backward_ran or not self._needs_backward
            if self.mode == "forward" and self._forwards_counted and has_trained:
                self._tick()
                self._manual_updates.backward_ran = False
            self._forwards_counted += 1

    def _check_for_manual_updates(self, model: nn.Module) -> None:
        """Counts forwards from now on if it seems that no optimizer updates the model."""
        why = self._manual_updates.forward_begins(model, self._observer.gradients_seen)
        if why is not None and self.mode == "auto":
            self.mode, self._needs_backward = "forward", self._manual_updates.backward_ever_ran
            ends = "a forward after a backward begins the next step" if self._needs_backward else "each forward is one"
            self._report.log_once(
                f"no torch optimizer steps this model ({why}): {ends}; updates are not logged. "
                'Call step() yourself, or pass step="forward" to count forwards from the start'
            )


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `optimizer.step` was called with a closure; args[0] is the optimizer itself."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _step_code() -> CodeType | None:
    """Returns the code of the wrapper that torch puts around every optimizer's `step`."""
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return getattr(wrap(has_closure), "__code__", None) if wrap is not None else None


_STEP_CODE = _step_code()


def _outer_optimizers() -> list[Optimizer]:
    """Returns the optimizers whose steps have called the running step.

    They are read from the stack each time, because a step that raises calls no post-hook.
    """
    running: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_CODE:
            running.append(frame)
        frame = frame.f_back
    outer = [each.f_locals.get("self") for each in running[1:]]  # the first frame is the running step
    return [optimizer for optimizer in outer if isinstance(optimizer, Optimizer)]
