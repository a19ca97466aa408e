"""The training on digits in a Lightning Trainer.

As a script it trains on two ranks: `python -m tests.support.lightning_training DIRECTORY local|merge`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn import functional as F

from tbhooks.integrations.lightning import WatchCallback
from tests.support.digits_training import ACCUMULATED, CLIP, loader, make_net, make_optimizer


def make_module(package: Any = lightning.pytorch, fails_at: int = -1) -> Any:
    class Digits(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == fails_at:
                raise RuntimeError("mine")
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    return Digits()


def make_trainer(directory: Path, callbacks: list[Any], package: Any = lightning.pytorch, **options: Any) -> Any:
    given = {
        "max_epochs": 1, "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": CLIP, "logger": False,
        "log_every_n_steps": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": directory, "val_check_interval": 4, **options,
    }  # fmt: skip
    return package.Trainer(callbacks=callbacks, **given)


def fit(trainer: Any, module: Any, **options: Any) -> Any:
    trainer.fit(module, loader(), loader(2), **options)
    return module


if __name__ == "__main__":
    directory, ranks = Path(sys.argv[1]), sys.argv[2]
    callback = WatchCallback(every=1, ranks=ranks)
    logger = TensorBoardLogger(directory, version="one")
    trainer = make_trainer(directory, [callback], logger=logger, strategy="ddp", devices=2)
    trainer.fit(make_module(), loader(), loader(2))
    assert callback.watch is not None
    assert callback.watch.stats.errors == 0
