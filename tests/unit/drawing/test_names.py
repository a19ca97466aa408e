"""Names that are shortened: they fit if they can, and two names never become the same text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tbhooks.drawing.names import shorten, shorten_all


def test_names_that_fit_stay() -> None:
    assert shorten_all(["encoder.0", "encoder.1"], 9) == (["encoder.0", "encoder.1"], "")
    assert shorten_all([], 9) == ([], "")


def test_the_prefix_that_long_names_share_goes_first() -> None:
    names = ["head", *(f"transformer.encoder.layers.{i}.mlp" for i in range(12))]
    shorter, prefix = shorten_all(names, 20)
    assert prefix == "transformer.encoder.layers."
    assert shorter == ["head", *(f"…{i}.mlp" for i in range(12))]


def test_the_middle_goes_next_and_only_as_far_as_names_stay_different() -> None:
    assert shorten("abcdefghij", 5) == "ab…ij"
    names = [f"{'x' * 50}{i}{'y' * 50}" for i in range(3)]
    shorter, prefix = shorten_all(names, 20)
    assert prefix == ""
    assert len(set(shorter)) == 3
    assert all(len(name) <= 102 for name in shorter)


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab./…", max_size=30)), st.integers(1, 20))
def test_different_names_stay_different_and_equal_ones_equal(names: list[str], width: int) -> None:
    shorter, _ = shorten_all(names, width)
    assert len(shorter) == len(names)
    assert len(set(shorter)) == len(set(names))
    assert len(set(zip(names, shorter, strict=True))) == len(set(names))
