"""Runs the Python code of a page of the documentation, block by block in one namespace, as a reader would.

Readers have what the first script of the quickstart makes: a model, its optimizer, a loader and a loss function. That
script is run first. A block that cannot run here follows a comment `<!-- not run: reason -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import tbhooks

_BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```", re.DOTALL)
QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.md"


def blocks(page: Path) -> list[str]:
    """The blocks of Python code that can run, in the order of the page."""
    return [code for skipped, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if not skipped]


def run(page: Path) -> None:
    """Runs them in the current directory. An exception names the page and the block."""
    names: dict[str, Any] = {"__name__": "__main__"}
    script = [] if page == QUICKSTART else [(QUICKSTART, 0, blocks(QUICKSTART)[0])]
    try:
        for origin, i, code in [*script, *((page, i, code) for i, code in enumerate(blocks(page)))]:
            exec(compile(code, f"{origin.name}, block {i}", "exec"), names)
    finally:  # as the end of a script does
        for value in list(names.values()):
            if isinstance(value, torch.nn.Module):
                tbhooks.unwatch(value)
