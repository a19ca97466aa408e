"""Training on digits in a plain loop, and what it is compared with: the same training in a framework."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tbhooks.data.frame import Frame

BATCH, STEPS, ACCUMULATED, CLIP = 8, 6, 2, 0.25


def digits(batches: int = STEPS * ACCUMULATED) -> torch.utils.data.TensorDataset:
    from sklearn.datasets import load_digits  # it takes a second to import

    found = load_digits()
    images = torch.tensor(found.data[: batches * BATCH] / 16.0, dtype=torch.float32)
    return torch.utils.data.TensorDataset(images, torch.tensor(found.target[: batches * BATCH]))


def loader(batches: int = STEPS * ACCUMULATED) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    return torch.utils.data.DataLoader(digits(batches), batch_size=BATCH)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, net: nn.Module | None = None, clip: float | None = CLIP, every: int = 1) -> list[Frame]:
    """Watches `model`, of which `net` is what is called, through a plain loop with accumulation."""
    optimizer, sink = make_optimizer(model), tbhooks.MemorySink()
    with tbhooks.watch(model, sink, every=every):
        for i, (x, y) in enumerate(loader(), start=1):
            loss = F.cross_entropy((net or model)(x), y)
            (loss / ACCUMULATED).backward()
            if i % ACCUMULATED == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return sink.frames


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same_bits(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_same_numbers(frames: list[Frame], expected: list[Frame]) -> None:
    """The same sites and every number of them; their order is that of execution, which is the framework's."""
    assert len(frames) == len(expected) > 0
    for frame, other in zip(frames, expected, strict=True):
        assert set(frame.sites) == set(other.sites)
        order = [frame.sites.index(site) for site in other.sites]
        assert np.array_equal(frame.values[order], other.values)
        assert np.array_equal(frame.buckets[order], other.buckets)
        assert dict(frame.scalars) == dict(other.scalars)


def assert_same_frames(frames: list[Frame], expected: list[Frame]) -> None:
    assert [frame.step for frame in frames] == [frame.step for frame in expected]
    assert_same_numbers(frames, expected)
