"""The awkward things hooks meet in eager mode: in-place, views, recompute, transforms, failures, leaks."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import tbhooks
from tbhooks.capture.recording.device_buffer import Buffer
from tbhooks.capture.recording.recorder import Recorder
from tests.support import float64_recorder, zoo
from tests.support.loops import forward, mlp, sgd, steps_of, train


def test_in_place_relu_leaves_its_input_and_itself_their_own_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
    frame = watching.latest
    assert frame["0", "activation"].min < 0 == frame["1", "activation"].min
    assert frame["0", "gradient"].zero_fraction > 0 == frame["1", "gradient"].zero_fraction


def test_a_view_modified_in_place_later_is_reported_and_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Flatten(0), nn.ReLU(inplace=True), nn.Unflatten(0, (16, 8)), nn.Linear(8, 1)
    )
    with caplog.at_level(logging.INFO, "tbhooks"), tbhooks.watch(model, every=1) as watching:
        train(model, 3)
    assert "modified in place later" in watching.stats.unseen["gradient/1"]
    assert sum("gradient/1" in record.message for record in caplog.records) == 1


def test_an_output_returned_unchanged_is_read_once_and_shown_for_every_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Dropout(0.0), nn.Sequential(nn.Linear(8, 1)))
    with tbhooks.watch(model, every=1, kinds=("activation", "gradient")) as watching:
        reduced = count_reductions(lambda: train(model, 1))
    assert reduced == 2 * 2  # two linear layers, forward and backward; the other four pass tensors on
    frame = watching.latest
    for one, same in (("0", "1"), ("3.0", "3"), ("3", "(root)")):
        for kind in ("activation", "gradient"):
            assert (frame[one, kind].row == frame[same, kind].row).all()


def count_reductions(run: Any) -> int:
    """The records of sites that were packed: each is one tensor that was read."""
    records: list[int] = []
    original = Recorder.pack

    def counted(self: Recorder, *arguments: Any) -> Any:
        records.append(len({span for _, span in self.calls}))
        return original(self, *arguments)

    Recorder.pack = counted
    try:
        run()
    finally:
        Recorder.pack = original
    return sum(records)


def test_a_module_called_several_times_merges_its_calls() -> None:
    expected = float64_recorder.observe(zoo.ZOO["shared_module"], 1)[0]
    model: list[nn.Module] = []
    watchings: list[tbhooks.Watch] = []

    def before(built: nn.Module) -> None:
        model.append(built)
        watchings.append(tbhooks.watch(built, every=1))

    zoo.train(zoo.ZOO["shared_module"], 1, before=before)
    frame = watchings[0].latest
    assert max(frame.stat("count")) == max(array.size for array in expected.values())
    float64_recorder.assert_frame_equals(frame, expected)


def test_never_called_modules_are_said_once_and_their_parameters_watched(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with caplog.at_level(logging.INFO, "tbhooks"), tbhooks.watch(model, every=1) as watching:
        optimizer = sgd(model)
        for _ in range(3):
            model(torch.randn(2, 3, 8)).sum().backward()
            optimizer.step()
    assert "never called" in watching.stats.unseen["self_attn.out_proj"]
    assert sum("out_proj" in record.message for record in caplog.records) == 1
    assert ("self_attn.out_proj.weight", "weight") in watching.latest
    assert ("self_attn.out_proj", "activation") not in watching.latest


def test_shared_modules_and_tied_weights_go_under_their_first_name() -> None:
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = model.first
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model.first.weight
    model.forward = lambda x: model.tied(model.second(model.first(x))).square().mean()  # type: ignore[method-assign]
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    assert watching.stats.aliases == {"second": "first"}
    assert {site.path for site in watching.latest.sites if site.kind == "weight"} == {
        "first.weight",
        "first.bias",
        "tied.bias",
    }
    assert watching.latest["first", "activation"].count == 2 * 12


def test_outputs_that_need_no_gradient_are_fine() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        with torch.no_grad():
            forward(model)
        with torch.inference_mode():
            model(torch.randn(16, 4))
        watching.step()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with torch.inference_mode():
            model(torch.randn(16, 4))
        watching.step()
    assert watching.stats.errors == 0
    assert watching.history[0]["0", "activation"].count == 2 * 16 * 8
    assert ("0", "gradient") not in watching.latest


def test_backward_twice_and_gradients_of_gradients() -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        loss = forward(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        x = torch.randn(16, 4, requires_grad=True)
        (penalty,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        nodes = zoo.count_graph_nodes(penalty.square().sum())
        penalty.square().sum().backward()
        optimizer.step()
    assert watching.stats.errors == 0
    assert watching.history[0]["2", "gradient"].count == 2 * 16
    (bare,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert zoo.count_graph_nodes(bare.square().sum()) == nodes


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_gives_the_numbers_of_an_unchecked_one(use_reentrant: bool) -> None:
    def run(checkpointed: bool) -> tbhooks.Frame:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))])
        optimizer = sgd(model)
        with tbhooks.watch(model, every=1) as watching:
            hidden = model[0](torch.randn(16, 4))
            out = checkpoint(model[1], hidden, use_reentrant=use_reentrant) if checkpointed else model[1](hidden)
            out.square().mean().backward()
            optimizer.step()
        return watching.latest

    plain, checked = run(False), run(True)
    assert set(plain.sites) == set(checked.sites)
    for site in plain.sites:
        assert (plain[site.name, site.kind].row == checked[site.name, site.kind].row).all()


def test_a_failing_hook_never_reaches_training_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such luck")

    model = mlp()
    with caplog.at_level(logging.ERROR, "tbhooks"), tbhooks.watch(model, every=1) as watching:
        monkeypatch.setattr(Buffer, "take", broken)
        train(model, 3)
        monkeypatch.undo()
        train(model, 1)
    assert watching.stats.errors > 0
    assert sum("hook on 0: ValueError" in record.message for record in caplog.records) == 1
    assert any("no such luck" in message for message in watching.stats.messages)


def failing_on(layer: nn.Module, steps: set[int], now: list[int]) -> Any:
    """Records as ever, but has no memory for the outputs of one layer on some steps."""
    original = Recorder.record

    def record(self: Recorder, site: int, *arguments: Any) -> Any:
        if now[0] in steps and self.sites[site] == tbhooks.Site("0", "activation"):
            raise MemoryError("none left")
        return original(self, site, *arguments)

    return record


@pytest.mark.parametrize(("fails", "seen"), [({1}, {0, 2, 3, 4, 5, 6}), ({1, 2, 4, 5}, {0, 3, 6}), ({1, 2, 3}, {0})])
def test_a_hook_that_failed_is_tried_again_and_given_up_after_three_logged_steps(
    monkeypatch: pytest.MonkeyPatch, fails: set[int], seen: set[int]
) -> None:
    model, now = mlp(), [0]
    optimizer = sgd(model)
    monkeypatch.setattr(Recorder, "record", failing_on(model[0], fails, now))
    reasons = []
    with tbhooks.watch(model, every=1) as watching:
        for step in range(7):
            now[0] = step
            train(model, 1, optimizer)
            watching.flush()
            reasons.append(watching.stats.unseen.get("0", ""))
    assert {frame.step for frame in watching.history if ("0", "activation") in frame} == seen
    assert all(("2", "activation") in frame for frame in watching.history)
    for step in range(7):
        assert ("MemoryError: none left" in reasons[step]) == (step in fails or (len(seen) == 1 and step > 0))
    assert not any("never called" in reason for reason in reasons)
    assert ("given up" in reasons[-1]) == (len(seen) == 1)
    assert watching.stats.errors == len(fails)


@pytest.mark.parametrize(("fails", "seen"), [({1}, {0, 2, 3, 4, 5, 6}), ({1, 2, 4, 5}, {0, 3, 6}), ({1, 2, 3}, {0})])
def test_an_operation_that_could_not_be_read_is_read_again_and_given_up_after_three_logged_steps(
    monkeypatch: pytest.MonkeyPatch, fails: set[int], seen: set[int]
) -> None:
    original, now = Recorder.record, [0]

    def record(self: Recorder, site: int, *arguments: Any) -> Any:
        if now[0] in fails and self.sites[site] == tbhooks.Site("(root):relu", "functional"):
            raise MemoryError("none left")
        return original(self, site, *arguments)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.tanh(self.layer(x)))

    monkeypatch.setattr(Recorder, "record", record)
    model = Net()
    optimizer = sgd(model)
    reasons = []
    with tbhooks.watch(model, every=1, kinds=("functional",)) as watching:
        for step in range(7):
            now[0] = step
            train(model, 1, optimizer)
            watching.flush()
            reasons.append(watching.stats.unseen.get("functional/(root):relu", ""))
    assert {frame.step for frame in watching.history if ("(root):relu", "functional") in frame} == seen
    assert all(("(root):tanh", "functional") in frame for frame in watching.history)
    assert all("MemoryError: none left" in reasons[step] for step in fails)
    assert ("given up" in reasons[-1]) == (len(seen) == 1)
    assert bool(reasons[-1]) == (len(seen) == 1)
    assert watching.stats.errors == len(fails)


def test_a_gradient_that_could_not_be_read_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Recorder.record

    def record(self: Recorder, site: int, *arguments: Any) -> Any:
        if self.sites[site] == tbhooks.Site("0", "gradient"):
            raise MemoryError("none left")
        return original(self, site, *arguments)

    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "record", record)
            train(model, 1)
            watching.flush()
            assert "MemoryError: none left" in watching.stats.unseen["gradient/0"]
        train(model, 1)
    assert "gradient/0" not in watching.stats.unseen
    assert ("0", "gradient") in watching.latest


def test_an_exception_in_forward_leaves_a_working_watch() -> None:
    class Sometimes(nn.Module):
        bad = True

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                raise KeyboardInterrupt
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Sometimes(), nn.Linear(8, 1))
    with tbhooks.watch(model, every=1) as watching:
        with pytest.raises(KeyboardInterrupt):
            forward(model)
        model[1].bad = False
        train(model, 2)
    assert steps_of(watching.history) == [0, 1]
    assert watching.stats.errors == 0


def test_integers_bools_and_odd_objects_are_skipped_and_said() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, x.long(), x > 0

    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return object()

    model = nn.ModuleList([nn.Linear(4, 4), Odd(), Opaque()])
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for part in (hidden := model[0](torch.randn(2, 4)), hidden):
            model[1](part)
        model[2](hidden)
        watching.step()
    unseen = watching.stats.unseen
    assert "int64" in unseen["1[1]"]
    assert "bool" in unseen["1[2]"]
    assert "object" in unseen["2"]
    assert ("1[0]", "activation") in watching.latest


def test_tensors_without_memory_of_their_own_do_no_harm() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return TwoTensor(x.detach(), x.detach())

    model = nn.Sequential(nn.Linear(4, 4), Wraps())
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(torch.randn(2, 4))
        watching.step()
    assert ("0", "activation") in watching.latest


def test_zeros_that_autograd_makes_without_memory_are_read_as_zeros() -> None:
    class Signs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sgn(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Signs(), nn.Linear(4, 1))
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
    assert watching.latest["0", "gradient"].zero_fraction == 1.0


def test_parameters_without_data_cost_nobody_else_anything() -> None:
    model = mlp()
    model.later = nn.Linear(3, 3, device="meta")
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        train(model, 3, optimizer)
    assert steps_of(watching.history) == [0, 1, 2]
    assert "no data" in watching.stats.unseen["weight/later.weight"]
    assert watching.stats.errors == 0


def test_a_default_device_of_the_users_is_not_ours() -> None:
    model = mlp()
    x = torch.randn(16, 4)
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching, torch.device("meta"):
        model(x).sum().backward()
        optimizer.step()
    assert watching.latest["0", "activation"].count == 16 * 8


def test_scripted_modules_are_skipped_and_said() -> None:
    model = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.Linear(8, 1)))
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
    assert "scripted" in watching.stats.unseen["1"]
    assert ("0", "activation") in watching.latest
    assert ("1.weight", "update") in watching.latest


def test_modules_that_run_in_several_threads_do_not_mix() -> None:
    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(4) as pool:
                return torch.stack(list(pool.map(lambda part: part(x).sum(), self.parts))).sum()

    model = Threads()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for _ in range(5):
            model(torch.randn(256, 256)).backward()
            watching.step()
            counts = [watching.latest[f"parts.{i}", "activation"].count for i in range(4)]
            assert counts == [256 * 256] * 4


def test_a_step_tried_twice_counts_its_gradients_once() -> None:
    model = mlp()
    optimizer = sgd(model)
    tries: list[int] = []

    def fails_once(*_: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")

    optimizer.register_step_pre_hook(fails_once)
    with tbhooks.watch(model, every=1) as watching:
        forward(model).backward()
        with pytest.raises(ValueError, match="not yet"):
            optimizer.step()
        optimizer.step()
    assert watching.latest["0.weight", "weight_gradient"].count == 4 * 8


def test_conjugate_and_negative_views_are_read_as_they_mean() -> None:
    model = nn.Identity()
    x = torch.complex(torch.ones(3), torch.full((3,), 2.0))
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(x.conj().imag)
        watching.step()
    assert watching.latest["(root)", "activation"].mean == -2.0


def test_modules_added_replaced_and_frozen_mid_run_are_found() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 1)
        model.add_module("extra", nn.Linear(1, 1))
        model[0] = nn.Linear(4, 8)
        train(model, 2)
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train(model, 2, optimizer)
        model[2].requires_grad_(True)
        train(model, 2)
    frames = list(watching.history)
    assert ("extra", "activation") not in frames[0]
    assert ("extra", "activation") in frames[2]
    assert frames[2]["0.weight", "update"].norm > 0
    assert ("2.weight", "update") not in frames[4]
    assert ("2.weight", "weight") in frames[4]
    assert frames[6]["2.weight", "update"].norm > 0
    assert watching.stats.errors == 0


def test_a_submodule_can_be_watched_alone() -> None:
    model = mlp()
    with tbhooks.watch(model[0], every=1) as watching:
        train(model, 2)
    assert {site.name for site in watching.latest.sites} == {"(root)", "weight", "bias"}
    assert steps_of(watching.history) == [0, 1]


def test_include_and_exclude_choose_modules_and_their_parameters() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, include=["0", nn.ReLU]) as watching:
        train(model, 1)
    assert {site.name for site in watching.latest.sites} == {"0", "1", "0.weight", "0.bias"}
    with tbhooks.watch(model, every=1, exclude=lambda path, module: isinstance(module, nn.Linear)) as watching:
        train(model, 1)
    assert {site.name for site in watching.latest.sites} == {"1", "(root)"}


def test_sites_are_in_execution_order() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, kinds=("activation", "gradient")) as watching:
        train(model, 1)
    assert [site.name for site in watching.latest.sites] == ["0", "1", "2", "(root)", "2", "(root)", "1", "0"]


def test_a_module_that_returns_its_parameter_collects_no_hooks() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.p

    model = Returns()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(100):
            model().sum().backward()
            optimizer.step()
            assert len(model.p._backward_hooks or ()) <= 1
    assert not model.p._backward_hooks
    assert {frame["(root)", "gradient"].count for frame in watching.history} == {3}


def test_nothing_grows_over_hundreds_of_steps(only_new_objects: None) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        train(model, 200, optimizer)
        watching.flush()
        gc.collect()
        before = live_tensors(), zoo.hook_count(model)
        train(model, 200, optimizer)
        watching.flush()
        gc.collect()
        after = live_tensors(), zoo.hook_count(model)
    assert after == before
    assert len(watching.history) == watching.stats.steps == 400


def test_forwards_without_backward_leak_nothing(only_new_objects: None) -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for _ in range(100):
            forward(model)
        watching.step()
        counts = []
        for _ in range(3):
            for _ in range(100):
                forward(model)
            watching.step()
            watching.flush()
            counts.append(live_tensors())
    assert counts[0] == counts[1] == counts[2]


def test_a_step_that_never_ends_is_bounded_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tbhooks.capture.recording.device_buffer.MOST_BYTES", 1 << 20)
    model = mlp()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        for _ in range(500):
            forward(model)
        watching.step()
        forward(model)
        watching.step()
    assert any("more calls" in message for message in watching.stats.messages)
    assert watching.history[0]["0", "activation"].count < 500 * 16 * 8
    assert watching.latest["0", "activation"].count == 16 * 8


@pytest.fixture
def only_new_objects() -> None:
    """What earlier tests have left may go at any time, and is not counted."""
    gc.collect()
    gc.freeze()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_no_activation_outlives_its_step() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x * 2
            kept.append(weakref.ref(out))
            return out

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Spy(), nn.Linear(8, 1))
    with tbhooks.watch(model, every=1):
        optimizer = sgd(model)
        loss = forward(model)
        loss.backward()
        del loss
        assert kept[0]() is None
        optimizer.step()


def test_compiling_exporting_tracing_and_transforms_are_left_alone() -> None:
    model = mlp()
    x = torch.randn(2, 4)
    plain = torch.export.export(model, (x,)).graph
    with tbhooks.watch(model, every=1, step="manual") as watching:
        assert len(torch.export.export(model, (x,)).graph.nodes) == len(plain.nodes)
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), model(x))
        torch.func.vmap(model)(torch.randn(3, 2, 4))
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))
        with watching.paused():
            torch.jit.script(model)
        watching.step()
    assert watching.stats.errors == 0


def test_a_model_compiled_before_the_watch_is_read_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    forward(compiled).backward()
    with caplog.at_level(logging.WARNING, "tbhooks"), tbhooks.watch(compiled, every=1) as watching:
        for _ in range(3):
            forward(compiled).backward()
            optimizer.step()
    assert not [record for record in caplog.records if record.name == "tbhooks"]
    assert ("0", "activation") in watching.latest
    assert ("0.weight", "weight_gradient") in watching.latest
    assert watching.stats.errors == 0


def test_autocast_leaves_statistics_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    seen: list[Tensor] = []
    with tbhooks.watch(model, every=1, step="manual") as watching, torch.autocast("cpu", torch.bfloat16):
        seen.append(model(1e3 + torch.randn(256, 64)))
        seen[0].sum().backward()
        watching.step()
    assert seen[0].dtype is torch.bfloat16
    array = seen[0].detach().double().numpy()
    assert watching.latest["(root)", "activation"].std == pytest.approx(array.std(), rel=1e-6)
    assert watching.latest["(root)", "activation"].mean == pytest.approx(array.mean(), rel=1e-6)


def test_hooks_of_a_kept_graph_stay_silent_in_later_steps() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1, step="manual") as watching:
        kept = forward(model)
        kept.backward(retain_graph=True)
        watching.step()
        forward(model).backward()
        kept.backward()
        watching.step()
    assert watching.latest["0", "gradient"].count == 16 * 8


def test_hooks_that_came_with_a_loaded_model_stay() -> None:
    """Torch gives out numbers of hooks from 0 in every process, whatever numbers a loaded model holds."""
    model, calls = mlp(), []
    following = RemovableHandle(OrderedDict()).id + 1
    theirs = {following + i: lambda *_: calls.append(1) for i in range(20)}
    model[0]._forward_hooks.update(theirs)
    with tbhooks.watch(model, every=1):
        train(model, 1)
    assert calls == [1] * 20
    assert dict(model[0]._forward_hooks) == theirs


def test_batched_gradients_are_reported_and_are_no_error() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with tbhooks.watch(model, every=1) as watching:
        output = model(torch.randn(2, 4))
        torch.autograd.grad(output, list(model.parameters()), torch.randn(5, 2, 3), is_grads_batched=True)
    assert watching.stats.errors == 0, watching.stats.messages
    assert any("holds no data" in why for why in watching.stats.unseen.values())
