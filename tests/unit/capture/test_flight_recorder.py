"""The flight recorder: the numbers of every step, no copy and no sync but those of a dump, and the same training."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.flight import recorder as flight_recorder
from tbhooks.cli import main
from tbhooks.data.artifacts.flights import Flight, decode, encode
from tests.support import compiling, fake_device, zoo
from tests.support.loops import forward, mlp, sgd, steps_of
from tests.support.script_host import ScriptHost


class Reference:
    """The float64 norms of the gradients of each step, and its loss, taken by hand."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.norms: list[list[float]] = []
        self.losses: list[float] = []

    def take(self, loss: Tensor) -> None:
        gradients = [p.grad for p in self._model.parameters()]
        self.norms.append([float(np.linalg.norm(np.asarray(g, dtype=np.float64))) for g in gradients if g is not None])
        self.losses.append(float(loss.detach()))


def train(
    model: nn.Module,
    watching: tbhooks.Watch,
    steps: int,
    *,
    late: bool = True,
    spike: int | None = None,
    optimizer: Any = None,
    reference: Reference | None = None,
) -> Reference:
    """Trains with a batch that is multiplied by 100 at step `spike`."""
    optimizer, reference = optimizer or sgd(model), reference or Reference(model)
    for i in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 4) * (100.0 if i == spike else 1.0)
        loss = model(inputs).square().mean()
        if not late:
            watching.log({"loss": loss})
        loss.backward()
        reference.take(loss)
        optimizer.step()
        if late:
            watching.log({"loss": loss})
    return reference


def check(flight: Flight, reference: Reference) -> None:
    rows = [step for step in flight.steps.tolist() if step < len(reference.losses)]
    known = slice(0, len(rows))
    expected = np.array([reference.norms[step] for step in rows])
    assert np.allclose(flight.norms[known], expected, rtol=1e-5)
    assert np.allclose(flight.grad_norm[known], np.sqrt(np.square(expected).sum(axis=1)), rtol=1e-5)
    assert np.allclose(flight.loss[known], [reference.losses[step] for step in rows], rtol=1e-6)


# --- What a row holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False], ids=["logged after the step", "logged before it"])
@pytest.mark.parametrize("means", [False, True], ids=["", "with running means"])
def test_every_step_of_the_ring_has_the_norms_the_loss_and_the_learning_rate(late: bool, means: bool) -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=10).flight_recorder(steps=16)
    if means:
        watching.log_every(5)
    reference = train(model, watching, 45, late=late)
    watching.dump("for this test")
    (flight,) = watching.flights
    assert flight.reason == "for this test"
    assert flight.steps.tolist()[:16] == list(range(29, 45))
    assert flight.parameters == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert flight.rank == 0
    check(flight, reference)
    assert flight.scalars["train.lr/0"][:16].tolist() == [0.01] * 16
    assert not flight.nonfinite.any()
    assert watching.stats.errors == 0, watching.stats.messages


def test_only_global_norms_are_kept_if_asked_for() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=10).flight_recorder(steps=16, detail="global")
    reference = train(model, watching, 20)
    watching.dump("for this test")
    (flight,) = watching.flights
    assert flight.parameters == ()
    expected = [math.hypot(*reference.norms[step]) for step in range(4, 20)]
    assert np.allclose(flight.grad_norm[:16], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_other_dtypes_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    watching = tbhooks.watch(model, every=10).flight_recorder(steps=8)
    optimizer = sgd(model)
    gradient = 300 * torch.randn(64, 64).to(dtype)  # its squares overflow float16
    model.weight.grad, model.bias.grad = gradient.clone(), None
    optimizer.step()
    watching.dump("for this test")
    (flight,) = watching.flights
    assert flight.parameters == ("weight",)
    assert flight.norms[0, 0] == pytest.approx(np.linalg.norm(gradient.double().numpy()), rel=1e-5)


def test_a_parameter_without_a_gradient_has_none_in_that_row_only() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=8)
    for i in range(6):
        optimizer.zero_grad()
        forward(model).backward()
        if i == 3:
            model[0].bias.grad = None
        optimizer.step()
    watching.dump("for this test")
    (flight,) = watching.flights
    column = flight.parameters.index("0.bias")
    assert np.isnan(flight.norms[:6, column]).tolist() == [False, False, False, True, False, False]
    assert not np.isnan(np.delete(flight.norms[:6], column, axis=1)).any()


def test_several_optimizers_of_a_step_write_one_row() -> None:
    model = mlp()
    first, second = sgd(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.5)
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=8)
    reference = Reference(model)
    for _ in range(6):
        model.zero_grad()
        loss = forward(model)
        loss.backward()
        reference.take(loss)
        first.step()
        second.step()
    watching.dump("for this test")
    (flight,) = watching.flights
    # In the first step it is not known yet that there is a second optimizer.
    assert np.allclose(flight.norms[1:5], reference.norms[1:5], rtol=1e-5)
    assert (flight.scalars["train.lr/0"][1], flight.scalars["train.lr/1"][1]) == (0.01, 0.5)


def test_nothing_is_recorded_in_a_pause() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    train(model, watching, 4)
    with watching.paused():
        train(model, watching, 3)
    train(model, watching, 2)
    watching.dump("for this test")
    assert [step for step in watching.flights[0].steps.tolist() if step < 9] == [0, 1, 2, 3, 7, 8]


def test_a_step_that_the_user_labels_has_that_label() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    for i in range(4):
        forward(model).backward()
        optimizer.step()
        watching.step(1000 + i)
    watching.dump("for this test")
    assert watching.flights[0].steps.tolist()[:4] == [1000, 1001, 1002, 1003]


@pytest.mark.parametrize("ids", ["device", "host", "none"])
def test_a_row_names_the_samples_with_the_largest_values(ids: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    expected = []
    for i in range(6):
        optimizer.zero_grad()
        losses = model(torch.randn(8, 4)).square().mean(dim=1)
        numbers = torch.arange(8) + 100 * i
        names = {"device": numbers, "host": [f"sample {n}" for n in numbers.tolist()], "none": None}[ids]
        watching.samples(losses, ids=names)
        worst = int(np.argmax(losses.detach().numpy()))
        expected.append({"device": 100 * i + worst, "host": f"sample {100 * i + worst}", "none": worst}[ids])
        losses.mean().backward()
        optimizer.step()
    watching.dump("for this test")
    (flight,) = watching.flights
    assert [row[0][0] for row in flight.samples[:6]] == expected
    assert all(len(row) == 4 and [v for _, v in row] == sorted((v for _, v in row), reverse=True)
               for row in flight.samples[:6])  # fmt: skip


def test_samples_of_all_micro_batches_of_a_step_are_in_its_row() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    for i in range(3):
        for part, values in enumerate(([1.0, 2.0, 9.0], [3.0, 8.0, 1.0])):
            watching.samples(torch.tensor(values), ids=[f"{i}-{part}-{k}" for k in range(3)])
            forward(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    watching.dump("for this test")
    assert [name for name, _ in watching.flights[0].samples[1]] == ["1-0-2", "1-1-1", "1-1-0", "1-0-1"]


# --- What it costs -----------------------------------------------------------------------------------


def on_device(steps: int, record: bool, dumps: int = 0) -> tuple[fake_device.Log, list[int], tbhooks.Watch]:
    """Trains on the fake device; returns what crossed, and the launches of each unlogged step."""
    torch.manual_seed(0)
    model = fake_device.to_device(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    watching = tbhooks.watch(model, every=1000)
    if record:
        watching.flight_recorder(steps=16)
    launches = []
    with fake_device.Log() as log:
        for i in range(steps):
            before = sum(log.launches.values())
            optimizer.zero_grad()
            losses = model(fake_device.put(torch.randn(8, 4))).square().mean(dim=1)
            loss = losses.mean()
            watching.log({"loss": loss})
            loss.backward()
            optimizer.step()
            launches.append(sum(log.launches.values()) - before)
            if i == 0:
                watching.flush()
                log.reset()
            if i >= steps - dumps:
                watching.dump("for this test")
    return log, launches, watching


def test_an_unlogged_step_copies_nothing_and_waits_for_nothing() -> None:
    log, launches, watching = on_device(60, record=True)
    assert log.copies == []
    assert log.syncs == 0
    assert log.ops["aten._foreach_norm.Scalar"] == 59
    bare, bare_launches, _ = on_device(60, record=False)
    more = {with_it - without for with_it, without in zip(launches[2:], bare_launches[2:], strict=True)}
    # One foreach call for all norms, one stack into the row, one copy of the loss on the device.
    assert more == {3}
    assert bare.copies == []
    assert watching.stats.errors == 0, watching.stats.messages


def test_a_dump_is_one_copy_and_no_sync() -> None:
    log, _, watching = on_device(60, record=True, dumps=2)
    assert len(log.copies) == 2
    assert log.syncs == 0
    first, second = watching.flights
    assert first.steps.tolist()[:16] == list(range(43, 59))
    assert np.isfinite(first.grad_norm[:16]).all()
    assert second.new_after == first.steps[-1]


def test_a_logged_step_still_makes_one_copy() -> None:
    case = compiling.BLOCKS

    def begin(model: nn.Module) -> tbhooks.Watch:
        return tbhooks.watch(model, every=2).flight_recorder(steps=16)

    assert zoo.copies_on_device(case, begin) == zoo.copies_on_device(case, lambda model: tbhooks.watch(model, every=2))


def test_training_has_the_same_bits_with_a_flight_recorder() -> None:
    def before(model: nn.Module) -> nn.Module:
        watching = tbhooks.watch(model, every=3).flight_recorder(steps=8)
        watching.dump("for this test")
        return model

    assert zoo.train(compiling.BLOCKS, 6, before=before) == zoo.train(compiling.BLOCKS, 6)


# --- What starts a dump -----------------------------------------------------------------------------


def test_a_spike_between_logged_steps_is_dumped_at_the_next_one_and_followed_by_a_burst() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=50, rules=()).flight_recorder(steps=64, burst=3)
    train(model, watching, 101, spike=77)
    assert len(watching.history) == 3  # the step has been judged by now
    train(model, watching, 10)
    (flight,) = watching.flights
    assert flight.suspect_step == 77
    assert "of step 77" in flight.reason
    assert flight.step == 101
    assert steps_of(watching.history) == [0, 50, 100, 102, 103, 104]


def test_a_gradient_that_is_not_finite_at_an_unlogged_step_is_dumped() -> None:
    model = mlp()
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=20, rules=()).flight_recorder(steps=32)
    for i in range(25):
        optimizer.zero_grad()
        forward(model).backward()
        if i == 13:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        if i == 20:
            assert watching.latest is not None
    (flight,) = watching.flights
    assert flight.suspect_step == 13
    assert flight.suspect_parameter == "0.weight"
    assert flight.nonfinite[flight.steps.tolist().index(13)] == 1


def test_a_warning_of_a_rule_is_dumped() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=10, rules=[late_rule]).flight_recorder(steps=32)
    train(model, watching, 21)
    assert watching.findings
    train(model, watching, 5)
    (flight,) = watching.flights
    assert flight.reason == "finding of_this_test at step 20"


def late_rule(history: tbhooks.History) -> list[tbhooks.Finding]:
    latest = history.latest
    if latest is None or latest.step < 20:
        return []
    return [tbhooks.Finding(latest.step, None, "of_this_test", "warning", "for this test")]


@pytest.mark.parametrize("ends", ["close", "with", "model"])
def test_a_finding_that_is_judged_after_the_last_step_is_dumped_at_the_end(ends: str, tmp_path: Path) -> None:
    model = mlp()
    watching = tbhooks.watch(model, tmp_path, every=10, rules=[late_rule]).flight_recorder(steps=32)
    reference = train(model, watching, 21)
    if ends == "model":
        del model, reference._model
        gc.collect()
        watching.close()
    elif ends == "with":
        with watching:
            pass
    else:
        watching.close()
    (flight,) = tbhooks.runs.read(tmp_path).flights
    assert flight.reason == "finding of_this_test at step 20"
    assert (flight.step, flight.steps.tolist()) == (20, list(range(21)))
    check(flight, reference)
    assert watching.stats.errors == 0, watching.stats.messages


def test_steps_after_the_last_logged_one_are_judged_at_the_end() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=100, rules=()).flight_recorder(steps=128)
    train(model, watching, 90, spike=77)
    assert watching.flights == []
    watching.close()
    (flight,) = watching.flights
    assert flight.suspect_step == 77
    assert "of step 77" in flight.reason


def test_a_training_that_fails_is_dumped_once_with_the_exception() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=10, rules=[late_rule]).flight_recorder(steps=32)
    with pytest.raises(RuntimeError, match="the end"), watching:
        train(model, watching, 21)
        raise RuntimeError("the end")
    assert [flight.reason for flight in watching.flights] == ["exception RuntimeError: the end"]


def test_a_dump_that_was_left_out_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_DUMPS", 0)
    model = mlp()
    watching = tbhooks.watch(model, tmp_path, every=10, rules=[late_rule]).flight_recorder(steps=32)
    train(model, watching, 21)
    watching.close()
    run = tbhooks.runs.read(tmp_path)
    assert (run.flights, run.flights_left_out) == ([], ["step 20: finding of_this_test at step 20"])


def test_a_finding_about_a_weight_is_what_its_dump_names() -> None:
    def rule(history: tbhooks.History) -> list[tbhooks.Finding]:
        latest = history.latest
        if latest is None or latest.step < 20:
            return []
        site = next(site for site in latest.sites if (site.kind, site.path) == ("weight", "2.weight"))
        return [tbhooks.Finding(latest.step, site, "of_this_test", "error", "for this test")]

    model = mlp()
    watching = tbhooks.watch(model, every=10, rules=[rule]).flight_recorder(steps=32)
    train(model, watching, 21)
    watching.close()
    (flight,) = watching.flights
    assert flight.reason == "finding of_this_test at weight/2.weight at step 20"
    assert (flight.suspect_step, flight.suspect_parameter) == (20, "2.weight")
    again = decode(encode(flight))
    assert (again.suspect_step, again.suspect_parameter) == (20, "2.weight")


def test_an_exception_is_dumped_with_what_the_running_step_had() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=32)
    with pytest.raises(RuntimeError, match="the batch is damaged"), watching:
        train(model, watching, 10)
        watching.log({"loss": 123.0})
        raise RuntimeError("the batch is damaged")
    (flight,) = watching.flights
    assert flight.reason == "exception RuntimeError: the batch is damaged"
    assert flight.step == 10


def test_a_training_that_ends_well_dumps_nothing() -> None:
    model = mlp()
    with tbhooks.watch(model, every=10).flight_recorder(steps=32) as watching:
        train(model, watching, 150)
    assert watching.flights == []


def test_a_signal_is_dumped_at_the_end_of_the_step_and_its_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        model = mlp()
        with tbhooks.watch(model, every=100).flight_recorder(steps=16, on_signal=True) as watching:
            train(model, watching, 5)
            os.kill(os.getpid(), signal.SIGUSR1)
            train(model, watching, 1)
        assert [flight.reason for flight in watching.flights] == ["SIGUSR1"]
        assert seen == [signal.SIGUSR1]  # the user's handler is called, too
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_gets_its_dump_when_the_step_ends() -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    train(model, watching, 5)
    thread = threading.Thread(target=watching.dump, args=("from a thread",))
    thread.start()
    thread.join()
    assert watching.flights == []
    train(model, watching, 1)
    assert [flight.reason for flight in watching.flights] == ["from a thread"]


# --- Bounds and wrong arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "most"), [("MOST_DUMPS", 2), ("MOST_BYTES", 5000)])
def test_dumps_are_bounded_and_what_was_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bound: str, most: int
) -> None:
    monkeypatch.setattr(flight_recorder, bound, most)  # a ring of 16 steps and 4 parameters has 2,176 bytes
    model = mlp()
    watching = tbhooks.watch(model, tmp_path, every=100).flight_recorder(steps=16)
    for i in range(4):
        train(model, watching, 1)
        watching.dump(f"number {i}")
    watching.close()
    run = tbhooks.runs.read(tmp_path)
    assert [flight.reason for flight in run.flights] == ["number 0", "number 1"]
    assert run.flights_left_out == ["step 3: number 2", "step 4: number 3"]
    assert main(["report", str(tmp_path)]) == 0
    assert "missing dumps (2): step 3: number 2, step 4: number 3" in capsys.readouterr().out
    assert any("makes no more" in message for message in watching.stats.messages)


def test_a_ring_that_is_too_large_keeps_global_norms_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "LARGEST_RING", 100)
    model = mlp()
    watching = tbhooks.watch(model, every=100).flight_recorder(steps=16)
    train(model, watching, 3)
    watching.dump("for this test")
    assert watching.flights[0].parameters == ()
    assert watching.flights[0].note == "Only global norms were recorded."
    assert any("keeps only global norms" in message for message in watching.stats.messages)


@pytest.mark.parametrize(
    "wrong", [{"steps": 3}, {"steps": "256"}, {"detail": "all"}, {"on_signal": 1}, {"burst": -1}], ids=str
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    model = mlp()
    watching = tbhooks.watch(model, every=10)
    with pytest.raises(tbhooks.ArgumentError):
        watching.flight_recorder(**wrong)
    with pytest.raises(tbhooks.ArgumentError, match=r"call flight_recorder\(\) first"):
        watching.dump("nothing there")
    watching.flight_recorder()
    with pytest.raises(tbhooks.ArgumentError, match="called before"):
        watching.flight_recorder()
    with pytest.raises(tbhooks.ArgumentError, match="reason must be a text"):
        watching.dump(3)  # type: ignore[arg-type]


# --- Reading back ---------------------------------------------------------------------------------------


def test_a_run_has_the_dumps_under_their_own_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    watching = tbhooks.watch(model, tmp_path, every=10).flight_recorder(steps=16)
    reference = train(model, watching, 25)
    watching.dump("first")
    for _ in range(5):
        train(model, watching, 1, reference=reference)
    watching.dump("second")
    watching.close()
    run = tbhooks.runs.read(tmp_path)
    assert [flight.reason for flight in run.flights] == ["first", "second"]
    assert not run.problems
    assert steps_of(run.frames) == [0, 10, 20]
    for flight in run.flights:
        check(flight, reference)
    series = run.scalars["flight.grad_norm"]
    assert series.steps.tolist() == sorted(set(series.steps.tolist()))  # each step once
    assert series.steps.tolist()[0] == 9
    expected = [math.hypot(*reference.norms[step]) for step in series.steps.tolist() if step < 30]
    assert np.allclose(series.values[: len(expected)], expected, rtol=1e-5)
    assert main(["report", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "flight recorder (2)" in printed
    assert str(run.flights[1]) in printed
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Flight recorder" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_bytes_become_the_same_flight_again() -> None:
    flight = Flight(
        7, 1.5, 3, "a reason", np.array([5, 6]), {"train/loss": np.array([1.0, math.nan])}, ("a.weight", "b"),
        np.array([[1.0, math.inf], [math.nan, 2.0]]), np.array([math.inf, 2.0]),
        {"train/loss": np.array([True, True])}, (((3, 1.5), ("x", math.nan)), ()), 4, "a note",
    )  # fmt: skip
    again = decode(encode(flight))
    assert str(again) == str(flight)
    assert (again.samples[0][0], again.samples[0][1][0], again.new_after) == ((3, 1.5), "x", 4)
    assert np.array_equal(again.norms, flight.norms, equal_nan=True)
    assert again.loss_logged is not None
    assert again.loss_logged.tolist() == [True, True]


@pytest.mark.parametrize("content", [b"", b"xx", encode.__doc__.encode(), b"\x78\x9c\x03\x00\x00\x00\x00\x01"])  # type: ignore[union-attr]
def test_bytes_that_are_no_flight_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="flight recorder"):
        decode(content)


# --- The end of a process -------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, torch, tbhooks
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
w = tbhooks.watch(model, sys.argv[1], every=100).flight_recorder(steps=16)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    w.log({"loss": loss})
if sys.argv[2] == "exception":
    raise ValueError("out of luck")
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [("exception", "exception ValueError: out of luck"), ("SIGTERM", "the process was terminated")],
)
def test_a_process_that_ends_by_an_exception_or_a_signal_dumps(
    scripts: ScriptHost, tmp_path: Path, how: str, reason: str
) -> None:
    done = scripts.run("-c", PROGRAM, tmp_path / "run", how, timeout=200)
    assert done.returncode in (1, -signal.SIGTERM)
    (flight,) = tbhooks.runs.read(tmp_path / "run").flights
    assert flight.reason == reason
    assert [step for step in flight.steps.tolist() if step < 12] == list(range(12))
