"""Bursts: the next steps are logged in full, whatever `every` says; in eager and compiled mode and from outside."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.api import burst_file
from tbhooks.cli import main
from tbhooks.delivery import worker
from tests.support import compiling, zoo
from tests.support.compiling import Graphs, no_compilation
from tests.support.loops import forward, mlp, sgd, steps_of
from tests.support.processes import wait_for


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = forward(model)
    loss.backward()
    optimizer.step()
    return loss


def burst_at(number: int, length: int, every: int = 10, steps: int = 25, **options: object) -> list[tbhooks.Frame]:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=every, **options)  # type: ignore[arg-type]
    for i in range(steps):
        if i == number:
            watching.burst(length)
        watching.log({"loss": step(model, optimizer)})
    watching.close()
    assert watching.stats.errors == 0, watching.stats.messages
    assert not watching.stats.messages
    return list(watching.history)


def test_a_burst_logs_the_next_steps_and_then_the_schedule_goes_on() -> None:
    assert steps_of(burst_at(12, 3)) == [0, 10, 12, 13, 14, 20]


def test_a_burst_that_covers_scheduled_steps_logs_them_once() -> None:
    assert steps_of(burst_at(8, 5)) == [0, 8, 9, 10, 11, 12, 20]


def test_a_burst_before_the_first_step_begins_with_it() -> None:
    assert steps_of(burst_at(0, 3, steps=6)) == [0, 1, 2]


def test_steps_of_a_burst_have_everything_that_a_scheduled_step_has() -> None:
    frames = burst_at(12, 2, histograms=3)
    scheduled, in_burst = frames[0], frames[2:4]
    for frame in in_burst:
        assert frame.sites == scheduled.sites
        assert frame.buckets.any()
        assert set(frame.scalars) == set(scheduled.scalars)
    assert not burst_at(12, 2, histograms=False)[2].buckets.size


def test_a_burst_asked_for_in_the_middle_of_a_step_begins_with_the_next() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100)
    for i in range(8):
        optimizer.zero_grad()
        loss = forward(model)
        if i == 3:
            watching.burst(2)
        loss.backward()
        optimizer.step()
    frames = list(watching.history)
    assert steps_of(frames) == [0, 4, 5]
    assert frames[1].sites == frames[0].sites
    assert not watching.stats.messages


def test_another_thread_may_ask_for_a_burst() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100)
    for i in range(8):
        if i == 3:
            thread = threading.Thread(target=watching.burst, args=(2,))
            thread.start()
            thread.join()
        step(model, optimizer)
    assert steps_of(watching.history) == [0, 4, 5]


def test_a_second_burst_makes_the_running_one_longer_and_never_shorter() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100)
    for i in range(20):
        if i in (3, 5):
            watching.burst(8 if i == 3 else 2)
        if i == 9:
            watching.burst(4)
        step(model, optimizer)
    assert steps_of(watching.history) == [0, *range(3, 13)]


def test_a_burst_asked_for_in_a_pause_begins_after_it() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100)
    step(model, optimizer)
    with watching.paused():
        watching.burst(2)
        for _ in range(3):
            step(model, optimizer)
    for _ in range(5):
        step(model, optimizer)
    assert steps_of(watching.history) == [0, 5, 6]


@pytest.mark.parametrize("clock", ["forward", "manual"])
def test_bursts_follow_any_clock(clock: str) -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=100, step=clock)
    for i in range(8):
        if i == 3:
            watching.burst(2)
        forward(model).backward()
        if clock == "manual":
            watching.step()
    watching.close()
    frames = [frame for frame in watching.history if ("0", "activation") in frame]
    # With the forward clock, step 2 is open until the forward of step 3 begins.
    assert steps_of(frames) == [0, 3, 4]


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "20", True])
def test_a_wrong_number_of_steps_is_refused(wrong: object) -> None:
    watching = tbhooks.watch(mlp(), every=10)
    with pytest.raises(tbhooks.ArgumentError, match="n must be an integer >= 1"):
        watching.burst(wrong)  # type: ignore[arg-type]


def test_training_has_the_same_bits_with_a_burst() -> None:
    def before(model: nn.Module) -> nn.Module:
        tbhooks.watch(model, every=100).burst(3)
        return model

    watched, bare = zoo.train(compiling.BLOCKS, 6, before=before), zoo.train(compiling.BLOCKS, 6)
    assert watched == bare


@pytest.mark.usefixtures("nothing_compiled")
def test_a_burst_compiles_no_further_graph() -> None:
    torch.manual_seed(0)
    model = compiling.Blocks()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100)
    for i in range(3):  # both graphs are compiled: of logged steps and of the others
        optimizer.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    known = len(graphs)
    with no_compilation():
        for i in range(3, 9):
            if i == 5:
                watching.burst(2)
            optimizer.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    frames = list(watching.history)
    assert steps_of(frames) == [0, 5, 6]
    assert all(("blocks.1.widen", "activation") in frame for frame in frames)
    assert len(graphs) == known
    assert watching.stats.errors == 0, watching.stats.messages


# --- Who asks ---------------------------------------------------------------------------------------


def test_a_finding_starts_a_burst_if_asked_for() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=30, rules=[lambda history: _at(history, 30)]).on_finding("burst")
    for _ in range(31):
        step(model, optimizer)
    assert watching.findings  # it has been judged now
    for _ in range(40):
        step(model, optimizer)
    steps = steps_of(watching.history)
    assert steps[:2] == [0, 30]
    assert steps[2:] == [*range(32, 52), 60]


def _at(history: tbhooks.History, number: int) -> list[tbhooks.Finding]:
    latest = history.latest
    if latest is None or latest.step != number:
        return []
    return [tbhooks.Finding(latest.step, None, "of_this_test", "warning", "for this test")]


def test_the_command_has_the_running_training_log_its_next_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, tmp_path, every=1000)
    for _ in range(5):
        step(model, optimizer)
    watching.flush()
    assert main(["burst", str(tmp_path), "3"]) == 0
    assert "the next 3 steps" in capsys.readouterr().out
    wait_for(lambda: not (tmp_path / burst_file.NAME).exists(), "the background thread to find the request")
    for _ in range(10):
        step(model, optimizer)
    watching.close()
    assert steps_of(tbhooks.runs.read(tmp_path).frames) == [0, 6, 7, 8]
    assert not [path for path in tmp_path.iterdir() if "burst" in path.name]


def test_a_request_that_no_run_has_answered_is_not_for_the_next_one(tmp_path: Path) -> None:
    burst_file.ask(tmp_path, 3)
    with tbhooks.watch(mlp(), tmp_path, every=10):
        assert not (tmp_path / burst_file.NAME).exists()


@pytest.mark.parametrize("content", ["", "many", "-3", "0", "9" * 50, "3; rm", b"\xff\xfe"])
def test_a_request_that_is_no_number_is_dropped(tmp_path: Path, content: str | bytes) -> None:
    asked: list[int] = []
    found = burst_file.BurstFile([tbhooks.JsonlSink(tmp_path / "run.jsonl")], asked.append)
    (tmp_path / burst_file.NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    found.poll()
    found.poll()
    assert asked == []
    assert not (tmp_path / burst_file.NAME).exists()


def test_the_command_refuses_a_directory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["burst", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main(["burst", str(tmp_path / "none")]) == 2
    assert not list(tmp_path.iterdir())
