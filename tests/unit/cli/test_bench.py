"""`tbhooks bench`: refuses what cannot be measured with a sentence, times in turns, counts exactly, admits noise."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import tbhooks
from tbhooks.cli import bench
from tbhooks.cli.bench import cuda_counters, runner, timing, workload
from tests.support import fake_device
from tests.support.slow import slow

CPU = torch.device("cpu")
INPUTS = torch.randn(4, 8)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def timed(name: str, ratio: float, lower: float, upper: float) -> timing.Timing:
    return timing.Timing(name, 10.0 * ratio, ratio, lower, upper, ratio, 20)


def result(unlogged: tuple[float, float, float], logged: tuple[float, float, float], every: int = 100) -> bench.Result:
    timings = {
        bench.BARE: timed(bench.BARE, 1.0, 0.99, 1.01),
        bench.UNLOGGED: timed(bench.UNLOGGED, *unlogged),
        bench.SCALARS: timed(bench.SCALARS, *logged),
        bench.HISTOGRAMS: timed(bench.HISTOGRAMS, *logged),
    }
    extra = {bench.SCALARS: 10**6, bench.HISTOGRAMS: 2 * 10**6}
    return bench.Result(
        "m", 10**6, "cpu", 1, "2", "C", every, 20, 3, 50, timings, extra, copies=None, waits=None, notes=()
    )


# --- The command --------------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The console script, which unlike `python -m` does not look for modules in the current directory by itself."""
    code = "import sys; sys.path[:1] = []; from tbhooks.cli.commands import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tbhooks.__file__).parent.parent)}
    command = [sys.executable, "-c", code, "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=environment)


def test_the_command_measures_a_model_of_the_current_directory(tmp_path: Path) -> None:
    source = """
        import torch
        from torch import nn

        def make():
            model, inputs = nn.Linear(4, 4), torch.randn(2, 4)
            return model, lambda model: model(inputs).square().mean()
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    done = run(
        "--model", "mine:make", "--steps", "10", "--every", "7", "--threads", "1", "--json", "o.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for expected in (
        "mine:make",
        "bare",
        "watched, not logged",
        "logged, histograms",
        "average at every=7",
        "sites read",
    ):
        assert expected in done.stdout
    assert "about" in done.stderr
    assert "\r" not in done.stderr  # a progress line is for terminals
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["every"] == 7
    assert report["threads"] == 1
    assert set(report["timings"]) == {"bare", "watched, not logged", "logged, scalars", "logged, histograms"}
    assert report["timings"]["bare"]["ratio"] == 1.0
    # Activation, gradient of (root); weight, weight gradient and update of weight and bias.
    assert report["sites"] == 8


@slow("four processes", covered_by="test_a_factory_that_cannot_be_used_gets_a_sentence")
def test_the_command_says_what_is_wrong_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def make_model(): pass\n")
    for arguments, expected in {
        ("--model", "train"): "module:factory",
        ("--model", "trian:make_model"): "did you mean 'train'?",
        ("--every", "0"): "every must be an integer >= 1",
        ("--device", "gpu"): "device must be cpu, cuda or cuda:N",
    }.items():
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


# --- What is measured ---------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a module `theirs` into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(source: str) -> None:
        sys.modules.pop("theirs", None)
        (tmp_path / "theirs.py").write_text(textwrap.dedent(source))

    yield write
    sys.modules.pop("theirs", None)


HEAD = "import torch\nfrom torch import nn\n"


@pytest.mark.parametrize(
    ("specification", "source", "expected"),
    [
        ("theirs", "", "module:factory, such as"),
        ("theirs:", "", "module:factory, such as"),
        (":make", "", "module:factory, such as"),
        ("thiers:make", "", "there is no module 'thiers' here or installed: did you mean 'theirs'?"),
        ("theirs.deeper:make", "", "there is no module 'theirs.deeper'"),
        ("theirs:make", "import absent_library", "importing 'theirs' failed: ModuleNotFoundError: No module named"),
        ("theirs:make", "1 / 0", "importing 'theirs' failed: ZeroDivisionError"),
        ("theirs:make", "raise SystemExit(0)", "ended the program when it was imported"),
        ("theirs:mak", "def make(): pass", "has no factory 'mak': did you mean 'make'?"),
        ("theirs:make", "make = 3", "theirs:make is 3; a factory is a function"),
        ("theirs:make", f"{HEAD}make = nn.Linear(2, 2)", "a factory is a function that makes a model"),
        ("theirs:make", "def make(width): pass", "needs width; a factory is called without arguments"),
        ("theirs:make", "def make(): raise KeyError('x')", "theirs:make failed: KeyError: 'x'"),
        ("theirs:make", "def make(): return 3", "returned 3: a factory returns (model, loss_function)"),
        ("theirs:make", "def make(): return 1, 2, 3", "a factory returns (model, loss_function)"),
    ],
)  # fmt: skip
def test_a_factory_that_cannot_be_used_gets_a_sentence(
    module: Callable[[str], None], specification: str, source: str, expected: str
) -> None:
    module(source)
    with pytest.raises(tbhooks.ArgumentError) as raised:
        workload.load(specification, CPU)
    assert expected in str(raised.value)


def without_gradient(_model: nn.Module) -> Tensor:
    return torch.tensor(1.0)


OTHER = nn.Linear(8, 2)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (nn.ReLU(), "has no parameters"),
        (nn.Linear(8, 8).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.LazyLinear(2), "lazy parameters"),
        (small(), "a model without inputs"),
        ((small(), torch.randn(4, 9)), "the loss of the model failed: RuntimeError"),
        ((small(), {"inpt": INPUTS}), "inpt"),
        ((small(), lambda model: model(INPUTS)), "must be one number, got shape (4, 2)"),
        ((small(), lambda model: 0.5), "must be a tensor, got 0.5"),
        ((small(), lambda model: None), "must be a tensor, got None"),
        ((small(), without_gradient), "does not depend on any parameter"),
        ((small(), lambda model: OTHER(INPUTS).sum()), "no gradient reached any parameter"),
        ((small(), lambda model: 1 / 0), "the loss of the model failed: ZeroDivisionError"),
        (("model", INPUTS), "a factory returns"),
    ],
)
def test_a_model_that_cannot_be_trained_gets_a_sentence(made: Any, expected: str) -> None:
    with pytest.raises(tbhooks.ArgumentError) as raised:
        bench.make_workload(made, CPU)
    assert expected in str(raised.value)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def test_a_model_that_cannot_be_copied_is_reported() -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"cannot be copied.*no copies"):
        bench.make_workload((Uncopyable(8, 2), INPUTS), CPU)


class WithOwnInputs(nn.Linear):
    example_input_array = INPUTS


class Fed(nn.Module):
    """Needs no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> dict[str, Tensor]:
        return {"a": self.weight * 2, "b": self.weight.long()}


@pytest.mark.parametrize(
    "made",
    [
        (small(), INPUTS),
        (small(), (INPUTS,)),
        (small(), {"input": INPUTS}),
        (small(), lambda model: model(INPUTS).sum()),
        WithOwnInputs(8, 2),
        Fed(),
        (nn.Bilinear(8, 8, 2), [INPUTS, INPUTS]),
    ],
    ids=["tensor", "tuple", "dict", "loss", "own inputs", "no inputs", "list"],
)
def test_what_a_factory_may_return(made: Any) -> None:
    used = bench.make_workload(made, CPU)
    assert used.loss(used.model).requires_grad


def test_an_outputs_own_loss_is_the_loss() -> None:
    @dataclasses.dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return Output(y.sum() * 3, y)

    model = Model(8, 2)
    used = bench.make_workload((model, INPUTS), CPU)
    expected = 3 * nn.Linear.forward(model, INPUTS).sum()
    torch.testing.assert_close(used.loss(used.model), expected)


def test_a_factory_that_asks_for_the_device_gets_it_and_the_model_trains(module: Callable[[str], None]) -> None:
    module(f"{HEAD}seen = []\ndef make(device):\n    seen.append(device)\n    return nn.Linear(2, 2), torch.ones(1, 2)")
    used = workload.load("theirs:make", CPU)
    assert sys.modules["theirs"].seen == [CPU]
    assert used.model.training


def test_the_built_in_model_needs_torch_only_and_says_that_ones_own_is_better() -> None:
    used = bench.load(None, CPU)
    assert "--model module:factory for your own" in used.name
    assert any(isinstance(module, nn.TransformerEncoder) for module in used.model.modules())


@pytest.mark.parametrize("text", ["cuda:", "cuda:x", "tpu", "cpu:-1", ""])
def test_a_device_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(tbhooks.ArgumentError, match="device must be cpu, cuda or cuda:N"):
        bench.device_named(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(tbhooks.ArgumentError, match=r"'cuda:1' is not available: torch .* (without CUDA|no CUDA)"):
        bench.device_named("cuda:1")


# --- Turns --------------------------------------------------------------------------------------------


class Clock:
    """A timer whose seconds are given, one after another."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    def start(self) -> None:
        pass

    def stop(self) -> float:
        return self._seconds.pop(0)


def variant(name: str, observe: timing.Observe, directory: Path, **options: Any) -> timing.Variant:
    return timing.Variant(name, small(), lambda model: model(INPUTS).square().mean(), observe, directory, **options)


def test_ratios_compare_turns_of_one_round_and_orders_change(tmp_path: Path) -> None:
    a, b = (variant(name, timing.bare, tmp_path) for name in "ab")
    # Rounds: a b, b a, a b, b a; the machine is ten times slower in the second.
    timing.run_rounds([a, b], 4, 1, Clock(1.0, 2.0, 20.0, 10.0, 1.0, 2.0, 2.2, 1.0), lambda done, of: None)
    assert list(a.seconds.values()) == [1.0, 10.0, 1.0, 1.0]
    assert list(b.seconds.values()) == [2.0, 20.0, 2.0, 2.2]
    report = timing.compared(b, a)
    assert report.ratio == 2.0
    assert report.ratio_of_minima == 2.0
    assert report.lower == 2.0
    assert report.upper == pytest.approx(2.05)
    assert timing.compared(a, a).ratio == 1.0


def test_a_turn_is_divided_by_its_steps_and_rare_ones_make_fewer(tmp_path: Path) -> None:
    often, rarely = (
        variant("often", timing.bare, tmp_path),
        variant("rarely", timing.bare, tmp_path, every_nth_round=3, most_steps_a_turn=2),
    )
    done: list[int] = []
    timing.run_rounds([often, rarely], 4, 5, Clock(*[1.0] * 10), lambda number, of: done.append(number))
    assert often.seconds == dict.fromkeys(range(4), 0.2)
    assert rarely.seconds == {0: 0.5, 3: 0.5}
    assert done == [1, 2, 3, 4]


def test_no_watch_listens_to_the_optimizers_of_other_turns(tmp_path: Path) -> None:
    """They would be timed with the bare model."""
    before = [dict(hooks) for hooks in timing._HOOKS]
    watched = variant("watched", timing.watched(every=1), tmp_path)
    alone = variant("bare", timing.bare, tmp_path)
    assert [dict(hooks) for hooks in timing._HOOKS] == before
    called: list[int] = []

    def during(*_: Any) -> None:
        called.append(len(torch_optimizer._global_optimizer_pre_hooks))

    alone.optimizer.register_step_pre_hook(during)
    watched.optimizer.register_step_pre_hook(during)
    alone.steps(1)
    watched.steps(2)
    assert called == [len(before[0]), len(before[0]) + 1, len(before[0]) + 1]
    assert [dict(hooks) for hooks in timing._HOOKS] == before
    assert watched.watching is not None
    assert watched.watching.stats.logged == 2
    watched.close()


def test_those_who_share_a_model_observe_it_in_their_own_turns_only(tmp_path: Path) -> None:
    model = small()
    optimizer = timing.make_optimizer(model)
    alone, watched = (
        timing.Variant(name, model, lambda m: m(INPUTS).square().mean(), observe, tmp_path / name, shared=optimizer)
        for name, observe in (("alone", timing.bare), ("watched", timing.watched(every=1)))
    )
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(sum(bool(m._forward_hooks) for m in model.modules())))
    timing.run_rounds([alone, watched], 2, 2, Clock(*[1.0] * 4))
    # A step that is not timed, and two that are; the watched ones first in the second round.
    assert [hooked > 0 for hooked in seen] == [False] * 3 + [True] * 6 + [False] * 3
    assert watched.watching is not None
    assert watched.watching.stats.logged == 3
    assert len(list((tmp_path / "watched").iterdir())) == 2
    assert not tbhooks.api.lifecycle.open_watches


def test_a_turn_that_raises_leaves_no_watch_listening(tmp_path: Path) -> None:
    before = [dict(hooks) for hooks in timing._HOOKS]
    watched = variant("watched", timing.watched(every=1), tmp_path)
    watched.loss = lambda model: model(torch.ones(1, 9)).sum()
    with pytest.raises(RuntimeError):
        watched.steps(1)
    assert [dict(hooks) for hooks in timing._HOOKS] == before
    watched.close()


@pytest.mark.parametrize(
    ("bare_s", "round_s", "steps", "rounds", "turn"),
    [
        (0.02, 0.1, None, 60, 5),
        (0.5, 2.5, None, 18, 1),
        (0.2, 1.0, None, 15, 3),
        (30.0, 150.0, None, 5, 1),  # never fewer rounds than tell anything
        (0.0001, 0.001, None, 60, 20),
        (0.001, 0.005, 200, 10, 20),
        (0.001, 0.005, 5, 5, 1),
    ],
)
def test_rounds_are_planned_to_take_a_minute_or_what_was_asked(
    bare_s: float, round_s: float, steps: int | None, rounds: int, turn: int
) -> None:
    planned = runner.plan(bare_s, round_s, steps)
    assert (planned.rounds, planned.steps) == (rounds, turn)
    assert planned.seconds == pytest.approx(round_s * (rounds * turn + runner.COUNTING_STEPS))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1.5}, {"steps": 4}, {"steps": "many"}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(tbhooks.ArgumentError, match=f"{name} must be an integer >="):
        bench.measure(bench.make_workload((small(), INPUTS), CPU), **wrong)


# --- The whole ----------------------------------------------------------------------------------------


def test_a_measurement_has_every_number_and_leaves_nothing_behind() -> None:
    before = [dict(hooks) for hooks in timing._HOOKS]
    report: list[str] = []
    model = small()
    weights = [parameter.clone() for parameter in model.parameters()]
    measured = bench.measure(bench.make_workload((model, INPUTS), CPU), every=50, steps=10, log=report.append)
    assert len(report) == 1
    assert "rounds" in report[0]
    assert not tbhooks.api.lifecycle.open_watches
    assert [dict(hooks) for hooks in timing._HOOKS] == before
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    # 4 modules with their activations and gradients, 4 parameters with three kinds; ReLU and the whole are modules too.
    assert measured.sites == 4 * 2 + 4 * 3
    assert measured.kernel == tbhooks.reduction.cpu.name()
    assert measured.copies is None
    assert all(timed.milliseconds > 0 for timed in measured.timings.values())
    json.dumps(measured.to_dict())


def test_a_model_that_fails_later_is_reported_in_a_sentence() -> None:
    calls = iter(range(100))

    def loss(model: nn.Module) -> Tensor:
        if next(calls) == 9:
            raise RuntimeError("the data\nis over")
        return model(INPUTS).sum()

    with pytest.raises(tbhooks.TbhooksError, match="a step of the model failed: the data is over"):
        bench.measure(bench.make_workload((small(), loss), CPU), steps=5)
    assert not tbhooks.api.lifecycle.open_watches


def test_too_little_memory_is_explained() -> None:
    calls = iter(range(100))

    def loss(model: nn.Module) -> Tensor:
        if next(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(INPUTS).sum()

    with pytest.raises(tbhooks.TbhooksError, match="a copy of the model is trained"):
        bench.measure(bench.make_workload((small(), loss), CPU), steps=5)


# --- What is said -------------------------------------------------------------------------------------


def test_what_varies_more_than_it_differs_is_called_noise() -> None:
    noisy = result((1.02, 0.97, 1.05), (1.30, 1.28, 1.33))
    lines = {line.split("  ")[0]: line for line in bench.text(noisy).splitlines()}
    assert "within the noise" in lines["watched, not logged"]
    assert "within the noise" not in lines["logged, histograms"]
    assert "within the noise" not in lines["bare"]


def test_the_average_is_computed_from_its_parts_and_noise_is_no_cost() -> None:
    assert result((1.02, 0.97, 1.05), (1.30, 1.28, 1.33)).average(bench.HISTOGRAMS) == pytest.approx(1.003)
    assert result((1.02, 1.015, 1.025), (1.30, 1.28, 1.33)).average(bench.SCALARS) == pytest.approx(
        (1.30 + 99 * 1.02) / 100
    )
    assert result((1.5, 1.49, 1.51), (1.30, 1.28, 1.33), every=1).average(bench.SCALARS) == pytest.approx(1.30)


def test_a_site_costs_its_share_of_what_a_logged_step_takes_longer() -> None:
    # 10 ms bare, 3 ms more, 50 sites.
    assert result((1.0, 0.9, 1.1), (1.30, 1.28, 1.33)).microseconds_a_site(bench.HISTOGRAMS) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("unlogged", "logged", "every", "expected"),
    [
        ((1.0, 0.99, 1.01), (1.10, 1.09, 1.11), 100, "At every=100 training is 0.1 % slower."),
        ((1.0, 0.99, 1.01), (1.50, 1.49, 1.51), 10, "5 % slower. With every=50 it would be about 1 %."),
        ((1.05, 1.04, 1.06), (1.50, 1.49, 1.51), 100, "not logged already cost 5 %"),
        ((1.0, 0.99, 1.01), (1.05, 0.95, 1.20), 100, "within the noise of this machine; at every=100"),
        ((1.0, 0.99, 1.01), (0.90, 0.89, 0.91), 100, "the machine was busy"),
    ],
)
def test_one_line_of_advice(unlogged: Any, logged: Any, every: int, expected: str) -> None:
    assert expected in bench.advice(result(unlogged, logged, every))


def test_what_was_counted_on_a_device_is_said() -> None:
    on_device = dataclasses.replace(
        result((1.0, 0.99, 1.01), (1.1, 1.09, 1.11)), copies=1, waits="passed", kernel="Triton", device="cuda:0"
    )
    report = bench.text(on_device)
    assert "device-to-host copies per logged step: 1\n" in report
    assert "without any synchronization with the device: passed" in report
    assert "Triton kernel" in report
    assert "thread" not in report


# --- What is counted ----------------------------------------------------------------------------------


def test_the_peak_is_what_was_held_at_once() -> None:
    def one_after_another() -> None:
        for size in (1000, 3000, 2000):
            torch.empty(size, dtype=torch.uint8)

    def at_once() -> None:
        kept = [torch.empty(size, dtype=torch.uint8) for size in (1000, 3000, 2000)]
        del kept

    assert cuda_counters.peak_bytes(one_after_another, CPU) == 3000
    assert cuda_counters.peak_bytes(at_once, CPU) == 6000


def test_copies_are_reported_by_their_names() -> None:
    names = ["Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "Memcpy DtoD"]
    assert cuda_counters.copies_among(names + names[:1]) == 2


@pytest.fixture
def on_simulated_device() -> Iterator[tuple[timing.Variant, timing.Variant]]:
    """A bare and a logged variant."""
    inputs = fake_device.put(INPUTS)
    made = []
    for observe in (timing.bare, lambda model, *_: observed(model)):
        model = fake_device.to_device(small())
        made.append(timing.Variant("", model, lambda model: model(inputs).square().mean(), observe, Path()))
        made[-1].steps(2)
    yield made[0], made[1]
    made[1].close()


def observed(model: nn.Module) -> timing.Monitor:
    watching = tbhooks.watch(model, every=1)
    return timing.Monitor(watching.flush, watching.close, watching)


def test_a_logged_step_makes_one_copy_on_the_simulated_device(
    on_simulated_device: tuple[timing.Variant, timing.Variant],
) -> None:
    def count(run: cuda_counters.Run) -> int:
        with fake_device.Log() as log:
            run()
        return len(log.copies)

    assert runner.copies(*on_simulated_device, count) == 1


class Forbidden(RuntimeError):
    pass


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    with fake_device.Log() as log:
        yield
    if log.syncs:
        raise Forbidden("called a synchronizing operation\nwith a trace")


def test_a_logged_step_does_not_wait_for_the_simulated_device(
    on_simulated_device: tuple[timing.Variant, timing.Variant],
) -> None:
    assert runner.waits(*on_simulated_device, no_waiting) == "passed"


def test_who_waits_is_reported(on_simulated_device: tuple[timing.Variant, timing.Variant]) -> None:
    bare, logged = on_simulated_device
    plain = bare.loss

    def waiting(model: nn.Module) -> Tensor:
        loss = plain(model)
        loss.item()
        return loss

    logged.loss = waiting
    assert runner.waits(bare, logged, no_waiting) == "failed: called a synchronizing operation"
    bare.loss = waiting
    assert runner.waits(bare, logged, no_waiting).startswith("unknown: the model itself synchronizes with the device")


def test_a_wait_that_a_watch_keeps_from_training_is_found_by_its_count() -> None:
    errors = iter([0, 1])
    nothing = contextlib.nullcontext
    assert cuda_counters.waits(lambda: None, lambda: None, lambda: next(errors), nothing) == (
        "failed: a hook synchronized with the device"
    )


# --- Where there is a CUDA device ---------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
def test_cuda_is_measured_with_events_and_counted() -> None:
    device = bench.device_named("cuda")
    measured = bench.measure(bench.load(None, device), steps=10)
    assert measured.device == "cuda:0"
    assert measured.copies == 1
    assert measured.waits == "passed"
    assert measured.extra_bytes[bench.HISTOGRAMS] > 0
    assert measured.kernel in ("torch", "Triton")


@pytest.mark.cuda
@needs_cuda
def test_cuda_counts_a_copy_and_finds_a_wait() -> None:
    tensor = torch.ones(1000, device="cuda")
    assert cuda_counters.copies_from_cuda(tensor.cpu) == 1
    assert cuda_counters.waits(
        lambda: None, lambda: tensor.sum().item(), lambda: 0, cuda_counters.no_waiting_for_cuda
    ).startswith("failed")
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.cuda
@needs_cuda
def test_cuda_peak_and_time_are_of_what_ran() -> None:
    device = torch.device("cuda", 0)
    assert cuda_counters.peak_bytes(lambda: torch.empty(1 << 20, dtype=torch.uint8, device=device), device) == 1 << 20
    timer = cuda_counters.CudaTimer(device)
    timer.start()
    torch.cuda._sleep(10_000_000)
    assert timer.stop() > 1e-3
