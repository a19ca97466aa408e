"""Gradients on their way to the optimizer: accumulated, clipped, replaced; what it used and what backward had left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import tbhooks
from tests.support import float64_recorder, reference, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.slow import cases, slow

NAN, INF = float("nan"), float("inf")
USED, RAW = "train.grad_norm", "train.grad_norm_raw"


def norm_of(parameters: Iterable[Tensor]) -> float:
    grads = [reference.to_numpy(p.grad).ravel() for p in parameters if p.grad is not None]
    return float(np.linalg.norm(np.concatenate(grads))) if grads else NAN


class Ledger(Float64Recorder):
    """The float64 recorder, with the norms of all gradients before and after whatever happened to them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.norms: list[dict[str, float]] = []
        self.bits: list[bytes] = []

    def backward_over(self) -> None:
        self.raw = norm_of(self.model.parameters())

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if args[1:]:  # a closure makes the gradients inside the step
            for name, parameter in self._parameters.values():
                self._parts[name, "weight_gradient"] = [reference.to_numpy(parameter.grad).ravel().copy()]
        super()._step_ends(optimizer, args, kwargs)
        step = self.steps[-1]
        used = np.concatenate([array for (_, kind), array in step.items() if kind == "weight_gradient"])
        self.norms.append({USED: float(np.linalg.norm(used)), RAW: self.raw})
        for (_, kind), array in step.items():
            if kind == "update":
                array[:] = array.astype(np.float32)  # the watch subtracts in the parameters' own precision


Loop = Callable[[Any, zoo.Case, Callable[[], None]], Iterable[Any]]
"""Trains a model; says when the last backward of a step is over; gives tensors to compare bit by bit."""


def play(loop: Loop, case: zoo.Case, model: nn.Module, over: Callable[[], None]) -> list[bytes]:
    bits = [zoo.raw(tensor) for tensor in loop(model, case, over)]
    return [*bits, *(zoo.raw(p) for p in model.parameters()), zoo.raw(torch.get_rng_state())]


@cache
def played(loop: Loop, name: str) -> tuple[list[bytes], Ledger]:
    torch.manual_seed(0)
    model = zoo.ZOO[name].build()
    ledger = Ledger(model)
    try:
        return play(loop, zoo.ZOO[name], model, ledger.backward_over), ledger
    finally:
        ledger.close()


def check(loop: Loop, name: str = "gpt2", every: int = 1, **options: Any) -> tbhooks.Watch:
    """Same bits as without a watch, and the float64 numbers."""
    expected, ledger = played(loop, name)
    torch.manual_seed(0)
    model = zoo.ZOO[name].build()
    with tbhooks.watch(model, every=every, **options) as watching:
        assert play(loop, zoo.ZOO[name], model, lambda: None) == expected
    assert watching.stats.errors == watching.stats.dropped == 0
    assert watching.stats.steps == len(ledger.steps)
    assert [frame.step for frame in watching.history] == list(range(0, len(ledger.steps), every))
    for frame in watching.history:
        float64_recorder.assert_frame_equals(frame, ledger.steps[frame.step])
        norms = {tag: frame.scalars[tag] for tag in (USED, RAW) if tag in frame.scalars}
        assert norms == pytest.approx(ledger.norms[frame.step], rel=1e-6, nan_ok=True)
    return watching


# --- What happens between backward and the optimizer ------------------------------------------------------------------


def each(change: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def touch(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter)

    return touch


def replace_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.25


def clip(max_norm: float, model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def spoil(*values: float) -> Callable[[Any], None]:
    """Puts single elements into a gradient; all the others stay finite."""

    def touch(model: Any) -> None:
        for place, value in enumerate(values):
            model.transformer.wpe.weight.grad[place, 1] = value

    return touch


def accumulated(
    *counts: int, touch: Callable[[nn.Module], Any] = lambda _: None, zero: str = "none", frozen: bool = False,
    make: Callable[..., Optimizer] = partial(SGD, lr=0.05, momentum=0.9), factors: tuple[float, ...] = (),
) -> Loop:  # fmt: skip
    """One step of so many micro-batches after another."""

    def loop(model: Any, case: zoo.Case, over: Callable[[], None]) -> Iterable[Any]:
        if frozen:
            model.transformer.h.requires_grad_(False)
        optimizer = make(model.parameters())
        for step, count in enumerate(counts):
            if zero == "first":
                optimizer.zero_grad()
            for _ in range(count):
                loss = case.loss(model, case.batch()) / count * (factors[step] if factors else 1.0)
                loss.backward()
                yield loss
            over()
            touch(model)
            yield from [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()
            if zero != "first":
                optimizer.zero_grad(set_to_none=zero == "none")

    return loop


TOUCHES = {
    "nothing": accumulated(1, 1, 1),
    "clip_norm": accumulated(1, 1, 1, touch=partial(clip, 0.01)),
    "clip_norm_without_foreach": accumulated(
        2, 2, 2, touch=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)
    ),
    "clip_norm_that_is_large_enough": accumulated(2, 2, touch=partial(clip, 1e6)),
    "clip_value": accumulated(2, 2, touch=lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3)),
    "in_place": accumulated(1, 1, touch=each(lambda p: p.grad.mul_(0.5))),
    "by_foreach": accumulated(2, 2, touch=lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)),
    "replaced": accumulated(1, 2, touch=each(replace_gradient)),
    "some_removed": accumulated(1, 1, touch=lambda model: setattr(model.transformer.wpe.weight, "grad", None)),
    "noise_on_one": accumulated(1, 1, touch=lambda model: model.transformer.wpe.weight.grad.add_(0.125)),
    "data": accumulated(1, 1, touch=each(lambda p: p.grad.data.clamp_(-1e-3, 1e-3))),
    "numpy": accumulated(1, 1, touch=each(lambda p: p.grad.numpy().fill(0.5))),
    "two": accumulated(2, 2, 2, 2),
    "five": accumulated(5, 5, zero="first"),
    "more_and_more": accumulated(1, 2, 5, touch=partial(clip, 0.01)),
    "fewer_and_fewer": accumulated(5, 2, 1, touch=partial(clip, 0.01)),
    "fewer_untouched": accumulated(3, 1, 2),
    "zeroed_in_place": accumulated(2, 2, 2, zero="in place", touch=partial(clip, 0.01)),
    "zeroed_in_place_untouched": accumulated(1, 3, 3, zero="in place", make=partial(AdamW, fused=True)),
    "zeroed_first": accumulated(2, 2, zero="first"),
    "frozen": accumulated(2, 2, frozen=True, touch=partial(clip, 0.01)),
    "one_nan": accumulated(1, 1, touch=spoil(NAN)),
    "one_infinite": accumulated(1, 1, touch=spoil(INF)),
    "nan_and_infinite": accumulated(1, touch=spoil(INF, NAN)),
    "nan": accumulated(1, 1, 1, factors=(1.0, NAN, 1.0)),
    "infinite": accumulated(2, 2, factors=(1.0, INF)),
}  # fmt: skip


@pytest.mark.parametrize(
    "loop",
    cases(
        TOUCHES,
        always={
            "nothing", "clip_norm", "clip_value", "in_place", "replaced", "some_removed", "data", "five",
            "fewer_and_fewer", "zeroed_in_place", "frozen", "one_nan", "infinite",
        },
        reason="other ways to write the same change of gradients",
    ),
)  # fmt: skip
def test_micro_batches_make_one_step_with_the_gradients_the_optimizer_used(loop: Loop) -> None:
    check(loop)


def test_the_raw_norm_is_right_or_not_there_when_fewer_micro_batches_come_than_last_time() -> None:
    loop = accumulated(5, 2, 2, 1, 3, 2, touch=partial(clip, 0.01))
    _, ledger = played(loop, "mlp")
    torch.manual_seed(0)
    model = zoo.ZOO["mlp"].build()
    with tbhooks.watch(model, every=1) as watching:
        play(loop, zoo.ZOO["mlp"], model, lambda: None)
    for frame, norms in zip(watching.history, ledger.norms, strict=True):
        assert {**norms, **frame.scalars}[RAW] == pytest.approx(norms[RAW], rel=1e-6)
    assert RAW in watching.history[2].scalars


OTHER_MODELS = {
    "bert": TOUCHES["zeroed_in_place"],
    "resnet": TOUCHES["clip_norm"],
    "sparse_embedding": accumulated(2, 2, 2, make=partial(SGD, lr=0.05), touch=each(replace_gradient)),
    "tied_weights": TOUCHES["clip_norm"],
    "checkpointed_reentrant": TOUCHES["zeroed_in_place"],
    "gpt2_checkpointed": TOUCHES["more_and_more"],
    "bfloat16": TOUCHES["clip_norm"],
    "dict_output": TOUCHES["two"],
    "lstm": TOUCHES["clip_value"],
    "frozen": TOUCHES["clip_norm"],
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "name",
    cases(
        list(OTHER_MODELS),
        always={"sparse_embedding", "tied_weights", "checkpointed_reentrant", "bfloat16", "dict_output"},
        reason="accumulation does not depend on the model",
    ),
)
def test_other_models_accumulate_the_same_way(name: str, every: int) -> None:
    check(OTHER_MODELS[name], name, every)


# --- Backward in other ways -------------------------------------------------------------------------------------------


def twice(model: Any, case: zoo.Case, over: Callable[[], None]) -> Iterable[Any]:
    """Two backwards through one graph."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        loss = case.loss(model, case.batch())
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        over()
        yield clip(0.01, model)
        optimizer.step()
        optimizer.zero_grad()


def penalised(model: Any, case: zoo.Case, over: Callable[[], None]) -> Iterable[Any]:
    """A gradient penalty, as in WGAN-GP."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        batch = torch.randn(6, 8, requires_grad=True)
        output = model(batch)
        (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        (output.square().mean() + gradient.norm()).backward()
        over()
        yield clip(0.01, model)
        optimizer.step()
        optimizer.zero_grad()


def with_closure(model: Any, case: zoo.Case, over: Callable[[], None]) -> Iterable[Any]:
    optimizer = LBFGS(model.parameters(), lr=0.01, max_iter=3, tolerance_grad=0, tolerance_change=0)
    for _ in range(3):
        batch = case.batch()

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            over()
            return loss

        yield optimizer.step(closure)


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (twice, "vit"),
        (penalised, "mlp"),
        (with_closure, "mlp"),
        pytest.param(twice, "gpt2", marks=slow("another large model")),
        pytest.param(with_closure, "vit", marks=slow("another large model")),
    ],
)
def test_the_last_backward_of_a_step_is_the_one_whose_gradients_count(loop: Loop, name: str) -> None:
    check(loop, name)
