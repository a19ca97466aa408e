"""What merging ranks costs: for real with a few processes on this machine, and on paper for a thousand.

Ranks of a small model with many layers train side by side with gloo, bare, watched by the first rank alone, and
merged, every step logged; the ways take turns. The merging itself is timed in the background thread that does it.
What goes over the wire has a fixed length, which is exact, and so is what it would be for more ranks.

    python benchmarks/ranks.py [--steps 40] [--layers 60]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from models import WORKLOADS
from torch import distributed, multiprocessing, nn

import tbhooks
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.selection import Selector
from tbhooks.data.frame import KINDS
from tbhooks.distributed import handshake, merge, topology

WORLDS = (2, 4)
ON_PAPER = (8, 64, 1024)
WAYS = ("bare", "local", "merge")


def train(rank: int, world: int, store: str, steps: int, layers: int, results: Any) -> None:
    torch.set_num_threads(1)
    at = distributed.FileStore(store, world)
    distributed.init_process_group("gloo", store=at, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(layers)))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    x = torch.randn(32, 128)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    merging: list[float] = []
    figures: dict[str, float] = {}
    for _ in range(4):
        for way in WAYS:
            w = None if way == "bare" else tbhooks.watch(parallel, every=1, ranks=way)
            if w is not None and w._lifecycle.context.rank_group is not None:
                figures |= {"bytes": w._lifecycle.context.rank_group.size}
                w._lifecycle.context.rank_group._exchange = timed(w._lifecycle.context.rank_group._exchange, merging)
            for step in range(steps // 4):
                distributed.barrier()
                start = time.perf_counter()
                optimizer.zero_grad()
                parallel(x).square().mean().backward()
                optimizer.step()
                if step > 1:
                    seconds[way].append(time.perf_counter() - start)
            if w is not None:
                w.close()
                if way == "merge" and rank == 0:
                    figures["sites"] = len(w.history[-1].sites)
    if rank == 0:
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        results.put({**figures, **medians, "collective": statistics.median(merging)})
    distributed.destroy_process_group()


def timed(call: Any, seconds: list[float]) -> Any:
    def around(table: Any) -> Any:
        start = time.perf_counter()
        found = call(table)
        seconds.append(time.perf_counter() - start)
        return found

    return around


def on_paper(world: int, histograms: bool) -> dict[str, float]:
    """Of the GPT-2 that the other benchmarks use: every rank sends a buffer, some receive all of them."""
    model = WORKLOADS["gpt2"].build()
    described = handshake.describe(model, Selector(model, None, None), KINDS, Schedule(1, histograms), "auto")
    size = merge.capacity(described.summary["sites"], histograms)
    everyone = size * world <= topology.MOST_FOR_ALL_GATHER
    return {
        "sites": described.summary["sites"], "sent": size, "first_receives": size * world,
        "others_receive": size * world if everyone else 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=60)
    asked = parser.parse_args()
    measured = {}
    for world in WORLDS:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as directory:
            arguments = (world, f"{directory}/store", asked.steps, asked.layers, results)
            multiprocessing.spawn(train, arguments, nprocs=world)
        found = results.get()
        measured[world] = found
        print(
            f"{world} ranks, {found['sites']:.0f} sites, {found['bytes'] / 1e3:.0f} kB a rank and logged step: "
            f"a step takes {1e3 * found['bare']:.1f} ms bare, {1e3 * found['local']:.1f} watched by the first rank, "
            f"{1e3 * found['merge']:.1f} merged, with {1e3 * found['collective']:.1f} ms of exchange in the background"
        )
    paper = {}
    for world in ON_PAPER:
        for histograms in (False, True):
            found = on_paper(world, histograms)
            paper[f"{world}{', histograms' if histograms else ''}"] = found
            print(
                f"GPT-2 ({found['sites']} sites) on {world} ranks{', histograms' if histograms else ''}: "
                f"{found['sent'] / 1e3:.0f} kB sent by each, {found['first_receives'] / 1e6:.1f} MB received by the "
                f"first, {found['others_receive'] / 1e6:.1f} MB by each of the others"
            )
    results_file = Path(__file__).parent / "results" / "ranks.json"
    result = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "measured": measured, "on_paper": paper}
    results_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
