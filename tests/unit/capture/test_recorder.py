"""One step's records: many calls, many sites, scalars and sparse tensors become one frame, and memory stays bounded."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tbhooks
from tbhooks.capture.recording import reducers
from tbhooks.capture.recording.calls import ROOM
from tbhooks.capture.recording.recorder import NO_SITE, Buffer, Recorder
from tbhooks.data import stats
from tbhooks.data.frame import KINDS, Frame, Site
from tbhooks.reduction import cpu
from tests.support import reference
from tests.support.fake_device import put
from tests.support.tensors import assert_same_stats, reduced

pytestmark = pytest.mark.usefixtures("both_kernels")

A, B = Site("a", "activation"), Site("b", "activation")
WEIGHT, UPDATE = Site("a.weight", "weight"), Site("a.weight", "update")


def started(*, with_buckets: bool = True, kinds: tuple[str, ...] = KINDS) -> Recorder:
    recorder = Recorder(kinds)
    recorder.begin(with_buckets)
    return recorder


def taken(recorder: Recorder, step: int = 0) -> Frame:
    return recorder.pack(step, rank=0).frames()[-1]


def assert_holds(frame: Frame, site: Site, *tensors: torch.Tensor) -> None:
    data = np.concatenate([reference.to_numpy(tensor).ravel() for tensor in tensors])
    reading = frame[site.name, site.kind]
    assert_same_stats(lambda name: getattr(reading, name), data)
    if frame.buckets.shape[1]:
        assert np.array_equal(reading.counts, reference.bucket_counts(data))


# --- Sites and calls ------------------------------------------------------------------------------


def test_a_site_keeps_its_number() -> None:
    recorder = Recorder(KINDS)
    assert [recorder.number(site) for site in (A, B, A, B)] == [0, 1, 0, 1]
    assert recorder.sites == [A, B]


def test_a_kind_nobody_asked_for_has_no_site() -> None:
    recorder = Recorder(("gradient",))
    assert recorder.number(A) == NO_SITE
    assert not recorder.sites
    assert recorder.wants("gradient", "activation")
    assert not recorder.wants("activation", "weight")


@pytest.mark.parametrize("with_buckets", [True, False])
def test_sites_come_in_the_order_of_their_first_call(with_buckets: bool) -> None:
    recorder = started(with_buckets=with_buckets)
    a, b = recorder.number(A), recorder.number(B)
    x, y, z = torch.randn(5), torch.randn(2, 3), torch.randn(4)
    for site, tensor in ((b, x), (a, y), (b, z)):
        recorder.record(site, tensor)
    frame = taken(recorder, step=7)
    assert frame.sites == (B, A)
    assert (frame.step, frame.rank) == (7, 0)
    assert frame.buckets.shape == (2, stats.BUCKETS if with_buckets else 0)
    assert_holds(frame, A, y)
    assert_holds(frame, B, x, z)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(width=32), max_size=6), min_size=1, max_size=8))
def test_several_calls_of_one_site_count_as_one_tensor(calls: list[list[float]]) -> None:
    tensors = [torch.tensor(call, dtype=torch.float32) for call in calls]
    recorder = started()
    for tensor in tensors:
        recorder.record(recorder.number(A), tensor)
    assert_holds(taken(recorder), A, *tensors)


def test_calls_of_different_types_merge() -> None:
    tensors = [torch.randn(9, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    recorder = started()
    for tensor in tensors:
        recorder.record(recorder.number(A), tensor)
    assert_holds(taken(recorder), A, *tensors)


def test_a_shared_record_gives_a_second_site_the_same_numbers() -> None:
    recorder = started()
    x, y = torch.randn(6), torch.randn(3)
    span = recorder.record(recorder.number(A), x)
    assert span is not None
    recorder.share(recorder.number(B), span)
    recorder.record(recorder.number(B), y)
    pending = recorder.pack(0, 0)
    assert len(pending.copies[0].host) == 2
    (frame,) = pending.frames()
    assert_holds(frame, A, x)
    assert_holds(frame, B, x, y)


def test_a_long_tensor_is_shared_with_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "PART", 4)
    monkeypatch.setattr(reducers, "MOST_PARTS", 10**9)
    recorder = started()
    x = torch.randn(11)
    span = recorder.record(recorder.number(A), x)
    assert span is not None
    recorder.share(recorder.number(B), span)
    frame = taken(recorder)
    assert_holds(frame, A, x)
    assert_holds(frame, B, x)


# --- Steps ----------------------------------------------------------------------------------------


def test_a_step_leaves_nothing_behind_for_the_next() -> None:
    recorder = started()
    for step in range(4):
        recorder.begin(with_buckets=step % 3 != 2)
        tensors = [torch.randn(10) * 10**step for _ in range(3 - step % 2)]
        for tensor in tensors:
            recorder.record(recorder.number(A), tensor)
        assert_holds(taken(recorder, step), A, *tensors)


def test_restart_forgets_the_calls_and_the_scalars() -> None:
    recorder = started()
    recorder.record(recorder.number(A), torch.full((3,), 1e6))
    recorder.scalar("train/loss", torch.tensor(1.0))
    recorder.restart()
    assert recorder.pack(0, 0).frames() == []
    x = torch.randn(4)
    recorder.record(recorder.number(A), x)
    frame = taken(recorder)
    assert_holds(frame, A, x)
    assert not frame.scalars


def test_a_step_under_way_is_not_disturbed_by_the_next() -> None:
    recorder = started()
    x, y = torch.randn(5), torch.randn(8)
    recorder.record(recorder.number(A), x)
    first = recorder.pack(0, 0)
    recorder.begin(with_buckets=True)
    recorder.record(recorder.number(A), y)
    recorder.number(B)
    second = recorder.pack(1, 0)
    assert_holds(first.frames()[-1], A, x)
    assert_holds(second.frames()[-1], A, y)


def test_the_buffer_grows_with_the_step() -> None:
    recorder = started()
    for _ in range(2):
        tensors = [torch.randn(3) for _ in range(300)]
        for tensor in tensors:
            recorder.record(recorder.number(A), tensor)
        assert_holds(taken(recorder), A, *tensors)
    assert not recorder.overflowed


def test_a_step_of_nothing_makes_no_frame() -> None:
    assert started().pack(0, 0).frames() == []


def test_inference_mode_may_come_and_go_within_a_step() -> None:
    recorder = started()
    tensors = [torch.randn(3) for _ in range(300)]
    for i, tensor in enumerate(tensors):
        with torch.inference_mode(i // 50 % 2 == 0):
            recorder.record(recorder.number(A), tensor)
    with torch.inference_mode():
        frame = taken(recorder)
    assert_holds(frame, A, *tensors)
    recorder.begin(with_buckets=True)
    recorder.record(recorder.number(A), tensors[0])
    assert_holds(taken(recorder), A, tensors[0])


# --- Bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_buckets", [True, False])
def test_a_step_that_never_ends_is_bounded_and_flagged(with_buckets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbhooks.capture.recording.device_buffer.MOST_BYTES", 300_000)
    recorder = started(with_buckets=with_buckets)
    tensors = [torch.full((2,), float(i)) for i in range(10_000)]
    for tensor in tensors:
        recorder.record(recorder.number(A), tensor)
    recorder.record(recorder.number(B), torch.ones(5))
    assert recorder.overflowed
    pending = recorder.pack(0, 0)
    host = pending.copies[0].host
    assert 100_000 < host.nbytes <= 300_000
    (frame,) = pending.frames()
    assert_holds(frame, A, *tensors[: len(host)])
    assert_holds(frame, B, torch.ones(0))


def test_the_step_after_an_overflow_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbhooks.capture.recording.device_buffer.MOST_BYTES", 0)
    recorder = started()
    for _ in range(100):
        recorder.record(recorder.number(A), torch.ones(2))
    recorder.scalar("train/loss", torch.tensor(3.0))
    frame = taken(recorder)
    assert frame["a", "activation"].count == 128
    assert not frame.scalars
    recorder.begin(with_buckets=True)
    recorder.record(recorder.number(A), torch.ones(3))
    assert_holds(taken(recorder), A, torch.ones(3))


def test_a_step_within_bounds_is_not_flagged() -> None:
    recorder = started()
    for _ in range(100):
        recorder.record(recorder.number(A), torch.ones(2))
    assert not recorder.overflowed


# --- Sparse ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_sparse_tensors_equal_their_dense_selves(data: st.DataObject, dtype: torch.dtype) -> None:
    """Uncoalesced, with whole numbers so that the order of adding up duplicates does not matter."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dense_dims = data.draw(st.lists(st.integers(1, 3), max_size=1))
    n = data.draw(st.integers(0, 12))
    indices = [[data.draw(st.integers(0, size - 1)) for _ in range(n)] for size in shape]
    numbers = st.one_of(st.integers(-8, 8).map(float), st.sampled_from([math.nan, math.inf]))
    count = n * math.prod(dense_dims)
    flat = data.draw(st.lists(numbers, min_size=count, max_size=count))
    values = torch.tensor(flat, dtype=dtype).reshape(n, *dense_dims)
    sparse = torch.sparse_coo_tensor(
        torch.tensor(indices, dtype=torch.int64).reshape(len(shape), n), values, (*shape, *dense_dims),
        check_invariants=True,
    )  # fmt: skip
    dense, as_sparse = reduced(sparse.to_dense()), reduced(sparse)
    assert_same_stats(lambda name: getattr(as_sparse, name), reference.to_numpy(sparse))
    assert np.array_equal(as_sparse.counts, dense.counts)


def test_duplicates_of_a_sparse_tensor_add_up() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, -1.0, 2.0], (4,), check_invariants=True)
    reading = reduced(sparse)
    assert (reading.count, reading.max, reading.min, reading.zero_fraction) == (4, 2.0, 0.0, 0.75)


def test_sparse_whole_numbers_hold_nothing_to_read() -> None:
    recorder = started()
    assert recorder.record(recorder.number(A), torch.eye(3, dtype=torch.int64).to_sparse()) is None
    assert recorder.pack(0, 0).frames() == []


def test_a_sparse_gradient_may_have_more_elements_than_32_bits_can_count() -> None:
    table = torch.sparse_coo_tensor([[1], [1]], [3.0], (2**20, 2**12), check_invariants=True)
    reading = reduced(table)
    assert reading.count == 2**32
    assert reading.counts.sum() == 2**32


# --- Scalars --------------------------------------------------------------------------------------


def test_scalars_ride_in_the_same_copy() -> None:
    recorder = started()
    x = torch.randn(4)
    recorder.record(recorder.number(A), x)
    loss = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    recorder.scalar("train/loss", loss)
    recorder.scalar("train/accuracy", torch.tensor([[0.25]], dtype=torch.bfloat16))
    recorder.scalar("train/tokens", torch.tensor(2**40 + 1))
    recorder.scalar("train.lr/0", 1e-3)
    assert recorder.scalar_tags == {"train/loss", "train/accuracy", "train/tokens", "train.lr/0"}
    pending = recorder.pack(0, 0)
    assert len(pending.copies) == 1
    (frame,) = pending.frames()
    assert frame.scalars == {
        "train/loss": 0.1, "train/accuracy": 0.25, "train/tokens": 2**40 + 1, "train.lr/0": 1e-3,
    }  # fmt: skip
    assert frame.sites == (A,)
    assert_holds(frame, A, x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_a_scalar_may_be_anything(value: float) -> None:
    recorder = started()
    recorder.scalar("train/loss", torch.tensor(value))
    recorder.scalar("train/same", value)
    (frame,) = recorder.pack(0, 0).frames()
    assert frame.sites == ()
    assert [*frame.scalars.values()] == pytest.approx([value, value], nan_ok=True)


def test_a_scalar_is_what_it_was_when_it_was_logged() -> None:
    recorder = started()
    loss = torch.tensor(1.0)
    recorder.scalar("train/loss", loss)
    loss.fill_(9.0)
    assert taken(recorder).scalars == {"train/loss": 1.0}


def test_the_last_value_of_a_tag_counts() -> None:
    recorder = started()
    recorder.scalar("train/loss", torch.tensor(1.0))
    recorder.scalar("train/loss", 2.0)
    assert taken(recorder).scalars == {"train/loss": 2.0}


def test_late_scalars_come_first_in_frames_of_their_own() -> None:
    recorder = started()
    x = torch.randn(4)
    recorder.record(recorder.number(A), x)
    recorder.scalar("train/loss", torch.tensor(3.0))
    recorder.scalar("train/loss", torch.tensor(1.0), earlier_step=10)
    recorder.scalar("train/accuracy", 0.5, earlier_step=10)
    recorder.scalar("train/loss", torch.tensor(2.0), earlier_step=15)
    frames = recorder.pack(20, rank=3).frames()
    assert [frame.step for frame in frames] == [10, 15, 20]
    assert [dict(frame.scalars) for frame in frames] == [
        {"train/loss": 1.0, "train/accuracy": 0.5}, {"train/loss": 2.0}, {"train/loss": 3.0},
    ]  # fmt: skip
    assert [frame.sites for frame in frames] == [(), (), (A,)]
    assert {frame.rank for frame in frames} == {3}
    assert_holds(frames[-1], A, x)


def test_late_scalars_alone_make_no_frame_of_the_step_they_rode_in() -> None:
    recorder = started()
    recorder.scalar("train/loss", torch.tensor(1.0), earlier_step=10)
    assert [frame.step for frame in recorder.pack(20, 0).frames()] == [10]
    assert recorder.pack(30, 0).frames() == []


# --- Updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("weight", "update"), ("update",)])
def test_an_update_is_measured_against_its_weight_whether_or_not_that_is_shown(kinds: tuple[str, ...]) -> None:
    recorder = started(kinds=kinds)
    weight, update = torch.randn(20), torch.randn(20) * 1e-3
    recorder.record(recorder.number(WEIGHT), weight)
    recorder.record(recorder.number(UPDATE), update)
    frame = taken(recorder)
    expected = [reference.stats(reference.to_numpy(x))["norm"] for x in (update, weight)]
    assert frame["a.weight", "update"].ratio == pytest.approx(expected[0] / expected[1], rel=1e-9)
    assert_holds(frame, UPDATE, update)
    assert {site.kind for site in frame.sites} == set(kinds)


# --- Several devices ------------------------------------------------------------------------------


def test_calls_on_two_devices_meet_in_one_frame() -> None:
    recorder = started()
    x, y, z = torch.randn(3), torch.randn(2, 4), torch.randn(5)
    for site, tensor in ((A, x), (B, put(y)), (A, put(z))):
        recorder.record(recorder.number(site), tensor)
    recorder.scalar("train/loss", put(torch.tensor(0.5)))
    pending = recorder.pack(0, 0)
    assert len(pending.copies) == 2
    (frame,) = pending.frames()
    assert frame.sites == (A, B)
    assert_holds(frame, A, x, z)
    assert_holds(frame, B, y)
    assert frame.scalars == {"train/loss": 0.5}


def test_a_buffer_that_could_not_grow_hands_out_no_memory_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Buffer(torch.zeros(()), with_buckets=False, capacity=64)
    while len(made._chunks) < 2:
        made.take()
    grow = made._grow

    def fail(_records: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made, "_grow", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.reset()
    monkeypatch.setattr(made, "_grow", grow)
    assert made.take() == 0
    assert made.header[ROOM] >= 1
    assert len(made._chunks) == 1


def test_memory_for_copies_of_weights_is_given_back_in_the_end() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = tbhooks.watch(model, every=1)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    watching.close()
    assert watching._session.parameters._snapshots._block is None


def test_a_step_does_not_end_while_another_thread_is_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes to addresses in the buffer, with the GIL released: it must not be emptied under it."""
    if cpu.library is None:
        pytest.skip("built without the C kernel")
    reading, go_on, order = threading.Event(), threading.Event(), []

    def slow(*_: object) -> None:
        reading.set()
        go_on.wait(20)
        order.append("read")

    monkeypatch.setattr(cpu, "reduce", slow)
    recorder = Recorder(KINDS)
    recorder.begin(with_buckets=False)
    site = recorder.number(Site("a", "activation"))
    reader = threading.Thread(target=recorder.record, args=(site, torch.ones(3)))
    reader.start()
    assert reading.wait(20)
    ender = threading.Thread(target=lambda: (recorder.restart(), order.append("ended")))
    ender.start()
    ender.join(0.2)
    go_on.set()
    reader.join(20)
    ender.join(20)
    assert order == ["read", "ended"]


def test_weights_that_were_not_read_have_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies were to be made while reading, so there are none, and whatever lies in their place is none."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        with_room, lacks_room = Recorder.record_all, iter([True])
        monkeypatch.setattr(
            Recorder, "record_all",
            lambda self, wanted: with_room(self, wanted) if not wanted or not next(lacks_room, False) else False,
        )  # fmt: skip
        monkeypatch.setattr(Recorder, "record_described", lambda *_, **__: False)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    if cpu.library is not None:
        assert not any(site.kind == "update" for site in watching.latest.sites)
    assert watching.stats.errors == 0
