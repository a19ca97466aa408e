"""Options by argparse, micro-batches, clipping, a schedule; some options have names that tbhooks has too."""

import argparse
import hashlib
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--every", type=int, default=10, help="print the loss every N steps")
parser.add_argument("--logdir", default=None)
parser.add_argument("data", nargs="?")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 14, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
for step in range(21):
    optimizer.zero_grad()
    for part in range(2):
        x = torch.randn(16, 1, 16)
        loss = (model(x).squeeze(1) - x.mean(dim=(1, 2))).square().mean() / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % options.every == 0:
        print(f"step {step} loss {loss.item():.6f}")

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"{sys.argv} {options.logdir} {options.data} weights {hashlib.sha256(weights).hexdigest()}")
