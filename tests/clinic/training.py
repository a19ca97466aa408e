"""What all cases share: real data, training loops, and what is expected of the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tbhooks.data.frame import KINDS, Finding
from tbhooks.data.history import History

STEPS, EVERY, BATCH, LENGTH, VOCABULARY = 100, 10, 32, 24, 128
FRAMES_ALLOWED = 3
"""Within how many logged steps after its onset an issue must be found."""


@dataclass(frozen=True)
class Training:
    """A model, its training step, and how it is watched."""

    model: nn.Module
    step: Callable[[int], Tensor]
    """Runs one training step and returns the loss."""
    steps: int = STEPS
    every: int = EVERY
    kinds: tuple[str, ...] = KINDS
    rules: str | Sequence[str] = "default"
    evaluated: bool = False
    experts: bool | str = False
    """Whether routers are watched, or the pattern of their paths."""
    optimizer_state: bool = False


@dataclass(frozen=True)
class Case:
    """All of `rules` must be reported within three logged steps of `onset`, each at a path that `at` allows."""

    name: str
    make: Callable[[], Training]
    rules: tuple[str, ...] = ()
    at: tuple[str, ...] = ("*",)
    onset: int = 0
    severity: str = "warning"
    """The minimum severity of an expected finding."""


def train(case: Case, seed: int = 0) -> tuple[History, list[Finding], int]:
    """Trains a case with a watch; returns the history, the findings and `every`."""
    torch.manual_seed(seed)
    training = case.make()
    with tbhooks.watch(training.model, every=training.every, kinds=training.kinds, rules=training.rules) as watching:
        if training.evaluated:
            watching.evaluation()
        if training.experts:
            watching.experts(training.experts if isinstance(training.experts, str) else None)
        if training.optimizer_state:
            watching.optimizer_state()
        for number in range(training.steps):
            watching.log({"loss": training.step(number)})
    assert watching.stats.errors == 0, watching.stats.messages
    return watching.history, watching.findings, training.every


# --- Data -----------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)


@cache
def text() -> Tensor:
    """English prose as bytes below 128."""
    from pydoc_data import topics

    prose = "".join(topics.topics[name] for name in sorted(topics.topics)[:20])
    return torch.tensor([byte for byte in prose.encode() if byte < VOCABULARY])


def images(count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Digits, centred and scaled."""
    pictures, labels = digits()
    chosen = torch.randint(len(pictures), (count,))
    return (pictures[chosen] - 0.3) / 0.37, labels[chosen]


def vectors(count: int = BATCH) -> tuple[Tensor, Tensor]:
    pictures, labels = images(count)
    return pictures.flatten(1), labels


def tokens(count: int = 8, length: int = LENGTH) -> Tensor:
    starts = torch.randint(len(text()) - length, (count, 1))
    return text()[starts + torch.arange(length)]


# --- Training -------------------------------------------------------------------------------------


def stepper(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], Tensor],
    *,
    clip: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Callable[[int], Tensor]:
    """An ordinary training step."""

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss

    return step


def classify(
    model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]] = vectors, scale: float = 1.0
) -> Callable[[int], Tensor]:
    def loss_of(number: int) -> Tensor:
        inputs, labels = batch()
        return F.cross_entropy(model(inputs * scale), labels)

    return loss_of


def predict(model: nn.Module) -> Callable[[int], Tensor]:
    """The next byte, for models that return logits."""

    def loss_of(number: int) -> Tensor:
        chosen = tokens()
        return F.cross_entropy(model(chosen[:, :-1]).flatten(0, 1), chosen[:, 1:].flatten())

    return loss_of


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def mlp(widths: Sequence[int] = (64, 64, 64, 10), activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A transformer's block, written out."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = F.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, chosen: Tensor) -> Tensor:
        x = self.embed(chosen) + self.position(torch.arange(chosen.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
