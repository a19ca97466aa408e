"""The scalars of a step: those that the user logs (`Watch.log`), running means, and training metrics.

Device scalars stay on their device until the one copy of a step. If a scalar is logged after the copy of its step was
started, it is added on the host, or, if it is on a device, is part of the next copy. After the first such scalar on a
device, steps delay their copy until the next call of `log`, or the next forward, so that such scalars are in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from tbhooks.capture.flight.recorder import FlightRecorder
from tbhooks.capture.hooks.forward_event import ForwardEvent
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.running_means import MeansWriter
from tbhooks.capture.scalars.training_metrics import TrainingMetrics
from tbhooks.capture.step.optimizer_round import GroupNumbers
from tbhooks.capture.step.step import State, Step


class StepScalars:
    """Adds each scalar to the open step or to the one that has just ended.

    A scalar that is logged between a step's end and the next training forward belongs to the step that has ended. If
    that step already has a value of this tag, it belongs to the next step. If the step that has ended is not a logged
    one, the scalar belongs to the next step, unless its tag was ever logged after the end of a step.
    """

    def __init__(
        self, model: weakref.ref[nn.Module], recorder: Recorder, observer: Observer, groups: GroupNumbers,
        forwards: ForwardEvent, flight: FlightRecorder, context: RankContext, submit: Callable[[PackedStep], None],
    ) -> None:  # fmt: skip
        self.means = MeansWriter(model, observer, context, submit)
        self.metrics = TrainingMetrics(model, groups, forwards)
        self.is_used = False
        """Whether the user has ever logged a scalar."""
        self._recorder = recorder
        self._observer = observer
        self._flight = flight
        self._rank, self._is_merged = context.rank, context.rank_group is not None
        self._submit = submit
        self._logged_after_step: set[str] = set()
        # Whether the user has ever logged a device scalar to a step that had ended.
        self._come_late_from_devices = False
        # Scalars that were logged after the copy of their step, by the label of that step and their tag.
        self._for_next_copy: dict[tuple[int, str], Tensor | float] = {}

    def log(self, tag: str, value: Tensor | float, step: Step, ended: Step | None) -> None:
        """Logs a scalar; `step` is the open step, `ended` the one before it if it still takes late scalars."""
        has_means = self.means.every is not None
        if self._flight.is_on and not step.was_skipped:
            is_late = ended is not None and (ended.is_logged or has_means or tag in self._logged_after_step)
            self._flight.scalar(tag, value, step.number, is_late)
        if has_means:
            self.means.add(tag, value)
            return
        self.is_used = True
        step.was_skipped = step.was_skipped and not self._observer.called
        if step.was_skipped:
            return
        if ended is not None and ended.is_logged and tag not in ended.tags:
            self._logged_after_step.add(tag)
            self._log_late(ended, tag, value)
        elif step.is_logged and (ended is None or tag not in self._logged_after_step):
            if self._observer.seen is not None:
                self._recorder.scalar(tag, value)
            else:  # the step that has ended still uses the recorder
                step.early[tag] = value.detach().clone() if isinstance(value, Tensor) else value

    def _log_late(self, ended: Step, tag: str, value: Tensor | float) -> None:
        """Logs a scalar to a logged step that has ended."""
        ended.tags.add(tag)
        if ended.state is State.CLOSED:
            self._recorder.scalar(tag, value)
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self._come_late_from_devices = True
            self._for_next_copy[ended.label, tag] = value.detach().clone()
        elif ended.state is State.PACKED:
            ended.add(tag, _number(value))
        elif self._is_merged:
            self._for_next_copy[ended.label, tag] = _number(value)
        else:
            self._submit(self._recorder.scalars_alone(ended.label, self._rank, {tag: _number(value)}))

    def before_optimizer(self, optimizer: Optimizer, step: int) -> None:
        """Reads the settings of the optimizer, if the step will be written."""
        if self._is_written(step):
            self.metrics.before_optimizer(optimizer)

    def step_ends(self, step: int) -> None:
        """Adds the training metrics to the step that ends, if it is written."""
        self.means.step_ends(step)
        if self._is_written(step):
            numbers = self.metrics.numbers(step)
            if self._observer.seen is None:
                self.means.extra = numbers
                return
            for tag, number in numbers.items():
                self._recorder.scalar(tag, number)

    def _is_written(self, step: int) -> bool:
        """Whether the open step is written: it is a logged one, or running means are due."""
        return self._observer.seen is not None or self.means.writes(step)

    @property
    def may_come_late(self) -> bool:
        """Whether more scalars may be logged to the step that has ended, and have to be in its copy."""
        return self._come_late_from_devices or self.means.is_due

    @property
    def wait_for_a_copy(self) -> bool:
        """Whether there are scalars that were logged after the copy of their step."""
        return bool(self._for_next_copy)

    def add_to_copy(self, with_late: bool) -> None:
        """Adds the means that are due to the copy that follows; `with_late` also these scalars, with their steps."""
        if with_late:
            for (step, tag), value in self._for_next_copy.items():
                self._recorder.scalar(tag, value, earlier_step=step)
            self._for_next_copy = {}
        self.means.add_to_copy(self._recorder)

    def write_means(self, ended: Step | None, last_label: int) -> None:
        """Writes the running means that are due and were not in the copy of the step that has ended."""
        if self.means.is_due:
            means = self.means.take()
            if ended is not None and ended.is_logged and ended.label == last_label:
                for tag, mean in means.items():
                    self._log_late(ended, tag, mean)
            else:
                self.means.write(last_label, means)


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
