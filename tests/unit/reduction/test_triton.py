"""The Triton kernels say what the float64 reference says, run by Triton's interpreter where Triton is installed.

Whether they compile for a GPU, and how fast they are, is for a GPU to show.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tbhooks.data import stats
from tbhooks.reduction import histogram, triton
from tests.support import reference
from tests.support.tensors import DISTRIBUTIONS, SEEDS, assert_same_stats, every_value, reader, tensor_of

# Of the whole process, and from the first import of triton on: where there is a GPU, its own tests must run what was
# compiled, and where torch comes with triton it may be imported already, so these run only if they are asked for.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs the triton package, and TRITON_INTERPRET=1 as make test-triton sets it",
)

TYPES = sorted(triton.TYPES, key=str)


def run(tensor: Tensor, with_buckets: bool = True) -> tuple[np.ndarray, np.ndarray]:
    row = torch.full((stats.WIDTH,), -7.0, dtype=torch.float64)
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32)
    triton.launch(tensor, row, counts if with_buckets else None)
    return row.numpy(), counts.numpy()


def assert_right(tensor: Tensor) -> None:
    row, counts = run(tensor)
    data = reference.to_numpy(tensor)
    assert np.array_equal(counts[: stats.BUCKETS], reference.bucket_counts(data))
    assert counts.sum() == data.size
    assert_same_stats(reader(row), data)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.sampled_from(TYPES), st.sampled_from([*DISTRIBUTIONS]), SEEDS)
def test_every_statistic_and_every_count_equals_the_reference(
    n: int, dtype: torch.dtype, distribution: str, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "STRETCH", 64)
        patch.setattr(triton, "MOST_PROGRAMS", 3)
        assert_right(tensor_of((n,), dtype, distribution, "contiguous", seed))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_with_every_distribution(dtype: torch.dtype, distribution: str) -> None:
    assert_right(tensor_of((10_001,), dtype, distribution, "contiguous", 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_value_a_half_has(dtype: torch.dtype) -> None:
    assert_right(every_value(dtype))


def test_numbers_at_both_ends_of_the_range_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    assert_right(torch.tensor([largest, -largest] * 500))
    assert_right(torch.full((5000,), largest))
    assert_right(torch.tensor([largest, torch.inf, -torch.inf, torch.nan, 0.0, -0.0]))


def test_values_on_and_beside_every_edge() -> None:
    edges = torch.tensor(reference.EDGES, dtype=torch.float32)
    for sign in (1, -1):
        for beside in (edges, torch.nextafter(edges, torch.zeros(1)), torch.nextafter(edges, torch.full((1,), 1e38))):
            assert_right(sign * beside)


@pytest.mark.parametrize(("mean", "std"), [(300.0, 0.01), (1e4, 1e-2), (-1e6, 1.0)])
def test_a_small_spread_about_a_large_mean_is_not_lost(mean: float, std: float) -> None:
    torch.manual_seed(0)
    assert_right(torch.randn(100_000) * std + mean)


def test_without_buckets_the_row_is_the_same() -> None:
    tensor = tensor_of((9000,), torch.float32, "sprinkled", "contiguous", 3)
    row, counts = run(tensor, with_buckets=False)
    assert counts.sum() == 0
    assert np.array_equal(row, run(tensor)[0])


def test_counts_are_added_to_what_is_there() -> None:
    counts = torch.ones(histogram.SLOTS, dtype=torch.int32)
    triton.launch(torch.zeros(50), torch.zeros(stats.WIDTH, dtype=torch.float64), counts)
    assert counts[stats.MIDDLE] == 51
    assert counts.sum() == histogram.SLOTS + 50


def test_nothing_behind_the_record_is_touched() -> None:
    memory = torch.zeros(histogram.SLOTS + 200, dtype=torch.int32)
    triton.launch(torch.randn(5000), torch.zeros(stats.WIDTH, dtype=torch.float64), memory[: histogram.SLOTS])
    assert memory[histogram.SLOTS :].sum() == 0


def test_a_launch_that_fails_is_told_once_and_leaves_the_record_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32)
    tried: list[Tensor] = []

    def half_done(numbers: Tensor, _row: Tensor, counts: Tensor) -> None:
        tried.append(numbers)
        counts.fill_(3)
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(triton, "failure", "")
    monkeypatch.setattr(triton, "launch", half_done)
    for _ in range(2):
        assert not triton.reduce(torch.ones(3), torch.zeros(stats.WIDTH, dtype=torch.float64), counts)
    assert counts.sum() == 0
    assert len(tried) == 1
    assert triton.name() == "torch: RuntimeError: no ptxas"


def test_cpu_tensors_are_left_to_others() -> None:
    assert not triton.can_read(torch.ones(3))
