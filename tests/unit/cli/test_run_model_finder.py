"""`tbhooks run` finds what a script trains, and writes it where the script writes."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import runs
from tbhooks.cli.run import launcher, model_finder, options
from tbhooks.cli.run.model_finder import covering
from tbhooks.cli.run.session import Session
from tbhooks.data.frame import KINDS, Severity
from tbhooks.runs import report_data

Begin = Callable[..., Session]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.chdir(tmp_path)
    begun: list[Session] = []

    def start(*given: str) -> Session:
        words = given if "--every" in given else ("--every", "2", *given)
        session = Session(*options.parse([*words, "train.py"], {}))
        session.patch()
        begun.append(session)
        return session

    yield start
    for session in begun:
        session.close()
    assert not torch_module._global_forward_pre_hooks


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def train(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        loss = call(batch()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def only_run(tmp_path: Path) -> runs.Run:
    [directory] = (tmp_path / "runs").iterdir()
    return runs.read(directory)


def paths(run: runs.Run, kind: str = "activation", step: int = 0) -> list[str]:
    [frame] = [frame for frame in run.training if frame.step == step]
    return [site.path for site in frame.sites if site.kind == kind]


# --- Which models ---------------------------------------------------------------------------------


def test_what_is_written_equals_what_watch_writes(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    train(model, sgd(model), steps=4)
    said = session.close()
    by_hand = net()
    with tbhooks.watch(by_hand, tmp_path / "by_hand", every=2):
        train(by_hand, sgd(by_hand), steps=4)
    found, expected = only_run(tmp_path), runs.read(tmp_path / "by_hand")
    assert [frame.step for frame in found.training] == [0, 2]
    for ours, theirs in zip(found.training, expected.training, strict=True):
        assert ours.sites == theirs.sites
        assert {site.kind for site in ours.sites} == set(KINDS)
        assert (ours.values == theirs.values).all()
    assert "2 of 4 steps logged" in said


def test_teachers_and_losses_are_left_out(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model, teacher, loss = net(), net(7), nn.MSELoss()
    optimizer = sgd(model)
    for _ in range(2):
        loss(model(batch()), teacher(batch())).backward()
        optimizer.step()
    session.close()
    assert len(session.watched) == 1
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_two_models_of_two_optimizers_are_two_runs(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    one, other = net(), nn.Linear(1, 1)
    first, second = sgd(one), sgd(other)
    for _ in range(2):
        other(one(batch())).mean().backward()
        first.step()
        second.step()
    session.close()
    [directory] = (tmp_path / "runs").iterdir()
    assert sorted(child.name for child in directory.iterdir()) == ["Linear", "Sequential"]
    assert paths(runs.read(directory / "Linear")) == ["(root)"]
    assert paths(runs.read(directory / "Sequential")) == ["0", "1", "2", "(root)"]


def test_two_models_of_one_optimizer_are_two_runs_and_equal_classes_are_numbered(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    train(lambda x: decoder(encoder(x)), sgd(encoder, decoder))
    session.close()
    [directory] = (tmp_path / "runs").iterdir()
    assert sorted(child.name for child in directory.iterdir()) == ["Linear", "Linear-2"]


class NeverCalled(nn.Module):
    """As Lightning's: its parts are called, not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = net(), nn.MSELoss()

    def training_step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.net(x), torch.zeros(8, 1))
        return loss


def test_names_are_those_of_the_outermost_module_though_it_is_never_called(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = NeverCalled()
    train(model.training_step, sgd(model))
    session.close()
    assert paths(only_run(tmp_path)) == ["net.0", "net.1", "net.2", "net", "loss"]
    assert paths(only_run(tmp_path), "weight")[0] == "net.0.weight"


def test_one_module_with_both_models_of_two_optimizers_is_one_run(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    both = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    holder = nn.Module()
    holder.parts = both
    first, second = sgd(both["a"]), sgd(both["b"])
    for _ in range(2):
        both["b"](both["a"](batch())).mean().backward()
        first.step()
        second.step()
    session.close()
    assert paths(only_run(tmp_path)) == ["parts.a", "parts.b"]


def test_a_container_made_for_the_optimizer_alone_is_no_model(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    container = nn.ModuleList([model])
    train(model, torch.optim.SGD(container.parameters(), lr=0.1))
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_a_part_that_is_trained_shows_the_whole_model(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    train(model, sgd(model[2]))
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_an_evaluation_before_training_is_not_taken_for_it(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = sgd(model)
    with torch.no_grad():
        model(batch())
    assert not session.watched
    train(model, optimizer)
    session.close()
    assert [frame.step for frame in only_run(tmp_path).training] == [0, 2]


class Projection(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_model_at_the_address_of_a_module_that_is_gone_is_found(begin: Begin) -> None:
    session = begin()
    weight = nn.Parameter(torch.ones(4, 1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    teacher = Projection(nn.Parameter(torch.ones(4, 1)))
    teacher(batch())
    address, others = id(teacher), []
    del teacher
    while id(model := Projection(weight)) != address:
        others.append(model)
        if len(others) > 1000:
            pytest.skip("Python does not use that address again")
    others.clear()
    train(model, optimizer, steps=1)
    assert session.watched


def ids(*modules: nn.Module) -> frozenset[int]:
    return frozenset(id(parameter) for module in modules for parameter in module.parameters())


def test_the_outermost_is_chosen_in_whatever_order_modules_come() -> None:
    model = NeverCalled()
    modules = list(model.modules())
    for order in (modules, modules[::-1]):
        assert covering(ids(model), order, called=model.net) == [model]
        assert covering(ids(model.net[0]), order, called=model.net[0]) == [model]
        assert covering(ids(net()), order, called=None) == []


def test_wrappers_are_not_models() -> None:
    model = net()
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    assert covering(ids(model), [wrapped, *wrapped.children(), model, *model], called=wrapped) == [model]


def test_as_few_as_there_can_be_are_chosen_and_the_called_before_others() -> None:
    encoder, decoder, head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    autoencoder, classifier = nn.Sequential(encoder, decoder), nn.Sequential(encoder, head)
    modules = [encoder, classifier, decoder, head, autoencoder]
    assert covering(ids(encoder, decoder), modules, called=encoder) == [autoencoder]
    assert covering(ids(encoder), modules, called=autoencoder) == [autoencoder]
    assert covering(ids(encoder), modules, called=classifier) == [classifier]
    assert set(covering(ids(encoder, decoder, head), modules, called=None)) == {autoencoder, classifier}


# --- When ----------------------------------------------------------------------------------------


def test_no_global_hook_is_there_before_an_optimizer_nor_after_the_first_forward_began(begin: Begin) -> None:
    begin()
    model = net()
    assert not torch_module._global_forward_pre_hooks
    optimizer = sgd(model)
    assert len(torch_module._global_forward_pre_hooks) == 1
    seen: list[int] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(len(torch_module._global_forward_pre_hooks)))
    train(model, optimizer, steps=1)
    assert seen == [0]
    assert not torch_module._has_any_global_hook()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    model(batch())
    assert not any(module._forward_hooks for module in model)  # step 1 is not logged


def test_an_optimizer_made_after_the_forward_is_waited_for_until_the_next(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    loss = model(batch()).mean()
    optimizer = sgd(model)
    loss.backward()
    optimizer.step()
    train(model, optimizer)
    session.close()
    assert [frame.step for frame in only_run(tmp_path).training] == [0, 2]
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_a_forward_inside_the_optimizers_step_is_seen_from_the_first(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    session.close()
    first = only_run(tmp_path).training[0]
    assert first.step == 0
    assert {site.kind for site in first.sites} == set(KINDS)


def test_weights_used_without_their_module_are_seen(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = nn.Linear(4, 1)
    train(lambda x: nn.functional.linear(x, model.weight), sgd(model), steps=4)
    session.close()
    run = only_run(tmp_path)
    assert {site.kind for frame in run.training for site in frame.sites} == {"weight", "weight_gradient", "update"}


def test_a_second_optimizer_of_the_same_model_changes_nothing(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    train(model, sgd(model))
    train(model, sgd(model))
    train(model, sgd(model[0]))
    assert len(session.watched) == 1
    session.close()
    assert [frame.step for frame in only_run(tmp_path).training] == [0, 2, 4, 6, 8]


def test_an_optimizer_made_for_every_step_is_looked_at_once(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    every_module = model_finder.live_modules

    def looking() -> list[nn.Module]:
        looks.append(0)
        return every_module()

    monkeypatch.setattr(model_finder, "live_modules", looking)
    session = begin("--every", "1")
    model = net()
    for _ in range(3):
        train(model, sgd(model), steps=1)
        assert not torch_module._has_any_global_hook()
    pixels = torch.zeros(8, 4, requires_grad=True)
    train(lambda x: model(x + pixels), torch.optim.SGD([pixels], lr=0.1))
    assert len(looks) == 1
    assert not torch_module._has_any_global_hook()
    assert "no issues found" in session.close()


class ReturnsLoss(nn.Module):
    """Returns its own loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(x)
        return {"loss": logits.square().mean(), "logits": logits}


def test_a_loss_that_the_model_returns_is_in_the_summary(begin: Begin) -> None:
    session = begin("--every", "2")
    model = ReturnsLoss()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(5):
        losses.append(model(torch.ones(8, 4))["loss"])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    first, last = losses[0].item(), losses[4].item()
    assert f"\n  loss returned by the model: {first:.3g} at step 0, {last:.3g} at step 4\n" in session.close()


def test_parameters_that_are_added_to_an_optimizer_are_seen_from_the_first_step(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.add_param_group({"params": model.parameters()})
    train(model, optimizer)
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_a_module_with_parameters_of_its_own_kind_is_no_trouble(begin: Begin, tmp_path: Path) -> None:
    class Grouped(nn.Linear):
        def parameters(self, group: str) -> Iterator[nn.Parameter]:  # type: ignore[override]
            yield from super().parameters()

    session = begin()
    model, other = net(), Grouped(4, 1)
    optimizer = sgd(model)
    for _ in range(2):
        (other(batch()) + model(batch())).square().mean().backward()
        optimizer.step()
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_a_holder_that_is_garbage_is_no_model(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    gc.disable()
    try:
        holder = nn.Sequential(model)
        holder.__dict__["itself"] = holder  # so that it goes with the collector only
        del holder
        train(model, sgd(model))
    finally:
        gc.enable()
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_a_model_that_is_kept_from_the_collector_is_found_when_it_is_called(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    gc.freeze()
    try:
        train(model, sgd(model))
    finally:
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py does
    session.close()
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_is_traced_before_it_trains_is_traced_as_it_was(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = sgd(model)
    with warnings.catch_warnings(category=torch.jit.TracerWarning, action="error"):
        traced = torch.jit.trace(model, batch())
    train(traced, optimizer)
    session.close()
    assert paths(only_run(tmp_path), "weight") == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_model_that_comes_later_has_a_run_below_the_first(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    for width in (4, 5, 6):
        model = net(width)
        train(model, sgd(model))
    session.close()
    [directory] = (tmp_path / "runs").iterdir()
    names = sorted(child.name for child in directory.iterdir() if child.is_dir())
    assert names == ["Sequential", "Sequential-2"]
    assert [len(runs.read(place).training) for place in (directory, directory / "Sequential")] == [2, 2]


def test_a_search_over_many_models_is_not_followed_to_its_end(
    begin: Begin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tbhooks.cli.run.session.MOST_MODELS", 3)
    session = begin("--kinds", "weight")
    for _ in range(5):
        model = nn.Linear(4, 1)
        train(model, sgd(model), steps=1)
    assert len(session.watched) == 3
    assert [record.message for record in caplog.records] == [
        "3 models are watched; further models of the script are not"
    ]


@pytest.mark.parametrize("kind", ["input", "functional"])
def test_what_must_be_hooked_before_the_call_is_there_in_the_first_step(
    begin: Begin, tmp_path: Path, kind: str
) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x))

    session = begin("--kinds", kind)
    model = Squared()
    train(model, sgd(model))
    session.close()
    expected = {"input": "(root)", "functional": "(root):relu"}
    assert expected[kind] in paths(only_run(tmp_path), kind)


# --- Compiled ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Not a Sequential: torch does not compile the forward of its own modules when they have hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def compiled_before(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    return called, sgd(called)


def compiled_after(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    optimizer = sgd(model)
    return torch.compile(model, backend="aot_eager", fullgraph=True), optimizer


def compiled_in_place(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    optimizer = sgd(model)
    model.compile(backend="aot_eager", fullgraph=True)
    return model, optimizer


def compiled_function(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    optimizer = sgd(model)
    return torch.compile(lambda x: model(x) * 2, backend="aot_eager", fullgraph=True), optimizer


@pytest.mark.parametrize("way", [compiled_before, compiled_after, compiled_in_place, compiled_function])
def test_a_compiled_model_is_seen_in_its_first_step_and_is_still_one_graph(
    begin: Begin, tmp_path: Path, way: Callable[[nn.Module], tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]]
) -> None:
    torch.compiler.reset()
    session = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of global hooks
        call, optimizer = way(Net())
        assert not torch_module._has_any_global_hook()
        train(call, optimizer)
    session.close()
    assert paths(only_run(tmp_path)) == ["body", "head", "(root)"]
    assert paths(only_run(tmp_path), "update") == ["body.weight", "body.bias", "head.weight", "head.bias"]


# --- Where ---------------------------------------------------------------------------------------


def test_the_scripts_own_writer_gets_it_though_it_is_made_later_and_closed_early(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = sgd(model)
    writer = SummaryWriter(str(tmp_path / "mine"))
    train(model, optimizer, steps=1)
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    said = session.close()
    assert len(list((tmp_path / "mine").iterdir())) == 1
    run = runs.read(tmp_path / "mine")
    assert [frame.step for frame in run.training] == [0]
    assert "loss" in run.scalars
    assert "mine: 1 of 1 steps logged" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("following", ["second", "first"])
def test_a_writer_that_is_closed_between_trainings_is_followed_by_the_next(begin: Begin, following: str) -> None:
    session = begin("--every", "1")
    model = net()
    optimizer = sgd(model)
    first = SummaryWriter("first")
    train(model, optimizer)
    first.close()
    second = SummaryWriter("second") if following == "second" else first
    train(model, optimizer)
    second.close()
    said = session.close()
    directories = list(dict.fromkeys(["first", following]))
    steps = [frame.step for directory in directories for frame in runs.read(directory).training]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert said.startswith(f"{', '.join(directories)}: 6 of 6 steps logged, no issues found\nto view: ")


def test_the_run_of_hyperparameters_below_a_writers_is_no_run_of_ours(begin: Begin) -> None:
    session = begin("--every", "1")
    model, writer = net(), SummaryWriter("first")
    optimizer = sgd(model)
    train(model, optimizer)
    writer.add_hparams({"lr": 0.1}, {"loss": 1.0})
    writer.close()
    train(model, optimizer)
    assert session.close().startswith("first: 6 of 6 steps logged")


def test_a_model_that_comes_later_lies_below_a_writer_in_a_relative_directory(begin: Begin) -> None:
    session = begin()
    writer = SummaryWriter("mine")
    for model in (net(), nn.Linear(4, 1)):
        train(model, sgd(model))
        writer.flush()
    assert session.close().splitlines() == [
        "mine: 2 of 3 steps logged, no issues found", "mine/Linear: 2 of 3 steps logged, no issues found",
        "to view: tensorboard --logdir mine, or tbhooks report mine",
    ]  # fmt: skip


def test_a_writer_of_tensorboardx_is_used_too(begin: Begin, tmp_path: Path) -> None:
    tensorboardx = pytest.importorskip("tensorboardX")
    session = begin()
    model = net()
    writer = tensorboardx.SummaryWriter(str(tmp_path / "mine"))
    train(model, sgd(model))
    writer.close()
    session.close()
    assert [frame.step for frame in runs.read(tmp_path / "mine").training] == [0, 2]


@pytest.mark.parametrize("same", [False, True], ids=["elsewhere", "where the script writes"])
def test_logdir_goes_before_the_scripts_own_writer(begin: Begin, tmp_path: Path, same: bool) -> None:
    session = begin("--logdir", "mine" if same else "asked")
    model = net()
    with SummaryWriter(str(tmp_path / "mine")) as writer:
        train(model, sgd(model))
        writer.add_scalar("loss", 1.0, 0)
    session.close()
    assert [frame.step for frame in runs.read(tmp_path / ("mine" if same else "asked")).training] == [0, 2]
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_a_logdir_that_ends_with_a_slash_is_a_place_for_runs(begin: Begin, tmp_path: Path) -> None:
    session = begin("--logdir", "place/")
    writer = SummaryWriter("mine")
    model = net()
    train(model, sgd(model))
    session.close()
    writer.close()
    [run] = (tmp_path / "place").iterdir()
    assert run.name.startswith("train-2")
    assert [frame.step for frame in runs.read(run).training] == [0, 2]


def test_two_models_lie_below_the_directory_of_the_scripts_writer(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    encoder, decoder = nn.Linear(4, 4), net()
    with SummaryWriter(str(tmp_path / "mine")) as writer:
        writer.add_scalar("loss", 1.0, 0)
        train(lambda x: decoder(encoder(x)), sgd(encoder, decoder))
    said = session.close()
    assert sorted(child.name for child in (tmp_path / "mine").iterdir() if child.is_dir()) == ["Linear", "Sequential"]
    assert "to view: tensorboard --logdir mine" in said


def test_a_relative_directory_is_that_of_the_start(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin("--logdir", "asked")
    model = net()
    optimizer = sgd(model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(model, optimizer)
    session.close()
    assert [frame.step for frame in runs.read(tmp_path / "asked").training] == [0, 2]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A file system that is no disk, as TensorBoard's writer sees one."""
    files = pytest.importorskip("fsspec").filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def event_files_in(files: Any, directory: str) -> list[str]:
    return [str(path) for path in files.find(directory)]


def steps_in(files: Any, directory: str, tmp_path: Path) -> list[int]:
    [path] = event_files_in(files, directory)
    (tmp_path / "copied.tfevents").write_bytes(files.cat_file(path))
    return [frame.step for frame in runs.read(tmp_path / "copied.tfevents").training]


def test_a_remote_logdir_is_written_to_and_no_directory_of_that_name_is_made(
    begin: Begin, tmp_path: Path, bucket: Any
) -> None:
    session = begin("--logdir", "memory://bucket/try")
    model = net()
    train(model, sgd(model))
    said = session.close()
    assert steps_in(bucket, "/bucket/try", tmp_path) == [0, 2]
    assert said.startswith("memory://bucket/try: 2 of 3 steps logged")
    assert said.endswith("\nto view: tensorboard --logdir memory://bucket/try")
    assert [path.name for path in tmp_path.iterdir()] == ["copied.tfevents"]


def test_a_remote_place_for_runs_gets_one_with_a_name(begin: Begin, tmp_path: Path, bucket: Any) -> None:
    session = begin("--logdir", "memory://bucket/place/")
    model = net()
    train(model, sgd(model))
    session.close()
    assert steps_in(bucket, "/bucket/place", tmp_path) == [0, 2]
    [path] = event_files_in(bucket, "/bucket/place")
    assert path.split("/")[3].startswith("train-2")


@pytest.mark.parametrize("asked", [(), ("--logdir", "memory://bucket/mine")], ids=["not asked", "asked"])
def test_the_scripts_own_remote_writer_is_used_and_further_models_lie_below(
    begin: Begin, tmp_path: Path, bucket: Any, asked: tuple[str, ...]
) -> None:
    session = begin(*asked)
    writer = SummaryWriter("memory://bucket/mine")
    encoder, decoder = nn.Linear(4, 4), net()
    train(lambda x: decoder(encoder(x)), sgd(encoder, decoder))
    said = session.close()
    writer.close()
    assert steps_in(bucket, "/bucket/mine/Linear", tmp_path) == [0, 2]
    assert steps_in(bucket, "/bucket/mine/Sequential", tmp_path) == [0, 2]
    assert len(event_files_in(bucket, "/bucket/mine")) == 3
    assert "tbhooks report" not in said


def test_runs_here_and_elsewhere_are_both_in_the_hint(begin: Begin, tmp_path: Path, bucket: Any) -> None:
    session = begin()
    first, second = net(), net(5)
    with SummaryWriter("memory://bucket/mine"):
        train(first, sgd(first))
        session.watched[0][0].flush()
    with SummaryWriter("mine"):
        train(first, sgd(first))
    train(second, sgd(second))
    hint = session.close().splitlines()[-1]
    assert (
        hint
        == "to view: tensorboard --logdir mine, or tensorboard --logdir memory://bucket/mine, or tbhooks report mine"
    )


# --- Nothing, and why ----------------------------------------------------------------------------


def test_a_script_that_watches_its_model_is_left_to_it(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    model = net()
    optimizer = sgd(model)
    with tbhooks.watch(model, tmp_path / "mine", every=2):
        train(model, optimizer)
    assert session.close() == "nothing was logged: the script watches its model itself"
    assert not session.watched
    assert not (tmp_path / "runs").exists()


def test_a_model_that_the_script_does_not_watch_is_not_written_among_those_it_does(
    begin: Begin, tmp_path: Path
) -> None:
    session = begin()
    model, other = nn.Linear(4, 4), net()
    with tbhooks.watch(model, tmp_path / "mine", every=2):
        train(lambda x: other(model(x)), sgd(model, other))
    session.close()
    assert paths(runs.read(tmp_path / "mine")) == ["(root)"]
    assert paths(only_run(tmp_path)) == ["0", "1", "2", "(root)"]


def test_so_is_one_that_does_it_after_its_model_was_found(begin: Begin, tmp_path: Path) -> None:
    session = begin("--kinds", "input")
    model = net()
    optimizer = sgd(model)
    assert session.watched
    with tbhooks.watch(model, tmp_path / "mine", every=2):
        train(model, optimizer)
        session.watched[0][0].flush()
    assert session.close() == "nothing was logged: the script watches its model itself"
    assert not (tmp_path / "runs").exists()


def test_why_there_is_nothing_is_said(begin: Begin, tmp_path: Path) -> None:
    session = begin()
    said = session.close()
    assert said is not None
    assert said.startswith("nothing was logged: the script made no torch optimizer in this process. ")
    assert "tbhooks.watch(model" in said

    session = begin()
    optimizer = sgd(net())
    assert session.close() == "nothing was logged: no model that the optimizer trains was called"

    session = begin()
    pixels = nn.Parameter(torch.zeros(8, 4))
    train(lambda x: x + pixels, torch.optim.SGD([pixels], lr=0.1))
    assert session.close() == "nothing was logged: the optimizer's parameters belong to no module"

    session = begin("--kinds", "weight")
    model = net()
    optimizer = sgd(model)  # noqa: F841  it is to live
    model(batch())
    assert session.close() == "nothing was logged: a model was found, but no step of it ended"
    assert not (tmp_path / "runs").exists()


def test_a_script_that_trains_with_keras_gets_a_message(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    said = begin().close()
    assert said is not None
    assert said.startswith("nothing was logged: the script trains with Keras")


def test_the_end_of_the_run_reports_as_many_findings_as_the_report_and_each_once(begin: Begin, tmp_path: Path) -> None:
    def gets_worse(history: tbhooks.History) -> list[tbhooks.Finding]:
        frame = history[-1]
        more = {"excess": 10.0**frame.step, "others": 2}
        severity: Severity = "error" if frame.step > 5 else "warning"
        moved = frame.sites[frame.step % 3]
        return [
            tbhooks.Finding(frame.step, frame.sites[0], "grows", severity, f"grows to {frame.step}", more),
            tbhooks.Finding(frame.step, moved, "wanders", "warning", f"wanders to {frame.step}", more),
        ]

    session = begin("--every", "1")
    session._options.watch["rules"] = [gets_worse]
    model = net()
    train(model, sgd(model), steps=9)
    printed = session.close()
    found = only_run(tmp_path).findings
    assert [(f.rule, f.severity, f.step) for f in found] == [("grows", "error", 6), ("wanders", "warning", 0)]
    assert "9 of 9 steps logged, 2 findings\n" in printed
    assert [line.split(": ")[0].strip() for line in printed.splitlines()[1:3]] == ["error", "warning"]
    assert list(session.watched[0][0].findings) == found
    document = report_data.document(only_run(tmp_path))
    assert len(document["findings"]) == 2


def test_why_nothing_could_be_written_is_said(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session = begin("--logdir", "file/below")
    model = net()
    train(model, sgd(model))
    assert session.close().startswith("nothing was logged: Destination: NotADirectoryError")


def test_a_model_that_takes_no_hooks_is_reported(begin: Begin) -> None:
    class Scripted(nn.Linear):
        def register_forward_pre_hook(self, *_: object, **__: object) -> NoReturn:
            raise RuntimeError("register_forward_pre_hook is not supported")

    session = begin()
    model = Scripted(4, 1)
    train(model, sgd(model))
    assert session.close() == "nothing was logged: register_forward_pre_hook is not supported"


def test_names_that_are_not_in_the_model_are_reported_and_training_goes_on(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = begin("--include", "encoder.*")
    model = net()
    train(model, sgd(model))
    assert session.close().startswith("nothing was logged: include='encoder.*' matches no module of this model")
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("Sequential is not watched: include='encoder.*'")


@pytest.mark.parametrize("way", ["forward", "closure", "second step"])
def test_an_error_of_ours_is_reported_and_training_does_not_see_it(
    begin: Begin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("of ours")

    monkeypatch.setattr(model_finder, "covering", fails)
    begin()
    model = net()
    optimizer = sgd(model)
    if way == "closure":
        optimizer.step(lambda: model(batch()).mean().item())
    elif way == "second step":
        optimizer.step()
        optimizer.step()
    train(model, optimizer)
    assert [record.message for record in caplog.records] == ["finding the model: LookupError: of ours"]
    assert not torch_module._has_any_global_hook()


def test_an_exception_out_of_something_patched_shows_no_frame_of_ours(begin: Begin) -> None:
    begin()
    with pytest.raises(ValueError, match="empty parameter list") as raised:
        torch.optim.SGD([], lr=0.1)
    assert "session.py" in [entry.path.name for entry in raised.traceback]
    launcher.clean(raised.value)
    shown = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [Path(file).name for file in shown] == [Path(__file__).name, "sgd.py", "optimizer.py"]


# --- Afterwards ----------------------------------------------------------------------------------


def test_everything_that_was_patched_is_put_back(begin: Begin) -> None:
    before = torch.compile, torch.optim.Optimizer.__init__, SummaryWriter.__init__
    session = begin()
    assert torch.compile is not before[0]
    model = net()
    train(model, sgd(model))
    session.close()
    assert (torch.compile, torch.optim.Optimizer.__init__, SummaryWriter.__init__) == before
    assert torch.compile is before[0]
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_is_let_go_of_is_freed(begin: Begin) -> None:
    import weakref

    begin()
    model = net()
    optimizer = sgd(model)
    train(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
