"""Modules of the same role are found by their paths, and summarised without letting one outlier hide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbhooks.data.roles import Groups, gains, parameter_traits, pattern, robust_z, roles


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers.*.self_attn.q_proj"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("features.12", "features.*"),
        ("0", "*"),
        ("h.11.attn[0]", "h.*.attn[0]"),
        ("h.2.attn:softmax.entropy", "h.*.attn:softmax.entropy"),
        ("(root)", "(root)"),
        ("conv1", "conv1"),
    ],
)
def test_a_number_between_dots_is_left_out_of_a_role_and_a_number_in_a_name_is_not(name: str, expected: str) -> None:
    assert pattern(name) == expected


def test_modules_of_the_same_role_are_one_group_in_the_order_of_execution() -> None:
    names = ["embed", "h.0.q", "h.0.mlp", "h.1.q", "h.1.mlp", "head"]
    assert [(role.name, role.members) for role in roles(names)] == [
        ("embed", (0,)), ("h.*.q", (1, 3)), ("h.*.mlp", (2, 4)), ("head", (5,)),
    ]  # fmt: skip


def test_the_parameters_of_modules_tell_apart_what_the_numbers_of_a_sequential_cannot() -> None:
    names = ["0", "1", "2", "3", "2[0]"]
    traits = parameter_traits(names, ["0.weight", "0.bias", "2.weight", "2.bias"])
    assert [(role.name, role.members) for role in roles(names, traits)] == [
        ("* (weight, bias)", (0, 2)), ("*", (1, 3)), ("*[0]", (4,)),
    ]  # fmt: skip


def test_a_summary_names_the_least_and_the_most_and_skips_what_is_not_finite() -> None:
    numbers = np.array([9.0, 3.0, np.nan, 1.0, np.inf, 8.0])
    found, unknown = Groups([np.arange(1, 6), np.array([2])]).summaries(numbers)
    assert (found.median, found.least, found.most, found.least_at, found.most_at) == (3.0, 1.0, 8.0, 2, 4)
    assert unknown.least_at == unknown.most_at == -1
    assert math.isnan(unknown.median)


@given(
    st.lists(st.floats() | st.integers(-2, 2).map(float), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 10**6), max_size=40), max_size=8),
)
def test_groups_of_any_size_are_summarised_as_each_alone(numbers: list[float], places: list[list[int]]) -> None:
    values = np.array(numbers)
    groups = [np.array([place % len(values) for place in group], np.intp) for group in places]
    found = Groups(groups).summaries(values)
    assert len(found) == len(groups)
    for summary, group in zip(found, groups, strict=True):
        own = values[group]
        known = own[np.isfinite(own)]
        if not len(known):
            assert (summary.least_at, summary.most_at) == (-1, -1)
            continue
        with np.errstate(over="ignore"):
            assert summary.median == np.median(known)
        assert (summary.least, summary.most) == (known.min(), known.max())
        assert (summary.least_at, summary.most_at) == (own.tolist().index(known.min()), own.tolist().index(known.max()))


def test_one_dead_layer_among_equal_ones_is_the_most_unusual() -> None:
    values = np.array([0.58, 0.57, 0.59, 1.0, 0.58, 0.6, 0.56])
    scores = robust_z(values)
    assert int(np.nanargmax(np.abs(scores))) == 3
    assert scores[3] > 10
    assert np.abs(np.delete(scores, 3)).max() < 3


def test_rounding_errors_in_a_group_of_equal_values_are_not_unusual() -> None:
    assert np.abs(robust_z(np.array([1.0, 1.0, 1.0, 1.0 + 1e-7]))).max() < 0.01


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_scores_grow_with_the_values_and_the_median_has_none(numbers: list[float]) -> None:
    scores = robust_z(np.array(numbers))
    order = np.argsort(numbers, kind="stable")
    assert all(a <= b or math.isnan(a) for a, b in zip(scores[order], scores[order][1:], strict=False))
    assert min(np.abs(scores)) == 0 or len(numbers) % 2 == 0


def test_the_gain_of_a_site_is_the_rms_before_it_in_its_role_over_its_own() -> None:
    names = ["head", "layers.10", "layers.2", "layers.2.fc", "layers.10.fc", "layers.0"]  # gradients come last to first
    rms = np.array([9.0, 2.0, 8.0, 3.0, 0.0, 4.0])
    expected = [np.nan, 4.0, 0.5, np.nan, np.inf, np.nan]
    np.testing.assert_array_equal(gains(names, rms), expected)
    np.testing.assert_array_equal(gains(names, np.stack([rms, 2 * rms], axis=1))[:, 1], expected)
