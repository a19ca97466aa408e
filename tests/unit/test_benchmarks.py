"""Every script that prints figures for the docs runs: with the least work, in a copy, so that no result is replaced."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slow import cases

ROOT = Path(__file__).parents[2]
LEAST = {
    "disk": "--logged 2 --seconds 1",
    "disk_modules": "--modules 20 --logged 3",
    "large_models": "--rounds 1",
    "launches": "",
    "memory": "--processes 1 --steps 2",
    "rows": "--seconds 0.1",
    "sampled_updates": "--steps 2",
    "scaling": "--rounds 1 --modules 10",
    "taps": "",
    "tiny_layers": "--seconds 1",
    "writing": "--rounds 1",
}
OTHERS = {
    "flight": "minutes, even with the least work",
    "launch_counter": "no script",
    "launches_before": "needs modules of an older commit; launches.py --before runs it",
    "models": "no script",
    "moments": "compiles a kernel of another version",
    "overhead": "minutes, even with the least work",
    "pictures": "draws the pictures of the docs in a browser",
    "plot": "reads results; test_readme.py",
    "plugin": "tests of the plugin have its requests",
    "ranks": "tests/distributed",
    "readme": "reads results; test_readme.py",
    "tab": "needs a browser",
}


def test_every_benchmark_is_run_or_has_a_reason_not_to() -> None:
    assert {file.stem for file in (ROOT / "benchmarks").glob("*.py")} == LEAST.keys() | OTHERS.keys()


@pytest.mark.parametrize(
    "name", cases(list(LEAST), always=["disk_modules", "scaling"], reason="3 to 50 s, nearly all of it the benchmark's")
)
def test_a_benchmark_runs_and_prints_figures(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *LEAST[name].split()],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(character.isdigit() for character in done.stdout)
    for results in (tmp_path / "benchmarks" / "results").glob("*.json"):
        json.loads(results.read_text())
