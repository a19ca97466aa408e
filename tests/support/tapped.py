"""A small transformer whose attention names its scores with a tap; and what the tap should see, in float64."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks

STEPS, EVERY = 3, 2
Tap = Callable[[str, Tensor], Tensor]
Step = dict[tuple[str, str], NDArray[np.float64]]


class Attention(nn.Module):
    """Calls its tap between two modules of its own, and once more with the same name."""

    def __init__(self, path: str, tap: Callable[..., Tensor]) -> None:
        super().__init__()
        self.path, self.tap = path, tap
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.tap("scores", self.query(x) @ self.key(x).transpose(-2, -1))
        doubled = self.tap("scores", 2 * scores)
        return self.out(doubled.softmax(-1) @ x)


class Tapped(nn.Module):
    """Two blocks of attention, and a tap of the model itself."""

    def __init__(self, tap: Callable[..., Tensor] = tbhooks.tap, how: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tap, self.how = tap, how
        self.blocks = nn.ModuleList(Attention(f"blocks.{i}", tap) for i in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.how is None else checkpoint(block, x, **self.how))
        return self.head(self.tap("residual", x * 1.5))


def batch(step: int, part: int = 0, rank: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(3, 4, 8, generator=random).requires_grad_()


class Reference:
    """A tap that keeps what it is called with as float64, and the gradients."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._parts: dict[tuple[str, str], list[NDArray[np.float64]]] = defaultdict(list)

    def for_module(self, path: str) -> Tap:
        def tap(name: str, tensor: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() == -1:
                self._keep(f"{path}:{name}", "activation", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._keep(f"{path}:{name}", "gradient", gradient))
            return tensor

        return tap

    def _keep(self, name: str, kind: str, tensor: Tensor) -> None:
        self._parts[name, kind].append(tensor.detach().to(torch.float64, copy=True).numpy())

    def end(self) -> None:
        self.steps.append({key: np.concatenate([x.ravel() for x in parts]) for key, parts in self._parts.items()})
        self._parts.clear()


@contextlib.contextmanager
def _precision(amp: bool) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
        yield


def train(
    model: nn.Module, *, step_ends: Callable[[], Any] | None = None, called: Callable[[Tensor], Tensor] | None = None,
    accumulate: int = 1, amp: bool = False, rank: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Trains for STEPS; returns the losses and the weights afterwards."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        for part in range(accumulate):
            with _precision(amp):
                loss = (model if called is None else called)(batch(step, part, rank)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step_ends is not None:
            step_ends()
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def reference(how: dict[str, Any] | None = None, **options: Any) -> tuple[list[Step], list[Tensor]]:
    """What the taps of every step should see, in an unwatched run, and the result of that run."""
    kept = Reference()
    model = Tapped(kept.for_module("(root)"), how)
    for block in model.blocks:
        block.tap = kept.for_module(block.path)
    result = train(model, step_ends=kept.end, **options)
    return kept.steps, result
