"""What the flight recorder costs a training step, as a ratio to the bare step.

The variants train the same model in turns, as in overhead.py: bare, watched without logging a step, and with a flight
recorder of 256 steps, with all norms and with global ones. No step is logged, so that only the recorder is measured.
Then what `w.checksums()` adds to a logged step: every step is logged, without and with checksums.

A hundredth of a step is less than the spread of whole steps on most machines. So the part of the step in which the
recorder works, `optimizer.step()`, is also timed alone: bare and with a recorder in turns, with the same gradients. The
difference is divided by a bare step.

With one thread (the default) the times are CPU times of the training thread, which other load hardly changes. What the
background thread does is not in them.

    python benchmarks/flight.py [--threads 1 | default | N] [--seconds 60] [--models gpt2 resnet]

Prints a table. Launches, copies and syncs are counted in tests/unit/capture/test_flight_recorder.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from models import WORKLOADS, Workload
from torch import nn
from torch.optim import Optimizer

import tbhooks
from tbhooks.cli.bench import timing
from tbhooks.cli.bench.timing import NEVER, Monitor, Observe, Timer, Variant

STEPS_A_TURN, FEWEST_ROUNDS, ROUNDS_ALONE = 3, 8, 15


def recorded(detail: str) -> Observe:
    """A watch that logs no step but the first, with a flight recorder."""

    def observe(model: nn.Module, _optimizer: Optimizer, directory: Path) -> Monitor:
        watching = tbhooks.watch(model, directory, every=NEVER).flight_recorder(detail=detail)
        return Monitor(watching.flush, watching.close)

    return observe


class ThreadTimer:
    """The CPU time of the thread that trains, where torch computes in that thread alone."""

    def start(self) -> None:
        self._started = time.thread_time()

    def stop(self) -> float:
        return time.thread_time() - self._started


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


def measure(workload: Workload, seconds: float, directory: Path, timer_class: type[Timer]) -> None:
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
        timer, number, deadline = timer_class(), 0, time.monotonic() + seconds
        while number < FEWEST_ROUNDS or time.monotonic() < deadline:
            timing.run_round(number, variants, STEPS_A_TURN, timer)
            number += 1
    finally:
        for variant in variants:
            variant.close()
    bare = timing.compared(variants[0], variants[0]).milliseconds
    print(f"\n{workload.name}: {sum(1 for _ in model.parameters())} parameters, {bare:.0f} ms a bare step")
    for variant in variants:
        timed = timing.compared(variant, variants[0])
        print(
            f"  {variant.name:30s} ratio {timed.ratio:.4f}, spread {timed.spread:.4f}, {timed.rounds} rounds",
            flush=True,
        )


def measure_alone(workload: Workload, rounds: int, timer: Timer) -> None:
    """Times `optimizer.step()` alone, bare and with a recorder in turns, and prints what the recorder adds."""
    torch.manual_seed(0)
    model = workload.build().train()
    optimizer = timing.make_optimizer(model)
    step_seconds = []
    for _ in range(3):
        optimizer.zero_grad()
        timer.start()
        workload.loss(model).backward()
        optimizer.step()
        step_seconds.append(timer.stop())
    found: dict[str, list[float]] = {"bare": [], "parameters": [], "global": []}
    for number in range(rounds):
        names = list(found)
        for detail in names[number % 3 :] + names[: number % 3]:
            watching = None if detail == "bare" else tbhooks.watch(model, every=NEVER).flight_recorder(detail=detail)
            optimizer.step()  # the first step of a watch is a logged one
            seconds = []
            for _ in range(STEPS_A_TURN):
                timer.start()
                optimizer.step()
                seconds.append(timer.stop())
            if watching is not None:
                watching.close()
            found[detail].append(min(seconds))
    for detail, shown in (("parameters", "all norms"), ("global", "global")):
        added = [one - bare for one, bare in zip(found[detail], found["bare"], strict=True)]
        lower, middle, upper = statistics.quantiles(added, n=4, method="inclusive")
        share = middle / min(step_seconds)
        print(
            f"  the recorder alone, {shown:10s} {1e3 * middle:.2f} ms a step ({1e3 * lower:.2f} to {1e3 * upper:.2f}), "
            f"ratio {1 + share:.4f}",
            flush=True,
        )


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
            timer = ThreadTimer if options.threads == "1" else timing.HostTimer
            measure(WORKLOADS[name], options.seconds, Path(directory) / name, timer)
            measure_alone(WORKLOADS[name], ROUNDS_ALONE, timer())


if __name__ == "__main__":
    main()
