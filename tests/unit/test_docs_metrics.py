"""The page about taps, metrics and samples: its code runs, and it names every ready metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tbhooks import metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/metrics.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert names["w"].stats.errors == 0, names["w"].stats.messages


def test_every_ready_metric_is_in_the_table() -> None:
    assert {name for name in metrics.READY if f"| `{name}" not in PAGE} == set()


def test_without_tbhooks_the_fallback_returns_the_tensor() -> None:
    block = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "ImportError" in code)
    names: dict[str, Any] = {}
    exec(block.replace("tbhooks", "tbhooks_is_not_here"), names)
    assert names["tap"]("x", 3) == 3
