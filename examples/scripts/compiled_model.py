"""A model that is compiled, after its optimizer was made. (By the backend without code generation: it is quick.)"""

import hashlib

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Residual(16), Residual(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
for step in range(12):
    x = torch.randn(32, 8)
    loss = (compiled(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
