"""Fails in the middle of its training, with one exception in the wake of another."""

import hashlib

import torch
from torch import nn


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(16, 4)
        loss = (model(x) - x.mean(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 11:
            print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
            raise ValueError(f"step {step} failed")


torch.manual_seed(0)
try:
    train(nn.Linear(4, 1), 20)
except ValueError as problem:
    raise RuntimeError("the training is over") from problem
