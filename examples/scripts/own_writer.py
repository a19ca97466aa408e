"""A script that writes to TensorBoard itself, and closes its writer before it ends."""

import hashlib
import sys

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
writer = SummaryWriter(sys.argv[1] if sys.argv[1:] else None)
for step in range(20):
    x = torch.randn(32, 8)
    loss = (model(x) - x.prod(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss, step)
writer.close()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
