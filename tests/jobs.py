"""What the ranks of the test fleet run: small trainings in every layout, and what each of them saw.

The numbers are in float64 and the batches of a rank follow from its number, so that one process with all batches is
the reference.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import tbhooks
from tbhooks.frame import Frame
from tests import zoo

STEPS, EVERY = 5, 2
LOGGED = [0, 2, 4]
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "gather", "all_reduce", "reduce", "broadcast", "scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "all_gather_object", "send", "recv",
)  # fmt: skip


def make_model() -> nn.Sequential:
    """Widths that do not divide by two or four; a unit-wise part that no layout splits."""
    torch.manual_seed(0)
    layers = OrderedDict(
        up=nn.Linear(6, 16), act=nn.ReLU(), down=nn.Linear(16, 7), norm=nn.LayerNorm(7), head=nn.Linear(7, 3)
    )
    return nn.Sequential(layers).double()


def batch(step: int, rank: int, part: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(4, 6, dtype=torch.float64, generator=random)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@dataclass
class Saw:
    """What one rank brings home."""

    frames: list[Frame]
    weights: list[bytes]
    stats: Any
    collectives: list[int]
    files: list[str]
    findings: list[Any]


class Counting:
    """Counts the collectives of a job that Python calls, step by step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Counting:
        for name in COLLECTIVES:
            self._originals[name] = getattr(distributed, name)
            setattr(distributed, name, self._counted(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(distributed, name, original)

    def _counted(self, name: str) -> Callable[..., Any]:
        original = self._originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return original(*args, **kwargs)

        return call


# How a model is spread. Each takes the bare model and returns what is called in its place. ------------------------


def bare(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def ddp_static(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, static_graph=True)


def ddp_unused(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def ddp_compiled(model: nn.Module) -> nn.Module:
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="aot_eager")  # type: ignore[no-any-return]


def _mesh(*shape: int, names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp(model: nn.Module, reshard: bool = True, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in (model.up, model.down, model.head):
        fully_shard(child, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model


def fsdp_unresharded(model: nn.Module) -> nn.Module:
    return fsdp(model, reshard=False)


def fsdp_checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed._composable import checkpoint

    checkpoint(model.down)
    return fsdp(model)


def hsdp(model: nn.Module) -> nn.Module:
    """Two replicas of two shards each."""
    return fsdp(model, mesh=_mesh(2, 2, names=("replicate", "shard")))


def _plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, _mesh(distributed.get_world_size(), names=("tp",)), _plan())


def fsdp_and_tensor_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = _mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], _plan())
    return fsdp(model, mesh=mesh["dp"])


def ddp_and_tensor_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = _mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], _plan())
    _pre_dp_module_transform(model)
    return nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    wrap.__name__: wrap
    for wrap in (
        bare, ddp, ddp_static, ddp_unused, ddp_compiled, fsdp, fsdp_unresharded, fsdp_checkpointed, hsdp,
        tensor_parallel, fsdp_and_tensor_parallel,
    )
}  # fmt: skip

# How many ranks work on one batch.
BESIDE = {"tensor_parallel": 0, "fsdp_and_tensor_parallel": 2}


def batch_of(rank: int, wrap: str, world: int) -> int:
    """Which of the batches a rank trains on."""
    return rank // (BESIDE.get(wrap, 1) or world)


# Trainings. -------------------------------------------------------------------------------------------------------


def train(
    rank: int, wrap: str, first: bool = False, ranks: str | None = "merge", parts: int = 1, every: int = EVERY
) -> Saw:
    """A whole training. `first`: watched before it is wrapped; `parts`: micro-batches, all but one without sync."""
    world = distributed.get_world_size()
    model = make_model()
    kinds = (*tbhooks.frame.KINDS, "input")
    writer = "run" if rank == 0 or ranks == "local" else None
    w = tbhooks.watch(model, writer, every, kinds=kinds, ranks=ranks) if first and ranks else None
    called = WRAPS[wrap](model)
    if ranks and not first:
        w = tbhooks.watch(called, writer, every, kinds=kinds, ranks=ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = []
    for step in range(STEPS):
        with Counting() as counting:
            for part in range(parts):
                quiet = called.no_sync() if part < parts - 1 and hasattr(called, "no_sync") else _nothing()
                with quiet:
                    (loss_of(called(batch(step, batch_of(rank, wrap, world), part))) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            if w is not None:
                w.flush()
        counts.append(sum(name != "barrier" for name in counting.calls))
    frames = [] if w is None else list(w.history)
    findings = [] if w is None else list(w.findings)
    stats = None if w is None else w.stats
    if w is not None:
        w.close()
    weights = [zoo.raw(_all_of(parameter)) for parameter in model.parameters()]
    return Saw(frames, weights, stats, counts, sorted(os.listdir("run")) if Path("run").exists() else [], findings)


def both(rank: int, wrap: str, first: bool = False, parts: int = 1) -> tuple[Saw, Saw]:
    """The same training without a watch and with one."""
    return train(rank, wrap, ranks=None, parts=parts), train(rank, wrap, first, parts=parts)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _all_of(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[no-any-return]
