"""`tbhooks.metrics`: each ready function against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import tbhooks
from tbhooks import metrics
from tests.support import fake_device

Floats = NDArray[np.float64]


def rows(x: Floats) -> Floats:
    return x.reshape(-1, x.shape[-1])


def logsumexp(x: Floats) -> float:
    top = x.max(-1, keepdims=True)
    return float((np.log(np.exp(x - top).sum(-1)) + top[..., 0]).mean())


def channel_outliers(x: Floats) -> float:
    rms = np.sqrt(np.square(rows(x)).mean(0))
    return float(rms.max() / np.sort(rms)[(len(rms) - 1) // 2])


def effective_rank(x: Floats) -> float:
    taken = rows(x)[:: -(-len(rows(x)) // 256)]
    values = np.linalg.svd(taken, compute_uv=False)
    p = values[values > 0] / values.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def mean_cosine(x: Floats) -> float:
    unit = rows(x) / np.linalg.norm(rows(x), axis=1, keepdims=True)
    cosines = unit @ unit.T
    return float(cosines[~np.eye(len(unit), dtype=bool)].mean())


def stable_rank(x: Floats) -> float:
    values = np.linalg.svd(x.reshape(len(x), -1), compute_uv=False)
    return float(np.square(values).sum() / np.square(values[0]))


def entropy(x: Floats) -> float:
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return float(-(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean())


def sparsity(x: Floats) -> float:
    return float((np.abs(x) <= 0.5).mean())


def per_head_max(x: Floats) -> list[float]:
    return [float(x[:, head].max()) for head in range(x.shape[1])]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Floats], object], float]] = {
    "logsumexp": (metrics.logsumexp, logsumexp, 1e-6),
    "channel_outliers": (metrics.channel_outliers, channel_outliers, 1e-6),
    "effective_rank": (metrics.effective_rank, effective_rank, 1e-6),
    "mean_cosine": (metrics.mean_cosine, mean_cosine, 1e-6),
    "stable_rank": (metrics.stable_rank, stable_rank, 1e-3),
    "entropy": (metrics.entropy, entropy, 1e-6),
    "sparsity": (metrics.sparsity(0.5), sparsity, 1e-6),
    "per_head_max": (metrics.per_head_max, per_head_max, 0.0),
}
SHAPES = [(2, 3, 5, 7), (4, 6, 40, 8), (3, 2, 1, 20)]


def tensor(shape: tuple[int, ...], seed: int = 0, scale: float = 3.0) -> Tensor:
    numbers = np.random.default_rng(seed).normal(0.3, scale, size=shape)
    return torch.from_numpy(numbers).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_ready_metric_equals_numpy(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    function, reference, tolerance = CASES[name]
    x = tensor(shape).to(dtype)
    expected = reference(x.double().numpy())
    assert function(x).double().tolist() == pytest.approx(expected, rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_ready_metric_changes_nothing(name: str) -> None:
    x = tensor((2, 3, 5, 7))
    before, state = x.clone(), torch.get_rng_state()
    CASES[name][0](x)
    assert torch.equal(x, before)
    assert x._version == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [name for name in CASES if name != "effective_rank"])
def test_a_ready_metric_does_not_wait_for_the_device(name: str) -> None:
    x = fake_device.put(tensor((2, 3, 5, 7)))
    with fake_device.Log() as log:
        CASES[name][0](x)
    assert (log.copies, log.syncs) == ([], 0)


def test_the_effective_rank_is_finished_on_the_host() -> None:
    x = tensor((30, 12))
    with fake_device.Log() as log:
        products = metrics.effective_rank.on_device(fake_device.put(x))
    assert (log.copies, log.syncs) == ([], 0)
    assert metrics.effective_rank.on_host(products.cpu().numpy()) == pytest.approx(effective_rank(x.double().numpy()))
    assert np.isnan(metrics.effective_rank.on_host(np.full((2, 2), np.inf)))


def test_what_extremes_mean() -> None:
    line = torch.ones(5, 1) * torch.arange(1.0, 4.0)
    assert float(metrics.effective_rank(line)) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics.mean_cosine(line)) == pytest.approx(1.0)
    assert float(metrics.stable_rank(torch.eye(6))) == pytest.approx(6.0)
    assert float(metrics.entropy(torch.zeros(3, 8))) == pytest.approx(np.log(8))
    assert float(metrics.sparsity()(torch.tensor([0.0, -0.0, 1.0, 2.0]))) == 0.5


def test_the_stable_rank_of_a_site_goes_on_from_its_last_vector() -> None:
    weight = tensor((40, 30), scale=1.0)
    warm = metrics.stable_rank.for_site()
    first = float(warm(weight))
    for _ in range(40):
        last = float(warm(weight))
    exact = stable_rank(weight.double().numpy())
    assert abs(last - exact) <= abs(first - exact) + 1e-6
    assert last == pytest.approx(exact, rel=1e-5)
    assert float(warm(tensor((4, 5)))) == pytest.approx(stable_rank(tensor((4, 5)).double().numpy()), rel=1e-3)


def test_write_ratio_equals_numpy() -> None:
    before, after = tensor((3, 8), 1), tensor((3, 8), 2)
    change = np.sqrt(np.square(after.double().numpy() - before.double().numpy()).mean())
    size = np.sqrt(np.square(before.double().numpy()).mean())
    assert float(metrics.write_ratio(before, after)) == pytest.approx(change / size, rel=1e-6)


def test_every_ready_metric_is_tested_and_known_by_its_name() -> None:
    assert set(metrics.READY) == set(CASES)
    assert tbhooks.metrics is metrics
