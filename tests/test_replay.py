"""When gradients are not finite, the step is run again before weights are touched, and the module is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.frame import Finding, Site
from tests import zoo
from tests.frames import make_frame

SICK = 7


class Forward(nn.Module):
    """Takes the logarithm of zero, once told to."""

    sick = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs() * 0.0) + x if self.sick else x


class Backward(Forward):
    """Is harmless forward and divides by zero backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.abs() * 0.0) + x if self.sick else x


def build(sick: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), sick, nn.Linear(8, 1))


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
                model[4].sick = step == SICK and part == micro_batches - 1
                out = (run or model)(torch.randn(16, 8)).square().mean()
                (loss(out) if loss is not None and step == SICK else out).backward()
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
def test_the_module_whose_output_went_first_is_named(micro_batches: int) -> None:
    watching, _ = train(build(Forward()), lambda w: w.on_nonfinite("replay"), micro_batches=micro_batches)
    (finding,) = replayed(watching)
    assert (finding.step, finding.rule, finding.severity) == (SICK, "non_finite", "error")
    assert (finding.site.path, finding.site.kind) == ("4", "activation")
    assert "first output" in finding.message


def test_a_gradient_that_went_first_is_named_with_the_module_to_look_at() -> None:
    watching, _ = train(build(Backward()), lambda w: w.on_nonfinite("replay"))
    (finding,) = replayed(watching)
    assert (finding.site.path, finding.site.kind) == ("3", "gradient")
    assert "that of 4 was finite" in finding.message


def test_a_loss_that_went_first_is_told_from_the_model() -> None:
    watching, _ = train(build(nn.Identity()), lambda w: w.on_nonfinite("replay"), loss=lambda out: out * float("nan"))
    (finding,) = replayed(watching)
    assert (finding.site.path, finding.site.kind) == ("(root)", "gradient")
    assert "loss" in finding.message


@pytest.mark.parametrize("sick", [Forward, Backward, nn.Identity])
def test_the_model_is_left_as_it_was(sick: type[nn.Module]) -> None:
    _, bare = train(build(sick()), None)
    _, watched = train(build(sick()), lambda w: w.on_nonfinite("replay"))
    assert watched == bare


def test_raise_comes_before_weights_are_touched() -> None:
    model = build(Forward())
    with pytest.raises(tbhooks.FindingError) as caught:
        train(model, lambda w: w.on_nonfinite("raise"))
    assert caught.value.finding.step == SICK
    assert "cannot be known where" in str(caught.value)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_raise_and_replay_together_name_the_module_in_the_exception() -> None:
    with pytest.raises(tbhooks.FindingError, match="activation of 4"):
        train(build(Forward()), lambda w: w.on_nonfinite("replay").on_nonfinite("raise"))


def test_what_cannot_be_known_is_said() -> None:
    class Sometimes(Forward):
        times = 0

        def forward(self, x: Tensor) -> Tensor:
            self.times += self.sick
            return x * float("nan") if self.sick and self.times == 1 else x

    watching, _ = train(build(Sometimes()), lambda w: w.on_nonfinite("replay"))
    (finding,) = replayed(watching)
    assert finding.site is None
    assert "is when run again: it cannot be known" in finding.message


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


def test_it_is_told_once_while_it_lasts_and_written_with_the_next_frame() -> None:
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
        assert watching._loop._replay._passes == []
    assert zoo.hook_count(model) == 0


def test_a_wrong_reaction_is_refused_with_the_right_ones() -> None:
    with tbhooks.watch(build(nn.Identity())) as watching, pytest.raises(tbhooks.ArgumentError, match="replay"):
        watching.on_nonfinite("repaly")


class Interrupted(list[Finding]):
    """Findings to which the training thread adds another right after the background thread has looked through them."""

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
        w._unwritten = Interrupted(first, later)
        written = [w._judged(make_frame(step)).findings for step in range(3)]
    assert [finding for findings in written for finding in findings] == [first, later]
