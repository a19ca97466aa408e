"""The state of optimizers on two ranks, replicated or sharded, merged: against one process with the batches of both."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import jobs
from tests.support.process_pool import ProcessPool
from tests.support.slow import cases

pytestmark = pytest.mark.xdist_group("ranks")

RATE, DECAY, EPSILON, BETAS = 1e-2, 0.1, 2e-3, (0.9, 0.999)


@cache
def expected() -> dict[str, float]:
    """AdamW in NumPy, on the mean of the gradients of both ranks."""
    model = jobs.make_model()
    moments = {name: (np.zeros(p.shape), np.zeros(p.shape)) for name, p in model.named_parameters()}
    found: dict[str, float] = {}
    for step in range(3):
        model.zero_grad()
        sum(jobs.loss_of(model(jobs.batch(step, rank))) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        for name, p in model.named_parameters():
            assert p.grad is not None
            g, (m, v) = p.grad.numpy(), moments[name]
            m, v = moments[name] = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            root = np.sqrt(v / (1 - BETAS[1] ** (step + 1)))
            change = -RATE * m / (1 - BETAS[0] ** (step + 1)) / (root + EPSILON)
            with torch.no_grad():
                p.mul_(1 - RATE * DECAY).add_(torch.from_numpy(change))
            found |= {
                f"first_moment.norm {name}": float(np.linalg.norm(m)),
                f"first_moment.gradient_cosine {name}": float((m * g).sum() / np.linalg.norm(m) / np.linalg.norm(g)),
                f"second_moment.mean {name}": float(v.mean()),
                f"second_moment.below_epsilon_fraction {name}": float((root < EPSILON).mean()),
                f"normalized_gradient.rms {name}": float(np.sqrt(np.mean((g / np.maximum(root, EPSILON)) ** 2))),
                f"proposed_update.rms {name}": float(np.sqrt(np.mean(change**2))),
            }
    return found


@pytest.mark.parametrize(
    "wrap", cases(["ddp", "fsdp", "zero"], always={"fsdp", "zero"}, reason="shards are the harder case")
)
def test_every_rank_has_the_state_of_the_whole_model(pool: ProcessPool, tmp_path: Path, wrap: str) -> None:
    for frame, errors, messages in pool.values(jobs.optimizer_state, 2, tmp_path, wrap):
        assert errors == 0, messages
        read = {}
        for key in expected():
            what, _, name = key.partition(" ")
            kind, _, stat = what.partition(".")
            read[key] = getattr(frame[name, kind], stat)
            assert frame[name, kind].count == frame[name, "weight"].count, key
        assert read == pytest.approx(expected(), rel=1e-9, abs=1e-12)
