"""A tensor of any type, shape and layout reduces to the row that the float64 reference would give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tbhooks.capture.recording import recorder as buffer
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.frame import KINDS
from tbhooks.reduction import torch_rows
from tests.support import fake_device, reference
from tests.support.tensors import (
    DISTRIBUTIONS,
    LAYOUTS,
    NARROW,
    REAL,
    SEEDS,
    SITE,
    assert_same_stats,
    every_value,
    reduced,
    tensor_of,
)

pytestmark = pytest.mark.usefixtures("both_kernels")


def assert_reduces(tensor: Tensor, **tolerance: float) -> None:
    reading = reduced(tensor)
    assert_same_stats(lambda name: getattr(reading, name), reference.to_numpy(tensor), **tolerance)


SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=5).map(tuple),
    st.sampled_from([(), (0,), (1,), (1, 1, 1), (3, 0, 2), (2, 3, 4, 5), (997,), (40, 50)]),
)


# --- The promise ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(SHAPES, st.sampled_from(REAL), st.sampled_from([*DISTRIBUTIONS]), st.sampled_from([*LAYOUTS]), SEEDS)
@example((2, 3, 8, 8), torch.float32, "normal", "channels_last", 0)
@example((), torch.float16, "sprinkled", "contiguous", 0)
@example((0, 4), torch.float8_e5m2, "normal", "expanded", 0)
def test_every_statistic_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, distribution: str, layout: str, seed: int
) -> None:
    assert_reduces(tensor_of(shape, dtype, distribution, layout, seed))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_type_with_every_distribution(dtype: torch.dtype, distribution: str) -> None:
    assert_reduces(tensor_of((17, 5, 13), dtype, distribution, "transposed", seed=1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
def test_every_type_in_every_layout(dtype: torch.dtype, layout: str) -> None:
    assert_reduces(tensor_of((2, 3, 4, 5), dtype, "sprinkled", layout, seed=2), exact_rel=1e-6 * dtype.is_complex)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_value_a_narrow_type_has(dtype: torch.dtype) -> None:
    assert_reduces(every_value(dtype))


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.sampled_from(["normal", "equal", "sprinkled", "all_nan", "relu", "outlier"]), SEEDS)
def test_complex_numbers_count_by_their_magnitude(shape: tuple[int, ...], distribution: str, seed: int) -> None:
    tensor = tensor_of(shape, torch.complex64, distribution, "contiguous", seed)
    assert_reduces(tensor, exact_rel=1e-6)
    assert_reduces(tensor.to(torch.complex128), exact_rel=1e-12)


@pytest.mark.parametrize("distribution", ["large_mean", "denormal", "beyond_float32"])
def test_complex_magnitudes_are_as_exact_as_real_numbers(distribution: str) -> None:
    if distribution == "beyond_float32":
        tensor = torch.full((3,), 3e38 + 3e38j, dtype=torch.complex64)
    else:
        tensor = tensor_of((500,), torch.complex64, distribution, "contiguous", 0)
    assert_reduces(tensor, exact_rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 400), st.integers(1, 50), st.sampled_from(REAL), st.sampled_from([*DISTRIBUTIONS]), SEEDS)
def test_a_tensor_read_in_parts_gives_the_same(
    n: int, part: int, dtype: torch.dtype, distribution: str, seed: int
) -> None:
    tensor = tensor_of((n,), dtype, distribution, "contiguous", seed)
    whole = reduced(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "PART", part)
        patch.setattr(reducers, "MOST_PARTS", 10**9)
        assert_reduces(tensor)
        assert np.array_equal(reduced(tensor).counts, whole.counts)


def test_a_long_tensor_takes_as_many_records_as_it_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "PART", 10)
    monkeypatch.setattr(reducers, "MOST_PARTS", 10**9)
    monkeypatch.setattr(buffer, "MOST_COUNT", 10)  # the C kernel needs no temporaries, and so no smaller parts
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=False)
    assert recorder.record(recorder.number(SITE), torch.zeros(10)) == (0, 0, 1)
    assert recorder.record(recorder.number(SITE), torch.zeros(5, 5)) == (0, 1, 4)


def test_a_parameter_that_needs_grad_is_read_without_a_graph() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert_reduces(weight)
    assert_reduces((weight * 2).T)
    assert weight.grad is None


def test_reading_changes_no_element_and_no_version() -> None:
    tensor = tensor_of((50,), torch.float32, "sprinkled", "contiguous", 0)
    before, version = tensor.clone(), tensor._version
    reduced(tensor)
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))
    assert tensor._version == version


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_that_overflow_a_half_do_not_overflow_here(dtype: torch.dtype) -> None:
    assert_reduces(torch.full((5000,), 60000.0, dtype=dtype))


@pytest.mark.parametrize("put", [lambda x: x, fake_device.put], ids=["cpu", "device"])
def test_shape_about_a_large_mean_is_that_of_numpy(put: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    tensor = torch.cat([torch.randn(5000) * 0.01 + 300, torch.tensor([300.5])])
    reading, values = reduced(put(tensor)), tensor.double().numpy()
    away = values - values.mean()
    assert reading.kurtosis == pytest.approx(np.mean(away**4) / np.var(values) ** 2, rel=1e-9)
    assert reading.skewness == pytest.approx(np.mean(away**3) / np.std(values) ** 3, rel=1e-9)
    assert reading.kurtosis > 100


def test_equal_elements_have_no_shape() -> None:
    for tensor in (torch.full((5000,), 0.1), torch.tensor([5.1] * 99 + [torch.nan]), torch.zeros(0)):
        for reading in (reduced(tensor), reduced(fake_device.put(tensor))):
            assert np.isnan([reading.skewness, reading.kurtosis]).all()


def test_a_single_value_has_no_spread() -> None:
    reading = reduced(torch.tensor(0.1))
    assert reading.std == 0.0
    assert reading.mean == reading.min == reading.max == reading.p50 == float(np.float32(0.1))


# --- What cannot be read --------------------------------------------------------------------------

UNREADABLE: dict[str, Callable[[], Tensor]] = {
    "int64 tensor": lambda: torch.arange(4),
    "bool tensor": lambda: torch.tensor([True, False]),
    "uint8 tensor": lambda: torch.zeros(2, dtype=torch.uint8),
    "quint8 tensor": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8),
    "nested float32 tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "float32 tensor of layout torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_holds_no_real_numbers_is_described_and_takes_no_record(what: str) -> None:
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=True)
    tensor = UNREADABLE[what]()
    assert recorder.record(recorder.number(SITE), tensor) is None
    assert recorder.pack(0, 0).frames() == []
    assert torch_rows.describe(tensor) == what


# --- No copy where none is needed -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "channels_last"])
def test_dense_memory_is_flattened_in_place(layout: str) -> None:
    tensor = tensor_of((2, 3, 4, 5), torch.float32, "normal", layout, 0)
    flat = torch_rows.flat(tensor)
    assert flat.dim() == 1
    assert flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
