"""Paths are those of torch, wrappers leave no trace in them, and patterns choose among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tbhooks
from tbhooks.capture import selection
from tbhooks.capture.selection import Selector, unwrap, walk
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import ROOT
from tests.support.zoo import ZOO

MODELS = (
    "mlp", "cnn", "shared_module", "two_names", "tied_weights", "lstm", "gru_loop", "multihead", "dict_output",
    "returns_parameter", "sparse_embedding", "gan", "resnet", "gpt2", "albert", "t5", "mixtral",
)  # fmt: skip


def small() -> nn.Module:
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            "decoder": nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        }
    )


SMALL_PATHS = [
    "(root)", "encoder", "encoder.0", "encoder.1", "encoder.2", "decoder", "decoder.0", "decoder.1",
]  # fmt: skip


# --- Paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_module_paths_are_those_of_named_modules(name: str) -> None:
    model = ZOO[name].build()
    expected = {path or ROOT: module for path, module in model.named_modules()}
    found = walk(model).by_path
    assert list(found) == list(expected)
    assert all(found[path] is expected[path] for path in expected)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_paths_are_those_of_named_parameters(name: str) -> None:
    model = ZOO[name].build()
    expected = dict(model.named_parameters())
    found = selection.parameters(walk(model).by_path)
    assert list(found) == list(expected)
    assert all(found[path] is expected[path] for path in expected)


@pytest.mark.parametrize("name", MODELS)
def test_aliases_are_the_further_names_of_shared_modules(name: str) -> None:
    model = ZOO[name].build()
    first = {id(module): path for path, module in model.named_modules()}
    further = {
        path: first[id(module)]
        for path, module in model.named_modules(remove_duplicate=False)
        if first[id(module)] != path
    }
    assert walk(model).aliases == further


def test_a_shared_module_is_known_by_its_first_name() -> None:
    modules = walk(ZOO["two_names"].build())
    assert list(modules.by_path) == [ROOT, "first", "first_activation"]
    assert modules.aliases == {"second": "first", "second_activation": "first_activation"}


def test_a_tied_parameter_is_found_once() -> None:
    found = selection.parameters(walk(ZOO["tied_weights"].build()).by_path)
    assert list(found) == ["embed.weight", "mix.weight", "mix.bias"]


def test_parameters_of_the_root_have_no_prefix() -> None:
    assert list(selection.parameters(walk(nn.Linear(2, 2)).by_path)) == ["weight", "bias"]


def test_children_and_parameters_that_are_none_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.register_module("nothing", None)
    assert list(walk(model).by_path) == [ROOT, "0"]
    assert list(selection.parameters(walk(model).by_path)) == ["0.weight"]


@pytest.mark.timeout(10)
def test_modules_that_contain_each_other_do_not_hang() -> None:
    model = small()
    model["encoder"].register_module("back", model)
    model["decoder"].register_module("other", model["encoder"])
    modules = walk(model)
    assert list(modules.by_path) == SMALL_PATHS
    assert modules.aliases == {"encoder.back": ROOT, "decoder.other": "encoder"}


# --- Wrappers -------------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": torch.compile,
    "data_parallel": nn.DataParallel,
    "checkpointed": checkpoint_wrapper,
    "all": lambda module: torch.compile(nn.DataParallel(checkpoint_wrapper(module))),
}


def test_a_model_set_up_by_fabric_has_the_paths_of_the_model() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, stepping = fabric.setup(model, optimizer)
    assert unwrap(wrapped) is model
    with tbhooks.watch(wrapped, every=1) as w:
        fabric.backward(wrapped(torch.ones(3, 2)).sum())
        stepping.step()
        assert w.latest is not None
        assert {site.path for site in w.latest.sites if site.kind == "activation"} == {"(root)", "0", "1", "1.0"}
        assert {site.path for site in w.latest.sites if site.kind == "update"} == {
            "0.weight", "0.bias", "1.0.weight", "1.0.bias",
        }  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_has_the_paths_of_the_model(wrapper: str) -> None:
    model = small()
    wrapped = WRAPPERS[wrapper](model)
    assert wrapped is not model
    assert unwrap(wrapped) is model
    assert list(walk(wrapped).by_path) == SMALL_PATHS
    assert list(selection.parameters(walk(wrapped).by_path)) == [path for path, _ in small().named_parameters()]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_child_has_the_path_of_the_child(wrapper: str) -> None:
    model = small()
    inner, deep = model["decoder"], model["encoder"][0]
    model["decoder"] = WRAPPERS[wrapper](inner)
    model["encoder"][0] = WRAPPERS[wrapper](deep)
    modules = walk(model)
    assert list(modules.by_path) == SMALL_PATHS
    assert modules.by_path["decoder"] is inner
    assert modules.by_path["encoder.0"] is deep
    assert list(selection.parameters(modules.by_path)) == [path for path, _ in small().named_parameters()]


def test_a_module_shared_with_its_wrapper_is_one_module() -> None:
    model = small()
    model["again"] = checkpoint_wrapper(model["encoder"])
    assert walk(model).aliases == {"again": "encoder"}


def test_a_child_that_happens_to_be_called_module_is_no_wrapper() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert unwrap(model) is model
    assert list(walk(model).by_path) == [ROOT, "module"]


def test_what_is_not_wrapped_is_itself() -> None:
    model = small()
    assert unwrap(model) is model


# --- Choosing -------------------------------------------------------------------------------------


def chosen(include: Any = None, exclude: Any = None, model: nn.Module | None = None) -> list[str]:
    model = small() if model is None else model
    return list(Selector(model, include, exclude).choose(walk(model).by_path))


def _is_first(path: str, module: nn.Module) -> bool:
    return path.endswith(".0") and isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, SMALL_PATHS),
        ("*", SMALL_PATHS),
        ("(root)", ["(root)"]),
        ("encoder", ["encoder"]),
        ("encoder.*", ["encoder.0", "encoder.1", "encoder.2"]),
        ("*.[01]", ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        ("?ecoder.0", ["decoder.0"]),
        (nn.Linear, ["encoder.0", "encoder.2", "decoder.0"]),
        (nn.Sequential, ["encoder", "decoder"]),
        (_is_first, ["encoder.0", "decoder.0"]),
        (lambda path, _: path.count(".") == 0, ["(root)", "encoder", "decoder"]),
        (["decoder", nn.ReLU, _is_first], ["encoder.0", "encoder.1", "decoder", "decoder.0"]),
        (("decoder", "encoder"), ["encoder", "decoder"]),
        ({nn.Tanh, nn.ReLU}, ["encoder.1", "decoder.1"]),
    ],
)
def test_include_keeps_what_matches(include: Any, expected: list[str]) -> None:
    assert chosen(include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("encoder*", ["(root)", "decoder", "decoder.0", "decoder.1"]),
        (nn.Linear, ["(root)", "encoder", "encoder.1", "decoder", "decoder.1"]),
        (_is_first, [path for path in SMALL_PATHS if not path.endswith(".0")]),
        (["*.*", nn.ModuleDict], ["encoder", "decoder"]),
        ("matches.nothing", SMALL_PATHS),
    ],
)
def test_exclude_drops_what_matches(exclude: Any, expected: list[str]) -> None:
    assert chosen(exclude=exclude) == expected


def test_exclude_wins_over_include() -> None:
    assert chosen("encoder.*", nn.ReLU) == ["encoder.0", "encoder.2"]


def test_patterns_see_paths_without_wrappers() -> None:
    wrapped = torch.compile(nn.DataParallel(small()))
    assert chosen("decoder.*", model=wrapped) == ["decoder.0", "decoder.1"]
    assert chosen("encoder.*", nn.Linear, model=wrapped) == ["encoder.1"]


def test_globs_are_case_sensitive() -> None:
    with pytest.raises(ArgumentError):
        chosen("Encoder")


# --- Errors ---------------------------------------------------------------------------------------


def test_an_include_that_matches_nothing_lists_the_nearest_paths() -> None:
    with pytest.raises(ArgumentError, match=r"include='encodr\.\*' matches no module.*did you mean 'encoder'"):
        chosen("encodr.*")
    with pytest.raises(ArgumentError, match=r"matches no module of this model: choose from '\(root\)', 'encoder'"):
        chosen("zzzzzzzz")


@pytest.mark.parametrize("include", [nn.Conv2d, lambda path, module: False, ["encoder", "zzzzzzzz"], ""])
def test_each_pattern_of_include_must_match_something(include: Any) -> None:
    with pytest.raises(ArgumentError, match="matches no module"):
        chosen(include)


def test_an_exclude_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="leaves no module"):
        chosen(exclude="*")
    with pytest.raises(ArgumentError, match="leaves no module"):
        chosen("encoder.*", nn.Module)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("wrong", [3, 1.5, True, int, ["encoder", 3], [None], [int], {"encoder": 1}, b"encoder"])
def test_wrong_types_are_named_with_what_is_accepted(argument: str, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{argument} must be a glob over module paths, a module class"):
        chosen(**{argument: wrong})


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_module_itself_is_no_pattern(argument: str) -> None:
    model = small()
    with pytest.raises(ArgumentError, match=f"{argument} must be a glob"):
        chosen(**{argument: model["encoder"]}, model=model)
