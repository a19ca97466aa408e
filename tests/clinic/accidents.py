"""Accidents that happen between logged steps, each with a flight recorder on: what its dump must name.

Every training shows its samples (`w.samples`), and keeps by hand what the dump is compared with: the float64 norms of
all gradients at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tbhooks
from tbhooks.api import burst_file
from tbhooks.cli import main
from tests.clinic.training import cnn, digits, mlp
from tests.support.processes import wait_for

EVERY, BATCH = 50, 32
CORRUPT_STEP = 77
# One bit of a weight flips between two logged steps of a job, on the last rank.
FLIPPED_STEP, FLIPPED_EVERY = 33, 10
FLIPPED_WEIGHT = "2.weight"


@dataclass
class Staged:
    """A training with an accident: what happened, and what was measured beside the watch."""

    model: nn.Module
    watching: tbhooks.Watch
    norms: list[dict[str, float]] = field(default_factory=list)
    worst: list[int] = field(default_factory=list)
    """The sample with the largest loss of each step; NaN is largest."""

    damaged: int = -1
    """The sample that was damaged."""

    def grown_most(self, step: int, first: int) -> str:
        """The parameter whose gradient is the most times its median from step `first` on."""
        usual = {name: np.median([each[name] for each in self.norms[first:step]]) for name in self.norms[step]}
        return max(self.norms[step], key=lambda name: self.norms[step][name] / usual[name])


def train(
    staged: Staged,
    optimizer: torch.optim.Optimizer,
    steps: int,
    change: Callable[[int, Tensor, Tensor], None] = lambda _step, _inputs, _chosen: None,
    before: Callable[[int], None] = lambda _step: None,
    flat: bool = False,
) -> Staged:
    """Trains on digits; `change` may damage a batch in place, `before` does something before a step."""
    pictures, labels = digits()
    for step in range(steps):
        before(step)
        chosen = torch.randint(len(pictures), (BATCH,))
        inputs = (pictures[chosen] - 0.3) / 0.37
        change(step, inputs, chosen)
        optimizer.zero_grad()
        losses = F.cross_entropy(staged.model(inputs.flatten(1) if flat else inputs), labels[chosen], reduction="none")
        staged.watching.samples(losses, ids=chosen)
        staged.worst.append(int(chosen[int(np.argmax(losses.detach().double().nan_to_num(nan=np.inf).numpy()))]))
        losses.mean().backward()
        staged.norms.append({
            name: float(np.linalg.norm(parameter.grad.double().numpy()))
            for name, parameter in staged.model.named_parameters()
            if parameter.grad is not None
        })  # fmt: skip
        optimizer.step()
        staged.watching.log({"loss": losses.mean()})
        if step % EVERY == 0:
            staged.watching.history
    return staged


def corrupt_batch(directory: Path) -> Staged:
    """One sample of one batch is a thousand times too large, between two logged steps."""
    torch.manual_seed(0)
    model = cnn()
    model[1], model[5] = nn.Identity(), nn.Identity()
    staged = Staged(model, tbhooks.watch(model, directory, every=EVERY).flight_recorder(steps=64))

    def change(step: int, inputs: Tensor, chosen: Tensor) -> None:
        if step == CORRUPT_STEP:
            inputs[5] *= 1000.0
            chosen[5] = 1234

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return train(staged, optimizer, 2 * EVERY + 5, change)


def slow_divergence(directory: Path) -> Staged:
    """The learning rate grows a little at every step, until training diverges."""
    torch.manual_seed(0)
    model = mlp((64, 64, 10))
    staged = Staged(model, tbhooks.watch(model, directory, every=EVERY, rules=()).flight_recorder(steps=256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(step: int) -> None:
        if step > 100:
            optimizer.param_groups[0]["lr"] *= 1.03

    return train(staged, optimizer, 6 * EVERY + 5, before=before, flat=True)


class Length(nn.Module):
    """The length of each part of a vector. Its gradient at zero is a division by zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 4).square().sum(dim=2).sqrt()


class Scale(nn.Module):
    """A factor for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def nan_in_one_layer(directory: Path) -> Staged:
    """A damaged picture, partly zero and else too bright, makes the backward of one layer divide by zero."""
    torch.manual_seed(0)
    model = nn.Sequential(Scale(), Length(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    staged = Staged(model, tbhooks.watch(model, directory, every=EVERY).flight_recorder(steps=64))

    def change(step: int, inputs: Tensor, chosen: Tensor) -> None:
        if step == CORRUPT_STEP:
            inputs[7] *= 50.0
            inputs[7].view(-1)[:4] = 0.0
            staged.damaged = int(chosen[7])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(staged, optimizer, 2 * EVERY + 5, change, flat=True)


class DamagedError(RuntimeError):
    """What the training of the next accident raises."""


def exception_in_a_step(directory: Path) -> Staged:
    """The backward pass of a step raises."""
    torch.manual_seed(0)
    model = mlp((64, 64, 10))
    staged = Staged(model, tbhooks.watch(model, directory, every=EVERY).flight_recorder(steps=64))

    def change(step: int, inputs: Tensor, _chosen: Tensor) -> None:
        if step == CORRUPT_STEP:
            handle = model[2].register_forward_pre_hook(lambda *_: _raise())
            inputs[3] *= 50.0
            del handle

    def _raise() -> None:
        raise DamagedError("the kernel failed")

    try:
        with staged.watching:
            train(staged, torch.optim.SGD(model.parameters(), lr=0.05), 2 * EVERY, change, flat=True)
    except DamagedError:
        pass
    return staged


def operator_asks(directory: Path) -> Staged:
    """Somebody runs `tbhooks burst` in another terminal, and asks for a dump."""
    torch.manual_seed(0)
    model = mlp((64, 64, 10))
    staged = Staged(model, tbhooks.watch(model, directory, every=1000).flight_recorder(steps=64))

    def before(step: int) -> None:
        if step == CORRUPT_STEP:
            staged.watching.flush()
            assert main(["burst", str(directory), "4"]) == 0
            wait_for(lambda: not (directory / burst_file.NAME).exists(), "the background thread to find the request")
            staged.watching.dump("an operator asked")

    def change(step: int, inputs: Tensor, _chosen: Tensor) -> None:
        if step == CORRUPT_STEP - 5:
            inputs[2] *= 30.0

    return train(staged, torch.optim.SGD(model.parameters(), lr=0.001), 90, change, before, flat=True)


def flipped_bit(rank: int, world: int) -> tuple[list[int], int, tuple[str, ...]]:
    """In one rank of a job: a bit of one weight flips on the last rank. Returns the worst sample of each step on this
    rank, and what went wrong in the watch.
    """
    torch.manual_seed(0)
    model = mlp((12, 16, 4))
    teacher = torch.randn(12, 4)
    called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    worst = []
    w = tbhooks.watch(called, "run" if rank == 0 else None, every=FLIPPED_EVERY, ranks="merge")
    w.flight_recorder(steps=64).checksums()
    for step in range(FLIPPED_STEP + FLIPPED_EVERY):
        if step == FLIPPED_STEP and rank == world - 1:
            model.get_parameter(FLIPPED_WEIGHT).detach().view(torch.int32)[1, 2] ^= 1 << 10
        inputs = torch.randn(BATCH, 12, generator=generator)
        ids = 10_000 * rank + BATCH * step + torch.arange(BATCH)
        losses = F.cross_entropy(called(inputs), (inputs @ teacher).argmax(1), reduction="none")
        worst.append(int(ids[int(losses.detach().double().numpy().argmax())]))
        w.samples(losses, ids=ids)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        w.log({"loss": losses.mean()})
    w.close()
    return worst, w.stats.errors, w.stats.messages
