"""Evaluation passes make frames of their own, and leave training and its frames as they would be without them.

Runs are written as strings, as tests/support/evaluation_runs.py explains, which also keeps what they should show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import JsonlSink, MemorySink
from tbhooks.data.errors import ArgumentError, ClosedError
from tbhooks.data.frame import ALL_KINDS, KINDS
from tbhooks.sinks.jsonl import read
from tests.support import evaluation_runs, float64_recorder, frames, reference, zoo
from tests.support.evaluation_runs import Kept, Run, assert_evaluations, closed, expected_training, start, watched
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import steps_of
from tests.support.script_host import ScriptHost

SCRIPTS = {
    "after some steps": "tteettet", "last": "ttte", "at every step": "tetetete", "before the first step": "eetete",
    "twice at one step": "tefeftet", "inside an open step": "fefsfefefs", "no training at all": "eee",
}  # fmt: skip
WAYS = {"default-1": (KINDS, 1), "default-3": (KINDS, 3), "one-2": (("activation",), 2), "all-1": (ALL_KINDS, 1)}


def check(script: str, kinds: tuple[str, ...], every: int, guard: Callable[[], Any] = torch.no_grad) -> None:
    run = watched(script, guard=guard, every=every, kinds=kinds)
    training, evaluations = closed(run)
    assert run.bits() == start(guard=guard).do(script).bits()
    assert_evaluations(evaluations, start(Kept, guard=guard).do(script).watcher.evaluations, kinds)
    without = closed(watched(script.replace("e", ""), evaluate=False, every=every, kinds=kinds))
    assert not without[1]
    for frame, other in zip(training, without[0], strict=True):
        assert (frame.step, frame.sites, frame.scalars) == (other.step, other.sites, other.scalars)
        assert np.array_equal(frame.values, other.values)
        assert np.array_equal(frame.buckets, other.buckets)
    steps = expected_training(script)
    assert run.watcher.stats.steps == len(steps)
    if kinds == KINDS:
        for frame in training[: -(-len(steps) // every)]:  # without a last one that was cut short
            float64_recorder.assert_frame_equals(frame, steps[frame.step])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_evaluation_is_one_frame_with_float64_numbers_and_training_is_as_without(name: str, way: str) -> None:
    check(SCRIPTS[name], *WAYS[way])


@pytest.mark.parametrize("kind", ["input", "functional"])
@pytest.mark.parametrize("name", ["after some steps", "at every step"])
def test_inputs_and_operations_of_an_evaluation_after_an_unlogged_step(name: str, kind: str) -> None:
    check(SCRIPTS[name], ("activation", kind), 3)


@pytest.mark.parametrize("guard", [contextlib.nullcontext, torch.inference_mode], ids=["with_grad", "inference_mode"])
def test_evaluations_in_any_gradient_mode(guard: Callable[[], Any]) -> None:
    check("eteefets", KINDS, 2, guard)


@pytest.mark.parametrize("script", ["teetee", "fefes", "tete"])
def test_without_the_call_evaluations_are_neither_counted_nor_read(script: str) -> None:
    run = watched(script, evaluate=False)
    training, evaluations = closed(run)
    assert run.bits() == start().do(script).bits()
    assert not evaluations
    assert run.watcher.stats.steps == script.count("s") + script.count("t")
    for frame, step in zip(training, expected_training(script), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@pytest.mark.parametrize("every", [1, 3])
def test_history_and_sinks_have_the_frames_in_the_order_they_happened(every: int) -> None:
    kept = MemorySink()
    run = watched("tete", kept, every=every)
    closed(run)
    order = [(0, False), (0, True), (1, False), (1, True)] if every == 1 else [(0, False), (0, True), (1, True)]
    assert [(f.step, f.is_evaluation) for f in run.watcher.history] == order
    assert [(f.step, f.is_evaluation) for f in kept] == order


@pytest.mark.parametrize(
    ("script", "clock", "labels"),
    [("tfest", "auto", [0]), ("tefest", "auto", [0, 0]), ("fefefe", "forward", [0, 1, 2])],
)
def test_an_evaluation_is_of_the_step_that_ended_before_it(script: str, clock: str, labels: list[int]) -> None:
    assert steps_of(closed(watched(script, step=clock))[1]) == labels


def test_evaluations_have_tags_of_their_own_in_the_same_run(tmp_path: Path) -> None:
    run = watched("teetee", tmp_path / "both")
    closed(run)
    closed(watched("tt", tmp_path / "training", evaluate=False))
    scalars = {
        f"eval.activation.{stat}/{path}" for stat in ("mean", "std", "zero_fraction") for path in evaluation_runs.PATHS
    }
    distributions = {f"eval.activation/{path}" for path in evaluation_runs.PATHS}
    tensor_tags = {"tbhooks/eval.activation", "tbhooks/eval.activation.buckets"}
    both, training = (frames.accumulator(tmp_path / name) for name in ("both", "training"))
    for family, added in (("scalars", scalars), ("histograms", distributions), ("tensors", tensor_tags)):
        assert set(both.Tags()[family]) == set(training.Tags()[family]) | added
    for path in evaluation_runs.PATHS:
        steps, values = run.watcher.history.series(path, "eval.activation", "mean")
        assert steps == [0, 1]
        tag = f"eval.activation.mean/{path}"
        assert frames.scalar_series(tmp_path / "both", tag) == pytest.approx(dict(zip(steps, values, strict=True)))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "directory": str, "path": lambda place: place, "writer": lambda place: SummaryWriter(str(place)),
    "memory": lambda place: MemorySink(), "jsonl": lambda place: JsonlSink(place / "frames.jsonl"),
    "list": lambda place: [str(place), MemorySink()],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_of_their_own_gets_evaluations_under_plain_names_and_the_first_none(tmp_path: Path, name: str) -> None:
    place, first = tmp_path / "evaluation", MemorySink()
    writer = WRITERS[name](place)
    run = watched("", [first, tmp_path / "training"], evaluate=False)
    assert run.watcher.evaluation(writer) is run.watcher
    _, evaluations = closed(run.do("teete"))
    assert steps_of(first) == [0, 1]
    assert {site.kind for frame in first for site in frame.sites} == set(KINDS)
    assert not any("eval." in tag for tag in frames.tags(tmp_path / "training"))
    kept = start(Kept).do("teete").watcher.evaluations
    assert_evaluations(evaluations, kept, KINDS)  # the history has both, by their full names
    if name in ("memory", "jsonl", "list"):
        written = list(read(writer.path) if name == "jsonl" else writer[1] if name == "list" else writer)
        plain = [(label, {(path, k.removeprefix("eval.")): x for (path, k), x in s.items()}) for label, s in kept]
        assert_evaluations(written, plain, ("activation",))
    if name not in ("memory", "jsonl"):
        means = {label: reference.stats(step["norm", "eval.activation"])["mean"] for label, step in kept}
        assert frames.scalar_series(place, "activation.mean/norm") == pytest.approx(means, rel=1e-5)
        assert {(0, "activation/norm"), (1, "activation/norm")} <= set(frames.histograms(place))
        assert "tbhooks/activation" in frames.tags(place)
        assert not any(tag.startswith(("eval.", "gradient", "train", "weight")) for tag in frames.tags(place))


@pytest.mark.parametrize("first", [MemorySink(), evaluation_runs.Slow()], ids=["fast", "slow"])
def test_a_further_writer_gets_evaluations_from_then_on(first: MemorySink) -> None:
    second, third = MemorySink(), MemorySink()
    run = watched("", first)
    run.watcher.evaluation()  # once more: nothing changes
    run.do("tetet")
    if not isinstance(first, evaluation_runs.Slow):
        run.watcher.flush()
    run.watcher.evaluation(second).evaluation(third)
    closed(run.do("ete"))
    assert [frame.step for frame in first if frame.is_evaluation] == [0, 1]
    assert [frame.step for frame in first if not frame.is_evaluation] == [0, 1, 2, 3]
    assert steps_of(second) == steps_of(third) == [2, 3]
    assert run.bits() == start().do("tetetete").bits()


def test_what_cannot_be_done_is_refused_and_leaves_the_watch_as_it_was(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "run"))
    run = watched("", [writer, tmp_path / "two"], evaluate=False)
    for again in (writer, tmp_path / "two", str(tmp_path / "run"), [MemorySink(), writer]):
        with pytest.raises(ArgumentError, match=r"evaluation\(\) without a writer"):
            run.watcher.evaluation(again)
    for bad in (3, object(), MemorySink, [None]):
        with pytest.raises(ArgumentError, match="writer must be a SummaryWriter"):
            run.watcher.evaluation(bad)
    training, evaluations = closed(run.do("tet"))
    assert (steps_of(training), evaluations) == ([0, 1], [])
    with pytest.raises(ClosedError):
        run.watcher.evaluation()
    for kinds in (("gradient",), ("weight", "update"), "weight_gradient"):
        with pytest.raises(ArgumentError, match="evaluation passes have activation, input, functional"):
            tbhooks.watch(evaluation_runs.Net(), kinds=kinds).evaluation()


def test_latest_is_the_last_training_frame_and_history_has_both() -> None:
    run = watched("ee", every=2)
    assert run.watcher.latest.is_evaluation  # there is nothing else yet
    for script, latest, steps in (("t", 0, [0, 0]), ("e", 0, [0, 0, 0]), ("te", 0, [0, 0, 0, 1])):
        run.do(script)
        assert (run.watcher.latest.step, run.watcher.latest.is_evaluation) == (latest, False)
        assert steps_of(run.watcher.history) == steps
    assert run.watcher.history.series("norm", "eval.activation", "count")[0] == [0, 0, 1]
    assert run.watcher.history.series("norm", "activation", "count")[0] == [0]


def test_scalars_logged_after_an_evaluation_join_the_training_step() -> None:
    run = watched("")
    for step in range(3):
        run.do("tee")
        run.watcher.log({"loss": torch.tensor(float(step)), f"only{step}": step})
        if step == 1:
            assert run.watcher.history.scalar("train/only1")[0] == [1]  # also after it was handed over
            run.watcher.log({"late": 7.0})
    training, evaluations = closed(run)
    assert [frame.scalars["train/loss"] for frame in training] == [0, 1, 2]
    assert ["train/late" in frame.scalars for frame in training] == [False, True, False]
    assert not any(frame.scalars for frame in evaluations)
    assert steps_of(evaluations) == [0, 1, 2]


@pytest.mark.parametrize("end", ["close", "with", "flush", "writer.flush", "writer.close", "unwatch"])
def test_the_last_evaluation_is_not_lost(tmp_path: Path, end: str) -> None:
    writer = SummaryWriter(str(tmp_path))
    run = watched("", writer)
    with run.watcher if end == "with" else contextlib.nullcontext():
        run.do("tee")
    {
        "close": run.watcher.close, "flush": run.watcher.flush, "writer.flush": writer.flush,
        "writer.close": writer.close, "unwatch": lambda: tbhooks.unwatch(run.model), "with": lambda: None,
    }[end]()  # fmt: skip
    assert list(frames.scalar_series(tmp_path, "eval.activation.mean/norm")) == [0]
    tbhooks.unwatch(run.model)
    assert zoo.hook_count(run.model) == 0
    assert run.do("te").bits() == start().do("teete").bits()


def test_an_evaluation_at_the_end_of_a_script_is_not_lost(scripts: ScriptHost, tmp_path: Path) -> None:
    code = (
        "import sys, torch, tbhooks; model = torch.nn.Linear(2, 1)\n"
        "tbhooks.watch(model, tbhooks.JsonlSink(sys.argv[1]), every=1).evaluation()\n"
        "model(torch.ones(3, 2)).sum().backward(); torch.optim.SGD(model.parameters()).step()\n"
        "model.eval()(torch.ones(4, 2)); raise SystemExit(3)"
    )
    place = tmp_path / "frames.jsonl"
    assert scripts.run("-c", code, place, timeout=60).returncode == 3
    assert sorted(frame.is_evaluation for frame in read(place)) == [False, True]


def test_nothing_is_read_while_paused() -> None:
    run = watched("te", every=2)
    with run.watcher.paused():
        run.do("ee", after=lambda event: pytest.fail("hooked") if zoo.hook_count(run.model) else None)
    _, evaluations = closed(run.do("etee"))
    assert [(f.step, f["norm", "eval.activation"].count / 40) for f in evaluations] == [(0, 2), (1, 2)]
    assert run.bits() == start().do("teeeetee").bits()


def test_evaluations_before_and_after_a_paused_step_are_two() -> None:
    run = watched("te", every=2)
    with run.watcher.paused():
        run.do("t")
    assert steps_of(closed(run.do("e"))[1]) == [0, 1]


@pytest.mark.parametrize("kinds", [("activation",), ("activation", "functional")])
def test_unlogged_training_has_one_hook_on_the_root_and_closing_leaves_none(kinds: tuple[str, ...]) -> None:
    seen: list[tuple[list[int], int]] = []
    run = watched("", every=100, kinds=kinds)

    def look(*_: Any) -> None:
        if run.model.training:
            seen.append((evaluation_runs.on_modules(run.model), len(_get_current_function_mode_stack())))

    run.model.first.register_forward_hook(look)
    run.do("tteett")
    assert seen[1:] == [([1, 1, 0, 0, 0], 0)] * 3  # the first step is logged; the second hook is the one above
    run.watcher.close()
    assert evaluation_runs.on_modules(run.model) == [0, 1, 0, 0, 0]


def test_a_part_in_evaluation_mode_inside_a_training_model_is_training() -> None:
    run = watched("")
    evaluation_runs.freeze(run.model.norm, training=False)
    training, evaluations = closed(run.do("tett"))
    expected = start(Float64Recorder)
    evaluation_runs.freeze(expected.model.norm, training=False)
    expected.do("ttt").watcher.close()
    assert steps_of(evaluations) == [0]
    for frame, step in zip(training, expected.watcher.steps, strict=True):
        float64_recorder.assert_frame_equals(frame, step)


NOT_ASKED_THE_MODEL = pytest.mark.xfail(
    strict=True, reason="compiled hooks ask the module, not the model, if it trains"
)


@pytest.mark.parametrize("part_in_training", [False, pytest.param(True, marks=NOT_ASKED_THE_MODEL)])
def test_a_compiled_model_is_read_in_evaluation_too(part_in_training: bool) -> None:
    def run(begin: Callable[[evaluation_runs.Net], Any], compiles: bool = True) -> Run:
        torch.compiler.reset()
        one = start()
        one.called = torch.compile(one.model, backend="aot_eager") if compiles else one.model
        one.watcher = begin(one.called)
        if part_in_training:
            evaluation_runs.freeze(one.model.norm, training=True)
        return one.do("teeteett")

    one = run(lambda model: tbhooks.watch(model, every=2).evaluation())
    training, evaluations = closed(one)
    assert one.bits() == run(lambda model: None).bits()
    assert_evaluations(evaluations, run(Kept, compiles=False).watcher.evaluations, KINDS)
    assert steps_of(training) == [0, 2]
    for frame in () if part_in_training else training:
        float64_recorder.assert_frame_equals(frame, expected_training("tttt")[frame.step])


def test_include_chooses_what_is_read_in_evaluation() -> None:
    _, evaluations = closed(watched("te", include="first"))
    assert [site.name for site in evaluations[0].sites] == ["first"]


def test_without_histograms_evaluations_have_none() -> None:
    training, evaluations = closed(watched("te", histograms=False))
    assert training[0].buckets.shape[1] == evaluations[0].buckets.shape[1] == 0


def test_an_evaluation_of_too_many_calls_says_that_it_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbhooks.capture.recording.device_buffer.MOST_BYTES", 1 << 17)
    run = watched("t" + "e" * 50)
    run.watcher.close()
    assert any("more calls than its buffer holds" in message for message in run.watcher.stats.messages)


def test_an_evaluation_has_the_label_the_user_gave_its_step() -> None:
    run = watched("t")
    run.watcher.step(500)
    training, evaluations = closed(run.do("e"))
    assert steps_of(training) == steps_of(evaluations) == [500]
