"""torch.compile and DistributedDataParallel, either inside the other, in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import tbhooks
from tests.support import float64_recorder, zoo
from tests.support.compiling import Block, reset
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import steps_of
from tests.support.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def train_distributed(order: str, is_watched: bool, rank: int) -> tuple[Any, Any]:
    reset()
    torch.manual_seed(0)
    model = Block()
    compiled = torch.compile(model, backend="aot_eager") if order == "DDP of compiled" else model
    wrapped = DistributedDataParallel(compiled)
    called = torch.compile(wrapped, backend="aot_eager") if order == "compiled DDP" else wrapped
    seeing: Any = (
        tbhooks.watch(wrapped, every=2) if is_watched else Float64Recorder(model) if order == "eager" else None
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(3):
        loss = called(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zoo.raw(loss))
    if seeing:
        seeing.close()
    return (losses, [zoo.raw(p) for p in model.parameters()], zoo.raw(torch.get_rng_state())), seeing


def check_distributed(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    at = distributed.FileStore(store, world)
    distributed.init_process_group("gloo", store=at, rank=rank, world_size=world)
    try:
        _, expected = train_distributed("eager", False, rank)
        for order in ("compiled DDP", "DDP of compiled"):
            bare, _ = train_distributed(order, False, rank)
            left, watching = train_distributed(order, True, rank)
            assert left == bare, order
            assert watching.stats.errors == 0, watching.stats.messages
            assert steps_of(watching.history) == ([0, 2] if rank == 0 else []), order
            for frame in watching.history:
                float64_recorder.assert_frame_equals(frame, expected.steps[frame.step])
    finally:
        distributed.destroy_process_group()
        reset()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow("two processes; test_ranks.py has ddp_compiled"))])
def test_compiled_ddp_and_ddp_of_compiled_train_as_unwatched_and_show_the_eager_numbers(
    world: int, tmp_path: Path
) -> None:
    if world == 1:
        check_distributed(0, 1, str(tmp_path / "store"))
        return
    root = Path(__file__).parents[2]
    code = f"from {__name__} import check_distributed as check; check(%d, {world}, {str(tmp_path / 'store')!r})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code % rank], cwd=root, env={**os.environ, "RANK": ""},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world, "\n".join(said)[-4000:]
