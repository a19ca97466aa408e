"""One look at a model: right numbers, and not a bit of it changed, whatever the model does and whoever looks on."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.api.peek import peek
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame
from tbhooks.data.peek_result import Output, Peeked
from tests.support import fake_device, float64_recorder, reference, zoo
from tests.support.model_state import peek_unseen, state
from tests.support.script_host import ScriptHost

ROOT = Path(__file__).parents[3]


class Whole(nn.Module):
    """A case of the zoo with its loss inside: what goes in is the batch."""

    def __init__(self, case: zoo.Case) -> None:
        super().__init__()
        self.model = case.build()
        self.loss = case.loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def whole(name: str) -> zoo.Case:
    case = zoo.ZOO[name]
    return replace(case, build=lambda: Whole(case), loss=lambda model, batch: model(*batch))


def same(value: Any) -> Any:
    return value


def square(output: Tensor) -> Tensor:
    return output.square().mean()


# --- Every model of the zoo -----------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_model_of_the_zoo_shows_the_numbers_of_a_training_step(name: str) -> None:
    case = whole(name)
    (step,) = float64_recorder.observe(case, steps=1)
    torch.manual_seed(0)
    model = case.build()
    batch = case.batch()
    frame = peek_unseen(model, *batch, loss=same)
    float64_recorder.assert_frame_equals(frame, {key: array for key, array in step.items() if key[1] != "update"})
    assert not [note for note in frame.notes if "Error" in note]
    assert set(frame.outputs) >= {site.name for site in frame.sites if site.kind == "activation"}
    forward = peek_unseen(model, *batch)
    float64_recorder.assert_frame_equals(
        forward, {key: x for key, x in step.items() if key[1] in ("activation", "weight")}
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "checkpointed", "checkpointed_reentrant", "sparse_embedding", "gpt2"])
def test_a_training_with_a_peek_in_every_step_is_the_same_to_the_last_bit(name: str) -> None:
    """Between backward and the optimizer, where gradients are there to be spoilt."""
    case = whole(name)

    def peeked(model: nn.Module, batch: Any) -> Tensor:
        if any(parameter.grad is not None for parameter in model.parameters()):
            peek(model, *batch, loss=same)
        loss = model(*batch)
        peek(model, *batch, loss=same)
        return loss

    assert zoo.train(replace(case, loss=peeked), 3) == zoo.train(case, 3)


# --- The numbers ----------------------------------------------------------------------------------


def test_numbers_equal_numpy_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    x = torch.randn(7, 3)
    frame = peek(model, x, loss=square)
    weight, bias, given = (reference.to_numpy(t) for t in (model.weight, model.bias, x))
    output = given @ weight.T + bias
    gradient = 2 * output / output.size
    expected = {
        ("(root)", "activation"): output, ("(root)", "gradient"): gradient, ("weight", "weight"): weight,
        ("weight", "weight_gradient"): gradient.T @ given, ("bias", "weight_gradient"): gradient.sum(0),
    }  # fmt: skip
    for key, array in expected.items():
        for stat in ("mean", "std", "min", "max", "norm"):
            assert getattr(frame[key], stat) == pytest.approx(reference.stats(array)[stat], rel=1e-5, abs=1e-7)
    assert frame.scalars["train/loss"] == pytest.approx(np.square(output).mean(), rel=1e-6)
    assert frame.step == 0


def test_outputs_tell_type_shape_and_dtype() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2).double())
    model[1].register_forward_hook(lambda module, args, output: output.double())
    frame = peek(model, torch.randn(5, 1, 4, 4))
    assert frame.outputs["0"] == Output("Conv2d", (5, 4, 2, 2), "float32")
    assert frame.outputs["2"] == Output("Linear", (5, 2), "float64")
    assert frame.outputs["(root)"] == Output("Sequential", (5, 2), "float64")


def test_all_calls_of_a_module_are_in_its_numbers() -> None:
    layer = nn.Linear(4, 4)
    frame = peek_unseen(nn.Sequential(layer, layer, layer), torch.randn(2, 4), loss="sum", keep=nn.Linear)
    assert frame["0", "activation"].count == frame["0", "gradient"].count == 3 * 8
    assert list(frame.kept) == ["0"]
    assert frame.notes == ("only the last call was kept: 0 (3 calls)",)


def test_sum_adds_up_every_floating_tensor_of_the_output() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Any:
            return {"a": self.scale * x, "more": (x.argmax(), [(3 * self.scale * x).half()]), "none": None}

    frame = peek_unseen(Several(), torch.ones(4), loss="sum")
    assert frame["scale", "weight_gradient"].mean == 4 * (1 + 3)
    assert frame.scalars["train/loss"] == 4 * 2 + 4 * 6
    assert frame.outputs["(root)[more][0]"].dtype == "int64"


def test_the_loss_gets_the_very_thing_the_model_returned() -> None:
    returned: list[Any] = []
    got: list[Any] = []

    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

        def forward(self, x: Tensor) -> Any:
            returned.append(layer(x).sum() for layer in self.layers)
            return returned[0]

    def loss(output: Any) -> Tensor:
        got.append(output)
        return sum(output)

    frame = peek_unseen(Lazily(), torch.ones(2, 3), loss=loss)
    assert got[0] is returned[0]
    assert frame["layers.1", "gradient"].mean == 1  # a generator: what it runs, it runs in the loss
    assert [site.path for site in frame.sites if site.kind == "weight_gradient"][-1] == "layers.1.bias"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_as_they_are(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(dtype)
    frame = peek_unseen(model, torch.randn(4, 8, dtype=dtype), loss=square)
    assert frame.outputs["0"].dtype == str(dtype).removeprefix("torch.")
    assert frame["0", "gradient"].norm > 0


def test_a_sum_in_half_precision_does_not_overflow() -> None:
    x = torch.full((4,), 60000.0, dtype=torch.float16, requires_grad=True)
    frame = peek(nn.Identity(), x, loss="sum")
    assert frame.scalars["train/loss"] == 240000
    assert frame["(root)", "gradient"].mean == 1


# --- Left as it was -------------------------------------------------------------------------------


class Restless(nn.Module):
    """A forward that changes everything it can reach, but the numbers of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("written", torch.tensor([float("nan"), 1.0]))
        self.register_buffer("sign", torch.zeros(2))
        self.register_buffer("moved", torch.ones(3))
        self.register_buffer("written_unseen", torch.ones(3))
        self.register_buffer("spread", torch.ones(1).expand(5))
        self.register_buffer("nothing", None)
        self.state, self.calls = torch.ones(4), 0
        self.seen: list[Tensor] = []
        self.table: dict[str, Any] = {"old": 1}
        self.names = {"old"}
        self.generator = torch.Generator().manual_seed(7)
        self.used_once = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.layer(x)))
        self.replaced = x.detach().sum(0)
        self.written.copy_(torch.tensor([0.0, float("nan")]))
        self.sign.neg_()
        self.moved.data = torch.zeros(9)
        self.written_unseen.data.zero_()
        self.nothing = torch.ones(1)
        self.state = x.mean(0)
        self.calls += 1
        self.seen.append(x)
        self.table["new"] = x
        self.names.add("new")
        self.fresh = x
        self.later = nn.Linear(2, 2)
        del self.used_once
        self.training = not self.training
        self.layer.weight.requires_grad_(False)
        self.norm.weight = nn.Parameter(torch.ones(4))
        self.drop.register_forward_hook(lambda *_: None)
        noise = torch.randn(4, generator=self.generator) + random.random() + np.random.rand() + torch.rand(4)
        return x + noise.float() + self.state


@pytest.mark.parametrize("loss", [None, "sum"])
@pytest.mark.parametrize("training", [True, False])
def test_whatever_a_forward_changes_is_put_back(training: bool, loss: Any) -> None:
    model = Restless().train(training)
    model.norm.eval()
    model.layer.weight.grad = torch.full((4, 4), 3.0)
    kept = (model.seen, dict(model.table), set(model.names), model.generator.get_state())
    peek_unseen(model, torch.randn(8, 4), loss=loss)
    assert (model.seen, model.table, model.names) == (kept[0], {"old": 1}, {"old"})
    assert kept[0] == []
    assert torch.equal(model.generator.get_state(), kept[3])
    assert list(dict(model.named_children())) == ["layer", "norm", "drop"]


@pytest.mark.parametrize("where", ["forward", "loss", "deep"])
def test_an_exception_comes_through_unchanged_and_the_model_is_as_it_was(where: str) -> None:
    problem = RuntimeError("mine")
    model = nn.Sequential(Restless(), nn.Linear(4, 2))

    def fail(*_: Any) -> Any:
        raise problem

    if where != "loss":
        (model[1] if where == "deep" else model).register_forward_hook(fail)
    x = torch.randn(8, 4, requires_grad=True)
    watching = tbhooks.watch(model, every=1)
    before = state(model, x)
    with pytest.raises(RuntimeError) as caught:
        peek(model, x, loss=fail)
    assert caught.value is problem
    after = state(model, x)
    del before["hooks"], after["hooks"]  # those of the watch are on again, in new places
    assert before == after
    watching.close()
    assert zoo.hook_count(model) == (where != "loss")


def test_an_exception_leaves_no_hook_on_a_parameter_that_was_an_output() -> None:
    model = Gain()
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        peek(model, loss=lambda output: 1 / 0)
    assert state(model) == before


def test_a_graph_from_before_can_still_be_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    for mode in (True, False):
        x = torch.randn(8, 4)
        twice = []
        for look in (False, True):
            model.train(mode).zero_grad()
            loss = model(x).sum()
            if look:
                peek_unseen(model, x, loss="sum")
            loss.backward()
            twice.append([zoo.raw(p.grad) for p in model.parameters() if p.grad is not None])
        assert twice[0] == twice[1]


def test_a_state_that_carries_its_graph_along_can_still_be_used() -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.h = nn.Linear(3, 3), torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            self.h = torch.tanh(self.cell(x + self.h))
            return self.h

    model = Carries()
    model(torch.ones(3))
    earlier = model.h
    frame = peek_unseen(model, torch.ones(3), loss="sum")
    assert model.h is earlier
    model(torch.ones(3)).sum().backward()
    assert frame["cell.weight", "weight_gradient"].norm == pytest.approx(model.cell.weight.grad.norm().item())


class Calls(TorchDispatchMode):
    """Keeps which operations ran, each with the tensor it was called on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any]] = []

    def of(self, operation: Any) -> list[Tensor]:
        return [given for function, given in self.made if function is operation]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((function, args[0] if args else None))
        return function(*args, **(kwargs or {}))


def test_buffers_are_copied_once_and_parameters_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    with Calls() as calls:
        peek(model, torch.randn(2, 100))
    assert sum(tensor.nbytes for tensor in calls.of(torch.ops.aten.clone.default)) == sum(
        buffer.nbytes for buffer in model.buffers()
    )


def test_parameters_the_forward_itself_changes_are_reported() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.plain = nn.Linear(2, 2), torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner.weight.clamp_(max=0.1)
                self.plain += 1
                x += 1
            return self.inner(x)

    model = Writes()
    frame = peek(model, torch.ones(1, 2))
    assert frame.notes == ("changed in place by the pass, and not restored: inner.weight, input",)
    assert model.plain.tolist() == [0.0, 0.0], "tensors that are attributes are put back as buffers are"
    assert model.plain._version == 0


def test_a_forward_that_switches_gradients_off_does_so_for_itself_alone() -> None:
    class Switches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(not torch.is_grad_enabled())
            return x

    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            peek_unseen(Switches(), torch.ones(2))


@pytest.mark.parametrize("wrap", [
    nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm,
    pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
])  # fmt: skip
def test_normalised_weights_stay_as_they_are(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU())
    frame = peek_unseen(model, torch.randn(3, 4), loss="sum")
    assert frame.notes == ()


# --- Gradients of its own -------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: Checkpointed(False), lambda: Checkpointed(True)])
def test_an_optimizer_that_steps_in_backward_does_not_step(make: Callable[[], nn.Module]) -> None:
    model = make()
    stepped = []

    def step(parameter: Tensor) -> None:
        stepped.append(parameter)
        with torch.no_grad():
            parameter -= parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    frame = peek_unseen(model, torch.randn(3, 4), loss=square)
    assert stepped == []
    assert {site.kind for site in frame.sites} == {"activation", "gradient", "weight", "weight_gradient"}
    model(torch.randn(3, 4)).sum().backward()
    assert len(stepped) == len(list(model.parameters()))


def test_hooks_on_the_nodes_that_gather_gradients_are_not_called() -> None:
    model = nn.Linear(4, 4)
    called = []
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    for node in nodes:  # where DDP and FSDP wait for gradients
        node.register_hook(lambda *_: called.append(1))
    peek_unseen(model, torch.randn(3, 4), loss="sum")
    assert called == []


def test_an_optimizer_inside_backward_that_cannot_be_kept_from_stepping_is_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        if reentrant:
            before = state(model)
            with pytest.raises(ArgumentError, match="use_reentrant=False"):
                peek(model, torch.ones(3, 4), loss="sum")
            assert state(model) == before
        else:
            peek_unseen(model, torch.randn(3, 4), loss="sum")


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: Checkpointed(True)])
def test_inputs_and_other_leaves_keep_their_gradients(make: Callable[[], nn.Module]) -> None:
    model, x, scale = make(), torch.randn(3, 4, requires_grad=True), torch.ones((), requires_grad=True)
    x.grad = torch.ones(3, 4)
    called = []
    x.register_hook(lambda _: called.append(1))
    frame = peek_unseen(model, x, loss=lambda output: (output * scale).sum(), watch_tensors=(x, scale))
    assert called == []
    assert frame["(root)", "gradient"].mean == 1


def test_what_lies_before_an_input_is_not_reached() -> None:
    before, model = nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = before(torch.randn(3, 4))
    x.retain_grad()
    bits = zoo.raw(x)
    peek_unseen(model, x, loss="sum")
    assert (x.grad, before.weight.grad, zoo.raw(x)) == (None, None, bits)
    model(x.clone()).sum().backward()
    assert before.weight.grad is not None


def test_a_parameter_that_is_given_as_an_input_too_is_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x * self.weight + w

    model = Twice()
    assert peek_unseen(model, torch.ones(2), model.weight, loss="sum")["weight", "weight_gradient"].mean == 2


def test_frozen_models_are_looked_at_without_a_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).requires_grad_(False)
    frame = peek_unseen(model, torch.ones(2, 3), loss="sum")
    assert frame.notes == ("the loss does not require a gradient: there was no backward pass",)
    assert {site.kind for site in frame.sites} == {"activation", "weight"}
    with_gradient = peek_unseen(model, torch.ones(2, 3, requires_grad=True), loss="sum")
    assert ("0", "gradient") in with_gradient
    assert ("0.weight", "weight_gradient") not in with_gradient


def test_parameters_that_no_gradient_reaches_are_named() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    frame = peek(Forgets(), torch.ones(2, 3), loss="sum")
    assert "no gradient reached unused.weight, unused.bias: the loss does not depend on it" in frame.notes
    assert any(note.startswith("skipped: unused: forward() never called") for note in frame.notes)


# --- Whoever calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_works_in_every_mode_of_autograd(mode: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(6, 4)
    expected = peek(model, x, loss=square)
    with mode():
        frame = peek_unseen(model, torch.clone(x), loss=square, keep="*")
        forward = peek_unseen(model, torch.clone(x), keep="*")
    assert np.array_equal(frame.values, expected.values)
    for kept in (*frame.kept.values(), *forward.kept.values()):
        assert not kept.requires_grad
        assert not kept.is_inference()


def test_autocast_around_it_counts_and_is_left_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    results = []
    for look in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).sum()
            if look:
                assert peek_unseen(model, x, loss=lambda y: y.float().sum()).outputs["(root)"].dtype == "bfloat16"
            loss = loss + model(x).sum()
        loss.backward()
        results.append(zoo.raw(model.weight.grad))
    assert results[0] == results[1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)  # has cast the weights, without a graph
        assert peek_unseen(model, x, loss="sum")["weight", "weight_gradient"].norm > 0


def test_weights_cast_by_a_peek_are_not_those_of_later_passes() -> None:
    model, x, casts = nn.Linear(4, 4), torch.randn(2, 4), []
    for look in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            if look:
                peek(model, x, loss="sum")
            with Calls() as calls:
                model(x)
        casts.append(len(calls.of(torch.ops.aten._to_copy.default)))
    assert casts == [3, 3]


class Written(nn.Module):
    """By a user: torch's own modules are not compiled on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("what", ["whole", "in place", "part"])
def test_compiled_models_are_looked_at_as_they_were_written(what: str) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: nn.Module = Written()
    if what == "whole":
        model = torch.compile(model, backend=backend)
    elif what == "in place":
        model.compile(backend=backend)
    else:
        model = nn.Sequential(torch.compile(model, backend=backend))
    x = torch.randn(3, 4)
    expected = zoo.raw(model(x))
    assert len(graphs) == 1
    frame = peek_unseen(model, x, loss="sum")
    gradients = [site.path.removeprefix("0.") for site in frame.sites if site.kind == "gradient"]
    assert [path for path in gradients if path not in ("0", "(root)")] == ["last", "first"]
    assert zoo.raw(model(x)) == expected
    assert len(graphs) == 1
    torch.compiler.reset()


def test_data_parallel_models_are_looked_at_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would move the model to the device that other tests simulate.
    monkeypatch.setattr(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wrapper, called = nn.DataParallel(model), []
    wrapper.register_forward_hook(lambda *_: called.append(1))
    frame = peek_unseen(wrapper, torch.randn(3, 4), loss="sum")
    assert ("0.weight", "weight_gradient") in frame
    assert called == []


WITH_DDP = """
import os, torch, torch.distributed as dist
from torch import nn
from tests.support import zoo
from tests.support.model_state import peek_unseen

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
results = []
for look in (False, True):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(5, 4)
        loss = model(x).square().sum()
        if look:
            assert ("0", "gradient") in peek_unseen(model, x, loss="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    results.append([zoo.raw(tensor) for tensor in model.state_dict().values()])
print(results[0] == results[1], flush=True)
os._exit(0)  # gloo's threads may wait for the interpreter, which waits for them
"""


def test_ddp_is_not_affected_and_trains_on(scripts: ScriptHost) -> None:
    done = scripts.run("-c", WITH_DDP, cwd=ROOT, timeout=100)
    assert done.stdout.endswith("True\n"), done.stderr  # Gloo of torch 2.10 prints a line before it


def test_a_model_on_a_device_is_read_there_and_kept_on_the_host() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(6, 4)
    expected = peek(model, x, loss=square)
    frame = peek(fake_device.to_device(model), fake_device.put(x), loss=square, keep="0")
    assert frame.kept["0"].device.type == "cpu"
    assert np.allclose(frame.values, expected.values, equal_nan=True)
    assert [site.name for site in frame.sites] == [site.name for site in expected.sites]


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mean"}, "loss='mean' is unknown: choose from 'sum'"),
        ({"loss": "smu"}, "did you mean 'sum'"),
        ({"loss": torch.ones(())}, "loss must be a function of the model's output"),
        ({"loss": nn.MSELoss}, "loss must be a function of the model's output"),
        ({"loss": lambda y: y}, r"got a torch.float32 tensor of shape \(2, 3\)"),
        ({"loss": lambda y: 1.5}, "a floating-point tensor with one element, got 1.5"),
        ({"keep": "encodr"}, "keep='encodr' matches no module of this model: did you mean 'encoder'"),
        ({"keep": 3}, "keep must be a glob"),
        ({"keep": []}, "keep must not be an empty list"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(3, 3))
    before = state(model)
    with pytest.raises(ArgumentError, match=message):
        peek(model, torch.ones(2, 3), **options)
    assert state(model) == before


def test_models_without_numbers_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"0\.weight has no shape yet: call the model once"):
        peek(nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 2))
    with torch.device("meta"), pytest.raises(ArgumentError, match=r"0\.weight is on the meta device"):
        peek(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="model must be a torch"):
        peek(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match='loss="sum" needs a floating-point tensor in the output, a list'):
        peek(_Empty(), loss="sum")


class _Empty(nn.Module):
    def forward(self) -> list[Tensor]:
        return []


def test_a_model_of_nothing_makes_an_empty_frame() -> None:
    frame = peek(_Empty())
    assert (len(frame.sites), frame.findings) == (0, ())


# --- What is found --------------------------------------------------------------------------------


def rules_of(frame: Frame) -> dict[str, str]:
    return {finding.rule: finding.site.path for finding in frame.findings if finding.site is not None}


def test_what_one_pass_can_show_is_found_in_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dead = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(dead[0].bias, -20.0)
    assert rules_of(peek(dead, x, loss=square))["dead_units"] == "1"
    assert rules_of(peek(dead, x))["dead_units"] == "1"
    saturated = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    saturated[0].weight.data *= 100
    assert rules_of(peek(saturated, x, loss=square))["saturated"] == "1"
    broken = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    broken[1].weight.data[0, 0] = float("nan")
    assert rules_of(peek(broken, x))["non_finite"] == "1"
    assert "exploding_activation" in rules_of(peek(_blown_up(), x, loss=square))
    assert rules_of(peek(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), x, loss=square)) == {}


def _blown_up() -> nn.Module:
    layers = [nn.Linear(8, 8) for _ in range(8)]
    for layer in layers:
        layer.weight.data *= 20
    return nn.Sequential(*layers)


# --- Kept tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("encoder.*", ["encoder.0", "encoder.1"]),
        (nn.Linear, ["encoder.0", "head"]),
        (lambda path, module: path == "head", ["head"]),
        (["head", nn.ReLU], ["encoder.1", "head"]),
        ("(root)", ["(root)[a]", "(root)[b]"]),
    ],
)
def test_outputs_are_kept_by_pattern(keep: Any, names: list[str]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            x = self.encoder(x)
            return {"a": self.head(x), "b": x.argmax()}

    model, x = Model(), torch.randn(3, 4)
    frame = peek_unseen(model, x, keep=keep, loss="sum")
    assert list(frame.kept) == names
    before_relu = F.linear(x, model.encoder[0].weight, model.encoder[0].bias)
    expected = {"encoder.0": before_relu, "encoder.1": before_relu.relu(), "head": model.head(before_relu.relu())}
    for name, tensor in frame.kept.items():
        assert not tensor.requires_grad
        if name in expected:
            assert torch.equal(tensor, expected[name])


def test_what_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tbhooks.api.peek"], "MOST_KEPT_BYTES", 3 << 20)
    model = nn.Sequential(nn.Linear(1, 1 << 19), nn.Identity(), nn.Linear(1 << 19, 4))
    frame = peek(model, torch.ones(1, 1), keep=["?"])
    assert list(frame.kept) == ["0", "2"]
    assert frame.notes == ("not kept, because keep= is limited to 3 MB: 1 (2.0 MB)",)


def test_a_pattern_that_only_fits_what_is_never_called_is_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.spare = nn.ModuleList()
    model.forward = model[0].forward  # type: ignore[method-assign]
    frame = peek(model, torch.ones(1, 2), keep="spare")
    assert "nothing was kept: no call of spare returned a tensor" in frame.notes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_another_call(use_reentrant: bool) -> None:
    frame = peek_unseen(Checkpointed(use_reentrant), torch.randn(3, 4), loss="sum", keep="second")
    assert (list(frame.kept), frame.notes) == (["second"], ())


# --- The frame ------------------------------------------------------------------------------------


def test_the_frame_is_a_frame_and_can_be_stored() -> None:
    frame = peek(nn.Linear(2, 2), torch.ones(3, 2), loss="sum", keep="*")
    assert isinstance(frame, Frame)
    for again in (pickle.loads(pickle.dumps(frame)), copy.deepcopy(frame), replace(frame, step=0)):
        assert isinstance(again, Peeked)
        assert (again.outputs, again.notes, again.sites) == (frame.outputs, frame.notes, frame.sites)
        assert torch.equal(again.kept["(root)"], frame.kept["(root)"])
        assert np.array_equal(again.values, frame.values)
    assert Frame.from_dict(frame.to_dict()).to_dict() == frame.to_dict()
    assert repr(frame).startswith("Peeked(step=0, 1 activation, 1 gradient, 2 weight")
    with pytest.raises(TypeError):
        frame.outputs["(root)"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        frame.kept["(root)"] = None  # type: ignore[index]


def test_an_image_grid_needs_a_kept_tensor() -> None:
    frame = peek(nn.Conv2d(1, 2, 3), torch.ones(1, 1, 8, 8))
    with pytest.raises(ArgumentError, match="nothing was kept"):
        frame.image_grid("(root)")
    frame = peek(nn.Sequential(nn.Conv2d(1, 2, 3)), torch.ones(1, 1, 8, 8), keep="0")
    with pytest.raises(ArgumentError, match="choose from '0'"):
        frame.image_grid("1")
    assert len(frame.image_grid("0", most=2).axes) >= 2


# --- While a watch is open ------------------------------------------------------------------------


class Gain(nn.Module):
    """Returns its parameter, which outlives the step, as does a hook on it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.gain


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.same, self.drop, self.gain = nn.Identity(), nn.Dropout(0.3), Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain() * self.last(self.drop(F.relu(self.norm(self.first(self.same(x))))))


def run(
    look: bool, watched: Callable[[Heard], nn.Module], looked_at: Callable[[Heard], nn.Module], **options: Any
) -> Any:
    """A training with a peek wherever there may be one, and what its watch saw."""
    torch.manual_seed(0)
    model = Heard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluate, replayed = options.pop("evaluate", False), options.pop("replayed", False)
    watching = tbhooks.watch(watched(model), **{"every": 2, **options})
    if evaluate:
        watching.evaluation()
    if replayed:
        watching.on_nonfinite("replay")

    def peeks() -> None:
        if look:
            part = looked_at(model)
            width = 8 if isinstance(part, nn.BatchNorm1d) else 4
            peek_state = model.training, torch.get_rng_state()
            peek(part, torch.zeros(3, width, requires_grad=True), loss="sum")
            assert (model.training, torch.equal(torch.get_rng_state(), peek_state[1])) == (peek_state[0], True)

    hooks = []
    for _ in range(5):
        peeks()
        hooks.append(zoo.hook_count(model))
        x = torch.randn(6, 4, requires_grad=True)
        loss = model(x).square().mean()
        peeks()
        loss.backward()
        peeks()
        if options.get("step") != "forward":
            optimizer.step()
        watching.log({"loss": loss})
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(torch.randn(3, 4))
            peeks()
            model.train()
    watching.close()
    report = watching.stats
    frames = [{**frame.to_dict(), "time": 0} for frame in watching.history]
    bits = [zoo.raw(tensor) for tensor in model.state_dict().values()], zoo.raw(torch.get_rng_state())
    seen = (report.steps, report.logged, report.hooks_fired, report.unseen, report.errors, report.messages)
    return hooks, seen, frames, bits


def whole_model(model: Heard) -> nn.Module:
    return model


def part_of_it(model: Heard) -> nn.Module:
    return model.norm


@pytest.mark.parametrize("options", [
    {}, {"every": 1}, {"step": "forward"}, {"kinds": ("activation", "functional", "input", "gradient")},
    {"evaluate": True}, {"replayed": True},
], ids=str)  # fmt: skip
def test_an_open_watch_does_not_notice(options: dict[str, Any]) -> None:
    assert run(True, whole_model, whole_model, **options) == run(False, whole_model, whole_model, **options)


def test_nor_does_a_watch_on_a_part_or_around() -> None:
    for watched, looked_at in ((part_of_it, whole_model), (whole_model, part_of_it)):
        assert run(True, watched, looked_at, every=1) == run(False, watched, looked_at, every=1)


def test_a_replay_still_knows_the_passes_of_its_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = tbhooks.watch(model).on_nonfinite("replay")
    loss = model(torch.full((2, 4), float("inf"))).sum()
    peek(model, torch.ones(2, 4), loss="sum")
    loss.backward()
    optimizer.step()
    assert [finding.site.path for finding in watching.findings if finding.evidence.get("replayed")] == ["0"]
    watching.close()


def test_a_paused_watch_stays_paused() -> None:
    model = nn.Linear(4, 1)
    watching = tbhooks.watch(model, every=1)
    with watching.paused():
        before = zoo.hook_count(model)
        peek(model, torch.ones(2, 4), loss="sum")
        assert zoo.hook_count(model) == before == 0
    assert zoo.hook_count(model) > 0
    watching.close()


def look_between(watching: tbhooks.Watch, model: nn.Module, look: bool) -> None:
    """Which graph the next forward takes, the one that is read or the other, is decided already."""
    is_open = watching._session.observer.gate.open
    if look:
        peek(model, torch.zeros(3, 4), loss="sum")
    assert watching._session.observer.gate.open == is_open


@pytest.mark.parametrize("step", ["auto", "forward"])
def test_a_watch_on_a_compiled_model_goes_on(step: str) -> None:
    seen = []
    for look in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Written()
        with tbhooks.watch(model, every=2, step=step).evaluation() as watching:
            called = torch.compile(model, backend="eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(6):
                for training in (True, False) if number == 3 else (True,):
                    called.train(training)
                    called(torch.ones(3, 4)).sum().backward()
                    look_between(watching, called, look)
                called.train()
                optimizer.step()
                optimizer.zero_grad()
                look_between(watching, called, look)
        assert watching.stats.errors == 0
        seen.append([(frame.step, frame.sites, frame.values.tolist()) for frame in watching.history])
    torch.compiler.reset()
    assert repr(seen[0]) == repr(seen[1])
    assert len(seen[0]) == 4


def test_the_outputs_of_all_layers_of_a_chain_are_there() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    seen = tbhooks.peek(model, torch.ones(2, 4), keep="*")
    assert set(seen.outputs) == set(seen.kept) == {"(root)", *map(str, range(6))}
