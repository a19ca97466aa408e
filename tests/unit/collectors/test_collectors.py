"""Collectors get the tensors they want, share the one copy of the step, and cannot harm training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks.api.extras import ArtifactStep
from tbhooks.capture.recording.packed_step import Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.artifacts import Artifact, Channels, Text
from tests.support import zoo

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def collected_by(w: tbhooks.Watch, *collectors: Any) -> tbhooks.Watch:
    """The watch, with these collectors added."""
    for collector in collectors:
        w._extras._collect(collector)
    return w


class TensorCollector:
    """Keeps the tensors it is called with, as they arrive on the host."""

    def __init__(self, *paths: str, inputs: str = "") -> None:
        self.paths, self.inputs = paths, inputs
        self.steps: list[list[tuple[str, str, np.ndarray[Any, Any]]]] = []
        self._attached: list[Any] = []
        self._now: list[Any] = []

    def wants(self, path: str, module: nn.Module) -> bool:
        return path in self.paths

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return path == self.inputs

    def begin(self) -> None:
        self._now = []

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        self._now.append((kind, path + index, tensor.detach().clone()))

    def end(self, recorder: Recorder) -> None:
        riding = [(kind, name, recorder.attach(tensor)) for kind, name, tensor in self._now]

        def make(read: Read) -> Iterable[Artifact]:
            self.steps.append([(kind, name, read(attached)) for kind, name, attached in riding])
            return [Text("seen", str(len(riding)))]

        recorder.artifact(make)
        self._now = []

    def forget(self) -> None:
        self._now = []


def names(step: list[tuple[str, str, Any]]) -> list[str]:
    return [f"{kind}/{name}" for kind, name, _ in step]


def trained(
    case: zoo.Case, collector: TensorCollector, steps: int = 3, **options: Any
) -> tuple[tbhooks.Watch, tbhooks.MemorySink]:
    kept = tbhooks.MemorySink()
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> None:
        made.append(collected_by(tbhooks.watch(model, kept, every=1, **options), collector))

    zoo.plain_loop(case, steps, before, lambda *_: None)
    made[0].close()
    return made[0], kept


def test_an_collector_sees_the_modules_it_wants_from_the_first_step_on() -> None:
    collector = TensorCollector("0", "2")
    _, kept = trained(zoo.ZOO["mlp"], collector)
    assert [names(step) for step in collector.steps] == [["activation/0", "activation/2"]] * 3
    assert [frame.artifacts[0] for frame in kept.frames if isinstance(frame.artifacts[0], Text)]


def test_it_sees_modules_that_are_not_watched_and_the_inputs_of_the_model() -> None:
    collector = TensorCollector("0", inputs="(root)")
    watching, kept = trained(zoo.ZOO["mlp"], collector, include="2")
    assert [names(step) for step in collector.steps] == [["input/(root)", "activation/0"]] * 3
    assert {site.path for site in kept.frames[0].sites if site.kind == "activation"} == {"2"}
    assert not watching.stats.errors


def test_what_it_sees_is_what_the_module_returned() -> None:
    collector, outputs = TensorCollector("0"), []
    case = zoo.ZOO["mlp"]

    def build() -> nn.Module:
        model = case.build()
        model[0].register_forward_hook(lambda _module, _args, output: outputs.append(output.detach().clone()))
        return model

    trained(zoo.Case(case.name, build, case.batch, case.loss, case.optimizer), collector)
    assert len(outputs) == len(collector.steps) == 3
    for step, output in zip(collector.steps, outputs, strict=True):
        np.testing.assert_array_equal(step[0][2], output.numpy())


def test_it_sees_the_first_step_of_a_model_without_other_hooks() -> None:
    collector = TensorCollector("0", inputs="(root)")
    trained(zoo.ZOO["mlp"], collector, kinds=("weight",))
    assert [names(step) for step in collector.steps] == [["input/(root)", "activation/0"]] * 3


def test_it_rides_in_the_one_copy_of_the_step() -> None:
    collector = TensorCollector("0", "2", inputs="(root)")
    counts = zoo.copies_on_device(zoo.ZOO["mlp"], lambda model: collected_by(tbhooks.watch(model, every=2), collector))
    assert counts == [1, 1, 2, 2, 3]
    assert len(collector.steps) == 3
    on_host = TensorCollector("0", "2", inputs="(root)")
    trained(zoo.ZOO["mlp"], on_host, steps=5)
    for step, there in enumerate(collector.steps):
        for (_, _, device), (_, _, host) in zip(there, on_host.steps[2 * step], strict=True):
            np.testing.assert_array_equal(device, host)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_buckets", [False, True])
def test_tensors_of_any_type_arrive_as_they_were(dtype: torch.dtype, with_buckets: bool) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 3).to(dtype) for shape in ((3, 5), (), (0, 2), (7,))]
    tensors.append(tensors[0].t())
    recorder = Recorder(["activation"])
    recorder.begin(with_buckets)
    site = recorder.number(tbhooks.Site("x", "activation"))
    recorder.record(site, torch.ones(3))
    riding = [recorder.attach(tensor) for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    tensors[0].zero_()  # what is changed later does not show
    found: list[Any] = []
    recorder.artifact(lambda read: found.extend(map(read, riding)) or [])
    (frame,) = recorder.pack(0, 0).frames()
    assert frame["x", "activation"].mean == 1
    for expected, got in zip(before, found, strict=True):
        wide = expected.float() if dtype == torch.bfloat16 else expected
        np.testing.assert_array_equal(got, wide.numpy())


def test_a_step_with_artifacts_alone_is_written_and_not_kept_among_the_numbers() -> None:
    kept = tbhooks.MemorySink()
    model = nn.Linear(2, 1)
    with tbhooks.watch(model, kept) as w:
        w._worker.submit(ArtifactStep((Text("note", "hello"),), step=7))
        w.flush()
        assert [(frame.step, frame.artifacts[0].tag) for frame in kept.frames] == [(7, "note")]
        assert len(w.history) == 0


def test_history_keeps_numbers_and_not_what_goes_along() -> None:
    watching, kept = trained(zoo.ZOO["mlp"], TensorCollector("0"))
    assert all(frame.artifacts for frame in kept.frames)
    assert not any(frame.artifacts for frame in watching.history)


class FailingCollector(TensorCollector):
    """Raises in one of its methods, on some logged steps."""

    def __init__(self, method: str, steps: set[int]) -> None:
        super().__init__("0", inputs="0")
        self.method, self.fails_on, self.step = method, steps, -1
        self.collected: list[int] = []

    def fail(self, method: str) -> None:
        if method == self.method and self.step in self.fails_on:
            raise MemoryError("none left")

    def wants(self, path: str, module: nn.Module) -> bool:
        self.fail("wants")
        return super().wants(path, module)

    def begin(self) -> None:
        self.step += 1
        self.fail("begin")
        super().begin()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        super().on_tensor(path, kind, index, tensor)
        if kind == "activation":
            self.fail("on_tensor")

    def end(self, recorder: Recorder) -> None:
        self.fail("end")
        super().end(recorder)
        self.collected.append(self.step)


@pytest.mark.parametrize("method", ["wants", "begin", "on_tensor", "end"])
@pytest.mark.parametrize(
    ("fails", "collected"),
    [({1}, [0, 2, 3, 4, 5, 6]), ({1, 2, 4, 5}, [0, 3, 6]), ({1, 2, 3}, [0])],
    ids=["once", "twice", "given_up"],
)
def test_one_that_fails_is_tried_again_and_given_up_after_three_steps(
    method: str, fails: set[int], collected: list[int]
) -> None:
    bad, good = FailingCollector(method, fails), TensorCollector("0")
    kept = tbhooks.MemorySink()
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> None:
        made.append(collected_by(tbhooks.watch(model, kept, every=1), good, bad))

    zoo.plain_loop(zoo.ZOO["mlp"], 7, before, lambda *_: None)
    made[0].close()
    assert bad.collected == collected
    assert len(bad.steps) == len(collected)
    assert all(names(step) == ["input/0", "activation/0"] for step in bad.steps)
    assert len(good.steps) == len(kept.frames) == 7
    assert made[0].stats.errors == len(fails)
    assert any("FailingCollector: MemoryError: none left" in message for message in made[0].stats.messages)
    assert any("given up" in message for message in made[0].stats.messages) == (len(fails) == 3)


def test_the_one_pass_of_a_model_that_is_not_trained_is_shown_at_the_end() -> None:
    collector = TensorCollector("0")
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with collected_by(tbhooks.watch(model), collector):
        model(torch.ones(1, 2))
    assert [names(step) for step in collector.steps] == [["activation/0"]]


def test_checkpointed_blocks_are_shown_once() -> None:
    case = zoo.ZOO["checkpointed"]
    paths = [path for path, _ in case.build().named_modules() if path]
    collector = TensorCollector(*paths)
    trained(case, collector, steps=1)
    assert len(names(collector.steps[0])) == len(set(names(collector.steps[0])))


def test_compiled_modules_are_shown_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    collector = TensorCollector("0", "1", inputs="0")
    w = collected_by(tbhooks.watch(model, every=1), collector)
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        called(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    w.close()
    assert [sorted(names(step)) for step in collector.steps] == [["activation/0", "activation/1", "input/0"]] * 2
    np.testing.assert_array_equal(collector.steps[0][-1][2] >= 0, True)


def test_training_is_the_same_to_the_bit_and_the_graph_has_as_many_nodes() -> None:
    case = zoo.ZOO["cnn"]
    bare = zoo.train(case, 3)
    collector = TensorCollector(*[path for path, _ in case.build().named_modules()], inputs="(root)")
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(collected_by(tbhooks.watch(model, every=1), collector))
        return model

    seen = zoo.train(case, 3, before=before)
    made[0].close()
    assert seen == bare
    assert collector.steps


def test_a_pattern_that_fails_later_costs_no_step_its_numbers() -> None:
    model, fails = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), []

    def pattern(path: str, _module: nn.Module) -> bool:
        if fails and path == "1":
            raise RuntimeError("the user's own")
        return path != "(root)"

    w = tbhooks.watch(model, every=2).per_channel(pattern).images(pattern).embeddings(pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        fails += [step] * (step == 1)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    w.close()
    assert [("1", "activation") in frame for frame in w.history] == [True] * 3
    assert w.stats.errors == 6  # three collectors, on two logged steps
    assert zoo.hook_count(model) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_ragged_batches_harm_nobody(layout: torch.layout) -> None:
    model = nn.Linear(3, 2)
    w = tbhooks.watch(model, every=1).graph().images().per_channel("*").embeddings("*").progress()
    table, optimizer = w.summary(), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
        torch.stack([part.sum() for part in model(ragged).unbind()]).sum().backward()
        optimizer.step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    assert w.history.scalar("train.samples_per_second")[0] == [1]
    assert table.layers.samples == 2


def test_a_sparse_output_is_in_the_summary() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    model = nn.Sequential(nn.Linear(3, 2), Sparse())
    w = tbhooks.watch(model, every=1)
    table = w.summary()
    model(torch.randn(4, 3)).to_dense().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    assert not w.stats.errors, w.stats.messages
    assert {layer.path: layer.shapes for layer in table.layers.layers}["1"] == ((4, 2),)


def test_a_module_in_the_place_of_another_is_looked_at_as_what_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    kept, before = tbhooks.MemorySink(), model[0]
    w = tbhooks.watch(model, kept, every=2).images("*").per_channel("*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            model[0] = nn.Sequential(before)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 2, 2)).sum().backward()
        optimizer.step()
    w.close()
    named = [{name for e in frame.artifacts if isinstance(e, Channels) for name, _ in e.names} for frame in kept.frames]
    assert named == [{"0", "0.weight", "2", "2.weight"}, {"0.0", "0.0.weight", "2", "2.weight"}]
