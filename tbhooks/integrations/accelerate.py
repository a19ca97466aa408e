"""`watch(accelerator, model)` for training loops that use Hugging Face `accelerate`, which is not imported here."""

from __future__ import annotations

from typing import Any

from torch import nn

from tbhooks.api.watch import Watch
from tbhooks.api.watch import watch as watch_model

_SUPPORTED_TRACKERS = ("tensorboard", "wandb", "mlflow", "aim")


def watch(accelerator: Any, model: nn.Module, writer: Any = None, every: int = 100, **options: Any) -> Watch:
    """Watches a model of an `accelerate` training loop.

    Args:
        accelerator: the `Accelerator`.
        model: the model, before or after `accelerator.prepare`.
        writer: as in `tbhooks.watch`. None logs to the TensorBoard, wandb, MLflow and Aim trackers of the accelerator;
            call `accelerator.init_trackers` before.
        every: log every Nth optimizer step. The micro-batches of `accelerator.accumulate` make one step.
        options: further arguments of `tbhooks.watch`.

    Returns:
        The `Watch`. Raises ArgumentError as `tbhooks.watch` does.

    Examples:
        >>> watch(accelerator, model, every=100)  # doctest: +SKIP

    """
    destination = _trackers(accelerator) if writer is None else writer
    return watch_model(accelerator.unwrap_model(model), destination, every, **options)


def _trackers(accelerator: Any) -> list[Any]:
    if not accelerator.is_main_process:
        return []
    return [tracker.tracker for tracker in accelerator.trackers if tracker.name in _SUPPORTED_TRACKERS]
