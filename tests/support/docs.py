"""Runs the Python code of a page of the documentation, block by block in one namespace, as a reader would.

What readers have already is there: a model with modules `0` and `encoder.0`, its optimizer, a loader, a loss function
and a writer. A block that cannot run here follows a comment `<!-- not run: reason -->`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

import tbhooks

_BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The blocks of Python code that can run, in the order of the page."""
    return [code for skipped, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if not skipped]


def run(page: Path) -> None:
    """Runs them in the current directory. An exception names the page and the block."""
    torch.manual_seed(0)
    names = _what_readers_have()
    model = names["model"]
    try:
        for i, code in enumerate(blocks(page)):
            exec(compile(code, f"{page.name}, block {i}", "exec"), names)
            tbhooks.unwatch(model)
    finally:
        tbhooks.unwatch(model)
        names["writer"].close()


def _what_readers_have() -> dict[str, Any]:
    encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(
        OrderedDict([("0", nn.Linear(8, 8)), ("relu", nn.ReLU()), ("encoder", encoder), ("head", nn.Linear(8, 4))])
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(12)]

    def train(model: nn.Module = model, loader: Any = loader) -> None:
        for x, y in loader:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        "tbhooks": tbhooks, "torch": torch, "nn": nn, "F": functional, "model": model, "optimizer": optimizer,
        "loader": loader, "x": loader[0][0], "y": loader[0][1], "loss_fn": functional.cross_entropy,
        "writer": SummaryWriter("runs/reader"), "train": train,
    }  # fmt: skip
