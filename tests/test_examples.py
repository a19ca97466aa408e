"""The examples run as the README says, with torchrun and two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tbhooks import runs
from tbhooks.exchange import RANKS

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.xdist_group("ranks")


def run_by_torchrun(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        cwd=directory, env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "steps", "logged", "said"),
    [
        ("ddp_digits", 41, [0, 20, 40], "gradient of the second convolution: norm "),
        ("fsdp_gpt", 11, [0, 10], "blocks.0.up.weight: 16384 elements, norm "),
    ],
)
def test_an_example_runs_on_two_processes_and_writes_one_run_of_both(
    tmp_path: Path, name: str, steps: int, logged: list[int], said: str
) -> None:
    script = str(EXAMPLES / f"{name}.py")
    ran = run_by_torchrun(tmp_path, script, "--steps", str(steps), "--logdir", "run")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{steps} steps on 2 ranks, loss " in ran.stdout
    assert said in ran.stdout
    assert "look at it: tensorboard --logdir run" in ran.stdout
    run = runs.read(tmp_path / "run")
    assert [frame.step for frame in run.training] == logged
    assert [frame.scalars[RANKS] for frame in run.training] == [2.0] * len(logged)
    assert len(list((tmp_path / "run").iterdir())) == 1
