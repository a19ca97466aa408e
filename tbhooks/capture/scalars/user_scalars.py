"""Scalars that the user logs (`Watch.log`): each is given to the step it belongs to.

Device scalars stay on their device until a step's one copy. A scalar that comes after its step's copy was started is
added on the host, or, if it is on a device, is part of the next copy. After the first of those, steps keep their copy
back until the next forward, so that such scalars are in it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.packed_step import PackedStep
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.step.step import State, Step


class UserScalars:
    """Gives each scalar to the open step or to the one that has just ended.

    A scalar that is logged between a step's end and the next training forward belongs to the step that has ended,
    unless that step has a value of this tag already: then it is logged before the forward of the step that follows. If
    the step that has ended is not a logged one, the tag decides: one that was logged after the end of a step before
    is not taken for one of the next step.
    """

    def __init__(
        self, recorder: Recorder, observer: Observer, context: RankContext, submit: Callable[[PackedStep], None]
    ) -> None:
        self.is_used = False
        """Whether the user has ever logged a scalar."""
        self.come_late_from_devices = False
        """Whether the user has ever logged a device scalar to a step that had ended."""
        self._recorder = recorder
        self._observer = observer
        self._rank, self._is_merged = context.rank, context.rank_group is not None
        self._submit = submit
        self._logged_after_step: set[str] = set()
        # Scalars that came after their step's copy, by the label of that step and their tag.
        self._for_next_copy: dict[tuple[int, str], Tensor | float] = {}

    def log(self, tag: str, value: Tensor | float, step: Step, ended: Step | None) -> None:
        """Logs a scalar; `step` is the open step, `ended` the one before it if it still takes late scalars."""
        self.is_used = True
        if step.was_skipped:
            return
        if ended is not None and ended.is_logged and tag not in ended.tags:
            self._logged_after_step.add(tag)
            self.log_late(ended, tag, value)
        elif step.is_logged and (ended is None or tag not in self._logged_after_step):
            if self._observer.seen is not None:
                self._recorder.scalar(tag, value)
            else:  # the step that has ended has the recorder
                step.early[tag] = value.detach().clone() if isinstance(value, Tensor) else value

    def log_late(self, ended: Step, tag: str, value: Tensor | float) -> None:
        """Logs a scalar to a logged step that has ended."""
        ended.tags.add(tag)
        if ended.state is State.CLOSED:
            self._recorder.scalar(tag, value)
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            self.come_late_from_devices = True
            self._for_next_copy[ended.label, tag] = value.detach().clone()
        elif ended.state is State.PACKED:
            ended.add(tag, _number(value))
        elif self._is_merged:
            self._for_next_copy[ended.label, tag] = _number(value)
        else:
            self._submit(self._recorder.scalars_alone(ended.label, self._rank, {tag: _number(value)}))

    @property
    def wait_for_a_copy(self) -> bool:
        """Whether there are scalars that came after their step's copy."""
        return bool(self._for_next_copy)

    def add_to_copy(self) -> None:
        """Records them under their own steps, so that they are part of the copy that is about to be made."""
        for (step, tag), value in self._for_next_copy.items():
            self._recorder.scalar(tag, value, earlier_step=step)
        self._for_next_copy = {}


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
