"""Runs read back: what was written comes out equal, and no file, however damaged, does any harm."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import JsonlSink, MemorySink, runs
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.delivery import worker as pump_module
from tbhooks.runs import Run, reader, stored_frames
from tbhooks.sinks.tensorboard import TensorBoardSink
from tbhooks.sinks.tensorboard import findings as finding_codec
from tests.support import frames
from tests.support.frames import make_frame, write_run

X = Site("x", "activation")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a fast loop is dropped because the machine is busy."""
    monkeypatch.setattr(pump_module, "QUEUE_STEPS", 10_000)


def torch_writer(directory: Path) -> Any:
    return SummaryWriter(str(directory))


def tensorboardx_writer(directory: Path) -> Any:
    return pytest.importorskip("tensorboardX").SummaryWriter(str(directory))


both_writers = pytest.mark.parametrize(
    "make_writer", [torch_writer, tensorboardx_writer], ids=["torch", "tensorboardX"]
)


def assert_same_frame(read: Frame, wrote: Frame) -> None:
    """Equal but for the order of kinds, and for the 24 bits a number has on disk."""
    assert (read.step, read.time) == (wrote.step, pytest.approx(wrote.time))
    assert set(read.sites) == set(wrote.sites)
    place = {site: i for i, site in enumerate(wrote.sites)}
    order = [place[site] for site in read.sites]
    np.testing.assert_allclose(read.values, wrote.values[order], rtol=1e-6, atol=1e-30)
    assert read.buckets.shape == wrote.buckets.shape
    np.testing.assert_array_equal(read.buckets, wrote.buckets[order])
    assert dict(read.scalars) == pytest.approx(dict(wrote.scalars), rel=1e-6, nan_ok=True)
    assert read.findings == wrote.findings


# --- What was written comes back ----------------------------------------------------------------------


@both_writers
def test_a_watched_training_comes_back_frame_by_frame(
    tmp_path: Path, roomy: None, make_writer: Callable[[Path], Any]
) -> None:
    model, kept = frames.make_model(), MemorySink()
    optimizer = frames.make_optimizer(model)
    writer = make_writer(tmp_path)
    with tbhooks.watch(model, [writer, kept], every=2) as w:
        for step in range(9):
            loss = frames.train_step(model, optimizer)
            w.log({"loss": loss, "own/name": loss * 2})
            writer.add_scalar("mine/step", 10.0 * step, step)
    writer.close()
    run = runs.read(tmp_path)
    assert run.problems == []
    assert [frame.step for frame in run.frames] == [0, 2, 4, 6, 8]
    for read, wrote in zip(run.frames, kept, strict=True):
        assert_same_frame(read, wrote)
    steps, values = run.scalars["mine/step"]
    assert steps.tolist() == list(range(9))
    assert values.tolist() == [10.0 * step for step in range(9)]
    assert run.scalars["train/loss"].values.tolist() == [frame.scalars["train/loss"] for frame in run.frames]
    assert run.scalars["activation.std/0"].steps.tolist() == [0, 2, 4, 6, 8]


def test_evaluations_are_frames_of_their_own_after_their_training_step(tmp_path: Path, roomy: None) -> None:
    model, kept = frames.make_model(), MemorySink()
    optimizer = frames.make_optimizer(model)
    with tbhooks.watch(model, [tmp_path, kept], every=1).evaluation():
        for _ in range(3):
            frames.train_step(model, optimizer)
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
    run = runs.read(tmp_path)
    assert [(frame.step, frame.is_evaluation) for frame in run.frames] == [
        (step, late) for step in range(3) for late in (False, True)
    ]
    assert {site.kind for frame in run.evaluations for site in frame.sites} == {"eval.activation"}
    by_key = {(frame.step, frame.is_evaluation): frame for frame in kept}
    for frame in run.frames:
        assert_same_frame(frame, by_key[frame.step, frame.is_evaluation])


def test_a_run_with_everything_that_can_be_shown_has_no_problems(tmp_path: Path, roomy: None) -> None:
    """Texts and graphs of ours are no frame tensors, and neither are those of the user."""
    model = frames.make_model()
    optimizer = frames.make_optimizer(model)
    writer = SummaryWriter(str(tmp_path))
    writer.add_text("tbhooks/mine", "a note")
    with tbhooks.watch(model, writer, every=1).evaluation().environment().graph() as w:
        w.per_channel("0").embeddings("2").hparams({"lr": 0.1}).summary()
        for _ in range(2):
            frames.train_step(model, optimizer)
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
    writer.close()
    assert {"tbhooks/environment/text_summary", "tbhooks/summary/text_summary", "tbhooks/evaluation"} <= frames.tags(
        tmp_path
    )
    assert runs.read(tmp_path).problems == []


def test_files_say_whether_a_run_finished_or_failed(tmp_path: Path) -> None:
    def train(where: Path, fails: bool = False) -> None:
        model = frames.make_model()
        with tbhooks.watch(model, where, every=1):
            frames.train(model, 2)
            if fails:
                raise RuntimeError("out of memory")

    train(tmp_path / "good")
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path / "bad", fails=True)
    good, bad = runs.read(tmp_path / "good"), runs.read(tmp_path / "bad")
    assert (good.state, bad.state) == ("finished", "failed")
    assert good.problems == bad.problems == []
    assert [frame.step for frame in good.frames] == [0, 1]


def test_a_run_that_goes_on_after_its_end_is_running_and_one_that_was_killed_has_ended(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "run")
    sink.write(replace(make_frame(0), time=time.time()))
    sink.flush()
    assert runs.read(tmp_path / "run").state == "running"
    sink.outcome = "finished"
    sink.close()
    assert runs.read(tmp_path / "run").state == "finished"
    write_run(tmp_path / "run", replace(make_frame(1), time=time.time()))
    assert runs.read(tmp_path / "run").state == "running"
    assert runs.read(write_run(tmp_path / "old", make_frame(0))).state == "ended"


def test_a_directory_that_is_gone_before_the_watch_closes_is_no_error(tmp_path: Path) -> None:
    model = frames.make_model()
    w = tbhooks.watch(model, tmp_path / "run", every=1)
    frames.train(model, 2)
    w.flush()
    shutil.rmtree(tmp_path / "run")
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    assert not (tmp_path / "run").exists()


def test_order_is_that_of_execution_and_site_lists_are_shared(tmp_path: Path) -> None:
    data = {Site(name, "activation"): [1.0] for name in ("z", "a", "m")}
    run = runs.read(write_run(tmp_path, make_frame(0, data), make_frame(1, data)))
    assert [site.path for site in run.frames[0].sites] == ["z", "a", "m"]
    assert run.frames[0].sites is run.frames[1].sites


def test_a_site_that_turns_up_later_and_one_that_was_not_seen(tmp_path: Path) -> None:
    late = Site("late", "activation", "[1]")
    wrote = [make_frame(0, {X: [1.0]}), make_frame(1, {X: [2.0], late: [3.0]}), make_frame(2, {late: [4.0]})]
    run = runs.read(write_run(tmp_path, *wrote))
    assert [frame.sites for frame in run.frames] == [(X,), (X, late), (late,)]
    for read, frame in zip(run.frames, wrote, strict=True):
        assert_same_frame(read, frame)


def test_steps_without_histograms_have_none_and_numbers_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    affected = make_frame(1, {X: [1.0, math.nan, math.inf]}, scalars={"train/loss": math.nan})
    run = runs.read(write_run(tmp_path, make_frame(0, histograms=False), affected))
    assert run.frames[0].buckets.shape == (len(frames.SOME), 0)
    assert run.frames[1]["x", "activation"].nan_count == 1
    assert math.isnan(run.scalars["train/loss"].values[0])


def test_scalars_that_came_late_join_the_frame_of_their_step(tmp_path: Path) -> None:
    run = runs.read(
        write_run(tmp_path, make_frame(4, scalars={"a/b": 1.0}), make_frame(4, {}, scalars={"train/loss": 2.5}))
    )
    assert dict(run.frames[0].scalars) == {"a/b": 1.0, "train/loss": 2.5}
    assert len(run.frames) == 1


def test_a_resumed_run_has_each_step_once_as_it_was_the_last_time(tmp_path: Path) -> None:
    write_run(tmp_path, make_frame(0, {X: [1.0]}), make_frame(2, {X: [2.0]}, scalars={"train/loss": 1.0}))
    time.sleep(1.1)  # the writer names its file by the second
    write_run(tmp_path, make_frame(2, {X: [5.0]}, scalars={"train/loss": 7.0}), make_frame(1, {X: [6.0]}))
    assert len(frames.event_files(tmp_path)) == 2
    run = runs.read(tmp_path)
    assert [(frame.step, frame["x", "activation"].mean) for frame in run.frames] == [(0, 1.0), (1, 6.0), (2, 5.0)]
    assert run.frames[2].scalars["train/loss"] == 7.0
    assert run.scalars["train/loss"].values.tolist() == [1.0, 7.0]
    assert run.scalars["activation.mean/x"].steps.tolist() == [0, 1, 2, 2]


def at(second: int, *given: Frame) -> list[Frame]:
    """The same frames, written at another time."""
    return [replace(frame, time=1e9 + second + frame.step) for frame in given]


def run_of(second: int, mean: float, steps: range) -> list[Frame]:
    return at(second, *(make_frame(k, {X: [mean]}, scalars={"train/loss": mean}) for k in steps))


def event_file(directory: Path, name: str, *given: Frame) -> Path:
    """Frames in a file of this name: the order of names is the order files were made in."""
    (file,) = frames.event_files(write_run(directory / "made", *given))
    return file.replace(directory / f"events.out.tfevents.{name}")


def test_of_two_runs_in_one_directory_the_newest_is_read_and_that_is_said(tmp_path: Path) -> None:
    old = event_file(tmp_path, "1", *run_of(0, 1.0, range(8)))
    event_file(tmp_path, "2", *run_of(1000, 2.0, range(4)))
    event_file(tmp_path, "3", *run_of(2000, 3.0, range(3, 6)))  # the second run, resumed
    run = runs.read(tmp_path)
    assert [(frame.step, frame["x", "activation"].mean) for frame in run.frames] == [
        (0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 3.0),
    ]  # fmt: skip
    assert run.scalars["train/loss"].values.tolist() == [2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert len(run.problems) == 1
    assert "2 runs were written here" in run.problems[0]
    assert "events.out.tfevents.2" in run.problems[0]
    assert [frame["x", "activation"].mean for frame in runs.read(old).frames] == [1.0] * 8
    assert runs.read(old).problems == []


def test_a_run_that_begins_again_in_the_same_file_is_another_run(tmp_path: Path) -> None:
    given = [*run_of(0, 1.0, range(8)), *run_of(1000, 2.0, range(4))]
    run = runs.read(write_run(tmp_path / "events", *given))
    assert [frame["x", "activation"].mean for frame in run.frames] == [2.0] * 4
    assert run.scalars["train/loss"].values.tolist() == [2.0] * 4
    assert "2 runs were written here" in run.problems[0]
    sink = JsonlSink(tmp_path / "lines" / "f.jsonl")
    for frame in given:
        sink.write(frame)
    sink.close()
    run = runs.read(tmp_path / "lines")
    assert [frame["x", "activation"].mean for frame in run.frames] == [2.0] * 4
    assert "2 runs were written here" in run.problems[0]


@pytest.mark.parametrize("lines_are_newer", [True, False])
def test_runs_in_event_files_and_in_lines_are_two_unless_they_are_the_same(
    tmp_path: Path, lines_are_newer: bool
) -> None:
    old, new = run_of(0, 1.0, range(8)), run_of(1000, 2.0, range(4))
    write_run(tmp_path, *(old if lines_are_newer else new))
    sink = JsonlSink(tmp_path / "f.jsonl")
    for frame in new if lines_are_newer else old:
        sink.write(frame)
    sink.close()
    run = runs.read(tmp_path)
    assert [frame["x", "activation"].mean for frame in run.frames] == [2.0] * 4
    assert run.scalars["train/loss"].values.tolist() == [2.0] * 4
    assert "2 runs were written here" in run.problems[0]


def test_the_users_own_file_goes_with_the_run_it_was_written_during(tmp_path: Path) -> None:
    for start, value in ((0, 1.0), (1000, 2.0)):
        with SummaryWriter(str(tmp_path / "made")) as writer:
            for step in range(3):
                writer.add_scalar("mine", value, step, walltime=1e9 + start + step)
        (file,) = frames.event_files(tmp_path / "made")
        # TensorBoard's own first record has the time of today.
        data = file.read_bytes()
        file.unlink()
        (tmp_path / f"events.out.tfevents.{start}.a").write_bytes(data[starts_of_records(data)[1] :])
        event_file(tmp_path, f"{start}.b", *run_of(start, value, range(3)))
    run = runs.read(tmp_path)
    assert run.scalars["mine"].values.tolist() == [2.0] * 3
    assert run.scalars["train/loss"].values.tolist() == [2.0] * 3


def test_an_evaluation_before_the_first_step_belongs_to_the_run_it_begins(tmp_path: Path) -> None:
    evaluated = Site("x", "eval.activation")
    for number in (1, 2):
        before = at(1000 * number, make_frame(0, {evaluated: [float(number)]}))
        event_file(tmp_path, str(number), *before, *run_of(1000 * number, float(number), range(3)))
    run = runs.read(tmp_path)
    assert [(frame.step, frame.is_evaluation) for frame in run.frames] == [
        (0, False),
        (0, True),
        (1, False),
        (2, False),
    ]
    assert run.evaluations[0]["x", "eval.activation"].mean == 2.0


def test_evaluations_alone_are_distinguished_as_well(tmp_path: Path) -> None:
    evaluated = Site("x", "eval.activation")
    for number in (1, 2):
        given = [make_frame(step, {evaluated: [float(number)]}) for step in range(3 - number)]
        event_file(tmp_path, str(number), *at(1000 * number, *given))
    run = runs.read(tmp_path)
    assert [frame["x", "eval.activation"].mean for frame in run.frames] == [2.0]
    assert "2 runs were written here" in run.problems[0]


def test_a_file_of_its_own_may_be_named_instead_of_the_directory(tmp_path: Path) -> None:
    (file,) = frames.event_files(write_run(tmp_path, make_frame(3)))
    assert [frame.step for frame in runs.read(str(file)).frames] == [3]


def test_scalars_written_as_tensors_and_with_descriptions_are_scalars(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("new", 0.5 * step, step, new_style=True)
            writer.add_histogram("theirs", torch.arange(5.0), step)
            writer.add_text("words", "hello", step)
            described = summary_pb2.Summary.Value(tag="described", simple_value=1.5)
            described.metadata.summary_description = "what it is"
            event = event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[described]))
            writer._get_file_writer().event_writer.add_event(event)
    run = runs.read(tmp_path)
    assert run.problems == []
    assert set(run.scalars) == {"new", "described"}
    assert run.scalars["new"].values.tolist() == [0.0, 0.5, 1.0]
    assert run.scalars["described"].steps.tolist() == [0, 1, 2]
    assert run.scalars["described"].values.tolist() == [1.5] * 3


def test_many_scalars_read_alike_whether_the_steps_look_the_same_or_not(tmp_path: Path) -> None:
    wrote = [
        make_frame(
            step, {Site(f"m{i}", "activation"): [step + i, 0.5 * i] for i in range(40) if (i + step) % 7 or step < 3}
        )
        for step in range(8)
    ]
    run = runs.read(write_run(tmp_path, *wrote))
    for frame in wrote:
        for site in frame.sites:
            steps, values = run.scalars[f"activation.mean/{site.name}"]
            expected = frame[site.name, site.kind].mean
            assert values[steps.tolist().index(frame.step)] == pytest.approx(expected, rel=1e-6)
    total = sum(len(series.steps) for tag, series in run.scalars.items() if tag.startswith("activation.mean"))
    assert total == sum(len(frame.sites) for frame in wrote)


def test_frames_read_back_pickle_and_are_not_writeable(tmp_path: Path) -> None:
    (frame,) = runs.read(write_run(tmp_path, make_frame(0))).frames
    again = pickle.loads(pickle.dumps(frame))
    np.testing.assert_array_equal(again.buckets, frame.buckets)
    assert replace(frame, step=5).buckets.shape == frame.buckets.shape
    with pytest.raises(ValueError, match="read-only"):
        frame.buckets[0, 0] = 1


# --- JSONL --------------------------------------------------------------------------------------------


def test_frames_in_jsonl_are_read_exactly_and_win_over_event_files(tmp_path: Path) -> None:
    wrote = make_frame(2, {X: [1 / 3, 2 / 3]}, scalars={"train/loss": 0.1})
    sink = JsonlSink(tmp_path / "frames.jsonl")
    sink.write(wrote)
    sink.write(make_frame(2, {}, scalars={"train/late": 0.2}))
    sink.close()
    write_run(tmp_path, wrote)
    run = runs.read(tmp_path)
    assert run.problems == []
    (frame,) = run.frames
    np.testing.assert_array_equal(frame.values, wrote.values)
    assert dict(frame.scalars) == {"train/loss": 0.1, "train/late": 0.2}
    assert run.scalars["train/late"].values.tolist() == [0.2]


def frame_line(**changes: Any) -> bytes:
    one = {"sites": [["a", "activation", ""]], "values": [[1.0] + [0.0] * 8], "buckets": None}
    return (
        json.dumps(
            {"step": 1, "time": 0, "rank": 0, **one, "findings": [], "scalars": {}, **changes}, separators=(",", ":")
        ).encode()
        + b"\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"step":1',
        b'{"step":' + b"[" * 100_000 + b"\n",
        b'{"step":1}\n',
        frame_line(step="x"),
        frame_line(sites=[[1, 2, 3]]),
        frame_line(values=[["inf"] + [0.0] * 8]),
        frame_line(scalars={"a": []}),
        frame_line(findings=[{"step": 1}]),
        frame_line(buckets=[{"99999": 1}]),
    ],
    ids=["cut", "deep", "nothing", "step", "names", "counts", "scalars", "findings", "buckets"],
)
def test_what_is_wrong_in_jsonl_is_said_and_what_came_before_is_kept(tmp_path: Path, line: bytes) -> None:
    sink = JsonlSink(tmp_path / "frames.jsonl")
    sink.write(make_frame(0))
    sink.close()
    with (tmp_path / "frames.jsonl").open("ab") as file:
        file.write(line)
    run = runs.read(tmp_path)
    assert [frame.step for frame in run.frames] == [0]
    assert len(run.problems) == 1
    assert run.problems[0].startswith("frames.jsonl: ")


# --- Findings -----------------------------------------------------------------------------------------


def finding(step: int, name: str = "x", rule: str = "non_finite", **evidence: Any) -> Finding:
    return Finding(step, Site(name, "activation", "[0]"), rule, "error", f"something with {name}", evidence)


def test_findings_come_back_equal_and_once_a_rule_and_site(tmp_path: Path) -> None:
    first, other = finding(0, share=0.5, n=3, inf=math.inf, nested={"a": [1, 2]}), finding(1, "y")
    nowhere = Finding(1, None, "loss_spike", "info", "no place", {})
    again = replace(first, step=1)
    run = runs.read(
        write_run(
            tmp_path, make_frame(0, findings=[first]), make_frame(1, findings=[again, other, nowhere]), make_frame(2)
        )
    )
    assert [frame.findings for frame in run.frames] == [(first,), (again, other, nowhere), ()]
    assert run.findings == [first, other, nowhere]


def test_a_finding_about_an_evaluation_does_not_make_a_training_step_one(tmp_path: Path) -> None:
    about = Finding(0, Site("x", "eval.activation"), "mine", "info", "the evaluation before was odd", {})
    run = runs.read(write_run(tmp_path, make_frame(0, findings=[about])))
    assert [frame.is_evaluation for frame in run.frames] == [False]
    assert run.findings == [about]
    assert_same_frame(run.frames[0], make_frame(0, findings=[about]))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.builds(
            Finding,
            st.integers(-(2**40), 2**40),
            st.none() | st.builds(Site, st.text(), st.text(), st.text()),
            st.text(),
            st.sampled_from(["info", "warning", "error"]),
            st.text(),
            st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.booleans()),
        )
    )
)
def test_any_finding_survives_its_encoding(given: list[Finding]) -> None:
    assert finding_codec.decode(finding_codec.encode(given)) == tuple(given)


@settings(deadline=None, max_examples=200)
@given(
    st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_what_is_no_finding_raises_value_error_only(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(isinstance(item, Finding) for item in finding_codec.decode(content))


# --- Directories --------------------------------------------------------------------------------------


def test_find_lists_every_run_below(tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "one", make_frame(0))
    JsonlSink(tmp_path / "a" / "f.jsonl").write(make_frame(0))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "data.jsonl").write_text('{"text": "not ours"}\n')
    assert runs.find(tmp_path) == [tmp_path / "a", tmp_path / "b" / "one"]


def test_a_directory_that_is_missing_empty_or_holds_runs_below_is_refused_with_what_is_there(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", make_frame(0))
    with pytest.raises(ArgumentError, match=r"no directory '.*digit': did you mean '.*digits'"):
        runs.read(tmp_path / "digit")
    with pytest.raises(ArgumentError, match=r"below it: .*digits"):
        runs.read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="it is empty"):
        runs.read(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(ArgumentError, match=r"it holds 'notes.txt'"):
        runs.read(tmp_path / "empty")
    with pytest.raises(ArgumentError, match="no directory"):
        runs.find(tmp_path / "nowhere" / "at all")


def test_progress_ends_at_all_the_bytes_there_are(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    (file,) = frames.event_files(write_run(tmp_path, make_frame(0), make_frame(1)))
    runs.read(tmp_path, lambda done, total: reported.append((done, total)))
    assert reported[-1] == (file.stat().st_size, file.stat().st_size)
    assert reported == sorted(reported)


def test_files_that_are_no_files_and_empty_ones_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, make_frame(0))
    os.mkfifo(tmp_path / "a.tfevents")
    (tmp_path / "b.tfevents").touch()
    (tmp_path / "c.tfevents").symlink_to("/dev/zero")
    (tmp_path / "d.tfevents").symlink_to("/nowhere")
    (tmp_path / "e.tfevents").mkdir()
    run = runs.read(tmp_path)
    assert len(run.frames) == 1
    assert [problem.partition(":")[0] for problem in run.problems] == [f"{c}.tfevents" for c in "abcd"]


# --- Damage -------------------------------------------------------------------------------------------


def record(data: bytes, length: int | None = None) -> bytes:
    header = struct.pack("<Q", len(data) if length is None else length)
    return header + struct.pack("<I", masked_crc32c(header)) + data + struct.pack("<I", masked_crc32c(data))


def event(step: int, *values: summary_pb2.Summary.Value) -> bytes:
    encoded = event_pb2.Event(step=step, wall_time=1.0, summary=summary_pb2.Summary(value=values)).SerializeToString()
    return record(encoded)


def read_bytes(directory: Path, data: bytes) -> Run:
    directory.mkdir(exist_ok=True)
    (directory / "x.tfevents").write_bytes(data)
    run = runs.read(directory)
    for frame in run.frames:  # nor does looking at them raise
        assert frame.buckets.shape[0] == len(frame.sites)
        assert frame.to_dict()
    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A real file of three steps, with findings."""
    where = tmp_path_factory.mktemp("small")
    given = [make_frame(step, {X: [1.0, 2.0 + step]}, findings=[finding(step)] if step else []) for step in range(3)]
    (file,) = frames.event_files(write_run(where, *given))
    return file.read_bytes()


def starts_of_records(data: bytes) -> list[int]:
    at, found = 0, []
    while at < len(data):
        found.append(at)
        at += 16 + struct.unpack_from("<Q", data, at)[0]
    return found


def test_a_file_cut_at_any_byte_keeps_every_step_before_the_cut(tmp_path: Path, small: bytes) -> None:
    starts = starts_of_records(small)
    assert len(starts) == 4
    ends = [*starts[1:], len(small)]
    for cut in range(1, len(small)):
        run = read_bytes(tmp_path / "r", small[:cut])
        whole = sum(end <= cut for end in ends)
        assert [frame.step for frame in run.frames] == list(range(max(whole - 1, 0))), cut
        if cut in ends:
            assert run.problems == []
        else:
            cut_short = f"x.tfevents: cut short at byte {starts[whole]}, the last step may be missing"
            nothing = "x.tfevents: not an event file, or cut short before its first record"
            assert run.problems == [cut_short] or (whole == 0 and run.problems == [nothing])


def test_a_flipped_bit_anywhere_costs_its_own_record_and_at_most_what_follows(tmp_path: Path, small: bytes) -> None:
    starts = starts_of_records(small)
    for at in range(0, len(small), 3):
        damaged = bytearray(small)
        damaged[at] ^= 1 << (at % 8)
        run = read_bytes(tmp_path / "r", bytes(damaged))
        which = sum(start <= at for start in starts) - 1
        steps = [frame.step for frame in run.frames]
        assert steps[: max(which - 1, 0)] == list(range(max(which - 1, 0))), at
        assert which - 1 not in steps, "a damaged step must not be shown"
        assert run.problems, at


def test_a_damaged_record_costs_itself_only(tmp_path: Path, small: bytes) -> None:
    starts = starts_of_records(small)
    damaged = bytearray(small)
    damaged[starts[2] + 40] ^= 1
    run = read_bytes(tmp_path / "r", bytes(damaged))
    assert [frame.step for frame in run.frames] == [0, 2]
    assert run.problems == [f"x.tfevents: record at byte {starts[2]} has a wrong checksum, skipped"]
    damaged[starts[3] + 2] ^= 1
    run = read_bytes(tmp_path / "r", bytes(damaged))
    assert f"record at byte {starts[3]} has a wrong checksum, skipped the rest of the file" in run.problems[1]


def test_tensors_whose_description_was_lost_are_said(tmp_path: Path, small: bytes) -> None:
    starts = starts_of_records(small)
    run = read_bytes(tmp_path / "r", small[: starts[1]] + small[starts[2] :])
    assert not any(frame.sites for frame in run.frames)
    assert [f.step for f in run.findings] == [1]
    assert any("unknown tag (no metadata)" in problem for problem in run.problems)
    assert run.scalars["activation.mean/x"].steps.tolist() == [1, 2]


def test_a_description_is_valid_in_its_own_file_only(tmp_path: Path, small: bytes) -> None:
    """Another process may have watched other sites."""
    starts = starts_of_records(small)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.tfevents").write_bytes(small[: starts[2]])
    run = read_bytes(tmp_path / "r", small[: starts[1]] + small[starts[3] :])
    assert [(frame.step, len(frame.sites)) for frame in run.frames] == [(0, 1), (2, 0)]
    assert any("unknown tag (no metadata)" in problem for problem in run.problems)


def test_many_damaged_records_are_counted_and_not_listed(tmp_path: Path, small: bytes) -> None:
    bad = record(b"x")[:-4] + b"0000"
    run = read_bytes(tmp_path / "r", small + bad * 1000)
    assert len(run.frames) == 3
    assert len(run.problems) == 4
    assert "1000 records have a wrong checksum" in run.problems[-1]


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=300))
def test_random_bytes_are_no_run_and_no_harm(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    run = read_bytes(tmp_path_factory.getbasetemp() / "random", data)
    assert run.problems
    assert not run.frames


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=200))
def test_random_events_in_sound_records_are_no_harm(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, data: bytes
) -> None:
    summary = record(b"\x10\x05\x2a" + bytes([len(data) & 0x7F]) + data[: len(data) & 0x7F])
    run = read_bytes(tmp_path_factory.getbasetemp() / "events", small + record(data) + summary)
    assert {0, 1, 2} <= {frame.step for frame in run.frames}


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10**6), flipped=st.integers(1, 255), what=st.integers(1, 3))
def test_damage_with_a_right_checksum_is_no_harm(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, at: int, flipped: int, what: int
) -> None:
    """As if a stranger had written the file: the record is sound, what it says is not."""
    starts = [*starts_of_records(small), len(small)]
    data = bytearray(small[starts[what] + 12 : starts[what + 1] - 4])
    data[at % len(data)] ^= flipped
    run = read_bytes(tmp_path_factory.getbasetemp() / "strange", small[: starts[what]] + record(bytes(data)))
    steps = [frame.step for frame in run.frames]
    assert set(range(what - 1)) <= set(steps)


@pytest.mark.parametrize("length", [2**31, 2**32, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path, small: bytes, length: int) -> None:
    started = time.perf_counter()
    run = read_bytes(tmp_path / "r", small + record(b"abc", length))
    assert len(run.frames) == 3
    assert run.problems == [f"x.tfevents: cut short at byte {len(small)}, the last step may be missing"]
    assert time.perf_counter() - started < 5


def test_a_tag_of_a_megabyte_is_skipped_and_said(tmp_path: Path, small: bytes) -> None:
    long = "t" * (1 << 20)
    text = text_value(long)
    run = read_bytes(tmp_path / "r", small + event(7, summary_pb2.Summary.Value(tag=long, simple_value=1.0), text))
    assert len(run.frames) == 3
    assert not any(len(tag) > 1000 for tag in run.scalars)
    assert len(run.problems) == 1
    assert "a tag of 1048576 characters" in run.problems[0]
    assert len(run.problems[0]) < 300


def text_value(tag: str) -> summary_pb2.Summary.Value:
    return summary_pb2.Summary.Value(
        tag=tag, tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[b"x"])
    )


def tensor(tag: str, content: dict[str, Any], **fields: Any) -> summary_pb2.Summary.Value:
    shape = fields.pop("shape", None)
    value = summary_pb2.Summary.Value(tag=tag, tensor=tensor_pb2.TensorProto(**fields))
    if shape is not None:
        dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape]
        value.tensor.tensor_shape.CopyFrom(tensor_shape_pb2.TensorShapeProto(dim=dims))
    value.metadata.plugin_data.plugin_name = "tbhooks"
    value.metadata.plugin_data.content = json.dumps(content).encode()
    return value


ROWS = {"version": 2, "kind": "activation", "sites": [["x", ""]], "columns": list(stored_frames.STORED_COLUMNS)}
COUNTS = {"version": 2, "kind": "activation", "sites": [["x", ""]], "encoding": "zlib of a .npy array [sites, buckets]"}
ONE_ROW = np.array([[2, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], "<f4").tobytes()


def rows_value(content: dict[str, Any] = ROWS, raw: bytes = ONE_ROW, shape: tuple[int, ...] = (1, 11)) -> Any:
    return tensor("tbhooks/activation", content, dtype=types_pb2.DT_FLOAT, shape=shape, tensor_content=raw)


@pytest.mark.parametrize(
    "value",
    [
        rows_value(shape=(1, 8)),
        rows_value(shape=(2**40, 11)),
        rows_value(shape=(2**62, 2**62)),
        rows_value(shape=()),
        rows_value(shape=(-1, 11)),
        rows_value(raw=ONE_ROW[:-1]),
        rows_value(raw=b""),
        rows_value({**ROWS, "version": 3}),
        rows_value({**ROWS, "version": 1}),
        rows_value({**ROWS, "sites": [["x"]]}),
        rows_value({**ROWS, "sites": 3}),
        rows_value({**ROWS, "sites": [[1, 2]]}),
        rows_value({**ROWS, "sites": [["x" * 100_000, ""]]}),
        rows_value({**ROWS, "kind": ["a"]}),
        rows_value({**ROWS, "columns": ["count"]}),
        rows_value({"a": 1}),
    ],
)
def test_tensors_that_do_not_fit_are_skipped_and_said(tmp_path: Path, small: bytes, value: Any) -> None:
    run = read_bytes(tmp_path / "r", small + event(9, value))
    assert [frame.step for frame in run.frames] == [0, 1, 2]
    assert len(run.problems) == 1
    assert run.problems[0].startswith("x.tfevents: step 9, tbhooks/activation: ")
    assert len(run.problems[0]) < 400


@pytest.mark.parametrize("column", [0, 5, 6, 7])
@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0])
def test_a_count_that_is_none_is_not_seen(tmp_path: Path, column: int, count: float) -> None:
    row = np.array([[2, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], "<f4")
    row[0, column] = count
    assert read_bytes(tmp_path / "r", event(0, rows_value(raw=row.tobytes()))).frames[0].sites == ()


def npy(array: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/tbhooks-was-here",))


def header_of(shape: str, descr: str = "<u4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


SOUND = zlib.compress(npy(np.ones((1, 385), np.uint32)))
CONTENTS = {
    "pickle": zlib.compress(npy(np.array([[Evil()]], dtype=object), allow_pickle=True)),
    "npz": zlib.compress(b"PK\x03\x04" + bytes(100)),
    "no zlib": b"not compressed",
    "nothing": b"",
    "cut": SOUND[:-8],
    "checksum cut": SOUND[:-2],
    "turned": zlib.compress(npy(np.ones((385, 1), np.uint32))),
    "bomb": zlib.compress(bytes(1 << 26), 9),
    "bomb behind a sound header": zlib.compress(header_of("(1, 385)") + bytes(1 << 26), 9),
    "shape of terabytes": zlib.compress(header_of("(1099511627776, 385)")),
    "code for a shape": zlib.compress(header_of("__import__('os').mkdir('/tmp/tbhooks-was-here')")),
    "deep shape": zlib.compress(header_of("(" * 60)),
    "other shape": zlib.compress(npy(np.ones((2, 385), np.uint32))),
    "floats": zlib.compress(npy(np.ones((1, 385)))),
    "columns first": zlib.compress(npy(np.ones((1, 385), np.uint32)).replace(b"False", b"True ")),
    "more than there can be": zlib.compress(npy(np.full((1, 385), 2**64 - 1, np.uint64))),
}


def counts_event(content: bytes, step: int = 9) -> bytes:
    counts = tensor("tbhooks/activation.buckets", COUNTS, dtype=types_pb2.DT_STRING, string_val=[content])
    return event(step, rows_value(), counts)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_sound_histograms_of_a_file_made_by_hand_are_read(tmp_path: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
    most = min(int(np.iinfo(dtype).max), 2**40)
    run = read_bytes(tmp_path / "r", counts_event(zlib.compress(npy(np.full((1, 385), most, dtype)))))
    assert run.problems == []
    assert run.frames[0].buckets.tolist() == [[most] * 385]


@pytest.mark.parametrize("name", CONTENTS)
def test_histograms_that_are_none_are_skipped_and_said(tmp_path: Path, small: bytes, name: str) -> None:
    started = time.perf_counter()
    run = read_bytes(tmp_path / "r", small + counts_event(CONTENTS[name]))
    assert [frame.step for frame in run.frames] == [0, 1, 2, 9]
    assert run.frames[-1].buckets.shape == (1, 0)
    assert len(run.problems) == 1
    assert "histograms" in run.problems[0]
    assert not Path("/tmp/tbhooks-was-here").exists()
    assert time.perf_counter() - started < 5


def test_histograms_found_unsound_only_later_are_none_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CHECKED_BYTES", 0)
    (tmp_path / "x.tfevents").write_bytes(counts_event(CONTENTS["bomb behind a sound header"]))
    run = runs.read(tmp_path)
    assert run.problems == []
    assert not run.frames[0].buckets.any()
    assert len(run.problems) == 1


def test_a_bomb_takes_no_more_memory_than_its_sites_need() -> None:
    packed = stored_frames.PackedCounts(CONTENTS["bomb behind a sound header"], 1)
    biggest = []
    real = zlib.decompressobj

    class Spy:
        def __init__(self) -> None:
            self._real = real()

        def decompress(self, data: bytes, most: int) -> bytes:
            out = self._real.decompress(data, most)
            biggest.append(len(out))
            return out

        @property
        def eof(self) -> bool:
            return self._real.eof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_frames.zlib, "decompressobj", Spy)
        with pytest.raises(ValueError, match="another size"):
            packed.unpack()
    assert max(biggest) <= 385 * 8 + 1024


def test_a_running_run_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        sink.write(make_frame(step))
        sink.flush()
        assert [frame.step for frame in runs.read(tmp_path).frames] == list(range(step + 1))
    sink.close()
