"""Models whose graphs are known arrow by arrow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def x(*shape: int) -> Tensor:
    """An input for them."""
    return torch.ones(shape or (3, 4))


class Residual(nn.Module):
    """Two layers and a connection around them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.one(x)))


class Differs(nn.Module):
    """Runs other layers in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise, self.calibrate = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.noise(x) if self.training else self.calibrate(x).sigmoid()


# The arrows of `Differs`: of each box, where they come from.
TRAINED = {"input/x": [], "layer": ["input/x"], "noise": ["layer"], "output": ["noise"]}
EVALUATED = {
    "input/x": [], "layer": ["input/x"], "calibrate": ["layer"], "sigmoid": ["calibrate"], "output": ["sigmoid"],
}  # fmt: skip
