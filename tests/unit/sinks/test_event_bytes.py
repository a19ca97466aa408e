"""The Event of a step is put together from bytes: it holds what protobuf would have made, in few bytes and calls."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.distribution import compressor
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from tbhooks.data import stats
from tbhooks.data.frame import ALL_KINDS, Frame, Site
from tbhooks.sinks import tensorboard as module
from tbhooks.sinks.tensorboard import STORED_COLUMNS, TensorBoardSink, decode_counts
from tbhooks.sinks.tensorboard.event_files import sender
from tbhooks.sinks.tensorboard.scalars import scalar_table
from tests.support import frames
from tests.support.frames import make_frame

Value = summary_pb2.Summary.Value
Data = Mapping[Site, Any]
WITHOUT_HISTOGRAM = ("update", "normalized_gradient", "proposed_update")


# --- What protobuf would have made --------------------------------------------------------------------


def plain_values(frame: Frame, table: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    """The scalars and histograms of a frame, each as an object, in a loop over sites."""
    for tag, number in frame.scalars.items():
        yield Value(tag=tag, simple_value=number)
    yield from plain_scalars(frame, table)
    yield from plain_alarms(frame, table)
    if frame.buckets.shape[1]:
        for i, site in enumerate(frame.sites):
            finite = frame.values[i, stats.COUNT] - frame.values[i, stats.NANS] - frame.values[i, stats.INFS]
            if site.plain_kind not in WITHOUT_HISTOGRAM and finite > 0:
                yield Value(tag=f"{site.kind}/{site.path}{site.index}", histo=plain_histogram(frame, i, finite))


def number_of(frame: Frame, i: int, stat: str) -> float:
    return float(stats.stat(stat, frame.values[i : i + 1], frame.buckets[i : i + 1])[0])


def plain_scalars(frame: Frame, table: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    for i, site in enumerate(frame.sites):
        asked = [(stat, stat, site) for stat in table[site.plain_kind]]
        if asked and site.attention_stat is not None:
            asked = [site.attention_stat]
        for name, stat, whose in asked:
            number = number_of(frame, i, stat)
            if math.isfinite(number):
                yield Value(tag=f"{site.kind}.{name}/{whose.path}{whose.index}", simple_value=number)


def plain_alarms(frame: Frame, table: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    for i, site in enumerate(frame.sites):
        for name in ("nan_count", "inf_count"):
            number = number_of(frame, i, name)
            if number and site.attention_stat is None and name not in table[site.plain_kind]:
                yield Value(tag=f"{site.kind}.{name}/{site.path}{site.index}", simple_value=number)


def plain_histogram(frame: Frame, i: int, finite: float) -> Any:
    row, counts = frame.values[i].tolist(), frame.buckets[i].tolist()
    low, high, mean = row[stats.MIN], row[stats.MAX], row[stats.MEAN]
    bars = plain_bars(counts, max(abs(low), abs(high)) / 32)
    limits = [float(stats.UPPER[last]) for last, _ in bars[:-1]]
    with np.errstate(over="ignore"):
        squares = row[stats.M2] + finite * float(np.square(np.float64(mean)))
    return summary_pb2.HistogramProto(
        min=low, max=high, num=finite, sum=finite * mean, sum_squares=squares,
        bucket_limit=[*limits, high], bucket=[height for _, height in bars],
    )  # fmt: skip


def plain_bars(counts: Sequence[int], narrow: float) -> list[tuple[int, int]]:
    """(last bucket, height) of each bar: empty buckets join, and narrow ones that lie across none of the quantiles."""
    used = [i for i, count in enumerate(counts) if count]
    bars: list[tuple[int, int]] = []
    below, total, was_free, was_empty = 0, sum(counts), False, False
    for i in range(used[0], used[-1] + 1):
        across = any(256 * below < n * total <= 256 * (below + counts[i]) for n in QUANTILES)
        free = not across and max(abs(stats.LOWER[i]), abs(stats.UPPER[i])) <= narrow
        if bars and ((free and was_free) or (not counts[i] and was_empty)):
            bars[-1] = (i, bars[-1][1] + counts[i])
        else:
            bars.append((i, counts[i]))
        below, was_free, was_empty = below + counts[i], free, not counts[i]
    return bars


def plain_rows(frame: Frame, sites: Sequence[Site]) -> NDArray[np.float32]:
    """The rows of these sites as they are stored, and nothing for those that the frame has not."""
    rows = np.zeros((len(sites), len(STORED_COLUMNS)))
    rows[:, stats.MIN], rows[:, stats.MAX] = np.inf, -np.inf
    rows[:, [stats.M3, stats.M4]] = np.nan
    for i, site in enumerate(sites):
        if site in frame.sites:
            row = frame.values[frame.sites.index(site)].copy()
            row[stats.M2] = math.sqrt(row[stats.M2] / max(row[stats.COUNT] - row[stats.NANS] - row[stats.INFS], 1.0))
            row[stats.M3], row[stats.M4] = frame[site.name, site.kind].skewness, frame[site.name, site.kind].kurtosis
            row[stats.BASE] = math.sqrt(row[stats.BASE])
            rows[i] = row
    with np.errstate(over="ignore"):
        return rows.astype(np.float32)


# In 256ths: every 16th part, and finer at both ends.
QUANTILES = (1, 4, 8, *(16 * i for i in range(1, 16)), 248, 252, 255)


class Known:
    """The sites of each kind in the order in which a reader of the file gets to know them."""

    def __init__(self) -> None:
        self.sites: dict[str, list[Site]] = {}
        self.generation: dict[str, int] = {}

    def check_tensors(self, values: Sequence[Any], frame: Frame) -> None:
        left = list(values)
        for kind in dict.fromkeys(site.kind for site in frame.sites):
            here = [site for site in frame.sites if site.kind == kind]
            known = self.sites.setdefault(kind, [])
            if new := [site for site in here if site not in known]:
                known += new
                self.generation[kind] = self.generation.get(kind, 0) + 1
            suffix = "" if self.generation[kind] == 1 else f".{self.generation[kind]}"
            rows = left.pop(0)
            assert rows.tag == f"tbhooks/{kind}{suffix}"
            if new:
                reported = json.loads(rows.metadata.plugin_data.content)["sites"]
                assert reported == [[site.path, site.index] for site in known]
            np.testing.assert_array_equal(tensor_util.make_ndarray(rows.tensor), plain_rows(frame, known))
            if frame.buckets.shape[1]:
                counts = left.pop(0)
                assert counts.tag == f"tbhooks/{kind}.buckets{suffix}"
                wanted = np.zeros((len(known), stats.BUCKETS), dtype=np.int64)
                for site in here:
                    wanted[known.index(site)] = frame.buckets[frame.sites.index(site)]
                np.testing.assert_array_equal(decode_counts(counts.tensor.string_val[0]), wanted)
        assert not left


def check_written(given: Sequence[Frame], scalars: object) -> None:
    """Everything a sink writes of these frames, read back by TensorBoard, against objects made one by one."""
    with tempfile.TemporaryDirectory() as directory:
        sink = TensorBoardSink(directory, scalars)
        for frame in given:
            sink.write(frame)
        sink.close()
        read = [event for event in frames.events(directory) if event.HasField("summary")]
    known, table = Known(), scalar_table(scalars)
    for event, frame in zip(read, (f for f in given if f.sites or f.scalars), strict=True):
        assert (event.step, event.wall_time) == (frame.step, frame.time)
        wanted = [value.SerializeToString() for value in plain_values(frame, table)]
        values = list(event.summary.value)
        assert [value.SerializeToString() for value in values[: len(wanted)]] == wanted
        known.check_tensors(values[len(wanted) :], frame)


ODD_NAMES = ["0", "encoder.0", "(root)", "attn.entropy", "attn.logits", "a/b", "", "\0", "層.0", "🙂" * 40, "x" * 300]
NAMES = st.sampled_from(ODD_NAMES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KIND_NAMES = st.sampled_from([*(kind for kind in ALL_KINDS if kind != "update"), "eval.activation", "eval.functional"])
SITES = st.builds(Site, NAMES, KIND_NAMES, st.sampled_from(["", "[0]", "[logits]"]))
NUMBERS = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
ARRAYS = st.lists(NUMBERS, max_size=8) | st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).standard_t(2, size=500)
)


@st.composite
def some_frames(draw: st.DrawFn) -> list[Frame]:
    """Steps of one run, in which sites come and go."""
    pool = draw(st.lists(SITES, max_size=6, unique=True))
    made = []
    for step in range(draw(st.integers(1, 4))):
        data: dict[Site, Any] = {site: draw(ARRAYS) for site in draw(st.permutations(pool)) if draw(st.booleans())}
        if draw(st.booleans()):
            data |= {Site("w", "weight"): [1.0, 2.0], Site("w", "update"): draw(ARRAYS)}
        scalars = draw(st.dictionaries(NAMES, st.floats(), max_size=3))
        with np.errstate(over="ignore"):
            made.append(make_frame(step, data, scalars=scalars, histograms=draw(st.booleans())))
    return made


@settings(deadline=None, max_examples=120)
@given(some_frames(), st.sampled_from(["core", "all", (), ["nan_count", "weight.p50"]]))
def test_an_event_holds_what_protobuf_would_have_made(given: list[Frame], scalars: object) -> None:
    check_written(given, scalars)


def test_a_step_of_many_sites_holds_what_protobuf_would_have_made() -> None:
    check_written([many(40, step) for step in range(3)], "all")
    check_written([many(100)], "core")  # more histograms than are encoded at once


def many(n: int, step: int = 0, *, histograms: bool = True) -> Frame:
    rng = np.random.default_rng(step)
    sites: dict[Site, Any] = {Site(f"layer.{i:04d}", "activation"): rng.normal(size=200) for i in range(n)}
    sites |= {Site(f"layer.{i:04d}", "gradient"): rng.standard_t(3, size=200) * 1e-3 for i in range(n)}
    return make_frame(step, sites, histograms=histograms)


def test_a_character_that_is_none_costs_a_question_mark_and_no_step(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(make_frame(0, {Site("a\ud800", "activation"): [1.0, 3.0]}, scalars={"b\udfff": 1.0}))
    sink.close()
    assert frames.scalar_series(tmp_path, "activation.mean/a?") == {0: 2.0}
    assert frames.scalar_series(tmp_path, "b?") == {0: 1.0}


# --- Through the user's writer, whatever it is -----------------------------------------------------------


class OwnEvents(EventFileWriter):
    """Somebody's event writer that looks at what it is given."""

    def add_event(self, event: Any) -> None:
        self.__dict__.setdefault("seen", []).append(event)
        super().add_event(event)


def otherwise(self: Any, event: Any) -> None:
    """What another version of TensorBoard might do."""
    self._async_writer.write(event.SerializeToString() + b"")
    self._another = event


def both_ways(tmp_path: Path, change: Callable[[SummaryWriter], None]) -> tuple[list[bytes], list[bytes]]:
    """The events that a stock writer and a changed one come to hold."""
    found = []
    for name in ("stock", "changed"):
        writer = SummaryWriter(str(tmp_path / name))
        if name == "changed":
            change(writer)
        sink = TensorBoardSink(writer)
        for step in range(3):
            sink.write(many(3, step))
        sink.close()
        writer.close()
        found.append([e.SerializeToString() for e in frames.events(tmp_path / name) if e.HasField("summary")])
    return found[0], found[1]


def test_a_stock_writer_is_given_bytes_and_others_an_event(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    events = writer._get_file_writer().event_writer
    assert sender(writer) == events._async_writer.write
    events.add_event = lambda event: None
    assert sender(writer) != events._async_writer.write
    writer.close()


def test_a_subclassed_event_writer_gets_events_of_the_same_content(tmp_path: Path) -> None:
    seen: list[Any] = []

    def change(writer: SummaryWriter) -> None:
        events = writer._get_file_writer().event_writer
        events.__class__ = OwnEvents
        events.seen = seen

    stock, changed = both_ways(tmp_path, change)
    assert stock == changed
    assert len(stock) == 3
    assert [event.SerializeToString() for event in seen] == stock
    assert all(type(event) is event_pb2.Event for event in seen)


def test_a_tensorboard_that_works_otherwise_gets_events_of_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventFileWriter, "add_event", otherwise)
    stock, changed = both_ways(tmp_path, lambda writer: None)
    assert len(stock) == 3
    assert stock == changed
    writer = SummaryWriter(str(tmp_path / "third"))
    assert sender(writer) == writer._get_file_writer().event_writer._async_writer.write, "which still hands on bytes"
    monkeypatch.setattr(EventFileWriter, "add_event", lambda self, event: self._async_writer.write(b"no event"))
    assert sender(writer) != writer._get_file_writer().event_writer._async_writer.write
    writer.close()


def test_tensorboardx_is_given_the_same_bytes_with_or_without_its_inner_call(tmp_path: Path) -> None:
    tensorboardx = pytest.importorskip("tensorboardX")
    found = []
    for name in ("stock", "changed"):
        writer = tensorboardx.SummaryWriter(str(tmp_path / name))
        file = writer._get_file_writer().event_writer._ev_writer
        if name == "changed":
            write_event = file.write_event
            file.write_event = lambda event, write_event=write_event: write_event(event)
        assert (sender(writer) == file._write_serialized_event) is (name == "stock")
        sink = TensorBoardSink(writer)
        sink.write(many(3))
        sink.close()
        writer.close()
        found.append([e.SerializeToString() for e in frames.events(tmp_path / name) if e.HasField("summary")])
    assert found[0] == found[1]
    assert len(found[0]) == 1


# --- What TensorBoard draws is what it would draw of every bucket ----------------------------------------


def drawn(data: NDArray[np.float64]) -> NDArray[np.float64]:
    """[left, right, count] of the bars as TensorBoard serves them."""
    with tempfile.TemporaryDirectory() as directory:
        sink = TensorBoardSink(directory)
        sink.write(make_frame(0, {Site("x", "activation"): data}))
        sink.close()
        (point,) = frames.accumulator(directory).Histograms("activation/x")
    histo = point.histogram_value
    edges = np.array([histo.min, *histo.bucket_limit])
    return np.stack([edges[:-1], edges[1:], np.array(histo.bucket)], axis=1)


def linear_bars(buckets: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """The thirty bars of the HISTOGRAMS tab: counts spread evenly over each bucket."""
    edges = np.linspace(low, high, 31)
    below = np.concatenate([[0.0], np.cumsum(buckets[:, 2])])
    at = np.concatenate([[buckets[0, 0]], buckets[:, 1]])
    return np.diff(np.interp(edges, at, below))


def every_bucket(data: NDArray[np.float64]) -> NDArray[np.float64]:
    edges = np.unique(np.clip(np.concatenate([[-np.inf], stats.UPPER]), data.min(), data.max()))
    counts = np.histogram(data, edges)[0]
    return np.stack([edges[:-1], edges[1:], counts.astype(float)], axis=1)


def with_outliers(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.concatenate([rng.normal(size=50_000) * 0.01, rng.normal(size=50) * 10])


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], NDArray[np.float64]]] = {
    "normal": lambda rng: rng.normal(size=50_000),
    "shifted": lambda rng: rng.normal(5.0, 0.5, size=50_000),
    "rectified": lambda rng: np.maximum(rng.normal(size=50_000), 0.0),
    "heavy tails": lambda rng: rng.standard_t(1.5, size=50_000),
    "outliers": with_outliers,
    "lognormal": lambda rng: rng.lognormal(0.0, 2.0, size=50_000),
    "uniform": lambda rng: rng.uniform(0.0, 1.0, size=50_000),
    "sparse": lambda rng: rng.normal(size=50_000) * (rng.uniform(size=50_000) < 0.05),
    "two places": lambda rng: np.where(rng.uniform(size=50_000) < 0.5, 0.001, 1.0) + rng.normal(size=50_000) * 1e-5,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_lines_and_bars_of_tensorboard_stay_where_every_bucket_would_put_them(name: str) -> None:
    data = DISTRIBUTIONS[name](np.random.default_rng(0))
    joined, full = drawn(data), every_bucket(data)
    reach = data.max() - data.min()
    lines, wanted = (np.array([v for _, v in compressor.compress_histogram(b)]) for b in (joined, full))
    assert np.abs(lines - wanted).max() <= reach / 100, "of DISTRIBUTIONS: a few pixels"
    bars, meant = (linear_bars(b, data.min(), data.max()) for b in (joined, full))
    assert np.abs(bars - meant).max() <= len(data) / 32, "of HISTOGRAMS"


@pytest.mark.parametrize("name", ["normal", "rectified", "uniform"])
def test_percentiles_of_usual_distributions_are_those_of_the_data(name: str) -> None:
    data = DISTRIBUTIONS[name](np.random.default_rng(0))
    found = compressor.compress_histogram(drawn(data))
    for basis_points, value in found:
        wanted = np.quantile(data, basis_points / 1e4)
        assert value == pytest.approx(wanted, abs=data.std() * 0.07)


# --- Bytes and calls, exactly -----------------------------------------------------------------------------


def summary_size(frame: Frame, scalars: object) -> int:
    with tempfile.TemporaryDirectory() as directory:
        sink = TensorBoardSink(directory, scalars)
        try:
            return len(sink._encode(frame))
        finally:
            sink.close()


def test_a_scalar_takes_nine_bytes_and_its_tag() -> None:
    frame = many(50, histograms=False)
    tags = [f"{site.kind}.mean/{site.name}" for site in frame.sites]
    assert summary_size(frame, "mean") - summary_size(frame, ()) == sum(9 + len(tag) for tag in tags)


def test_a_histogram_takes_sixteen_bytes_a_bar_and_59_and_its_tag(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(many(50))
    sink.close()
    read = frames.histograms(tmp_path)
    encoded = sink._plans[many(50).sites].histograms.encode(many(50))
    assert len(read) == 100
    assert len(encoded) == sum(16 * len(histo.bucket) + 59 + len(tag) for (_, tag), histo in read.items())
    assert np.mean([len(histo.bucket) for histo in read.values()]) < 30


def test_a_row_takes_44_bytes() -> None:
    sizes = [summary_size(many(n, histograms=False), ()) for n in (50, 51, 150)]
    names = 2 * len('["layer.0000",""],')
    assert sizes[1] - sizes[0] == 2 * 44 + names
    assert sizes[2] - sizes[0] == pytest.approx(100 * (2 * 44 + names), abs=8)  # lengths take a byte more


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions Python and C code call, in this thread."""
    count = 0

    def note(_frame: Any, event: str, _what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_to_write(directory: Path, n: int, *, histograms: bool, scalars: object = "core") -> int:
    """Of a step like one before."""
    sink = TensorBoardSink(directory / f"{n}-{histograms}-{scalars}", scalars)
    given = [many(n, step, histograms=histograms) for step in range(3)]
    given = [replace(frame, sites=(*given[0].sites,)) for frame in given]  # as a watch gives them: the same objects
    sink.write(given[0])
    sink.write(given[1])
    found = calls_of(lambda: sink._encode(given[2]))
    sink.close()
    return found


def test_no_scalar_costs_a_call(tmp_path: Path) -> None:
    assert calls_to_write(tmp_path, 10, histograms=False) == calls_to_write(tmp_path, 300, histograms=False) < 300


def test_a_histogram_costs_few_calls(tmp_path: Path) -> None:
    few, more = (calls_to_write(tmp_path, n, histograms=True) for n in (10, 110))
    assert more - few <= 200 * 10
    assert few < 600


def test_layouts_that_keep_changing_are_written_right_and_only_a_few_are_kept() -> None:
    given = [many(1 + step % 20, step) for step in range(25)]
    check_written(given, "core")


def test_what_is_kept_of_layouts_and_tags_is_bounded(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in range(30):
        sink.write(make_frame(step, {Site(f"x{step}", "activation"): [1.0]}, scalars={f"train/{step}": 1.0}))
    assert len(sink._plans._kept) == len(sink._templates._kept) == module.MAX_PLANS
    sink.close()
