"""What runs weigh on disk: ten statistics of 500 layers beside one tag a number, and GPT-2 with histograms.

The GPT-2 run stands for 100,000 steps at every=100: 1,000 logged steps, of which `histograms=True` takes the
histograms of 263. It is trained for real for as long as `--seconds` allows; the logged steps after that are the
second half of the real ones over and over, every number and every bucket count jittered so that nothing
repeats. All of them go through the TensorBoard sink into an event file, which is weighed and taken apart.

    python benchmarks/disk.py [--seconds 60] [--logged 1000]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from models import WORKLOADS
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from writing import weight

import tbhooks
from tbhooks import MemorySink
from tbhooks.capture.schedule import Schedule
from tbhooks.data.frame import Frame
from tbhooks.sinks.tensorboard import TensorBoardSink

EVERY = 100
JITTER = 1e-3
TARGET_MB, TARGET_SHARE = 100, 8


def progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def trained(seconds: float, most: int) -> list[Frame]:
    """Frames with histograms of consecutive training steps; at least ten of them."""
    torch.manual_seed(0)
    workload, kept = WORKLOADS["gpt2"], MemorySink()
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    started = time.perf_counter()
    with tbhooks.watch(model, kept, every=1, histograms=1) as watch:
        for step in range(most):
            optimizer.zero_grad()
            loss = workload.loss(model)
            loss.backward()
            optimizer.step()
            watch.log({"loss": loss})
            watch.flush()
            progress(f"disk: trained {step + 1} steps ")
            if step >= 9 and time.perf_counter() - started > seconds:
                break
    return list(kept)


def logged_steps(real: Sequence[Frame], n: int) -> Iterator[Frame]:
    """As many as asked for, with histograms where a run of that many takes them."""
    schedule, generator = Schedule(EVERY, histograms=True), np.random.default_rng(0)
    settled = real[len(real) // 2 :]
    for i in range(n):
        frame = real[i] if i < len(real) else settled[i % len(settled)]
        if not schedule.takes_histograms(i):
            frame = replace(frame, buckets=frame.buckets[:, :0])
        yield replace(frame if i < len(real) else jittered(frame, generator), step=i * EVERY)


def jittered(frame: Frame, generator: np.random.Generator) -> Frame:
    values = frame.values * (1 + JITTER * generator.normal(size=frame.values.shape))
    scalars = {tag: value * (1 + JITTER * generator.normal()) for tag, value in frame.scalars.items()}
    return replace(frame, values=values, buckets=generator.poisson(frame.buckets), scalars=scalars)


def weigh(directory: Path, frames: Iterator[Frame], n: int) -> dict[str, float]:
    """Bytes of the event file, and of what it is made of."""
    sink = TensorBoardSink(directory)
    for i, frame in enumerate(frames):
        sink.write(frame)
        progress(f"disk: wrote {i + 1} of {n} logged steps ")
    sink.close()
    print(file=sys.stderr)
    (file,) = directory.glob("events*")
    parts: Counter[str] = Counter()
    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            parts[category(value)] += value.ByteSize()
    return {**{name: float(size) for name, size in parts.items()}, "the event file": float(file.stat().st_size)}


def category(value: object) -> str:
    what, tag = value.WhichOneof("value"), value.tag  # type: ignore[attr-defined]
    if what == "tensor":
        return "findings" if "findings" in tag else "frame tensors: buckets" if ".buckets" in tag else "frame tensors"
    return {"simple_value": "scalars", "histo": "stock histograms"}[what]


def table(parts: dict[str, float], size: dict[str, float], figures: str) -> str:
    share = size["one tag a number"] / size["tbhooks"]
    lines = [figures, "", "| GPT-2, 100,000 steps at every=100 | MB |", "| --- | --- |"]
    lines += [f"| {name} | {bytes_ / 1e6:.1f} |" for name, bytes_ in parts.items()]
    lines += [f"| allowed | {TARGET_MB} |", "", "| ten statistics of 500 layers, 1,000 steps | MB |", "| --- | --- |"]
    lines += [f"| {name} | {bytes_ * 1000 / 1e6:.1f} |" for name, bytes_ in size.items()]
    return "\n".join([*lines, f"| one tag a number / tbhooks (at least {TARGET_SHARE}) | {share:.1f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train for real")
    parser.add_argument("--logged", type=int, default=1000, help="how many logged steps to write")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "disk.json")
    options = parser.parse_args()
    real = trained(options.seconds, options.logged)
    with tempfile.TemporaryDirectory() as directory:
        parts = weigh(Path(directory) / "gpt2", logged_steps(real, options.logged), options.logged)
        size = weight(Path(directory))
    repeated = options.logged - len(real)
    figures = f"{len(real)} steps trained for real, {repeated} more are those repeated with their numbers jittered."
    result = {"trained": len(real), "logged": options.logged, "gpt2": parts, "bytes": size}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(parts, size, figures))


if __name__ == "__main__":
    main()
