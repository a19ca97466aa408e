"""Rows merge exactly, and every statistic follows from the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError
from tests.support import reference
from tests.support.tensors import COMPUTED, EXACT, SHAPE, Array, assert_same_stats, reader, row_of

NUMBERS = st.floats(width=32)
ARRAYS = st.lists(NUMBERS, max_size=40).map(lambda numbers: np.array(numbers, dtype=np.float64))
PIECES = st.lists(st.lists(NUMBERS, max_size=8).map(lambda x: np.array(x, dtype=np.float64)), min_size=1, max_size=6)


def merged(rows: Sequence[Array]) -> Array:
    """All rows merged into one."""
    return stats.merge(np.stack(rows), np.zeros(len(rows), dtype=np.intp), 1)[0]


def assert_close(one: Array, other: Array) -> None:
    """Equal rows, up to rounding of the moments."""
    for column in (stats.COUNT, stats.MIN, stats.MAX, stats.ZEROS, stats.NANS, stats.INFS, stats.BASE):
        assert one[column] == other[column]
    size = max(abs(one[stats.MIN]), abs(one[stats.MAX])) if stats.finite(one) else 0.0
    assert one[stats.MEAN] == pytest.approx(other[stats.MEAN], rel=1e-9, abs=1e-12 * size)
    # The third moment of numbers below 1 is larger than the fourth, and so is its rounding.
    for column, scale in ((stats.M3, size**3), (stats.M4, size**4)):
        assert one[column] == pytest.approx(other[column], rel=1e-9, abs=1e-9 * max(one[stats.M4], scale, 1e-300))
    assert math.sqrt(one[stats.M2]) == pytest.approx(math.sqrt(other[stats.M2]), rel=1e-9, abs=1e-11 * size)


# --- Merging --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(PIECES)
def test_merged_pieces_equal_the_whole(pieces: list[Array]) -> None:
    assert_same_stats(reader(merged([row_of(piece) for piece in pieces])), np.concatenate(pieces), rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(PIECES, st.randoms(use_true_random=False))
def test_merge_is_commutative(pieces: list[Array], random: Any) -> None:
    rows = [row_of(piece) for piece in pieces]
    shuffled = rows[:]
    random.shuffle(shuffled)
    assert_close(merged(rows), merged(shuffled))


@settings(deadline=None, max_examples=100)
@given(ARRAYS, ARRAYS, ARRAYS)
def test_merge_is_associative(a: Array, b: Array, c: Array) -> None:
    x, y, z = row_of(a), row_of(b), row_of(c)
    assert_close(merged([merged([x, y]), z]), merged([x, merged([y, z])]))


@settings(deadline=None, max_examples=50)
@given(ARRAYS)
def test_merging_nothing_changes_nothing(data: Array) -> None:
    row, nothing = row_of(data), stats.empty_rows(1)[0]
    assert_close(merged([row]), row)
    assert_close(merged([nothing, row, nothing]), row)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), ARRAYS), max_size=8))
def test_rows_merge_by_owner(owned: list[tuple[int, Array]]) -> None:
    rows = np.array([row_of(data) for _, data in owned]).reshape(-1, stats.WIDTH)
    result = stats.merge(rows, np.array([owner for owner, _ in owned], dtype=np.intp), 4)
    for owner in range(4):
        whole = [data for o, data in owned if o == owner]
        assert_same_stats(reader(result[owner]), np.concatenate([np.zeros(0), *whole]), rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.lists(ARRAYS, min_size=1, max_size=4))
@example([np.array([-0.0]), np.array([-0.0, -1.0])])
@example([np.array([1e76, -1e76]), np.zeros(0), np.array([np.nan])])
def test_rows_that_are_merged_with_no_other_stay_the_same_to_the_bit(arrays: list[Array]) -> None:
    odd = stats.empty_rows(2)
    odd[0, [stats.COUNT, stats.NANS, stats.MEAN]] = 1, 1, 5.0  # a mean of nothing
    odd[1, [stats.COUNT, stats.M2]] = 3, 1e308  # six times that is infinite
    rows = np.array([row_of(data) for data in arrays])
    assert_merges_alone(rows)
    assert_merges_alone(np.concatenate([rows, odd[:1]]))
    assert_merges_alone(np.concatenate([rows, odd[1:]]))


def assert_merges_alone(rows: Array) -> None:
    n = len(rows)
    in_order = stats.merge(rows, np.arange(n), n)
    backwards = stats.merge(rows[::-1], np.arange(n)[::-1], n)  # goes the long way
    known = [column for column in range(stats.WIDTH) if column not in (stats.MIN, stats.MAX)]
    assert in_order[:, known].tobytes() == backwards[:, known].tobytes()
    extremes = rows[:, [stats.MIN, stats.MAX]]
    assert in_order[:, [stats.MIN, stats.MAX]].tobytes() == extremes.tobytes()


def test_an_owner_without_rows_gets_the_empty_row() -> None:
    result = stats.merge(row_of(np.ones(3))[None], np.array([1]), 3)
    assert np.array_equal(result[[0, 2]], stats.empty_rows(2))


def test_a_large_mean_does_not_cost_the_merged_spread() -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(1e4, 1e-2, 3000)
    rows = [row_of(piece) for piece in np.array_split(data, 37)]
    assert_same_stats(reader(merged(rows)), data)


def test_counts_stay_exact_past_what_float32_can_count() -> None:
    row = row_of(np.array([0.0, 1.0, np.nan, np.inf]))
    row[[stats.COUNT, stats.ZEROS, stats.NANS, stats.INFS]] = 2.0**24 + 1, 2.0**24 - 3, 1, 2
    total = merged([row] * 5)
    read = reader(total)
    assert read("count") == 5 * (2**24 + 1)
    assert total[stats.ZEROS] == 5 * (2**24 - 3)
    assert (read("nan_count"), read("inf_count")) == (5, 10)
    assert merged([total, row_of(np.zeros(1))])[stats.COUNT] == 5 * (2**24 + 1) + 1


def test_bases_add_up_as_sums_of_squares() -> None:
    rows = np.stack([row_of(np.array([3.0])), row_of(np.array([4.0]))])
    rows[:, stats.BASE] = 36.0, 64.0
    assert reader(merged(list(rows)))("ratio") == pytest.approx(5.0 / 10.0)


@settings(deadline=None, max_examples=50)
@given(PIECES, st.data())
def test_bucket_counts_merge_by_addition(pieces: list[Array], data: st.DataObject) -> None:
    owner = np.array([data.draw(st.integers(0, 2)) for _ in pieces], dtype=np.intp)
    result = stats.merge_counts(np.stack([reference.bucket_counts(piece) for piece in pieces]), owner, 3)
    for i in range(3):
        mine = np.concatenate([np.zeros(0), *(piece for piece, o in zip(pieces, owner, strict=True) if o == i)])
        assert np.array_equal(result[i], reference.bucket_counts(mine))


# --- What follows from a row ----------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(ARRAYS)
def test_every_statistic_of_a_row(data: Array) -> None:
    assert_same_stats(reader(row_of(data)), data, rel=1e-9)


def test_nothing_has_no_moments_and_no_fractions() -> None:
    read = reader(stats.empty_rows(1)[0])
    for name in (*COMPUTED, "min", "max", "abs_max", "zero_fraction"):
        assert math.isnan(read(name)), name
    for name in ("count", "nan_count", "inf_count"):
        assert read(name) == 0, name


@settings(deadline=None, max_examples=50)
@given(ARRAYS, st.floats(1e-30, 1e30))
def test_ratio_is_the_norm_against_the_base(data: Array, base: float) -> None:
    assume(np.isfinite(data).any())
    row = row_of(data)
    row[stats.BASE] = base**2
    assert reader(row)("ratio") == pytest.approx(reference.stats(data)["norm"] / base, rel=1e-9, abs=1e-300)


def test_the_ratio_to_a_weight_of_zero_is_undefined_and_not_infinite() -> None:
    assert math.isnan(reader(row_of(np.array([1.0, 2.0])))("ratio"))


def test_several_rows_are_read_at_once() -> None:
    data = [np.arange(5.0), np.zeros(0), np.array([np.nan, 2.0])]
    rows = np.stack([row_of(x) for x in data])
    counts = np.zeros((3, 0), dtype=np.int64)
    for name in stats.STATS:
        if name != "ratio":
            expected = [reference.stats(x)[name] for x in data]
            assert stats.stat(name, rows, counts) == pytest.approx(expected, nan_ok=True)


def test_an_unknown_stat_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"unknown stat 'sdt': did you mean 'std'"):
        stats.stat("sdt", stats.empty_rows(1), np.zeros((1, 0), dtype=np.int64))


def test_all_stat_names_are_known() -> None:
    assert set(stats.STAT_NAMES) == {
        *EXACT, *COMPUTED, *SHAPE, "ratio", "p01", "p25", "p50", "p75", "p99",
    }  # fmt: skip


def test_shape_is_that_of_the_population() -> None:
    values = np.array([1.0, 2.0, 2.0, 3.0, 12.0])
    away = values - 4.0
    read = reader(row_of(values))
    assert read("skewness") == pytest.approx(np.mean(away**3) / np.mean(away**2) ** 1.5)
    assert read("kurtosis") == pytest.approx(np.mean(away**4) / np.mean(away**2) ** 2)
    normal = reader(row_of(np.random.default_rng(0).normal(5.0, 3.0, 100_000)))
    assert normal("skewness") == pytest.approx(0.0, abs=0.05)
    assert normal("kurtosis") == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("values", [[], [7.0], [0.1] * 1000, [math.nan, 5.0, math.inf, 5.0]])
def test_equal_elements_have_no_shape(values: list[float]) -> None:
    read = reader(row_of(np.array(values)))
    assert math.isnan(read("skewness"))
    assert math.isnan(read("kurtosis"))


def test_merged_constants_have_the_shape_of_the_whole() -> None:
    pieces = [np.full(100, 2.0), np.full(300, 5.0), np.full(7, -1.0)]
    assert_same_stats(reader(merged([row_of(piece) for piece in pieces])), np.concatenate(pieces), rel=1e-12)


def test_a_row_of_unknown_moments_makes_only_those_unknown() -> None:
    old = stats.widened(row_of(np.arange(5.0))[None, :9])[0]
    both = reader(merged([old, row_of(np.arange(9.0))]))
    assert math.isnan(both("kurtosis"))
    assert math.isnan(both("skewness"))
    assert both("std") == pytest.approx(np.std([*range(5), *range(9)]))


# --- Buckets and quantiles ------------------------------------------------------------------------


def test_bucket_bounds_are_half_octaves_mirrored_around_zero() -> None:
    assert stats.BUCKETS == reference.BUCKETS == len(stats.LOWER) == len(stats.UPPER)
    positive = stats.MIDDLE + 1
    assert np.array_equal(stats.LOWER[positive:], reference.EDGES)
    assert np.array_equal(stats.UPPER[positive:], [*reference.EDGES[1:], np.inf])
    assert np.array_equal(stats.LOWER, -stats.UPPER[::-1])
    assert np.array_equal(stats.UPPER[:-1], stats.LOWER[1:])


def quantiles(data: Array) -> dict[str, float]:
    counts = reference.bucket_counts(data)
    return {name: float(stats.stat(name, row_of(data)[None], counts[None])[0]) for name in stats.QUANTILES}


def bucket_of(value: float) -> int:
    return int(np.flatnonzero(reference.bucket_counts(np.array([value])))[0])


@settings(deadline=None, max_examples=100)
@given(ARRAYS)
def test_a_quantile_lies_in_a_bucket_next_to_the_exact_one(data: Array) -> None:
    """No farther off than the bucket of the order statistic on either side of the exact quantile."""
    finite = np.sort(data[np.isfinite(data)])
    assume(finite.size)
    for name, value in quantiles(data).items():
        rank = stats.QUANTILES[name] * (finite.size - 1)
        below, above = bucket_of(finite[math.floor(rank)]), bucket_of(finite[math.ceil(rank)])
        assert stats.LOWER[below] <= value <= stats.UPPER[above], name
        assert finite[0] <= value <= finite[-1], name
        if below == above:
            width = min(stats.UPPER[below], finite[-1]) - max(stats.LOWER[below], finite[0])
            assert abs(value - reference.quantile(data, stats.QUANTILES[name])) <= width, name


@settings(deadline=None, max_examples=200)
@given(ARRAYS)
@example(np.array([0.0, -6.26729237e26]))
def test_quantiles_ascend(data: Array) -> None:
    assume(np.isfinite(data).any())
    values = [quantiles(data)[name] for name in ("p01", "p25", "p50", "p75", "p99")]
    assert values == sorted(values)


@settings(deadline=None, max_examples=100)
@given(st.floats(width=64, allow_nan=False, allow_infinity=False), st.integers(1, 50))
def test_quantiles_of_a_constant_are_exact(value: float, n: int) -> None:
    assume(abs(value) < 1e150)
    assert set(quantiles(np.full(n, value)).values()) == {value}


def test_quantiles_without_finite_values_are_unknown() -> None:
    for data in (np.zeros(0), np.full(3, np.nan), np.full(3, np.inf)):
        assert all(math.isnan(value) for value in quantiles(data).values())


def test_quantiles_without_buckets_are_unknown() -> None:
    rows = np.stack([row_of(np.arange(4.0))] * 2)
    for name in stats.QUANTILES:
        assert np.isnan(stats.stat(name, rows, np.zeros((2, 0), dtype=np.int64))).all()


@settings(deadline=None, max_examples=100)
@given(ARRAYS)
def test_a_quantile_needs_no_buckets_beyond_the_used_ones(data: Array) -> None:
    assume(np.isfinite(data).any())
    row, counts = row_of(data)[None], reference.bucket_counts(data)[None]
    used = np.flatnonzero(counts[0])
    first, last = max(int(used[0]) - 1, 0), int(used[-1]) + 2
    for q in stats.QUANTILES.values():
        assert stats.quantile(row, counts[:, first:last], q, first) == stats.quantile(row, counts, q)


def test_a_quantile_that_falls_among_zeros_is_zero() -> None:
    values = np.maximum(np.random.default_rng(0).normal(size=1000), 0.0)
    row, counts = row_of(values)[None], reference.bucket_counts(values)[None]
    for q in (0.01, 0.25, 0.4):
        assert stats.quantile(row, counts, q)[0] == 0.0
    assert stats.quantile(row, counts, 0.75)[0] > 0
