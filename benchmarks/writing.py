"""What writing one logged step costs, and what a run weighs, beside TensorBoard's own calls.

1000 scalars and 300 histograms a step: through the TensorBoard sink (which adds the frame tensors), and
through `add_scalar` and `add_histogram_raw`. Interleaved, medians of many rounds, once by the clock and once by
the processor time of all threads, which a busy machine disturbs less. Then the bytes of 500 layers with 10
stats each, as frame tensors and as one tag a number. Last, everything that the background thread does with a logged
step of 250 x (Linear 16, ReLU), from the copied records to the event file, with the default rules: its processor time
a site. The steps are captured first and then written again and again, so that nothing else runs.

    python benchmarks/writing.py [--rounds 15] [--only background]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import readme
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.api.handle import lifecycle_of
from tbhooks.data import stats
from tbhooks.data.frame import Frame, Site
from tbhooks.delivery.worker import Worker
from tbhooks.sinks import tensorboard
from tbhooks.sinks.tensorboard import TensorBoardSink

# 250 activations (3 core scalars each), 50 gradients and 200 updates (1 each): 1000 scalars, 300 histograms.
SITES = (
    *(Site(f"layer.{i}", "activation") for i in range(250)),
    *(Site(f"layer.{i}", "gradient") for i in range(50)),
    *(Site(f"layer.{i}.weight", "update") for i in range(200)),
)


def make_frame(step: int, sites: tuple[Site, ...] = SITES) -> Frame:
    """Rows and buckets of normally distributed numbers."""
    generator = np.random.default_rng(step)
    values, buckets = stats.empty_rows(len(sites)), np.zeros((len(sites), stats.BUCKETS), dtype=np.int64)
    sample = np.abs(generator.normal(size=5000))
    index = stats.MIDDLE + np.searchsorted(stats.LOWER[stats.MIDDLE + 1 :], sample, side="right")
    counts = np.bincount(index, minlength=stats.BUCKETS)
    buckets[:] = generator.poisson(counts + counts[::-1], size=buckets.shape)
    values[:, stats.COUNT] = counts.sum() * 2
    values[:, stats.MEAN] = generator.normal(size=len(sites))
    values[:, stats.M2] = counts.sum() * generator.uniform(1, 2, size=len(sites))
    values[:, stats.MIN], values[:, stats.MAX], values[:, stats.BASE] = -sample.max(), sample.max(), 1.0
    return Frame(step, time.time(), 0, sites, values, buckets)


def by_stock_calls(writer: SummaryWriter, step: int) -> None:
    limits, counts = list(np.linspace(-4, 4, 64)), list(range(64))
    for i in range(1000):
        writer.add_scalar(f"stat/{i}", 0.5, step)
    for i in range(300):
        writer.add_histogram_raw(f"histogram/{i}", -4, 4, 2016, 0, 100, limits, counts, step)
    writer.flush()


def by_sink(sink: TensorBoardSink, frame: Frame) -> None:
    sink.write(frame)
    sink.flush()


Clock = Callable[[], float]
WAYS = ("stock calls", "tbhooks")
CLOCKS: dict[str, Clock] = {"seconds": time.perf_counter, "processor seconds": time.process_time}
Measured = dict[str, dict[str, list[float]]]


def timed(run: Callable[[], None]) -> dict[str, float]:
    started = {name: clock() for name, clock in CLOCKS.items()}
    run()
    return {name: clock() - started[name] for name, clock in CLOCKS.items()}


def cost(rounds: int, directory: Path) -> Measured:
    """Seconds a step. The stock calls keep TensorBoard's own checksum, as they do for who has no tbhooks."""
    stock = SummaryWriter(str(directory / "stock"))
    sink = TensorBoardSink(SummaryWriter(str(directory / "sink")))
    fast, slow = tensorboard.record_writer.masked_crc32c, tensorboard.record_writer.masked_crc32c.__wrapped__
    found: Measured = {clock: {way: [] for way in WAYS} for clock in CLOCKS}
    for step in range(rounds):
        frame = make_frame(step)
        tensorboard.record_writer.masked_crc32c = slow
        stock_calls = timed(lambda at=step: by_stock_calls(stock, at))
        tensorboard.record_writer.masked_crc32c = fast
        ours = timed(lambda frame=frame: by_sink(sink, frame))
        for clock in CLOCKS:
            found[clock]["stock calls"].append(stock_calls[clock])
            found[clock]["tbhooks"].append(ours[clock])
        print(f"\rwriting: round {step + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def flushing(rounds: int, directory: Path) -> dict[str, float]:
    """Median seconds of a step, and the part of it spent on handing the data to the operating system."""
    sink = TensorBoardSink(directory / "handed")
    stock, spent, whole = sink._file.flush, [], []

    def timed_flush() -> None:
        started = time.perf_counter()
        stock()
        spent.append(time.perf_counter() - started)

    sink._file.flush = timed_flush
    for step in range(rounds):
        frame = make_frame(step)
        started = time.perf_counter()
        sink.write(frame)
        whole.append(time.perf_counter() - started)
    sink.close()
    return {"step": float(np.median(whole)), "handing over": float(np.median(spent))}


def middle(found: Measured) -> dict[str, dict[str, float]]:
    """By clock: the medians, half the distance of their quartiles, and the median of each round's ratio."""
    result = {}
    for clock, rounds in found.items():
        stock, ours = np.array(rounds["stock calls"]), np.array(rounds["tbhooks"])
        spread = {f"{name} spread": float(np.ptp(np.quantile(x, (0.25, 0.75))) / 2) for name, x in rounds.items()}
        medians = {name: float(np.median(x)) for name, x in rounds.items()}
        result[clock] = {**medians, **spread, "ratio": float(np.median(stock / ours))}
    return result


def weight(directory: Path, layers: int = 500, steps: int = 1000) -> dict[str, float]:
    """Bytes a step of 10 stats for each of 500 layers."""
    sites = tuple(Site(f"encoder.layer.{i}.output", "activation") for i in range(layers))
    sink = TensorBoardSink(directory / "tensors", scalars=())
    for step in range(steps):
        frame = make_frame(step, sites)
        sink.write(Frame(step, 0.0, 0, sites, frame.values, frame.buckets[:, :0]))
    sink.close()
    writer = SummaryWriter(str(directory / "tags"))
    for i in range(layers):
        for stat in list(stats.STATS)[:10]:
            writer.add_scalar(f"activation.{stat}/{sites[i].name}", 0.5, 0)
    writer.close()
    size = {name: sum(f.stat().st_size for f in (directory / name).glob("events*")) for name in ("tensors", "tags")}
    return {"tbhooks": size["tensors"] / steps, "one tag a number": float(size["tags"])}


BACKGROUND = {
    "scalars": {"histograms": False},
    "histograms": {"histograms": 1},
    'scalars="core"': {"histograms": False, "scalars": "core"},
    'scalars="core", histograms': {"histograms": 1, "scalars": "core"},
}
LAYERS = 250


def captured(layers: int, histograms: Any, directory: Path, steps: int = 6) -> list[Any]:
    """The logged steps of a training, as the background thread gets them."""
    kept: list[Any] = []
    submit, Worker.submit = Worker.submit, lambda _, step: kept.append(step)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        with tbhooks.watch(model, directory, every=1, histograms=histograms):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(16, 16)).square().mean().backward()
                optimizer.step()
    finally:
        Worker.submit = submit
    return [step for step in kept if len(step.calls)]


def background(rounds: int, directory: Path, layers: int = LAYERS) -> dict[str, dict[str, float]]:
    """Microseconds of the background thread a site and logged step, in turns: least, median and quartiles."""
    steps = {h: captured(layers, h, directory / f"captured {h}") for h in (False, 1)}
    model = nn.Linear(1, 1)
    watches = {
        name: tbhooks.watch(model, directory / f"again {i}", every=1, **options)
        for i, (name, options) in enumerate(BACKGROUND.items())
    }
    spent: dict[str, list[float]] = {name: [] for name in BACKGROUND}
    for number in range(WARM_UP + rounds):
        for name, watching in watches.items():
            those = steps[BACKGROUND[name]["histograms"]]
            step = replace(those[number % len(those)], step=number)
            started = time.thread_time()
            lifecycle_of(watching)._worker._write(step)
            spent[name].append(time.thread_time() - started)
        print(f"\rbackground: round {number + 1} of {WARM_UP + rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    sites = len(watches["scalars"].latest.sites)
    for watching in watches.values():
        watching.close()
    found: dict[str, dict[str, float]] = {}
    for name, seconds in spent.items():
        each = 1e6 * np.array(seconds[WARM_UP:]) / sites
        low, median, high = np.quantile(each, (0.25, 0.5, 0.75))
        found[name] = {"least": each.min(), "low": low, "median": median, "high": high, "sites": sites}
    return found


# As many frames as rules look back on, so that nothing is seen for the first time.
WARM_UP = 24


def background_lines(found: dict[str, dict[str, float]]) -> str:
    lines = [f"Background thread, {found['scalars']['sites']:,.0f} sites, µs a site and logged step:"]
    for name, x in found.items():
        lines.append(
            f"  {name:28} {x['median']:5.2f} (quartiles {x['low']:.2f} to {x['high']:.2f}, least {x['least']:.2f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "writing.json")
    parser.add_argument("--only", choices=("background",))
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        threads = background(options.rounds, Path(directory))
    if options.only:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**known, "background": threads}, indent=1) + "\n")
        print(background_lines(threads))
        return
    with tempfile.TemporaryDirectory() as directory:
        result = middle(cost(options.rounds, Path(directory)))
        handed = flushing(options.rounds, Path(directory))
        size = weight(Path(directory))
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**result, "bytes": size, "background": threads}, indent=1) + "\n")
    print(readme.writing_lines(result["seconds"], size))
    print(
        f"Handing a step to the operating system: {1e3 * handed['handing over']:.2f} of {1e3 * handed['step']:.2f} ms, "
        "in the background thread."
    )
    for clock, numbers in result.items():
        shown = ", ".join(
            f"{name} {1e3 * numbers[name]:.1f} ± {1e3 * numbers[f'{name} spread']:.1f} ms" for name in WAYS
        )
        print(f"By {clock}: {shown}; stock calls / tbhooks {numbers['ratio']:.1f} (at least 20).")
    print(background_lines(threads))


if __name__ == "__main__":
    main()
