"""`Watch.noise_scale` on problems whose gradient noise scale is known in closed form, and where it cannot be told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tests.support import fake_device, zoo
from tests.support.jobs import Quadratic

SIZE, START, SPREAD = 20, 0.5, 2.0
TRUE = SIZE * SPREAD**2 / (SIZE * START**2)
"""The gradient of a sample is w - x: its covariance has the trace 20 * 2², and the true gradient is w."""


def accumulate(
    steps: int, parts: int, batch: int, *, scale: float = 1.0, watched: bool = True
) -> tuple[nn.Module, tbhooks.Watch | None, list[list[Tensor]]]:
    torch.manual_seed(0)
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = tbhooks.watch(model, every=1).noise_scale() if watched else None
    gradients: list[list[Tensor]] = []
    for _ in range(steps):
        batches = [torch.randn(batch, SIZE, dtype=torch.float64) * SPREAD for _ in range(parts)]
        gradients.append([model.weight.detach() - x.mean(0) for x in batches])
        for x in batches:
            (model(x) * scale / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, watching, gradients


def reference(gradients: list[list[Tensor]], batch: int) -> tuple[float, float]:
    """The estimates of appendix A.1 in NumPy: the ratio of running means, and the mean of the ratios."""
    trace = signal = weight = 0.0
    ratios = []
    for micro in gradients:
        array = np.array([each.numpy() for each in micro])
        small, large = np.square(array).sum(1).mean(), np.square(array.mean(0)).sum()
        b_small, b_large = batch, batch * len(micro)
        trace = 0.95 * trace + 0.05 * (small - large) / (1 / b_small - 1 / b_large)
        signal = 0.95 * signal + 0.05 * (b_large * large - b_small * small) / (b_large - b_small)
        weight = 0.95 * weight + 0.05
        if signal > 0:
            ratios.append(max(trace, 0.0) / signal)
    return trace / signal, float(np.mean(ratios))


@pytest.mark.parametrize(("parts", "batch"), [(2, 8), (4, 4)])
def test_the_estimate_is_that_of_float64_numpy(parts: int, batch: int) -> None:
    _, watching, gradients = accumulate(12, parts, batch)
    assert watching is not None
    scalars = watching.latest.scalars
    watching.close()
    assert (scalars["train.noise_scale"], scalars["train.critical_batch"]) == pytest.approx(
        reference(gradients, batch), rel=1e-9
    )
    assert watching.stats.errors == 0


def test_it_converges_to_the_closed_form() -> None:
    _, watching, _ = accumulate(200, 4, 8)
    assert watching is not None
    scalars = watching.latest.scalars
    watching.close()
    assert scalars["train.noise_scale"] == pytest.approx(TRUE, rel=0.2)
    assert scalars["train.critical_batch"] == pytest.approx(TRUE, rel=0.1)
    assert not [tag for tag in scalars if tag.startswith("noise.")]


def test_a_constant_factor_of_the_loss_does_not_matter() -> None:
    found = []
    for scale in (1.0, 1024.0):
        _, watching, _ = accumulate(5, 3, 4, scale=scale)
        assert watching is not None
        found.append(watching.latest.scalars["train.noise_scale"])
        watching.close()
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_training_is_the_same_and_no_hook_stays() -> None:
    watched, watching, _ = accumulate(3, 2, 4)
    plain, _, _ = accumulate(3, 2, 4, watched=False)
    assert watching is not None
    assert torch.equal(watched.weight, plain.weight)  # type: ignore[arg-type]
    assert not watched.weight._backward_hooks
    seen = watching.stats.hooks_fired
    with watching.paused():
        watched(torch.zeros(2, SIZE, dtype=torch.float64)).backward()
    assert watching.stats.hooks_fired == seen
    watching.close()


@pytest.mark.parametrize("forwards", [1, 2])
def test_where_it_cannot_be_told_it_is_nan_and_says_why(forwards: int) -> None:
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        losses = [model(torch.ones(4, SIZE, dtype=torch.float64)) for _ in range(forwards)]
        for _ in range(forwards):
            sum(losses).backward(retain_graph=True)  # type: ignore[union-attr]
        if forwards == 2:
            losses[0].backward()
        optimizer.step()
    scalars, why = watching.latest.scalars, watching.stats.unseen["train.noise_scale"]
    assert math.isnan(scalars["train.noise_scale"])
    assert math.isnan(scalars["train.critical_batch"])
    assert ("micro-batches" if forwards == 1 else "2 forwards and 3 backwards") in why
    assert watching.stats.errors == 0


def test_a_step_that_is_not_finite_does_not_spoil_the_running_means() -> None:
    model = Quadratic(SIZE, START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(0)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        for step in range(4):
            for _ in range(2):
                x = torch.randn(4, SIZE, dtype=torch.float64)
                model(x / 0 if step == 1 else x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(watching.latest.scalars["train.noise_scale"])


# --- From the samples of one batch: normalisation layers ------------------------------------------


class WrittenRMSNorm(nn.Module):
    """As in models of transformers: a parameter times the normalised input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Normalized(nn.Module):
    """Two layers with a normalisation between them, which may be called twice."""

    def __init__(self, norm: nn.Module, calls: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), norm, nn.Linear(8, 3)
        self.calls, self.checkpointed = calls, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = checkpoint(self.norm, x, use_reentrant=False) if self.checkpointed else self.norm(x).tanh()
        return self.last(x)


class OfChannels(nn.Module):
    """A GroupNorm over the second of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def of_samples(model: nn.Module, x: Tensor) -> float:
    """The noise scale of the parameters of normalisation layers, from one backward for each sample."""
    norms = [p for name, p in model.named_parameters() if "norm" in name and p.requires_grad]
    rows = []
    for sample in x:
        loss = model(sample[None]).square().mean()
        rows.append(np.concatenate([g.double().numpy().ravel() for g in torch.autograd.grad(loss, norms)]))
    each, mean, count = np.square(rows).sum(1).mean(), np.square(np.mean(rows, 0)).sum(), len(x)
    return float((each - mean) / (1 - 1 / count) / ((count * mean - each) / (count - 1)))


def one_step(model: nn.Module, x: Tensor, scale: float = 1.0) -> tbhooks.Watch:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        (model(x).square().mean() * scale).backward()
        optimizer.step()
    assert watching.stats.errors == 0, watching.stats.messages
    return watching


NORMS = {
    "layer_norm": lambda: Normalized(nn.LayerNorm(8)),
    "layer_norm_of_two_dimensions": lambda: Normalized(nn.LayerNorm((4, 8))),
    "layer_norm_without_bias": lambda: Normalized(nn.LayerNorm(8, bias=False)),
    "rms_norm": lambda: Normalized(nn.RMSNorm(8)),
    "written_rms_norm": lambda: Normalized(WrittenRMSNorm(8)),
    "group_norm": lambda: Normalized(OfChannels()),
    "called_twice": lambda: Normalized(nn.LayerNorm(8), calls=2),
}


@pytest.mark.parametrize("name", NORMS)
def test_one_batch_is_told_apart_by_its_samples_in_normalisation_layers(name: str) -> None:
    torch.manual_seed(3)
    model, x = NORMS[name]().double(), torch.randn(7, 4, 6, dtype=torch.float64)
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter, mean=1.0)
    watching = one_step(model, x, scale=64.0)
    assert watching.latest.scalars["train.noise_scale"] == pytest.approx(of_samples(model, x), rel=1e-9)
    assert "train.noise_scale" not in watching.stats.unseen


def test_from_samples_it_converges_to_the_closed_form() -> None:
    """Only the bias is trained, and the gradient of a sample is bias - target."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(SIZE).double()
    nn.init.zeros_(norm.weight).requires_grad_(False)
    nn.init.constant_(norm.bias, START)
    optimizer = torch.optim.SGD([norm.bias], lr=0.0)
    with tbhooks.watch(norm, every=1).noise_scale() as watching:
        for _ in range(200):
            target = torch.randn(32, SIZE, dtype=torch.float64) * SPREAD
            (norm(torch.randn_like(target)) - target).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.latest.scalars["train.critical_batch"] == pytest.approx(TRUE, rel=0.1)


def test_training_with_normalisation_layers_is_the_same() -> None:
    def trained(is_watched: bool) -> bytes:
        torch.manual_seed(0)
        model = Normalized(nn.LayerNorm(8), calls=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching = tbhooks.watch(model, every=2).noise_scale() if is_watched else None
        for _ in range(5):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if watching is not None:
            watching.close()
        return b"".join(zoo.raw(parameter) for parameter in model.parameters())

    assert trained(is_watched=True) == trained(is_watched=False)


@pytest.mark.parametrize("how", ["checkpointed", "compiled", "other samples"])
def test_layers_whose_samples_cannot_be_told_apart_are_left_out_and_training_goes_on(
    how: str, nothing_compiled: None
) -> None:
    model = Normalized(nn.LayerNorm(8), checkpointed=how == "checkpointed")
    x = torch.randn(4, 3, 6)
    if how == "compiled":
        model.compile(backend="aot_eager")
    if how == "other samples":
        model.first.register_forward_hook(lambda module, args, output: output.flatten(0, 1))
    watching = one_step(model, x)
    assert math.isnan(watching.latest.scalars["train.noise_scale"])
    assert "normalisation layers" in watching.stats.unseen["train.noise_scale"]


def test_nothing_is_kept_after_a_step() -> None:
    model, x = Normalized(nn.LayerNorm(8)), torch.randn(4, 6)
    optimizer = torch.optim.SGD([model.last.bias], lr=0.1)  # no backward needs its value
    with tbhooks.watch(model, every=2).noise_scale() as watching:
        first = model(x)
        first.sum().backward(retain_graph=True)
        optimizer.step()
        watching.flush()
        seen = watching.latest.scalars["train.noise_scale"]
        first.sum().backward()  # a hook of the step before is called in a step that is not logged
        optimizer.step()
    assert watching.latest.scalars["train.noise_scale"] == pytest.approx(seen)
    assert watching.stats.errors == 0, watching.stats.messages


@pytest.mark.parametrize("parts", [1, 2])
def test_on_a_device_nothing_waits_and_there_is_one_copy(parts: int) -> None:
    """One part is told apart by its samples in the normalisation layer."""
    model = fake_device.to_device(nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1).noise_scale() as watching:
        for _ in range(3):
            with fake_device.Log() as log:
                for _ in range(parts):
                    model(fake_device.put(torch.randn(8, 6))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert not watching.stats.errors, watching.stats.messages
    assert math.isfinite(watching.latest.scalars["train.noise_scale"])
    assert log.syncs == 0
    assert len(log.copies) == 1
