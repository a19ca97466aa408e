"""The graph of a model as it was executed: right arrows, for every model, at no cost but once."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.capture.hooks import hook_types as hooks
from tbhooks.collectors.graph import builder
from tbhooks.collectors.graph.tracer import Tracer
from tbhooks.data.artifacts import Graph, Node
from tbhooks.data.frame import ALL_KINDS
from tests.support import fake_device, zoo
from tests.support.graph_models import EVALUATED, TRAINED, Differs, Residual, x
from tests.support.slow import cases

CASES = list(zoo.ZOO)


class Run:
    """A watched model that is trained by hand, and what was drawn of it."""

    def __init__(self, model: nn.Module, every: int = 1, **options: Any) -> None:
        self.kept = tbhooks.MemorySink()
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.watch = tbhooks.watch(model, self.kept, every=every, **options).graph()

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        total(self.model(*args, **kwargs)).backward()
        self.optimizer.step()

    def graphs(self) -> list[Graph]:
        self.watch.close()
        assert self.watch.stats.errors == 0, self.watch.stats.messages
        return [artifact for frame in self.kept.frames for artifact in frame.artifacts if isinstance(artifact, Graph)]


def total(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().sum()
    if isinstance(output, dict):
        output = list(output.values())
    elif not isinstance(output, list | tuple):
        output = list(vars(output).values())
    return sum((total(one) for one in output if one is not None), torch.zeros(()))


def drawn(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    run = Run(model)
    run.step(*args, **kwargs)
    (graph,) = run.graphs()
    return graph


def arrows(graph: Graph) -> dict[str, list[str]]:
    """Of each box, where its arrows come from."""
    return {node.name: sorted(node.inputs) for node in graph.nodes}


def node(graph: Graph, name: str) -> Node:
    (found,) = [node for node in graph.nodes if node.name == name]
    return found


# --- Arrows, as a person would draw them ----------------------------------------------------------


def test_a_residual_connection_goes_around_what_it_skips() -> None:
    assert arrows(drawn(Residual(), x())) == {
        "input/x": [],
        "one": ["input/x"],
        "relu": ["one"],
        "two": ["relu"],
        "add": ["input/x", "two"],
        "output": ["add"],
    }


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_modules_are_nested_by_their_paths() -> None:
    assert arrows(drawn(Nested(), x())) == {
        "input/x": [],
        "blocks/0/one": ["input/x"],
        "blocks/0/relu": ["blocks/0/one"],
        "blocks/0/two": ["blocks/0/relu"],
        "blocks/0/add": ["blocks/0/two", "input/x"],
        "blocks/1/one": ["blocks/0/add"],
        "blocks/1/relu": ["blocks/1/one"],
        "blocks/1/two": ["blocks/1/relu"],
        "blocks/1/add": ["blocks/0/add", "blocks/1/two"],
        "head/0": ["blocks/1/add"],
        "head/1": ["head/0"],
        "output": ["head/1"],
    }


def test_calls_of_one_module_have_a_box_each() -> None:
    assert arrows(drawn(zoo.ZOO["shared_module"].build(), x(3, 8))) == {
        "input/x": [],
        "layer": ["input/x"],
        "tanh": ["layer"],
        "layer.call_2": ["tanh"],
        "tanh_1": ["layer.call_2"],
        "layer.call_3": ["tanh_1"],
        "tanh_2": ["layer.call_3"],
        "output": ["tanh_2"],
    }


def test_calls_of_a_module_with_parts_are_each_nested_in_themselves() -> None:
    graph = arrows(drawn(zoo.Gan(), x(3, 8), x(3, 4)))
    assert graph["discriminator/0"] == ["input/real"]
    assert graph["discriminator.call_2/0"] == ["generator/2"]
    assert graph["discriminator.call_2/2"] == ["discriminator.call_2/1"]
    assert (graph["output/0"], graph["output/1"]) == (["discriminator/2"], ["discriminator.call_2/2"])


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, *, extra: dict[str, Tensor], scale: float = 2.0) -> dict[str, Any]:
        hidden = self.layer(input=tokens)
        return {"hidden": hidden, "deep": [hidden * scale + extra["bias"]]}


def test_inputs_by_name_and_outputs_in_containers_are_distinguished() -> None:
    run = Run(Keywords())
    given = x()
    out = run.model(given, extra={"bias": x(4)})
    total(out["deep"][0]).backward()
    run.optimizer.step()
    (graph,) = run.graphs()
    assert arrows(graph) == {
        "input/tokens": [],
        "input/extra/bias": [],
        "layer": ["input/tokens"],
        "mul": ["layer"],
        "add": ["input/extra/bias", "mul"],
        "output/hidden": ["layer"],
        "output/deep/0": ["add"],
    }


def test_a_dataclass_is_looked_into() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> zoo.Halves:
            y = self.layer(x)
            return zoo.Halves(y, y.tanh())

    run = Run(Model())
    out = run.model(x())
    (out.left + out.right).sum().backward()
    run.optimizer.step()
    (graph,) = run.graphs()
    assert arrows(graph) == {
        "input/x": [], "layer": ["input/x"], "tanh": ["layer"], "output/left": ["layer"], "output/right": ["tanh"],
    }  # fmt: skip


def test_which_output_of_a_recurrent_layer_is_used_shows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            states, (last, _) = self.lstm(x)
            return self.head(last[-1]) + states.mean()

    graph = drawn(Model(), x(2, 3, 4))
    assert arrows(graph) == {
        "input/x": [],
        "lstm": ["input/x"],
        "head": ["lstm:1"],
        "mean": ["lstm"],
        "add": ["head", "mean"],
        "output": ["add"],
    }
    assert node(graph, "lstm").shapes == ((2, 3, 5), (1, 2, 5), (1, 2, 5))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) if x.sum() > 5 else self.small(x)


@pytest.mark.parametrize(("given", "taken"), [(x(), "large"), (x() * 0, "small")])
def test_the_branch_that_ran_is_drawn(given: Tensor, taken: str) -> None:
    assert arrows(drawn(Branches(), given)) == {"input/x": [], taken: ["input/x"], "output": [taken]}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        self.act(y)  # what it returns is y
        y = self.two(y)
        y += x
        y.view(-1).mul_(2.0)  # changes y through a view of it
        y[0] = 0.0
        return y


def test_what_is_changed_in_place_comes_from_what_changed_it() -> None:
    assert arrows(drawn(InPlace(), x())) == {
        "input/x": [],
        "one": ["input/x"],
        "act": ["one"],
        "two": ["act"],
        "add": ["input/x", "two"],
        "mul": ["add"],
        "setitem": ["mul"],
        "output": ["setitem"],
    }


def test_a_view_of_what_was_changed_comes_from_what_changed_it() -> None:
    graph = arrows(drawn(zoo.ZOO["base_overwritten"].build(), x(3, 8)))
    assert graph == {"input/x": [], "widen": ["input/x"], "halve": ["widen"], "mul": ["widen"], "output": ["mul"]}


def test_what_leads_nowhere_is_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.unused(torch.exp(x))
            torch.arange(3).cumsum(0)
            return self.layer(x)

    assert arrows(drawn(Model(), x(), x())) == {
        "input/x": [], "input/mask": [], "exp": ["input/x"], "unused": ["exp"], "layer": ["input/x"],
        "output": ["layer"],
    }  # fmt: skip


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        joined = torch.cat([self.one(left), self.two(right)], dim=-1)
        return joined.unsqueeze(0).transpose(1, 2).contiguous() @ joined * self.scale


def test_views_are_drawn_as_what_they_are_views_of() -> None:
    graph = drawn(Joined(), x())
    assert arrows(graph) == {
        "input/x": [],
        "one": ["input/x"],
        "two": ["input/x"],
        "cat": ["one", "two"],
        "matmul": ["cat"],
        "mul": ["matmul"],
        "output": ["mul"],
    }
    assert node(graph, "mul").attributes["uses"] == "scale"


def test_operators_and_functions_are_called_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return torch.sub((1 - x) / (2 * x), 2 / x) ** 2

    names = [node.operation for node in drawn(Model(), x()).nodes]
    assert sorted(names[2:-1]) == ["div", "div", "mul", "pow", "sub", "sub"]


def test_a_module_that_only_calls_one_from_elsewhere_is_drawn_behind_it() -> None:
    class Caller(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.others[0](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.caller = Caller(self.layer)

        def forward(self, x: Tensor) -> Tensor:
            return self.caller(x)

    assert arrows(drawn(Model(), x())) == {
        "input/x": [], "layer": ["input/x"], "caller": ["layer"], "output": ["caller"],
    }  # fmt: skip


def test_what_an_autograd_function_computes_is_drawn_as_well() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(Twice.apply(self.one(x)))

    assert arrows(drawn(Model(), x())) == {
        "input/x": [], "one": ["input/x"], "mul": ["one"], "two": ["mul"], "output": ["two"],
    }  # fmt: skip


def test_a_tensor_from_nowhere_is_drawn_without_an_arrow_and_says_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 4), [x()]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.kept[0]

    graph = drawn(Model(), x())
    assert arrows(graph)["add"] == ["layer", "tensor"]
    assert arrows(graph)["tensor"] == []
    assert "shows no operation" in node(graph, "tensor").attributes["note"]


# --- What a box says ------------------------------------------------------------------------------


def test_a_module_says_its_class_settings_shapes_types_and_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.Flatten(), nn.Linear(6 * 6 * 6, 5))
    model[0].requires_grad_(False)
    graph = drawn(model, x(2, 3, 8, 8))
    conv, linear = node(graph, "0"), node(graph, "2")
    assert (conv.operation, conv.shapes) == ("Conv2d", ((2, 6, 6, 6),))
    assert conv.attributes["parameters"] == str(6 * 3 * 9)
    assert conv.attributes["weights"] == "weight 6x3x3x3"
    assert conv.attributes["trainable"] == "none"
    assert conv.attributes["class"] == "torch.nn.modules.conv.Conv2d"
    assert "kernel_size=(3, 3)" in conv.attributes["settings"]
    assert linear.attributes["parameters"] == "1,085"
    assert linear.attributes["trainable"] == "all"
    assert linear.attributes["dtype"] == "float32"


def test_an_operation_says_what_it_is_inside_of() -> None:
    graph = drawn(Nested(), x())
    assert node(graph, "blocks/1/add").attributes["inside"] == "Residual blocks.1, 40 parameters"


def test_a_module_that_does_nothing_says_so() -> None:
    graph = drawn(zoo.ZOO["identity_dropout"].build(), x(3, 8))
    assert "passes on" in node(graph, "2/2").attributes["note"]
    assert "note" not in node(graph, "1").attributes


def test_a_long_loop_is_drawn_a_few_times_and_says_how_often_it_ran() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            state, read = x[:, 0], []
            for moment in x.unbind(1):
                state = self.cell(moment, torch.tanh(state))
                read.append(self.head(state))
            return torch.stack(read)

    graph = drawn(Loop(), x(2, 100, 4))
    cells = [node for node in graph.nodes if node.operation == "GRUCell"]
    assert len(cells) == builder.MOST_CALLS
    assert cells[-1].attributes["calls"] == f"{100 - builder.MOST_CALLS + 1}, drawn as one"
    assert "calls" not in cells[0].attributes
    check_structure(graph, {"cell", "head"})


def test_a_long_loop_of_operations_is_cut_short_too() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(100):
                x = x * 0.5 + torch.tanh(x)
            return self.head(x)

    graph = drawn(Loop(), x())
    for operation in ("mul", "add", "tanh"):
        found = [node for node in graph.nodes if node.operation == operation]
        assert len(found) == builder.MOST_OPERATIONS
        assert found[-1].attributes["calls"] == f"{100 - builder.MOST_OPERATIONS + 1}, drawn as one"
    assert arrows(graph)["head"] == [f"add_{builder.MOST_OPERATIONS - 1}"]
    check_structure(graph, {"head"})


@pytest.mark.parametrize("name", ["a:b^c d", "слой", "x" * 300, "input", "relu"])
def test_any_name_a_module_may_have_can_be_drawn(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.get_submodule(name)(x))

    graph = drawn(Model(), x())
    assert len(graph.nodes) == 4
    check_structure(graph, set())
    assert not [node for node in graph.nodes if set(node.name) & set(":^ ")]


# --- Every model of the zoo -----------------------------------------------------------------------


def check_structure(graph: Graph, called: set[str]) -> None:
    """Names are unique, all arrows come from boxes before, and every module that ran is there."""
    names: set[str] = set()
    for node in graph.nodes:
        assert node.name not in names
        for source in node.inputs:
            assert source.lstrip("^").partition(":")[0] in names, f"{node.name} has an arrow from {source}"
        names.add(node.name)
    for path in called:
        inside = path.replace(".", "/")
        assert any(name == inside or name.startswith((f"{inside}/", f"{inside}.call_")) for name in names), path


@dataclass
class StepContext:
    trace: zoo.Trace
    graphs: list[Graph]
    called: set[str]
    nodes: list[int]
    hooks: list[int]
    watch: tbhooks.Watch | None


def trained(name: str, watched: bool, **options: Any) -> StepContext:
    """Two steps of a case, of which the first is logged; what ran is noted by hooks that know nothing of ours."""
    case, kept = zoo.ZOO[name], tbhooks.MemorySink()
    called: set[str] = set()
    nodes: list[int] = []
    hooks: list[int] = []
    made: list[Any] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, kept, every=100, **options).graph() if watched else None)
        handles = [
            module.register_forward_hook(lambda *_, path=path: called.add(path))
            for path, module in model.named_modules()
            if path
        ]
        made.append((model, handles))
        return model

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = case.loss(model, batch)
        nodes.append(zoo.count_graph_nodes(value))
        for handle in made[1][1]:
            handle.remove()
        return value

    trace = zoo.train(
        zoo.Case(case.name, case.build, case.batch, loss, case.optimizer), 2, before=before,
        each_step=lambda *_: hooks.append(zoo.hook_count(made[1][0])),
    )  # fmt: skip
    if watched:
        made[0].close()
    graphs = [artifact for frame in kept.frames for artifact in frame.artifacts if isinstance(artifact, Graph)]
    return StepContext(trace, graphs, called, nodes, hooks, made[0])


@pytest.mark.parametrize("name", cases(CASES, always=zoo.ALWAYS, reason="the same kinds of modules in larger models"))
def test_every_model_is_drawn_and_trains_as_if_it_were_not(name: str) -> None:
    seen, bare = trained(name, True), trained(name, False)
    assert seen.watch is not None
    assert seen.watch.stats.errors == 0, seen.watch.stats.messages
    (graph,) = seen.graphs
    assert graph.name == "training"
    check_structure(graph, seen.called)
    assert any(node.name.startswith("output") and node.inputs for node in graph.nodes)
    assert seen.trace == bare.trace
    assert seen.nodes == bare.nodes
    assert seen.hooks == bare.hooks
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant", "gpt2_checkpointed"])
def test_what_a_checkpoint_computes_again_is_not_drawn_again(name: str) -> None:
    (graph,) = trained(name, True).graphs
    assert not [node.name for node in graph.nodes if "call_2" in node.name]


@pytest.mark.parametrize("reentrant", [False, True])
def test_nor_if_only_parts_of_the_model_are_called(reentrant: bool) -> None:
    run = Run(nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)}))
    block, head = run.model["block"], run.model["head"]  # type: ignore[index]
    total(head(checkpoint(block, x().requires_grad_(), use_reentrant=reentrant))).backward()
    run.optimizer.step()
    (graph,) = run.graphs()
    assert arrows(graph) == {
        "input/input": [], "block/0": ["input/input"], "block/1": ["block/0"], "head": ["block/1"],
    }  # fmt: skip


def test_functional_statistics_are_the_same_beside_it() -> None:
    def functional(drawn: bool) -> list[tuple[str, float]]:
        made: list[Any] = []

        def before(model: nn.Module) -> None:
            w = tbhooks.watch(model, every=1, kinds=ALL_KINDS)
            made.append((w.graph() if drawn else w, model))

        zoo.plain_loop(zoo.ZOO["multihead"], 1, before, lambda *_: None)
        made[0][0].close()
        (frame,) = made[0][0].history
        return [(site.name, frame[site.name, "functional"].mean) for site in frame.sites if site.kind == "functional"]

    assert functional(True) == functional(False) != []


# --- What it costs --------------------------------------------------------------------------------


def test_no_tensor_lives_longer() -> None:
    alive: list[list[bool]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                a = self.one(x)
                b = F.relu(a)
                c = b.view(-1)
                references = [weakref.ref(tensor) for tensor in (a, b, c)]
                a = b = c = None
                alive.append([reference() is not None for reference in references])
            return self.two(x)

    gc.disable()
    try:
        run = Run(Model())
        run.step(x())
    finally:
        gc.enable()
    run.graphs()
    assert alive == [[False] * 3]


def test_on_a_device_it_waits_for_nothing_and_copies_nothing() -> None:
    counts: list[int] = []
    made: list[Any] = []

    def launches(drawn: bool) -> tuple[list[int], list[int]]:
        case = zoo.moved(zoo.ZOO["cnn"], fake_device.to_device, fake_device.put)
        ops: list[int] = []
        copies: list[int] = []

        def before(model: nn.Module) -> None:
            w = tbhooks.watch(model, every=2)
            made.append((w.graph() if drawn else w, model))

        with fake_device.Log() as record:
            zoo.plain_loop(
                case, 4, before, lambda *_: (ops.append(sum(record.ops.values())), copies.append(len(record.copies)))
            )
            counts.append(record.syncs)
        made[-1][0].close()
        return ops, copies

    launches(False)  # makes what is made once
    with_graph, without = launches(True), launches(False)
    assert with_graph == without
    assert counts == [0, 0, 0]
    assert with_graph[1] == [1, 1, 2, 2]


def test_after_one_pass_nothing_is_left_even_if_every_step_is_logged() -> None:
    def counted(drawn: bool) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, every=1, include="0")
        if drawn:
            w.graph()
        counts = []
        for _ in range(3):
            counts.append(zoo.hook_count(model))
            model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        w.close()
        return counts

    watched, bare = counted(True), counted(False)
    assert watched[0] > bare[0]
    assert watched[1:] == bare[1:]


def test_before_backward_nothing_is_left() -> None:
    run = Run(Residual(), kinds="weight")
    before = zoo.hook_count(run.model)
    loss = total(run.model(x()))
    assert zoo.hook_count(run.model) < before
    assert not [hook for module in run.model.modules() for hook in module._forward_pre_hooks.values() if is_ours(hook)]
    loss.backward()
    run.optimizer.step()
    assert len(run.graphs()) == 1


def is_ours(hook: object) -> bool:
    return isinstance(hook, hooks.CallHook | hooks.ReturnHook)


def test_micro_batches_are_one_graph() -> None:
    run = Run(Residual(), every=1)
    for _ in range(3):
        total(run.model(x())).backward()
    run.optimizer.step()
    run.step(x())
    (graph,) = run.graphs()
    assert len(graph.nodes) == 6


# --- Evaluation -----------------------------------------------------------------------------------


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(x())
    model.train()


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_training_and_evaluation_have_a_graph_each(every: int, first: str) -> None:
    run = Run(Differs(), every=every)
    run.watch.evaluation()
    if first == "evaluation":
        evaluate(run.model)
    run.step(x())
    for _ in range(2):
        evaluate(run.model)
        run.step(x())
    graphs = {graph.name: arrows(graph) for graph in run.graphs()}
    assert graphs == {"training": TRAINED, "evaluation": EVALUATED}
    assert len(run.graphs()) == 2


def test_without_evaluations_being_read_only_training_is_drawn() -> None:
    run = Run(Differs(), every=100)
    run.step(x())
    assert zoo.hook_count(run.model) == 0
    evaluate(run.model)
    run.step(x())
    (graph,) = run.graphs()
    assert arrows(graph) == TRAINED


def test_a_last_evaluation_is_not_lost() -> None:
    run = Run(Differs(), every=100)
    run.watch.evaluation()
    run.step(x())
    evaluate(run.model)
    assert [graph.name for graph in run.graphs()] == ["training", "evaluation"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_is_never_trained_is_drawn_too(mode: Any) -> None:
    kept = tbhooks.MemorySink()
    model = InPlace().eval()
    with tbhooks.watch(model, kept, every=1, step="forward").graph() as w, mode():
        for _ in range(2):
            model(x())
    assert w.stats.errors == 0, w.stats.messages
    graphs = [artifact for frame in kept.frames for artifact in frame.artifacts if isinstance(artifact, Graph)]
    assert [graph.name for graph in graphs] == ["evaluation"]
    assert arrows(graphs[0])["output"] == ["setitem"]
    assert arrows(graphs[0])["two"] == ["act"]


def test_fused_attention_in_evaluation_stays_as_it_is() -> None:
    layer, modes = nn.MultiheadAttention(8, 2, batch_first=True).eval(), []
    layer.register_forward_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
    model = nn.Sequential(nn.Linear(8, 8), Attends(layer)).eval()
    given = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(given)
        with tbhooks.watch(model, tbhooks.MemorySink(), every=1, step="forward", kinds="weight").graph():
            assert torch.equal(model(given), expected)
    assert modes == [0, 0]


class Attends(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


# --- What may happen ------------------------------------------------------------------------------


class Raises(nn.Module):
    problem: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu()
        if self.problem is not None:
            raise self.problem
        return self.two(x)


@pytest.mark.parametrize("problem", [ValueError("bad"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_forward_that_is_cut_short_leaves_no_mode_and_the_next_is_drawn(problem: BaseException) -> None:
    run = Run(Raises())
    run.model.problem = problem  # type: ignore[assignment]
    with pytest.raises(type(problem)):
        run.model(x())
    run.model.problem = None  # type: ignore[assignment]
    run.step(x())
    assert torch._C._len_torch_function_stack() == 0
    (graph,) = run.graphs()
    assert arrows(graph) == {
        "input/x": [], "one": ["input/x"], "relu": ["one"], "two": ["relu"], "output": ["two"],
    }  # fmt: skip


def test_after_an_interrupt_closing_takes_everything_off() -> None:
    run = Run(Raises())
    run.model.problem = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run.model(x())
    run.watch.close()
    assert torch._C._len_torch_function_stack() == 0
    assert zoo.hook_count(run.model) == 0


def test_a_model_whose_parts_are_called_is_drawn_part_by_part() -> None:
    run = Run(zoo.Gan())
    fake = run.model.generator(x(3, 4))  # type: ignore[operator]
    run.model.discriminator(fake).sum().backward()  # type: ignore[operator]
    run.optimizer.step()
    (graph,) = run.graphs()
    assert arrows(graph) == {
        "input/input": [],
        "generator/0": ["input/input"],
        "generator/1": ["generator/0"],
        "generator/2": ["generator/1"],
        "discriminator/0": ["generator/2"],
        "discriminator/1": ["discriminator/0"],
        "discriminator/2": ["discriminator/1"],
    }


def test_a_pause_leaves_nothing_and_the_next_logged_pass_is_drawn() -> None:
    run = Run(Residual())
    with run.watch.paused():
        assert zoo.hook_count(run.model) == 0
        run.step(x())
    run.step(x())
    (graph,) = run.graphs()
    assert len(graph.nodes) == 6


def test_a_step_that_the_scaler_skips_is_drawn_all_the_same() -> None:
    run = Run(Residual())
    scaler = torch.amp.GradScaler("cpu")
    for bad in (True, False):
        loss = total(run.model(x()))
        scaler.scale(loss * torch.inf if bad else loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    assert run.watch.stats.skipped == 1
    (graph,) = run.graphs()
    assert len(graph.nodes) == 6


def test_copies_and_pickles_of_the_model_take_nothing_along() -> None:
    run = Run(Residual())
    other = copy.deepcopy(run.model)
    buffer = io.BytesIO()
    torch.save(run.model, buffer)
    other(x())
    run.step(x())
    (graph,) = run.graphs()
    assert len(graph.nodes) == 6


@pytest.mark.parametrize("method", ["enter", "leave", "_add_operation"])
def test_a_graph_that_cannot_be_drawn_is_given_up_after_three_steps_and_training_goes_on(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("cannot draw")

    monkeypatch.setattr(Tracer, method, fails)
    run = Run(Residual())
    for _ in range(5):
        run.step(x())
    assert zoo.hook_count(run.model) > 0, "the watch itself goes on"
    run.watch.close()
    assert run.watch.stats.errors == 3, run.watch.stats.messages
    assert sum("given up" in message for message in run.watch.stats.messages) == 1
    assert len(run.kept.frames) == 5
    assert not [frame for frame in run.kept.frames if frame.artifacts]
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("method", ["enter", "leave", "_add_operation"])
def test_a_graph_that_could_not_be_drawn_once_is_drawn_in_the_next_logged_step(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("none left")

    run, whole = Run(Residual()), Run(Residual())
    with monkeypatch.context() as patch:
        patch.setattr(Tracer, method, fails)
        run.step(x())
    for _ in range(2):
        run.step(x())
    run.watch.close()
    whole.step(x())
    (drawn,) = [artifact for frame in run.kept.frames for artifact in frame.artifacts]
    (expected,) = whole.graphs()
    assert [frame.step for frame in run.kept.frames if frame.artifacts] == [1]
    assert [node.name for node in drawn.nodes] == [node.name for node in expected.nodes]
    assert run.watch.stats.errors == 1, run.watch.stats.messages


def test_it_can_be_asked_for_in_the_middle_of_training() -> None:
    kept = tbhooks.MemorySink()
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, kept, every=2) as w:
        for step in range(5):
            if step == 1:
                assert w.graph() is w
            model(x()).sum().backward()
            optimizer.step()
    assert [(frame.step, len(frame.artifacts)) for frame in kept.frames] == [(0, 0), (2, 1), (4, 0)]
    with pytest.raises(tbhooks.ClosedError):
        w.graph()


def test_a_scripted_part_is_left_out_and_what_it_made_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    run = Run(model)
    run.watch.summary()
    run.step(x())
    (graph,) = run.graphs()
    assert arrows(graph)["2"] == ["Addmm"]
    assert "no operation" in node(graph, "Addmm").attributes["note"]


def test_a_module_that_runs_in_another_thread_is_drawn_without_arrows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: list[Tensor] = []
            thread = threading.Thread(target=lambda: made.append(self.there(x)))
            thread.start()
            thread.join()
            return self.here(x) + made[0]

    run = Run(Model())
    run.step(x())
    (graph,) = run.graphs()
    assert arrows(graph)["add"] == ["Addmm", "here"]
    assert arrows(graph)["there"] == ["^here"]
    assert "another thread" in run.watch.stats.unseen["training graph"]


@pytest.mark.parametrize("how", ["trace", "export", "vmap", "grad", "fake"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_passes_with_stand_ins_for_tensors_are_not_drawn(how: str) -> None:
    run = Run(Residual())
    model = run.model
    ways: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(model, x(), check_trace=False),
        "export": lambda: torch.export.export(model, (x(),)),
        "vmap": lambda: torch.func.vmap(model)(x(2, 3, 4)),
        "grad": lambda: torch.func.grad(lambda given: model(given).sum())(x()),
        "fake": lambda: with_fake_tensors(copy.deepcopy(model)),
    }
    ways[how]()
    run.step(x(5, 4))
    (graph,) = run.graphs()
    assert node(graph, "input/x").shapes == ((5, 4),)
    assert arrows(graph)["add"] == ["input/x", "two"]


def with_fake_tensors(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(3, 4))


def test_a_model_of_one_layer_is_one_box() -> None:
    assert arrows(drawn(nn.Linear(4, 2), x())) == {"input/input": [], "Linear": ["input/input"], "output": ["Linear"]}


def test_a_model_that_calls_itself_is_one_pass() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            x = self.layer(x).relu()
            return self(x, depth - 1) if depth else x

    assert arrows(drawn(Recursive(), x())) == {
        "input/x": [], "layer": ["input/x"], "relu": ["layer"], "layer.call_2": ["relu"], "relu_1": ["layer.call_2"],
        "output": ["relu_1"],
    }  # fmt: skip


# --- Compiled -------------------------------------------------------------------------------------


def graphs_compiled(model: nn.Module, draw: bool) -> tuple[int, tbhooks.Watch, tbhooks.MemorySink]:
    torch.compiler.reset()
    count = itertools.count()
    seen: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        seen.append(next(count))
        return graph.forward  # type: ignore[no-any-return]

    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=2)
    if draw:
        w.graph()
    called = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        called(x()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    torch.compiler.reset()
    return len(seen), w, kept


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_of_a_compiled_model_modules_are_drawn_in_their_order() -> None:
    plain, _, _ = graphs_compiled(Nested(), draw=False)
    compiled, w, kept = graphs_compiled(Nested(), draw=True)
    assert compiled == plain
    assert w.stats.errors == 0, w.stats.messages
    assert "compiled" in w.stats.unseen["training graph"]
    (graph,) = [artifact for frame in kept.frames for artifact in frame.artifacts]
    assert isinstance(graph, Graph)
    paths = ["blocks/0/one", "blocks/0/two", "blocks/1/one", "blocks/1/two", "head/0", "head/1"]
    assert [node.name for node in graph.nodes] == paths
    assert [node.inputs for node in graph.nodes] == [(), *((f"^{path}",) for path in paths[:-1])]
    assert graph.nodes[-1].shapes == ((3, 2),)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_part_is_drawn_beside_what_is_not() -> None:
    torch.compiler.reset()
    model = Nested()
    run = Run(model)
    model.blocks[0].compile(backend="eager")
    run.step(x())
    (graph,) = run.graphs()
    names = [node.name for node in graph.nodes]
    assert {"blocks/0/one", "blocks/0/two", "blocks/1/one", "blocks/1/two", "head/0", "head/1"} <= set(names)
    assert arrows(graph)["head/1"] == ["head/0"]
    assert "compiled" in run.watch.stats.unseen["training graph"]
    check_structure(graph, set())


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_compiled_step_is_not_compiled_anew(asked: str) -> None:
    def compilations(asked: str) -> tuple[int, tbhooks.Watch, list[Any]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, kept, seen = Residual(), tbhooks.MemorySink(), []

        def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
            seen.append(graph)
            return graph.forward  # type: ignore[no-any-return]

        @torch.compile(backend=backend, fullgraph=True)
        def loss(given: Tensor) -> Tensor:
            return model(given).sum()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, kept, every=2)
        for step in range(8):
            if (asked, step) in (("before", 0), ("after", 4)):
                w.graph()
            loss(x()).backward()
            optimizer.step()
            optimizer.zero_grad()
        w.close()
        assert w.stats.errors == 0, w.stats.messages
        return len(seen), w, [artifact for frame in kept.frames for artifact in frame.artifacts]

    count, w, (graph,) = compilations(asked)
    assert count == compilations("never")[0]
    assert [node.name for node in graph.nodes] == ["one", "two"]
    assert "compiled" in w.stats.unseen["training graph"]


def test_a_watch_that_has_drawn_keeps_no_model_alive() -> None:
    run = Run(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    run.step(torch.randn(4, 3))
    model = weakref.ref(run.model)
    del run.model, run.optimizer
    gc.collect()
    assert model() is None
    run.watch.close()


def test_the_work_of_another_watch_is_not_drawn() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def names(watched_before: bool) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 3), Doubles())
        other = tbhooks.watch(model, every=1).images("*").per_channel("*").embeddings("*") if watched_before else None
        run = Run(model)
        run.step(torch.randn(4, 3))
        if other is not None:
            other.close()
        return [node.name for node in run.graphs()[0].nodes]

    assert names(watched_before=True) == names(watched_before=False)


def test_an_evaluation_that_shows_no_numbers_is_drawn_too() -> None:
    run = Run(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), kinds="functional")
    run.watch.evaluation()
    run.step(torch.randn(4, 3))
    run.model.eval()
    run.model(torch.randn(4, 3))
    assert [graph.name for graph in run.graphs()] == ["training", "evaluation"]
