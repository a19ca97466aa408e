"""Mixed precision: what is under a GradScaler is logged unscaled, skipped iterations leave nothing, nothing waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import tbhooks
from tests.support import float64_recorder, reference, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import forward, mlp, sgd
from tests.support.slow import cases, slow

INF = float("inf")


def norm_of(model: nn.Module, scale: float = 1.0) -> float:
    grads = [reference.to_numpy(p.grad).ravel() for p in model.parameters() if p.grad is not None]
    return float(np.linalg.norm(np.concatenate(grads) / scale))


def train_scalars(frame: tbhooks.Frame) -> dict[str, float]:
    return {tag: value for tag, value in frame.scalars.items() if tag.startswith("train.") and "lr" not in tag}


class Ledger(Float64Recorder):
    """The float64 recorder of a model under a scaler: what backward left is divided by the scale, in float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.scalars: list[dict[str, float]] = []
        self.scale, self.raw, self.skipped = 1.0, float("nan"), 0

    def of(self, optimizer: Optimizer, scaler: GradScaler) -> Callable[[str], None]:
        """What the loop calls when it has done something."""
        self.stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.scaler = scaler
        ended = 0

        def note(what: str) -> None:
            nonlocal ended
            if what == "scaled":
                self.scale = scaler.get_scale()
            elif what == "backward":
                self.raw = norm_of(self.model, self.scale)
            elif len(self.steps) == ended:
                self.skipped += 1
                self._parts.clear()
            ended = len(self.steps)

        return note

    def _keep(self, key: float64_recorder.Key, tensor: Tensor, scale: float | None = None) -> None:
        if scale is None:
            scale = self.scale if key[1] == "gradient" else 1.0
        array = reference.to_numpy(tensor).ravel() / scale
        # The quotient is as exact as the optimizer's own; a mean near zero would show the difference.
        self._parts[key].append(array if tensor.dtype is torch.float64 else array.astype(np.float32).astype(float))

    def _step_begins(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        used = []
        for key, (name, parameter) in self._parameters.items():
            self._keep((name, "weight"), parameter)
            self._before[name] = reference.to_numpy(parameter).copy()
            if parameter.grad is not None:
                # Fused optimizers divide themselves; a scaler leaves what no optimizer steps as it was.
                by = getattr(optimizer, "grad_scale", None) if key in self.stepped else self.scale
                self._keep((name, "weight_gradient"), parameter.grad, 1.0 if by is None else float(by))
                used.append(self._parts[name, "weight_gradient"][-1])
        self.skipped += int(getattr(optimizer, "found_inf", 0))
        self.scalars.append(
            {"train.grad_norm": float(np.linalg.norm(np.concatenate(used))), "train.grad_norm_raw": self.raw}
            | ({"train.scale": self.scale, "train.skipped": self.skipped} if self.scaler.is_enabled() else {})
        )

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._step_ends(optimizer, args, kwargs)
        for name, parameter in self._parameters.values():
            if parameter.dtype is not torch.float64 and (name, "update") in self.steps[-1]:
                array = self.steps[-1][name, "update"]
                array[:] = array.astype(np.float32)  # the watch subtracts in the parameters' own precision


def make_sgd(model: Any) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_fused(model: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class Recipe:
    """A training loop as the AMP examples of PyTorch have it."""

    make: Callable[[Any], Optimizer] = make_sgd
    scaler: dict[str, Any] = field(default_factory=lambda: {"init_scale": 1024.0}, hash=False)
    dtype: torch.dtype | None = None
    inside: bool = False
    accumulate: int = 1
    clip: float | None = None
    infinite: tuple[int, ...] = ()
    iterations: int = 3
    in_list: bool = False


def iterate(recipe: Recipe, case: zoo.Case, model: nn.Module, ledger: Ledger | None) -> list[bytes]:
    optimizer, scaler = recipe.make(model), GradScaler("cpu", **recipe.scaler)
    note = ledger.of(optimizer, scaler) if ledger else lambda _: None
    bits: list[bytes] = []
    for iteration in range(recipe.iterations):
        for _ in range(recipe.accumulate):
            with torch.autocast("cpu", recipe.dtype, enabled=recipe.dtype is not None):
                loss = case.loss(model, case.batch()) / recipe.accumulate
                loss = loss * (INF if iteration in recipe.infinite else 1.0)
                scaled: Any = scaler.scale([loss, 2 * loss]) if recipe.in_list else scaler.scale(loss)
                note("scaled")
                if recipe.inside:
                    torch.autograd.backward(scaled)
            if not recipe.inside:
                torch.autograd.backward(scaled)
        note("backward")
        if recipe.clip:
            scaler.unscale_(optimizer)
            bits.append(zoo.raw(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)))
        scaler.step(optimizer)
        note("stepped")
        scaler.update()
        bits += [zoo.raw(p) + zoo.raw(p.grad) for p in model.parameters() if p.grad is not None]
        bits += [zoo.raw(loss), zoo.raw(torch.get_rng_state()), repr(scaler.state_dict()).encode()]
        optimizer.zero_grad()
    return bits


@cache
def played(recipe: Recipe, name: str) -> tuple[list[bytes], Ledger]:
    torch.manual_seed(0)
    model = zoo.ZOO[name].build()
    ledger = Ledger(model)
    try:
        return iterate(recipe, zoo.ZOO[name], model, ledger), ledger
    finally:
        ledger.close()


def check(recipe: Recipe, name: str, every: int) -> tbhooks.Watch:
    """Same bits as without a watch, and frames with the numbers of the float64 recorder."""
    expected, ledger = played(recipe, name)
    torch.manual_seed(0)
    model = zoo.ZOO[name].build()
    with tbhooks.watch(model, every=every) as watching:
        assert iterate(recipe, zoo.ZOO[name], model, None) == expected
    assert watching.stats.errors == watching.stats.dropped == 0
    assert (watching.stats.steps, watching.stats.skipped) == (len(ledger.steps), ledger.skipped)
    assert [frame.step for frame in watching.history] == list(range(0, len(ledger.steps), every))
    for frame in watching.history:
        float64_recorder.assert_frame_equals(frame, ledger.steps[frame.step])
        assert train_scalars(frame) == pytest.approx(ledger.scalars[frame.step], rel=1e-6, nan_ok=True)
    return watching


HALF, BRAIN = torch.float16, torch.bfloat16
GROWING = {"init_scale": 2.0**8, "growth_interval": 1}
THOUSAND = {"init_scale": 1000.0, "growth_interval": 1, "growth_factor": 3.0}
# Overflows in float16 until it is small enough.
HUGE = {"init_scale": 2.0**60, "backoff_factor": 2.0**-17}
OFF = {"enabled": False}
some_blocks = functools.partial(lambda model: SGD(model.transformer.h.parameters(), lr=0.1))
fused_blocks = functools.partial(lambda model: SGD(model.transformer.h.parameters(), lr=0.1, fused=True))
RECIPES = {
    "half_inside": Recipe(dtype=HALF, inside=True),
    "half_outside_growing": Recipe(dtype=HALF, scaler=GROWING),
    "brain_inside_unscaled": Recipe(dtype=BRAIN, inside=True, scaler=OFF),
    "brain_outside_thousand": Recipe(dtype=BRAIN, scaler=THOUSAND),
    "brain_inside_fused": Recipe(make_fused, dtype=BRAIN, inside=True),
    "accumulated": Recipe(dtype=HALF, accumulate=3),
    "accumulated_thousand": Recipe(scaler=THOUSAND, accumulate=2),
    "accumulated_fused": Recipe(make_fused, THOUSAND, dtype=HALF, accumulate=3),
    "fused_thousand": Recipe(make_fused, THOUSAND, accumulate=2, infinite=(1,)),
    "clipped": Recipe(dtype=HALF, clip=0.05),
    "clipped_thousand": Recipe(scaler=THOUSAND, clip=0.05, accumulate=2),
    "clipped_fused": Recipe(make_fused, dtype=BRAIN, clip=0.05),
    "clipped_and_skipped": Recipe(clip=0.05, infinite=(0, 2), iterations=4),
    "skipped_first": Recipe(dtype=HALF, infinite=(0, 1), iterations=4),
    "skipped_later": Recipe(scaler=THOUSAND, infinite=(1, 3), iterations=5),
    "skipped_accumulated": Recipe(accumulate=2, infinite=(1,)),
    "skipped_fused": Recipe(make_fused, dtype=HALF, infinite=(0, 2)),
    "overflowing": Recipe(dtype=HALF, scaler=HUGE, iterations=5),
    "overflowing_fused": Recipe(make_fused, HUGE, dtype=HALF, iterations=5),
    "always_skipped": Recipe(infinite=(0, 1, 2)),
    "several_losses": Recipe(scaler=THOUSAND, in_list=True),
    "scaler_off": Recipe(scaler=OFF, accumulate=2, clip=0.05),
    "left_out": Recipe(some_blocks),
    "left_out_fused": Recipe(fused_blocks, THOUSAND),
}


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=slow("every=2 has logged steps and others"))])
@pytest.mark.parametrize(
    "recipe",
    cases(
        RECIPES,
        always={
            "half_inside", "half_outside_growing", "brain_inside_fused", "accumulated", "fused_thousand", "clipped",
            "clipped_and_skipped", "skipped_later", "overflowing", "always_skipped", "several_losses", "scaler_off",
            "left_out",
        },
        reason="other pairs of the same types, scales and optimizers",
    ),
)  # fmt: skip
def test_everything_is_logged_unscaled_and_skipped_iterations_not_at_all(recipe: Recipe, every: int) -> None:
    check(recipe, "gpt2", every)


LARGE_MODELS = [
    ("bert", "half_inside"), ("bert", "skipped_fused"), ("resnet", "accumulated"), ("resnet", "brain_inside_fused"),
    ("vit", "clipped"), ("gpt2_checkpointed", "clipped_thousand"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*(pytest.param(*pair, marks=slow("larger models; gpt2 has every recipe")) for pair in LARGE_MODELS),
     ("bfloat16", "fused_thousand"), ("float64", "skipped_later"), ("lstm", "skipped_later"),
     ("checkpointed_reentrant", "accumulated_thousand"), ("checkpointed_reentrant", "skipped_later"),
     ("checkpointed", "skipped_fused")],
)  # fmt: skip
def test_other_models_are_logged_unscaled_too(name: str, recipe: str) -> None:
    check(RECIPES[recipe], name, every=1)


def test_a_step_that_a_fused_optimizer_left_out_is_not_blamed_on_its_gradients() -> None:
    watching = check(RECIPES["skipped_fused"], "gpt2", every=1)
    assert watching.history[2].scalars["train.skipped"] == 2
    assert watching.history[2]["(root)[logits]", "gradient"].nan_count > 0
    assert watching.findings == []


@pytest.mark.parametrize("evaluated", [False, True])
def test_infinite_gradients_of_a_step_that_was_not_left_out_are_blamed(evaluated: bool) -> None:
    model = mlp()
    optimizer, scaler = SGD(model.parameters(), lr=0.1, fused=True), GradScaler("cpu", init_scale=64.0)
    with tbhooks.watch(model, every=1) as watching:
        if evaluated:
            watching.evaluation()
        for factor in (1.0, INF, 1.0, 1.0):
            scaler.scale(forward(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if evaluated:
                forward(model.eval())
                model.train()
        (forward(model) * INF).backward()
        optimizer.step()
        forward(model)
    assert watching.findings[0].step == 4
    assert watching.findings[0].site.kind == "gradient"


@pytest.mark.parametrize(
    ("infinite", "when"),
    [((0,), "before"), ((1, 2), "before"), ((1, 2), "after"), ((0,), "after")],
)
def test_losses_logged_in_a_skipped_iteration_are_in_no_step(infinite: tuple[int, ...], when: str) -> None:
    model = mlp()
    optimizer, scaler = sgd(model), GradScaler("cpu", init_scale=64.0)
    with tbhooks.watch(model, every=1) as watching:
        for iteration in range(6):
            loss = forward(model) * (INF if iteration in infinite else 1.0)
            if when == "before":
                watching.log({"iteration": iteration, "loss": loss})
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if when == "after":
                watching.log({"iteration": iteration, "loss": loss})
    assert watching.history.scalar("train/iteration")[1].tolist() == [i for i in range(6) if i not in infinite]
    assert np.isfinite(watching.history.scalar("train/loss")[1]).all()
