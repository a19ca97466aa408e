"""The norm over many tensors is that of all their elements together, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tbhooks.capture.parameters.grad_norm import total_norm
from tbhooks.reduction import torch_rows
from tests.support import fake_device, reference

pytestmark = pytest.mark.usefixtures("both_kernels")


def expected(tensors: list[Tensor]) -> float:
    return float(np.linalg.norm(np.concatenate([reference.to_numpy(tensor).ravel() for tensor in tensors])))


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    shift=st.sampled_from([0.0, 100.0]),
)
def test_the_norm_is_that_of_all_elements(sizes: list[int], dtype: torch.dtype, scale: float, shift: float) -> None:
    tensors = [(torch.randn(size) * scale + shift).to(dtype) for size in sizes]
    assert float(total_norm(tensors)) == pytest.approx(expected(tensors), rel=1e-6)


def test_squares_that_overflow_in_half_precision_are_summed_correctly() -> None:
    tensors = [torch.full((64, 64), 6e4, dtype=torch.float16), torch.full((3,), 3e38)]
    assert float(total_norm(tensors)) == pytest.approx(expected(tensors), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_nonfinite_element_makes_the_norm_nonfinite(bad: float) -> None:
    tensors = [torch.ones(10), torch.tensor([1.0, bad]), torch.ones(3)]
    norm = float(total_norm(tensors))
    assert math.isnan(norm) if math.isnan(bad) else math.isinf(norm)


def test_layouts_and_sparse_tensors_count_their_elements_once() -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 8)
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    tensors = [
        wide.t(),
        wide[:, ::2],
        wide.expand(2, 6, 8),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    assert float(total_norm([*tensors, twice])) == pytest.approx(expected([*tensors, twice.to_dense()]), rel=1e-6)


def test_on_a_device_there_is_no_sync() -> None:
    with fake_device.Log() as record:
        norm = total_norm([fake_device.put(torch.full((3,), 2.0)), fake_device.put(torch.full((1,), 2.0))])
        assert record.syncs == 0
        assert not record.copies
    assert float(norm) == pytest.approx(4.0)


@pytest.mark.parametrize("has_float64", [True, False])
@pytest.mark.parametrize("value", [1e-24, 1e-30, 1.0, 3e18, 1e30])
def test_on_a_device_the_norm_neither_overflows_nor_vanishes(
    monkeypatch: pytest.MonkeyPatch, value: float, has_float64: bool
) -> None:
    monkeypatch.setattr(torch_rows, "has_float64", lambda _: has_float64)
    tensors = [torch.full((1000,), value), torch.full((7,), value)]
    norm = total_norm([fake_device.put(tensor) for tensor in tensors])
    assert float(norm) == pytest.approx(expected(tensors), rel=1e-6)


def test_without_float64_the_norm_of_zeros_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rows, "has_float64", lambda _: False)
    assert float(total_norm([fake_device.put(torch.zeros(5))])) == 0.0
