"""`attach(trainer, model, writer)` for a training `Engine` of PyTorch-Ignite."""

from __future__ import annotations

from typing import Any

from ignite.engine import Events
from torch import nn

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import TrainingSession


def attach(trainer: Any, model: nn.Module, writer: Any = None, every: int = 100, **options: Any) -> Watch:
    """Watches a model in every run of a training engine, from now on.

    Args:
        trainer: the `ignite.engine.Engine` that trains the model.
        model: the model.
        writer: as in `tbhooks.watch`.
        every: log every Nth optimizer step. Steps are labelled by `trainer.state.iteration`, which counts from 1.
        options: further arguments of `tbhooks.watch`, except `step`.

    Returns:
        The `Watch` of the first run. Raises ArgumentError as `tbhooks.watch` does.

    Examples:
        >>> attach(trainer, model, SummaryWriter("runs/try"), every=100)  # doctest: +SKIP

    """
    session = TrainingSession(every, options)
    watching = session.begin(model, writer, trainer.state.iteration)

    def start() -> None:
        if session.is_over:
            session.begin(model, writer)
        session.resume_at(trainer.state.iteration)

    def end_step() -> None:
        if session.has_stepped():  # not yet, while gradients are accumulated
            session.end_step(trainer.state.iteration)

    def stop(engine: Any, problem: BaseException) -> None:
        session.close()
        # An engine raises only if there is no handler, so if ours is the only one it has to raise.
        handlers = getattr(engine, "_event_handlers")  # noqa: B009  ignite has no public way to count them
        if len(handlers[Events.EXCEPTION_RAISED]) == 1:
            raise problem

    for event, handler in (
        (Events.STARTED, start), (Events.ITERATION_COMPLETED, end_step), (Events.COMPLETED, session.finish),
        (Events.EXCEPTION_RAISED, stop),
    ):  # fmt: skip
        trainer.add_event_handler(event, handler)
    return watching
