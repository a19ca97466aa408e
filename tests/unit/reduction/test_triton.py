"""The Triton kernels say what the float64 reference says, run by Triton's interpreter where Triton is installed.

What the compiler makes of them is in test_triton_compiled.py; how fast they are is for a GPU to show.
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

import tbhooks
from tbhooks.data import checksums, stats
from tbhooks.reduction import checksum, cpu, histogram, triton
from tbhooks.reduction.cpu import NULL
from tests.support import float64_recorder, reference, zoo
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
    scratch = triton.Scratch(torch.device("cpu"))
    scratch.reduce(triton.Job(tensor, None, None, row.data_ptr(), counts.data_ptr() if with_buckets else NULL))
    scratch.merge()
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
    counts, row = torch.ones(histogram.SLOTS, dtype=torch.int32), torch.zeros(stats.WIDTH, dtype=torch.float64)
    scratch = triton.Scratch(torch.device("cpu"))
    scratch.reduce(triton.Job(torch.zeros(50), None, None, row.data_ptr(), counts.data_ptr()))
    assert counts[stats.MIDDLE] == 51
    assert counts.sum() == histogram.SLOTS + 50


def test_nothing_behind_the_record_is_touched() -> None:
    memory = torch.zeros(histogram.SLOTS + 200, dtype=torch.int32)
    rows = torch.zeros(stats.WIDTH + 20, dtype=torch.float64)
    scratch = triton.Scratch(torch.device("cpu"))
    scratch.reduce(triton.Job(torch.randn(5000), None, None, rows.data_ptr(), memory.data_ptr()))
    scratch.merge()
    assert memory[histogram.SLOTS :].sum() == 0
    assert rows[stats.WIDTH :].sum() == 0


def test_numbers_at_an_address_that_is_not_aligned() -> None:
    for dtype in TYPES:
        assert_right(tensor_of((9001,), dtype, "normal", "contiguous", 2)[1:])


# --- Many tensors in one launch -------------------------------------------------------------------


def run_all(jobs: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> tuple[np.ndarray, np.ndarray]:
    rows = torch.full((len(jobs), stats.WIDTH), -7.0, dtype=torch.float64)
    counts = torch.zeros((len(jobs), histogram.SLOTS), dtype=torch.int32)
    scratch = triton.Scratch(torch.device("cpu"))
    scratch.reduce_all(
        [triton.Job(*job, rows[i].data_ptr(), counts[i].data_ptr()) for i, job in enumerate(jobs)]
    )  # fmt: skip
    scratch.merge()
    return rows.numpy(), counts.numpy()


@pytest.mark.parametrize("stretch", [64, 4096])
def test_many_tensors_of_all_types_equal_the_reference(monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    monkeypatch.setattr(triton, "STRETCH", stretch)
    monkeypatch.setattr(triton, "MANY_PROGRAMS", 20)
    tensors = [
        tensor_of((size,), dtype, distribution, "contiguous", size)
        for size, distribution in ((1, "normal"), (700, "sprinkled"), (64, "relu"), (513, "large_mean"), (65, "huge"))
        for dtype in TYPES
    ]
    rows, counts = run_all([(tensor, None, None) for tensor in tensors])
    for i, tensor in enumerate(tensors):
        data = reference.to_numpy(tensor)
        assert_same_stats(reader(rows[i]), data)
        assert np.array_equal(counts[i][: stats.BUCKETS], reference.bucket_counts(data))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_differences_and_quotients_are_those_of_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, together: bool
) -> None:
    monkeypatch.setattr(triton, "STRETCH", 64)
    monkeypatch.setattr(triton, "MOST_PROGRAMS", 3)
    after, before = (tensor_of((701,), dtype, "normal", "contiguous", seed) for seed in (1, 2))
    scale = torch.tensor(1000.0)
    jobs = [(after, before, None), (after, None, scale)]
    if together:
        rows, _ = run_all(jobs)
    else:
        rows = np.stack([run_alone(job) for job in jobs])
    assert_same_stats(reader(rows[0]), reference.to_numpy(after.float() - before.float()))
    assert_same_stats(reader(rows[1]), reference.to_numpy(after.float() / scale))


def run_alone(job: tuple[Tensor, Tensor | None, Tensor | None]) -> np.ndarray:
    row, scratch = torch.zeros(stats.WIDTH, dtype=torch.float64), triton.Scratch(torch.device("cpu"))
    scratch.reduce(triton.Job(*job, row.data_ptr(), NULL))
    scratch.merge()
    return row.numpy()


def test_a_step_that_needs_more_memory_than_the_last_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "FEWEST_PARTIALS", 4)
    monkeypatch.setattr(triton, "FEWEST_SLOTS", 2)
    scratch = triton.Scratch(torch.device("cpu"))
    for _ in range(3):
        rows = torch.zeros((9, stats.WIDTH), dtype=torch.float64)
        for i in range(9):
            scratch.reduce(triton.Job(torch.full((5000 * (i + 1),), float(i)), None, None, rows[i].data_ptr(), NULL))
        scratch.merge()
        assert rows[:, stats.MEAN].tolist() == pytest.approx(list(range(9)))
        assert rows[:, stats.COUNT].tolist() == [5000 * (i + 1) for i in range(9)]
        scratch.forget()
    assert len(scratch.tensors) == 2  # one block of partial rows, one of slots


# --- Checksums of bits ------------------------------------------------------------------------------


def checksum_of(tensor: Tensor) -> int:
    words = checksum.bits_of(tensor)
    assert words is not None
    sums, squares = triton.sum_words(words).tolist()
    return checksums.combine(sums, squares, words.numel())


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 700), st.sampled_from(TYPES), st.sampled_from([*DISTRIBUTIONS]), SEEDS)
def test_the_checksum_is_that_of_integers_of_any_size(n: int, dtype: torch.dtype, distribution: str, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "STRETCH", 64)
        patch.setattr(triton, "MOST_PROGRAMS", 3)
        tensor = tensor_of((n,), dtype, distribution, "contiguous", seed)
        assert checksum_of(tensor) == reference.checksum(tensor)
        if n > 1:  # at an address that is not aligned
            assert checksum_of(tensor[1:]) == reference.checksum(tensor[1:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_beyond_64_bits_wrap_around_as_those_of_the_c_kernel(dtype: torch.dtype) -> None:
    tensor = torch.full((30_000,), -torch.finfo(dtype).max, dtype=dtype)
    words = checksum.bits_of(tensor)
    assert words is not None
    assert checksum_of(tensor) == reference.checksum(tensor)
    assert triton.sum_words(words).tolist() == checksum._sums_by_torch(words).tolist()


# --- What a whole recorder makes of it ------------------------------------------------------------


@pytest.fixture
def cpu_is_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go where those of a GPU go, and neither to the C kernel nor to torch operations."""
    monkeypatch.setattr(triton, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(triton, "_ready", {torch.device("cpu")})
    monkeypatch.setattr(cpu, "library", None)


@pytest.mark.usefixtures("cpu_is_gpu")
def test_a_watched_training_reads_what_the_reference_reads() -> None:
    expected = float64_recorder.observe(zoo.ZOO["cnn"])
    made: list[tbhooks.Watch] = []
    zoo.train(zoo.ZOO["cnn"], 3, before=lambda model: made.append(tbhooks.watch(model, every=1)))
    made[0].close()
    assert made[0].stats.errors == 0
    for frame, step in zip(made[0].history, expected, strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@pytest.mark.usefixtures("cpu_is_gpu")
def test_checksums_of_a_watched_training_are_those_of_the_c_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[tbhooks.Watch, dict[object, int | None]]:
        made: list[tbhooks.Watch] = []
        zoo.train(zoo.ZOO["mlp"], 2, before=lambda model: made.append(tbhooks.watch(model, every=1).checksums()))
        made[0].close()
        assert made[0].stats.errors == 0
        assert made[0].latest is not None
        return made[0], {site: made[0].latest[site.name, site.kind].checksum for site in made[0].latest.sites}

    summed: list[torch.dtype] = []
    sum_words = triton.sum_words
    monkeypatch.setattr(triton, "_sums_words", set())
    monkeypatch.setattr(triton, "sum_words", lambda words: (summed.append(words.dtype), sum_words(words))[1])
    _, of_triton = trained()
    assert summed[:2] == [torch.int32, torch.int16]  # compiled when checksums() is called
    assert len(summed) - 2 > len(of_triton)  # in two steps
    monkeypatch.setattr(triton, "_sums_words", set())
    monkeypatch.setattr(triton, "is_on_gpu", lambda _: False)
    _, of_torch = trained()
    assert of_triton == of_torch
    assert None not in of_triton.values()


def test_cpu_tensors_are_left_to_others() -> None:
    assert not triton.takes(torch.ones(3))
