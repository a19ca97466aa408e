"""A torch, or a compiler, that we do not know costs numbers that are named, and never an exception or a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tbhooks
from tbhooks.capture import tensor_tree
from tbhooks.capture.compile import compilation, dynamo
from tbhooks.capture.hooks import hook_types
from tbhooks.reduction import torch_private
from tests.support import compiling
from tests.support.compiling import Graphs, Trial, operations
from tests.support.script_host import ScriptHost

pytestmark = compiling.ISOLATED


def train(trial: Trial, fullgraph: bool, backend: Any = None) -> None:
    trial.graphs = trial.graphs if backend is None else backend
    trial.watch(every=2)
    called = trial.compile(trial.model, fullgraph=fullgraph)
    for _ in range(4):
        trial.step(trial.forward(called))


def assert_lost_and_said(watching: tbhooks.Watch, why: str) -> None:
    """All but what is inside compiled code is there, and what is not is named."""
    assert [frame.step for frame in watching.history] == [0, 2]
    for frame in watching.history:
        assert {("0.weight", kind) for kind in ("weight", "weight_gradient", "update")} <= {*frame_sites(frame)}
        assert ("0", "activation") not in frame
    assert {"0", "1", "2", "3", "4"} <= set(watching.stats.unseen)
    assert why in watching.stats.unseen["0"]


def frame_sites(frame: tbhooks.Frame) -> list[tuple[str, str]]:
    return [(site.name, site.kind) for site in frame.sites]


def test_this_torch_has_every_private_part() -> None:
    with tbhooks.watch(nn.Linear(2, 2)):
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2))
        assert compilation.is_patched()
    assert torch_private.missing == {}
    assert compilation._reset_code is not None


@pytest.mark.parametrize("fullgraph", [True, False])
def test_hooks_that_dynamo_cannot_trace_are_left_out_of_the_graph(
    fullgraph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untraceable(output: object) -> list[tuple[str, Tensor]]:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return tensor_tree.tensors(output)

    bare = Trial(lambda trial: train(trial, fullgraph), compiled=True, is_watched=False)
    monkeypatch.setattr(hook_types, "tensor_tree", type("tree", (), {"tensors": staticmethod(untraceable)}))
    trial = Trial(lambda trial: train(trial, fullgraph), compiled=True, is_watched=True)
    watching = trial.watches[0]
    assert trial.left == bare.left
    assert all(graph in bare.graphs.lowered for graph in trial.graphs.lowered)  # node for node the unwatched ones
    assert watching.stats.errors == 1, watching.stats.messages
    assert any("compiling" in message for message in watching.stats.messages)
    assert_lost_and_said(watching, "could not be compiled with hooks")


class Refuses(Graphs):
    """A backend that does not know operators of others."""

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        if any("tbhooks" in target or "observe" in target for _, target in operations(graph)):
            raise NotImplementedError("an operator that this backend does not have")
        return super().__call__(graph, inputs, **options)


def test_a_backend_that_fails_on_our_operators_gets_the_graph_without_them() -> None:
    bare = Trial(lambda trial: train(trial, True, Refuses()), compiled=True, is_watched=False)
    trial = Trial(lambda trial: train(trial, True, Refuses()), compiled=True, is_watched=True)
    assert trial.left == bare.left
    assert trial.watches[0].stats.errors == 1
    assert_lost_and_said(trial.watches[0], "could not be compiled with hooks")


def test_an_error_of_the_users_model_stays_the_users() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            torch._dynamo.graph_break()
            return x

    model = Broken()
    watching = tbhooks.watch(model, every=1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 4))
    watching.close()
    assert watching.stats.errors == 0, watching.stats.messages


def test_a_compiler_that_cannot_be_guarded_gets_no_hooks_in_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Trial(lambda trial: train(trial, True), compiled=True, is_watched=False)
    monkeypatch.setattr(compilation, "is_patched", lambda: False)
    trial = Trial(lambda trial: train(trial, True), compiled=True, is_watched=True)
    assert trial.left == bare.left
    assert not trial.breaks
    assert trial.watches[0].stats.errors == 0, trial.watches[0].stats.messages
    assert_lost_and_said(trial.watches[0], "not known")


def fails(*_: Any, **__: Any) -> Any:
    raise LookupError("this torch does not have it")


@pytest.mark.parametrize(
    "part", ["_graph_breaks", "_broken_by_us", "_config", "_hooks_wanted", "_Frame.is_ours", "_Frame.__init__"]
)
def test_whatever_of_ours_fails_around_the_compiler_the_user_gets_compiled_code(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Trial(lambda trial: train(trial, True), compiled=True, is_watched=False)
    monkeypatch.setattr(dynamo, "failures", [])
    broken = property(fails) if part == "_Frame.is_ours" else fails
    monkeypatch.setattr(f"{compilation.__name__}.{part}", broken)
    trial = Trial(lambda trial: train(trial, True), compiled=True, is_watched=True)
    assert trial.left == bare.left
    assert not trial.breaks
    assert trial.watches[0].stats.errors > 0
    said = [message for message in trial.watches[0].stats.messages if "LookupError" in message]
    assert any("compiling" in message and "with hooks" in message for message in said), trial.watches[0].stats
    assert [frame.step for frame in trial.watches[0].history] == [0, 2]


def test_what_fails_inside_compiled_code_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Trial(lambda trial: train(trial, True), compiled=True, is_watched=False)
    monkeypatch.setattr(dynamo, "_observers", None)
    monkeypatch.setattr(dynamo, "failures", [])
    monkeypatch.setattr(dynamo, "hook_id", lambda observer: dynamo._host_number(1))
    trial = Trial(lambda trial: train(trial, True), compiled=True, is_watched=True)
    assert trial.left == bare.left
    assert trial.watches[0].stats.errors > 0
    assert any("compiled code" in message for message in trial.watches[0].stats.messages)


WITHOUT = """
import sys, types
stand_in = types.ModuleType("tbhooks.reduction.torch_private")
stand_in.missing = {}
def look_up(name, instead, lost):
    stand_in.missing[name] = lost
    return instead
stand_in.look_up = look_up
sys.modules["tbhooks.reduction.torch_private"] = stand_in
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import tbhooks

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)
    def forward(self, x):
        return self.c(checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=False))

def left(is_watched, compiled):
    torch.manual_seed(0)
    model = Model()
    watching = tbhooks.watch(model, every=1, kinds=tbhooks.data.frame.ALL_KINDS) if is_watched else None
    called = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        called(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if watching is not None:
        watching.close()
        assert ("a", "activation") in watching.latest or compiled
        assert ("a.weight", "update") in watching.latest
        assert set(stand_in.missing) <= set(watching.stats.unseen), watching.stats
        assert watching.stats.errors == 0, watching.stats.messages
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]

for compiled in (False, True):
    assert left(True, compiled) == left(False, compiled)
print(len(stand_in.missing))
"""


def test_training_is_the_same_where_torch_has_none_of_the_private_parts(scripts: ScriptHost) -> None:
    done = scripts.run("-c", WITHOUT, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_operators_are_kept_out_of_cuda_graphs_where_torch_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.tbhooks.observe.default.tags
    others = {name: tag for name, tag in torch.Tag.__members__.items() if name != "cudagraph_unsafe"}
    monkeypatch.setattr(torch, "Tag", type("Tag", (), others))
    called: list[Tensor] = []
    operator = dynamo._define("of_an_older_torch(Tensor tensor) -> ()", called.append)
    operator(torch.ones(2))
    assert len(called) == 1
