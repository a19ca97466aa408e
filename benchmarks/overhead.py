"""What watching costs a training step, beside what people use today.

Every variant trains its own copy of the model; blocks of steps are interleaved in one run, so that a
busy machine disturbs all alike. A block is timed from its first step until everything it logged is
written, background thread included, and divided by its steps. Ratios of medians; the spread is the
interquartile range. Prints a table and writes results/overhead.json.

    python benchmarks/overhead.py [--rounds 12] [--models gpt2 resnet mlp500]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import readme
import torch
from models import WORKLOADS, Workload
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import tbhooks

STEPS_A_BLOCK = 3
NEVER = 10**9

Finish = Callable[[], None]


def bare(_model: nn.Module, _directory: Path) -> Finish:
    return lambda: None


def _watched(**options: Any) -> Callable[[nn.Module, Path], Finish]:
    def start(model: nn.Module, directory: Path) -> Finish:
        watching = tbhooks.watch(model, SummaryWriter(str(directory)), **options)
        return watching.flush

    return start


def by_hand(model: nn.Module, directory: Path) -> Finish:
    """Hooks as tutorials write them: each tensor to the CPU, a scalar and a histogram for each."""
    writer = SummaryWriter(str(directory))
    step = iter(range(NEVER))

    def log(tag: str, tensor: Tensor, at: int) -> None:
        values = tensor.detach().cpu()
        writer.add_scalar(f"{tag}.mean", values.mean(), at)
        writer.add_scalar(f"{tag}.std", values.std(), at)
        writer.add_histogram(tag, values, at)

    current = [0]
    for name, module in model.named_modules():
        if not list(module.children()):

            def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor) and output.is_floating_point():
                    log(f"activation/{name}", output, current[0])

            module.register_forward_hook(hook)

    def after(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            log(f"weight/{name}", parameter, current[0])
            if parameter.grad is not None:
                log(f"gradient/{name}", parameter.grad, current[0])
        current[0] = next(step)

    model._benchmark_after_backward = after
    return writer.flush


def wandb_watch(model: nn.Module, directory: Path) -> Finish:
    import wandb

    directory.mkdir(parents=True)
    run = wandb.init(project="overhead", dir=str(directory), mode="offline", reinit="finish_previous")
    run.watch(model, log="all", log_freq=1)
    model._benchmark_after_backward = lambda: run.log({})
    return lambda: None


def variants() -> dict[str, Callable[[nn.Module, Path], Finish]]:
    chosen: dict[str, Callable[[nn.Module, Path], Finish]] = {
        "bare": bare,
        "tbhooks, step not logged": _watched(every=NEVER),
        "tbhooks, logged, scalars": _watched(every=1, histograms=False),
        "tbhooks, logged, histograms": _watched(every=1, histograms=1),
        "hooks written by hand": by_hand,
    }
    try:
        import wandb  # noqa: F401
    except ImportError:
        print("wandb is not installed: its row is left out", file=sys.stderr)
    else:
        chosen['wandb.watch(log="all"), no activations'] = wandb_watch
    return chosen


class Trainee:
    """One variant's model, optimizer and timings."""

    def __init__(self, name: str, workload: Workload, model: nn.Module, start: Any, directory: Path) -> None:
        self.name, self.workload, self.model = name, workload, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.finish: Finish = start(model, directory)
        self.seconds: list[float] = []

    def block(self) -> None:
        started = time.perf_counter()
        for _ in range(STEPS_A_BLOCK):
            self.workload.loss(self.model).backward()
            if hasattr(self.model, "_benchmark_after_backward"):
                self.model._benchmark_after_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.finish()
        self.seconds.append((time.perf_counter() - started) / STEPS_A_BLOCK)


def measure(workload: Workload, rounds: int, directory: Path) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    original = workload.build()
    trainees = [
        Trainee(name, workload, copy.deepcopy(original), start, directory / f"{i}")
        for i, (name, start) in enumerate(variants().items())
    ]
    for number in range(rounds + 1):
        for trainee in trainees:
            trainee.block()
        if number == 0:  # the first round allocates and is always logged
            for trainee in trainees:
                trainee.seconds.clear()
        print(f"\r{workload.name}: round {number} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    base = statistics.median(trainees[0].seconds)
    return {trainee.name: _summary(trainee.seconds, base) for trainee in trainees}


def _summary(seconds: list[float], base: float) -> dict[str, float]:
    quartiles = statistics.quantiles(seconds, n=4)
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "ratio": statistics.median(seconds) / base,
        "spread": (quartiles[2] - quartiles[0]) / base,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable()
    directory = Path(tempfile.mkdtemp())
    try:
        results = {key: measure(WORKLOADS[key], options.rounds, directory / key) for key in options.models}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpu_threads": options.threads}
    options.out.parent.mkdir(exist_ok=True)
    names = {key: WORKLOADS[key].name for key in results}
    options.out.write_text(json.dumps({"machine": machine, "names": names, "results": results}, indent=1) + "\n")
    print(readme.overhead_table(names, results))


if __name__ == "__main__":
    main()
