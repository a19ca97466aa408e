"""The checks of compiled and captured models, of several devices, and of several processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from tbhooks.api.watch import watch
from tbhooks.cli.selftest.check import MODES, WIDTH, Failed, NotPossible, Passed, Setup, small_model, train

STEPS = 3


def compiled(setup: Setup) -> Passed:
    """Models under torch.compile, with its modes, and inside a CUDA graph."""
    ways: dict[str, dict[str, Any]] = {"aot_eager": {"backend": "aot_eager"}}
    if not setup.quick:
        ways["inductor"] = {}
    if setup.on_cuda:
        ways["reduce-overhead"] = {"mode": "reduce-overhead"}
    for name, options in ways.items():
        setup.log(f"torch.compile: {name}")
        model = small_model(setup.device)
        with watch(model, every=1) as watching:
            train(torch.compile(model, **options), setup.device, MODES[0], STEPS)  # type: ignore[arg-type]
        torch.compiler.reset()
        if watching.stats.errors:
            raise Failed(f"torch.compile, {name}: {watching.stats.messages[-1]}")
        if watching.latest is None or ("0", "activation") not in watching.latest:
            raise Failed(f"torch.compile, {name}: no activation was read; {'; '.join(watching.stats.messages)}")
    captured = _captured(setup) if setup.on_cuda else "CUDA graphs need a GPU"
    return Passed(f"activations read under torch.compile ({', '.join(ways)}); {captured}")


def _captured(setup: Setup) -> str:
    """Captures a forward into a CUDA graph while the model is watched."""
    setup.log("capturing a CUDA graph")
    model, batch = small_model(setup.device).eval(), torch.ones(16, WIDTH, device=setup.device)
    expected = model(batch).detach().clone()
    side = torch.cuda.Stream(setup.device)  # type: ignore[no-untyped-call]
    with watch(model, every=1) as watching, torch.no_grad():
        side.wait_stream(torch.cuda.current_stream(setup.device))
        with torch.cuda.stream(side):
            model(batch)
        torch.cuda.current_stream(setup.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(batch)
        graph.replay()
        torch.cuda.synchronize(setup.device)
    if watching.stats.errors:
        raise Failed(f"capturing a CUDA graph: {watching.stats.messages[-1]}")
    if not torch.equal(output, expected):
        raise Failed("the captured graph of a watched model has another output than the model")
    return "a watched model can be captured into a CUDA graph"


def devices(setup: Setup) -> Passed:
    """A model on the second device, and a model on two."""
    setup.need_cuda("a second device is needed")
    if torch.cuda.device_count() < 2:
        raise NotPossible("there is one CUDA device, two are needed")
    second = torch.device("cuda", 1)
    setup.log("a model on cuda:1")
    model = small_model(second)
    with watch(model, every=1) as watching:
        train(model, second, MODES[0], STEPS)
    if watching.stats.errors or watching.latest is None:
        raise Failed(f"on cuda:1: {'; '.join(watching.stats.messages)}")
    setup.log("a model on two devices")
    split = _Split()
    with watch(split, every=1) as watching:
        train(split, torch.device("cuda", 0), MODES[0], STEPS)
    if watching.stats.errors or watching.latest is None or ("back", "activation") not in watching.latest:
        raise Failed(f"on two devices: {'; '.join(watching.stats.messages)}")
    return Passed("statistics of a model on cuda:1 and of one on two devices, without errors")


class _Split(nn.Module):
    """Its first half is on one device, its second half on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(WIDTH, WIDTH).to("cuda:0"), nn.Linear(WIDTH, 8).to("cuda:1")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.back(self.front(batch).to("cuda:1"))
        return outputs.to("cuda:0")


def processes(setup: Setup) -> Passed:
    """DDP and FSDP2 in two processes whose numbers are merged."""
    if setup.on_cuda and torch.cuda.device_count() < 2:
        raise NotPossible("there is one CUDA device, two are needed for NCCL")
    if not setup.on_cuda and setup.quick:
        raise NotPossible("two processes take too long for --quick")
    if not distributed.is_available():
        raise NotPossible("this torch is built without torch.distributed")
    backend = "nccl" if setup.on_cuda else "gloo"
    for way in ("DDP", "FSDP2"):
        setup.log(f"{way} with {backend}")
        with TemporaryDirectory() as directory:
            arguments = (way, backend, setup.device.type, _free_port(), directory)
            spawn(_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]
            messages = [(Path(directory) / str(rank)).read_text(encoding="utf-8") for rank in range(2)]
        if any(messages):
            raise Failed(f"{way} with {backend}: {'; '.join(filter(None, messages))}")
    return Passed(f"DDP and FSDP2 with {backend} in two processes, merged without errors")


def _rank(rank: int, way: str, backend: str, device_type: str, port: int, directory: str) -> None:
    """One of the two processes; writes what was wrong into a file of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group(backend, rank=rank, world_size=2)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    model = small_model(device)
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  only where it is tried

        fully_shard(model)
    problem = ""
    with watch(model, every=1, ranks="merge") as watching:
        train(model, device, MODES[0], STEPS)
        watching.flush()
    if watching.stats.errors:
        problem = "; ".join(watching.stats.messages)
    elif rank == 0 and (watching.latest is None or ("4.weight", "update") not in watching.latest):
        problem = f"nothing was merged; {'; '.join(watching.stats.messages)}"
    (Path(directory) / str(rank)).write_text(problem, encoding="utf-8")
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
