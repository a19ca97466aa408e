"""Bucket counts are exact; quantiles, underflow and overflow follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import KINDS, Reading, Site
from tbhooks.reduction import histogram
from tests.support import reference
from tests.support.tensors import DISTRIBUTIONS, LAYOUTS, NARROW, REAL, every_value, reduced, tensor_of

pytestmark = pytest.mark.usefixtures("both_kernels")

WIDE = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)


def assert_counts(tensor: Tensor) -> None:
    data = reference.to_numpy(tensor)
    counts = reduced(tensor).counts
    assert np.array_equal(counts, reference.bucket_counts(data))
    assert counts.sum() == np.isfinite(data).sum()


# --- Counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_values_on_just_below_and_just_above_every_edge(dtype: torch.dtype) -> None:
    edges = torch.tensor(reference.EDGES, dtype=dtype)
    beyond = torch.tensor([torch.inf], dtype=dtype)
    for sign in (1, -1):
        assert_counts(sign * edges)
        assert_counts(sign * torch.nextafter(edges, -beyond))
        assert_counts(sign * torch.nextafter(edges, beyond))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_value_a_narrow_type_has_is_in_its_bucket(dtype: torch.dtype) -> None:
    assert_counts(every_value(dtype))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_ends_of_the_type(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    ends = [0.0, info.smallest_normal, info.smallest_normal / 4, info.max, info.eps, math.inf]
    tensor = torch.tensor([*ends, *(-x for x in ends), math.nan, -math.nan], dtype=dtype)
    assert_counts(tensor)
    counts = reduced(tensor).counts
    assert counts[stats.MIDDLE] == 6
    assert counts[0] == counts[-1] == 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=64), max_size=60), st.sampled_from(WIDE + HALVES))
def test_any_numbers_are_counted_exactly(numbers: list[float], dtype: torch.dtype) -> None:
    assert_counts(torch.tensor(numbers, dtype=torch.float64).to(dtype))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(REAL), st.sampled_from([*DISTRIBUTIONS]), st.sampled_from([*LAYOUTS]), st.integers(0, 999))
def test_every_type_distribution_and_layout(dtype: torch.dtype, distribution: str, layout: str, seed: int) -> None:
    assert_counts(tensor_of((2, 3, 4, 5), dtype, distribution, layout, seed))


def test_empty_and_zero_dimensional_tensors() -> None:
    assert_counts(torch.zeros(0))
    assert_counts(torch.zeros(3, 0, 2, dtype=torch.float16))
    assert_counts(torch.tensor(-3.0))


def test_complex_numbers_are_counted_by_their_magnitude() -> None:
    assert_counts(tensor_of((40, 5), torch.complex128, "normal", "contiguous", 0))


# --- Quantiles ------------------------------------------------------------------------------------

SMOOTH: dict[str, Callable[[np.random.Generator], NDArray[np.float64]]] = {
    "normal": lambda rng: rng.normal(size=20_000),
    "uniform": lambda rng: rng.uniform(-1, 1, size=20_000),
    "lognormal": lambda rng: rng.lognormal(size=20_000),
    "student_t": lambda rng: rng.standard_t(4, size=20_000),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_quantiles_of_smooth_distributions_are_within_five_percent(name: str) -> None:
    """At any scale, so wherever the edges fall; a quantile next to zero is judged against the spread."""
    for seed, scale in enumerate(2.0 ** np.arange(0, 1, 0.125)):
        data = (scale * SMOOTH[name](np.random.default_rng(seed))).astype(np.float32)
        reading, std = reduced(torch.from_numpy(data)), reference.stats(data)["std"]
        for q in ("p01", "p25", "p50", "p75", "p99"):
            exact = reference.quantile(data, stats.QUANTILES[q])
            assert abs(getattr(reading, q) - exact) <= 0.05 * max(abs(exact), 0.05 * std), (q, scale)


@pytest.mark.parametrize("name", SMOOTH)
def test_quantiles_are_never_farther_off_than_their_bucket(name: str) -> None:
    data = SMOOTH[name](np.random.default_rng(0)).astype(np.float32)
    reading = reduced(torch.from_numpy(data))
    for q, share in stats.QUANTILES.items():
        exact = reference.quantile(data, share)
        bucket = np.searchsorted(stats.UPPER, exact, side="right")
        assert stats.LOWER[bucket] <= getattr(reading, q) <= stats.UPPER[bucket], q


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -7.25, 1e-30, 3e38, -1e-44])
def test_quantiles_of_a_constant_tensor_are_exact(value: float) -> None:
    reading = reduced(torch.full((100,), value))
    assert {getattr(reading, q) for q in stats.QUANTILES} == {float(np.float32(value))}


# --- Underflow and overflow -----------------------------------------------------------------------

FORMATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _lost(tensor: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Shares that really become zero, and that really leave the range; some casts clamp instead of overflowing."""
    cast = tensor.to(dtype).float()
    finite = tensor.isfinite()
    under = (tensor != 0) & finite & (cast == 0)
    over = finite & (~cast.isfinite() | (tensor.abs() > torch.finfo(dtype).max))
    return float(under.double().mean()), float(over.double().mean())


def _inside_buckets(seed: int, lowest: int, highest: int, n: int = 4000) -> Tensor:
    """Numbers in the middle of half octaves, so that no threshold runs through what a bucket holds."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.75, -1.25, 1.25, 1.75], n) * 2.0 ** rng.integers(lowest, highest, n)
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("lowest", "highest"), [(-60, 40), (-30, -5), (-12, 20), (5, 18), (0, 3)])
def test_underflow_and_overflow_equal_a_real_cast(dtype: torch.dtype, lowest: int, highest: int) -> None:
    tensor = _inside_buckets(0, lowest, highest)
    tensor[::7] = 0.0
    tensor[::11] = math.nan
    tensor[::13] = math.inf
    under, over = _lost(tensor, dtype)
    for spelled in (dtype, str(dtype), str(dtype).removeprefix("torch.")):
        assert reduced(tensor).underflow_fraction(spelled) == pytest.approx(under, abs=1e-12)
        assert reduced(tensor).overflow_fraction(spelled) == pytest.approx(over, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_below_the_lowest_bucket_underflow_and_zeros_do_not(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, -0.0, 1e-30, -1e-40, 1.0, 1.0, 1.0, 1.0])
    assert reduced(tensor).underflow_fraction(dtype) == _lost(tensor, dtype)[0] == 0.25


def test_what_the_buckets_cannot_tell_about_a_format_is_unknown() -> None:
    tiny, huge = torch.tensor([0.0, 1e-39, 1.0]), torch.tensor([3.4e38, 1.0])
    assert math.isnan(reduced(tiny).underflow_fraction("bfloat16"))
    assert math.isnan(reduced(huge).overflow_fraction("bfloat16"))
    assert reduced(torch.tensor([0.0, 1.0])).underflow_fraction("bfloat16") == 0.0
    assert reduced(torch.tensor([1e38, 1.0])).overflow_fraction("bfloat16") == 0.0


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_nothing_neither_underflows_nor_overflows(dtype: torch.dtype) -> None:
    assert math.isnan(reduced(torch.zeros(0)).underflow_fraction(dtype))
    assert math.isnan(reduced(torch.zeros(0)).overflow_fraction(dtype))


def _without_buckets() -> Reading:
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=False)
    recorder.record(recorder.number(Site("layer", "activation")), torch.tensor([1e-9, 1.0]))
    return recorder.pack(0, 0).frames()[-1]["layer", "activation"]


@pytest.mark.parametrize("method", ["underflow_fraction", "overflow_fraction"])
def test_without_buckets_underflow_and_overflow_are_unknown(method: str) -> None:
    assert math.isnan(getattr(_without_buckets(), method)("float16"))


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"unknown number format 'float15': did you mean 'float16'"):
        reduced(torch.ones(2)).underflow_fraction("float15")
    with pytest.raises(ArgumentError, match="int8"):
        reduced(torch.ones(2)).overflow_fraction(torch.int8)


def test_the_first_tensor_read_may_be_of_any_class_and_spoils_nothing_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    monkeypatch.setattr(histogram, "_tables", {})
    numbers = torch.linspace(-3, 3, 100)
    histogram.add_counts(TwoTensor(numbers, numbers), TwoTensor(*2 * [torch.zeros(histogram.SLOTS, dtype=torch.int32)]))
    counts = torch.zeros(histogram.SLOTS, dtype=torch.int32)
    histogram.add_counts(numbers, counts)
    assert type(counts) is Tensor
    assert counts.sum() == 100
    assert [type(table) for table in histogram._tables.values()] == [Tensor]
