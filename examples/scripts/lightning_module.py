"""A LightningModule, which Lightning itself never calls; accumulation, validation, and its TensorBoard logger."""

import hashlib
import logging
import sys
import warnings

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitClassifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, _index):
        images, labels = batch
        loss = self.loss(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _index):
        images, labels = batch
        self.log("val_loss", self.loss(self.net(images), labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
labels = torch.randint(10, (768,))
data = TensorDataset(torch.randn(10, 64)[labels] + torch.randn(768, 64) / 2, labels)
module = LitClassifier()
trainer = lightning.Trainer(
    max_epochs=1,
    limit_train_batches=24,
    limit_val_batches=2,
    accumulate_grad_batches=2,
    accelerator="cpu",
    logger=TensorBoardLogger(sys.argv[1], name="", version="") if sys.argv[1:] else False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=4,
)
trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=32))
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
print(f"steps {trainer.global_step} weights {hashlib.sha256(weights).hexdigest()}")
