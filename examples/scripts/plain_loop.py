"""A training loop as it is mostly written: everything at the top of one file."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
teacher = nn.Linear(64, 10).requires_grad_(False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(30):
    batch = torch.randint(len(images), (128,))
    output = model(images[batch])
    loss = criterion(output, labels[batch]) + 1e-3 * (output - teacher(images[batch])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {loss.item():.6f} weights {hashlib.sha256(weights).hexdigest()}")
