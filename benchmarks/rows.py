"""What reading a tensor costs, in units of one `x.sum()` on the same tensor, one thread.

Through the functions the package itself uses: the C kernel's row, its row and bucket counts together, and the torch
operations that serve where there is no kernel or on a device. Interleaved; minima of many repetitions. The bucket
counts alone are what both take less what the row takes.

    python benchmarks/rows.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor

from tbhooks.data import stats
from tbhooks.reduction import cpu, histogram, torch_rows

SIZES = {"64k": 1 << 16, "256k": 1 << 18, "1M": 1 << 20, "4M": 1 << 22, "16M": 1 << 24}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TARGETS = {"row": 3.0, "buckets": 8.0}
FEWEST = 5

Ways = dict[str, Callable[[], object]]


def ways(tensor: Tensor) -> Ways:
    """Each of them reads the tensor once or more."""
    row = torch.zeros(stats.WIDTH, dtype=torch.float64)
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32)
    chosen: Ways = {"sum": tensor.sum}
    if cpu.can_read(tensor):
        chosen["row"] = lambda: cpu.reduce(tensor, row.data_ptr(), cpu.NULL)
        chosen["row and buckets"] = lambda: cpu.reduce(tensor, row.data_ptr(), counts.data_ptr())
    chosen["row, torch"] = lambda: torch_rows.write_row(tensor, row)
    chosen["buckets, torch"] = lambda: histogram.add_counts(tensor, counts)
    return chosen


def least_seconds(chosen: Ways, seconds: float) -> dict[str, float]:
    """All of them some times; then the fast ones, whose ratios have targets, until the time is over."""
    least = dict.fromkeys(chosen, float("inf"))
    deadline, number = time.perf_counter() + seconds, 0
    while number < FEWEST or time.perf_counter() < deadline:
        for name, run in chosen.items():
            if "torch" not in name or number < FEWEST:
                started = time.perf_counter()
                run()
                least[name] = min(least[name], time.perf_counter() - started)
        number += 1
    return least


def ratios(least: dict[str, float]) -> dict[str, float]:
    figures = {name: taken / least["sum"] for name, taken in least.items() if name != "sum"}
    if "row" in figures:
        figures["buckets"] = figures["row and buckets"] - figures["row"]
    return figures


def measure(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    results: dict[str, dict[str, dict[str, float]]] = {}
    cases = [(kind, size) for kind in TYPES for size in SIZES]
    for number, (kind, size) in enumerate(cases):
        print(f"\rrows: {number + 1} of {len(cases)}", end="", file=sys.stderr, flush=True)
        tensor = torch.randn(SIZES[size], generator=torch.Generator().manual_seed(0)).to(TYPES[kind])
        least = least_seconds(ways(tensor), seconds / len(cases))
        results.setdefault(kind, {})[size] = {**ratios(least), "sum_us": 1e6 * least["sum"]}
    print(file=sys.stderr)
    return results


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """A column a size, a row a way; bfloat16 has no target."""
    lines = []
    for kind, by_size in results.items():
        lines += [["", ""], [f"{kind}, / x.sum()", *by_size], ["---"] * (len(by_size) + 1)]
        for name in next(iter(by_size.values())):
            label = f"{name} (target <= {TARGETS[name]:g})" if kind == "float32" and name in TARGETS else name
            lines.append([label, *(f"{values[name]:.2f}" for values in by_size.values())])
    return "\n".join("| " + " | ".join(line) + " |" if any(line) else "" for line in lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rows.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.seconds)
    options.out.parent.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "kernel": cpu.name()}
    options.out.write_text(json.dumps({"machine": machine, "targets": TARGETS, "ratios": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
