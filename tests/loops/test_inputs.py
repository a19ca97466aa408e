"""What modules are given, as they are given it: the right numbers under the right names, and nothing changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.capture.tensor_tree import inputs
from tbhooks.data.frame import ALL_KINDS, KINDS, ROOT, Frame, Site
from tests.support import float64_recorder, frames, reference, zoo
from tests.support.float64_recorder import Float64Recorder
from tests.support.loops import forward, mlp, sgd, steps_of
from tests.support.loops import train as train_mlp
from tests.support.slow import cases

WITH_INPUTS = (*KINDS, "input")


class InputRecorder(Float64Recorder):
    """Keeps copies of what modules are given as well, made before they can overwrite it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._given(path or ROOT), with_kwargs=True)

    def _given(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                for index, tensor in inputs(args, kwargs):
                    if tensor.is_floating_point() or tensor.is_complex():
                        self._keep((path + index, "input"), tensor)

        return hook


def observe(case: zoo.Case, steps: int = 2) -> list[float64_recorder.Step]:
    seen: list[InputRecorder] = []
    zoo.train(case, steps, before=lambda model: seen.append(InputRecorder(model)))
    seen[0].close()
    return seen[0].steps


def watched(case: zoo.Case, steps: int = 2, **options: Any) -> tuple[zoo.Trace, tbhooks.Watch]:
    held: list[Any] = []

    def before(model: nn.Module) -> Any:
        held.extend(
            (zoo.hook_count(model), tbhooks.watch(model, **{"every": 1, "kinds": WITH_INPUTS, **options}), model)
        )
        return held

    trace = zoo.train(case, steps, before=before)
    bare, watching, model = held
    watching.close()
    assert (watching.stats.errors, watching.stats.dropped) == (0, 0), watching.stats.messages
    assert zoo.hook_count(model) == bare
    return trace, watching


def assert_right_and_unchanged(case: zoo.Case) -> tbhooks.Watch:
    trace, watching = watched(case)
    assert trace == zoo.train(case, 2)
    for frame, step in zip(watching.history, observe(case), strict=True):
        float64_recorder.assert_frame_equals(frame, step)
    return watching


# -- numbers ----------------------------------------------------------------------------------------

BRIEF = ("mlp", "inplace_relu", "kwargs_only", "complex_output", "checkpointed", "bfloat16", "autocast", "gpt2")


@pytest.mark.parametrize(
    "name",
    cases(
        list(zoo.ZOO),
        always=zoo.FEW | {"base_overwritten", "int_and_bool_outputs", "bfloat16"},
        reason="test_zoo.py has every model; inputs are read in the same way in each",
    ),
)
def test_every_number_of_the_zoo_equals_float64_and_training_is_bit_identical(name: str) -> None:
    assert_right_and_unchanged(zoo.ZOO[name])


@pytest.mark.parametrize(
    "name",
    cases(
        BRIEF,
        always={"mlp", "inplace_relu", "complex_output", "bfloat16"},
        reason="test_torch_rows.py has every type without the C kernel",
    ),
)
def test_without_the_c_kernel_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tbhooks.reduction.cpu, "library", None)
    assert_right_and_unchanged(zoo.ZOO[name])


class Overwrites(nn.Module):
    """Changes what it was given before it does anything else."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "functional dropout": lambda: Overwrites(lambda x: F.dropout(x, 0.5, inplace=True)),
    "arithmetic": lambda: Overwrites(lambda x: x.mul_(3).add_(1)),
    "a view of it": lambda: Overwrites(lambda x: (x[:, :3].zero_(), x)[1]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_a_module_overwrites_is_read_before(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), IN_PLACE[name](), nn.Linear(8, 4))

    watching = assert_right_and_unchanged(replace(zoo.ZOO["mlp"], build=build))
    frame = watching.latest
    assert repr(frame["1", "input"]).partition(":")[2] == repr(frame["0", "activation"]).partition(":")[2]
    assert frame["1", "input"].mean != frame["2", "input"].mean


def test_micro_batches_and_calls_of_a_shared_module_are_one_site() -> None:
    def run(begin: Callable[[nn.Module], Any]) -> tuple[list[bytes], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), shared := nn.Linear(8, 8), nn.ReLU(), shared, nn.Linear(8, 1))
        looking = begin(model)
        train_mlp(model, 3, accumulate=2)
        looking.close()
        return [zoo.raw(parameter) for parameter in model.parameters()], looking

    bits, watching = run(lambda model: tbhooks.watch(model, every=1, kinds=WITH_INPUTS))
    same_bits, kept = run(InputRecorder)
    assert bits == same_bits
    for frame, step in zip(watching.history, kept.steps, strict=True):
        float64_recorder.assert_frame_equals(frame, step)
        assert frame["1", "input"].count == 2 * 2 * 16 * 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_gives_again_in_backward_is_not_counted_again(reentrant: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.use, self.first = use, nn.Linear(8, 8)
            self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.use else self.block(x)

    cases = [replace(zoo.ZOO["mlp"], build=lambda use=use: Blocks(use)) for use in (True, False)]
    (with_it, _), (without, _) = ((list(watched(case, kinds="input")[1].history), case) for case in cases)
    for frame, other in zip(with_it, without, strict=True):
        assert frame.sites == other.sites
        assert (frame.values == other.values).all()
        assert (frame.buckets == other.buckets).all()


@pytest.mark.parametrize(
    "name",
    cases(
        ["inplace_relu", "kwargs_only", "shared_module"],
        always={"inplace_relu"},
        reason="compiling takes seconds, and hooks on inputs are compiled in the same way",
    ),
)
def test_inputs_of_a_compiled_model_are_those_of_the_plain_one(name: str) -> None:
    def build(compiled: bool) -> nn.Module:
        torch.compiler.reset()
        model = zoo.ZOO[name].build()
        if compiled:
            model.compile(backend="aot_eager")
        return model

    case = replace(zoo.ZOO[name], build=lambda: build(True))
    trace, watching = watched(case, steps=3, every=2)
    assert trace == zoo.train(case, 3)
    assert steps_of(watching.history) == [0, 2]
    expected = observe(replace(case, build=lambda: build(False)), 3)
    for frame in watching.history:
        float64_recorder.assert_frame_equals(frame, expected[frame.step])


# -- names ------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """Takes anything."""

    def forward(self, *args: Any, **kwargs: Any) -> int:
        return 1


class Gives(nn.Module):
    """Calls its child with anything."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.child, self.head = Takes(), nn.Linear(2, 1)
        self.args, self.kwargs = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        self.child(*self.args, **self.kwargs)
        return self.head(x)


A, B = torch.linspace(-1, 3, 6), torch.tensor([[0.5, 0.0], [float("nan"), -2.0]])
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]] = {
    "one": ((A,), {}, {"child": A}),
    "two": ((A, B), {}, {"child[0]": A, "child[1]": B}),
    "one by name": ((), {"x": A}, {"child": A}),
    "position and name": ((A,), {"mask": B}, {"child[0]": A, "child[mask]": B}),
    "none and numbers": ((None, A, 3, 0.5, "text", True), {"mask": None, "n": 2}, {"child": A}),
    "their places count": ((None, A, 3, B), {}, {"child[1]": A, "child[3]": B}),
    "list": (([A, B],), {}, {"child[0][0]": A, "child[0][1]": B}),
    "dict": (({"k": A, "l": (1, B)},), {}, {"child[0][k]": A, "child[0][l][1]": B}),
    "dataclass": ((), {"both": zoo.Halves(A, B)}, {"child[both][left]": A, "child[both][right]": B}),
    "deep by name": ((A,), {"cache": [(B, None)]}, {"child[0]": A, "child[cache][0][0]": B}),
    "the same twice": ((A, A), {}, {"child[0]": A, "child[1]": A}),
    "nothing": ((3, None), {"n": [1, 2]}, {}),
    "empty": ((A, torch.zeros(0)), {}, {"child[0]": A, "child[1]": torch.zeros(0)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_named_by_position_and_keyword(name: str) -> None:
    args, kwargs, expected = CALLS[name]
    model = Gives(args, kwargs)
    with tbhooks.watch(model, every=1, kinds="input") as watching:
        model(torch.ones(3, 2)).sum().backward()
        sgd(model).step()
    frame = watching.latest
    assert watching.stats.errors == 0
    assert not watching.stats.unseen
    assert {site.name for site in frame.sites} == {ROOT, "head", *expected}
    step = {(at, "input"): reference.to_numpy(tensor).ravel() for at, tensor in expected.items()}
    float64_recorder.assert_frame_equals(only(frame, "child"), step)


def only(frame: Frame, path: str) -> Frame:
    rows = [i for i, site in enumerate(frame.sites) if site.path == path]
    sites = tuple(frame.sites[i] for i in rows)
    return replace(frame, sites=sites, values=frame.values[rows].copy(), buckets=frame.buckets[rows].copy())


def test_integers_are_said_and_are_no_error() -> None:
    case = zoo.ZOO["tied_weights"]
    _, watching = watched(case)
    assert "int64" in watching.stats.unseen["input/embed"]
    assert "int64" in watching.stats.unseen["input/(root)"]
    assert ("embed", "input") not in watching.latest
    assert watching.latest["mix", "input"].count == watching.latest["embed", "activation"].count


def test_a_mask_of_truth_values_is_said_and_the_rest_is_read() -> None:
    model = Gives((A,), {"mask": A > 0})
    with tbhooks.watch(model, every=1, kinds="input") as watching:
        model(torch.ones(3, 2)).sum().backward()
    assert "bool" in watching.stats.unseen["input/child[mask]"]
    assert watching.latest["child[0]", "input"].mean == pytest.approx(A.double().mean().item())


# -- asked for, and chosen --------------------------------------------------------------------------


def test_inputs_are_read_only_if_asked_for_and_alone_give_the_same_numbers() -> None:
    by_default, with_others, alone = (
        watched(zoo.ZOO["gpt2"], kinds=kinds)[1].latest for kinds in (KINDS, WITH_INPUTS, "input")
    )
    assert {site.kind for site in by_default.sites} == set(KINDS)
    assert {site.kind for site in alone.sites} == {"input"}
    for frame in (by_default, alone):
        for site in frame.sites:
            assert repr(frame[site.name, site.kind]) == repr(with_others[site.name, site.kind])
    assert len(with_others.sites) == len(by_default.sites) + len(alone.sites)


def test_include_and_exclude_choose_whose_inputs_are_read() -> None:
    _, watching = watched(zoo.ZOO["mlp"], kinds="input", include=nn.Linear, exclude="4")
    assert [str(site) for site in watching.latest.sites] == ["input/0", "input/2"]


def test_tags_in_tensorboard(tmp_path: Path) -> None:
    watched(zoo.ZOO["mlp"], writer=tmp_path, kinds="input")
    paths = ("0", "1", "2", "3", "4", ROOT)
    read = frames.accumulator(tmp_path)
    scalars = {f"input.{stat}/{path}" for stat in ("mean", "std", "zero_fraction") for path in paths}
    assert {tag for tag in read.Tags()["scalars"] if not tag.startswith("train")} == scalars
    assert set(read.Tags()["histograms"]) == {f"input/{path}" for path in paths}
    assert set(read.Tags()["tensors"]) == {"tbhooks/input", "tbhooks/input.buckets", "tbhooks/outcome"}
    expected = observe(zoo.ZOO["mlp"])
    means = {step: reference.stats(expected[step]["3", "input"])["mean"] for step in (0, 1)}
    assert frames.scalar_series(tmp_path, "input.mean/3") == pytest.approx(means, rel=1e-5)
    assert frames.histograms(tmp_path)[1, "input/3"].num == expected[1]["3", "input"].size


# -- beside others ----------------------------------------------------------------------------------


def test_inputs_are_those_that_a_users_own_hook_made_of_them() -> None:
    def run(begin: Callable[[nn.Module], Any]) -> Any:
        model = mlp()
        model[2].register_forward_pre_hook(lambda _module, args: (args[0] * 2 + 1,))
        looking = begin(model)
        train_mlp(model, 2)
        looking.close()
        return looking

    watching = run(lambda model: tbhooks.watch(model, every=1, kinds=WITH_INPUTS))
    for frame, step in zip(watching.history, run(InputRecorder).steps, strict=True):
        float64_recorder.assert_frame_equals(frame, step)


def test_a_nan_in_the_batch_is_found_where_it_comes_in() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, kinds=WITH_INPUTS) as watching:
        model(torch.tensor([[1.0, float("nan"), 2.0, 3.0]])).sum().backward()
    found = [finding.site for finding in watching.findings if finding.rule == "non_finite"]
    assert found[0] == Site(ROOT, "input")


def test_unlogged_steps_have_no_hook() -> None:
    model, counts = mlp(), []
    tbhooks.watch(model, every=3, kinds="input")
    train_mlp(model, 6, after=lambda *_: counts.append(zoo.hook_count(model)))
    assert counts == [0, 0, 7, 0, 0, 7]  # four for inputs, and three on the root that tell forwards apart


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_in_a_logged_step_works_and_is_not_watched(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, kinds=ALL_KINDS).evaluation() as watching:
        other = copied(model)
        x = torch.randn(16, 4)
        assert torch.equal(other(x), model(x))
        assert torch.equal(other.eval()(x), model.eval()(x))
    assert watching.latest["0", "input"].count == 64
    assert watching.stats.errors == 0


@pytest.mark.parametrize("kinds", ["input", "functional"])
def test_a_number_logged_after_the_forward_belongs_to_its_step(kinds: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    kept = tbhooks.MemorySink()
    with tbhooks.watch(model, kept, every=1, kinds=kinds) as watching:
        for step in range(3):
            loss = forward(model)
            watching.log({f"only{step}": loss})
            loss.backward()
            optimizer.step()
    assert [[tag for tag in frame.scalars if "only" in tag] for frame in kept] == [
        [f"train/only{step}"] for step in range(3)
    ]
