"""A tqdm bar over the steps, on a model with a layer that has died."""

import hashlib

import torch
from torch import nn
from tqdm import tqdm

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
with torch.no_grad():
    model[2].bias.fill_(-100.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in tqdm(range(60), mininterval=0, miniters=10):
    x = torch.randn(32, 8)
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
