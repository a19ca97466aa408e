"""What `optimizer_state()` and `noise_scale()` add to a logged step: medians on a transformer, on this machine's CPU.

python benchmarks/optimizer_state.py [width]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import tbhooks

ROUNDS, MICRO_BATCHES = 15, 2
Extra = Callable[[tbhooks.Watch], object]
EXTRAS: dict[str, Extra | None] = {
    "not watched": None,
    "watched, every step logged": lambda watching: watching,
    "with optimizer_state()": lambda watching: watching.optimizer_state(),
    "with noise_scale()": lambda watching: watching.noise_scale(),
}


def milliseconds(width: int, extra: Extra | None) -> float:
    """The median time of a step: two micro-batches and AdamW."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    watching = None if extra is None else tbhooks.watch(model, every=1, histograms=False)
    if watching is not None and extra is not None:
        extra(watching)
    batch, times = torch.randn(8, 64, width), []
    for _ in range(ROUNDS + 3):
        started = time.perf_counter()
        for _ in range(MICRO_BATCHES):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
        if watching is not None:
            watching.flush()
    if watching is not None:
        watching.close()
    return statistics.median(times[3:]) * 1e3


def main() -> None:
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    plain = 0.0
    for name, extra in EXTRAS.items():
        found = milliseconds(width, extra)
        plain = plain or found
        print(f"{name:32}{found:9.1f} ms a step{found - plain:+9.1f} ms")


if __name__ == "__main__":
    main()
