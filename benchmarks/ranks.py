"""What merging ranks costs: for real with a few processes on this machine, and simulated for a thousand.

Ranks of a small model with many layers train side by side with gloo, bare, watched by the first rank alone, and
merged, every step logged; the ways take turns. The merging itself is timed in the background thread that does it.
For 1,024 ranks the tables of all ranks of a GPT-2 are made and exchanged in this process, once with all of them read by
the first rank and once in slices: the bytes are exact, and so is the comparison of the merged numbers; the seconds are
those of the ranks' own work, without a network.

    python benchmarks/ranks.py [--steps 40] [--layers 60] [--only-simulated]
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

import numpy as np
import torch
from models import WORKLOADS
from torch import distributed, multiprocessing, nn

import tbhooks
from tbhooks.capture.recording.step_table import PARAMETER_KINDS, UNKNOWN_SHARD, UNSHARDED, StepTable
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.selection import Selector
from tbhooks.data import stats
from tbhooks.data.frame import KINDS, Site
from tbhooks.distributed import handshake, merge, slices, topology

WORLDS = (2, 4)
ON_PAPER = (8, 64)
SIMULATED = (256, 1024)
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
                group = w._lifecycle.context.rank_group
                group._merge_gathered = timed(group._merge_gathered, merging)
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


def make_tables(world: int, histograms: bool) -> list[StepTable]:
    """The tables of a data-parallel GPT-2: every rank has outputs of its own, and the same parameters."""
    model = WORKLOADS["gpt2"].build()
    sites = [Site(path, kind) for path, _ in model.named_modules() if path for kind in ("activation", "gradient")]
    kinds = ("weight", "weight_gradient", "update")
    sites += [Site(path, kind) for path, _ in model.named_parameters() for kind in kinds]
    random = np.random.default_rng(0)
    shards = np.array([UNSHARDED if site.kind in PARAMETER_KINDS else UNKNOWN_SHARD for site in sites])
    same = shards[:, 1] == 1
    first = rows_of(random, len(sites))
    tables = []
    for rank in range(world):
        values = np.where(same[:, None], first, rows_of(random, len(sites)))
        counts = np.zeros((len(sites), 0), np.int64)
        if histograms:  # some 40 buckets have counts, as of a normal distribution
            counts = np.zeros((len(sites), stats.BUCKETS), np.int64)
            lots = random.poisson(80, (len(sites), 40))
            counts[:, 100:140] = np.where(same[:, None], lots[0] if rank == 0 else tables[0].counts[:, 100:140], lots)
        tables.append(StepTable(0, sites, values, counts, shards, {"train/loss": float(rank)}, group=rank))
    return tables


def rows_of(random: np.random.Generator, count: int) -> stats.Floats:
    data = random.normal(3.0, 1.0, (count, 64))
    return np.array([stats.row_of(row) for row in data])


def simulated(world: int, histograms: bool) -> dict[str, float]:
    """One logged step of many ranks, read by the first rank, and in slices: bytes, and seconds of each rank's work."""
    tables = make_tables(world, histograms)
    size = merge.capacity(len(tables[0].sites), histograms)
    sent = [merge.Writer(size).write(table) for table in tables]
    reader, started = merge.Reader(), time.perf_counter()
    expected = merge.merge([reader.read(data) for data in sent])
    found = {"sites": len(tables[0].sites), "all_received": size * world, "all_s": time.perf_counter() - started}
    count = slices.slice_count(size, world)
    started = time.perf_counter()
    parts = [slices.SliceWriter(count).write(table) for table in tables]
    found |= {"slices": count, "write_s": (time.perf_counter() - started) / world}
    merged, seconds = [], []
    for number in range(count):
        merger, started = slices.SliceMerger(), time.perf_counter()
        merged.append(merger.merge([each[number] for each in parts])[0])
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    result = slices.SliceReader().read(merged, tables[0].sites)
    equal = np.array_equal(result.table.values, expected.table.values) and np.array_equal(
        result.spreads, expected.spreads, equal_nan=True
    )
    return found | {
        "first_s": time.perf_counter() - started, "merger_s": max(seconds), "is_equal": bool(equal),
        "sent": sum(map(len, parts[0])), "first_received": sum(map(len, merged)),
        "merger_received": max(sum(len(each[number]) for each in parts) for number in range(count)),
    }  # fmt: skip


def show(world: int, name: str, found: dict[str, float]) -> None:
    print(
        f"GPT-2 ({found['sites']} sites) on {world} simulated ranks{name}: all read by the first rank, it receives "
        f"{found['all_received'] / 1e6:.1f} MB and works {found['all_s']:.2f} s. In {found['slices']} slices each rank "
        f"sends {found['sent'] / 1e3:.0f} kB ({found['write_s'] * 1e3:.0f} ms), the first receives "
        f"{found['first_received'] / 1e3:.0f} kB ({found['first_s'] * 1e3:.0f} ms), a rank that merges a slice at most "
        f"{found['merger_received'] / 1e6:.2f} MB ({found['merger_s'] * 1e3:.0f} ms). "
        f"Equal to the bit: {'yes' if found['is_equal'] else 'NO'}"
    )


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
    parser.add_argument("--only-simulated", action="store_true")
    asked = parser.parse_args()
    results_file = Path(__file__).parent / "results" / "ranks.json"
    measured = json.loads(results_file.read_text())["measured"] if asked.only_simulated else {}
    for world in () if asked.only_simulated else WORLDS:
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
    in_slices = {}
    for world in SIMULATED:
        for histograms in (False, True):
            name = ", histograms" if histograms else ""
            in_slices[f"{world}{name}"] = found = simulated(world, histograms)
            show(world, name, found)
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}", "measured": measured, "on_paper": paper,
        "simulated": in_slices,
    }  # fmt: skip
    results_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
