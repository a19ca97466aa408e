"""`attach(trainer, model, writer)`: for an Engine of `ignite` that trains."""

from __future__ import annotations

from typing import Any

from ignite.engine import Events
from torch import nn

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import Trainings


def attach(trainer: Any, model: nn.Module, writer: Any = None, every: int = 100, **options: Any) -> Watch:
    """Watches the model in every run of the engine, from now on.

    `every` counts optimizer steps; the iteration each is made in is its number (ignite counts from 1). Options are
    those of `tbhooks.watch`, and so is what is returned: the watch of the first run.
    """
    trainings = Trainings(every, options)
    watching = trainings.begin(model, writer, trainer.state.iteration)

    def start() -> None:
        if trainings.is_over:
            trainings.begin(model, writer)
        trainings.resume_at(trainer.state.iteration)

    def end_step() -> None:
        if trainings.has_stepped():  # accumulation may have yet to come to its step
            trainings.end_step(trainer.state.iteration)

    def stop(engine: Any, problem: BaseException) -> None:
        trainings.close()
        if len(engine._event_handlers[Events.EXCEPTION_RAISED]) == 1:  # the engine raises it where nobody listens
            raise problem

    for event, handler in (
        (Events.STARTED, start), (Events.ITERATION_COMPLETED, end_step), (Events.COMPLETED, trainings.finish),
        (Events.EXCEPTION_RAISED, stop),
    ):  # fmt: skip
        trainer.add_event_handler(event, handler)
    return watching
