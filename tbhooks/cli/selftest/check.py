"""What a check of the self-test is given, returns and raises, and the small trainings that several checks use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tbhooks.api.watch import Watch
from tbhooks.data.errors import TbhooksError

WIDTH = 32
CLASSES = 8


class NotPossible(Exception):  # noqa: N818  not an error
    """The check cannot run on this machine; the text says why."""


class Failed(TbhooksError):  # noqa: N818  the name of a result
    """The check has run, and what tbhooks promises does not hold."""


@dataclass(frozen=True)
class Setup:
    """Where to run, and how thoroughly."""

    device: torch.device
    quick: bool = False
    log: Callable[[str], None] = lambda _: None

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self, why: str) -> None:
        if not self.on_cuda:
            raise NotPossible(f"{why}: run it with --device cuda")


@dataclass(frozen=True)
class Passed:
    """What a check has found, as a sentence and as numbers."""

    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


Check = Callable[[Setup], Passed]


def small_model(device: torch.device) -> nn.Module:
    """A model with dropout, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)
    ).to(device)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """A way to train."""

    name: str
    accumulate: int = 1
    amp: bool = False
    evaluates: bool = False
    asks_for_more: bool = False


MODES = (
    Mode("plain"),
    Mode("accumulation", accumulate=3),
    Mode("mixed precision", amp=True),
    Mode("evaluation", evaluates=True),
    Mode("everything asked for", accumulate=2, amp=True, evaluates=True, asks_for_more=True),
)


def train(model: nn.Module, device: torch.device, mode: Mode, steps: int, watching: Watch | None = None) -> Tensor:
    """Trains and returns all weights. Nothing in it waits for the device."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=mode.amp and device.type == "cuda")
    batches = torch.randn(steps * mode.accumulate, 16, WIDTH, device=device)
    labels = torch.zeros(16, dtype=torch.int64, device=device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(mode.accumulate):
            with torch.autocast(device.type, dtype=dtype, enabled=mode.amp):
                loss = nn.functional.cross_entropy(model(batches[step * mode.accumulate + part]), labels)
            scaler.scale(loss / mode.accumulate).backward()  # type: ignore[no-untyped-call]
        # GradScaler.step waits for the device itself; without infinities the step of the optimizer is the same.
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        optimizer.step()
        if watching is not None:
            watching.log({"loss": loss.detach()})
        if mode.evaluates:
            model.eval()
            with torch.no_grad():
                model(batches[0])
            model.train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
