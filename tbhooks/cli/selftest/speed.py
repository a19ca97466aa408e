"""The checks of what reading costs: bytes a second of each kernel, and the overhead on three models.

A figure is shown, not judged: these checks pass unless something raises.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tbhooks.capture.hooks.manager import hook_output
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.cli.bench import cuda_counters, timing
from tbhooks.cli.bench.timing import HostTimer, Monitor, Timer, Timing, Variant, bare, watched
from tbhooks.cli.selftest.check import Passed, Setup
from tbhooks.data.frame import KINDS, Site

REPETITIONS = 5
ROUNDS, QUICK_ROUNDS = 12, 3
WANDB_EVERY = 6
# The steps between two logged ones, for what the overhead is on average.
EVERY = 100
# If the times of equal steps vary by more, ratios of them are rough.
ROUGH = 0.1


def bandwidth(setup: Setup) -> Passed:
    """The bytes a second that each kernel reads, beside a plain copy."""
    numbers: dict[str, float] = {}
    size = 1 << (22 if setup.quick or not setup.on_cuda else 26)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(size, device=setup.device).to(dtype)
        name = str(dtype).removeprefix("torch.")
        for what, run in (
            ("copy", tensor.clone),
            ("row", _reading(tensor, with_buckets=False)),
            ("row and histogram", _reading(tensor, with_buckets=True)),
        ):
            setup.log(f"{name}: {what}")
            numbers[f"{name} {what}"] = tensor.nbytes / _seconds(run, setup) / 1e9
    return Passed("GB/s: " + ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()), numbers)


def _reading(tensor: Tensor, with_buckets: bool) -> Callable[[], object]:
    recorder = Recorder(KINDS)
    site = recorder.number(Site("tensor", "activation"))

    def run() -> None:
        recorder.begin(with_buckets)
        recorder.record(site, tensor)

    return run


def _timer(setup: Setup) -> Timer:
    return cuda_counters.CudaTimer(setup.device) if setup.on_cuda else HostTimer()


def _seconds(run: Callable[[], object], setup: Setup) -> float:
    """The shortest of some repetitions, after two that compile and allocate."""
    timer = _timer(setup)
    run()
    run()
    best = float("inf")
    for _ in range(REPETITIONS):
        timer.start()
        run()
        best = min(best, timer.stop())
    return best


def overhead(setup: Setup) -> Passed:
    """The duration of a logged step beside that of a bare one, for tbhooks and for what people use instead."""
    ways: dict[str, timing.Observe] = {
        "bare": bare,
        "tbhooks": watched(every=1, histograms=1),
        "hand-written hooks": _hand_written,
    }
    note = "wandb.watch is left out by --quick" if setup.quick else "wandb is not installed"
    if not setup.quick and importlib.util.find_spec("wandb") is not None:
        ways["wandb.watch"], note = _wandb, "wandb offline"
    numbers: dict[str, float] = {}
    shown, varied = [], 0.0
    for name, (model, loss) in _models(setup.device).items():
        setup.log(f"training {name}")
        timed = _timings(setup, name, model, loss, ways)
        varied = max(varied, timed["bare"].spread)
        ratios = {way: each.ratio_of_minima for way, each in timed.items() if way != "bare"}
        numbers |= {f"{name}: {way}": ratio for way, ratio in ratios.items()}
        of_ways = ", ".join(f"{way} {ratio:.2f}" for way, ratio in ratios.items())
        shown.append(f"{name}: {of_ways} (tbhooks with every={EVERY}: {(ratios['tbhooks'] - 1) / EVERY:+.1%})")
    rough = f"; rough, because the bare steps themselves varied by {varied:.0%}" if varied > ROUGH else ""
    return Passed(f"a logged step, in times of a bare one: {'; '.join(shown)}{rough}; {note}", numbers)


def _timings(
    setup: Setup,
    model_name: str,
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    ways: dict[str, timing.Observe],
) -> dict[str, Timing]:
    def progress(done: int, rounds: int) -> None:
        setup.log(f"training {model_name}: round {done} of {rounds}")

    optimizer = timing.make_optimizer(model)
    with tempfile.TemporaryDirectory() as directory:
        variants = {
            # A run of wandb takes seconds to start and to end.
            name: Variant(
                name,
                model,
                loss,
                observe,
                Path(directory) / str(i),
                shared=optimizer,
                every_nth_round=WANDB_EVERY if observe is _wandb else 1,
            )
            for i, (name, observe) in enumerate(ways.items())
        }
        try:
            rounds = QUICK_ROUNDS if setup.quick else ROUNDS
            timing.run_rounds(list(variants.values()), rounds, 1 if setup.quick else 5, _timer(setup), progress)
            return {name: timing.compared(variant, variants["bare"]) for name, variant in variants.items()}
        finally:
            for variant in variants.values():
                variant.close()


def _hand_written(model: nn.Module, _optimizer: torch.optim.Optimizer, _directory: Path) -> Monitor:
    """The hooks that people write: each waits for the device."""
    seen: dict[str, float] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                seen[f"{name}.mean"], seen[f"{name}.std"] = output.mean().item(), output.std().item()

        return record

    handles = [hook_output(module, hook(name)) for name, module in model.named_modules()]

    def close() -> None:
        for handle in handles:
            handle.remove()

    return Monitor(close=close)


def _wandb(model: nn.Module, _optimizer: torch.optim.Optimizer, directory: Path) -> Monitor:
    import wandb  # noqa: PLC0415  an extra

    run = wandb.init(mode="offline", dir=str(directory.parent), settings=wandb.Settings(silent=True))
    run.watch(model, log="all", log_freq=1)

    def close() -> None:
        run.unwatch(model)
        run.finish()

    return Monitor(finish=lambda: run.log({}), close=close)


def _models(device: torch.device) -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    torch.manual_seed(0)
    rows, images = torch.randn(64, 256, device=device), torch.randn(8, 3, 32, 32, device=device)
    tokens = torch.randn(8, 32, 128, device=device)
    models = {
        "MLP": (nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8))), rows),
        "CNN": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
            ),
            images,
        ),
        "transformer": (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 3, enable_nested_tensor=False
            ),
            tokens,
        ),
    }  # fmt: skip

    def loss_on(inputs: Tensor) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(inputs).float().square().mean()

    return {name: (model.to(device), loss_on(inputs)) for name, (model, inputs) in models.items()}
