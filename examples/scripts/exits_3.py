"""Trains a little and exits with 3, after what it has registered for its end."""

import atexit
import hashlib
import sys

import torch
from torch import nn

atexit.register(print, "the script's own last word")
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x = torch.randn(32, 4)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    return loss


for step in range(5):
    loss = optimizer.step(closure)

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
sys.exit(3)
