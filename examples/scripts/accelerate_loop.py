"""Accelerate: model, optimizer and loader prepared by it, accumulation by its own context."""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
labels = torch.randint(10, (640,))
data = TensorDataset(torch.randn(10, 1, 8, 8)[labels] + torch.randn(640, 1, 8, 8) / 2, labels)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
for images, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

weights = b"".join(value.numpy().tobytes() for value in accelerator.unwrap_model(model).state_dict().values())
accelerator.print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
