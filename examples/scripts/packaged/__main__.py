"""Run as `python -m packaged`."""

import hashlib
import sys

import torch

from .model import Autoencoder

torch.manual_seed(0)
model = Autoencoder(width=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(256, 4) @ torch.randn(4, 16)
for step in range(25):
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"{__name__} {__package__} {sys.argv[1:]} loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
