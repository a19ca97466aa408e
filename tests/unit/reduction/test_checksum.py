"""Checksums of bits: the same in C, with torch operations and on a device, in any order, and another for any change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tbhooks.data import checksums
from tbhooks.reduction import checksum, cpu
from tests.support import fake_device, reference
from tests.support.tensors import DISTRIBUTIONS, LAYOUTS, SEEDS, tensor_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def checksum_of(tensor: Tensor) -> int:
    words = checksum.bits_of(tensor)
    assert words is not None
    sums, squares = checksum.sums(words).cpu().tolist()
    return checksums.combine(sums, squares, words.numel())


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 400), st.sampled_from(DTYPES), st.sampled_from([*DISTRIBUTIONS]), st.sampled_from([*LAYOUTS]), SEEDS
)
def test_it_is_the_sum_over_the_words_in_c_and_with_torch(
    n: int, dtype: torch.dtype, distribution: str, layout: str, seed: int
) -> None:
    tensor = tensor_of((n, 2, 2, 2), dtype, distribution, layout, seed)
    expected = reference.checksum(tensor)
    assert checksum_of(tensor) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "library", None)
        patch.setattr(checksum, "_LONGEST", 100)
        assert checksum_of(tensor) == expected
        assert checksum_of(fake_device.put(tensor)) == expected


@pytest.mark.skipif(cpu.library is None, reason="built without the C kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    tensor = torch.randn(300_001).to(dtype)
    words = checksum.bits_of(tensor)
    assert words is not None
    assert cpu.sum_words(words).tolist() == checksum._sums_by_torch(words).tolist()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES), SEEDS, st.data())
def test_a_flipped_bit_always_changes_it(dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = tensor_of((50,), dtype, "normal", "contiguous", seed)
    bit = data.draw(st.integers(0, 8 * dtype.itemsize * 50 - 1))
    flipped = tensor.clone()
    flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum_of(tensor) != checksum_of(flipped)


def test_two_elements_that_move_by_one_bit_in_opposite_directions_change_it() -> None:
    words = torch.tensor([1000, 2000, 3000], dtype=torch.int32)
    moved = torch.tensor([1001, 1999, 3000], dtype=torch.int32)
    assert checksum_of(words.view(torch.float32)) != checksum_of(moved.view(torch.float32))


def test_the_order_does_not_matter_but_the_number_of_zeros_does() -> None:
    tensor = torch.randn(100)
    assert checksum_of(tensor) == checksum_of(tensor.flip(0))
    assert checksum_of(torch.zeros(3)) != checksum_of(torch.zeros(4))
    assert checksum_of(torch.zeros(3)) != checksum_of(-torch.zeros(3))


def test_checksums_of_parts_add_up() -> None:
    one, other = torch.randn(30), torch.randn(7)
    assert (checksum_of(one) + checksum_of(other)) % 2**64 == checksum_of(torch.cat([one, other]))


def test_complex_numbers_and_eight_bits_have_one_integers_and_sparse_tensors_have_none() -> None:
    assert checksum_of(torch.randn(5, dtype=torch.complex64).fill_(1j)) == reference.checksum(
        torch.tensor([0.0, 1.0] * 5)
    )
    eight = torch.randn(64).to(torch.float8_e4m3fn)
    assert checksum_of(eight) == reference.checksum(eight)
    assert checksum.bits_of(torch.arange(3)) is None
    assert checksum.bits_of(torch.eye(3).to_sparse()) is None
