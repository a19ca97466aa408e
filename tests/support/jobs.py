"""What the ranks of the process pool run: small trainings in every layout, and what each rank recorded.

The numbers are in float64 and the batches of a rank follow from its number, so that one process with all batches is
the reference.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import tbhooks
from tbhooks.capture.hooks.eager_hooks import EagerHook
from tbhooks.capture.hooks.hook_types import ForwardHook
from tbhooks.data.frame import Frame
from tests.support import zoo

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
class RankResult:
    """What one rank returns."""

    frames: list[Frame]
    weights: list[bytes]
    stats: Any
    collectives: list[int]
    files: list[str]
    findings: list[Any]


class CollectiveCounter:
    """Counts the collectives of a job that Python calls, step by step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> CollectiveCounter:
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
) -> RankResult:
    """A whole training. `first`: watched before it is wrapped; `parts`: micro-batches, all but one without sync."""
    world = distributed.get_world_size()
    model = make_model()
    kinds = (*tbhooks.data.frame.KINDS, "input")
    writer = "run" if rank == 0 or ranks == "local" else None
    w = tbhooks.watch(model, writer, every, kinds=kinds, ranks=ranks) if first and ranks else None
    called = WRAPS[wrap](model)
    if ranks and not first:
        w = tbhooks.watch(called, writer, every, kinds=kinds, ranks=ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = []
    for step in range(STEPS):
        with CollectiveCounter() as counting:
            for part in range(parts):
                quiet = (
                    called.no_sync() if part < parts - 1 and hasattr(called, "no_sync") else contextlib.nullcontext()
                )
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
    return RankResult(
        frames, weights, stats, counts, sorted(os.listdir("run")) if Path("run").exists() else [], findings
    )


def both(rank: int, wrap: str, first: bool = False, parts: int = 1) -> tuple[RankResult, RankResult]:
    """The same training without a watch and with one."""
    return train(rank, wrap, ranks=None, parts=parts), train(rank, wrap, first, parts=parts)


def _all_of(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[no-any-return]


# What goes wrong, and what is unlike. Nobody's training waits for another rank here, unless it says so. -----------


def _quick(rank: int, steps: int) -> tuple[Any, nn.Module]:
    """A training of each rank for itself, watched together."""
    model = make_model()
    w = tbhooks.watch(model, "run" if rank == 0 else None, EVERY, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return w, model


def with_collectors(rank: int, wrap: str) -> tuple[list[list[Any]], int, tuple[str, ...], list[bytes]]:
    """A training with all collectors: the artifacts of each step, errors, messages and the weights."""
    model = make_model()
    called = WRAPS[wrap](model)
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(called, kept, 1)
    w.images("up").per_channel(["up", "down"]).embeddings("head", labels=lambda: list("abcd"), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(called(batch(step, batch_of(rank, wrap, distributed.get_world_size())))).backward()
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    shown = [list(frame.artifacts) for frame in kept.frames]
    return shown, w.stats.errors, w.stats.messages, [zoo.raw(_all_of(parameter)) for parameter in model.parameters()]


def summary(rank: int, watching: Any) -> tuple[list[int], tuple[str, ...], list[float]]:
    """The steps in the history, the messages, and the number of ranks in each frame."""
    frames = list(watching.history)
    return [f.step for f in frames], watching.stats.messages, [f.scalars.get("train.ranks", 1.0) for f in frames]


def disagree(rank: int, options: list[dict[str, Any]], change: str = "") -> str:
    """The error that watch() raises."""
    model = make_model()
    if change and rank == 1:
        changes: dict[str, Callable[[], None]] = {
            "shape": lambda: setattr(model, "head", nn.Linear(7, 4).double()),
            "module": lambda: model.add_module("more", nn.Linear(3, 3).double()),
            "type": lambda: setattr(model, "act", nn.GELU()),
        }
        changes[change]()
    try:
        tbhooks.watch(model, None, ranks="merge", **options[rank])
    except tbhooks.ArgumentError as problem:
        return str(problem)
    return "agreed"


def absent(rank: int, who: int) -> str:
    """One of the ranks never calls watch()."""
    if rank == who:
        import time

        time.sleep(5)
        return "absent"
    return disagree(rank, [{}, {}])


def ends(rank: int, how: str) -> Any:
    """Rank 1 ends in the middle; rank 0 trains on."""
    import signal
    import sys
    import time

    def end() -> None:
        if rank == 1:
            {
                "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "raises": lambda: (_ for _ in ()).throw(RuntimeError("out of luck")),
                "exits": lambda: sys.exit(0),
                "is late": lambda: time.sleep(7),
                "labels otherwise": lambda: None,
            }[how]()

    started = time.monotonic()
    w, model = _quick(rank, 3)
    if how == "labels otherwise":
        w.step(100 + rank)
    w.flush()
    end()
    slowest = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3, 9):
        before = time.monotonic()
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        if how == "labels otherwise":
            w.step(100 + step + rank)
        slowest = max(slowest, time.monotonic() - before)
    found = summary(rank, w)
    w.close()
    return *found, slowest, time.monotonic() - started


def distributed_failure(rank: int) -> None:
    """Rank 1 raises in the middle of a training that needs both."""
    model = make_model()
    called = ddp(model)
    tbhooks.watch(called, "run", 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank == 1 and step == 3:
            raise RuntimeError("out of luck")
        loss_of(called(batch(step, rank))).backward()
        optimizer.step()


def paused(rank: int) -> Any:
    """Rank 1 reads nothing of step 2."""
    model = make_model()
    w = tbhooks.watch(model, None, EVERY, ranks="merge", kinds=("activation",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        import contextlib

        with w.paused() if rank == 1 and step == 2 else contextlib.nullcontext():
            loss_of(model(batch(step, rank))).backward()
            optimizer.step()
    return [frame["up", "activation"].count for frame in w.history], *summary(rank, w)


class Sometimes(nn.Module):
    """Runs one of its parts on the first rank alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.always, self.seldom = nn.Linear(6, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.seldom(x) if self.rank == 0 else x


def sometimes(rank: int) -> Any:
    torch.manual_seed(0)
    model = Sometimes(rank)
    w = tbhooks.watch(model, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
    counts = [(f["always", "activation"].count, f["seldom", "activation"].count) for f in w.history]
    return counts, *summary(rank, w)


def differing(rank: int, factor: float) -> Any:
    """Rank 1's batches are not like those of the others."""
    model = make_model()
    w = tbhooks.watch(model, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        loss_of(model(batch(step, rank) * (factor if rank == 1 else 1.0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    frame = w.latest
    spread = None if frame is None else frame["up", "activation"].spread("norm")
    return [(f.rule, f.severity, f.message, dict(f.evidence)) for f in w.findings], spread, w.stats.messages


def logging(rank: int) -> Any:
    """Numbers of the user's: from all ranks, from one, late."""
    model = make_model()
    w = tbhooks.watch(model, None, 1, ranks="merge", kinds=("activation",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        w.log({"loss": float(10 * step + rank)})
        if rank == 0:
            w.log({"mine": torch.tensor(7.0)})
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        w.log({"late": 100.0 * rank + step})
    w.flush()
    found = [dict(frame.scalars) for frame in w.history]
    return found, *summary(rank, w)


class _Doubling(nn.Module):
    """Names what it computes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(tbhooks.tap("doubled", x * 2))


def tapping(rank: int) -> Any:
    """A tap, metrics with every kind of merging, and samples, of a step that is merged."""
    model = _Doubling()
    w = tbhooks.watch(model, None, 1, ranks="merge")
    for reduce in ("max", "min", "sum", "mean"):
        w.metric(reduce, lambda t: t.abs().max(), "(root):doubled", reduce=reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        x = batch(0, rank)
        w.samples(x.square().mean(1), [f"rank{rank}-{i}" for i in range(4)], "all", most=3)
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    w.flush()
    frame = w.history[0]
    reading = frame["(root):doubled", "activation"]
    return [reading.count, reading.mean, reading.std], dict(frame.scalars), frame.samples.ids, w.stats.errors


def optimizer_state(rank: int, wrap: str) -> Any:
    """AdamW on plain weights, on shards of FSDP, or with its state sharded over the ranks (ZeRO stage 1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = (fsdp if wrap == "fsdp" else ddp)(make_model())
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 2e-3}
    if wrap == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), **settings)
    w = tbhooks.watch(wrapped, None, 1, ranks="merge").optimizer_state()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, rank))).backward()
        optimizer.step()
    w.flush()
    frame = w.history[-1]
    return frame, w.stats.errors, w.stats.messages


class Quadratic(nn.Module):
    """The loss |w - x|² / 2: the gradient of a sample is w - x, so that the noise scale is known in closed form."""

    def __init__(self, size: int = 20, start: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight - x).square().sum(1).mean() / 2


def noise_scale(rank: int, ranks: str, parts: int) -> Any:
    """The last scalars of DDP on batches of 4 with `parts` micro-batches; and all gradients, for the reference."""
    model = Quadratic()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = tbhooks.watch(wrapped, None, 1, ranks=ranks).noise_scale()
    random = torch.Generator().manual_seed(rank)
    gradients = []
    for _ in range(3):
        for part in range(parts):
            x = torch.randn(4, 20, dtype=torch.float64, generator=random)
            gradients.append((model.weight.detach() - x).mean(0).numpy())
            with wrapped.no_sync() if part < parts - 1 else contextlib.nullcontext():
                (wrapped(x) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    w.flush()
    return (dict(w.latest.scalars) if w.latest else {}), gradients, w.stats.errors, w.stats.messages


def routing(rank: int) -> Any:
    """Two micro-batches of a mixture of experts, of another size on each rank, merged; and the logits of this rank."""
    from tests.support import moe_models

    torch.manual_seed(0)
    model = moe_models.Net()
    logits: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        if path.endswith("gate"):
            kept = logits.setdefault(path, [])
            module.register_forward_hook(lambda _m, _a, output, kept=kept: kept.append(output.detach().numpy().copy()))
    w = tbhooks.watch(model, None, 1, ranks="merge").experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for size in (4 + 9 * rank, 3):
        torch.manual_seed(10 * rank + size)
        loss_of(model(torch.randn(size, 8))).backward()
    optimizer.step()
    w.flush()
    w.close()
    return dict(w.history[0].vectors) if w.history[:] else {}, dict(w.history[0].scalars), logits, w.stats.errors


def dropping(rank: int) -> Any:
    """Rank 1 is out of memory for numbers, and drops every step."""
    if rank == 1:
        from tbhooks.delivery import worker

        worker.QUEUE_STEPS, worker.QUEUE_BYTES = 0, -1
    w, _model = _quick(rank, 5)
    found = summary(rank, w)
    return [frame["up", "activation"].count for frame in w.history], w.stats.dropped, *found


def only_the_first_reads(rank: int) -> Any:
    """As where there are very many ranks."""
    from tbhooks.distributed import topology as ranks

    ranks.MOST_FOR_ALL_GATHER = 0
    w, _model = _quick(rank, 5)
    return [frame["up", "activation"].count for frame in w.history], *summary(rank, w)


def ends_with_the_group(rank: int) -> Any:
    """The script destroys the process group before anything closes the watch."""
    original = distributed.destroy_process_group
    w, _model = _quick(rank, 3)
    was_wrapped = distributed.destroy_process_group is not original
    distributed.destroy_process_group()
    found = summary(rank, w)
    w.close()
    return was_wrapped, distributed.destroy_process_group is original, *found


def local(rank: int, wrap: str, first: bool) -> Any:
    """What the default does: the first rank sees its own part, the others do nothing at all."""
    model = make_model()
    w = tbhooks.watch(model, "run", 1) if first else None
    called = WRAPS[wrap](model)
    w = w or tbhooks.watch(called, "run", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(called(batch(step, rank))).backward()
        own = ForwardHook | EagerHook
        hooks = sum(isinstance(h, own) for module in model.modules() for h in module._forward_hooks.values())
        optimizer.step()
        optimizer.zero_grad()
    mine = {name: _here(parameter).numel() for name, parameter in model.named_parameters()}
    frames = list(w.history)
    w.close()
    files = sorted(str(path) for path in Path("run").rglob("*") if f".{os.getpid()}." in path.name)
    return frames, mine, hooks, files, w.stats


def _here(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


def mixed(rank: int) -> Any:
    """FSDP computes in another precision than the weights have."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from tests.support.float64_recorder import Float64Recorder

    model = make_model()
    fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    seen = Float64Recorder(nn.Identity())
    for path, module in model.named_modules():
        module.register_forward_hook(seen.record_output(path or "(root)"))
    w = tbhooks.watch(model, None, 1, ranks="merge", kinds=("activation", "gradient"))
    loss_of(model(batch(0, rank))).backward()
    parts = dict(seen._parts)
    seen.close()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return parts, list(w.history), w.stats.messages


def pipeline(rank: int, watched: str) -> Any:
    """Two stages with two micro-batches; `watched` is the part of a stage, or the whole model that has both."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = make_model()
    names = [["up", "act"], ["down", "norm", "head"]][rank]
    stage_model = nn.Sequential(OrderedDict((name, getattr(model, name)) for name in names))
    example = torch.zeros(4, [6, 16][rank], dtype=torch.float64)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"), input_args=(example,))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: loss_of(output))
    w = tbhooks.watch(stage_model if watched == "part" else model, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(stage_model.parameters(), lr=0.1)
    for step in range(2):
        whole = torch.cat([batch(step, 0), batch(step, 1)])
        if rank == 0:
            schedule.step(whole)
        else:
            schedule.step(target=torch.zeros(8, 3))
        optimizer.step()
        optimizer.zero_grad()
    frames = list(w.history)
    return frames, w.stats.messages


def evaluating(rank: int) -> Any:
    """Both ask for evaluations in a run of their own; the first rank alone reads them, and writes them."""
    model = make_model()
    w = tbhooks.watch(model, None, 1, ranks="merge").evaluation("evaluation")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        for _ in range(1 + rank):  # one evaluates more often than the other
            model.eval()
            model(batch(step, rank))
            model.train()
    steps, messages, ranks = summary(rank, w)
    w.close()
    return (
        steps,
        ranks,
        messages,
        [path.name for path in Path("evaluation").glob("*") if f".{os.getpid()}." in path.name],
    )


def profiler_label(rank: int) -> Any:
    """A training that goes on from a checkpoint, and says so after the first step."""
    model = make_model()
    w = tbhooks.watch(model, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        w.log({"late": float(rank)})
        w.step(5000 + step)
    return [(frame.step, frame.scalars.get("train/late")) for frame in w.history], w.stats.messages


def again_and_again(rank: int) -> Any:
    """Many watches, one after the other."""
    import threading

    counts = []
    for _ in range(6):
        w, _model = _quick(rank, 3)
        w.close()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()))
    return counts


def reading(rank: int) -> Any:
    """One rank reads after every step, and all log late, in a training that needs both."""
    import time

    tbhooks.api.lifecycle.MERGED_READ_S = 1.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    called = ddp(model)
    w = tbhooks.watch(called, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds = []
    for step in range(6):
        started = time.monotonic()
        loss_of(called(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
        w.log({"loss": float(rank)})
        if rank == 1:
            _ = w.latest
        seconds.append(time.monotonic() - started)
    w.flush()
    return seconds, [frame.scalars.get("train/loss") for frame in w.history][:-1], w.stats.messages


def torn(rank: int) -> Any:
    """Weights in pieces, and one rank drops its own."""
    if rank == 1:
        from tbhooks.delivery import worker

        worker.QUEUE_STEPS, worker.QUEUE_BYTES = 0, -1
    model = make_model()
    called = fsdp(model)
    w = tbhooks.watch(called, None, 1, ranks="merge")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(called(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        [{site.kind for site in frame.sites} for frame in w.history],
        [dict(f.scalars) for f in w.history],
        w.stats.messages,
    )


class Together(nn.Module):
    """A forward that needs the other ranks."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        distributed.all_reduce(total)
        return x + total.mean()


def replaying(rank: int) -> Any:
    """NaN, and the first rank is to run the step once more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Together(), nn.Linear(8, 3)).double()
    called = ddp(model)
    w = tbhooks.watch(called, None, 1).on_nonfinite("replay")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        factor = float("nan") if step == 2 else 1.0
        loss_of(called(batch(step, rank)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [finding.message for finding in w.findings if "before the optimizer" in finding.message]


def older_fsdp(rank: int, ranks: str) -> Any:
    """FullyShardedDataParallel, which leaves a piece of each parameter in its place."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = make_model()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    called = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    w = tbhooks.watch(called, None, 1, ranks=ranks)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    for step in range(2):
        loss_of(called(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    frames = list(w.history)
    counts = {name: frames[-1][name, "weight"].count for name in sizes if frames and (name, "weight") in frames[-1]}
    return counts, sizes, [dict(frame.scalars) for frame in frames], w.stats.messages


def grouped_late(rank: int, ranks: str) -> Any:
    """The process group is made after the watch, and nothing in the environment announces it."""
    from datetime import timedelta

    distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    model = make_model()
    w = tbhooks.watch(model, None, 1, ranks=ranks)
    store = distributed.FileStore("late", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
    return [frame.step for frame in w.history], w.stats.messages


def terminated(rank: int) -> None:
    """The first rank gets SIGTERM while it waits for another in a collective."""
    import signal
    import threading
    import time

    model = make_model()
    w = tbhooks.watch(model, "run", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
    w._session.settle()
    w._worker.wait()
    if rank == 1:
        time.sleep(4)
        os._exit(0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    distributed.barrier()


def hung_at_close(rank: int) -> Any:
    """Rank 1 stops in the middle for longer than rank 0 waits for it when it closes."""
    import time

    model = make_model()
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, 1, ranks="merge", kinds=("activation",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(28):
        if rank == 1 and step == 3:
            w.flush()
            time.sleep(8)
            os._exit(0)
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        if step == 2:
            w.flush()
    w.close(timeout_s=2.0)
    ranks = [int(frame.scalars["train.ranks"]) if "train.ranks" in frame.scalars else 1 for frame in kept]
    return [frame.step for frame in kept], ranks, w.stats.dropped, w.stats.messages


def log_means(rank: int) -> list[tuple[dict[int, float], int, tuple[str, ...]]]:
    """What a rank of two wrote, its errors, and what it said: if it logs early, and if it logs late."""
    results = []
    for place in ("early", "late"):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = tbhooks.MemorySink()
        w = tbhooks.watch(model, kept, every=4, ranks="merge").log_every(2)
        for step in range(9):
            loss = model(torch.ones(4, 3)).sum()
            if place == "early":
                w.log({"loss": 10.0 * rank + step})
            loss.backward()
            optimizer.step()
            if place == "late":
                w.log({"loss": 10.0 * rank + step})
        w.close()
        values = {frame.step: frame.scalars["train/loss"] for frame in kept.frames if "train/loss" in frame.scalars}
        results.append((values, w.stats.errors, w.stats.messages))
    return results


def bursts(rank: int) -> Any:
    """The first rank logs a burst of its own; the steps that both log stay merged."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, "run" if rank == 0 else None, every=4, ranks="merge")
    for step in range(9):
        if step == 5:
            w.burst(2)
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
        w.flush()
    found = [(frame.step, frame.scalars.get("train.ranks")) for frame in w.history]
    w.close()
    return found, w.stats.errors, w.stats.messages


def flights(rank: int, fails: bool) -> Any:
    """The first rank dumps its flight recorder, and the other answers, or fails with an exception of its own."""
    import time

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(model, "run" if rank == 0 else None, every=1000, ranks="merge").flight_recorder(steps=16)

    def train(steps: int) -> None:
        for step in range(steps):
            loss_of(model(batch(step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(10)
    distributed.barrier()
    if fails and rank == 1:
        with contextlib.suppress(RuntimeError), w:
            raise RuntimeError("out of luck")
    elif rank == 0 and not fails:
        w.dump("look at this")
    deadline = time.monotonic() + 40
    while not fails and time.monotonic() < deadline and not list(Path("run").glob("tbhooks-flights/*.flight")):
        train(1)
        time.sleep(0.05)
    distributed.barrier()
    w.close()
    found = [] if rank else [(each.rank, each.reason) for each in tbhooks.runs.read("run").flights]
    return found, w.stats.errors, w.stats.messages


def flipped_bit(rank: int, wrap: str, at: int | None, steps: int = 5) -> Any:
    """One bit of one weight flips on the last rank before step `at`. Returns what the first rank has found."""
    world, model = distributed.get_world_size(), make_model()
    called = WRAPS[wrap](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = tbhooks.watch(called, "run" if rank == 0 else None, every=1, ranks="merge", rules="replica_drift")
    w.flight_recorder(steps=16).checksums()
    for step in range(steps):
        if step == at and rank == world - 1:
            weight = model.down.weight.detach()
            getattr(weight, "to_local", lambda: weight)().view(torch.int64)[0, 0] ^= 1
        loss = loss_of(called(batch(step, batch_of(rank, wrap, world))))
        w.samples(loss, ids=[100 * step + rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.flush()  # a finding of the background thread is dumped when a later step ends
    w.close()
    found = [(each.step, each.site.path if each.site else "", each.evidence["rank"]) for each in w.findings]
    flights = [] if rank else [flight.reason for flight in tbhooks.runs.read("run").flights if flight.rank == 0]
    return found, flights, [each.message for each in w.findings], w.stats.errors, w.stats.messages


def sliced(rank: int, in_slices: bool, dies: int | None = None, size: int | None = None) -> Any:
    """A training without communication of its own. With `in_slices` ranks merge as they do in large jobs; `size` is
    that of the buffer they exchange.
    """
    from tbhooks.distributed import merge, topology

    if in_slices:
        topology.MOST_FOR_ALL_GATHER = 0
    if size is not None:
        merge.capacity = lambda sites, with_buckets: size
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    w = tbhooks.watch(model, None, EVERY, ranks="merge", rules=())
    for step in range(STEPS):
        if rank == dies and step == 3:
            os._exit(0)
        optimizer.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
        w.log({"loss": float(rank + step)})
    w.flush()
    found = list(w.history), w.stats.errors, w.stats.messages
    w.close()
    return found
