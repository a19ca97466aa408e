"""The structure of a model is walked again when it has changed, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tbhooks
from tbhooks.capture import selection, structure
from tests.support.loops import mlp, sgd, train


def _replace(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 8)


def _add_inside(model: nn.Sequential) -> None:
    model[0].extra = nn.Linear(8, 8)  # type: ignore[assignment]


def _remove(model: nn.Sequential) -> None:
    del model._modules["1"]


def _rename(model: nn.Sequential) -> None:
    model._modules = {f"layer{name}": module for name, module in model._modules.items()}


def _reorder(model: nn.Sequential) -> None:
    model._modules["0"] = model._modules.pop("0")


def _replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 4))


def _remove_parameter(model: nn.Sequential) -> None:
    model[0].bias = None  # type: ignore[assignment]


def _parametrize(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def _change_class(model: nn.Sequential) -> None:
    model[1].__class__ = nn.Tanh


def _wrap(model: nn.Sequential) -> None:
    model._modules["2"] = nn.parallel.DataParallel(model[2])


CHANGES = [
    _replace, _add_inside, _remove, _rename, _reorder, _replace_parameter, _remove_parameter, _parametrize,
    _change_class, _wrap,
]  # fmt: skip


def _freeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def _add_hook(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda *_: None)


def _add_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("scale", torch.ones(1))


def _evaluate(model: nn.Sequential) -> None:
    model.eval()


SAME = [_freeze, _add_hook, _add_buffer, _evaluate]


@pytest.fixture(params=["in C", "in Python"])
def _check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(structure, "_is_unchanged", None)
    elif structure._is_unchanged is None:
        pytest.skip("the package has no hooks in C here")


@pytest.mark.usefixtures("_check")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: Callable[[nn.Sequential], None]) -> None:
    model = mlp()
    known = structure.of(model)
    before = known.version()
    assert known.version() == before
    change(model)
    assert known.version() != before
    assert known.modules() == selection.walk(model)
    assert list(known.modules().by_path) == list(selection.walk(model).by_path)
    assert known.parameter_ids() == frozenset(map(id, model.parameters()))


@pytest.mark.usefixtures("_check")
@pytest.mark.parametrize("change", SAME)
def test_what_is_no_change_of_structure_causes_no_walk(change: Callable[[nn.Sequential], None]) -> None:
    model = mlp()
    before = structure.of(model).version()
    change(model)
    assert structure.of(model).version() == before


def test_a_scripted_module_is_walked_each_time() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))
    known = structure.of(model)
    assert known.version() != known.version()
    assert known.modules() == selection.walk(model)


def test_it_keeps_nothing_alive() -> None:
    model = mlp()
    structure.of(model).modules()
    layer, weight, gone = weakref.ref(model[0]), weakref.ref(model[0].weight), weakref.ref(model)
    model[0] = nn.Linear(4, 8)
    gc.collect()
    assert layer() is None
    assert weight() is None
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("every", [1, 2])
def test_logged_steps_walk_once_until_something_changes(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks = mlp(), 0
    walk = selection.walk

    def counted(model: nn.Module) -> selection.Modules:
        nonlocal walks
        walks += 1
        return walk(model)

    monkeypatch.setattr(selection, "walk", counted)
    with tbhooks.watch(model, every=every) as watching:
        optimizer = train(model, 3)
        walks = 0
        train(model, 6, optimizer)
        assert walks == 0
        model[0] = nn.Linear(4, 8)
        train(model, 4, sgd(model))
        assert walks == 1
        watching.flush()
        assert watching.latest["0", "activation"].count > 0
        assert watching.latest["0.weight", "update"].count == 32
    assert not any(module._forward_hooks for module in model.modules())
    assert watching.stats.errors == 0


def test_a_replaced_module_is_read_from_the_next_logged_step_on() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        optimizer = train(model, 2)
        model[1] = nn.Sequential(nn.Tanh(), nn.Identity())
        train(model, 2, optimizer)
        watching.flush()
        assert watching.latest["1.0", "activation"].max <= 1
        model[1] = nn.ReLU()
        train(model, 2, optimizer)
        watching.flush()
        assert ("1.0", "activation") not in {(site.name, site.kind) for site in watching.latest.sites}
        assert watching.latest["1", "activation"].min >= 0


def test_parameters_can_be_swapped_between_steps() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        optimizer = train(model, 2)
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(8, 4)))
        train(model, 1, optimizer)
        watching.flush()
        assert watching.latest["0.weight", "weight"].mean == 1
    assert watching.stats.errors == 0
