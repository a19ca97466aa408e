"""Updates without a second copy of the model: the budget, the sample, and the mark on what was estimated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tbhooks
from tbhooks import runs
from tbhooks.capture.parameters import weight_sample
from tbhooks.capture.parameters.weight_sample import NO_ROOM, RUN
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.recording.step_table import StepTable
from tbhooks.data import stats
from tbhooks.data.frame import KINDS, SAMPLED, Site
from tbhooks.distributed.merge import merge
from tbhooks.runs import report_data
from tbhooks.views import report_html
from tbhooks.views.report_text import run_report
from tests.support import fake_device, reference
from tests.support.tensors import row_of

MB = 1 << 20


class DeviceMemory:
    """What the simulated device says about its memory; everything is in bytes."""

    def __init__(self) -> None:
        self.free, self.reserved, self.allocated, self.peak = 1 << 30, 0, 0, 0

    def answers(self) -> dict[str, Any]:
        return {
            "mem_get_info": lambda _=None: (self.free, 1 << 40),
            "memory_reserved": lambda _=None: self.reserved,
            "memory_allocated": lambda _=None: self.allocated,
            "max_memory_allocated": lambda _=None: self.peak,
        }


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    memory = DeviceMemory()
    for name, answer in memory.answers().items():
        monkeypatch.setattr(torch.get_device_module(fake_device.DEVICE), name, answer, raising=False)
    monkeypatch.setattr(weight_sample, "SMALLEST_SAMPLE", 4096)
    return memory


def model() -> nn.Module:
    torch.manual_seed(0)
    return fake_device.to_device(nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 10)))


def train(trained: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(trained.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        trained(fake_device.put(torch.randn(16, 200, generator=generator))).square().mean().backward()
        optimizer.step()
    return optimizer


# --- The budget -----------------------------------------------------------------------------------


def test_what_training_has_used_at_its_peak_is_not_ours(memory: DeviceMemory) -> None:
    memory.free, memory.reserved, memory.allocated, memory.peak = 100 * MB, 50 * MB, 10 * MB, 40 * MB
    assert weight_sample.headroom(fake_device.DEVICE) == 110 * MB
    assert weight_sample.headroom(fake_device.DEVICE, expected=100 * MB) == 40 * MB
    assert weight_sample.budget(fake_device.DEVICE) == 55 * MB


def test_a_device_that_says_nothing_about_its_memory_gets_the_whole_budget() -> None:
    assert weight_sample.headroom(fake_device.DEVICE) is None
    assert weight_sample.budget(fake_device.DEVICE) == weight_sample.BUDGET


def test_an_optimizer_without_state_is_expected_to_allocate_it() -> None:
    weight = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.AdamW([weight])
    assert weight_sample.expected_state(optimizer, [weight]) >= 2 * weight.nbytes
    weight.sum().backward()
    optimizer.step()
    assert weight_sample.expected_state(optimizer, [weight]) == 0


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=8), st.integers(0, 1 << 24))
def test_the_copies_of_all_weights_fit_into_the_limit(sizes: list[int], limit: int) -> None:
    weights = [torch.empty(size, device="meta") for size in sizes]
    most = weight_sample.sample_size(weights, limit)
    if most != NO_ROOM:
        assert sum(min(size, most) * 4 for size in sizes) <= limit
    if sum(4 * size for size in sizes) <= limit:
        assert most >= max(sizes), "everything is exact where it fits"


# --- The sample -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(RUN, 4 * RUN * RUN))
def test_a_sample_reads_distinct_elements_from_end_to_end(rows: int, columns: int, most: int) -> None:
    weight = torch.arange(rows * columns).view(rows, columns)
    if weight.numel() <= most:
        return
    sample = weight_sample.sample(weight, most)
    assert sample is not None
    read = sample.flatten().numpy()
    assert len(read) == len(set(read.tolist())) <= most
    runs_of = np.diff(sample[:, 0].numpy())
    assert (runs_of == runs_of[0]).all() if len(runs_of) else True
    assert rows * columns - read.max() <= (runs_of[0] if len(runs_of) else rows * columns) + RUN


@pytest.mark.parametrize("shape", [(512, 512), (300, 1024), (1024, 96), (64, 64, 3, 3), (1000, 1000)])
def test_a_sample_covers_the_columns_evenly(shape: tuple[int, ...]) -> None:
    weight = torch.arange(int(np.prod(shape))).view(shape)
    sample = weight_sample.sample(weight, weight.numel() // 8)
    assert sample is not None
    width = weight.numel() // shape[0]
    per_column = np.bincount(sample.flatten().numpy() % width, minlength=width)
    assert per_column.max() <= 2 * max(per_column.mean(), 1) + 2
    assert (per_column > 0).mean() > 0.9


def test_a_transposed_weight_is_sampled_in_its_memory_and_a_strided_one_not_at_all() -> None:
    weight = torch.randn(300, 500)
    transposed = weight_sample.sample(weight.t(), 10_000)
    assert transposed is not None
    assert transposed.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert weight_sample.sample(weight[:, ::2], 10_000) is None


# --- What a watch shows ---------------------------------------------------------------------------


def exact_and_sampled(memory: DeviceMemory, writer: Any = None) -> tuple[tbhooks.Watch, tbhooks.Watch]:
    made = []
    for free in (1 << 30, 100 << 10):
        memory.free = 1 << 30
        trained = model()
        optimizer = train(trained, 1)
        memory.free = free
        with tbhooks.watch(trained, writer if free < MB else None, every=1) as watching:
            train(trained, 2, optimizer)
        assert watching.stats.errors == 0
        made.append(watching)
    return made[0], made[1]


def test_norm_and_ratio_of_a_sampled_update_are_close_and_marked(memory: DeviceMemory) -> None:
    exact, sampled = exact_and_sampled(memory)
    assert exact.latest is not None
    assert sampled.latest is not None
    one, other = exact.latest["0.weight", "update"], sampled.latest["0.weight", "update"]
    assert not one.is_sampled
    assert other.is_sampled
    assert 0.05 < other.sampled_fraction < 0.2
    assert other.count == one.count == 60_000
    for name in ("norm", "rms", "std", "ratio"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=0.02), name
    assert other.counts.sum() == pytest.approx(one.count, rel=1e-3)
    assert not sampled.latest["2.weight", "update"].is_sampled, "it is small"
    assert sampled.latest["2.weight", "update"].norm == exact.latest["2.weight", "update"].norm
    assert not sampled.latest["0.weight", "weight"].is_sampled


def test_a_sampled_update_takes_no_more_memory_than_its_budget(memory: DeviceMemory) -> None:
    trained = model()
    optimizer = train(trained, 1)
    memory.free = 100 << 10
    held = []
    with tbhooks.watch(trained, every=1) as watching:
        copies = watching._session.parameters._snapshots._clones
        optimizer.register_step_pre_hook(  # called after the hook of the watch
            lambda *_: held.append(sum(c.nbytes for c in watching._session.parameters._snapshots._clones.values()))
        )
        train(trained, 2, optimizer)
    assert not copies
    assert 0 < max(held) <= memory.free // 2


def test_where_no_sample_fits_the_update_is_unseen_and_says_why(memory: DeviceMemory) -> None:
    trained = model()
    optimizer = train(trained, 1)
    memory.free = 4000
    with tbhooks.watch(trained, every=1) as watching:
        train(trained, 2, optimizer)
        assert watching.latest is not None
        assert ("0.weight", "update") not in watching.latest
        assert ("0.weight", "weight") in watching.latest
        assert "free memory" in watching.stats.unseen["update/0.weight"]
        memory.free = 1 << 30
        train(trained, 2, optimizer)
        assert ("0.weight", "update") in watching.latest
        assert "update/0.weight" not in watching.stats.unseen
    assert watching.stats.errors == 0


def test_the_first_step_leaves_room_for_the_optimizers_state(memory: DeviceMemory) -> None:
    trained = model()
    weights = sum(parameter.nbytes for parameter in trained.parameters())
    memory.free = 5 * weights  # enough for a copy, but not beside the state of AdamW and its temporaries
    with tbhooks.watch(trained, every=1) as watching:
        optimizer = train(trained, 1)
        train(trained, 1, optimizer)
    first, second = watching.history
    assert ("0.weight", "update") not in first or first["0.weight", "update"].is_sampled
    assert not second["0.weight", "update"].is_sampled


def test_the_sample_does_not_grow_again(memory: DeviceMemory) -> None:
    trained = model()
    optimizer = train(trained, 1)
    with tbhooks.watch(trained, every=1) as watching:
        for free in (1 << 30, 100 << 10, 1 << 30):
            memory.free = free
            train(trained, 1, optimizer)
    assert [frame["0.weight", "update"].is_sampled for frame in watching.history] == [False, True, True]


def test_a_layer_with_an_output_for_each_word_is_never_sampled() -> None:
    embedding, hidden, head = nn.Embedding(600, 40), nn.Linear(40, 40), nn.Linear(40, 600)
    found = weight_sample.updated_in_few_rows(nn.Sequential(embedding, hidden, head))
    assert found == {id(embedding.weight), id(head.weight)}


def test_an_embedding_is_never_sampled(memory: DeviceMemory) -> None:
    """A few rows may have all of its update."""
    trained = fake_device.to_device(nn.Sequential(nn.Embedding(600, 40), nn.Linear(40, 1000)))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    words = fake_device.put(torch.tensor([3, 5]))
    with tbhooks.watch(trained, every=1) as watching:
        for free in (1 << 30, 300 << 10, 100 << 10):
            trained(words).square().mean().backward()
            memory.free = free
            optimizer.step()
    small_model, middle, small = watching.history
    assert not small_model["0.weight", "update"].is_sampled
    assert not middle["0.weight", "update"].is_sampled
    assert middle["1.weight", "update"].is_sampled
    assert ("0.weight", "update") not in small
    assert "free memory" in watching.stats.unseen["update/0.weight"]
    assert watching.stats.errors == 0


# --- In files -------------------------------------------------------------------------------------


def test_the_mark_is_read_back_from_event_files_and_makes_no_chart(memory: DeviceMemory, tmp_path: Path) -> None:
    _, sampled = exact_and_sampled(memory, tmp_path)
    run = runs.read(tmp_path)
    assert sampled.latest is not None
    stored = run.frames[-1]["0.weight", "update"]
    assert stored.is_sampled
    assert stored.sampled_fraction == pytest.approx(sampled.latest["0.weight", "update"].sampled_fraction)
    assert not run.frames[-1]["2.weight", "update"].is_sampled
    assert not any(tag.startswith(SAMPLED) for tag in run.scalars)


def test_a_change_to_sampled_begins_a_new_tag(memory: DeviceMemory, tmp_path: Path) -> None:
    trained = model()
    optimizer = train(trained, 1)
    with tbhooks.watch(trained, tmp_path, every=1):
        for free in (1 << 30, 100 << 10, 100 << 10):
            memory.free = free
            train(trained, 1, optimizer)
    marks = [frame["0.weight", "update"].is_sampled for frame in runs.read(tmp_path).frames]
    assert marks == [False, True, True]


def test_the_mark_is_read_back_from_json_lines(memory: DeviceMemory, tmp_path: Path) -> None:
    exact_and_sampled(memory, tbhooks.JsonlSink(tmp_path / "run.jsonl"))
    assert runs.read(tmp_path / "run.jsonl").frames[-1]["0.weight", "update"].is_sampled


def test_the_report_says_which_updates_are_estimates(memory: DeviceMemory, tmp_path: Path) -> None:
    exact_and_sampled(memory, tmp_path)
    run = runs.read(tmp_path)
    assert list(report_data.sampled(run)) == ["0.weight"]
    text = " ".join(note for section in run_report(run, 120) for note in section.notes)
    assert "updates of 1 parameters are estimates" in text
    assert "0.weight" in text
    assert "Updates of 1 parameters are estimates" in report_html.page(run)
    sites = {(site["path"], site["kind"]): site for site in report_data.document(run)["sites"]}
    assert 0 < sites["0.weight", "update"]["sampled"] < 1
    assert "sampled" not in sites["0.weight", "weight"]


# --- Ranks ----------------------------------------------------------------------------------------


def test_replicas_with_samples_of_different_sizes_count_once() -> None:
    numbers = np.random.default_rng(0).normal(size=4000)
    tables = []
    for share in (1000, 2000):
        row = stats.extrapolated(row_of(numbers[:share]), 4000)
        site, shard = Site("w", "update"), np.array([[0, 1]])
        marks = {f"{SAMPLED}w": share / 4000}
        tables.append(StepTable(0, [site], row[None], np.zeros((1, 0), np.int64), shard, marks))
    merged = merge(tables).table
    assert merged.values[0, stats.COUNT] == 4000
    assert merged.scalars[f"{SAMPLED}w"] < 1


# --- Half precision -------------------------------------------------------------------------------


def difference(dtype: torch.dtype, n: int) -> tuple[fake_device.Log, Tensor, Any]:
    torch.manual_seed(0)
    after, before = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=False)
    site = recorder.number(Site("w", "update"))
    on_device = fake_device.put(after), fake_device.put(before)
    recorder.record_difference(site, *(tensor[:10] for tensor in on_device))  # makes the buffer
    recorder.begin(with_buckets=False)
    with fake_device.Log() as log:
        recorder.record_difference(site, *on_device)
    return log, after.float() - before.float(), recorder.pack(0, 0).frames()[-1]["w", "update"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_difference_of_half_precision_takes_temporaries_of_one_part(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, parts = 1000, 40
    monkeypatch.setattr(reducers, "PART", part)
    monkeypatch.setattr(reducers, "MOST_PARTS", 10**9)
    log, expected, reading = difference(dtype, part * parts)
    of_one_part = part * 80  # the difference, and what a row takes of it; four bytes of each element would be 160,000
    assert log.peak_bytes <= of_one_part + parts * 300
    exact = reference.stats(reference.to_numpy(expected))
    assert reading.norm == pytest.approx(exact["norm"], rel=1e-6)
    assert reading.count == part * parts
