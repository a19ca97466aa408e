"""`Trainer(..., callbacks=[WatchCallback(every=100)])` for Hugging Face `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import default_logdir

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import TrainingSession


class WatchCallback(TrainerCallback):
    """A Trainer callback that watches the Trainer's model during `train()`.

    Args:
        every: log every Nth optimizer step. Steps are labelled by `state.global_step` before the step.
        writer: as in `tbhooks.watch`. None writes to the directory `tbhooks` inside the Trainer's logging directory.
        options: further arguments of `tbhooks.watch`, except `step`.

    Raises ArgumentError for an unknown option.

    Examples:
        >>> trainer = Trainer(model, arguments, callbacks=[WatchCallback(every=100)])  # doctest: +SKIP

    """

    def __init__(self, every: int = 100, writer: Any = None, **options: Any) -> None:
        self._session = TrainingSession(every, options)
        self._writer = writer

    @property
    def watch(self) -> Watch | None:
        """The `Watch` of the current or last training; None before the first."""
        return self._session.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        writer = _directory(args, state) / "tbhooks" if self._writer is None else self._writer
        self._session.begin(kwargs["model"], writer, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.end_step(state.global_step - 1)  # already incremented by the Trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.finish()


def _directory(args: Any, state: Any) -> Path:
    """The Trainer's TensorBoard directory; ours is below it, as two event files in one directory hide each other."""
    chosen = os.environ.get("TENSORBOARD_LOGGING_DIR")
    directory = Path(chosen).expanduser() if chosen else Path(args.output_dir, default_logdir())
    if not chosen and "tensorboard" in args.report_to and directory.parent.is_dir():
        # Its name is the time at which the Trainer made it.
        directory = max(directory.parent.iterdir(), key=lambda run: run.stat().st_mtime, default=directory)
    return directory / (state.trial_name or "")
