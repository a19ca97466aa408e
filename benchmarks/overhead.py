"""What watching costs a training step, beside what people use today.

All variants train the same model, each observing it in its own turns; turns of a few steps alternate in one run, each
round in another order, so that a busy machine disturbs all alike. A turn is timed from its second step until everything
it logged is written, background thread included, and divided by its steps. `ratio` is the median over rounds of a turn
over the bare turn of the same round, `spread` its interquartile range, `ratio_of_minima` the least turn over the least
bare one. The peers, which need not be known as precisely, make one step in every third round.

    python benchmarks/overhead.py [--threads 1 | default | N] [--seconds 60] [--models gpt2 resnet mlp500]

Then the same for very many very small layers, in CPU time of the training thread (tiny_layers.py). Two ranks on two
cores are measured by ranks.py.

Prints tables and writes results/overhead.json (one thread) or results/overhead-N-threads.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import readme
import tiny_layers
import torch
from models import WORKLOADS, Workload
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from tbhooks.cli.bench import timing
from tbhooks.cli.bench.timing import NEVER, HostTimer, Monitor, Observe, Timing, Variant

EVERY = 100
FEWEST_ROUNDS = 6
RESULTS = Path(__file__).parent / "results"

UNLOGGED, SCALARS, HISTOGRAMS = "tbhooks, step not logged", "tbhooks, logged, scalars", "tbhooks, logged, histograms"
BY_HAND, WANDB = "hooks written by hand", 'wandb.watch(log="all"), no activations'
PART = {peer: {"every_nth_round": 3, "most_steps_a_turn": 1} for peer in (BY_HAND, WANDB)}


def by_hand(model: nn.Module, optimizer: Optimizer, directory: Path) -> Monitor:
    """Hooks as tutorials write them: each tensor to the CPU, a scalar and a histogram for each."""
    writer = SummaryWriter(str(directory))
    at, handles = 0, []

    def log(tag: str, tensor: Tensor) -> None:
        values = tensor.detach().cpu()
        writer.add_scalar(f"{tag}.mean", values.mean(), at)
        writer.add_scalar(f"{tag}.std", values.std(), at)
        writer.add_histogram(tag, values, at)

    for name, module in model.named_modules():
        if not module._modules:

            def hook(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor) and output.is_floating_point():
                    log(f"activation/{name}", output)

            handles.append(module.register_forward_hook(hook))

    def after_backward(*_: Any) -> None:
        nonlocal at
        for name, parameter in model.named_parameters():
            log(f"weight/{name}", parameter)
            if parameter.grad is not None:
                log(f"gradient/{name}", parameter.grad)
        at += 1

    handles.append(optimizer.register_step_pre_hook(after_backward))

    return Monitor(writer.flush, lambda: _undo(handles, writer))


def _undo(handles: list[Any], writer: SummaryWriter) -> None:
    for handle in handles:
        handle.remove()
    writer.close()


@cache
def wandb_run() -> Any:
    import wandb

    return wandb.init(project="overhead", dir=tempfile.mkdtemp(), mode="offline")


def wandb_watch(model: nn.Module, optimizer: Optimizer, directory: Path) -> Monitor:
    run = wandb_run()
    run.watch(model, log="all", log_freq=1)
    handle = optimizer.register_step_pre_hook(lambda *_: run.log({}))

    def close() -> None:
        handle.remove()
        run.unwatch(model)

    return Monitor(close=close)


def variants() -> dict[str, Observe]:
    chosen: dict[str, Observe] = {
        "bare": timing.bare,
        UNLOGGED: timing.watched(every=NEVER),
        SCALARS: timing.watched(every=1, histograms=False),
        HISTOGRAMS: timing.watched(every=1, histograms=1),
        BY_HAND: by_hand,
    }
    try:
        import wandb  # noqa: F401
    except ImportError:
        print("wandb is not installed: its row is left out", file=sys.stderr)
    else:
        chosen[WANDB] = wandb_watch
    return chosen


def measure(workload: Workload, seconds: float, directory: Path) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = workload.build().train()
    optimizer = timing.make_optimizer(model)
    trained = [
        Variant(name, model, workload.loss, observe, directory / f"{i}", shared=optimizer, **PART.get(name, {}))
        for i, (name, observe) in enumerate(variants().items())
    ]
    trained[0].steps(2)
    deadline = time.monotonic() + seconds

    def progress(done: int, _of: int) -> None:
        left = max(0.0, deadline - time.monotonic())
        print(f"\r{workload.name}: round {done}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)

    try:
        run_until(deadline, trained, workload.steps_a_turn, progress)
    finally:
        for variant in trained:
            variant.close()
        print(file=sys.stderr)
    return summary([timing.compared(variant, trained[0]) for variant in trained])


def run_until(deadline: float, variants: list[Variant], steps: int, progress: Callable[[int, int], None]) -> None:
    """As many rounds as there is time for, and enough to tell a spread."""
    timer, number = HostTimer(), 0
    while number < FEWEST_ROUNDS or time.monotonic() < deadline:
        timing.run_round(number, variants, steps, timer)
        number += 1
        progress(number, 0)


def summary(timings: list[Timing]) -> dict[str, dict[str, float]]:
    unlogged = next(timed.ratio for timed in timings if timed.name == UNLOGGED)
    figures = {}
    for timed in timings:
        figures[timed.name] = {
            "median_ms": timed.milliseconds,
            "ratio": timed.ratio,
            "spread": timed.spread,
            "ratio_of_minima": timed.ratio_of_minima,
            "rounds": float(timed.rounds),
        }
        if timed.name in (SCALARS, HISTOGRAMS):
            figures[timed.name][f"average_at_{EVERY}"] = (timed.ratio + (EVERY - 1) * unlogged) / EVERY
            # What unlogged steps cost is mostly less than the noise, which must not become a cost or a gain.
            figures[timed.name][f"average_at_{EVERY}_if_unlogged_is_bare"] = (timed.ratio + EVERY - 1) / EVERY
    return figures


def details(names: dict[str, str], results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Both ratios and the computed averages."""
    lines = ["", f"{'':32} {'median ms':>10} {'ratio':>7} {'spread':>7} {'of minima':>9} {'at every=100':>22} rounds"]
    for key, result in results.items():
        lines.append(names[key])
        for name, row in result.items():
            average = row.get(f"average_at_{EVERY}")
            bare = row.get(f"average_at_{EVERY}_if_unlogged_is_bare")
            shown = "" if average is None else f"{average:.4f} (or {bare:.4f})"
            lines.append(
                f"  {name[:30]:30} {row['median_ms']:10.2f} {row['ratio']:7.3f} {row['spread']:7.3f} "
                f"{row['ratio_of_minima']:9.3f} {shown:>22} {row['rounds']:6.0f}"
            )
    lines.append(
        f"at every={EVERY}: computed, (logged + {EVERY - 1} x not logged) / {EVERY}; or with those as bare steps"
    )
    return "\n".join(lines)


def _threads(text: str) -> int:
    return torch.get_num_threads() if text == "default" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=_threads, default=1, help='a number, or "default" for what torch takes')
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tiny", type=float, default=60.0, help="seconds for the tiny layers (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        results = {key: measure(WORKLOADS[key], options.seconds, Path(directory) / key) for key in options.models}
    names = {key: WORKLOADS[key].name for key in results}
    out = options.out or RESULTS / (
        "overhead.json" if options.threads == 1 else f"overhead-{options.threads}-threads.json"
    )
    out.parent.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpu_threads": options.threads}
    out.write_text(json.dumps({"machine": machine, "names": names, "results": results}, indent=1) + "\n")
    print(readme.overhead_table(names, results))
    print(details(names, results))
    if options.tiny:
        print(tiny_layers.table(tiny_layers.run(options.tiny)))


if __name__ == "__main__":
    main()
