"""What a logged step costs on this machine, as a formula: so much for each byte it reads, and so much for each site.

Both are measured in CPU time of the training thread, without the user's model: the bytes with one long tensor, the
sites with layers so small that only their number counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tbhooks.api.watch import watch
from tbhooks.data import stats
from tbhooks.reduction import cpu, histogram, torch_rows

ELEMENTS = 1 << 20
LAYERS, WIDTH, BATCH = 60, 8, 8
REPEATS = 7


@dataclass(frozen=True)
class Cost:
    """Of logged steps with scalars only, or with histograms."""

    seconds_a_byte: float
    seconds_a_site: float

    def seconds(self, read_bytes: int, sites: int) -> float:
        """What a logged step adds to a training step that reads so many bytes at so many sites."""
        return self.seconds_a_byte * read_bytes + self.seconds_a_site * sites


def measure(with_histograms: bool) -> Cost:
    """On the CPU, with one thread. Takes less than a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Cost(_seconds_a_byte(with_histograms), _seconds_a_site(with_histograms))
    finally:
        torch.set_num_threads(threads)


def _least(run: Callable[[], object], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)


def _seconds_a_byte(with_histograms: bool) -> float:
    numbers = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    row = torch.zeros(stats.WIDTH, dtype=torch.float64)
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32)

    def read() -> None:
        if cpu.can_read(numbers):
            cpu.reduce(numbers, row.data_ptr(), counts.data_ptr() if with_histograms else cpu.NULL)
            return
        torch_rows.write_row(numbers, row)
        if with_histograms:
            histogram.add_counts(numbers, counts)

    return _least(read) / numbers.nbytes


def _seconds_a_site(with_histograms: bool) -> float:
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    bare = _least(step)
    with watch(model, every=1, histograms=1 if with_histograms else False) as watching:
        for _ in range(2):
            step()
        watching.flush()
        logged = _least(step)
        watching.flush()
        sites = 0 if watching.latest is None else len(watching.latest.sites)
    return max(0.0, logged - bare) / max(1, sites)
