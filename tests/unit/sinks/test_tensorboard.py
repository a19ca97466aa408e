"""Frames in TensorBoard: tags, values, one event a step, and the user's writer left as it was."""

from __future__ import annotations

import contextlib
import html
import json
import logging
import math
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard import plugin_util
from tensorboard.compat.proto import summary_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as stock_crc
from tensorboard.summary.writer import record_writer
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import JsonlSink, MemorySink, runs
from tbhooks.data import stats
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import KINDS, Finding, Frame, Site
from tbhooks.data.process.patching import Patch
from tbhooks.delivery import worker as pump_module
from tbhooks.sinks.tensorboard import STORED_COLUMNS, TensorBoardSink, decode_counts, decode_values, event_files
from tbhooks.sinks.tensorboard.histograms import SiteHistograms
from tests.support import frames
from tests.support.frames import make_frame

Log = pytest.LogCaptureFixture
X = Site("x", "activation")
# Ten half-octaves a side are wide, and one more may be cut; of the rest 21 may lie across a quantile, and runs between.
MOST_BARS = 2 * 11 + 2 * 21 + 1


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a fast loop is dropped because the machine is busy."""
    monkeypatch.setattr(pump_module, "QUEUE_STEPS", 10_000)


def write(directory: Path, *given: Frame, scalars: object = "core") -> Path:
    """Frames through a sink of its own."""
    sink = TensorBoardSink(directory, scalars)
    for frame in given:
        sink.write(frame)
    sink.close()
    return directory


def slow_down(file: Any, method: str) -> None:
    """Makes a writer's own file a slow one."""
    stock = getattr(file, method)

    def on_a_slow_disk(data: Any) -> Any:
        time.sleep(0.05)
        return stock(data)

    setattr(file, method, on_a_slow_disk)


def watched_steps(directory: Path, tag: str = "activation.std/0") -> list[int]:
    return sorted(frames.scalar_series(directory, tag))


# --- Tags and values --------------------------------------------------------------------------------


def test_core_tags_of_a_training_are_exactly_these(tmp_path: Path, roomy: None) -> None:
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    with tbhooks.watch(model, tmp_path, every=1) as w:
        for _ in range(3):
            w.log({"loss": frames.train_step(model, optimizer)})
    modules, parameters = ("0", "1", "2", "(root)"), ("0.weight", "0.bias", "2.weight", "2.bias")
    scalars = {f"activation.{stat}/{path}" for stat in ("mean", "std", "zero_fraction") for path in modules}
    scalars |= {f"gradient.norm/{path}" for path in modules}
    of_parameters = ("weight.norm", "weight_gradient.norm", "update.ratio")
    scalars |= {f"{tag}/{path}" for tag in of_parameters for path in parameters}
    scalars |= {"train/loss", "train.lr/0", "train.grad_norm", "train.grad_norm_raw"}
    distributions = {f"{kind}/{path}" for kind in ("activation", "gradient") for path in modules}
    distributions |= {f"{kind}/{path}" for kind in ("weight", "weight_gradient") for path in parameters}
    tensors = {f"tbhooks/{kind}{what}" for kind in KINDS for what in ("", ".buckets")} | {"tbhooks/outcome"}
    read = frames.accumulator(tmp_path)
    assert set(read.Tags()["scalars"]) == scalars
    assert set(read.Tags()["histograms"]) == distributions
    assert set(read.Tags()["tensors"]) == tensors
    assert all(tag.count("/") == 1 for tag in scalars | distributions | tensors if "grad_norm" not in tag)


def test_scalars_read_back_are_the_frames(tmp_path: Path, roomy: None) -> None:
    model, kept = frames.make_model(), MemorySink()
    optimizer = frames.make_optimizer(model)
    with tbhooks.watch(model, [tmp_path, kept], every=2) as w:
        for _ in range(5):
            w.log({"loss": frames.train_step(model, optimizer)})
    assert [frame.step for frame in kept] == [0, 2, 4]
    read = frames.accumulator(tmp_path)
    for tag in set(read.Tags()["scalars"]):
        what, _, path = tag.partition("/")
        kind, _, stat = what.partition(".")
        points = {point.step: point.value for point in read.Scalars(tag)}
        reported = {
            frame.step: frame.scalars[tag] if kind == "train" else getattr(frame[path, kind], stat) for frame in kept
        }
        assert points == pytest.approx(reported, rel=1e-6), tag


def test_the_event_has_the_step_and_time_of_the_frame(tmp_path: Path) -> None:
    write(tmp_path, make_frame(41), make_frame(7))
    read = [(event.step, event.wall_time) for event in frames.events(tmp_path) if event.HasField("summary")]
    assert read == [(41, 1e9 + 41), (7, 1e9 + 7)]


def test_one_event_a_logged_step_in_the_users_one_file_beside_the_users_own_scalars(
    tmp_path: Path, roomy: None
) -> None:
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    with SummaryWriter(str(tmp_path)) as writer:
        w = tbhooks.watch(model, writer, every=3)
        for step in range(10):
            loss = frames.train_step(model, optimizer)
            writer.add_scalar("mine/loss", loss.item(), step)
            w.log({"loss": loss})
        w.close()
    assert len(frames.event_files(tmp_path)) == 1
    ours = [event for event in frames.events(tmp_path) if any("activation" in v.tag for v in event.summary.value)]
    assert [event.step for event in ours] == [0, 3, 6, 9]
    assert frames.events_by_step(tmp_path) == {step: 1 + (step % 3 == 0) for step in range(10)}
    assert sorted(frames.scalar_series(tmp_path, "mine/loss")) == list(range(10))
    mine, theirs = frames.scalar_series(tmp_path, "mine/loss"), frames.scalar_series(tmp_path, "train/loss")
    assert theirs == {step: mine[step] for step in (0, 3, 6, 9)}


def test_a_frame_of_nothing_writes_no_event(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, {}))
    assert not frames.events_by_step(tmp_path)


def test_a_frame_of_scalars_alone_is_written(tmp_path: Path) -> None:
    write(tmp_path, make_frame(3, {}, scalars={"train/loss": 0.5}))
    assert frames.tags(tmp_path) == {"train/loss"}
    assert frames.scalar_series(tmp_path, "train/loss") == {3: 0.5}


def test_the_output_of_several_is_part_of_the_tag(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, {Site("rnn", "activation", "[0]"): [1.0, 3.0]}))
    assert frames.scalar_series(tmp_path, "activation.mean/rnn[0]") == {0: 2.0}
    assert (0, "activation/rnn[0]") in frames.histograms(tmp_path)


# --- scalars= ---------------------------------------------------------------------------------------


def scalar_tags(directory: Path) -> set[str]:
    return set(frames.accumulator(directory).Tags()["scalars"])


def test_scalars_all_are_every_stat_of_every_kind(tmp_path: Path) -> None:
    frame = make_frame()
    write(tmp_path, frame, scalars="all")
    wanted = {
        f"{site.kind}.{name}/{site.name}": getattr(frame[site.name, site.kind], name)
        for site in frame.sites
        for name in stats.STAT_NAMES
        if name != "ratio" or site.kind == "update"
    }
    assert scalar_tags(tmp_path) == set(wanted)
    for tag, value in wanted.items():
        assert frames.scalar_series(tmp_path, tag) == {0: pytest.approx(value, rel=1e-6)}


@pytest.mark.parametrize(
    ("scalars", "tags"),
    [
        ((), set()),
        ("activation.std", {"activation.std/0"}),
        (["activation.std", "weight.p50"], {"activation.std/0", "weight.p50/0.weight"}),
        ("rms", {f"{site.kind}.rms/{site.name}" for site in frames.SOME}),
        (("update.ratio",), {"update.ratio/0.weight"}),
        (["activation.kurtosis", "weight.skewness"], {"activation.kurtosis/0", "weight.skewness/0.weight"}),
    ],
    ids=["none", "one", "two", "every kind", "ratio", "shape"],
)
def test_scalars_asked_for_by_name_are_written_alone(tmp_path: Path, scalars: object, tags: set[str]) -> None:
    write(tmp_path, make_frame(), scalars=scalars)
    assert scalar_tags(tmp_path) == tags


def test_what_is_logged_stays_when_no_stat_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, make_frame(scalars={"train/loss": 1.0, "train.lr/0": 0.1}), scalars=())
    assert scalar_tags(tmp_path) == {"train/loss", "train.lr/0"}
    assert frames.histograms(tmp_path)


@pytest.mark.parametrize("scalars", ["sdt", ["activation.sdt"], ["activatoin.std"], 5, None])
def test_unknown_scalars_are_refused_before_anything_is_opened(tmp_path: Path, scalars: object) -> None:
    with pytest.raises(ArgumentError, match=r"scalars must be|did you mean|choose from"):
        tbhooks.watch(frames.make_model(), tmp_path / "run", scalars=scalars)
    assert not (tmp_path / "run").exists()


# --- The frame tensors ------------------------------------------------------------------------------


def tensor_values(directory: Path) -> dict[tuple[int, str], Any]:
    return {
        (event.step, value.tag): value
        for event in frames.events(directory)
        for value in event.summary.value
        if value.HasField("tensor")
    }


def close_to(rows: Any) -> Any:
    return pytest.approx(rows, rel=1e-6)


def test_frame_tensors_hold_every_row_and_every_count(tmp_path: Path) -> None:
    written = [make_frame(0), make_frame(1, {site: np.array(x) * 1.5 for site, x in frames.SOME.items()})]
    write(tmp_path, *written)
    read = tensor_values(tmp_path)
    assert len(read) == 2 * 2 * len(KINDS)
    for frame in written:
        for kind in KINDS:
            rows = [i for i, site in enumerate(frame.sites) if site.kind == kind]
            array = tensor_util.make_ndarray(read[frame.step, f"tbhooks/{kind}"].tensor)
            assert array.dtype == np.float32
            assert array.shape == (len(rows), len(STORED_COLUMNS))
            np.testing.assert_allclose(decode_values(array), frame.values[rows], rtol=1e-6, atol=1e-12)
            (content,) = read[frame.step, f"tbhooks/{kind}.buckets"].tensor.string_val
            np.testing.assert_array_equal(decode_counts(content), frame.buckets[rows])


def test_the_first_value_of_a_tag_describes_it(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0), make_frame(1))
    read = tensor_values(tmp_path)
    for kind in KINDS:
        path = "0" if kind in {"activation", "gradient"} else "0.weight"
        reported = {"version": 2, "kind": kind, "sites": [[path, ""]]}
        for tag in (f"tbhooks/{kind}", f"tbhooks/{kind}.buckets"):
            assert read[0, tag].metadata.plugin_data.plugin_name == "tbhooks"
            assert not read[1, tag].HasField("metadata")
        content = json.loads(read[0, f"tbhooks/{kind}"].metadata.plugin_data.content)
        assert content == {**reported, "columns": list(STORED_COLUMNS)}
        content = json.loads(read[0, f"tbhooks/{kind}.buckets"].metadata.plugin_data.content)
        assert content == {**reported, "encoding": "zlib of a .npy array [sites, buckets]"}


def test_a_site_that_turns_up_later_starts_a_new_tag_with_the_longer_list(tmp_path: Path) -> None:
    late = Site("late", "activation")
    first, second = make_frame(0, {X: [1.0]}), make_frame(1, {late: [5.0, 7.0], X: [2.0]})
    only_late, again = make_frame(2, {late: [9.0]}), make_frame(3, {X: [3.0]})
    write(tmp_path, first, second, only_late, again)
    read = tensor_values(tmp_path)
    assert {tag for step, tag in read if step == 0} == {"tbhooks/activation", "tbhooks/activation.buckets"}
    for step in (1, 2, 3):
        assert {tag for at, tag in read if at == step} == {"tbhooks/activation.2", "tbhooks/activation.buckets.2"}
    metadata = read[1, "tbhooks/activation.2"].metadata
    assert metadata.plugin_data.plugin_name == "tbhooks"
    assert json.loads(metadata.plugin_data.content)["sites"] == [["x", ""], ["late", ""]]
    rows = decode_values(tensor_util.make_ndarray(read[1, "tbhooks/activation.2"].tensor))
    np.testing.assert_allclose(rows, second.values[[1, 0]], rtol=1e-6)
    rows = decode_values(tensor_util.make_ndarray(read[2, "tbhooks/activation.2"].tensor))
    assert rows[0, stats.COUNT] == 0
    np.testing.assert_allclose(rows[1], only_late.values[0], rtol=1e-6)
    counts = decode_counts(read[3, "tbhooks/activation.buckets.2"].tensor.string_val[0])
    np.testing.assert_array_equal(counts[0], again.buckets[0])
    assert not counts[1].any()


def test_an_output_of_several_keeps_its_index_in_the_description(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, {Site("rnn", "activation", "[1]"): [1.0]}))
    metadata = tensor_values(tmp_path)[0, "tbhooks/activation"].metadata
    assert json.loads(metadata.plugin_data.content)["sites"] == [["rnn", "[1]"]]


def test_counts_past_32_bits_are_exact(tmp_path: Path) -> None:
    frame = make_frame(0, {X: [1.0]})
    buckets = frame.buckets.copy()
    buckets[0, -1] = 2**40 + 1
    write(tmp_path, Frame(0, 0.0, 0, frame.sites, frame.values, buckets))
    (content,) = tensor_values(tmp_path)[0, "tbhooks/activation.buckets"].tensor.string_val
    np.testing.assert_array_equal(decode_counts(content), buckets)


def test_a_step_without_histograms_keeps_its_rows(tmp_path: Path) -> None:
    write(tmp_path, make_frame(histograms=False))
    assert not frames.histograms(tmp_path)
    assert set(frames.accumulator(tmp_path).Tags()["tensors"]) == {f"tbhooks/{kind}" for kind in KINDS}
    assert "activation.std/0" in scalar_tags(tmp_path)


# --- What is not finite, constant, empty -------------------------------------------------------------


def test_nan_and_infinity_are_counted_and_kept_out_of_histograms(tmp_path: Path) -> None:
    affected = [1.0, math.nan, -math.inf, math.inf, 3.0]
    write(tmp_path, make_frame(0, {X: [1.0, 3.0]}), make_frame(1, {X: affected}), make_frame(2, {X: [1.0, 3.0]}))
    assert frames.scalar_series(tmp_path, "activation.nan_count/x") == {1: 1.0}
    assert frames.scalar_series(tmp_path, "activation.inf_count/x") == {1: 2.0}
    assert frames.scalar_series(tmp_path, "activation.mean/x") == {0: 2.0, 1: 2.0, 2: 2.0}
    histo = frames.histograms(tmp_path)[1, "activation/x"]
    assert (histo.min, histo.max, histo.num, sum(histo.bucket)) == (1.0, 3.0, 2.0, 2.0)


def test_only_nan_alarms_when_only_nan_is_there(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, {Site("w", "weight"): [math.nan, 1.0]}))
    assert "weight.nan_count/w" in scalar_tags(tmp_path)
    assert "weight.inf_count/w" not in scalar_tags(tmp_path)


def test_alarms_are_not_written_twice_when_they_were_asked_for(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, {X: [math.nan]}), scalars=["nan_count"])
    (event,) = [event for event in frames.events(tmp_path) if event.HasField("summary")]
    assert [value.tag for value in event.summary.value].count("activation.nan_count/x") == 1


@pytest.mark.parametrize("data", [[math.nan, math.inf], []], ids=["nothing finite", "empty"])
def test_without_a_finite_value_there_is_no_histogram_and_no_stat(tmp_path: Path, data: list[float]) -> None:
    frame = make_frame(0, {X: data})
    write(tmp_path, frame)
    assert not frames.histograms(tmp_path)
    shown = {tag for tag in scalar_tags(tmp_path) if not tag.startswith("activation.zero_fraction")}
    assert shown == ({"activation.nan_count/x", "activation.inf_count/x"} if data else set())
    array = tensor_util.make_ndarray(tensor_values(tmp_path)[0, "tbhooks/activation"].tensor)
    np.testing.assert_allclose(decode_values(array), frame.values, rtol=1e-6)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf], ids=str)
def test_a_loss_that_is_not_finite_is_written_all_the_same(tmp_path: Path, loss: float) -> None:
    write(tmp_path, make_frame(0, scalars={"train/loss": loss}))
    assert str(frames.scalar_series(tmp_path, "train/loss")[0]) == str(loss)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, -3e-30, 1e-300, 5e9, -1e38, 1e150])
def test_a_constant_is_one_bucket_at_its_value(tmp_path: Path, value: float) -> None:
    write(tmp_path, make_frame(0, {X: [value] * 7}))
    histo = frames.histograms(tmp_path)[0, "activation/x"]
    assert (histo.min, histo.max, histo.num) == (value, value, 7.0)
    assert list(histo.bucket) == [7.0]
    assert list(histo.bucket_limit) == [value]


def test_numbers_whose_squares_overflow_warn_nobody(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(tmp_path, make_frame(0, {X: [1e200, 2e200]}))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=60))
def test_histogram_limits_ascend_within_the_range_and_counts_add_up(data: list[float]) -> None:
    check_histogram(np.array(data))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e20])
def test_histograms_of_tensors_ascend_within_the_range(scale: float) -> None:
    rng = np.random.default_rng(0)
    check_histogram(rng.normal(size=5000) * scale)
    check_histogram(rng.normal(size=5000) * scale + 5 * scale)
    check_histogram(np.abs(rng.normal(size=5000)) * scale)
    check_histogram(np.maximum(rng.normal(size=5000), 0) * scale)
    check_histogram(rng.integers(-3, 4, size=5000).astype(float) * scale)


def histogram_of(frame: Frame) -> Any:
    """The one histogram of a frame of one site."""
    (value,) = summary_pb2.Summary.FromString(SiteHistograms(frame.sites).encode(frame)).value
    return value.histo


def check_histogram(data: np.ndarray) -> None:
    finite = data[np.isfinite(data)]
    if not len(finite):
        return
    with np.errstate(over="ignore"):
        frame = make_frame(0, {X: data})
        histo = histogram_of(frame)
    limits, heights = np.array(histo.bucket_limit), np.array(histo.bucket)
    assert (histo.min, histo.max) == (finite.min(), finite.max())
    assert 0 < len(limits) == len(heights) <= MOST_BARS
    assert (np.diff(limits) >= 0).all()
    assert histo.min <= limits[0]
    assert limits[-1] == histo.max
    assert heights[0] > 0
    assert heights[-1] > 0
    assert heights.sum() == histo.num == len(finite)
    for i, limit in enumerate(limits):  # each limit tells how many lie below it; a value on it may lie on either side
        assert (finite < limit).sum() <= heights[: i + 1].sum() <= (finite <= limit).sum()


def test_histogram_moments_are_those_of_the_data() -> None:
    data = np.random.default_rng(1).normal(3.0, 2.0, size=1000)
    frame = make_frame(0, {X: data})
    histo = histogram_of(frame)
    assert histo.sum == pytest.approx(data.sum(), rel=1e-12)
    assert histo.sum_squares == pytest.approx(np.square(data).sum(), rel=1e-12)


# --- The checksum -----------------------------------------------------------------------------------


@contextlib.contextmanager
def held(patch: Patch) -> Iterator[Patch]:
    holder = ModuleType("holder")
    patch.acquire(holder)
    yield patch
    patch.release(holder)


def test_the_fast_checksum_is_in_place_while_a_sink_is_open(tmp_path: Path) -> None:
    first, second = TensorBoardSink(tmp_path / "first"), TensorBoardSink(tmp_path / "second")
    assert record_writer.masked_crc32c.__wrapped__ is stock_crc, "wrapped once, for however many sinks"
    first.close()
    assert record_writer.masked_crc32c.__wrapped__ is stock_crc
    second.close()
    assert record_writer.masked_crc32c is stock_crc


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=3000))
def test_the_fast_checksum_gives_the_bits_of_the_stock_one(data: bytes) -> None:
    with held(event_files.TENSORBOARD_CRC) as patch:
        assert patch.is_installed
        assert record_writer.masked_crc32c(data) == stock_crc(data)
        assert record_writer.masked_crc32c(bytearray(data)) == stock_crc(data)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=3000))
def test_tensorboardx_gets_the_fast_checksum_too(data: bytes) -> None:
    theirs = pytest.importorskip("tensorboardX.record_writer")
    with held(event_files.TENSORBOARDX_CRC):
        assert hasattr(theirs.masked_crc32c, "__wrapped__")
        assert theirs.masked_crc32c(data) == stock_crc(data)


def test_a_checksum_of_other_bits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other, none = ModuleType("other"), ModuleType("none")
    other.masked_crc32c = lambda data: 0  # type: ignore[attr-defined]
    for module in (other, none):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with held(event_files.crc_patch(module.__name__, "no version")) as patch:
            assert not patch.is_installed
    assert other.masked_crc32c(b"x") == 0


def test_tensorboard_accepts_our_checksums_and_would_notice_wrong_ones(tmp_path: Path) -> None:
    write(tmp_path, *(make_frame(step) for step in range(5)))
    assert frames.events_by_step(tmp_path) == dict.fromkeys(range(5), 1)
    (file,) = frames.event_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in the last record's checksum
    file.write_bytes(content)
    assert frames.events_by_step(tmp_path) == dict.fromkeys(range(4), 1)


# --- Whose writer it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_directory_gets_one_writer_that_is_closed_with_the_watch(
    tmp_path: Path, kind: Callable[[Path], Any], roomy: None
) -> None:
    model = frames.make_model()
    w = tbhooks.watch(model, kind(tmp_path / "new" / "run"), every=1)
    (sink,) = w._lifecycle.sinks
    assert isinstance(sink, TensorBoardSink)
    assert sink.destination == str(tmp_path / "new" / "run")
    frames.train(model, 4)
    w.close()
    assert sink.is_closed
    assert len(frames.event_files(tmp_path)) == 1
    assert watched_steps(tmp_path / "new" / "run") == [0, 1, 2, 3]


def test_after_close_the_users_writer_is_as_it_was_and_goes_on(tmp_path: Path, roomy: None) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    before = dict(writer.__dict__)
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, 2)
    w.close()
    assert writer.__dict__ == before
    assert writer.flush.__func__ is SummaryWriter.flush
    assert writer.close.__func__ is SummaryWriter.close
    writer.add_scalar("mine", 1.0, 5)
    writer.close()
    assert watched_steps(tmp_path) == [0, 1]
    assert frames.scalar_series(tmp_path, "mine") == {5: 1.0}


def test_a_method_the_user_set_on_the_writer_is_still_there_after_close(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    closed: list[str] = []
    stock = writer.close
    writer.close = lambda: (closed.append("mine"), stock())  # type: ignore[method-assign]
    tbhooks.watch(frames.make_model(), writer, every=1).close()
    writer.close()
    assert closed == ["mine"]


def close_writer(writer: Any) -> None:
    writer.close()


def leave_writer(writer: Any) -> None:
    with writer:
        pass


@pytest.mark.parametrize("end", [close_writer, leave_writer])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_writer_closed_before_the_watch_has_every_step_that_had_ended(
    tmp_path: Path, end: Callable[[Any], None], steps: int, roomy: None
) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, steps)
    end(writer)
    assert watched_steps(tmp_path) == list(range(steps))
    w.close()
    assert (w.stats.errors, w.stats.dropped) == (0, 0)
    assert len(frames.event_files(tmp_path)) == 1


def test_flushing_the_writer_brings_every_step_that_has_ended_to_disk(tmp_path: Path, roomy: None) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, 3)
    writer.flush()
    assert watched_steps(tmp_path) == [0, 1, 2]
    w.close()
    writer.close()


def test_flushing_the_watch_brings_every_step_that_has_ended_to_disk(tmp_path: Path, roomy: None) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path), max_queue=1000)
    slow_down(writer.file_writer.event_writer._async_writer._writer, "write")
    with tbhooks.watch(model, writer, every=1) as w:
        frames.train(model, 3)
        w.flush()
        assert watched_steps(tmp_path) == [0, 1, 2]
    writer.close()


def test_a_closed_writer_is_logged_once_counted_and_never_opened_again(
    tmp_path: Path, caplog: Log, roomy: None
) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, 2, optimizer)
    writer.close()
    with caplog.at_level(logging.DEBUG, "tbhooks"):
        frames.train(model, 3, optimizer)
        w.close()
    assert watched_steps(tmp_path) == [0, 1]
    assert len(frames.event_files(tmp_path)) == 1
    assert (w.stats.errors, w.stats.dropped) == (3, 3)
    reported = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert reported == [
        "TensorBoardSink: OSError: the SummaryWriter was closed before the watch",
        "a logged step was dropped: every sink failed to write it",
    ]


def test_two_watches_share_a_writer_and_close_in_either_order(tmp_path: Path, roomy: None) -> None:
    first, second = frames.make_model(), frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    w1 = tbhooks.watch(first, writer, every=1, scalars="activation.std")
    w2 = tbhooks.watch(second, writer, every=1, scalars="activation.mean")
    frames.train(first, 2)
    frames.train(second, 2)
    w1.close()
    writer.close()
    w2.close()
    assert w2.stats.dropped == 0
    assert watched_steps(tmp_path, "activation.std/0") == [0, 1]
    assert watched_steps(tmp_path, "activation.mean/0") == [0, 1]


def test_a_writer_that_is_closed_twice_is_no_trouble(tmp_path: Path, roomy: None) -> None:
    model = frames.make_model()
    writer = SummaryWriter(str(tmp_path))
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, 2)
    writer.close()
    writer.close()
    w.flush()
    w.close()
    assert watched_steps(tmp_path) == [0, 1]
    assert w.stats.errors == 0


# --- tensorboardX -----------------------------------------------------------------------------------


@pytest.fixture
def tensorboardx(tmp_path: Path) -> Iterator[Any]:
    module = pytest.importorskip("tensorboardX")
    writer = module.SummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def test_a_tensorboardx_writer_gets_the_same_and_tensorboard_reads_it(
    tmp_path: Path, tensorboardx: Any, roomy: None
) -> None:
    model, kept = frames.make_model(), MemorySink()
    w = tbhooks.watch(model, [tensorboardx, kept], every=1)
    frames.train(model, 3)
    tensorboardx.add_scalar("mine", 1.0, 2)
    w.close()
    tensorboardx.close()
    reported = {frame.step: pytest.approx(frame["0", "activation"].std, rel=1e-6) for frame in kept}
    assert frames.scalar_series(tmp_path, "activation.std/0") == reported
    assert sorted(reported) == [0, 1, 2]
    assert frames.scalar_series(tmp_path, "mine") == {2: 1.0}
    assert frames.events_by_step(tmp_path) == {0: 1, 1: 1, 2: 2}
    assert (1, "activation/0") in frames.histograms(tmp_path)
    array = tensor_util.make_ndarray(tensor_values(tmp_path)[1, "tbhooks/weight"].tensor)
    wanted = [i for i, site in enumerate(kept.frames[1].sites) if site.kind == "weight"]
    np.testing.assert_allclose(decode_values(array), kept.frames[1].values[wanted], rtol=1e-5)


def test_a_subclass_of_tensorboardxs_writer_works_too(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorboardX")
    writer = type("Mine", (module.SummaryWriter,), {})(str(tmp_path))
    model = frames.make_model()
    with tbhooks.watch(model, writer, every=1) as w:
        frames.train(model, 1)
    writer.add_scalar("mine", 1.0, 0)
    writer.close()
    assert w.stats.errors == 0
    assert frames.scalar_series(tmp_path, "mine") == {0: 1.0}
    assert frames.scalar_series(tmp_path, "activation.std/0")


def test_a_tensorboardx_writer_closed_before_the_watch_has_every_step_that_had_ended(
    tmp_path: Path, tensorboardx: Any, roomy: None
) -> None:
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, tensorboardx, every=1)
    frames.train(model, 3, optimizer)
    tensorboardx.close()
    assert watched_steps(tmp_path) == [0, 1, 2]
    frames.train(model, 2, optimizer)
    w.close()
    assert watched_steps(tmp_path) == [0, 1, 2]
    assert w.stats.dropped == 2
    assert "flush" not in tensorboardx.__dict__
    assert "close" not in tensorboardx.__dict__


def test_flush_brings_a_tensorboardx_writer_up_to_date(tmp_path: Path, tensorboardx: Any, roomy: None) -> None:
    slow_down(tensorboardx.file_writer.event_writer._ev_writer, "write_event")
    model = frames.make_model()
    with tbhooks.watch(model, tensorboardx, every=1) as w:
        frames.train(model, 4)
        w.flush()
        assert watched_steps(tmp_path) == [0, 1, 2, 3]


# --- Several sinks, failing ones, full disks ---------------------------------------------------------


class FailingSink:
    """Cannot write."""

    def write(self, frame: Frame) -> None:
        raise OSError("unplugged")

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_several_sinks_get_everything_and_one_that_fails_disturbs_none(
    tmp_path: Path, caplog: Log, roomy: None
) -> None:
    model, kept = frames.make_model(), MemorySink()
    lines = JsonlSink(tmp_path / "frames.jsonl")
    writers = [tmp_path / "run", FailingSink(), lines, kept]
    with caplog.at_level(logging.WARNING, "tbhooks"), tbhooks.watch(model, writers, every=1) as w:
        frames.train(model, 4)
    assert [frame.step for frame in kept] == [0, 1, 2, 3]
    assert watched_steps(tmp_path / "run") == [0, 1, 2, 3]
    assert len((tmp_path / "frames.jsonl").read_text().splitlines()) == 4
    assert (w.stats.errors, w.stats.dropped) == (4, 0)
    assert [record.message for record in caplog.records] == ["FailingSink: OSError: unplugged"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread dies
def test_a_full_disk_is_counted_logged_once_and_training_goes_on(tiny_disk: Path, caplog: Log, roomy: None) -> None:
    model = frames.make_model()
    w = tbhooks.watch(model, tiny_disk, every=1)
    with caplog.at_level(logging.WARNING, "tbhooks"):
        frames.train(model, 60)
        w.close()
    unwatched = frames.make_model()
    frames.train(unwatched, 60)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unwatched.parameters(), strict=True))
    assert w.stats.steps == 60
    written = watched_steps(tiny_disk)
    assert written == list(range(len(written)))
    assert 5 < len(written) < 60
    queued = 12  # what the writer had taken into its own queue when its thread died
    assert 60 - len(written) - queued <= w.stats.dropped <= 60 - len(written)
    assert w.stats.errors >= w.stats.dropped
    reported = [record.message for record in caplog.records]
    assert len(reported) == 2
    assert reported[0].startswith("TensorBoardSink: OSError: [Errno 28] No space left")
    assert "dropped" in reported[1]


def open_writer(kind: str, directory: Path) -> Any:
    if kind == "tensorboardX":
        return pytest.importorskip("tensorboardX").SummaryWriter(str(directory))
    return SummaryWriter(str(directory)) if kind == "torch" else directory


KINDS_OF_WRITER = ("directory", "torch", "tensorboardX")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread dies
@pytest.mark.parametrize("kind", KINDS_OF_WRITER)
def test_a_writer_goes_on_when_a_disk_that_was_full_has_room_again(tiny_disk: Path, kind: str) -> None:
    ballast, run = tiny_disk / "ballast", tiny_disk / "run"
    ballast.write_bytes(bytes(120 << 10))
    writer = open_writer(kind, run)
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, writer, every=1)
    frames.train(model, 50, optimizer)
    w.flush()
    dropped = w.stats.dropped
    assert dropped > 10
    ballast.unlink()
    frames.train(model, 10, optimizer)
    w.flush()
    assert w.stats.dropped == dropped
    assert watched_steps(run)[-10:] == list(range(50, 60))
    if kind == "torch":
        writer.add_scalar("mine/loss", 0.5, 7)
        writer.flush()
        assert frames.scalar_series(run, "mine/loss") == {7: 0.5}
    w.close()
    written = watched_steps(run)
    assert len(written) == w.stats.steps - w.stats.dropped
    assert len(frames.event_files(run)) == 1
    assert [frame.step for frame in runs.read(run).training] == written
    if kind != "directory":
        writer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", KINDS_OF_WRITER)
def test_frames_are_readable_where_the_first_one_did_not_fit(tmp_path: Path, kind: str) -> None:
    """It had the descriptions of all tags, without which the frame tensors mean nothing."""
    sink = TensorBoardSink(open_writer(kind, tmp_path))
    sink.flush()
    (file,) = frames.event_files(tmp_path)
    found = a_finding(0)
    for _ in range(2):
        with frames.full_disk(file, 100), pytest.raises(OSError, match=r"\[Errno"):
            sink.write(make_frame(0, findings=[found]))
    for step in (1, 2):
        sink.write(make_frame(step, findings=[found]))
    sink.close()
    back = runs.read(tmp_path)
    assert [frame.step for frame in back.training] == [1, 2]
    assert back.training[0]["0", "activation"].count == 4
    assert list(shown_texts(tmp_path)) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", KINDS_OF_WRITER)
def test_a_run_directory_that_is_deleted_is_noticed(tmp_path: Path, kind: str) -> None:
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, open_writer(kind, tmp_path / "run"), every=1)
    frames.train(model, 2, optimizer)
    w.flush()
    shutil.rmtree(tmp_path / "run")
    frames.train(model, 3, optimizer)
    w.flush()
    assert w.stats.dropped == 3
    assert "FileNotFoundError" in w.stats.messages[0]
    w.close()


# --- Findings ---------------------------------------------------------------------------------------


def a_finding(step: int, name: str = "x", message: str = "it is affected") -> Finding:
    return Finding(step, Site(name, "activation"), "dead_units", "warning", message, {"share": 0.5})


def shown_texts(directory: Path) -> dict[int, str]:
    """What the TEXT tab is given, by step, as the HTML it makes of it."""
    points = frames.accumulator(directory).Tensors("tbhooks/findings/text_summary")
    return {
        point.step: "".join(plugin_util.markdown_to_safe_html(s) for s in point.tensor_proto.string_val)
        for point in points
    }


def test_findings_are_text_once_and_data_while_they_last(tmp_path: Path) -> None:
    other = a_finding(2, "y", "so is this")
    steps = [[], [a_finding(1)], [a_finding(2), other], [a_finding(3)], []]
    write(tmp_path, *(make_frame(step, findings=found) for step, found in enumerate(steps)))
    read = frames.accumulator(tmp_path)
    assert "tbhooks/findings/text_summary" in read.PluginTagToContent("text")
    assert "tbhooks/findings" in read.PluginTagToContent("tbhooks")
    assert shown_texts(tmp_path) == {
        1: "<p><strong>warning</strong>, step 1: it is affected</p>",
        2: "<p><strong>warning</strong>, step 2: so is this</p>",
    }
    data = {point.step: point.tensor_proto.string_val for point in read.Tensors("tbhooks/findings")}
    assert {step: json.loads(content) for step, (content,) in data.items()} == {
        step: [finding.to_dict() for finding in found] for step, found in enumerate(steps) if found
    }


def test_a_finding_given_twice_in_one_frame_is_one_text(tmp_path: Path) -> None:
    write(tmp_path, make_frame(0, findings=[a_finding(0), a_finding(0, message="again")]))
    assert shown_texts(tmp_path)[0].count("<strong>") == 1


@pytest.mark.parametrize(
    "message",
    [
        "<script>alert(1)</script>", "**bold** _it_ `code` [a](http://x) ![i](y)", "# title", "- item", "1. one",
        "a | b\n--|--\n1 | 2", "> quote", "&lt;b&gt; & \\ ~~~", "layers.0_weight_x\n\n# new", "```\nfence\n```",
    ],
)  # fmt: skip
def test_markup_in_a_message_stays_text(tmp_path: Path, message: str) -> None:
    write(tmp_path, make_frame(0, findings=[a_finding(0, message=message)]))
    shown = shown_texts(tmp_path)[0]
    assert set(re.findall(r"</?([a-z0-9]+)", shown)) == {"p", "strong"}
    assert shown.count("<p>") == 1
    words = html.unescape(re.sub(r"<[^>]*>", "", shown))
    assert words.split() == f"warning, step 0: {message}".split()


def test_findings_go_through_tensorboardx_alike(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorboardX")
    writer = module.SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.write(make_frame(0, findings=[a_finding(0)]))
    sink.close()
    writer.close()
    assert "it is affected" in shown_texts(tmp_path)[0]


def test_findings_whose_evidence_json_does_not_know_are_written_all_the_same(tmp_path: Path) -> None:
    odd = Finding(0, None, "mine", "info", "m\ud800", {"where": {1, 2}, "n": np.float32(2), "bad": math.nan})
    write(tmp_path, make_frame(0, findings=[odd]))
    ((point),) = frames.accumulator(tmp_path).Tensors("tbhooks/findings")
    (reported,) = json.loads(point.tensor_proto.string_val[0])
    assert reported["evidence"] == {"where": "{1, 2}", "n": 2.0, "bad": "nan"}
