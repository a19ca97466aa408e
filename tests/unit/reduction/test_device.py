"""The device contract, counted on the simulated device: one copy a logged step, no sync, few launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tbhooks
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.frame import KINDS, Site
from tbhooks.reduction import batched, histogram, torch_rows
from tests.support import fake_device, float64_recorder, reference, zoo
from tests.support.slow import cases, slow
from tests.support.tensors import DISTRIBUTIONS, LAYOUTS, REAL, SEEDS, SITE, assert_same_stats, reduced, tensor_of

CASES = ["mlp", "cnn", "inplace_relu", "shared_module", "dict_output", "tied_weights", "resnet", "bert", "checkpointed"]


def forget_constants() -> None:
    """As in a new process: what is made once for each device is made again."""
    histogram._tables.clear()
    torch_rows._constants.clear()


def copies_by_step(
    case: zoo.Case, every: int, steps: int, log: Callable[[tbhooks.Watch, Tensor], None] | None = None, **options: Any
) -> tuple[list[int], int, tbhooks.Watch]:
    """Copies to the host in each step, syncs and copies to the device in all, and the watch."""
    on_device = zoo.moved(case, fake_device.to_device, fake_device.put)
    made: list[tbhooks.Watch] = []
    counts: list[int] = []
    with fake_device.Log() as record:

        def before(model: nn.Module) -> nn.Module:
            record.uploads.clear()  # the model itself
            made.append(tbhooks.watch(model, every=every, **options))
            return model

        def each_step(_: int, loss: Tensor) -> None:
            if log is not None:
                log(made[0], loss)
            counts.append(len(record.copies))

        # zoo.train itself copies tensors out to keep their bytes: a plain loop copies only what we copy.
        zoo.plain_loop(on_device, steps, before, each_step)
        syncs = record.syncs + len(record.uploads)
    made[0].close()
    assert made[0].stats.errors == 0
    return [b - a for a, b in zip([0, *counts], counts, strict=False)], syncs, made[0]


@pytest.mark.parametrize(
    "name",
    cases(CASES, always={*CASES} - {"bert", "resnet"}, reason="as many copies from larger models"),
)
def test_one_copy_in_each_logged_step_none_in_others_and_never_a_wait_from_the_first_step_on(name: str) -> None:
    forget_constants()
    copies, syncs, _ = copies_by_step(zoo.ZOO[name], every=3, steps=7)
    assert copies == [1, 0, 0, 1, 0, 0, 1]
    assert syncs == 0


def test_scalars_logged_before_the_step_ends_ride_in_the_same_copy() -> None:
    case = zoo.ZOO["mlp"]
    made: list[tbhooks.Watch] = []

    def loss_logged_at_once(model: nn.Module, batch: Any) -> Tensor:
        loss = case.loss(model, batch)
        made[0].log({"loss": loss})
        return loss

    early = zoo.Case(case.name, case.build, case.batch, loss_logged_at_once, case.optimizer)
    on_device = zoo.moved(early, fake_device.to_device, fake_device.put)
    counts: list[int] = []
    with fake_device.Log() as record:

        def before(model: nn.Module) -> None:
            made.append(tbhooks.watch(model, every=2))
            made.append(model)  # keeps it alive

        zoo.plain_loop(on_device, 5, before, lambda *_: counts.append(len(record.copies)))
        assert record.syncs == 0
    made[0].close()
    assert counts == [1, 1, 2, 2, 3]
    tags = ["train.grad_norm", "train.grad_norm_raw", "train.lr/0", "train/loss"]
    assert [sorted(frame.scalars) for frame in made[0].history] == [tags] * 3


def test_scalars_logged_after_the_optimizer_ride_in_the_same_copy_too() -> None:
    losses: list[float] = []

    def log(watching: tbhooks.Watch, loss: Tensor) -> None:
        watching.log({"loss": loss})

    kept = tbhooks.MemorySink()
    copies, syncs, watching = copies_by_step(zoo.ZOO["mlp"], every=2, steps=5, log=log, writer=kept)
    assert copies == [1, 0, 1, 0, 1]
    assert syncs == 0
    zoo.train(zoo.ZOO["mlp"], 5, each_step=lambda _, loss: losses.append(float(loss.detach())))
    steps, logged = watching.history.scalar("train/loss")
    assert steps == [0, 2, 4]
    assert logged.tolist() == pytest.approx([losses[0], losses[2], losses[4]], rel=1e-6)
    # Only before the first of them it is not known that such scalars come: later steps wait with their copy.
    assert [frame.step for frame in kept if not frame.sites] == [0]


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "inplace_relu", "shared_module", pytest.param("resnet", marks=slow("a larger model"))]
)
def test_numbers_from_the_device_are_right(name: str) -> None:
    expected = float64_recorder.observe(zoo.ZOO[name])
    on_device = zoo.moved(zoo.ZOO[name], fake_device.to_device, fake_device.put)
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1))
        return model

    zoo.train(on_device, 3, before=before)
    made[0].close()
    for frame, step in zip(made[0].history, expected, strict=True):
        float64_recorder.assert_frame_equals(frame, step)


def test_training_on_the_device_is_bit_identical() -> None:
    on_device = zoo.moved(zoo.ZOO["cnn"], fake_device.to_device, fake_device.put)
    made: list[Any] = []
    trace = zoo.train(on_device, before=lambda model: made.append(tbhooks.watch(model, every=1)))
    made[0].close()
    assert trace == zoo.train(on_device)


def test_an_unlogged_step_launches_one_small_reduction_more_than_a_bare_one() -> None:
    on_device = zoo.moved(zoo.ZOO["cnn"], fake_device.to_device, fake_device.put)

    def launches(before: Callable[[nn.Module], Any]) -> list[int]:
        counts: list[int] = []
        kept: list[Any] = []
        with fake_device.Log() as record:
            zoo.plain_loop(
                on_device, 4, lambda model: kept.append((model, before(model))),
                lambda *_: counts.append(sum(record.ops.values())),
            )  # fmt: skip
        return [b - a for a, b in itertools.pairwise(counts)]

    bare = launches(lambda _: None)
    assert launches(lambda model: tbhooks.watch(model, every=100)) == [n + 1 for n in bare]


# --- Guards: what a logged step may cost, counted ----------------------------------------------------

ROW, BUCKETS = 13, 5
NORMAL = (torch.float32, torch.bfloat16, torch.float64)


def recorder_on_device(tensor: Tensor, with_buckets: bool) -> Recorder:
    """With everything made that is made once."""
    recorder = Recorder(KINDS)
    for _ in range(2):
        recorder.begin(with_buckets)
        recorder.record(recorder.number(SITE), tensor)
        recorder.pack(0, 0)
    recorder.begin(with_buckets)
    return recorder


def launches_of(tensor: Tensor, with_buckets: bool) -> int:
    recorder = recorder_on_device(tensor, with_buckets)
    with fake_device.Log() as log:
        recorder.record(recorder.number(SITE), tensor)
    assert log.syncs == 0
    assert not log.copies
    return log.launches.total()


CONVERSIONS = {torch.float32: (0, 0), torch.float64: (0, 0), torch.bfloat16: (1, 0), torch.float16: (1, 1)}
"""The launches that convert a type to float32: for its row, and for its buckets."""


@pytest.mark.parametrize("dtype", CONVERSIONS, ids=str)
def test_a_row_takes_thirteen_launches_and_buckets_five(dtype: torch.dtype) -> None:
    tensor = fake_device.put(torch.randn(40, 50).to(dtype))
    for_row, for_buckets = CONVERSIONS[dtype]
    assert launches_of(tensor, with_buckets=False) == ROW + for_row
    assert launches_of(tensor, with_buckets=True) == ROW + for_row + BUCKETS + for_buckets


@pytest.mark.parametrize("with_buckets", [False, True])
@pytest.mark.parametrize(
    ("dtype", "each"), [(torch.float32, 28), (torch.bfloat16, 32), (torch.float16, 32), (torch.float64, 44)], ids=str
)
def test_temporaries_of_a_long_tensor_stay_those_of_one_part(
    dtype: torch.dtype, each: int, with_buckets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 20_000
    monkeypatch.setattr(reducers, "PART", part)
    monkeypatch.setattr(reducers, "MOST_PARTS", 10**9)
    tensor = fake_device.put(torch.randn(10 * part).to(dtype))
    recorder = recorder_on_device(tensor, with_buckets)
    with fake_device.Log() as log:
        recorder.record(recorder.number(SITE), tensor)
    # The results are a few bytes of each part; what is hidden inside an operation is not seen here.
    assert part * (each - 4) <= log.peak_bytes <= part * each + 4096


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [*NORMAL, torch.float16], ids=str)
def test_numbers_are_right_with_and_without_deterministic_algorithms(dtype: torch.dtype, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        for distribution in DISTRIBUTIONS:
            tensor = tensor_of((700,), dtype, distribution, "contiguous", 4)
            reading = reduced(fake_device.put(tensor))
            assert_same_stats(lambda name, reading=reading: getattr(reading, name), reference.to_numpy(tensor))
            assert np.array_equal(reading.counts, reference.bucket_counts(reference.to_numpy(tensor)))
    finally:
        torch.use_deterministic_algorithms(False)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 900), st.sampled_from(REAL), st.sampled_from([*DISTRIBUTIONS]), st.sampled_from([*LAYOUTS]), SEEDS
)
def test_every_statistic_from_the_device_equals_the_reference(
    n: int, dtype: torch.dtype, distribution: str, layout: str, seed: int
) -> None:
    tensor = tensor_of((n,), dtype, distribution, layout, seed)
    reading = reduced(fake_device.put(tensor))
    assert_same_stats(lambda name: getattr(reading, name), reference.to_numpy(tensor))
    assert np.array_equal(reading.counts, reference.bucket_counts(reference.to_numpy(tensor)))


def test_equal_numbers_beside_nan_have_no_spread() -> None:
    reading = reduced(fake_device.put(torch.tensor([5.1] * 99 + [torch.nan])))
    assert reading.std == 0.0
    assert reading.mean == pytest.approx(float(np.float32(5.1)), rel=1e-12)


# --- Many parameters together ---------------------------------------------------------------------


def parameter_step(parameters: int, **options: Any) -> tuple[int, fake_device.Log]:
    """Launches of a logged step that a bare one does not make, and what crossed to the host."""
    model = fake_device.to_device(nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = fake_device.put(torch.ones(4, 8))

    def step() -> int:
        optimizer.zero_grad()
        with fake_device.Log() as log:
            model(batch).sum().backward()
            optimizer.step()
        logs.append(log)
        return log.launches.total()

    logs: list[fake_device.Log] = []
    bare = [step() for _ in range(2)][-1]
    with tbhooks.watch(model, every=1, kinds=("weight", "weight_gradient", "update"), **options) as watching:
        watched = [step() for _ in range(3)][-1]
    assert watching.stats.errors == 0
    return watched - bare, logs[-1]


@pytest.mark.parametrize(
    ("histograms", "most"),
    [pytest.param(False, 75, marks=slow("histograms add to these")), (True, 95)],
)
def test_five_hundred_parameters_cost_as_many_launches_as_ten(histograms: bool, most: int) -> None:
    ten, _ = parameter_step(10, histograms=histograms)
    many, log = parameter_step(500, histograms=histograms)
    assert ten == many <= most
    assert len(log.copies) == 1
    assert log.syncs == 0


@pytest.mark.parametrize("dtype", [*NORMAL, torch.float16], ids=str)
def test_the_first_histogram_of_a_type_copies_nothing_to_the_device(dtype: torch.dtype) -> None:
    tensor, recorder = fake_device.put(torch.randn(40, 50).to(dtype)), Recorder(KINDS)
    forget_constants()
    recorder.begin(with_buckets=True)
    with fake_device.Log() as log:
        recorder.record(recorder.number(SITE), tensor)
        recorder.pack(0, 0)
    assert log.uploads == []
    assert len(log.copies) == 1


def small_tensors(dtype: torch.dtype) -> list[Tensor]:
    sizes = (1, 2, 63, 64, 65, 500, 512, 700, 4096, 5000)
    return [
        tensor_of((size,), dtype, distribution, "contiguous", seed)
        for seed, size in enumerate(sizes)
        for distribution in DISTRIBUTIONS
    ]


@pytest.mark.parametrize("dtype", [*NORMAL, torch.float16], ids=str)
def test_small_tensors_reduced_together_equal_the_reference(dtype: torch.dtype) -> None:
    recorder, tensors = Recorder(KINDS), small_tensors(dtype)
    recorder.begin(with_buckets=True)
    sites = [recorder.number(Site(f"p{i}", "weight")) for i in range(len(tensors))]
    on_device = [fake_device.put(tensor) for tensor in tensors]
    assert all(batched.fits(tensor) for tensor in on_device)
    recorder.record_together([(site, tensor, None, None) for site, tensor in zip(sites, on_device, strict=True)])
    frame = recorder.pack(0, 0).frames()[-1]
    for i, tensor in enumerate(tensors):
        reading, data = frame[f"p{i}", "weight"], reference.to_numpy(tensor)
        assert_same_stats(lambda name, reading=reading: getattr(reading, name), data)
        assert np.array_equal(reading.counts, reference.bucket_counts(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_differences_and_quotients_together_are_those_of_wide_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    after, before = torch.randn(300).to(dtype), torch.randn(300).to(dtype)
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=False)
    scale = fake_device.put(torch.tensor(1024.0))
    update, gradient = (recorder.number(Site("p", kind)) for kind in ("update", "weight_gradient"))
    recorder.record_together(
        [
            (update, fake_device.put(after), fake_device.put(before), None),
            (gradient, fake_device.put(after), None, scale),
        ]
    )
    frame = recorder.pack(0, 0).frames()[-1]
    difference = after.float() - before.float()
    assert_same_stats(lambda name: getattr(frame["p", "update"], name), reference.to_numpy(difference))
    divided = reference.to_numpy(after.float() / 1024)
    assert_same_stats(lambda name: getattr(frame["p", "weight_gradient"], name), divided)


# A tensor of 100,000 elements is reduced as one of 100 million is, if float32 counted to 2**14 only.
SCALE = 1000


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "PART", reducers.PART // SCALE)
    monkeypatch.setattr(histogram, "MOST", histogram.MOST // SCALE)


def test_a_hundred_million_elements_take_three_parts_of_less_than_a_gigabyte() -> None:
    tensor = torch.empty(100_000_000, device="meta")
    assert -(-tensor.numel() // reducers.part_length(tensor)) == 3
    longest = max(reducers.part_length(torch.empty(size, device="meta")) for size in (1 << 30, 1 << 31, (1 << 31) + 2))
    assert longest * 28 < 1e9


@pytest.mark.usefixtures("small_counts")
@pytest.mark.parametrize("dtype", CONVERSIONS, ids=str)
def test_a_hundred_million_elements_take_at_most_sixty_launches(dtype: torch.dtype) -> None:
    tensor = fake_device.put(torch.randn(100_000_000 // SCALE).to(dtype))
    assert launches_of(tensor, with_buckets=True) == 3 * (ROW + BUCKETS + sum(CONVERSIONS[dtype])) <= 60


@pytest.mark.usefixtures("small_counts")
@pytest.mark.parametrize("size", [33_000, 100_000, 100_001, 300_000])
@pytest.mark.parametrize("dtype", CONVERSIONS, ids=str)
def test_what_float32_cannot_count_is_reduced_in_two_rows(dtype: torch.dtype, size: int) -> None:
    tensor = tensor_of((size,), dtype, "sprinkled", "contiguous", 1)
    reading, data = reduced(fake_device.put(tensor)), reference.to_numpy(tensor)
    assert_same_stats(lambda name: getattr(reading, name), data)
    assert np.array_equal(reading.counts, reference.bucket_counts(data))


@pytest.mark.parametrize("size", [1, 10, 1 << 20, 100_000_000, 100_000_001, 1 << 31])
def test_rows_are_no_longer_than_counts_are_exact(size: int) -> None:
    tensor = torch.empty(size, device="meta")
    length = reducers.part_length(tensor)
    assert length >= reducers.PART
    if length > histogram.MOST:
        assert length % 2 == 0
        assert size % 2 == 0, "the last part is halved as well"
        assert length // 2 <= histogram.MOST


# --- Devices without float64 ----------------------------------------------------------------------


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_rows, "has_float64", lambda device: device.type == "cpu")
    with fake_device.without_float64():
        yield


@pytest.mark.usefixtures("no_float64")
def test_a_training_without_float64_loses_nothing() -> None:
    on_device = zoo.moved(zoo.ZOO["cnn"], fake_device.to_device, fake_device.put)
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1).per_channel("*"))
        return model

    zoo.plain_loop(on_device, 3, before, lambda *_: made[0].log({"loss": 1.0}))
    made[0].close()
    assert made[0].stats.errors == 0
    assert len(made[0].history) == 3
    for frame in made[0].history:
        assert {site.kind for site in frame.sites} == set(KINDS)


@pytest.mark.usefixtures("no_float64")
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (300.0, 0.01), (-1e4, 1.0)])
def test_pairs_of_float32_keep_small_deviations_from_a_large_mean(mean: float, std: float) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(200_000) * std + mean
    reading, wide = reduced(fake_device.put(tensor)), tensor.double()
    assert reading.mean == pytest.approx(wide.mean().item(), rel=1e-7, abs=1e-6 * std)
    assert reading.std == pytest.approx(wide.std(correction=0).item(), rel=1e-5)
    assert reading.count == 200_000
