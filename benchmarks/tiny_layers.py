"""What a logged step costs a model of very many very small layers, where only the number of tensors counts.

250 x (Linear 16, ReLU): 3,002 sites. Times are CPU times of the training thread (and of the background thread, where
that is said), which other processes disturb less than the clock on the wall. Variants take turns in one run, each round
in another order; a figure is the median over rounds of the least step of a turn, `spread` is half of the interquartile
range. A turn begins with two steps that are not counted.

`sum` are the least hooks that one could write by hand: torch.sum of every output and of its gradient. `kernel` are the
same hooks with the C kernel of this package, called from Python.

    python benchmarks/tiny_layers.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.reduction import cpu

LAYERS, WIDTH, BATCH, SITES = 250, 16, 16, 3002
STEPS, NEVER = 6, 10**9
RESULTS = Path(__file__).parent / "results"
OF_MODULES = ("activation", "gradient")
Variants = dict[str, Callable[[], AbstractContextManager[Any]]]


class Training:
    """The model, and one step of its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.thread_time()
            self.step()
            seconds.append(time.thread_time() - started)
        return seconds

    @contextmanager
    def hooked(self, read: Callable[[Tensor], object]) -> Iterator[None]:
        """Reads every output and its gradient."""

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            read(output)
            output.register_hook(lambda gradient: (read(gradient), None)[1])

        handles = [module.register_forward_hook(hook) for module in self.model]
        yield
        for handle in handles:
            handle.remove()

    @contextmanager
    def watched(self, every: int = 1, **options: Any) -> Iterator[tbhooks.Watch]:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
            tbhooks.watch(self.model, directory, every=every, **options) as watching,
        ):
            yield watching


def variants(training: Training) -> Variants:
    row = torch.zeros(11, dtype=torch.float64)
    address = row.data_ptr()
    chosen: Variants = {
        "bare": nullcontext,
        "sum": lambda: training.hooked(torch.sum),
        "activations and gradients, scalars": lambda: training.watched(kinds=OF_MODULES, histograms=False),
        "activations and gradients, histograms": lambda: training.watched(kinds=OF_MODULES, histograms=1),
        "all, scalars": lambda: training.watched(histograms=False),
        "all, histograms": lambda: training.watched(histograms=1),
        "not logged": lambda: training.watched(every=NEVER),
    }
    if cpu.library is not None:

        def reduce(tensor: Tensor, _alive: Tensor = row) -> None:
            cpu.reduce(tensor, address, cpu.NULL)

        chosen["kernel"] = lambda: training.hooked(reduce)
    return chosen


def _background_clock() -> Callable[[], float]:
    """The CPU time of all other Python threads: there is one, the background thread."""
    own = threading.get_ident()
    clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident and t.ident != own]
    return lambda: sum(map(time.clock_gettime, clocks))


def measure(seconds: float) -> dict[str, dict[str, list[float]]]:
    """Of each variant and round: the least step, the first step, and the background's seconds a step."""
    training = Training()
    training.timed(3)
    chosen = variants(training)
    names, number = list(chosen), 0
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "first": [], "background": []} for name in names}
    deadline = time.monotonic() + seconds
    while number < 3 or time.monotonic() < deadline:
        start = number % len(names)
        for name in names[start:] + names[:start]:
            with chosen[name]() as watching:
                first = training.timed(2)[0]
                if watching is not None:
                    watching.flush()
                background = _background_clock()
                before, steps = background(), training.timed(STEPS)
                if watching is not None:
                    watching.flush()
                found[name]["background"].append((background() - before) / STEPS)
            found[name]["first"].append(first)
            found[name]["step"].append(min(steps))
        number += 1
    return found


def _spin() -> None:
    while True:
        sum(range(1000))


def beside_load(seconds: float, processes: int = 2, every: int = 10) -> tuple[list[float], list[float]]:
    """Steps by the clock on the wall, bare and watched, with processes beside them that never rest."""
    training, bare, watched = Training(), [], []
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    time.sleep(2)
    try:
        deadline = time.monotonic() + seconds
        while len(bare) < 3 or time.monotonic() < deadline:
            bare.append(_wall(training, 2 * every))
            with training.watched(every=every):
                training.timed(every)
                watched.append(_wall(training, 2 * every))
    finally:
        for process in spinning:
            process.kill()
    return bare, watched


def _wall(training: Training, steps: int) -> float:
    started = time.perf_counter()
    training.timed(steps)
    return (time.perf_counter() - started) / steps


def _ratio(ratios: list[float]) -> dict[str, float]:
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": middle, "spread": (upper - lower) / 2}


def summary(
    found: dict[str, dict[str, list[float]]], load: tuple[list[float], list[float]]
) -> dict[str, dict[str, Any]]:
    """The rows of the table: each a ratio and its spread, or microseconds a site."""

    def added(name: str, to: str) -> dict[str, float]:
        bare, one, other = (found[key]["step"] for key in ("bare", name, to))
        return _ratio([(a - b) / (c - b) for a, b, c in zip(one, bare, other, strict=True)])

    def over_bare(name: str) -> dict[str, float]:
        return _ratio([a / b for a, b in zip(found[name]["step"], found["bare"]["step"], strict=True)])

    rows: dict[str, dict[str, Any]] = {}
    for shown in ("scalars", "histograms"):
        name, everything = f"activations and gradients, {shown}", f"all, {shown}"
        rows[f"added by {name} / by hooks with torch.sum"] = added(name, "sum")
        if "kernel" in found:
            rows[f"added by {name} / by hooks with the C kernel"] = added(name, "kernel")
        rows[f"logged, {name} / bare"] = over_bare(name)
        rows[f"logged, {everything} / bare"] = over_bare(everything)
        first = [a / b for a, b in zip(found[everything]["first"], found[everything]["step"], strict=True)]
        rows[f"first logged step / later, {everything}"] = _ratio(first)
        per_site = [1e6 * seconds / SITES for seconds in found[everything]["background"]]
        rows[f"background thread, us a site, {shown}"] = _ratio(per_site)
        least = [1e6 * (a - b) / SITES for a, b in zip(found[everything]["step"], found["bare"]["step"], strict=True)]
        rows[f"training thread, us a site, {shown}"] = _ratio(least)
    rows["not logged / bare"] = over_bare("not logged")
    rows["every=10 / bare, two busy processes beside it (wall)"] = _ratio(
        [b / statistics.median(load[0]) for b in load[1]]
    )
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"250 x (Linear 16, ReLU), {SITES} sites"]
    lines += [f"  {name:80} {row['ratio']:7.3f} +- {row['spread']:.3f}" for name, row in rows.items()]
    return "\n".join(lines)


def run(seconds: float) -> dict[str, dict[str, Any]]:
    """All rows; takes about that many seconds."""
    return summary(measure(0.8 * seconds), beside_load(0.2 * seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    rows = run(options.seconds)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tiny_layers.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
