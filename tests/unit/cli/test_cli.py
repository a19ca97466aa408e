"""The command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tbhooks
from tbhooks import cli
from tests.support.script_host import ScriptHost


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


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    command = [sys.executable, "-m", "tbhooks", "rules"]
    done = subprocess.run(command, stdout=sender, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(sender)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture(scope="module")
def demo(scripts: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the demo ran, and what it printed."""
    pytest.importorskip("sklearn")
    directory = tmp_path_factory.mktemp("demo")
    done = scripts.run("-m", "tbhooks", "demo", "--steps", "60", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


def test_the_demo_trains_shows_what_it_saw_and_says_how_to_look(demo: tuple[Path, str]) -> None:
    directory, printed = demo
    for expected in ("conv1", "output.weight", "6 steps logged", "tensorboard --logdir runs"):
        assert expected in printed
    assert len(list((directory / "runs/digits").glob("events*"))) == 1


def test_the_demo_leaves_a_run_that_is_reported_checked_and_made_a_page(demo: tuple[Path, str]) -> None:
    directory, _ = demo
    shown = run("report", "runs/digits", "--html", "page.html", cwd=directory)
    assert shown.returncode == 0, shown.stderr
    assert "conv1" in (directory / "page.html").read_text(encoding="utf-8")
    shown = run("report", "runs/digits", cwd=directory)
    for expected in ("6 logged steps, 0 to 50", "train/loss", "conv1", "output.weight", "findings"):
        assert expected in shown.stdout


def test_the_demo_shows_a_diverging_network_beside_a_normal_one(demo: tuple[Path, str]) -> None:
    directory, printed = demo
    normal, _, diverging = printed.partition("The same network again")
    assert "No issues found." in normal
    assert "Update-to-weight ratio too high" in diverging
    assert run("check", "runs/digits", "--fail-on", "warning", cwd=directory).returncode == 0
    assert run("check", "runs/digits-diverging", "--fail-on", "warning", cwd=directory).returncode == 1


def test_the_demo_keeps_the_runs_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli.main(["demo", "--steps", "1"]) == 0
    assert "runs/digits-2" in capsys.readouterr().out
    for name in ("digits", "digits-diverging", "digits-2", "digits-2-diverging"):
        assert len(list((tmp_path / "runs" / name).glob("events*"))) == 1


def test_the_demo_refuses_a_wrong_every(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--every", "0"]) == 1
    assert "every must be an integer >= 1" in capsys.readouterr().err


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    assert all(verb in shown for verb in ("demo", "report", "check", "bench", "rules"))
