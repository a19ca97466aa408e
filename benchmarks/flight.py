"""What the flight recorder costs a training step, as a ratio to the bare step.

The variants train the same model in turns, as in overhead.py: bare, watched without logging a step, and with a flight
recorder of 256 steps, with all norms and with global ones. No step is logged, so that only the recorder is measured.
Then what `w.checksums()` adds to a logged step: every step is logged, without and with checksums. The ratios are those
of whole steps; the time inside tbhooks is measured in the training thread, and varies less.

    python benchmarks/flight.py [--threads 1 | default | N] [--seconds 60] [--models gpt2 resnet]

Prints a table. Launches, copies and syncs are counted in tests/unit/capture/test_flight_recorder.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from models import WORKLOADS, Workload
from overhead import run_until
from torch import nn
from torch.optim import Optimizer

import tbhooks
from tbhooks.cli.bench import timing
from tbhooks.cli.bench.timing import NEVER, Monitor, Observe, Variant


def recorded(detail: str) -> Observe:
    """A watch that logs no step but the first, with a flight recorder."""

    def observe(model: nn.Module, _optimizer: Optimizer, directory: Path) -> Monitor:
        watching = tbhooks.watch(model, directory, every=NEVER).flight_recorder(detail=detail)
        session, began = watching._session, [0, 0.0]

        def flush() -> None:
            """Called after the first step, which is logged, and at the end of a turn."""
            watching.flush()
            steps, seconds = session.clock.count, watching.stats.seconds_training
            if steps > 1:
                INSIDE.setdefault(detail, []).append((seconds - began[1]) / (steps - began[0]))
            began[:] = steps, seconds

        return Monitor(flush, watching.close)

    return observe


INSIDE: dict[str, list[float]] = {}
"""The seconds of each turn that a step of a watch with a flight recorder has spent inside tbhooks, by detail."""


def with_checksums(model: nn.Module, _optimizer: Optimizer, directory: Path) -> Monitor:
    """A watch that logs every step, with checksums."""
    watching = tbhooks.watch(model, directory, every=1).checksums()
    return Monitor(watching.flush, watching.close)


VARIANTS: dict[str, Observe] = {
    "bare": timing.bare,
    "watched, step not logged": timing.watched(every=NEVER),
    "flight recorder, all norms": recorded("parameters"),
    "flight recorder, global": recorded("global"),
    "every step logged": timing.watched(every=1),
    "every step logged, checksums": with_checksums,
}
LOGGED = "every step logged"
"""These are compared with each other, for which fewer rounds are enough."""


def measure(workload: Workload, seconds: float, directory: Path) -> None:
    """Trains in turns, and prints a line for each variant."""
    torch.manual_seed(0)
    model = workload.build().train()
    optimizer = timing.make_optimizer(model)
    variants = [
        Variant(
            name,
            model,
            workload.loss,
            observe,
            directory / f"{i}",
            shared=optimizer,
            every_nth_round=4 if name.startswith(LOGGED) else 1,
        )
        for i, (name, observe) in enumerate(VARIANTS.items())
    ]
    variants[0].steps(2)
    try:
        run_until(time.monotonic() + seconds, variants, workload.steps_a_turn, lambda _done, _of: None)
    finally:
        for variant in variants:
            variant.close()
    print(f"\n{workload.name}: {sum(1 for _ in model.parameters())} parameters")
    for variant in variants:
        timed = timing.compared(variant, variants[0])
        print(f"  {variant.name:30s} ratio {timed.ratio:.4f}, spread {timed.spread:.4f}, {timed.rounds} rounds")
    bare = timing.compared(variants[0], variants[0]).milliseconds
    for detail, measured in INSIDE.items():
        inside = 1000 * statistics.median(measured)
        print(f"  inside tbhooks, {detail:14s} {inside:.2f} ms of {bare:.1f} ms a step, {inside / bare:.2%}")
    INSIDE.clear()


def main() -> None:
    """Measures the chosen models."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", default="1", help="of torch: a number, or default")
    parser.add_argument("--seconds", type=float, default=60.0, help="per model")
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=["gpt2", "resnet"])
    options = parser.parse_args()
    if options.threads != "default":
        torch.set_num_threads(int(options.threads))
    with tempfile.TemporaryDirectory() as directory:
        for name in options.models:
            measure(WORKLOADS[name], options.seconds, Path(directory) / name)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
