"""What a watch adds to the memory of a training process, and whether that stays the same.

The peak of torch's allocations in a logged step over a bare one is exact, and so are the buffers a watch keeps: the
records of a step, and the block for copies of the weights. Fresh processes then train the same model bare and watched
and tell the most memory they ever had resident (VmHWM), which includes everything but is known to a megabyte or two.
Last, a small model is logged 2,000 times: the slope of its resident memory over the last 1,000 steps, when the
history a watch keeps (1,000 frames) is full.

    python benchmarks/memory.py [--model gpt2] [--processes 3] [--steps 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Some virtual machines announce AMX and die of it in the first bfloat16 matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from models import WORKLOADS, chain, chain_loss

import tbhooks
import tbhooks.sinks.tensorboard  # in the bare process too: importing it is not what is measured
from tbhooks.capture.recording.calls import ROOM
from tbhooks.cli.bench import runner, timing, workload
from tbhooks.cli.bench.timing import Variant

WAYS = {
    "bare": timing.bare,
    "scalars": timing.watched(every=1, histograms=False),
    "histograms": timing.watched(every=1, histograms=1),
}
STEPS = 4
TARGET_MB = 2.0
SAMPLES = 200

Numbers = dict[str, float]


def resident(field: str) -> float:
    """Megabytes: VmRSS now, VmHWM the most ever."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def buffers(watching: tbhooks.Watch) -> Numbers:
    """What is kept from one logged step to the next, in megabytes."""
    loop = watching._session
    block = loop.parameters._snapshots._block
    records = sum(buffer.header[ROOM] * buffer.record_bytes for buffer in loop.recorder._buffers)
    return {"records_mb": records / 1e6, "weight_copies_mb": (0 if block is None else block.nbytes) / 1e6}


def child(model: str, way: str) -> Numbers:
    """In a process of its own: some steps, and what they took."""
    torch.manual_seed(0)
    used = WORKLOADS[model]
    with tempfile.TemporaryDirectory() as directory:
        variant = Variant(way, used.build().train(), used.loss, WAYS[way], Path(directory))
        variant.steps(STEPS)
        figures = {"peak_mb": resident("VmHWM")}
        if variant.watching is not None:
            figures |= buffers(variant.watching)
        variant.close()
    return figures


def in_fresh_processes(model: str, processes: int) -> dict[str, Numbers]:
    figures: dict[str, list[Numbers]] = {way: [] for way in WAYS}
    for number in range(processes):
        for way, found in figures.items():
            print(f"\rmemory: process {number + 1} of {processes}, {way}   ", end="", file=sys.stderr, flush=True)
            found.append(asked("--model", model, "--child", way))
    print(file=sys.stderr)
    return {
        way: {key: statistics.median(one[key] for one in found) for key in found[0]} for way, found in figures.items()
    }


def asked(*arguments: str) -> Numbers:
    """What a process of its own finds."""
    command = [sys.executable, __file__, *arguments]
    # One arena, so that threads do not each keep a part of what they freed.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures: Numbers = json.loads(done.stdout)
    return figures


def allocated(model: str) -> Numbers:
    """Megabytes of torch's own allocations at the peak, beyond those of bare steps: exact."""
    used = WORKLOADS[model]
    torch.manual_seed(0)
    whole = workload.Workload(used.name, used.build().train(), used.loss)
    extra = runner.extra_bytes(whole, torch.device("cpu"))
    return {name.removeprefix("logged, "): number / 1e6 for name, number in extra.items()}


def flatness(steps: int) -> Numbers:
    """Resident kilobytes a step gained over the second half of a long run that logs each of them."""
    with tempfile.TemporaryDirectory() as directory:
        variant = Variant("", chain(20), chain_loss, timing.watched(every=1, histograms=1), Path(directory))
        at, megabytes = [], []
        for start in range(0, steps, max(1, steps // SAMPLES)):
            variant.steps(max(1, steps // SAMPLES))
            at.append(start)
            megabytes.append(resident("VmRSS"))
            print(f"\rmemory: step {start} of {steps}   ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        variant.close()
    half = len(at) // 2
    slope = float(np.polyfit(at[half:], megabytes[half:], 1)[0])
    return {"steps": float(steps), "kb_a_step": 1024 * slope, "first_mb": megabytes[0], "last_mb": megabytes[-1]}


def table(processes: dict[str, Numbers], peaks: Numbers, flat: Numbers) -> str:
    heading = ["logged", "resident, beyond bare", "allocated, beyond bare", "records", "weight copies", "rest"]
    lines = [[*heading, f"(target <= {TARGET_MB:g} MB)"], ["---"] * 7]
    for way in ("scalars", "histograms"):
        own = processes[way]
        extra = own["peak_mb"] - processes["bare"]["peak_mb"]
        kept = own["records_mb"] + own["weight_copies_mb"]
        numbers = (extra, peaks[way], own["records_mb"], own["weight_copies_mb"], peaks[way] - kept)
        lines.append([way, *(f"{number:.2f} MB" for number in numbers), ""])
    figures = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{figures}\n\n{flat['steps']:.0f} logged steps: {flat['kb_a_step']:+.3f} kB a step over the second half, "
        f"{flat['first_mb']:.0f} MB at first, {flat['last_mb']:.0f} MB at last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="gpt2")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    parser.add_argument("--child", choices=[*WAYS, "flatness"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        alone = flatness(options.steps) if options.child == "flatness" else child(options.model, options.child)
        print(json.dumps(alone))
        return
    processes, peaks = in_fresh_processes(options.model, options.processes), allocated(options.model)
    flat = asked("--steps", str(options.steps), "--child", "flatness")
    options.out.parent.mkdir(exist_ok=True)
    figures = {
        "machine": {"python": platform.python_version(), "torch": torch.__version__},
        "model": WORKLOADS[options.model].name,
        "resident": processes,
        "allocated_beyond_bare_mb": peaks,
        "flatness": flat,
    }
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(processes, peaks, flat))


if __name__ == "__main__":
    main()
