"""`tbhooks.tap`: a tensor inside a forward is watched like a module's output, in every kind of loop."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.data.process import taps
from tests.support import compiling, fake_device, reference, tapped
from tests.support.compiling import Graphs, breaks, reset
from tests.support.slow import slow
from tests.support.tapped import EVERY, STEPS, Tapped

pytestmark = compiling.ISOLATED
STATS = ("count", "mean", "std", "norm", "min", "max", "zero_fraction")


def watched(model: Tapped, **options: Any) -> tuple[tbhooks.Watch, list[Tensor]]:
    w = tbhooks.watch(model, every=EVERY)
    result = tapped.train(model, **options)
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    assert not w.stats.unseen
    return w, result


def compare(w: tbhooks.Watch, steps: list[tapped.Step], tolerance: float = 1e-5) -> None:
    assert [frame.step for frame in w.history] == list(range(0, STEPS, EVERY))
    for frame in w.history:
        expected = steps[frame.step]
        assert {(site.name, site.kind) for site in frame.sites if ":" in site.path} == set(expected)
        for (name, kind), array in expected.items():
            numbers, reading = reference.stats(array), frame[name, kind]
            for stat in STATS:
                # The gradient of a softmax has a mean of zero: what is left is rounding, relative to the elements.
                atol = tolerance * numbers["rms"] if stat == "mean" else 1e-9
                close = np.isclose(getattr(reading, stat), numbers[stat], rtol=tolerance, atol=atol)
                assert close, f"{kind} of {name}: {stat} is {getattr(reading, stat)}, should be {numbers[stat]}"


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "mixed precision": {"amp": True},
    "reentrant checkpoints": {"how": {"use_reentrant": True}},
    "checkpoints": {"how": {"use_reentrant": False}},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_numbers_are_those_of_float64_and_training_is_the_same(loop: str) -> None:
    options = dict(LOOPS[loop])
    how = options.pop("how", None)
    steps, result = tapped.reference(how, **options)
    w, own = watched(Tapped(how=how), **options)
    compare(w, steps)
    assert same(own, result)


@pytest.mark.parametrize(
    "way",
    [
        "whole",
        "blocks",
        pytest.param("function", marks=slow("test_compile.py compiles functions around a model")),
        pytest.param("inductor", marks=slow("compiles with inductor; aot_eager is fast")),
    ],
)
def test_compiled_taps_are_part_of_one_graph_for_logged_steps_and_one_for_the_others(way: str) -> None:
    reset()
    steps, _ = tapped.reference()
    model, graphs = Tapped(), Graphs("inductor" if way == "inductor" else "aot_eager")
    called: Callable[[Tensor], Tensor] = model
    if way == "blocks":
        for block in model.blocks:
            block.compile(backend=graphs, fullgraph=True)
    elif way == "function":
        called = torch.compile(lambda x: model(x) * 1, backend=graphs, fullgraph=True)
    else:
        called = torch.compile(model, backend=graphs, fullgraph=True)
    w, _ = watched(model, called=called)
    compare(w, steps)
    assert len(graphs) == 2
    assert not breaks()


def test_a_compiled_model_trains_the_same_with_and_without_a_watch_and_unlogged_graphs_have_nothing_of_ours() -> None:
    reset()
    bare = Tapped()
    graphs = Graphs()
    result = tapped.train(bare, called=torch.compile(bare, backend=graphs, fullgraph=True))
    reset()
    model, own = Tapped(), Graphs()
    _, got = watched(model, called=torch.compile(model, backend=own, fullgraph=True))
    assert same(got, result)
    assert graphs.traced[0] in own.traced, "the graph of an unlogged step is that of an unwatched model"


def test_compiled_checkpoints() -> None:
    reset()
    steps, _ = tapped.reference({"use_reentrant": False})
    model = Tapped(how={"use_reentrant": False})
    w = tbhooks.watch(model, every=EVERY)
    tapped.train(model, called=torch.compile(model, backend="aot_eager"))
    w.close()
    assert w.stats.errors == 0, w.stats.messages
    compare(w, steps)


def nodes(output: Tensor) -> int:
    found, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [below for below, _ in node.next_functions]
    return len(found)


def test_the_autograd_graph_has_as_many_nodes_as_without() -> None:
    plain = nodes(Tapped(lambda _, tensor: tensor)(tapped.batch(0)))
    model = Tapped()
    assert nodes(model(tapped.batch(0))) == plain
    with tbhooks.watch(model, every=1):
        assert nodes(model(tapped.batch(0))) == plain


def test_a_tap_returns_the_very_object_and_needs_no_watch() -> None:
    tensor = torch.ones(3)
    assert taps.read is None
    assert tbhooks.tap("x", tensor) is tensor
    model = Tapped()
    with tbhooks.watch(model, every=1):
        assert tbhooks.tap("outside of any forward", tensor) is tensor
    assert taps.read is None, "nothing is left after the last watch"


def test_taps_of_models_that_are_not_watched_are_not_read() -> None:
    model, other = Tapped(), Tapped()
    with tbhooks.watch(model, every=1) as w:
        other(tapped.batch(0)).sum().backward()
        model(tapped.batch(0)).sum().backward()
        w.step()
    assert w.latest is not None
    assert w.latest["blocks.0:scores", "activation"].count == 2 * 3 * 4 * 4


def test_a_tap_belongs_to_the_module_whose_forward_runs_not_to_one_whose_method_is_called() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.helper(x)

        def helper(self, x: Tensor) -> Tensor:
            return tbhooks.tap("h", x * 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = Inner(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.fc(x)) + self.inner.helper(x)

    model = Outer()
    with tbhooks.watch(model, every=1) as w:
        model(torch.ones(2, 4)).sum().backward()
        w.step()
    assert w.latest is not None
    assert w.latest["inner:h", "activation"].count == w.latest["(root):h", "activation"].count == 8


def test_a_method_under_a_reentrant_checkpoint_has_its_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def inside(self, x: Tensor) -> Tensor:
            return tbhooks.tap("h", self.fc(x) * 2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=True)

    model = Model()
    with tbhooks.watch(model, every=1) as w:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        w.step()
    assert w.latest is not None
    assert w.latest["(root):h", "activation"].count == 8
    assert w.latest["(root):h", "gradient"].mean == 1.0


def test_several_tensors_have_an_index_and_include_applies_to_the_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Tapped()

        def forward(self, x: Tensor) -> Tensor:
            tbhooks.tap("pair", (x * 2, {"k": x * 3}))
            return self.a(x).sum() + self.b(tapped.batch(0)).sum()

    model = Model()
    with tbhooks.watch(model, every=1, exclude="b.blocks.0") as w:
        model(torch.ones(2, 4)).backward()
        w.step()
    assert w.latest is not None
    names = {site.name for site in w.latest.sites if ":" in site.path}
    assert names == {"(root):pair[0]", "(root):pair[1][k]", "b.blocks.1:scores", "b:residual"}


def test_evaluation_passes_have_taps_too() -> None:
    model = Tapped()
    kept = tbhooks.MemorySink()
    w = tbhooks.watch(model, kept, every=1).evaluation()
    model(tapped.batch(0)).sum().backward()
    w.step()
    model.eval()
    with torch.no_grad():
        model(tapped.batch(1))
    model.train()
    model(tapped.batch(2)).sum().backward()
    w.close()
    evaluation = next(frame for frame in kept.frames if frame.is_evaluation)
    assert evaluation["blocks.0:scores", "eval.activation"].count == 96


def test_peek_sees_taps() -> None:
    found = tbhooks.peek(Tapped(), tapped.batch(0))
    assert found["blocks.1:scores", "activation"].count == 96
    assert taps.read is None


def test_what_is_no_tensor_is_reported_and_not_raised() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert tbhooks.tap("text", "no tensor") == "no tensor"
            return self.fc(x)

    model = Model()
    with tbhooks.watch(model, every=1) as w:
        model(torch.ones(2, 4)).sum().backward()
        w.step()
    assert "contains no tensor" in w.stats.unseen["(root):text"]


def test_copies_and_waits_of_a_device_are_those_without_taps() -> None:
    def run(tap: Callable[..., Tensor]) -> tuple[int, int]:
        model = fake_device.to_device(Tapped(tap))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = tbhooks.watch(model, every=1)
        with fake_device.Log() as log:
            for step in range(3):
                model(fake_device.put(tapped.batch(step))).sum().backward()
                optimizer.step()
        w.close()
        return len(log.copies), log.syncs

    assert run(tbhooks.tap) == run(lambda _, tensor: tensor) == (3, 0)


def test_copies_and_pickles_of_a_watched_model_have_nothing_of_a_tap() -> None:
    model = Tapped()
    with tbhooks.watch(model, every=1) as w:
        model(tapped.batch(0)).sum().backward()
        other = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        other(tapped.batch(0)).sum().backward()
        again(tapped.batch(0)).sum().backward()
        w.step()
    assert w.latest is not None
    assert w.latest["blocks.0:scores", "activation"].count == 96


def test_importing_tap_loads_no_torch() -> None:
    program = "import sys; from tbhooks import tap; assert tap('x', 3) == 3; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "False\n"
