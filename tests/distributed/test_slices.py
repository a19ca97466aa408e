"""Merging in slices gives what merging on one rank gives, to the bit; and real ranks exchange slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbhooks.capture.recording.step_table import PARAMETER_KINDS, UNKNOWN_SHARD, UNSHARDED, MergedStep, StepTable
from tbhooks.data import stats
from tbhooks.data.frame import NONFINITE_SINCE, RAW_GRADIENT_NORM, SAMPLED, Site
from tbhooks.distributed import merge, slices
from tests.support import jobs, reference
from tests.support.process_pool import ProcessPool
from tests.support.tensors import row_of

SITES = [
    Site(path, kind)
    for path in ("embed", "blocks.0.up", "blocks.0.down", "head")
    for kind in ("activation", "gradient", "weight", "weight_gradient", "update")
]


def exchanged(tables: list[StepTable], count: int, turns: int = 1) -> MergedStep:
    """What the first rank reads, if these tables are exchanged in slices; the last of some turns."""
    writers = [slices.SliceWriter(count) for _ in tables]
    mergers = [slices.SliceMerger() for _ in range(count)]
    reader = slices.SliceReader()
    for _ in range(turns):
        sent = [writer.write(table) for writer, table in zip(writers, tables, strict=True)]
        merged = [merger.merge([parts[i] for parts in sent])[0] for i, merger in enumerate(mergers)]
        found = reader.read(merged, tables[0].sites)
    return found


def random_tables(seed: int, world: int, sharded: bool, with_counts: bool) -> list[StepTable]:
    """Ranks with different batches, replicas or shards of parameters, sites that some ranks lack, and scalars."""
    random = np.random.default_rng(seed)
    weights = {site: random.normal(size=12) * 10.0 ** random.integers(-6, 6) for site in SITES}
    tables = []
    for rank in range(world):
        # A rank may hold a weight that it does not train, as of another stage of a pipeline.
        held = "head" if rank and not sharded and random.random() < 0.5 else ""
        sites = [site for site in SITES if site.path != held or site.kind not in ("weight_gradient", "update")]
        sites = [site for site in sites if rank == 0 or site.kind in PARAMETER_KINDS or random.random() < 0.8]
        arrays = [
            (np.array_split(weights[site], world)[rank] if sharded else weights[site])
            if site.kind in PARAMETER_KINDS and site.path != held else random.normal(3e3, 1e-2, size=9)
            for site in sites
        ]  # fmt: skip
        shard = (rank, world) if sharded else UNSHARDED
        counts = np.array([reference.bucket_counts(array) for array in arrays])
        scalars = {"train/loss": float(random.normal()), RAW_GRADIENT_NORM: 2.0, f"train/only{rank}": 1.0}
        if rank == world - 1:
            scalars[NONFINITE_SINCE] = 4.0
        scalars[SAMPLED + SITES[4].name] = 0.5
        tables.append(
            StepTable(
                7, sites, np.array([row_of(array) for array in arrays]),
                counts if with_counts else counts[:, :0],
                np.array([shard if site.kind in PARAMETER_KINDS else UNKNOWN_SHARD for site in sites]),
                scalars, {5: {"train/late": float(rank)}}, group=rank,
                checksums=np.array([[int(abs(a).sum() * 1e6), 1] for a in arrays], np.uint64),
            )
        )  # fmt: skip
    return tables


def assert_same(one: MergedStep, other: MergedStep) -> None:
    assert list(one.table.sites) == list(other.table.sites)
    for name in ("values", "counts", "checksums"):
        assert np.array_equal(getattr(one.table, name), getattr(other.table, name), equal_nan=name == "values"), name
    assert np.array_equal(one.spreads, other.spreads, equal_nan=True)
    assert one.table.scalars == other.table.scalars
    assert one.table.earlier == other.table.earlier
    assert set(one.notes) == set(other.notes)
    assert one.is_whole == other.is_whole


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 7), st.booleans(), st.booleans())
def test_slices_merge_as_one_rank_does(seed: int, world: int, count: int, sharded: bool, with_counts: bool) -> None:
    tables = random_tables(seed, world, sharded, with_counts)
    assert_same(exchanged(tables, count, turns=2), merge.merge(tables))


def test_one_wide_distribution_over_a_thousand_ranks_is_that_of_one_process() -> None:
    """A mean far larger than the spread, against float64 NumPy over everything."""
    random = np.random.default_rng(0)
    parts = random.normal(1e6, 1e-3, size=(1024, 8))
    site = Site("fc", "activation")
    tables = [
        StepTable(0, [site], row_of(part)[None], np.zeros((1, 0), int), np.array([UNKNOWN_SHARD]), group=rank)
        for rank, part in enumerate(parts)
    ]
    merged = exchanged(tables, 5)
    assert stats.STATS["mean"](merged.table.values)[0] == pytest.approx(parts.mean(), rel=1e-15)
    assert stats.STATS["std"](merged.table.values)[0] == pytest.approx(parts.std(), rel=1e-6)
    assert merged.table.scalars["train.ranks"] == 1024


def test_the_first_rank_receives_no_more_if_there_are_more_ranks() -> None:
    def received(world: int) -> int:
        sent = [slices.SliceWriter(4).write(table) for table in random_tables(0, world, False, True)]
        return sum(len(slices.SliceMerger().merge([parts[i] for parts in sent])[0]) for i in range(4))

    few, many = received(4), received(64)
    assert many < 1.5 * few, "only the scalars that a single rank has are added"


def test_a_rank_at_another_step_is_told_to_the_first_rank() -> None:
    tables = random_tables(0, 3, False, False)
    tables[1] = replace(tables[1], step=8)
    with pytest.raises(RuntimeError, match="not at the same step: rank 0 at 7, rank 1 at 8"):
        exchanged(tables, 2)


@pytest.mark.xdist_group("ranks")
def test_real_ranks_exchange_slices(pool: ProcessPool, tmp_path: Path) -> None:
    """The frames of the first rank are those that every rank has if all tables go to all ranks."""
    sliced: list[Any] = pool.values(jobs.sliced, 4, tmp_path / "sliced", True)
    gathered: list[Any] = pool.values(jobs.sliced, 4, tmp_path / "gathered", False)
    assert [len(frames) for frames, _, _ in sliced] == [3, 0, 0, 0]
    assert not [messages for _, errors, messages in sliced if errors]
    for one, other in zip(sliced[0][0], gathered[0][0], strict=True):
        assert one.sites == other.sites
        assert np.array_equal(one.values, other.values, equal_nan=True)
        assert np.array_equal(one.buckets, other.buckets)
        assert np.array_equal(one.spreads, other.spreads, equal_nan=True)


@pytest.mark.xdist_group("ranks")
def test_a_rank_that_dies_ends_the_merging_and_nothing_else(pool: ProcessPool, tmp_path: Path) -> None:
    ranks = pool.run(jobs.sliced, 3, tmp_path, True, 2, patience_s=4.0)
    assert ranks[0].status == 0, ranks[0].output
    frames, errors, messages = ranks[0].value
    assert errors == 1
    assert any("merging of ranks ended" in message for message in messages)
    assert [frame.step for frame in frames] == [0, 2, 4]
