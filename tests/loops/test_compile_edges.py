"""torch.compile where it meets its limits: graphs that break, models that are warm, copies, memory."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import tbhooks
from tests.support import compiling, float64_recorder, zoo
from tests.support.compiling import BLOCKS, Blocks, Graphs, Trial, breaks, compiled_case, no_compilation, reset, watched
from tests.support.loops import mlp, sgd, steps_of
from tests.support.slow import cases, slow

pytestmark = compiling.ISOLATED


# --- Without one graph ----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Dynamo leaves models with an LSTM alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.norm, self.act, self.drop = nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.lstm(x)[0])))


RECURRENT = zoo.Case("recurrent", Recurrent, lambda: (torch.randn(3, 5, 8),), lambda m, b: m(*b).square().mean())


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(zoo.ZOO["gpt2"], "eager", marks=slow("a large model; the small one breaks in the same places")),
        (RECURRENT, "aot_eager"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_model_that_is_not_one_graph_makes_no_more_than_two_of_each_breaks_no_more_and_keeps_its_bits(
    case: zoo.Case, backend: str
) -> None:
    bare_graphs, graphs = Graphs(backend), Graphs(backend)
    bare = zoo.train(compiled_case(case, bare_graphs, fullgraph=False), 3)
    unwatched_breaks = breaks()
    reset()
    trace, watching = watched(compiled_case(case, graphs, fullgraph=False), 3, every=2)
    assert trace == bare
    assert breaks().keys() == unwatched_breaks.keys()
    assert len(graphs) <= 2 * len(bare_graphs)
    expected = float64_recorder.observe(case)
    for frame, step in zip(watching.history, (expected[0], expected[2]), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@pytest.mark.parametrize("name", ["lstm"])
def test_a_model_that_dynamo_leaves_alone_shows_the_eager_numbers(name: str) -> None:
    _, watching = watched(compiled_case(zoo.ZOO[name], fullgraph=False), 3, every=1)
    for frame, step in zip(watching.history, float64_recorder.observe(zoo.ZOO[name]), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


class TwoResults(nn.Module):
    """One output is computed from the other, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.square().mean()


@pytest.mark.parametrize("used_outside", [False, True])
def test_a_gradient_that_arises_inside_the_graph_is_said_and_not_shown_in_part(used_outside: bool) -> None:
    def scenario(trial: Trial) -> None:
        trial.model = TwoResults()
        trial.watch(every=1)
        trial.optimizer = sgd(trial.model)
        called = trial.compile(trial.model, fullgraph=True)
        for _ in range(2):
            y, loss = called(torch.randn(3, 4))
            trial.step(loss + y.mean() if used_outside else loss)

    watching = Trial(scenario, compiled=True, is_watched=True).watches[0]
    assert ("(root)[0]", "gradient") not in watching.latest
    assert ("layer", "gradient") in watching.latest
    assert "stay inside" in watching.stats.unseen["gradient/(root)[0]"]


# --- Models that are warm -------------------------------------------------------------------------


KINDS = ["function", "sequential", "model", "method", "regional"]
OTHER_WAYS = "other ways to compile take the same path; test_compile.py has every way"


class Training:
    """A model that is compiled in one of several ways, when asked to."""

    def __init__(self, kind: str, model: nn.Module | None = None) -> None:
        blocks = Blocks() if model is None else model
        self.kind = kind
        self.model = nn.Sequential(blocks) if kind == "sequential" else blocks
        self.inside = "0.blocks.0.widen" if kind == "sequential" else "blocks.0.widen"
        self.optimizer = sgd(self.model)
        self.called: Any = self.model
        self.losses: list[bytes] = []

    def compile(self, graphs: Any = "aot_eager") -> None:
        model = self.model
        if self.kind in ("model", "sequential"):
            self.called = torch.compile(model, backend=graphs)
        elif self.kind == "method":
            model.compile(backend=graphs)
        elif self.kind == "function":
            self.called = torch.compile(lambda x: model(x) * 1, backend=graphs)
        else:
            for block in model.blocks:
                block.compile(backend=graphs)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.called(torch.randn(6, 8)).square().mean()
            loss.backward()
            self.losses.append(zoo.raw(loss))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def is_seen(self, frame: tbhooks.Frame) -> bool:
        weight = f"{self.inside}.weight"
        assert all((weight, kind) in frame for kind in ("weight", "weight_gradient", "update"))
        return (self.inside, "activation") in frame and (self.inside, "gradient") in frame


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "tbhooks" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", cases(KINDS, always={"function", "regional"}, reason=OTHER_WAYS))
def test_a_model_that_is_compiled_in_mid_run_and_first_called_in_an_unlogged_step_is_seen(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    training, graphs = Training(kind), Graphs()
    watching = tbhooks.watch(training.model, every=3)
    training.train(1)
    assert zoo.hook_count(training.model) <= 1  # of forwards, until an optimizer is seen to step
    training.compile(graphs)
    training.train(6)
    watching.close()
    assert steps_of(watching.history) == [0, 3, 6]
    assert all(training.is_seen(frame) for frame in watching.history)
    assert len(graphs) == 2
    assert watching.stats.errors == 0, watching.stats.messages
    assert not warnings(caplog)


def test_compiling_something_else_leaves_no_hook_on_the_watched_model() -> None:
    model = mlp()
    watching, optimizer = tbhooks.watch(model, every=100), sgd(model)
    seen = []

    @torch.compile(backend="eager")
    def loss_of(y: Tensor) -> Tensor:
        return y.square().mean()

    for _ in range(3):
        loss_of(model(torch.randn(6, 4))).backward()
        optimizer.step()
        seen.append(zoo.hook_count(model))
    assert seen[1:] == [0, 0]
    watching.close()


@pytest.mark.parametrize("kind", cases(KINDS, always={"model", "sequential"}, reason=OTHER_WAYS))
def test_a_model_that_ran_compiled_before_watch_is_compiled_anew_with_hooks(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(kind)
    training.compile()
    training.train(2)
    watching = tbhooks.watch(training.model, every=1)
    training.train(3)
    watching.close()
    seen = [training.is_seen(frame) for frame in watching.history]
    if kind == "function":  # nothing on the model shows that it is compiled, so one step is needed to find out
        assert seen == [False, True, True]
        assert len(warnings(caplog)) == 1
        assert "compiled again" in warnings(caplog)[0]
    else:
        assert seen == [True, True, True]
        assert not warnings(caplog)
    assert watching.stats.errors == 0, watching.stats.messages


@pytest.mark.parametrize("kind", cases(["model", "function"], always={"model"}, reason=OTHER_WAYS))
def test_a_warm_model_is_left_alone_where_nothing_may_be_compiled_any_more(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(kind)
    training.compile()
    training.train(2)
    with no_compilation():
        watching = tbhooks.watch(training.model, every=1)
        training.train(3)
    watching.close()
    assert not any(training.is_seen(frame) for frame in watching.history)
    assert len(warnings(caplog)) == 1
    assert "torch.compiler.reset()" in warnings(caplog)[0]


def test_an_unwatched_model_of_the_same_class_that_is_compiled_too_does_not_hide_the_watched_one() -> None:
    graphs, other = Graphs(), Training("model")
    other.compile(graphs)
    other.train(2)
    training = Training("model")
    watching = tbhooks.watch(training.model, every=2)
    training.compile(graphs)
    for _ in range(3):
        training.train(1)
        other.train(1)
    with no_compilation():
        for _ in range(3):
            training.train(1)
            other.train(1)
    watching.close()
    assert steps_of(watching.history) == [0, 2, 4]
    assert all(training.is_seen(frame) for frame in watching.history)
    assert watching.stats.errors == 0, watching.stats.messages


def test_a_pause_in_which_the_model_is_compiled_does_not_hide_it() -> None:
    training = Training("model")
    training.compile()
    watching = tbhooks.watch(training.model, every=1)
    with watching.paused():
        training.called(torch.randn(6, 8))
    training.train(1)
    watching.close()
    assert training.is_seen(watching.latest)


class Growing(nn.Module):
    """Compiled once for every number it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, times: int) -> Tensor:
        return self.layer(x) * times


def test_graphs_of_the_watch_do_not_use_up_the_limit_on_recompilations() -> None:
    model = Growing()
    called = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    watching, optimizer = tbhooks.watch(model, every=2), sgd(model)
    for times in (1.5, 2.5, 3.5, 4.5, 5.5, 6.5):  # a float is a constant of the graph
        for _ in range(2):
            called(torch.randn(3, 4), times).mean().backward()
            optimizer.step()
    watching.close()
    assert len(watching.history) == 6
    assert all(("layer", "activation") in frame for frame in watching.history)


# --- Inductor's modes, compiled autograd ----------------------------------------------------------


@slow(
    "half a minute of compiling; on a CPU the mode differs from the default in options of the compiler only",
    covered_by="test_inductor_trains_bit_for_bit_as_unwatched_and_shows_the_numbers_of_what_it_computes",
)
def test_reduce_overhead_trains_as_unwatched_and_sees_everything() -> None:
    case = compiled_case(zoo.ZOO["mlp"], "inductor", mode="reduce-overhead")
    bare = zoo.train(case, 3)
    reset()
    trace, watching = watched(case, 3, every=2)
    assert trace == bare
    assert watching.stats.errors == 0, watching.stats.messages
    assert {(site.name, site.kind) for site in watching.latest.sites} == set(
        float64_recorder.observe(zoo.ZOO["mlp"])[0]
    )


@functools.cache
def train_with_compiled_autograd(is_watched: bool) -> tuple[Any, Any]:
    reset()
    torch.manual_seed(0)
    model = Blocks()
    optimizer, watching = sgd(model), tbhooks.watch(model, every=2) if is_watched else None

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        called = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            losses.append(zoo.raw(called(torch.randn(4, 8))))
            optimizer.step()
            optimizer.zero_grad()
    assert counters["compiled_autograd"]["captures"] > 0
    if watching:
        watching.close()
    return (losses, [zoo.raw(p) for p in model.parameters()], zoo.raw(torch.get_rng_state())), watching


def test_compiled_autograd_keeps_its_bits_and_shows_all_but_gradients_of_activations() -> None:
    bare, _ = train_with_compiled_autograd(is_watched=False)
    left, watching = train_with_compiled_autograd(is_watched=True)
    assert left == bare
    assert watching.stats.errors == 0, watching.stats.messages
    should = {key for key in float64_recorder.observe(BLOCKS)[0] if key[1] != "gradient"}
    assert should <= {(site.name, site.kind) for site in watching.latest.sites}


def test_gradients_that_compiled_autograd_does_not_show_are_reported() -> None:
    _, watching = train_with_compiled_autograd(is_watched=True)
    seen = {(site.name, site.kind) for site in watching.latest.sites}
    missing = {f"{kind}/{name}" for name, kind in set(float64_recorder.observe(BLOCKS)[0]) - seen}
    assert missing <= set(watching.stats.unseen) or any("autograd" in message for message in watching.stats.messages)


# --- Copies, closing ------------------------------------------------------------------------------


def test_unwatching_leaves_a_compiled_model_that_trains_on_as_if_never_watched() -> None:
    def scenario(trial: Trial) -> None:
        called = trial.compile(trial.model, fullgraph=True)
        watching = trial.watch(every=2)
        for number in range(6):
            if number == 3:
                watching.close()
                assert zoo.hook_count(trial.model) == 0
            trial.step(trial.forward(called))

    bare, trial = Trial(scenario, compiled=True, is_watched=False), Trial(scenario, compiled=True, is_watched=True)
    assert trial.left == bare.left
    assert steps_of(trial.watches[0].history) == [0, 2]
    assert trial.graphs.traced[-1] == bare.graphs.traced[0]


def test_a_copy_of_a_watched_compiled_model_trains_the_same_and_logs_nothing() -> None:
    model = mlp()
    graphs = Graphs()
    called = torch.compile(model, backend=graphs)
    watching = tbhooks.watch(model, every=1)
    optimizer = sgd(model)
    called(torch.randn(6, 4)).mean().backward()
    copied = copy.deepcopy(called)
    assert copy.deepcopy(model)(torch.ones(1, 4)).item() == called(torch.ones(1, 4)).item()
    fired = watching.stats.hooks_fired
    for _ in range(2):
        copied(torch.randn(6, 4)).mean().backward()
    assert watching.stats.hooks_fired == fired
    optimizer.step()
    assert watching.latest["0", "activation"].count == 8 * 6  # the pass without a backward is left out
    assert watching.stats.errors == 0


def test_a_watched_compiled_model_is_saved_and_loads_without_the_watch() -> None:
    model = mlp()
    called = torch.compile(model, backend="aot_eager")
    watching = tbhooks.watch(model, every=1)
    optimizer = sgd(model)
    called(torch.randn(6, 4)).mean().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 4)
    fired = watching.stats.hooks_fired
    assert torch.equal(torch.compile(loaded, backend="aot_eager")(x), loaded(x))
    assert watching.stats.hooks_fired == fired
    optimizer.step()
    assert watching.latest["0", "activation"].count == 8 * 6


# --- Memory ---------------------------------------------------------------------------------------


def test_nothing_grows_over_two_hundred_compiled_steps() -> None:
    model = mlp()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = sgd(model)
    sizes: list[int] = []
    with tbhooks.watch(model, every=2) as watching:

        def train(steps: int) -> None:
            for _ in range(steps):
                called(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            watching.flush()
            gc.collect()
            ours = [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith(("torch", "tbhooks"))]
            sizes.append(sum(type(thing).__name__ not in ("Frame", "Finding") for thing in ours))

        train(20)
        with no_compilation():
            train(100)
            train(100)
    # A buffer more is made once, when the background thread is late; a leak would show twice.
    assert min(after - before for before, after in itertools.pairwise(sizes)) < 10, sizes


def test_no_tensor_outlives_its_logged_compiled_step() -> None:
    model = mlp()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=1)
    outside: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for _ in range(6):
        x = torch.randn(6, 4, requires_grad=True)
        y = called(x)
        y.square().mean().backward()
        outside += [weakref.ref(x), weakref.ref(y), weakref.ref(x.grad)]
        optimizer.step()
        optimizer.zero_grad()
        del x, y
        assert [reference() for reference in outside] == [None] * len(outside)
        watching.flush()
        alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    # Those of a further buffer are made once; what a step leaves behind would show every time.
    assert min(after - before for before, after in itertools.pairwise(alive)) <= 0, alive
    assert watching.latest["0", "gradient"].count == 8 * 6


def test_a_model_and_its_watch_are_collected_once_both_are_let_go() -> None:
    model = mlp()
    called = torch.compile(model, backend="aot_eager")
    watching = tbhooks.watch(model, every=2)
    optimizer = sgd(model)
    for _ in range(3):
        called(torch.randn(6, 4)).mean().backward()
        optimizer.step()
    watching.close()
    alive = weakref.ref(model), weakref.ref(watching._session.observer)
    del model, called, watching, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_graphs_with_hooks_do_not_count_against_the_limit_of_recompiles_after_close() -> None:
    model = mlp()
    called = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    optimizer = sgd(model)
    watching = tbhooks.watch(model, every=2)
    for size in range(2, 7):
        for _ in range(2):
            called(torch.randn(size, 4)).mean().backward()
            optimizer.step()
    watching.close()
    for size in (2, 9):
        called(torch.randn(size, 4)).mean().backward()


def test_a_model_with_a_scripted_part_is_watched_although_something_was_compiled_before() -> None:
    torch.compile(mlp(), backend="eager")(torch.randn(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
    assert ("0", "activation") in watching.latest
