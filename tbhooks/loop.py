"""One logged step from its first hook to the copy: wires clock, probe, parameters and recorder together.

It lives in the training thread, hands finished steps to `submit` and never waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.buffer import Pending, Recorder
from tbhooks.clock import Clock
from tbhooks.parameters import ParameterReader
from tbhooks.probe import Probe
from tbhooks.report import Report
from tbhooks.select import Selector, unwrap

# Histograms of each of the first logged steps, then half as often with every doubling.
HISTOGRAMS_IN_FULL = 100


@dataclass(frozen=True)
class Schedule:
    """Which steps are logged, and which of those take histograms."""

    every: int
    histograms: bool | int

    def logs(self, step: int) -> bool:
        return step % self.every == 0

    def takes_histograms(self, logged: int) -> bool:
        """Whether the n-th logged step does, counted from 0."""
        if self.histograms is True:
            doublings = (logged // HISTOGRAMS_IN_FULL).bit_length()
            return logged % (1 << doublings) == 0
        return self.histograms is not False and logged % self.histograms == 0


class Loop:
    """Listens to the clock; reads logged steps; hands each over once nothing more can belong to it."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, mode: str,
        rank: int, submit: Callable[[Pending], None], report: Report,
    ) -> None:  # fmt: skip
        self.recorder = Recorder(kinds)
        self.probe = Probe(model, selector, self.recorder, report)
        self.parameters = ParameterReader(model, selector, self.recorder, report)
        self.clock = Clock(mode, unwrap(model), self, report)
        self.logged = 0
        self._schedule = schedule
        self._rank = rank
        self._submit = submit
        self._report = report
        self._paused = False
        self._groups_seen = 0
        # A step that has ended: still gathering late scalars, or copied and not yet handed over.
        self._ended: int | None = None
        self._packed: Pending | None = None
        self._just_ended = False
        # Tags that were logged after their step had ended: the next step waits for them before its copy.
        self._late: set[str] = set()
        self._late_now: set[str] = set()
        # Device scalars that came after the copy: they ride in the next one, under their own step.
        self._held: dict[str, tuple[int, Tensor]] = {}

    def start(self) -> None:
        self.clock.start()
        if self._schedule.logs(0):
            self._begin()

    def stop(self) -> None:
        """Ends everything and hands over what there is, a step cut short too."""
        self.settle()
        with self._report.guarded("closing"):
            if self.probe.token is not None and self.recorder.calls:
                if self.clock.mode != "optimizer":  # no optimizer will come to read them at
                    self.parameters.rest()
                self._pack(self.clock.count)
            self.abandon()
        self.settle()
        self.clock.stop()

    def abandon(self) -> None:
        """Forgets the open step and leaves no hook on the model."""
        self.probe.abandon()
        self.parameters.forget()

    def settle(self) -> None:
        """Hands over everything that has ended, for a reader who waits: scalars that missed their copy too."""
        with self._report.guarded("handing over a step"):
            self._finish_step()
            if self._held and self.probe.token is None:
                self._submit(self._copy(self.clock.count))

    def _finish_step(self) -> None:
        """Something of the next step is seen: nothing more can belong to the one that has ended."""
        if self._ended is not None:
            self._pack(self._ended)
            self._begin_if_due()
        if self._packed is not None:
            # Handed over before it is forgotten: a signal in between may write it twice, but never lose it.
            self._submit(self._packed)
            self._packed = None
            self._late, self._late_now = self._late_now, set()

    def pause(self, paused: bool) -> None:
        self._paused = paused
        if paused:
            self.probe.detach()
        elif self.probe.token is not None:
            self.probe.attach()

    def log(self, values: dict[str, Tensor | float]) -> None:
        """Numbers for the logged step they belong to: the open one, or the one that has just ended."""
        with self._report.guarded("log"):
            for tag, value in values.items():
                self._log_one(tag, value)
            if self._ended is not None and self._late <= self.recorder.scalar_tags:
                self._pack(self._ended)
                self._begin_if_due()

    def _log_one(self, tag: str, value: Tensor | float) -> None:
        if self._ended is not None:
            if tag not in self.recorder.scalar_tags:
                self.recorder.scalar(tag, value)
                self._late_now.add(tag)
        elif self._packed is not None and tag not in self._packed.scalars and tag not in self._held:
            self._late_now.add(tag)
            self._add_to_packed(self._packed, tag, value)
        elif self.probe.token is not None and (tag not in self._late or self.probe.called):
            # A late one before the open step has begun is of the unlogged step before it.
            self.recorder.scalar(tag, value)

    def _add_to_packed(self, packed: Pending, tag: str, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.device.type != "cpu":
                self._held[tag] = (packed.step, value.clone())
                return
        self._packed = replace(packed, scalars={**packed.scalars, tag: float(value)})

    def step(self, label: int | None) -> None:
        """The user ends the step."""
        with self._report.guarded("step"):
            already = self._just_ended and self.clock.mode != "manual"
            self.clock.manual()
            if already:
                self._relabel(label)
            else:
                self._step_ended(self.clock.count if label is None else label)
                self.clock.count += 1
            self._finish_step()

    def _relabel(self, label: int | None) -> None:
        if label is not None and self._ended is not None:
            self._ended = label
        elif label is not None and self._packed is not None:
            self._packed = replace(self._packed, step=label)

    # What the clock calls.

    def owned(self, optimizer: Optimizer) -> frozenset[int]:
        return self.parameters.owned(optimizer)

    def admits(self, model: nn.Module) -> bool:
        return self.probe.admits(model)

    def watch_root(self, told: Callable[[], None]) -> RemovableHandle | None:
        return self.probe.watch_root(told)

    def before_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._finish_step()
        self._just_ended = False
        if self.probe.token is not None and not self._paused:
            self._log_learning_rates(optimizer)
            self.parameters.before(optimizer, has_closure)

    def after_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self.probe.token is not None and not self._paused:
            self.parameters.after(optimizer, has_closure)

    def step_ended(self) -> None:
        self._step_ended(self.clock.count)

    def _step_ended(self, label: int) -> None:
        self._finish_step()
        self._just_ended = True
        next_is_logged = self._schedule.logs(self.clock.count + 1)
        if self.probe.token is not None:
            self._warn_if_blind(label)
            self._end_reading(keep_hooks=next_is_logged and not self._paused)
            if not self._late <= self.recorder.scalar_tags:
                self._ended = label
                if next_is_logged:
                    self.probe.next_forward = self._finish_step
                return
            self._pack(label)
        if next_is_logged:
            self._begin()
            self.probe.next_forward = self._finish_step

    def _begin_if_due(self) -> None:
        if self._schedule.logs(self.clock.count):
            self._begin()

    def _begin(self) -> None:
        self._groups_seen = 0
        self.clock.look_again()
        self.recorder.begin(self._schedule.takes_histograms(self.logged))
        self.probe.begin(attach=not self._paused)

    def _end_reading(self, keep_hooks: bool) -> None:
        if not self._paused:
            self.parameters.rest()
        self.parameters.forget()
        self.probe.end(keep_hooks)
        if self.recorder.overflowed:
            self._report.tell("a step made more calls than its buffer holds; the rest of it is not in its numbers")

    def _pack(self, label: int) -> None:
        self._ended = None
        self._packed = self._copy(label)
        self.logged += 1

    def _copy(self, label: int) -> Pending:
        for tag, (step, value) in self._held.items():
            self.recorder.scalar(tag, value, earlier_step=step)
        self._held = {}
        return self.recorder.pack(label, self._rank)

    def _warn_if_blind(self, label: int) -> None:
        if not self._paused and self.recorder.wants("activation", "gradient") and not self.probe.called:
            self._report.tell(
                f"step {label} was to be logged, but no watched module was called in it. A model compiled before "
                "watch() ignores later hooks: call watch() before the first compiled call",
                once="blind",
            )

    def _log_learning_rates(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            name = group.get("name", self._groups_seen)
            self._groups_seen += 1
            if isinstance(group.get("lr"), Tensor | float | int):
                self.recorder.scalar(f"train.lr/{name}", group["lr"])
