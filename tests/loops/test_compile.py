"""torch.compile: as many graphs as without a watch and one more, the same bits, and the numbers of the eager model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import tbhooks
from tests.support import compiling, float64_recorder, reference, zoo
from tests.support.compiling import Blocks, Graphs, breaks, compiled_case, no_compilation, reset, watched
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import steps_of
from tests.support.slow import cases, slow

pytestmark = compiling.ISOLATED


# --- Ways to compile ------------------------------------------------------------------------------

Step = Callable[[Tensor], Tensor]


class Way:
    """One way to compile a model or what is around it. Graphs are those of an unwatched run."""

    def __init__(self, how: Callable[..., Any], graphs: int = 1, toggled: int = 2, fullgraph: bool = True) -> None:
        self.compile, self.graphs, self.toggled, self.fullgraph = how, graphs, toggled, fullgraph


def whole(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    return uncompiled_step(torch.compile(model, **options), optimizer)


def method(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    model.compile(**options)
    return uncompiled_step(model, optimizer)


def function(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    return uncompiled_step(torch.compile(lambda x: model(x) * 1, **options), optimizer)


def regional(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    for block in model.blocks:
        block.compile(**options)
    return uncompiled_step(model, optimizer)


def wrapped_submodule(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    model.blocks[1] = torch.compile(model.blocks[1], **options)
    return uncompiled_step(model, optimizer)


def train_step(model: Blocks, optimizer: Optimizer, options: dict[str, Any]) -> Step:
    return torch.compile(uncompiled_step(model, optimizer), **options)


def uncompiled_step(model: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


WAYS = {
    "torch.compile(model)": Way(whole),
    "model.compile()": Way(method),
    "torch.compile(function)": Way(function),
    "regional": Way(regional),
    "compiled submodule": Way(wrapped_submodule),
    # The optimizer's step is a graph of its own, which no watch doubles.
    "torch.compile(train_step)": Way(train_step, graphs=2, toggled=3, fullgraph=False),
}


class Run:
    """Trains `Blocks`, compiled one way, watched from before or after it was compiled, or not at all."""

    def __init__(self, way: Way, every: int | None, when: str = "before", backend: str = "aot_eager") -> None:
        reset()
        torch.manual_seed(0)
        self.model = model = Blocks()
        self.graphs = Graphs(backend)
        self.watch: tbhooks.Watch | None = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if every and when == "before":
            self.watch = tbhooks.watch(model, every=every)
        self.step = way.compile(model, optimizer, {"backend": self.graphs, "fullgraph": way.fullgraph})
        if every and when == "after":
            self.watch = tbhooks.watch(model, every=every)
        self.losses: list[bytes] = []

    def train(self, steps: int) -> Run:
        self.losses += [zoo.raw(self.step(torch.randn(4, 8))) for _ in range(steps)]
        return self

    @property
    def left(self) -> Any:
        states = [zoo.raw(value) for value in self.model.state_dict().values()]
        return self.losses, states, zoo.raw(torch.get_rng_state())


@cache
def unwatched(name: str) -> tuple[Run, Any, dict[str, int]]:
    run = Run(WAYS[name], every=None).train(4)
    return run, run.left, breaks()


@cache
def eager_steps() -> list[float64_recorder.Step]:
    eager = Run(Way(lambda model, optimizer, _: uncompiled_step(model, optimizer)), every=None)
    recording = Float64Recorder(eager.model)
    eager.train(4)
    recording.close()
    return recording.steps


COMPILES = slow("other pairs of a way to compile and a schedule; every way is in make test once")
OTHER_PAIRS = [
    pytest.param(name, when, marks=COMPILES)
    for name, when in [
        ("model.compile()", "after"),
        ("torch.compile(function)", "before"),
        ("torch.compile(function)", "after"),
        ("regional", "before"),
        ("compiled submodule", "before"),
        ("compiled submodule", "after"),
        ("torch.compile(train_step)", "after"),
    ]
]
OTHER_SCHEDULES = [
    ("torch.compile(model)", 2),
    ("model.compile()", 2),
    ("regional", 2),
    ("compiled submodule", 2),
    ("torch.compile(train_step)", 2),
    ("regional", 50),
]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("torch.compile(model)", "before"),
        ("model.compile()", "before"),
        ("regional", "after"),
        pytest.param("torch.compile(model)", "after", marks=COMPILES),
        ("torch.compile(train_step)", "before"),
        *OTHER_PAIRS,
    ],
)
def test_logging_every_step_is_one_graph_and_no_break_with_the_same_bits_and_the_eager_numbers(
    name: str, when: str
) -> None:
    bare, left, bare_breaks = unwatched(name)
    run = Run(WAYS[name], every=1, when=when).train(4)
    assert run.left == left
    assert len(run.graphs) == len(bare.graphs) == WAYS[name].graphs
    # In a compiled train step the optimizer's hooks break a graph where torch itself breaks it otherwise.
    assert sum(breaks().values()) <= sum(bare_breaks.values())
    assert run.watch.stats.errors == 0, run.watch.stats.messages
    assert steps_of(run.watch.history) == [0, 1, 2, 3]
    for frame, step in zip(run.watch.history, eager_steps(), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("torch.compile(function)", 2),
        ("regional", 3),
        ("compiled submodule", 7),
        *(pytest.param(*pair, marks=COMPILES) for pair in OTHER_SCHEDULES),
    ],
)
def test_toggling_is_two_graphs_over_fifty_steps_and_the_unlogged_one_is_node_for_node_the_unwatched_one(
    name: str, every: int
) -> None:
    bare, _, _ = unwatched(name)
    run = Run(WAYS[name], every).train(3)
    assert len(run.graphs) == WAYS[name].toggled
    with no_compilation():
        run.train(49)
    assert steps_of(run.watch.history) == list(range(0, 52, every))
    for frame in run.watch.history:  # a step long after both were compiled is as full as the first
        assert frame.sites == run.watch.history[0].sites
    logged = [graph for graph in run.graphs.traced if is_read(graph)]
    unlogged = [graph for graph in run.graphs.traced if not is_read(graph)]
    assert len(logged) == 1
    assert sorted(unlogged) == sorted(bare.graphs.traced)
    assert sorted(graph for graph in run.graphs.lowered if not is_read(graph)) == sorted(bare.graphs.lowered)
    assert len(run.graphs.lowered) == len(bare.graphs.lowered) + 2  # forward and backward


def is_read(graph: list[tuple[str, str]]) -> bool:
    return any("tbhooks" in target or "observe" in target or "with_effects" in target for _, target in graph)


# --- The zoo --------------------------------------------------------------------------------------

# Unwatched they fail, or break into several graphs.
NOT_IN_ONE_GRAPH = {"lstm", "gpt2", "gpt2_checkpointed", "mixtral"}
# Compiled for minutes and nothing in them that smaller ones do not have.
TOO_SLOW = {"t5", "mamba", "vit", "resnet", "bert", "albert", "llama"}
# Autograd of the compiled graph adds the gradients of one parameter in another order.
OTHER_SUMS = {"gru_loop"}
# Several outputs of one graph: what one passes on to another is not seen outside, so their gradients are not shown.
HIDDEN_INSIDE = {"gan": {(f"(root)[{i}]", "gradient") for i in range(3)}}
# Their unlogged graphs are looked at too; the others log every step.
TOGGLED = {"cnn", "flatten_inplace", "two_names", "sparse_embedding", "no_grad_branch", "checkpointed", "autocast"}
COMPILED_ZOO = [name for name in zoo.ZOO if name not in NOT_IN_ONE_GRAPH | TOO_SLOW]


@pytest.mark.parametrize(
    "name",
    cases(
        COMPILED_ZOO,
        always={
            "cnn", "inplace_relu", "shared_module", "multihead", "dict_output", "returns_parameter", "sparse_embedding",
            "no_grad_branch", "int_and_bool_outputs", "checkpointed", "autocast",
        },
        reason="every model is compiled twice; the others are traced in the same way",
    ),
)  # fmt: skip
def test_the_zoo_compiled_trains_bit_for_bit_as_unwatched_and_shows_the_numbers_of_the_eager_models(name: str) -> None:
    case, every = zoo.ZOO[name], 2 if name in TOGGLED else 1
    bare_graphs, graphs = Graphs(), Graphs()
    bare = zoo.train(compiled_case(case, bare_graphs), 3)
    reset()
    trace, watching = watched(compiled_case(case, graphs), 3, every=every)
    assert trace == bare
    assert not breaks()
    assert watching.stats.errors == 0, watching.stats.messages
    assert len(graphs) == len(bare_graphs) + (name in TOGGLED)
    if name in TOGGLED:
        assert [graph for graph in graphs.lowered if not is_read(graph)] == bare_graphs.lowered
    expected = float64_recorder.observe(case)[::every]
    assert steps_of(watching.history) == list(range(0, 3, every))
    for frame, whole in zip(watching.history, expected, strict=True):
        step = {key: array for key, array in whole.items() if key not in HIDDEN_INSIDE.get(name, ())}
        if name in OTHER_SUMS:
            assert_near(frame, step)
        else:
            float64_recorder.assert_frame_equals(frame, step)


def assert_near(
    frame: tbhooks.Frame,
    step: float64_recorder.Step,
    seen_besides: set[tuple[str, str]] | frozenset[Any] = frozenset(),
    tolerance: float = 1e-4,
) -> None:
    """What `float64_recorder.assert_frame_equals` asserts, of a model that computes the same but not the same bits."""
    assert {(site.name, site.kind) for site in frame.sites} == set(step) | seen_besides
    for (name, kind), array in step.items():
        reading, expected = frame[name, kind], reference.stats(array)
        for stat in float64_recorder.STATS:
            value, should = getattr(reading, stat), expected[stat]
            slack = 0.0 if stat.endswith("count") else 2.0 / array.size if stat == "zero_fraction" else tolerance
            scale = 1.0 if stat.endswith(("count", "fraction")) else expected["abs_max"] * array.size**0.5
            ok = np.isclose(value, should, rtol=slack, atol=slack * scale, equal_nan=True)
            assert ok, f"{kind} of {name}: {stat} is {value}, should be {should}"
        assert reading.counts.sum() == np.isfinite(array).sum()
        moved = np.abs(reading.counts - reference.bucket_counts(array)).sum()
        assert moved <= 2 + 0.02 * array.size or kind == "update"


# --- Inductor -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    cases(
        ["mlp", "cnn", "checkpointed", "inplace_relu", "chunk_unused", "dict_output"],
        always={"mlp"},
        reason="inductor takes ten seconds and more to compile a model; aot_eager above has the zoo",
    ),
)
def test_inductor_trains_bit_for_bit_as_unwatched_and_shows_the_numbers_of_what_it_computes(name: str) -> None:
    case = zoo.ZOO[name]
    bare = zoo.train(compiled_case(case, "inductor"), 3)
    reset()
    trace, watching = watched(compiled_case(case, "inductor"), 3, every=2)
    assert trace == bare
    assert watching.stats.errors == 0, watching.stats.messages
    assert steps_of(watching.history) == [0, 2]
    if name not in ("cnn", "checkpointed"):  # inductor draws other random numbers than eager mode does
        expected = float64_recorder.observe(case)
        for frame, step in zip(watching.history, (expected[0], expected[2]), strict=True):
            assert_near(frame, step)


@slow("inductor", covered_by="test_inductor_trains_bit_for_bit_as_unwatched_and_shows_the_numbers_of_what_it_computes")
@pytest.mark.parametrize("name", ["autocast", "bfloat16"])
def test_inductor_in_half_precision_trains_bit_for_bit_as_unwatched_if_it_rounds_like_eager_mode(
    name: str,
) -> None:
    with torch._inductor.config.patch(emulate_precision_casts=True):
        bare = zoo.train(compiled_case(zoo.ZOO[name], "inductor"), 3)
        reset()
        trace, watching = watched(compiled_case(zoo.ZOO[name], "inductor"), 3, every=2)
    assert trace == bare
    assert watching.stats.errors == 0, watching.stats.messages
    assert {site.kind for site in watching.latest.sites} == set(tbhooks.data.frame.KINDS)
