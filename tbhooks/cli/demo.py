"""`tbhooks demo`: trains a small CNN on handwritten digits for a few seconds, then again with a bad learning rate."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from tbhooks.api.watch import Watch, watch
from tbhooks.data.errors import TbhooksError
from tbhooks.drawing.text import table

GOOD_RATE, RATE_TOO_HIGH = 0.002, 0.2


def run(logdir: str, steps: int, every: int) -> None:
    """Trains both, prints their findings and how to view the runs. Raises TbhooksError without scikit-learn."""
    data = _digits()
    directory = _unused(Path(logdir))
    diverging = directory.with_name(f"{directory.name}-diverging")
    torch.manual_seed(0)
    watching, summary = _train(_model(), data, GOOD_RATE, directory, steps, every)
    if watching.latest is not None:
        print(table(watching.latest))
    _report(watching, summary)
    torch.manual_seed(0)
    watching, summary = _train(_model(), data, RATE_TOO_HIGH, diverging, steps, every)
    print(f"\nThe same network again, with a learning rate of {RATE_TOO_HIGH} instead of {GOOD_RATE}:")
    _report(watching, summary)
    print(f"\nThe runs are in {directory} and {diverging}. To view them:\n")
    print(f"    tensorboard --logdir {directory.parent}     the TBHOOKS tab shows both side by side")
    print(f"    tbhooks report {diverging}\n")


def _train(
    model: nn.Module, data: tuple[Tensor, Tensor], rate: float, directory: Path, steps: int, every: int
) -> tuple[Watch, str]:
    images, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    started = time.perf_counter()
    with SummaryWriter(str(directory)) as writer, watch(model, writer, every=every) as watching:
        for step in range(steps):
            chosen = torch.randint(len(images), (64,))
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            watching.log({"loss": loss})
            _progress(step + 1, steps)
    seconds = time.perf_counter() - started
    return watching, f"{steps} steps in {seconds:.1f} s, accuracy {_accuracy(model, images, labels):.1%}"


def _digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  an extra
    except ImportError as problem:
        raise TbhooksError("the demo needs scikit-learn for its data: pip install 'tbhooks[demo]'") from problem
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    return images, torch.tensor(digits.target)


def _model() -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, 16, 3, padding=1),
        "norm1": nn.BatchNorm2d(16),
        "relu1": nn.ReLU(inplace=True),
        "conv2": nn.Conv2d(16, 32, 3, padding=1),
        "relu2": nn.ReLU(inplace=True),
        "pool": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(512, 64),
        "tanh": nn.Tanh(),
        "dropout": nn.Dropout(0.2),
        "output": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def _unused(directory: Path) -> Path:
    """The first of `runs/digits`, `runs/digits-2`, ... that does not exist, so that no run is overwritten."""
    name, number = directory.name, 1
    while directory.exists():
        number += 1
        directory = directory.with_name(f"{name}-{number}")
    return directory


def _progress(step: int, steps: int) -> None:
    if sys.stderr.isatty() and (step % 10 == 0 or step == steps):
        end = "\n" if step == steps else ""
        print(f"\rtraining: step {step} of {steps}", end=end, file=sys.stderr, flush=True)


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def _report(watching: Watch, summary: str) -> None:
    stats = watching.stats
    print(f"\n{summary}; {stats.logged} steps logged, {stats.seconds_training:.2f} s of it for monitoring.")
    for finding in watching.findings:
        print(f"{finding.severity}: {finding.message}")
    if not watching.findings:
        print("No issues found.")
