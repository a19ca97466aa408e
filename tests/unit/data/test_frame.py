"""Frames read by path and kind, explain what is missing, never change, and survive a round trip."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError, TbhooksError, UnknownSiteError
from tbhooks.data.frame import Finding, Frame, Site
from tests.support import reference
from tests.support.tensors import assert_same_stats, row_of

DATA = {
    Site("encoder.0", "activation"): np.array([1.0, -2.0, 0.0, np.nan]),
    Site("encoder.1", "activation", "[hidden]"): np.array([np.inf, -np.inf]),
    Site("encoder.0", "gradient"): np.array([1e-30, 1e30]),
    Site("encoder.0.weight", "weight"): np.arange(10.0),
}
FINDING = Finding(3, Site("encoder.0", "activation"), "non_finite", "error", "1 NaN", {"nan_count": 1})


def make(*, with_buckets: bool = True, **changes: Any) -> Frame:
    counts = [reference.bucket_counts(data) for data in DATA.values()]
    fields: dict[str, Any] = {
        "step": 3, "time": 1.5, "rank": 0, "sites": tuple(DATA),
        "values": np.stack([row_of(data) for data in DATA.values()]),
        "buckets": np.stack(counts) if with_buckets else np.zeros((len(DATA), 0), dtype=np.int64),
        "findings": (FINDING,), "scalars": {"train/loss": 0.25},
    }  # fmt: skip
    return Frame(**{**fields, **changes})


# --- Reading --------------------------------------------------------------------------------------


def test_a_site_is_read_by_path_and_kind() -> None:
    frame = make()
    for site, data in DATA.items():
        reading = frame[site.name, site.kind]
        assert reading.site == site
        assert_same_stats(lambda name, reading=reading: getattr(reading, name), data, rel=1e-9)


def test_one_of_several_outputs_is_read_by_its_index() -> None:
    frame = make()
    assert frame["encoder.1[hidden]", "activation"].inf_count == 2
    assert ("encoder.1[hidden]", "activation") in frame
    assert ("encoder.1", "activation") not in frame


def test_containment_asks_for_path_and_kind() -> None:
    frame = make()
    assert ("encoder.0", "gradient") in frame
    assert ("encoder.0", "weight") not in frame
    assert "encoder.0" not in frame


def test_a_stat_of_all_sites_comes_in_their_order() -> None:
    frame = make()
    assert frame.stat("count").tolist() == [4, 2, 2, 10]
    for name in ("mean", "p50", "nan_count"):
        read = [getattr(frame[site.name, site.kind], name) for site in frame.sites]
        assert frame.stat(name) == pytest.approx(read, nan_ok=True)


def test_quantiles_need_buckets() -> None:
    assert 4.0 <= make()["encoder.0.weight", "weight"].p50 <= 6.0
    bare = make(with_buckets=False)
    assert math.isnan(bare["encoder.0.weight", "weight"].p50)
    assert np.isnan(bare.stat("p99")).all()
    assert bare["encoder.0.weight", "weight"].mean == 4.5


def test_a_site_names_itself() -> None:
    assert str(Site("encoder.0", "activation", "[1][0]")) == "activation/encoder.0[1][0]"
    assert Site("a", "weight").name == "a"


# --- Errors ---------------------------------------------------------------------------------------


def test_an_unknown_path_names_the_nearest_of_that_kind() -> None:
    with pytest.raises(UnknownSiteError, match=r"encodr\.0.*step 3.*did you mean 'encoder\.0'") as caught:
        make()["encodr.0", "gradient"]
    assert "weight" not in str(caught.value)


def test_an_unknown_path_of_an_unknown_kind_still_names_sites() -> None:
    with pytest.raises(UnknownSiteError, match=r"did you mean 'encoder\.0\.weight'"):
        make()["encoder.0.weigth", "wieght"]


def test_an_unknown_kind_names_the_kinds_of_that_path() -> None:
    with pytest.raises(UnknownSiteError, match=r"no activations of 'encoder\.0'.*did you mean 'activation'"):
        make()["encoder.0", "activations"]
    with pytest.raises(UnknownSiteError, match=r"no zzz of 'encoder\.0'.*choose from 'activation', 'gradient'"):
        make()["encoder.0", "zzz"]


def test_an_unknown_site_is_a_key_error_with_a_readable_message() -> None:
    with pytest.raises(KeyError) as caught:
        make()["x", "activation"]
    assert isinstance(caught.value, TbhooksError)
    assert not str(caught.value).startswith("'")


def test_an_unknown_stat_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no stat 'stdd': did you mean 'std'"):
        make()["encoder.0", "activation"].stdd
    with pytest.raises(ArgumentError, match=r"did you mean 'norm'"):
        make().stat("norms")


@pytest.mark.parametrize("key", ["encoder.0", 3, ("encoder.0",), ("a", "b", "c")])
def test_a_key_of_another_form_is_explained(key: Any) -> None:
    with pytest.raises(ArgumentError, match=r'frame\["path", "kind"\]'):
        make()[key]


@pytest.mark.parametrize(
    ("field", "shape"), [("values", (3, 11)), ("values", (4, 8)), ("buckets", (4, 384)), ("buckets", (3, 0))]
)
def test_arrays_that_do_not_fit_the_sites_are_rejected(field: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"a frame of 4 sites needs values of shape \(4, 11\)"):
        make(**{field: np.zeros(shape)})


# --- Immutability ---------------------------------------------------------------------------------


def test_numbers_cannot_be_changed() -> None:
    frame = make()
    reading = frame["encoder.0", "activation"]
    for array in (frame.values, frame.buckets, reading.row, reading.counts):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_fields_cannot_be_replaced() -> None:
    frame = make()
    for thing, name in ((frame, "step"), (frame, "values"), (frame.sites[0], "path"), (FINDING, "message")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, None)
    with pytest.raises(FrozenInstanceError):
        frame["encoder.0", "activation"].row = np.zeros(9)  # type: ignore[misc]


def test_scalars_cannot_be_changed_not_even_through_what_was_passed() -> None:
    given_scalars = {"train/loss": 1.0}
    frame = make(scalars=given_scalars)
    with pytest.raises(TypeError):
        frame.scalars["train/loss"] = 2.0  # type: ignore[index]
    given_scalars["train/loss"] = 2.0
    assert frame.scalars == {"train/loss": 1.0}


def test_a_reading_can_be_copied_and_pickled() -> None:
    reading = make()["encoder.0.weight", "weight"]
    for again in (copy.copy(reading), copy.deepcopy(reading), pickle.loads(pickle.dumps(reading))):
        assert (again.site, again.mean, again.p50) == (reading.site, reading.mean, reading.p50)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda frame: pickle.loads(pickle.dumps(frame))])
def test_a_frame_can_be_copied_and_pickled(again: Any) -> None:
    assert_same(again(make()), make())


# --- Round trip -----------------------------------------------------------------------------------


def assert_same(one: Frame, other: Frame) -> None:
    """Equal to the last bit."""
    assert (one.step, one.time, one.rank, one.sites) == (other.step, other.time, other.rank, other.sites)
    assert one.values.shape == other.values.shape
    assert one.values.tobytes() == other.values.tobytes()
    assert one.buckets.dtype == other.buckets.dtype == np.int64
    assert np.array_equal(one.buckets, other.buckets)
    assert one.findings == other.findings
    assert list(one.scalars) == list(other.scalars)
    assert np.array([*one.scalars.values()]).tobytes() == np.array([*other.scalars.values()]).tobytes()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.floats(allow_nan=False), min_size=11, max_size=11), max_size=4),
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    st.booleans(),
    st.data(),
)
def test_a_frame_comes_back_unchanged(
    numbers: list[list[float]], scalars: dict[str, float], with_buckets: bool, data: st.DataObject
) -> None:
    n = len(numbers)
    values = np.array(numbers).reshape(n, stats.WIDTH)
    values[data.draw(st.sampled_from([values < 0, values > 1e300, values == 0]))] = np.nan
    buckets = np.zeros((n, stats.BUCKETS if with_buckets else 0), dtype=np.int64)
    for row in buckets if with_buckets else ():
        row[data.draw(st.lists(st.integers(0, stats.BUCKETS - 1), max_size=4))] = data.draw(st.integers(0, 2**60))
    sites = tuple(Site(f"layer.{i}", "activation", "[0]" * (i % 2)) for i in range(n))
    frame = Frame(5, 1e9 + 1 / 3, 2, sites, values, buckets, (FINDING,) * (n % 2), {**scalars, "nan": math.nan})
    assert_same(Frame.from_dict(frame.to_dict()), frame)
    assert_same(Frame.from_dict(json.loads(json.dumps(frame.to_dict()))), frame)


def test_a_frame_becomes_plain_python() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(plain(key) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return type(value) in {int, float, str, type(None)}

    assert plain(make().to_dict())
    assert plain(make(with_buckets=False).to_dict())


def test_a_finding_comes_back_unchanged() -> None:
    nowhere = Finding(1, None, "loss_spike", "warning", "up", {"loss": 3.0})
    for finding in (FINDING, nowhere):
        assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


# --- Showing itself -------------------------------------------------------------------------------


def test_a_frame_tells_its_step_and_how_much_it_holds() -> None:
    assert repr(make()) == (
        "Frame(step=3, 2 activation, 1 gradient, 1 weight, 0 weight_gradient, 0 update, 1 findings)"
    )


def test_a_reading_tells_its_site_and_its_numbers() -> None:
    shown = repr(make()["encoder.0", "activation"])
    assert shown.startswith("activation/encoder.0: count=4 mean=-0.333333 std=1.24722 ")
    assert "min=-2 max=1 zero_fraction=0.25 nan_count=1 inf_count=0" in shown


def test_a_reading_lists_its_stats() -> None:
    assert set(stats.STAT_NAMES) <= set(dir(make()["encoder.0", "activation"]))
