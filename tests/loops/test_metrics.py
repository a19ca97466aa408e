"""`Watch.metric`: functions of the user, called with the tensors of logged steps, in every kind of loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tbhooks
from tests.support import compiling, fake_device, tapped
from tests.support.compiling import Graphs, breaks, reset
from tests.support.tapped import EVERY, STEPS, Tapped

pytestmark = compiling.ISOLATED
Step = dict[str, list[NDArray[np.float64]]]
PATH = "blocks.0"


class Kept:
    """The tensors of one module that metrics should be called with, call by call, in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, list[Step]()
        self.parts: Step = defaultdict(list)
        block = model.get_submodule(PATH)
        block.register_forward_pre_hook(lambda _, args: self._forward("input", args[0]))
        block.register_forward_hook(self._output)

    def _forward(self, kind: str, tensor: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._keep(kind, tensor)

    def _output(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._forward("activation", output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._keep("gradient", gradient))

    def _keep(self, kind: str, tensor: Tensor) -> None:
        self.parts[kind].append(tensor.detach().to(torch.float64, copy=True).numpy())

    def before_step(self) -> None:
        weight = self.model.get_parameter(f"{PATH}.out.weight")
        self._keep("weight", weight)
        assert weight.grad is not None
        self._keep("weight_gradient", weight.grad)
        self.steps.append(dict(self.parts))
        self.parts = defaultdict(list)


def train(
    model: nn.Module, before_step: Callable[[], Any] | None = None, called: Any = None, accumulate: int = 1,
    amp: bool = False,
) -> list[Tensor]:  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = (model if called is None else called)(tapped.batch(step, part)).square().mean()
            loss.backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


KINDS = ("activation", "gradient", "input", "weight", "weight_gradient")
REDUCE: dict[str, Any] = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


def add_metrics(w: tbhooks.Watch, reduce: str = "mean") -> None:
    for kind in KINDS:
        pattern = f"{PATH}.out.weight" if kind.startswith("weight") else PATH
        w.metric(f"rms_{kind}", lambda t: t.float().square().mean().sqrt(), pattern, kind, reduce)
        w.metric(f"two_{kind}", lambda t: torch.stack([t.min(), t.max()]), pattern, kind, reduce)


def compare(w: tbhooks.Watch, steps: list[Step], reduce: str = "mean", tolerance: float = 1e-5) -> None:
    assert [frame.step for frame in w.history] == list(range(0, STEPS, EVERY))
    for frame in w.history:
        for kind in KINDS:
            site = f"{PATH}.out.weight" if kind.startswith("weight") else PATH
            calls = steps[frame.step][kind]
            rms = REDUCE[reduce]([np.sqrt(np.square(call).mean()) for call in calls])
            two = REDUCE[reduce]([[call.min(), call.max()] for call in calls], axis=0)
            assert frame.scalars[f"metric.rms_{kind}/{site}"] == pytest.approx(rms, rel=tolerance), kind
            for i in range(2):
                assert frame.scalars[f"metric.two_{kind}/{site}[{i}]"] == pytest.approx(two[i], rel=tolerance), kind


LOOPS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "plain": (None, {}, "mean"),
    "accumulated, mean": (None, {"accumulate": 3}, "mean"),
    "accumulated, sum": (None, {"accumulate": 3}, "sum"),
    "accumulated, max": (None, {"accumulate": 3}, "max"),
    "accumulated, min": (None, {"accumulate": 3}, "min"),
    "mixed precision": (None, {"amp": True}, "mean"),
    "reentrant checkpoints": ({"use_reentrant": True}, {}, "sum"),
    "checkpoints": ({"use_reentrant": False}, {}, "sum"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_numbers_are_those_of_float64_and_training_is_the_same(loop: str) -> None:
    how, options, reduce = LOOPS[loop]
    reference = Kept(Tapped(how=how))
    expected = train(reference.model, reference.before_step, **options)
    model = Tapped(how=how)
    w = tbhooks.watch(model, every=EVERY)
    add_metrics(w, reduce)
    result = train(model, **options)
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    compare(w, reference.steps, reduce)
    assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


def test_compiled_models_have_the_same_metrics_in_two_graphs() -> None:
    reset()
    reference = Kept(Tapped())
    train(reference.model, reference.before_step)
    model, graphs = Tapped(), Graphs()
    w = tbhooks.watch(model, every=EVERY)
    add_metrics(w)
    w.metric("write_ratio", pattern=PATH)
    train(model, called=torch.compile(model, backend=graphs, fullgraph=True))
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    compare(w, reference.steps)
    for frame in w.history:
        assert frame.scalars[f"activation.write_ratio/{PATH}"] == pytest.approx(
            write_ratio(reference.steps[frame.step]), rel=1e-5
        )
    assert len(graphs) == 2
    assert not breaks()


def write_ratio(step: Step) -> float:
    (given,), (output,) = step["input"], step["activation"]
    return float(np.sqrt(np.square(output - given).mean()) / np.sqrt(np.square(given).mean()))


def test_the_write_ratio_of_a_residual_block() -> None:
    reference = Kept(Tapped())
    train(reference.model, reference.before_step)
    model = Tapped()
    with tbhooks.watch(model, every=EVERY).metric("write_ratio") as w:
        train(model)
    for frame in w.history:
        expected = write_ratio(reference.steps[frame.step])
        assert frame[PATH, "activation"].write_ratio == pytest.approx(expected, rel=1e-5)
        assert "activation.write_ratio/head" not in frame.scalars, "its output has another shape than its input"
    assert w.stats.errors == 0


def test_a_loss_scale_is_divided_out_of_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    w = tbhooks.watch(model, every=1).metric("largest", lambda t: t.abs().max(), "0", kind="gradient")
    w.metric("of_weights", lambda t: t.abs().max(), "0.weight", kind="weight_gradient")
    output = model(torch.ones(2, 4))
    scaler.scale(output.sum()).backward()
    scaler.step(optimizer)
    w.close()
    assert w.latest is not None
    assert w.latest.scalars["metric.largest/0"] == pytest.approx(w.latest["0", "gradient"].abs_max)
    assert w.latest.scalars["metric.of_weights/0.weight"] == pytest.approx(
        w.latest["0.weight", "weight_gradient"].abs_max
    )


def test_forwards_that_are_no_part_of_the_step_do_not_count() -> None:
    model = Tapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    w = tbhooks.watch(model, every=1).metric("calls", lambda _: 1.0, "head", reduce="sum")
    for _ in range(2):
        model(tapped.batch(1))  # no backward goes through it
        model(tapped.batch(0)).sum().backward()
        optimizer.step()
    w.close()
    assert [frame.scalars["metric.calls/head"] for frame in w.history] == [1.0, 1.0]


def test_metrics_ride_in_the_one_copy_and_nothing_waits() -> None:
    def run(asks: bool) -> tuple[int, int]:
        model = fake_device.to_device(Tapped())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, every=2)
        if asks:
            add_metrics(w)
            w.metric("effective_rank", pattern="*:residual").metric("write_ratio")
            w.metric("stable_rank", pattern="*.query.weight", kind="weight").metric("logsumexp", pattern="*:scores")
        with fake_device.Log() as log:
            for step in range(4):
                model(fake_device.put(tapped.batch(step))).sum().backward()
                optimizer.step()
        w.close()
        assert w.stats.errors == 0, w.stats.messages
        return len(log.copies), log.syncs

    assert run(True) == run(False) == (2, 0)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda t: t.undefined, "it failed: AttributeError"),
        (lambda t: t, "it returned a tensor of shape"),
        (lambda t: torch.zeros(65), "it returned a tensor of shape"),
        (lambda _: "text", "it returned str"),
        (lambda t: t.mul_(2).sum(), "it changes the tensor"),
        (lambda t: t.view(-1)[:1].zero_().sum(), "it changes the tensor"),
        (lambda t: torch.rand_like(t).sum(), "it draws random numbers"),
        (lambda t: t.abs().max().item(), "it waits for the device"),
        (lambda t: t.cpu().sum(), "it waits for the device"),
        (lambda t: t[t > 0].mean(), "it waits for the device"),
    ],
)
def test_a_function_that_cannot_be_used_is_switched_off_and_training_does_not_notice(
    function: Callable[[Tensor], Any], why: str
) -> None:
    def run(asks: bool) -> tuple[list[Tensor], int, tbhooks.Watch]:
        torch.manual_seed(0)
        model = fake_device.to_device(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, every=1)
        if asks:
            w.metric("mine", function).metric("good", lambda t: t.sum())
        with fake_device.Log() as log:
            for _ in range(2):
                model(fake_device.put(torch.randn(3, 4))).sum().backward()
                optimizer.step()
        w.close()
        return [parameter.detach().cpu() for parameter in model.parameters()], log.syncs, w

    (expected, _, _), (result, syncs, w) = run(False), run(True)
    assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))
    assert syncs == 0
    assert why in w.stats.unseen["metric.mine"]
    assert w.stats.errors == 1
    assert w.latest is not None
    assert not [tag for tag in w.latest.scalars if tag.startswith("metric.mine")]
    assert "metric.good/0" in w.latest.scalars


def test_the_autograd_graph_is_not_extended() -> None:
    model = Tapped()
    with tbhooks.watch(model, every=1) as w:
        seen: list[tuple[bool, bool]] = []
        w.metric("graph", lambda t: (seen.append((t.requires_grad, torch.is_grad_enabled())), t.sum())[1])
        model(tapped.batch(0)).sum().backward()
    assert seen
    assert set(seen) == {(False, False)}


def test_autocast_is_off_in_a_metric() -> None:
    model = Tapped()
    with tbhooks.watch(model, every=1) as w:
        w.metric(
            "dtype", lambda t: 1.0 * ((t.float().reshape(-1, 1) @ torch.ones(1, 1)).dtype is torch.float32), "head"
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tapped.batch(0)).sum()
        loss.backward()
        w.step()
    assert w.latest is not None
    assert w.latest.scalars["metric.dtype/head"] == 1.0


def test_metrics_are_scalars_of_event_files(tmp_path: Path) -> None:
    model = Tapped()
    with tbhooks.watch(model, str(tmp_path), every=1) as w:
        w.metric("per_head", lambda t: t.amax((0, 1)), "blocks.0.out")
        train(model)
    run = tbhooks.runs.read(tmp_path)
    assert run.frames[1].metrics == w.history[1].metrics == {"metric.per_head": "activation"}
    assert run.frames[1].scalars["metric.per_head/blocks.0.out[3]"] == pytest.approx(
        w.history[1].scalars["metric.per_head/blocks.0.out[3]"]
    )
    assert not run.problems


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_evaluation_passes_have_metrics_of_their_own(tmp_path: Path, compiled: bool) -> None:
    reset()
    model, kept = Tapped(), tbhooks.MemorySink()
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    reference = Kept(Tapped())
    w = tbhooks.watch(model, [kept, tmp_path], every=1).evaluation()
    w.metric("rms", lambda t: t.square().mean().sqrt(), PATH).metric("write_ratio", pattern=PATH)
    w.metric("most", lambda t: t.max(), "*:residual", reduce="max").metric("of_input", lambda t: t.sum(), PATH, "input")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    called(tapped.batch(0)).square().mean().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        for part in range(2):
            called(tapped.batch(1, part))
            reference.model(tapped.batch(1, part))
    model.train()
    called(tapped.batch(2)).square().mean().backward()
    optimizer.step()
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    calls = reference.parts
    rms = np.mean([np.sqrt(np.square(call).mean()) for call in calls["activation"]])
    given = np.mean([call.sum() for call in calls["input"]])
    ratios = [
        np.sqrt(np.square(out - before).mean() / np.square(before).mean())
        for before, out in zip(calls["input"], calls["activation"], strict=True)
    ]
    read = next(frame for frame in tbhooks.runs.read(tmp_path).frames if frame.is_evaluation)
    for frame in (next(frame for frame in kept.frames if frame.is_evaluation), read):
        assert frame.scalars[f"eval.metric.rms/{PATH}"] == pytest.approx(rms, rel=1e-5)
        assert frame[PATH, "eval.activation"].write_ratio == pytest.approx(np.mean(ratios), rel=1e-5)
        assert frame.scalars[f"eval.metric.of_input/{PATH}"] == pytest.approx(given, rel=1e-5)
        assert frame.metrics["eval.metric.most"] == "eval.activation"
    trained = [frame for frame in kept.frames if not frame.is_evaluation]
    assert all("eval" not in tag for frame in trained for tag in frame.scalars), "training has numbers of its own"


def f(_: Tensor) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", f), "the name of a metric must be"),
        (("a/b", f), "the name of a metric must be"),
        (("taken", f), "there is a metric named 'taken' already"),
        (("m", 3), "function must be a function"),
        (("logsumexpp",), "did you mean 'logsumexp'"),
        (("m", f, "blocksx.*"), "matches no module and no parameter"),
        (("m", f, None, "activations"), "did you mean 'activation'"),
        (("m", f, None, "activation", "median"), "unknown reduce 'median'"),
    ],
)
def test_wrong_arguments_raise_at_the_call(arguments: tuple[Any, ...], message: str) -> None:
    model = Tapped()
    with tbhooks.watch(model, every=1) as w:
        w.metric("taken", f)
        with pytest.raises(tbhooks.ArgumentError, match=message):
            w.metric(*arguments)


def test_a_kind_that_is_not_captured_is_refused() -> None:
    model = Tapped()
    with (
        tbhooks.watch(model, every=1, kinds=("activation",)) as w,
        pytest.raises(tbhooks.ArgumentError, match="does not capture the kind 'gradient'"),
    ):
        w.metric("m", f, kind="gradient")


def test_modules_that_the_watch_leaves_out_can_have_metrics() -> None:
    model = Tapped()
    with tbhooks.watch(model, every=1, include="head") as w:
        w.metric("mean", lambda t: t.mean(), "blocks.1").metric("size", lambda t: 1.0, nn.Linear, kind="input")
        train(model)
    assert w.latest is not None
    assert "metric.mean/blocks.1" in w.latest.scalars
    assert {tag for tag in w.latest.scalars if "size" in tag} >= {"metric.size/head", "metric.size/blocks.0.query"}
