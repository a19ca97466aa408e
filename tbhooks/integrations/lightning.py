"""`Trainer(callbacks=[WatchCallback(every=100)])` for `lightning` and `pytorch_lightning`.

The two packages have different Callback classes; ours derives from that of the imported package, or from both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import TrainingSession

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type:
    imported = [name for name in _PACKAGES if sys.modules.get(name)] or _installed()
    if not imported:
        raise ImportError("tbhooks.integrations.lightning needs lightning: pip install 'tbhooks[lightning]'")
    return type("Callback", tuple(importlib.import_module(name).Callback for name in imported), {})


def _installed() -> list[str]:
    for name in _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return [name]
    return []


_Callback: Any = _callback_class()


class WatchCallback(_Callback):  # type: ignore[misc]
    """A Lightning callback that watches the LightningModule during `fit`.

    Args:
        every: log every Nth optimizer step. Steps are labelled by `trainer.global_step` before the step.
        writer: as in `tbhooks.watch`. None logs to the trainer's TensorBoard, wandb and MLflow loggers, or keeps the
            data in memory if there are none.
        options: further arguments of `tbhooks.watch`, except `step`.

    Raises ArgumentError for an unknown option.

    Examples:
        >>> trainer = Trainer(callbacks=[WatchCallback(every=100)])  # doctest: +SKIP

    """

    def __init__(self, every: int = 100, writer: Any = None, **options: Any) -> None:
        self._session = TrainingSession(every, options)
        self._writer = writer
        self._steps = 0

    @property
    def watch(self) -> Watch | None:
        """The `Watch` of the current or last fit; None before the first."""
        return self._session.watch

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Before the sanity check: hooks on a compiled module must be registered before its first call.
        self._session.begin(pl_module, _loggers(trainer) if self._writer is None else self._writer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step  # now a checkpoint is loaded
        self._session.resume_at(self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps:  # not yet, while gradients are accumulated
            self._session.end_step(self._steps)
            self._steps = trainer.global_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._session.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._session.finish()


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "TensorBoardLogger": lambda logger: logger.experiment,
    "WandbLogger": lambda logger: logger.experiment,
    "MLFlowLogger": lambda logger: logger.experiment.get_run(logger.run_id),
}


def _loggers(trainer: Any) -> list[Any]:
    """The writers of the supported loggers; none on other ranks than the first, where loggers are dummies."""
    if not trainer.is_global_zero:
        return []
    named = [(logger, {base.__name__ for base in type(logger).__mro__}) for logger in trainer.loggers]
    return [writer_of(logger) for logger, names in named for name, writer_of in _WRITERS.items() if name in names]
