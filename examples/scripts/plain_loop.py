"""A training loop as it is mostly written: everything at the top of one file."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
labels = torch.randint(10, (1000,))
inputs = torch.randn(10, 64)[labels] + torch.randn(1000, 64) / 2

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
teacher = nn.Linear(64, 10).requires_grad_(False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(30):
    batch = torch.randint(len(inputs), (128,))
    output = model(inputs[batch])
    loss = criterion(output, labels[batch]) + 1e-3 * (output - teacher(inputs[batch])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
