"""The smallest training loops there are, for tests about when things happen rather than what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def mlp(width: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def sgd(model: nn.Module, lr: float = 0.01) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def forward(model: nn.Module, batch: int = 16) -> Tensor:
    return model(torch.randn(batch, 4)).square().mean()


def train(
    model: nn.Module,
    steps: int,
    optimizer: Optimizer | None = None,
    *,
    accumulate: int = 1,
    after: Callable[[int, Tensor], Any] | None = None,
) -> Optimizer:
    """Trains, with `accumulate` micro-batches a step; `after` is called with each step's number and loss."""
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        for _ in range(accumulate):
            loss = forward(model) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step, loss)
    return optimizer


def steps_of(frames: Iterable[Any]) -> list[int]:
    return [frame.step for frame in frames]
