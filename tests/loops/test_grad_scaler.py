"""What loops do with a GradScaler besides the ordinary: two models, several optimizers, autograd.grad, wrappers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import tbhooks
from tests.support import fake_device, reference, zoo
from tests.support.loops import forward, mlp, sgd

INF = float("inf")
ORIGINAL = {name: vars(GradScaler)[name] for name in ("scale", "step")}


@pytest.fixture(autouse=True)
def _scaler_is_left_as_it_was() -> Iterator[None]:
    yield
    assert {name: vars(GradScaler)[name] for name in ORIGINAL} == ORIGINAL


def norm_of(model: nn.Module, scale: float = 1.0) -> float:
    grads = [reference.to_numpy(p.grad).ravel() for p in model.parameters() if p.grad is not None]
    return float(np.linalg.norm(np.concatenate(grads) / scale))


class Pair:
    """A generator and its critic, each with an optimizer, and with a scaler or none."""

    def __init__(self, scales: tuple[float | None, float | None], order: str) -> None:
        self.models = nn.Linear(3, 4), mlp(seed=1)
        self.optimizers = [sgd(model) for model in self.models]
        self.scalers = [GradScaler("cpu", init_scale=s or 1.0, enabled=s is not None) for s in scales]
        self.order = order
        self.gradients: list[list[float]] = [[], []]
        self.own: list[float] = []
        self.norms: list[list[float]] = [[], []]
        self.bits: list[bytes] = []

    def backward(self, which: int) -> None:
        fake = self.models[0](torch.randn(5, 3))
        fake.retain_grad()
        output = self.models[1](fake if which == 0 else fake.detach())
        output.retain_grad()
        self.optimizers[which].zero_grad()
        self.scalers[which].scale(output.square().mean()).backward()
        scale = self.scalers[which].get_scale()
        if which == 0:
            self.gradients[0].append(float(np.linalg.norm(reference.to_numpy(fake.grad))) / scale)
        self.gradients[1].append(float(np.linalg.norm(reference.to_numpy(output.grad))) / scale)
        if which == 1:
            self.own.append(self.gradients[1][-1])
        self.norms[which].append(norm_of(self.models[which], scale))

    def step(self, which: int) -> None:
        self.scalers[which].step(self.optimizers[which])
        self.scalers[which].update()
        self.bits += [zoo.raw(p) for p in self.models[which].parameters()]

    def iterate(self) -> None:
        for move in self.order:
            (self.backward if move.islower() else self.step)("gc".index(move.lower()))


@pytest.mark.parametrize("scales", [(1024.0, 1000.0), (None, 1024.0), (1000.0, None), (None, None)])
@pytest.mark.parametrize("order", ["cCgG", "gGcC", "gcGC"])
def test_each_of_two_models_gets_its_own_scale_and_one_without_is_never_divided(
    scales: tuple[float | None, float | None], order: str
) -> None:
    torch.manual_seed(0)
    bare = Pair(scales, order)
    for _ in range(3):
        bare.iterate()
    torch.manual_seed(0)
    pair = Pair(scales, order)
    watches = [tbhooks.watch(model, every=1) for model in pair.models]
    for _ in range(3):
        pair.iterate()
    for watching in watches:
        watching.close()
    assert pair.bits == bare.bits
    for watching, scale, norms in zip(watches, scales, pair.norms, strict=True):
        assert [frame.scalars.get("train.scale") for frame in watching.history][:3] == [scale] * 3
        for tag in ("train.grad_norm", "train.grad_norm_raw"):
            assert watching.history.scalar(tag)[1][:3].tolist() == pytest.approx(norms, rel=1e-6)
    assert watches[0].history.series("(root)", "gradient", "norm")[1][:3].tolist() == pytest.approx(pair.gradients[0])
    # The critic's gradients from a pass for the generator are cleared before its own step, and are left out, if the
    # generator has stepped by then. Where both backwards come first, they are also those of the generator's passes.
    expected = pair.gradients[1] if order == "gcGC" else pair.own
    squares = [np.square(frame["(root)", "gradient"].norm) for frame in watches[1].history]
    assert sum(squares) == pytest.approx(np.square(expected).sum(), rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1000.0, 4096.0])
@pytest.mark.parametrize("zero", ["set to none", "in place", "never"])
def test_loops_around_autograd_grad_are_logged_unscaled(scale: float, zero: str) -> None:
    model = mlp()
    optimizer, scaler = sgd(model), GradScaler("cpu", init_scale=scale)
    outputs, norms = [], []
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(3):
            output = model(torch.randn(5, 4))
            scaled = scaler.scale(output.square().mean())
            outputs.append(np.linalg.norm(reference.to_numpy(2 * output / output.numel())))
            gradients = torch.autograd.grad(scaled, model.parameters())
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            norms.append(norm_of(model, scale))
            scaler.step(optimizer)
            scaler.update()
            if zero != "never":
                optimizer.zero_grad(set_to_none=zero == "set to none")
    assert watching.history.series("2", "gradient", "norm")[1].tolist() == pytest.approx(outputs, rel=1e-6)
    assert watching.history.scalar("train.grad_norm")[1].tolist() == pytest.approx(norms, rel=1e-6)
    raws = [frame.scalars.get("train.grad_norm_raw", norm) for frame, norm in zip(watching.history, norms, strict=True)]
    assert raws == pytest.approx(norms, rel=1e-6)  # or not there: nobody saw it


class OwnScale(GradScaler):
    """Scales in its own way, as FSDP's scaler does."""

    def scale(self, outputs: Any) -> Any:
        super().scale(torch.zeros(()))
        return outputs * self._scale


UNSEEN_SCALES = {
    "nested list": lambda scaler, loss: scaler.scale([[loss]])[0][0],
    "generator": lambda scaler, loss: next(iter(scaler.scale(iter([loss])))),
    "by hand": lambda scaler, loss: scaler.scale(torch.ones(())) * loss,
    "subclass": lambda scaler, loss: scaler.scale(loss),
}


@pytest.mark.parametrize("how", UNSEEN_SCALES.values(), ids=UNSEEN_SCALES)
def test_weight_gradients_are_unscaled_even_where_nobody_saw_the_scale(how: Any) -> None:
    model = mlp()
    optimizer = sgd(model)
    scaler = (OwnScale if how is UNSEEN_SCALES["subclass"] else GradScaler)("cpu", init_scale=1024.0)
    with tbhooks.watch(model, every=1) as watching:
        how(scaler, forward(model)).backward()
        expected = norm_of(model, 1024.0)
        scaler.step(optimizer)
    assert watching.latest.scalars["train.grad_norm"] == pytest.approx(expected, rel=1e-6)


def train_by(optimizers: list[Optimizer], model: Any, skip: int | None, iterations: int) -> None:
    """With a scaler; in iteration `skip` the first layer's gradients are infinite."""
    scaler = GradScaler("cpu", init_scale=64.0)
    for iteration in range(iterations):
        scaler.scale(forward(model)).backward()
        if iteration == skip:
            model[0].weight.grad[0, 0] = INF
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_of_two_optimizers_the_second_ones_first_gradients_are_unscaled_too(fused: bool) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train_by([SGD(model[i].parameters(), lr=0.1, fused=fused) for i in (0, 2)], model, None, 1)
    scalars = watching.history[0].scalars
    assert scalars["train.grad_norm"] == pytest.approx(scalars["train.grad_norm_raw"], rel=1e-6)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_an_iteration_in_which_one_of_two_optimizers_was_skipped_is_a_step(order: tuple[int, int]) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train_by([SGD(model[i].parameters(), lr=0.1) for i in order], model, 2, 5)
    assert watching.history.series("0", "activation", "count")[1].tolist() == [128.0] * 5
    assert watching.stats.skipped == 1


def test_an_iteration_that_was_skipped_but_ended_by_hand_is_a_step_and_not_blamed() -> None:
    model = mlp()
    optimizer, scaler = sgd(model), GradScaler("cpu", init_scale=64.0)
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for factor in (1.0, INF, 1.0):
            scaler.scale(forward(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            watching.step()
            optimizer.zero_grad()
    assert watching.history.series("0", "activation", "count")[1].tolist() == [128.0] * 3
    assert watching.history.scalar("train.skipped")[1].tolist() == [0, 1, 1]
    assert watching.findings == []


def test_the_last_watch_to_close_leaves_gradscaler_as_it_was() -> None:
    watches = [tbhooks.watch(mlp(), every=1) for _ in range(2)]
    watches[0].close()
    assert all(vars(GradScaler)[name] is not original for name, original in ORIGINAL.items())
    watches[1].close()
    assert all(vars(GradScaler)[name] is original for name, original in ORIGINAL.items())


@pytest.mark.parametrize("opened_again", [False, True])
def test_a_wrapper_of_somebody_else_around_ours_stays_and_steps_are_counted_once(
    opened_again: bool,
) -> None:
    model = mlp()
    optimizer, scaler, calls = sgd(model), GradScaler("cpu", init_scale=64.0), []
    watching = tbhooks.watch(model, every=1)
    ours = GradScaler.step

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    GradScaler.step = theirs
    try:
        if opened_again:
            watching.close()
            assert vars(GradScaler)["step"] is theirs
            watching = tbhooks.watch(model, every=1)
        for factor in (INF, 1.0):
            scaler.scale(forward(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        watching.close()
        assert vars(GradScaler)["step"] is theirs
    finally:
        GradScaler.step = ORIGINAL["step"]
    assert len(calls) == 2
    assert (watching.stats.skipped, watching.stats.steps) == (1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_costs_no_sync_and_no_copy_of_its_own(fused: bool) -> None:
    def run(watched: bool) -> tuple[list[int], int, Any]:
        model = fake_device.to_device(mlp())
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = GradScaler(fake_device.DEVICE.type, init_scale=1000.0)
        watching = tbhooks.watch(model, every=2) if watched else None
        copies = []
        with fake_device.Log() as record:
            for factor in (1.0, INF, 1.0, 1.0, 1.0):
                loss = model(fake_device.put(torch.randn(16, 4))).square().mean() * factor
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                copies.append(len(record.copies))
            assert record.ops["aten._local_scalar_dense.default"] == record.syncs
        if watching:
            watching.close()
        return np.diff([0, *copies]).tolist(), record.syncs, watching

    _, syncs, _ = run(watched=False)
    copies, syncs_watched, watching = run(watched=True)
    assert copies == ([1, 0, 1, 0, 1] if fused else [1, 0, 0, 1, 0])
    assert syncs_watched == syncs == (0 if fused else 5)  # only the scaler itself waits
    assert watching.history.scalar("train.scale")[1].tolist() == ([1000.0, 500.0, 500.0] if fused else [1000.0, 500.0])
    assert watching.history.scalar("train.skipped")[1].tolist() == ([0, 1, 1] if fused else [0, 1])
    assert watching.stats.errors == 0
