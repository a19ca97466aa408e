"""How the price of watching grows with the model: 100, 1,000 and 10,000 modules so small that only their number counts.

Attach and detach: a `watch()` of all kinds and its `close()`, hooks put on every module in between; and the hooks
alone, as they come and go around each logged step. Then what a logged step takes longer than a bare one of the same
model, and the exponent of its growth (1 is linear). Interleaved, minima.

    python benchmarks/scaling.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from models import chain, chain_loss
from torch import nn

import tbhooks
from tbhooks.cli.bench import timing
from tbhooks.cli.bench.timing import HostTimer, Variant

MODULES = (100, 1_000, 10_000)
ATTACH_TARGET_MS = 100.0

Numbers = dict[str, float]


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def attaching(model: nn.Module, rounds: int) -> Numbers:
    """Milliseconds of a watch from beginning to end, and of its hooks alone."""
    whole, alone, hooks = [], [], []

    def attach_and_detach() -> None:
        tbhooks.watch(model, every=1).close()

    for _ in range(rounds):
        whole.append(timed(attach_and_detach))
        alone.append(timed(attach_and_detach, time.thread_time))  # whatever else the machine does
        with tbhooks.watch(model, every=1) as watching:
            observer = watching._session.observer
            hooks.append(timed(lambda observer=observer: (observer.remove(), observer.attach())))
    least = {"attach_detach_ms": whole, "attach_detach_cpu_ms": alone, "hooks_on_off_ms": hooks}
    return {name: 1e3 * min(seconds) for name, seconds in least.items()}


def logging_steps(model: nn.Module, rounds: int, directory: Path) -> Numbers:
    """What a logged step takes longer, with scalars and with histograms."""
    ways = {
        "bare": timing.bare,
        "scalars": timing.watched(every=1, histograms=False),
        "histograms": timing.watched(every=1, histograms=1),
    }
    variants = {
        name: Variant(name, copy.deepcopy(model), chain_loss, observe, directory / name)
        for name, observe in ways.items()
    }
    for variant in variants.values():
        variant.steps(2)
    timing.run_rounds(list(variants.values()), rounds, 1, HostTimer())
    least = {name: min(variant.seconds.values()) for name, variant in variants.items()}
    latest = variants["histograms"].watching.latest
    sites = len(latest.sites)
    for variant in variants.values():
        variant.close()
    figures = {"sites": float(sites), "bare_ms": 1e3 * least["bare"]}
    for name in ("scalars", "histograms"):
        extra = least[name] - least["bare"]
        figures |= {f"{name}_extra_ms": 1e3 * extra, f"{name}_us_a_site": 1e6 * extra / sites}
    return figures


def exponents(results: dict[str, Numbers]) -> Numbers:
    """Of a straight line through the logarithms; without what noise has made negative, which says nothing."""
    modules = np.log([float(key) for key in results])
    names = ("attach_detach_ms", "attach_detach_cpu_ms", "hooks_on_off_ms", "scalars_extra_ms", "histograms_extra_ms")
    columns = {name: [row[name] for row in results.values()] for name in names}
    return {
        name: float(np.polyfit(modules, np.log(column), 1)[0]) for name, column in columns.items() if min(column) > 0
    }


def table(results: dict[str, Numbers], growth: Numbers) -> str:
    lines = [["modules", *results, "exponent"], ["---"] * (len(results) + 2)]
    for name in next(iter(results.values())):
        shown = f"{growth[name]:.2f}" if name in growth else ""
        lines.append([name.replace("_", " "), *(f"{row[name]:.4g}" for row in results.values()), shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modules", type=int, nargs="+", default=MODULES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    results: dict[str, Numbers] = {}
    with tempfile.TemporaryDirectory() as directory:
        for modules in options.modules:
            print(f"\rscaling: {modules} modules ", end="", file=sys.stderr, flush=True)
            model = chain(modules - 1)  # the whole is a module too
            rounds = options.rounds * (4 if modules <= 1_000 else 1)
            numbers = attaching(model, 2 * options.rounds) | logging_steps(
                model, rounds, Path(directory) / str(modules)
            )
            results[str(modules)] = numbers
    print(file=sys.stderr)
    growth = exponents(results)
    options.out.parent.mkdir(exist_ok=True)
    figures = {
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cpu_threads": 1},
        "target_attach_detach_ms": ATTACH_TARGET_MS,
        "modules": results,
        "exponents": growth,
    }
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(results, growth))


if __name__ == "__main__":
    main()
