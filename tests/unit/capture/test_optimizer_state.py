"""`Watch.optimizer_state`: every number equals a float64 reference computed from what the optimizer really used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

import tbhooks
from tbhooks.data.frame import KINDS, OPTIMIZER_KINDS
from tbhooks.sinks.scalar_selection import shown_scalars
from tests.support import fake_device
from tests.support.frames import make_frame

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Lion(Optimizer):
    """As published by Chen et al. 2023, with decoupled weight decay."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                moment = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((moment * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign(), alpha=-group["lr"])
                moment.lerp_(p.grad, 1 - group["betas"][1])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: Adam(p, 1e-2, weight_decay=0.1),
    "AdamW": lambda p: AdamW(p, 1e-2, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: AdamW(p, 1e-2, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: AdamW(p, 1e-2, amsgrad=True, betas=(0.5, 0.6)),
    "AdamW maximize": lambda p: AdamW(p, 1e-2, maximize=True),
    "AdamW tensor lr": lambda p: AdamW(p, torch.tensor(1e-2), fused=True),
    "AdamW large eps": lambda p: AdamW(p, 1e-2, eps=2e-2),
    "SGD momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "SGD nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: RMSprop(p, 1e-2, momentum=0.5),
    "Adagrad": lambda p: Adagrad(p, 1e-1, eps=1e-3),
    "Adafactor": lambda p: Adafactor(p, 1e-1, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 1e-3),
    "Muon": lambda p: Muon([each for each in p if each.dim() == 2], 1e-2),
}
FIRST = ("exp_avg", "momentum_buffer")
SECOND = ("exp_avg_sq", "square_avg", "sum", "variance")


def double(tensor: Tensor) -> Floats:
    return tensor.detach().double().numpy().copy()


def rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def second_moment(state: dict[str, Any], epsilon: float) -> Floats | None:
    if state.get("row_var") is not None:
        rows, columns = double(state["row_var"]), double(state["col_var"])
        return rows @ columns / np.maximum(rows.mean(axis=-2, keepdims=True), epsilon)
    return next((double(state[name]) for name in SECOND if state.get(name) is not None), None)


def expected(optimizer: Optimizer, p: Tensor, before: Floats) -> dict[str, float]:
    """From the state, gradients and weights of the optimizer, in float64 NumPy."""
    group, state = optimizer.param_groups[0], optimizer.state[p]
    gradient, after = double(p.grad), double(p)  # type: ignore[arg-type]
    gradient = -gradient if group.get("maximize") else gradient
    epsilon = group.get("eps", 0.0)
    epsilon = np.finfo(np.float32).eps if isinstance(epsilon, tuple) else epsilon
    decay = float(group["lr"]) * group.get("weight_decay", 0.0)
    is_coupled = type(optimizer) in (SGD, RMSprop, Adagrad) or type(optimizer) is Adam
    found = {"proposed_update.rms": rms(after - before + (0.0 if is_coupled else decay) * before)}
    moment = next((double(state[name]) for name in FIRST if state.get(name) is not None), None)
    if moment is not None:
        found["first_moment.norm"] = float(np.linalg.norm(moment))
        found["first_moment.mean"] = float(moment.mean())
        norms = np.linalg.norm(moment) * np.linalg.norm(gradient)
        found["first_moment.gradient_cosine"] = float((moment * gradient).sum() / norms)
    second = second_moment(state, epsilon)
    if second is not None:
        found["second_moment.rms"], found["second_moment.max"] = rms(second), float(second.max())
        used = double(state["max_exp_avg_sq"]) if group.get("amsgrad") else second
        root = np.sqrt(used / (1 - group["betas"][1] ** float(state["step"]) if "betas" in group else 1.0))
        found["second_moment.below_epsilon_fraction"] = float((root < epsilon).mean())
        found["normalized_gradient.rms"] = rms(gradient / np.maximum(root, epsilon))
    return found


def train(make: Callable[[Any], Optimizer], watched: bool, steps: int = 4) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = make(model.parameters())
    watching = tbhooks.watch(model, every=1).optimizer_state() if watched else None
    before: dict[str, Floats] = {}
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6) * (1 + step)).square().mean().backward()
        before = {name: double(p) for name, p in model.named_parameters()}
        optimizer.step()
    return model, watching, (optimizer, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_equals_float64(name: str) -> None:
    model, watching, (optimizer, before) = train(OPTIMIZERS[name], watched=True)
    frame = watching.latest
    watching.close()
    assert watching.stats.errors == 0, watching.stats.messages
    with_state = {path: p for path, p in model.named_parameters() if optimizer.state.get(p)}
    assert with_state
    for path, p in with_state.items():
        numbers = expected(optimizer, p, before[path])
        read = {}
        for key in numbers:
            kind, _, stat = key.partition(".")
            read[key] = getattr(frame[path, kind], stat)
        # The change of a float32 weight is known to its rounding; everything else to float32 arithmetic.
        assert read == pytest.approx(numbers, rel=2e-5, abs=1e-9), (path, name)
    if "large eps" in name:
        assert 0.0 < frame["0.weight", "second_moment"].below_epsilon_fraction < 1.0


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum", "Adafactor"])
def test_training_is_bit_identical(name: str) -> None:
    watched, watching, (optimizer, _) = train(OPTIMIZERS[name], watched=True)
    watching.close()
    plain, _, (other, _) = train(OPTIMIZERS[name], watched=False)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one if isinstance(one[key], Tensor))


def test_an_optimizer_without_moments_is_reported_and_its_update_is_still_read() -> None:
    _, watching, _ = train(lambda p: SGD(p, 0.1), watched=True)
    frame = watching.latest
    watching.close()
    assert "keeps no moments" in watching.stats.unseen["optimizer_state/SGD"]
    assert frame["0.weight", "proposed_update"].rms == frame["0.weight", "update"].rms
    assert not any(site.kind == "first_moment" for site in frame.sites)


def test_the_state_of_a_wrapped_optimizer_is_read() -> None:
    class Wrapper(Optimizer):
        def __init__(self, params: Any) -> None:
            self.base_optimizer = AdamW(list(params), 1e-2)
            super().__init__(self.base_optimizer.param_groups, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base_optimizer.step()

    model, watching, (optimizer, before) = train(Wrapper, watched=True)
    numbers = expected(optimizer.base_optimizer, model[0].weight, before["0.weight"])  # type: ignore[index]
    assert watching.latest["0.weight", "normalized_gradient"].rms == pytest.approx(numbers["normalized_gradient.rms"])
    watching.close()


def test_the_factors_of_transformers_adafactor_are_read_as_the_second_moment_they_stand_for() -> None:
    optimization = pytest.importorskip("transformers.optimization")

    def make(params: Any) -> Optimizer:
        made: Optimizer = optimization.Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False)
        return made

    model, watching, (optimizer, _) = train(make, watched=True)
    state = optimizer.state[model[0].weight]  # type: ignore[index]
    rows, columns = double(state["exp_avg_sq_row"]), double(state["exp_avg_sq_col"])
    second = np.outer(rows, columns) / rows.mean()
    frame = watching.latest
    watching.close()
    assert frame["0.weight", "second_moment"].rms == pytest.approx(rms(second), rel=1e-5)
    assert frame["0.weight", "second_moment"].max == pytest.approx(second.max(), rel=1e-5)
    bias = double(optimizer.state[model[0].bias]["exp_avg_sq"])  # type: ignore[index]
    assert frame["0.bias", "second_moment"].rms == pytest.approx(rms(bias), rel=1e-5)


def test_a_state_tensor_named_momentum_is_a_first_moment() -> None:
    class Heavy(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                moment = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(moment.mul_(0.9).add_(p.grad), alpha=0.1)

    model, watching, (optimizer, _) = train(Heavy, watched=True)
    moment = double(optimizer.state[model[0].weight]["momentum"])  # type: ignore[index]
    assert watching.latest["0.weight", "first_moment"].norm == pytest.approx(np.linalg.norm(moment), rel=1e-6)
    watching.close()


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adafactor", "Muon"])
def test_on_a_device_nothing_waits_and_there_is_one_copy(name: str) -> None:
    def record(is_asked: bool) -> tuple[fake_device.Log, tbhooks.Watch]:
        torch.manual_seed(0)
        model = fake_device.to_device(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
        optimizer = OPTIMIZERS[name](model.parameters())
        with tbhooks.watch(model, every=1) as w:
            if is_asked:
                w.optimizer_state()
            for _ in range(3):
                with fake_device.Log() as log:
                    model(fake_device.put(torch.randn(8, 6))).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return log, w

    (plain, _), (asked, w) = record(is_asked=False), record(is_asked=True)
    assert not w.stats.errors, w.stats.messages
    assert any(site.kind == "first_moment" or site.kind == "second_moment" for site in w.latest.sites)
    assert asked.syncs == plain.syncs  # Adafactor itself waits
    assert len(asked.copies) == len(plain.copies)


def test_bfloat16_moments_are_multiplied_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).bfloat16()
    optimizer = AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    with tbhooks.watch(model, every=1).optimizer_state() as watching:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
            optimizer.step()
    state, group, read = optimizer.state[model.weight], optimizer.param_groups[0], watching.latest
    moment, gradient = double(state["exp_avg"]), double(model.weight.grad)  # type: ignore[arg-type]
    cosine = (moment * gradient).sum() / np.linalg.norm(moment) / np.linalg.norm(gradient)
    assert read["weight", "first_moment"].gradient_cosine == pytest.approx(cosine, rel=1e-6)
    root = np.sqrt(double(state["exp_avg_sq"]) / (1 - 0.999**3)) + group["eps"]
    proposed = 1e-3 * moment / (1 - 0.9**3) / root
    # The weight itself keeps 8 bits: its change is not what the optimizer proposed.
    assert read["weight", "proposed_update"].rms == pytest.approx(rms(proposed), rel=1e-5)
    assert read["weight", "update"].rms != pytest.approx(rms(proposed), rel=1e-2)


def test_a_fused_optimizer_that_unscales_gradients_itself() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer, scaler = AdamW(model.parameters(), 1e-2, fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with tbhooks.watch(model, every=1).optimizer_state() as watching:
        for _ in range(3):
            x = torch.randn(8, 6)
            gradient = 2 * (model(x).detach().double().T @ x.double()).numpy() / 40
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    root = np.sqrt(double(optimizer.state[model.weight]["exp_avg_sq"]) / (1 - 0.999**3))
    assert watching.latest["weight", "normalized_gradient"].rms == pytest.approx(rms(gradient / root), rel=1e-5)


def test_a_run_that_was_written_has_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters())
    with tbhooks.watch(model, tmp_path, every=1).optimizer_state() as watching:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    (frame,) = tbhooks.runs.read(tmp_path).frames
    for kind in OPTIMIZER_KINDS:
        assert frame["weight", kind].rms == pytest.approx(watching.latest["weight", kind].rms)
    cosine = watching.latest["weight", "first_moment"].gradient_cosine
    assert frame.scalars["first_moment.gradient_cosine/weight"] == pytest.approx(cosine)


def test_without_the_call_nothing_is_read() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters())
    with tbhooks.watch(model, every=1) as watching:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert {site.kind for site in watching.latest.sites} == set(KINDS)


def test_the_scalars_of_many_parameters_are_no_charts() -> None:
    few = {f"first_moment.gradient_cosine/{i}": 0.5 for i in range(10)}
    many = {f"first_moment.gradient_cosine/{i}": 0.5 for i in range(400)} | {"train/loss": 1.0}
    assert shown_scalars(make_frame(0, scalars=few)) == few
    assert shown_scalars(make_frame(0, scalars=many)) == {"train/loss": 1.0}
