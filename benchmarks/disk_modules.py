"""What a run of many modules weighs on disk: 1,000 modules at 300 logged steps, with summaries and with every scalar.

python benchmarks/disk_modules.py [--modules 1000] [--logged 300]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import tbhooks

TARGET_MB = 120


def megabytes(modules: int, logged: int, scalars: str) -> float:
    """Trains a chain of linear layers and ReLUs, logs every step, and weighs the event file."""
    torch.manual_seed(0)
    layers = [layer for _ in range(modules // 2) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers)
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as directory:
        with tbhooks.watch(model, directory, every=1, scalars=scalars):
            for _ in range(logged):
                optimizer.zero_grad()
                model(torch.randn(32, 16)).square().mean().backward()
                optimizer.step()
        return sum(path.stat().st_size for path in Path(directory).iterdir()) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--logged", type=int, default=300)
    options = parser.parse_args()
    sizes = {name: megabytes(options.modules, options.logged, name) for name in ("auto", "core")}
    for name, size in sizes.items():
        print(f"{options.modules} modules, {options.logged} logged steps, scalars={name!r}: {size:.1f} MB")
    whole = options.modules >= 1000 and options.logged >= 300
    return int(whole and sizes["auto"] > TARGET_MB)


if __name__ == "__main__":
    sys.exit(main())
