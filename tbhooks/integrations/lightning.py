"""`Trainer(callbacks=[WatchCallback(every=100)])` with `lightning` or `pytorch_lightning`.

Their Callback classes are not the same; this one is of whichever is imported, or of both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from tbhooks.api.watch import Watch
from tbhooks.integrations._session import Trainings

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
    """Watches the LightningModule. `every` counts optimizer steps; `trainer.global_step` before each is its number.

    Without a `writer`, what is seen goes to the trainer's TensorBoard, wandb and MLflow loggers, or, if there are none,
    stays in memory: `callback.watch` is the watch of the last fit. Options are those of `tbhooks.watch`.
    """

    def __init__(self, every: int = 100, writer: Any = None, **options: Any) -> None:
        self._trainings = Trainings(every, options)
        self._writer = writer
        self._steps = 0

    @property
    def watch(self) -> Watch | None:
        """The watch of the fit that is running, or of the last one."""
        return self._trainings.watch

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Before the sanity check: a compiled module takes no hook after its first call.
        self._trainings.begin(pl_module, _loggers(trainer) if self._writer is None else self._writer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step  # a checkpoint has been loaded by now
        self._trainings.resume_at(self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps:  # accumulation may have yet to come to its step
            self._trainings.end_step(self._steps)
            self._steps = trainer.global_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._trainings.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainings.finish()


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "TensorBoardLogger": lambda logger: logger.experiment,
    "WandbLogger": lambda logger: logger.experiment,
    "MLFlowLogger": lambda logger: logger.experiment.get_run(logger.run_id),
}


def _loggers(trainer: Any) -> list[Any]:
    """What of the trainer's loggers can be written to; on other ranks than the first they are stand-ins."""
    if not trainer.is_global_zero:
        return []
    named = [(logger, {base.__name__ for base in type(logger).__mro__}) for logger in trainer.loggers]
    return [writer_of(logger) for logger, names in named for name, writer_of in _WRITERS.items() if name in names]
