"""The command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tbhooks


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tbhooks", *arguments]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=alone)


def test_version_and_help() -> None:
    assert run("--version").stdout == f"tbhooks {tbhooks.__version__}\n"
    assert "demo" in run("--help").stdout


def test_a_wrong_command_says_what_there_is() -> None:
    done = run("dem")
    assert done.returncode == 2
    assert "demo" in done.stderr


def test_the_demo_trains_shows_what_it_saw_says_how_to_look_and_leaves_a_run_to_report(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = run("demo", "--steps", "30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in ("conv1", "output.weight", "3 steps logged", "tensorboard --logdir runs"):
        assert expected in done.stdout
    assert len(list((tmp_path / "runs/digits").glob("events*"))) == 1
    check_what_the_run_tells(tmp_path)
    again = run("demo", "--steps", "10", cwd=tmp_path)
    assert "runs/digits-2" in again.stdout
    assert len(list((tmp_path / "runs/digits-2-diverging").glob("events*"))) == 1
    assert len(list((tmp_path / "runs/digits").glob("events*"))) == 1


def test_the_demo_shows_a_diverging_network_beside_a_normal_one(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = run("demo", "--steps", "60", cwd=tmp_path)
    normal, _, diverging = done.stdout.partition("The same network again")
    assert "No issues found." in normal
    assert "Update-to-weight ratio too high" in diverging
    assert run("check", "runs/digits", "--fail-on", "warning", cwd=tmp_path).returncode == 0
    assert run("check", "runs/digits-diverging", "--fail-on", "warning", cwd=tmp_path).returncode == 1


def test_the_demo_refuses_a_wrong_every(tmp_path: Path) -> None:
    done = run("demo", "--every", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert "every must be an integer >= 1" in done.stderr


def check_what_the_run_tells(tmp_path: Path) -> None:
    """It is reported, checked and made a page."""
    shown = run("report", "runs/digits", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for expected in ("3 logged steps, 0 to 20", "train/loss", "conv1", "output.weight", "findings"):
        assert expected in shown.stdout
    assert run("check", "runs/digits", cwd=tmp_path).returncode == 0
    assert run("report", "runs/digits", "--html", "page.html", cwd=tmp_path).returncode == 0
    assert "conv1" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    assert all(verb in shown for verb in ("demo", "report", "check", "bench", "rules"))
