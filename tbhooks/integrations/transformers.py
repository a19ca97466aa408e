"""`Trainer(..., callbacks=[WatchCallback(every=100)])` with `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import default_logdir

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import Trainings


class WatchCallback(TrainerCallback):
    """Watches the Trainer's model. `every` counts optimizer steps; `state.global_step` before each is its number.

    Without a `writer`, what is seen goes to a run of its own, `tbhooks`, in the Trainer's logging directory. Options
    are those of `tbhooks.watch`; `callback.watch` is the watch of the last training.
    """

    def __init__(self, every: int = 100, writer: Any = None, **options: Any) -> None:
        self._trainings = Trainings(every, options)
        self._writer = writer

    @property
    def watch(self) -> Watch | None:
        """The watch of the training that is running, or of the last one."""
        return self._trainings.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        writer = _directory(args, state) / "tbhooks" if self._writer is None else self._writer
        self._trainings.begin(kwargs["model"], writer, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainings.end_step(state.global_step - 1)  # the Trainer has counted it already

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainings.finish()


def _directory(args: Any, state: Any) -> Path:
    """The Trainer's own TensorBoard run, in which ours is one of its own: two files in one run hide each other."""
    chosen = os.environ.get("TENSORBOARD_LOGGING_DIR")
    directory = Path(chosen).expanduser() if chosen else Path(args.output_dir, default_logdir())
    if not chosen and "tensorboard" in args.report_to and directory.parent.is_dir():
        # Its name is a time, and that has passed.
        directory = max(directory.parent.iterdir(), key=lambda run: run.stat().st_mtime, default=directory)
    return directory / (state.trial_name or "")
