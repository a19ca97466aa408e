"""A Trainer on two ranks, as a script: `python -m tests.support.lightning_ranks directory local|merge`."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from tbhooks.integrations.lightning import WatchCallback
from tests.support.plainly import loader
from tests.unit.integrations.test_lightning import make_module, make_trainer

if __name__ == "__main__":
    directory, ranks = Path(sys.argv[1]), sys.argv[2]
    callback = WatchCallback(every=1, ranks=ranks)
    logger = TensorBoardLogger(directory, version="one")
    trainer = make_trainer(directory, [callback], logger=logger, strategy="ddp", devices=2)
    trainer.fit(make_module(), loader(), loader(2))
    assert callback.watch is not None
    assert callback.watch.stats.errors == 0
