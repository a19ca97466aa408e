"""If gradients are not finite, the step is run again before weights are changed, and the module is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.data.frame import Finding, Site
from tests.support import zoo
from tests.support.frames import make_frame

NONFINITE = 7


class Forward(nn.Module):
    """Computes the logarithm of zero while `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs() * 0.0) + x if self.fails else x


class Backward(Forward):
    """Finite in the forward, and divides by zero in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.abs() * 0.0) + x if self.fails else x


def build(failing: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), failing, nn.Linear(8, 1))


def train(
    model: Any, watch: Callable[[tbhooks.Watch], Any] | None, loss: Callable[[Tensor], Tensor] | None = None,
    steps: int = 12, run: Any = None, micro_batches: int = 1,
) -> tuple[tbhooks.Watch | None, list[bytes]]:  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching = None
    if watch is not None:
        watching = tbhooks.watch(model, every=5)
        watch(watching)
    try:
        for step in range(steps):
            for part in range(micro_batches):
                model[4].fails = step == NONFINITE and part == micro_batches - 1
                out = (run or model)(torch.randn(16, 8)).square().mean()
                (loss(out) if loss is not None and step == NONFINITE else out).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if watching is not None:
            watching.close()
    left = [zoo.raw(tensor) for tensor in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    return watching, left


def replayed(watching: tbhooks.Watch | None) -> Any:
    assert watching is not None
    assert watching.stats.errors == 0
    return [finding for finding in watching.findings if finding.evidence.get("replayed")]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_module_with_the_first_nonfinite_output_is_named(micro_batches: int) -> None:
    watching, _ = train(build(Forward()), lambda w: w.on_nonfinite("replay"), micro_batches=micro_batches)
    (finding,) = replayed(watching)
    assert (finding.step, finding.rule, finding.severity) == (NONFINITE, "non_finite", "error")
    assert (finding.site.path, finding.site.kind) == ("4", "activation")
    assert "first output" in finding.message


def test_the_first_nonfinite_gradient_is_named_with_the_module_to_inspect() -> None:
    watching, _ = train(build(Backward()), lambda w: w.on_nonfinite("replay"))
    (finding,) = replayed(watching)
    assert (finding.site.path, finding.site.kind) == ("3", "gradient")
    assert "inspect the backward of 4" in finding.message


def test_a_nonfinite_loss_is_distinguished_from_the_model() -> None:
    watching, _ = train(build(nn.Identity()), lambda w: w.on_nonfinite("replay"), loss=lambda out: out * float("nan"))
    (finding,) = replayed(watching)
    assert (finding.site.path, finding.site.kind) == ("(root)", "gradient")
    assert "loss" in finding.message


@pytest.mark.parametrize("failing", [Forward, Backward, nn.Identity])
def test_the_model_is_left_as_it_was(failing: type[nn.Module]) -> None:
    _, bare = train(build(failing()), None)
    _, watched = train(build(failing()), lambda w: w.on_nonfinite("replay"))
    assert watched == bare


def test_raise_comes_before_weights_are_changed() -> None:
    model = build(Forward())
    with pytest.raises(tbhooks.FindingError) as caught:
        train(model, lambda w: w.on_nonfinite("raise"))
    assert caught.value.finding.step == NONFINITE
    assert "the source is unknown" in str(caught.value)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_raise_and_replay_together_name_the_module_in_the_exception() -> None:
    with pytest.raises(tbhooks.FindingError, match="activation of 4"):
        train(build(Forward()), lambda w: w.on_nonfinite("replay").on_nonfinite("raise"))


def test_a_source_that_cannot_be_found_is_reported_as_unknown() -> None:
    times: list[bool] = []  # outside of the model, where it is not restored

    class Sometimes(Forward):
        def forward(self, x: Tensor) -> Tensor:
            times.append(self.fails)
            return x * float("nan") if self.fails and sum(times) == 1 else x

    watching, _ = train(build(Sometimes()), lambda w: w.on_nonfinite("replay"))
    (finding,) = replayed(watching)
    assert finding.site is None
    assert "is when the step is run again: the source is unknown" in finding.message


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "autocast", "keywords"])
def test_it_is_named_however_the_model_is_called(how: str) -> None:
    torch._dynamo.reset()
    model = build(Forward())
    calls: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "compiled": lambda: torch.compile(model, backend="aot_eager"),
        "checkpointed": lambda: lambda x: model(x.requires_grad_()),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(model),
        "keywords": lambda: lambda x: model(input=x),
    }
    if how == "checkpointed":
        inner = model[3]
        model[3] = type("Block", (nn.Module,), {"forward": lambda _, x: checkpoint(inner, x, use_reentrant=False)})()
    watching, _ = train(model, lambda w: w.on_nonfinite("replay"), run=calls[how]())
    (finding,) = replayed(watching)
    assert finding.site.path == "4"


def test_nonfinite_steps_in_a_row_are_reported_once_and_written_with_the_next_frame() -> None:
    watching, _ = train(build(Forward()), lambda w: w.on_nonfinite("replay"), steps=16)
    assert len(replayed(watching)) == 1
    assert watching is not None
    written = [f.step for f in watching.history if any(x.evidence.get("replayed") for x in f.findings)]
    assert written == [10]


def test_no_tensor_of_a_step_is_kept_after_it() -> None:
    model = build(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tbhooks.watch(model, every=5) as watching:
        watching.on_nonfinite("replay")
        for _ in range(3):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watching._session.replay.passes == []
    assert zoo.hook_count(model) == 0


def test_an_unknown_reaction_raises_with_the_known_ones() -> None:
    with tbhooks.watch(build(nn.Identity())) as watching, pytest.raises(tbhooks.ArgumentError, match="replay"):
        watching.on_nonfinite("repaly")


class Interrupted(list[Finding]):
    """Findings to which the training thread adds another one right after the background thread has read them."""

    def __init__(self, first: Finding, later: Finding) -> None:
        super().__init__([first])
        self.later = [later]

    def __iter__(self) -> Iterator[Finding]:
        yield from super().__iter__()
        self.extend(self.later)
        self.later = []


def test_a_finding_that_comes_while_earlier_ones_are_being_written_is_written_too() -> None:
    first, later = (
        Finding(0, Site(path, "activation"), "non_finite", "error", "not finite", {}) for path in ("0", "1")
    )
    with tbhooks.watch(nn.Linear(2, 1), rules=()) as w:
        w._actions._unwritten = Interrupted(first, later)
        written = [w._actions.judge(make_frame(step)).findings for step in range(3)]
    assert [finding for findings in written for finding in findings] == [first, later]


class Stateful(Forward):
    """Has every kind of state and random generator; its output depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bound = torch.zeros(8)
        self.written = torch.zeros(8)
        self.table = {"calls": 0, "tensors": [torch.zeros(8)]}
        self.array = np.zeros(8)
        self.generator = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.bound = self.bound + 1
        with torch.no_grad():
            self.written += 1
            self.table["tensors"][0].add_(1)
        self.table["calls"] += 1
        self.array += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(dim=0)
        kept = torch.tensor([random.random() > 0.3 for _ in range(8)]) * torch.from_numpy(np.random.rand(8) > 0.3)
        noise = torch.rand(8, generator=self.generator) + self.python.random() + self.numpy.random()
        counts = self.calls + self.table["calls"] + self.bound + self.written + self.table["tensors"][0]
        x = x * kept + 0.01 * noise.float() + 0.01 * counts + torch.from_numpy(self.array).float() + self.average
        return super().forward(x)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_replay_changes_no_bit_of_training_whatever_state_modules_have(micro_batches: int) -> None:
    def clean(optimizer: Any, *_: Any) -> None:
        """Sets the nonfinite gradients to zero, after the watch has checked them, so that training goes on."""
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    def run(watch: Any) -> Any:
        random.seed(0)
        np.random.seed(0)
        model = build(Stateful())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(bool(p.grad.isfinite().all())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watching = tbhooks.watch(model, every=5) if watch else None
        if watching is not None:
            watching.on_nonfinite("replay")
        optimizer.register_step_pre_hook(clean)
        for step in range(12):
            for part in range(micro_batches):
                model[4].fails = step == NONFINITE and part == micro_batches - 1
                model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if watching is not None:
            (finding,) = replayed(watching)
            assert finding.site.path == "4"
            watching.close()
        module = model[4]
        tensors = (*model.parameters(), *model.buffers(), module.bound, module.written, module.table["tensors"][0])
        drawn = (random.random(), np.random.rand(), module.python.random(), module.numpy.random())
        states = (zoo.raw(torch.get_rng_state()), zoo.raw(module.generator.get_state()))
        counts = (module.calls, module.table["calls"], module.array.tolist())
        return [zoo.raw(tensor) for tensor in tensors], drawn, states, counts

    seen: list[bool] = []
    bare = run(False)
    assert not all(seen)
    seen.clear()
    assert run(True) == bare
    assert len(seen) == 12 * 6 * micro_batches, "hooks on gradients are not called by a replay"


def test_a_pass_is_run_again_with_the_state_from_before_it() -> None:
    class Third(Forward):
        """Fails in its third call, by its own count."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * float("nan") if self.calls == 3 else x

    watching, _ = train(build(Third()), lambda w: w.on_nonfinite("replay"), steps=3)
    (finding,) = replayed(watching)
    assert (finding.site.path, finding.site.kind) == ("4", "activation")


def test_an_input_that_the_model_writes_to_is_left_as_the_training_left_it() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x += 1
            return x * float("inf")

    model = nn.Sequential(Writes(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = torch.zeros(2, 4)
    with tbhooks.watch(model, every=5) as watching:
        watching.on_nonfinite("replay")
        model(given).sum().backward()
        optimizer.step()
        assert len(replayed(watching)) == 1
    assert given.tolist() == [[1.0] * 4] * 2


def test_a_parameter_that_the_forward_writes_to_is_named() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1.0, 1.0)
            return super().forward(x) * float("nan")

    model = nn.Sequential(Clamps(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tbhooks.watch(model, every=5) as watching:
        watching.on_nonfinite("replay")
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
    assert [m for m in watching.stats.messages if m.startswith("replay: changed in place") and "0.weight" in m]
