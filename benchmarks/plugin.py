"""How long the tab's questions take: a real TensorBoard on loopback, under both of its loaders.

One run of 1000 modules x 2000 logged steps, histograms as often as a watch writes them, beside 50 small runs. Times
are of whole requests, from asking to the last byte: the first of its sort, which reads everything from TensorBoard,
and the least of some more.

    python benchmarks/plugin.py [--modules 1000] [--steps 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import writing

from tbhooks.capture.schedule import Schedule
from tbhooks.data.frame import Frame, Site
from tbhooks.sinks.tensorboard import TensorBoardSink

LOADERS = {"fast loader": "true", "Python loader": "false"}
RUNS = 50
# Updates have no stock histograms, whose loading would be measured as well.
KIND = "update"
PATIENCE_S = 900.0

Seconds = dict[str, float]
Ask = Callable[..., bytes]


class LargeRun:
    """A run that can go on when it has been looked at."""

    def __init__(self, directory: Path, modules: int) -> None:
        self._sites = tuple(Site(f"encoder.layers.{i // 10}.part{i % 10}", KIND) for i in range(modules))
        self._sink = TensorBoardSink(directory / "large", scalars=())
        self._schedule = Schedule(1, histograms=True)
        self.steps = 0

    def write(self, steps: int) -> None:
        for step in range(self.steps, self.steps + steps):
            frame = writing.make_frame(step, self._sites)
            counts = frame.buckets[:, :0].copy()
            if self._schedule.takes_histograms(step):
                counts = np.random.default_rng(step).poisson(frame.buckets).astype(np.int64)
            self._sink.write(Frame(step, time.time(), 0, self._sites, frame.values.copy(), counts))
            if step % 100 == 0:
                print(f"\rwriting: step {step}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        self.steps += steps
        self._sink.flush()


def small_runs(directory: Path) -> None:
    sites = tuple(Site(f"layer.{i}", kind) for kind in ("activation", "gradient", "weight") for i in range(50))
    for i in range(RUNS):
        sink = TensorBoardSink(directory / f"small/{i}", scalars=())
        for step in range(20):
            frame = writing.make_frame(step, sites)
            sink.write(Frame(step, time.time(), 0, sites, frame.values.copy(), frame.buckets[:, :0].copy()))
        sink.close()


@contextmanager
def serving(directory: Path, fast: str, log: Path) -> Iterator[Ask]:
    """Asks the tab of a TensorBoard over the directory."""
    command = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", "127.0.0.1", "--port", "0",
        f"--load_fast={fast}", "--reload_interval=1",
    ]  # fmt: skip
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()))[0]

        def ask(route: str, /, **parameters: object) -> bytes:
            query = urllib.parse.urlencode(parameters)
            with direct.open(f"{address}/data/plugin/tbhooks/{route}?{query}", timeout=PATIENCE_S) as answer:
                return bytes(answer.read())

        yield ask
    finally:
        server.kill()
        server.wait(10)


def wait_for(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = ready()
        if answer:
            return answer
        time.sleep(0.1)
    raise TimeoutError("TensorBoard did not get there")


def loaded(ask: Ask, steps: int) -> bool:
    newest = {run["name"]: run["last_step"] for run in json.loads(ask("runs"))["runs"]}
    return len(newest) == RUNS + 1 and newest["large"] == steps - 1


def measure(ask: Ask, large: LargeRun, rounds: int) -> Seconds:
    where = {"run": "large", "kind": KIND}
    module = where | {"path": "encoder.layers.3.part1"}
    seconds: Seconds = {}

    def first(name: str, route: str, **parameters: object) -> None:
        started = time.perf_counter()
        ask(route, **parameters)
        seconds[name] = time.perf_counter() - started

    def again(name: str, route: str, **parameters: object) -> None:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            ask(route, **parameters)
            times.append(time.perf_counter() - started)
        seconds[name] = min(times)

    again(f"list of {RUNS + 1} runs", "runs")
    first("matrix, first time", "matrix", **where, stat="std")
    again("matrix, again", "matrix", **where, stat="std")
    again("matrix, another stat", "matrix", **where, stat="norm")
    first("distribution, first time", "distribution", **module, step=large.steps // 2)
    again("distribution, another module", "distribution", **where, path="encoder.layers.7.part2", step=7)
    again("history of a module", "history", **module)
    first("matrix of a quantile, first time", "matrix", **where, stat="p50")
    again("matrix of a quantile, again", "matrix", **where, stat="p50")
    before = large.steps
    large.write(1)
    wait_for(lambda: loaded(ask, large.steps))
    first("one more step", "matrix", **where, stat="std", after=before - 1)
    return seconds


def table(results: dict[str, Seconds]) -> str:
    """A column a loader, a row a question."""
    lines = [["milliseconds", *results], ["---"] * (len(results) + 1)]
    rows = list(dict.fromkeys(row for seconds in results.values() for row in seconds))
    lines += [[row, *(f"{1e3 * seconds[row]:.0f}" for seconds in results.values())] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plugin.json")
    options = parser.parse_args()
    results: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "logs"
        large = LargeRun(directory, options.modules)
        large.write(options.steps)
        small_runs(directory)
        for name, fast in LOADERS.items():
            started = time.perf_counter()
            with serving(directory, fast, Path(scratch) / "server.log") as ask:
                wait_for(lambda ask=ask: loaded(ask, large.steps))
                results[name] = {"start of TensorBoard, until all is loaded": time.perf_counter() - started}
                results[name] |= measure(ask, large, options.rounds)
    options.out.parent.mkdir(exist_ok=True)
    figures = {"modules": options.modules, "steps": options.steps, "runs": RUNS + 1, "seconds": results}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
