"""Frames as lines of JSON, and back."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn

import tbhooks
from tbhooks import Finding, Frame, JsonlSink, MemorySink, TbhooksError
from tbhooks.data.artifacts import Text
from tbhooks.data.frame import Site
from tbhooks.data.jsonable import to_jsonable
from tbhooks.delivery import worker as pump_module
from tbhooks.sinks.jsonl import read
from tests.support import frames
from tests.support.frames import make_frame

Log = pytest.LogCaptureFixture
X = Site("x", "activation")


def write(path: Path, *given: Frame) -> Path:
    sink = JsonlSink(path)
    for frame in given:
        sink.write(frame)
    sink.close()
    return path


def assert_equal(one: Frame, other: Frame) -> None:
    assert (one.step, one.time, one.rank, one.sites) == (other.step, other.time, other.rank, other.sites)
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.buckets, other.buckets)
    assert one.values.dtype == other.values.dtype
    assert one.findings == other.findings
    assert repr(dict(one.scalars)) == repr(dict(other.scalars))


def strict(line: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def make_finding(**evidence: Any) -> Finding:
    return Finding(3, X, "non_finite", "error", "one NaN\nin \u00fc", evidence)


FRAMES = {
    "plain": make_frame(3, scalars={"train/loss": 0.1, "train.lr/0": 1e-30}),
    "not finite": make_frame(1, {X: [math.nan, math.inf, -math.inf, 1.0]}, scalars={"a": math.nan, "b": -math.inf}),
    "nothing finite": make_frame(1, {X: [math.nan]}),
    "empty tensor": make_frame(1, {X: []}),
    "no site": make_frame(9, {}, scalars={"train/loss": 2.0}),
    "no histograms": make_frame(histograms=False),
    "findings": make_frame(findings=[make_finding(nan_count=1), Finding(0, None, "loss_spike", "warning", "up")]),
    "several outputs": make_frame(0, {Site("rnn", "activation", "[0]"): [1.0], Site("rnn", "gradient", "[h]"): [2.0]}),
    "names that look like numbers": make_frame(
        0,
        {Site("inf", "activation"): [1.0], Site("nan", "gradient", "[-inf]"): [2.0]},
        scalars={"inf": 1.0, "nan": 2.0},
    ),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_a_frame_read_back_is_the_frame(tmp_path: Path, frame: Frame) -> None:
    path = write(tmp_path / "frames.jsonl", frame)
    (line,) = path.read_text(encoding="utf-8").splitlines()
    strict(line)
    assert line == json.dumps(to_jsonable(frame.to_dict()), separators=(",", ":"))
    (back,) = read(path)
    assert_equal(back, frame)


def test_every_float_comes_back_bit_for_bit(tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(50, 20)) * 10.0 ** np.arange(-10, 10)
    frame = make_frame(0, {Site(str(i), "activation"): row for i, row in enumerate(data)})
    (back,) = read(write(tmp_path / "frames.jsonl", frame))
    assert back.values.tobytes() == frame.values.tobytes()


def test_a_watched_training_is_one_line_a_logged_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "QUEUE_STEPS", 1000)
    model, kept = frames.make_model(), MemorySink()
    optimizer = frames.make_optimizer(model)
    with tbhooks.watch(model, [JsonlSink(tmp_path / "a" / "b" / "frames.jsonl"), kept], every=2) as w:
        for _ in range(7):
            w.log({"loss": frames.train_step(model, optimizer)})
    lines = (tmp_path / "a" / "b" / "frames.jsonl").read_text().splitlines()
    assert [strict(line)["step"] for line in lines] == [0, 2, 4, 6]
    for back, frame in zip(read(tmp_path / "a" / "b" / "frames.jsonl"), kept, strict=True):
        assert_equal(back, frame)


def test_modules_named_like_numbers_survive_a_training(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("inf", nn.Linear(4, 4))
    model.add_module("nan", nn.Linear(4, 2))
    with tbhooks.watch(model, JsonlSink(tmp_path / "frames.jsonl"), every=1):
        frames.train(model, 1)
    (frame,) = read(tmp_path / "frames.jsonl")
    assert {site.path for site in frame.sites} >= {"inf", "nan", "inf.weight", "nan.bias"}


def test_a_frame_is_on_disk_once_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "frames.jsonl")
    sink.write(make_frame(0))
    assert len(list(read(tmp_path / "frames.jsonl"))) == 1
    sink.close()


def test_a_file_that_is_there_is_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "frames.jsonl", make_frame(0))
    write(path, make_frame(1))
    assert [frame.step for frame in read(path)] == [0, 1]


@pytest.mark.parametrize("cut", [1, 2, 100, 10_000])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "frames.jsonl", make_frame(0), make_frame(1))
    first = len(path.read_bytes().splitlines(keepends=True)[0])
    content = path.read_bytes()
    path.write_bytes(content[: max(first + 1, len(content) - cut)])
    assert [frame.step for frame in read(path)] == [0]


def test_a_file_cut_short_can_be_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "frames.jsonl", make_frame(0), make_frame(1))
    path.write_bytes(path.read_bytes()[:-50])
    write(path, make_frame(2), make_frame(3))
    assert [frame.step for frame in read(path)] == [0, 2, 3]


def test_an_empty_file_holds_no_frame(tmp_path: Path) -> None:
    assert not list(read(write(tmp_path / "frames.jsonl")))


WHOLE = make_frame(0, {X: [1.0]}).to_dict()


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "{}",
        "[1, 2]",
        "5",
        "null",
        '{"step": 1, "values": [], "scalars": {}}',
        json.dumps({**WHOLE, "values": [[1.0]]}),
        json.dumps({**WHOLE, "values": [["big"] * 9]}),
        json.dumps({**WHOLE, "sites": [["a", "b", "c", "d"]]}),
        "",
        json.dumps({**WHOLE, "scalars": []}),
        json.dumps({**WHOLE, "buckets": [5]}),
        json.dumps({**WHOLE, "buckets": [{"9999": 1}]}),
    ],
)
def test_a_foreign_line_is_named_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "frames.jsonl", make_frame(0))
    with path.open("a") as file:
        file.write(line + "\n")
    back = read(path)
    assert next(back).step == 0
    with pytest.raises(TbhooksError) as reported:
        next(back)
    assert f"{path}, line 2," in str(reported.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents"
    path.write_bytes(b"\x18\x00\x00\x00\xa3\x7f\xff\xfe\n" * 3)
    with pytest.raises(TbhooksError, match="line 1"):
        list(read(path))


def test_evidence_that_is_not_finite_comes_back(tmp_path: Path) -> None:
    (back,) = read(write(tmp_path / "frames.jsonl", make_frame(findings=[make_finding(ratio=math.inf)])))
    assert back.findings[0].evidence == {"ratio": math.inf}


@pytest.mark.parametrize("value", [np.int64(3), np.float32(0.5), (1.0, math.nan)], ids=["int64", "float32", "tuple"])
def test_evidence_may_hold_what_a_rule_computes(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "frames.jsonl", make_frame(findings=[make_finding(value=value)]))
    assert len(list(read(path))) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_counted_logged_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "QUEUE_STEPS", 1000)
    model, kept = frames.make_model(), MemorySink()
    w = tbhooks.watch(model, [JsonlSink("/dev/full"), kept], every=1)
    with caplog.at_level(logging.WARNING, "tbhooks"):
        frames.train(model, 5)
        w.close()
    unwatched = frames.make_model()
    frames.train(unwatched, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unwatched.parameters(), strict=True))
    assert [frame.step for frame in kept] == [0, 1, 2, 3, 4]
    assert w.stats.errors >= 5
    assert w.stats.dropped == 0
    (record,) = caplog.records
    assert record.message.startswith("JsonlSink: OSError: [Errno 28]")


def test_what_has_no_numbers_is_no_line(tmp_path: Path) -> None:
    reported = Text("reported", "once")
    path = write(tmp_path / "x.jsonl", make_frame(3), replace(make_frame(0, {}), artifacts=(reported,)))
    assert [frame.step for frame in read(path)] == [3]


class OnlyGrows(io.FileIO):
    """A file of which nothing can be taken back."""

    def truncate(self, size: int | None = None) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("room", [1, 100])
@pytest.mark.parametrize("only_grows", [False, True])
def test_after_a_full_disk_every_later_line_is_readable(tmp_path: Path, room: int, only_grows: bool) -> None:
    path = tmp_path / "frames.jsonl"
    sink = JsonlSink(path)
    if only_grows:
        sink.close()
        sink._file = OnlyGrows(path, "ab")
    for step in range(2):
        sink.write(make_frame(step))
    for start in (2, 6):
        for step in (start, start + 1):
            with frames.full_disk(path, room), pytest.raises(OSError, match=r"\[Errno"):
                sink.write(make_frame(step))
        for step in (start + 2, start + 3):
            sink.write(make_frame(step))
    sink.close()
    assert [frame.step for frame in read(path)] == [0, 1, 4, 5, 8, 9]
    if not only_grows:
        assert [strict(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 4, 5, 8, 9]


def test_lines_are_readable_on_a_real_disk_that_was_full_for_a_while(tiny_disk: Path, caplog: Log) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(200 << 10))
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, JsonlSink(tiny_disk / "frames.jsonl"), every=1)
    frames.train(model, 40, optimizer)
    w.flush()
    dropped = w.stats.dropped
    assert 0 < dropped < 40
    ballast.unlink()
    frames.train(model, 5, optimizer)
    w.close()
    assert w.stats.dropped == dropped
    steps = [strict(line)["step"] for line in (tiny_disk / "frames.jsonl").read_text().splitlines()]
    assert steps == [frame.step for frame in read(tiny_disk / "frames.jsonl")]
    assert steps[-5:] == [40, 41, 42, 43, 44]
    assert len(steps) == 45 - dropped


def test_a_directory_that_is_deleted_is_noticed_and_one_that_is_there_again_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "run" / "frames.jsonl"
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    w = tbhooks.watch(model, JsonlSink(path), every=1)
    frames.train(model, 2, optimizer)
    w.flush()
    shutil.rmtree(path.parent)
    frames.train(model, 3, optimizer)
    w.flush()
    assert (w.stats.dropped, w.stats.errors) == (3, 3)
    assert "frames.jsonl was deleted with its directory" in w.stats.messages[0]
    assert not path.parent.exists()
    path.parent.mkdir()
    frames.train(model, 2, optimizer)
    w.close()
    assert [frame.step for frame in read(path)] == [5, 6]


def test_a_change_of_directory_sends_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    sink = JsonlSink("frames.jsonl")
    sink.write(make_frame(0))
    monkeypatch.chdir("elsewhere")
    (tmp_path / "frames.jsonl").unlink()
    sink.write(make_frame(1))
    sink.close()
    assert [frame.step for frame in read(tmp_path / "frames.jsonl")] == [1]
    assert not list((tmp_path / "elsewhere").iterdir())
