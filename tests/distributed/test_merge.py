"""What ranks send each other and how it merges, without ranks: against float64 NumPy over everything there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tbhooks.capture.recording.step_table import PARAMETER_KINDS, UNKNOWN_SHARD, UNSHARDED, StepTable
from tbhooks.data import ranks, stats
from tbhooks.data.artifacts.samples import Group, Sample, Samples
from tbhooks.data.frame import NONFINITE_SINCE, RAW_GRADIENT_NORM, SKIPPED, Site
from tbhooks.distributed import merge
from tbhooks.distributed.merge import Reader, Writer
from tests.support import reference
from tests.support.tensors import SHAPE, assert_same_shape, row_of

ACTIVATION, WEIGHT, GRADIENT = Site("fc", "activation"), Site("fc.weight", "weight"), Site("fc", "gradient", "[0]")
WEIGHT_GRADIENT = Site("fc.weight", "weight_gradient")


def table(
    rows: dict[Site, NDArray[np.float64]], piece: tuple[int, int] | None = None, group: int = 0, **more: object
) -> StepTable:
    usual = [UNSHARDED if site.kind in PARAMETER_KINDS else UNKNOWN_SHARD for site in rows]
    pieces = usual if piece is None else [piece] * len(rows)
    made = StepTable(
        7, list(rows), np.array([row_of(array) for array in rows.values()]).reshape(len(rows), stats.WIDTH),
        np.array([reference.bucket_counts(array) for array in rows.values()]).reshape(len(rows), stats.BUCKETS),
        np.array(pieces, np.int64).reshape(-1, 2), group=group,
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def check(merged: StepTable, site: Site, array: NDArray[np.float64]) -> None:
    i = list(merged.sites).index(site)
    expected = reference.stats(array)
    assert_same_shape(lambda name: float(stats.STATS[name](merged.values[i : i + 1])[0]), expected, rel=1e-9)
    for name in (name for name in ranks.SPREAD_STATS if name not in SHAPE):
        found = stats.STATS[name](merged.values[i : i + 1])[0]
        scale = 1e-12 * max(1.0, np.nanmax(np.abs(array[np.isfinite(array)]), initial=0.0))
        assert np.isclose(found, expected[name], rtol=1e-9, atol=scale, equal_nan=True), name
    assert np.array_equal(merged.counts[i], reference.bucket_counts(array))


numbers = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20).map(
    lambda found: np.array(found, np.float64)
)
moderate = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20).map(
    lambda found: np.array(found, np.float64)
)


@given(st.lists(moderate, min_size=1, max_size=6))
def test_batches_of_ranks_merge_to_what_all_of_them_hold(parts: list[NDArray[np.float64]]) -> None:
    merged = merge.merge([table({ACTIVATION: part}, group=i) for i, part in enumerate(parts)])
    check(merged.table, ACTIVATION, np.concatenate(parts))


@given(moderate, st.integers(1, 6))
def test_what_every_rank_has_all_of_counts_once(whole: NDArray[np.float64], world: int) -> None:
    merged = merge.merge([table({WEIGHT: whole}, group=i) for i in range(world)])
    check(merged.table, WEIGHT, whole)
    assert not merged.notes


@given(st.lists(moderate, min_size=1, max_size=4), st.integers(1, 3))
def test_pieces_merge_to_the_whole_and_their_replicas_count_once(parts: list[NDArray[np.float64]], copies: int) -> None:
    tables = [table({WEIGHT: part}, (i, len(parts))) for _ in range(copies) for i, part in enumerate(parts)]
    check(merge.merge(tables).table, WEIGHT, np.concatenate(parts))


def test_ranks_on_one_batch_share_an_output_if_it_is_the_same_and_add_their_parts_if_not() -> None:
    whole, other = np.arange(8.0), np.arange(8.0) * 3
    same = [table({ACTIVATION: whole}, group=0), table({ACTIVATION: whole}, group=0)]
    check(merge.merge(same).table, ACTIVATION, whole)
    parts = [table({ACTIVATION: whole}, group=0), table({ACTIVATION: other}, group=0)]
    check(merge.merge(parts).table, ACTIVATION, np.concatenate([whole, other]))
    two_batches = [table({ACTIVATION: whole}, group=0), table({ACTIVATION: whole}, group=1)]
    check(merge.merge(two_batches).table, ACTIVATION, np.concatenate([whole, whole]))


def test_a_parameter_of_which_a_piece_is_missing_is_not_shown_and_that_is_reported() -> None:
    whole, outputs = np.arange(4.0), np.arange(8.0)
    torn = [table({ACTIVATION: outputs, WEIGHT: whole}, (0, 2)), StepTable(7)]
    merged = merge.merge(torn)
    assert list(merged.table.sites) == [ACTIVATION]
    assert len(merged.spreads) == 1
    assert not merged.is_whole
    assert "shards of weights are missing" in merged.notes[0]
    check(merged.table, ACTIVATION, outputs)


def test_replicas_that_are_none_are_reported_and_all_counted() -> None:
    tables = [table({WEIGHT_GRADIENT: np.arange(4.0) + i}) for i in range(3)]
    merged = merge.merge(tables)
    check(merged.table, WEIGHT_GRADIENT, np.concatenate([np.arange(4.0) + i for i in range(3)]))
    assert len(merged.notes) == 1
    assert "the weight_gradients of fc.weight differ between ranks" in merged.notes[0]


def test_weights_that_a_rank_has_but_another_trains_do_not_count() -> None:
    trained, stale = np.arange(4.0), np.arange(4.0) + 1
    tables = [table({WEIGHT: stale}), table({WEIGHT: trained, WEIGHT_GRADIENT: trained}), table({WEIGHT: stale + 1})]
    merged = merge.merge(tables)
    check(merged.table, WEIGHT, trained)
    assert not merged.notes


def test_a_rank_without_a_site_adds_nothing_and_ranks_are_counted() -> None:
    seen = np.arange(5.0)
    merged = merge.merge([table({ACTIVATION: seen}), StepTable(7), table({GRADIENT: seen}, group=2)])
    check(merged.table, ACTIVATION, seen)
    check(merged.table, GRADIENT, seen)
    assert merged.table.scalars[merge.RANKS] == 2


def test_histograms_are_there_if_every_rank_that_saw_something_sent_them() -> None:
    with_counts, without = table({ACTIVATION: np.arange(3.0)}), table({ACTIVATION: np.arange(3.0)}, group=1)
    without = replace(without, counts=np.zeros((1, 0), np.int64))
    assert merge.merge([with_counts, StepTable(7)]).table.counts.shape == (1, stats.BUCKETS)
    assert merge.merge([with_counts, without]).table.counts.shape == (1, 0)


def test_scalars_are_means_but_for_those_with_a_better_way() -> None:
    dead = "activation.dead_fraction/fc"
    tables = [
        StepTable(7, scalars={"train/loss": 1.0, SKIPPED: 0.0, dead: 0.5, RAW_GRADIENT_NORM: 4.0, "train/nan": np.nan}),
        StepTable(
            7, scalars={"train/loss": 2.0, SKIPPED: 3.0, dead: 0.1, RAW_GRADIENT_NORM: 4.5, NONFINITE_SINCE: 5.0}
        ),
        StepTable(7, scalars={NONFINITE_SINCE: 3.0}, earlier={2: {"train/late": 6.0}}),
    ]
    merged = merge.merge(tables).table
    found = {k: v for k, v in merged.scalars.items() if not np.isnan(v)}
    assert found == {
        "train/loss": 1.5, SKIPPED: 3.0, dead: 0.1, RAW_GRADIENT_NORM: 4.0, NONFINITE_SINCE: 3.0, merge.RANKS: 0.0
    }  # fmt: skip
    assert np.isnan(merged.scalars["train/nan"])
    assert merged.earlier == {2: {"train/late": 6.0}}


def test_the_norm_before_clipping_is_not_shown_where_weights_are_in_pieces() -> None:
    tables = [
        table({WEIGHT: np.arange(3.0)}, (i, 2), scalars={RAW_GRADIENT_NORM: 1.0, "train/loss": 1.0}) for i in range(2)
    ]
    assert RAW_GRADIENT_NORM not in merge.merge(tables).table.scalars


@given(st.lists(st.tuples(st.text(max_size=30), st.sampled_from(["activation", "weight"]), numbers), max_size=6))
def test_a_table_comes_back_from_its_bytes_unchanged(rows: list[tuple[str, str, NDArray[np.float64]]]) -> None:
    sent = table(
        {Site(path, kind, "[0]"): array for path, kind, array in rows}, group=3,
        scalars={"train/loss": np.nan, "a": -np.inf}, earlier={5: {"b": 1.5}},
    )  # fmt: skip
    writer, reader = Writer(merge.capacity(16, with_buckets=True)), Reader()
    for _ in range(2):  # the second time without names
        data = writer.write(sent)
        assert len(data) == writer.size
        found = reader.read(data)
        assert found.sites == sent.sites
        assert found.values.tobytes() == sent.values.tobytes()
        assert np.array_equal(found.counts, sent.counts) or not sent.sites
        assert np.array_equal(found.shards, sent.shards)
        assert (found.step, found.group, found.earlier) == (7, 3, {5: {"b": 1.5}})
        assert repr(found.scalars) == repr(sent.scalars)
    assert not writer.left_out


def test_what_does_not_fit_is_left_out_and_reported_and_the_length_stays() -> None:
    rows = {Site(f"layer{i}", "activation"): np.random.default_rng(i).normal(size=500) for i in range(40)}
    sent = table(rows)
    for size, left in ((5000, {"histograms"}), (2000, {"sites", "histograms"})):
        writer, reader = Writer(size), Reader()
        found = [reader.read(writer.write(sent)) for _ in range(3)][-1]
        assert left <= writer.left_out
        assert found.counts.shape[1] == 0
        assert found.sites == list(rows)[: len(found.sites)]
        assert len(writer.write(sent)) == size


def test_histograms_that_fit_only_when_compressed_are_compressed() -> None:
    sent = table({Site(f"layer{i}", "activation"): np.arange(9.0) for i in range(40)})
    counts = sent.counts.copy()
    counts[:, [0, -1]] = 1 << 33  # all buckets, in 8 bytes each
    sent = replace(sent, counts=counts)
    writer, reader = Writer(merge.capacity(40, with_buckets=True)), Reader()
    assert counts.nbytes > writer.size
    for _ in range(3):
        assert np.array_equal(reader.read(writer.write(sent)).counts, counts)
    assert not writer.left_out


def test_a_name_that_has_to_wait_for_room_comes_later() -> None:
    first, second = (table({Site(f"{word}{i}", "activation"): np.ones(1) for i in range(12)}) for word in "ab")
    both = table({site: np.ones(1) for site in (*first.sites, *second.sites)})
    large = Writer(1 << 16)
    large.write(both)
    without_names = len(large.write(both).rstrip(b"\0"))
    writer, reader = Writer(without_names + 900), Reader()  # a name takes about 50 bytes
    found = [len(reader.read(writer.write(each)).sites) for each in (both, both, both)]
    assert found[0] < found[-1] == 24


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="another version of tbhooks"):
        Reader().read(b"\1" * 200)


@given(st.lists(moderate, min_size=1, max_size=5))
def test_the_spread_names_the_ranks_that_hold_the_extremes(parts: list[NDArray[np.float64]]) -> None:
    merged = merge.merge([table({ACTIVATION: part}, group=i) for i, part in enumerate(parts)])
    means = [float(part.mean()) for part in parts]
    found = ranks.read(merged.spreads[0], "mean")
    rounding = {"rel": 1e-12, "abs": 1e-12 * max(float(np.abs(part).max()) for part in parts) + 1e-300}
    assert found.min == pytest.approx(min(means), **rounding)
    assert found.max == pytest.approx(max(means), **rounding)
    assert means[found.min_rank] == pytest.approx(found.min, **rounding)
    assert means[found.max_rank] == pytest.approx(found.max, **rounding)
    assert found.median == pytest.approx(float(np.median(means)), **rounding)
    assert found.ranks == len(parts)


def test_parts_of_one_batch_are_one_in_the_spread() -> None:
    tables = [table({ACTIVATION: np.arange(4.0) * (i + 1)}, group=i // 2 * 2) for i in range(4)]
    found = ranks.read(merge.merge(tables).spreads[0], "count")
    assert (found.ranks, found.min, found.max) == (2, 8.0, 8.0)


def test_samples_of_ranks_merge_to_those_of_the_job() -> None:
    one = Samples((Sample("a", 3.0, "web"), Sample("b", float("nan"), "web")), {"web": Group(2.0, 3)}, 3)
    other = Samples((Sample(7, float("inf")), Sample(8, 0.5)), {"web": Group(6.0, 1), "code": Group(1.0, 2)}, 3)
    sent = [Writer(1 << 16).write(replace(StepTable(7), samples=samples)) for samples in (one, other)]
    merged = merge.merge([Reader().read(data) for data in sent]).table.samples
    assert merged.ids == ("b", 7)
    assert merged.groups == {"web": (3.0, 4), "code": (1.0, 2)}
    assert merged.total == 6
