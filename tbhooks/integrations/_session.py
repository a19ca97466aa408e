"""What the callbacks share: one watch a training, whose steps the framework ends and numbers by its own count."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tbhooks.api.handle import Watch, lifecycle_of
from tbhooks.api.watch import watch
from tbhooks.data.errors import ArgumentError, check_integer, check_names

# The framework says which model, and when a step ends.
OPTIONS = tuple(inspect.signature(watch, follow_wrapped=False).parameters.keys() - {"model", "writer", "every", "step"})


class Trainings:
    """Watches one training after the other, each with these options."""

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        self.watch: Watch | None = None
        self._every = check_integer("every", every)
        self._options = options
        self._optimizer_steps = 0
        if "step" in options:
            raise ArgumentError("step is not for you to choose here: the framework says when a step ends")
        check_names("option", options, OPTIONS)

    def begin(self, model: nn.Module, writer: Any, step: int = 0) -> Watch:
        """Watches this model from now on, after so many steps; the training before is over, whether it ended or not."""
        self.close()
        self.watch = watch(model, writer, self._every, step="manual", **self._options)
        self.resume_at(step)
        return self.watch

    def resume_at(self, step: int) -> None:
        """So many steps were made before, by another process or another training."""
        if self.watch is not None:
            lifecycle_of(self.watch).session.clock.count = step

    @property
    def is_over(self) -> bool:
        return self.watch is None or lifecycle_of(self.watch).is_closed

    def has_stepped(self) -> bool:
        """Whether an optimizer has, since this was asked last."""
        before = self._optimizer_steps
        self._optimizer_steps = 0 if self.watch is None else lifecycle_of(self.watch).session.clock.optimizer_steps
        return self._optimizer_steps > before

    def end_step(self, label: int) -> None:
        if self.watch is not None and not self.is_over:
            self.watch.step(label)

    def finish(self) -> None:
        """At a training's regular end: what no step came of, such as evaluations, is none."""
        if self.watch is not None and not self.is_over:
            lifecycle_of(self.watch).session.abandon()
        self.close()

    def close(self) -> None:
        """At any end: what was seen is written, a step cut short too, and stays readable in `watch`."""
        if self.watch is not None:
            self.watch.close()
        self._optimizer_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy, and what is sent to another process, has trainings of its own."""
        return {**self.__dict__, "watch": None}
