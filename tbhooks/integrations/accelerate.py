"""`watch(accelerator, model)`: a loop of your own with `accelerate`. Nothing of it is imported here."""

from __future__ import annotations

from typing import Any

from torch import nn

from tbhooks.api.watch import Watch
from tbhooks.api.watch import watch as watch_model

_KNOWN = ("tensorboard", "wandb", "mlflow", "aim")


def watch(accelerator: Any, model: nn.Module, writer: Any = None, every: int = 100, **options: Any) -> Watch:
    """Watches a model, prepared or not; options are those of `tbhooks.watch`, and so is what is returned.

    A step is one of the optimizer's, so that the micro-batches of `accelerator.accumulate` make one. Without a
    `writer`, what is seen goes to the accelerator's trackers (call `init_trackers` before).
    """
    where = _trackers(accelerator) if writer is None else writer
    return watch_model(accelerator.unwrap_model(model), where, every, **options)


def _trackers(accelerator: Any) -> list[Any]:
    if not accelerator.is_main_process:
        return []
    return [tracker.tracker for tracker in accelerator.trackers if tracker.name in _KNOWN]
