"""The examples run as the README says: with torchrun and two processes, and the tutorial alone."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tbhooks import runs
from tbhooks.capture.recording.step_table import RANKS
from tests.support.script_host import ScriptHost
from tests.support.slow import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.xdist_group("ranks")


def run_by_torchrun(scripts: ScriptHost, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return scripts.run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments,
        cwd=directory, env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "steps", "logged", "said"),
    [
        ("ddp_digits", 41, [0, 20, 40], "gradient of the second convolution: norm "),
        pytest.param(
            "fsdp_gpt",
            11,
            [0, 10],
            "blocks.0.up.weight: 16384 elements, norm ",
            marks=slow("two more processes; test_run_scripts.py has a sharded training under torchrun"),
        ),
    ],
)
def test_an_example_runs_on_two_processes_and_writes_one_run_of_both(
    scripts: ScriptHost, tmp_path: Path, name: str, steps: int, logged: list[int], said: str
) -> None:
    script = str(EXAMPLES / f"{name}.py")
    ran = run_by_torchrun(scripts, tmp_path, script, "--steps", str(steps), "--logdir", "run")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{steps} steps on 2 ranks, loss " in ran.stdout
    assert said in ran.stdout
    assert "look at it: tensorboard --logdir run" in ran.stdout
    run = runs.read(tmp_path / "run")
    assert [frame.step for frame in run.training] == logged
    assert [frame.scalars[RANKS] for frame in run.training] == [2.0] * len(logged)
    assert len(list((tmp_path / "run").iterdir())) == 1


# The tutorial. ----------------------------------------------------------------------------------------------------


def lines_of_code(script: Path) -> int:
    """Without empty ones, comments and docstrings."""
    text = script.read_text()
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    said = {i for node in nodes if ast.get_docstring(node) for i in _lines(node.body[0])}
    lines = enumerate(text.splitlines(), start=1)
    return sum(i not in said and bool(line.strip()) and not line.strip().startswith("#") for i, line in lines)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def test_the_tutorial_logs_everything_in_less_than_forty_lines(scripts: ScriptHost, tmp_path: Path) -> None:
    script = EXAMPLES / "tutorial.py"
    assert lines_of_code(script) < 40
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = scripts.run(script, cwd=tmp_path, env=environment, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "of the test digits are right; found wrong: 0" in ran.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("Reader-")
    shown = EventAccumulator(str(run), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    tags = shown.Tags()
    assert tags["graph"]
    assert {"train/loss", "eval/accuracy", "train.samples_per_second", "train.lr/0"} <= set(tags["scalars"])
    assert [event.step for event in shown.Scalars("train/loss")][:3] == [0, 5, 10]
    assert len(shown.Scalars("eval/accuracy")) == 6
    assert {"activation/conv", "activation/conv[3]", "weight/conv.weight[15]"} <= set(tags["histograms"])
    pictures = {"images.activation/conv", "images.activation/attention[1]", "images.weight/conv.weight"}
    texts = {"tbhooks/summary/text_summary", "tbhooks/environment/text_summary"}
    assert pictures | texts | {"_hparams_/session_start_info"} <= set(tags["tensors"])
    assert "head" in (run / "projector_config.pbtxt").read_text()
    assert len(list((run / "tbhooks-profile").iterdir())) == 1
