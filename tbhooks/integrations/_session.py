"""Shared by the callbacks: one watch per training, whose steps the framework ends and labels."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tbhooks.api.handle import Watch, lifecycle_of
from tbhooks.api.watch import watch
from tbhooks.data.errors import ArgumentError, check_integer, check_names

# The callbacks themselves set the model and the end of steps.
OPTIONS = tuple(inspect.signature(watch, follow_wrapped=False).parameters.keys() - {"model", "writer", "every", "step"})


class TrainingSession:
    """Watches the model of one training after the other, each with the same options.

    Raises ArgumentError for a wrong `every` and for unknown options.
    """

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        self.watch: Watch | None = None
        self._every = check_integer("every", every)
        self._options = options
        self._optimizer_steps = 0
        if "step" in options:
            raise ArgumentError("step cannot be set here: the framework decides when a step ends")
        check_names("option", options, OPTIONS)

    def begin(self, model: nn.Module, writer: Any, step: int = 0) -> Watch:
        """Watches this model from now on; the watch of the training before is closed. `step` steps were made before."""
        self.close()
        self.watch = watch(model, writer, self._every, step="manual", **self._options)
        self.resume_at(step)
        return self.watch

    def resume_at(self, step: int) -> None:
        """Continues the count at this step, as after a checkpoint was loaded."""
        if self.watch is not None:
            lifecycle_of(self.watch).session.clock.count = step

    @property
    def is_over(self) -> bool:
        return self.watch is None or lifecycle_of(self.watch).is_closed

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last call."""
        before = self._optimizer_steps
        self._optimizer_steps = 0 if self.watch is None else lifecycle_of(self.watch).session.clock.optimizer_steps
        return self._optimizer_steps > before

    def end_step(self, label: int) -> None:
        if self.watch is not None and not self.is_over:
            self.watch.step(label)

    def finish(self) -> None:
        """At the regular end of a training: drops an open step, such as forwards of a last evaluation, and closes."""
        if self.watch is not None and not self.is_over:
            lifecycle_of(self.watch).session.abandon()
        self.close()

    def close(self) -> None:
        """Closes the watch and writes all data, also that of an unfinished step. `watch` stays readable."""
        if self.watch is not None:
            self.watch.close()
        self._optimizer_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of a callback has no watch."""
        return {**self.__dict__, "watch": None}
