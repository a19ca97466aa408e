"""Scripts as people write them do the same with and without `tbhooks run`, to the bit, and leave a run full of tags."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tbhooks import runs
from tbhooks.data.frame import KINDS
from tests.support.processes import without_torch_log
from tests.support.script_host import ScriptHost
from tests.support.slow import cases, slow

SCRIPTS = Path(__file__).parents[3] / "examples" / "scripts"
EVERY = 5
LIMIT_S = 120
OURS = "tbhooks: "


@dataclass(frozen=True)
class Case:
    """A script, how it ends, and what of its model is to be seen in the run."""

    words: tuple[str, ...]
    logged: tuple[int, ...] = ()
    site: str = "0"
    parameter: str = "0.weight"
    code: int = 0
    runs: tuple[str, ...] = ("runs/*",)


CASES = {
    "plain_loop": Case(("plain_loop.py",), (0, 5, 10, 15, 20, 25)),
    "spawn_workers": Case(("spawn_workers.py",), (0, 5), "body.0", "body.0.weight"),
    "packaged": Case(("-m", "packaged", "--lr", "x"), (0, 5, 10, 15, 20), "encoder.1", "decoder.bias"),
    "arguments": Case(("arguments.py", "--every", "7", "--logdir", "nowhere", "data"), (0, 5, 10, 15, 20)),
    "lightning_module": Case(("lightning_module.py", "mine"), (0, 5, 10), "net.1", "net.0.weight", runs=("mine",)),
    "trainer_gpt": Case(("trainer_gpt.py",), (0, 5, 10), "transformer.h.1.mlp", "transformer.h.0.ln_1.weight"),
    "accelerate_loop": Case(("accelerate_loop.py",), (0, 5), "2", "1.weight"),
    "gan": Case(("gan.py",), (0, 5, 10, 15), runs=("runs/*/generator", "runs/*/discriminator")),
    "compiled_model": Case(("compiled_model.py",), (0, 5, 10), "1.inner", "3.bias"),
    "own_writer": Case(("own_writer.py", "mine"), (0, 5, 10, 15), "2", "2.weight", runs=("mine",)),
    "progress_bar": Case(("progress_bar.py",), tuple(range(0, 60, 5))),
    "exits_3": Case(("exits_3.py",), (0,), "(root)", "weight", code=3),
    "raises": Case(("raises.py",), (0, 5, 10), "(root)", "bias", code=1),
    "without_torch": Case(("without_torch.py", "-m", "x"), runs=()),
}
# The others start two processes each that import torch: ten seconds. test_run_launcher.py has modules (`-m`),
# arguments, spawned workers and every way to end, test_run_model_finder.py several models, and models in frameworks.
ALWAYS = {"plain_loop", "raises", "without_torch"}


def environment() -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "TBHOOKS_EVERY", "TBHOOKS_LOGDIR")
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), "GLOO_SOCKET_IFNAME": "lo"}


def run_in(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    ran = subprocess.run(
        [sys.executable, *words], cwd=directory, env=environment(), capture_output=True, timeout=LIMIT_S, check=False
    )
    # As text, Python would take the carriage returns of progress bars for ends of lines.
    return subprocess.CompletedProcess(ran.args, ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def run_bare(scripts: ScriptHost, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Without us it does not matter that torch is imported already; `tbhooks run` acts when it is imported."""
    directory.mkdir()
    return scripts.run(*words, cwd=directory, env=environment(), timeout=LIMIT_S)


def not_ours(stderr: str) -> str:
    """What is left to be read: our lines are whole, and a progress bar is as it was last, without how fast it was."""
    lines = [line.split("\r")[-1] for line in without_torch_log(stderr).split("\n")]
    return "\n".join(re.sub(r"\[\d+:\d+<.*\]", "[]", line).rstrip() for line in lines if not line.startswith(OURS))


def tags_of(directory: Path) -> dict[str, list[str]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags: dict[str, list[str]] = accumulator.Tags()
    return tags


@pytest.mark.parametrize(
    "name",
    cases(list(CASES), always=ALWAYS, reason="test_run_launcher.py and test_run_model_finder.py have it"),
)
def test_a_script_does_what_it_did_and_leaves_a_run_full_of_tags(
    scripts: ScriptHost, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in case.words]
    with ThreadPoolExecutor(2) as both:
        futures = [
            both.submit(run_bare, scripts, tmp_path / "bare", *words),
            both.submit(run_in, tmp_path / "watched", "-m", "tbhooks", "run", "--every", str(EVERY), *words),
        ]
        bare, watched = (future.result() for future in futures)
    assert watched.returncode == bare.returncode == case.code, watched.stderr[-3000:]
    assert watched.stdout == bare.stdout
    assert bare.stdout.strip()
    assert not_ours(watched.stderr) == not_ours(bare.stderr)
    said = [line for line in watched.stderr.splitlines() if line.startswith(OURS)]
    if not case.runs:
        assert said == [OURS + "nothing was logged: the script did not import torch"]
        return
    assert re.search(r"weights [0-9a-f]{64}", bare.stdout)
    for pattern in case.runs:
        [directory] = (tmp_path / "watched").glob(pattern)
        check_run(directory, case)
        assert any(line.startswith(f"{OURS}{directory.relative_to(tmp_path / 'watched')}: ") for line in said)
    assert said[-1].startswith(f"{OURS}to view: tensorboard --logdir ")


def check_run(directory: Path, case: Case) -> None:
    run = runs.read(directory)
    whole = [frame for frame in run.training if {site.kind for site in frame.sites} == set(KINDS)]
    assert tuple(frame.step for frame in whole) == case.logged
    for frame in whole:
        assert frame[case.site, "activation"].std is not None
        assert frame[case.parameter, "weight"].norm > 0
    tags = tags_of(directory)
    assert f"activation.std/{case.site}" in tags["scalars"]
    assert f"update.ratio/{case.parameter}" in tags["scalars"]
    assert f"gradient/{case.site}" in tags["histograms"]
    assert len([file for file in directory.iterdir() if "tfevents" in file.name]) == 1


# --- Several processes ---------------------------------------------------------------------------


def by_torchrun(scripts: ScriptHost, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run_bare(scripts, directory, *torchrun, *words)


SPREAD = str(SCRIPTS / "distributed_loop.py")


@slow("torchrun takes seconds", covered_by="test_sharded_parameters_are_merged_where_asked_for_and_reported_where_not")
def test_torchrun_starts_it_on_every_rank_and_the_first_writes(scripts: ScriptHost, tmp_path: Path) -> None:
    ran = by_torchrun(scripts, tmp_path / "run", "-m", "tbhooks", "run", "--every", "5", SPREAD)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = [line for line in ran.stderr.splitlines() if line.startswith(OURS)]
    assert len(said) == 2
    assert "3 of 12 steps logged" in said[0]
    [directory] = (tmp_path / "run" / "runs").iterdir()
    check_run(directory, Case((), (0, 5, 10), "1", "2.bias"))
    assert sorted(re.findall(r"rank \d", ran.stdout)) == ["rank 0", "rank 1"]


@slow("torchrun, twice", covered_by="test_sharded_parameters_are_merged_where_asked_for_and_reported_where_not")
def test_every_rank_trains_to_the_same_bit_under_torchrun(scripts: ScriptHost, tmp_path: Path) -> None:
    bare = by_torchrun(scripts, tmp_path / "bare", SPREAD)
    watched = by_torchrun(scripts, tmp_path / "watched", "-m", "tbhooks", "run", "--every", "1", SPREAD)
    printed = [sorted(re.findall(r"rank \d loss \S+ weights [0-9a-f]+", ran.stdout)) for ran in (bare, watched)]
    assert printed[0] == printed[1]
    assert len(printed[0]) == 2


SHARDED = str(SCRIPTS / "fsdp_loop.py")


@pytest.mark.parametrize(
    "merged",
    [
        pytest.param(False, id="local", marks=slow("torchrun takes seconds; test_ranks.py has sharded local ranks")),
        pytest.param(True, id="merge"),
    ],
)
def test_sharded_parameters_are_merged_where_asked_for_and_reported_where_not(
    scripts: ScriptHost, tmp_path: Path, merged: bool
) -> None:
    options = ("--ranks", "merge") if merged else ()
    ran = by_torchrun(scripts, tmp_path / "run", "-m", "tbhooks", "run", "--every", "5", *options, SHARDED)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = [line for line in ran.stderr.splitlines() if line.startswith(OURS)]
    assert any("--ranks merge to log all of them" in line for line in said) is not merged
    assert sum("3 of 12 steps logged" in line for line in said) == 1
    [directory] = (tmp_path / "run" / "runs").iterdir()
    [first, *_] = runs.read(directory).training
    whole = float(re.findall(r"norm at the start ([\d.]+)", ran.stdout)[0])
    assert (first["0.weight", "weight"].norm == pytest.approx(whole, rel=1e-4)) is merged
    assert first["0.weight", "weight"].count == (128 if merged else 64)
