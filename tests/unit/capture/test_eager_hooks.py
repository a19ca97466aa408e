"""The hooks in C record what the hooks in Python record, and leave to Python what they cannot read."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tbhooks
from tbhooks.capture.hooks import eager_hooks, gradients, observer
from tbhooks.capture.hooks.eager_hooks import EagerGradientHook, EagerHook, describe_all
from tbhooks.reduction import cpu
from tests.support.loops import sgd

pytestmark = pytest.mark.skipif(eager_hooks._make_lane() is None, reason="the package has no hooks in C here")


class Tied(nn.Module):
    """A shared layer, an output that is passed on, a view, a tuple and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.relu, self.same = nn.Linear(6, 6), nn.ReLU(), nn.Identity()
        self.norm, self.flat, self.lstm = nn.LayerNorm(6), nn.Flatten(0, 1), nn.LSTM(6, 6, batch_first=True)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.same(self.relu(self.one(self.relu(self.one(x)))))
        y, _ = self.lstm(self.norm(y))
        return self.flat(y) if self.calls % 3 else self.flat(y * 2)


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(392, 3))


def _large() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 4))


class Residual(nn.Module):
    """Returns what its last module has returned, and that of its first one when asked for both."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Sequential(nn.Identity(), nn.Linear(6, 6)))
        self.both = both

    def forward(self, x: Tensor) -> Any:
        y = self.inside(x)
        return (y, x) if self.both else y


class Nested(nn.Module):
    """Outputs that two, three and four modules return, of which one changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(both=False) for _ in range(4))
        self.last, self.relu = Residual(both=True), nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0](x)
        for block in self.blocks:
            x = block(self.relu(x * 2))
        return sum(self.last(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tied": (Tied, (4, 5, 6)),
    "nested": (Nested, (4, 6)),
    "convolutions": (_convolutions, (5, 3, 9, 9)),
    "large": (_large, (40, 64)),  # of 12,000 elements: the GIL is released while they are read
}


class Slow:
    """Counts what the hooks in C leave to Python."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.outputs = self.gradients = 0
        on_output, on_gradient = observer.Observer.on_output, gradients.GradientReader.on_gradient

        def counted_output(*args: Any) -> None:
            self.outputs += 1
            on_output(*args)

        def counted_gradient(*args: Any) -> None:
            self.gradients += 1
            on_gradient(*args)

        patch.setattr(observer.Observer, "on_output", counted_output)
        patch.setattr(gradients.GradientReader, "on_gradient", counted_gradient)


def run(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, steps: int = 4,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any,
) -> tuple[list[Any], dict[str, Tensor], tbhooks.Watch]:  # fmt: skip
    """The frames of a training, what the model has learned, and the watch."""
    torch.manual_seed(0)
    model = make().to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    frames: list[Any] = []
    with tbhooks.watch(model, every=1, histograms=1, **options) as watching:
        for step in range(steps):
            with around():
                loss = (
                    model(torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(step)))
                    .square()
                    .mean()
                )
                loss.backward()
            if step == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            watching.flush()
            frames.append(watching.latest)
    return frames, model.state_dict(), watching


def assert_same(ours: tuple[list[Any], dict[str, Tensor], tbhooks.Watch], without: Any) -> None:
    frames, learned, watching = ours
    others, also_learned, other = without
    assert all(torch.equal(learned[name], also_learned[name]) for name in learned)
    assert watching.stats.errors == other.stats.errors == 0, watching.stats
    assert watching.stats.unseen == other.stats.unseen
    for frame, same in zip(frames, others, strict=True):
        assert frame.sites == same.sites
        for site in frame.sites:
            one, two = frame[site.name, site.kind], same[site.name, site.kind]
            assert np.array_equal(one.row, two.row, equal_nan=True), site
            assert np.array_equal(one.counts, two.counts), site
        assert {tag: value for tag, value in frame.scalars.items() if "seconds" not in tag} == pytest.approx(
            {tag: value for tag, value in same.scalars.items() if "seconds" not in tag}, rel=0, abs=0, nan_ok=True
        )


@pytest.fixture
def without_c(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch_off() -> None:
        monkeypatch.setattr(eager_hooks, "_make_lane", lambda: None)
        monkeypatch.setattr(eager_hooks, "_shared", lambda: None)

    return switch_off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_frames_are_the_same_to_the_bit(
    name: str, dtype: torch.dtype, without_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    ours = run(*MODELS[name], dtype)
    left_to_python = slow.outputs, slow.gradients
    without_c()
    assert_same(ours, run(*MODELS[name], dtype))
    assert left_to_python[0] < slow.outputs - left_to_python[0], "the hooks in C have read nothing"
    assert left_to_python[1] < slow.gradients - left_to_python[1]


def _chain() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.ReLU())))


def _blocks() -> nn.Module:
    block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Identity())
    return nn.Sequential(nn.Linear(4, 4), *(copy.deepcopy(block) for _ in range(10)))


@pytest.mark.parametrize("make", [_chain, _blocks])
@pytest.mark.parametrize("kinds", [("activation", "gradient"), ("activation",)])
def test_python_reads_two_outputs_and_two_gradients_a_step(
    make: Callable[[], nn.Module], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    slow, optimizer = Slow(monkeypatch), torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1, kinds=kinds):
        for _ in range(2):
            slow.outputs = slow.gradients = 0
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # The first, after which the rest is decided, and that of the whole model, which is also that of the last layer.
    assert slow.outputs == 2
    assert slow.gradients == (2 if "gradient" in kinds else 1)


def _dispatch_mode() -> AbstractContextManager[Any]:
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch_mode": _dispatch_mode,
    "profiler": torch.profiler.profile,
    "default_device": lambda: torch.device("cpu"),
    "anomaly": torch.autograd.detect_anomaly,
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_frames_are_the_same_inside_a_context(name: str, without_c: Callable[[], None]) -> None:
    ours = run(*MODELS["tied"], around=AROUND[name], steps=3)
    without_c()
    assert_same(ours, run(*MODELS["tied"], around=AROUND[name], steps=3))


class Odd(nn.Module):
    """Outputs that the kernel cannot read as they are: no floats, a transposed one, a slice, none at all, a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.transposed, self.part = Apply(lambda x: x.t()), Apply(lambda x: x[2:])
        self.tenth, self.integers = Apply(lambda x: x * 0.1), Apply(lambda x: x.round().long())
        self.empty, self.negated = Apply(lambda x: x[:0]), Apply(lambda x: torch.view_as_complex(x.view(-1, 2)).conj())
        self.own, self.nothing = Apply(lambda _: self.linear.weight), Apply(lambda _: None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.integers(y)
        self.empty(y)
        self.nothing(y)
        self.negated(self.tenth(y))
        self.tenth(self.negated(self.tenth(y)).imag)
        return self.part(self.transposed(self.part(y))).sum() + self.own(y).sum()


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def test_what_the_kernel_cannot_read_is_read_as_in_python(without_c: Callable[[], None]) -> None:
    ours = run(Odd, (8, 6), steps=3)
    without_c()
    assert_same(ours, run(Odd, (8, 6), steps=3))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2), reentrant

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_are_the_same(reentrant: bool, without_c: Callable[[], None]) -> None:
    ours = run(lambda: Checkpointed(reentrant), (4, 5), steps=3)
    without_c()
    assert_same(ours, run(lambda: Checkpointed(reentrant), (4, 5), steps=3))


def hooks_on(model: nn.Module) -> list[Any]:
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


def test_copies_and_pickles_have_none_of_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with tbhooks.watch(model, every=1):
        assert any(isinstance(hook, EagerHook) for hook in hooks_on(model))
        assert hooks_on(copy.deepcopy(model)) == []
        assert hooks_on(pickle.loads(pickle.dumps(model))) == []
        saved = io.BytesIO()
        torch.save(model, saved)
        assert b"tbhooks" not in saved.getvalue()
    assert hooks_on(model) == []


def test_gradient_hooks_come_in_the_order_of_registration_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    seen: list[Tensor] = []
    doubled = model[1].register_forward_hook(lambda _m, _a, output: output.register_hook(lambda g: g * 2) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(2):
            output = model(torch.ones(4, 3))
            handle = output.register_hook(seen.append)
            output.sum().backward()
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()
    doubled.remove()
    assert len(seen) == 2
    assert watching.latest["2", "gradient"].mean == 1.0
    # Registered before ours: ours sees what it has made of the gradient.
    expected = 2 * model[2].weight.detach().double().mean()
    assert watching.latest["1", "gradient"].mean == pytest.approx(float(expected))


class Shift(nn.Module):
    """Adds a parameter that a later backward does not need, and so may have been updated before it."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Keeper:
    """A training that holds on to outputs or graphs beyond their step, or has hooks of its own on outputs."""

    def __init__(self, what: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(3) for layer in (Shift(), nn.Tanh())))
        self.what, self.kept, self.seen = what, [], []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if what == "outputs":
            self.model[2].register_forward_hook(lambda _m, _a, output: self.kept.append(output))

    def _hook(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept.append(output.register_hook(lambda gradient: self.seen.append(gradient.sum().item())))

    def step(self, number: int) -> None:
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        if self.what == "twice":
            self.model(batch)
        if self.what == "hooks" and number == 1:  # later than ours: they are called after them
            for layer in self.model:
                layer.register_forward_hook(self._hook)
        loss = self.model(batch).square().mean()
        loss.backward(retain_graph=self.what == "late backward")
        if self.what == "hooks" and number % 2:
            while self.kept:
                self.kept.pop().remove()
        elif self.what == "late backward" and self.kept:
            self.kept.pop().backward()
        if self.what in ("graph", "late backward"):
            self.kept.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def watched(self) -> tuple[list[Any], dict[str, Tensor], tbhooks.Watch]:
        frames = []
        with tbhooks.watch(self.model, every=1, histograms=1) as watching:
            for number in range(6):
                self.step(number)
                watching.flush()
                frames.append(watching.latest)
        return frames, self.model.state_dict(), watching


@pytest.mark.parametrize("what", ["nothing", "graph", "outputs", "hooks", "twice", "late backward"])
def test_a_hook_serves_again_only_when_nobody_holds_it(what: str, without_c: Callable[[], None]) -> None:
    ours, alone = Keeper(what), Keeper(what)
    for number in range(6):
        alone.step(number)
    watched = ours.watched()
    assert ours.seen == alone.seen
    assert_same((watched[0], alone.model.state_dict(), watched[2]), watched)
    without_c()
    assert_same(watched, Keeper(what).watched())


def test_steps_put_the_same_hooks_on_outputs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = [each for each in gc.get_objects() if type(each) is EagerGradientHook]  # ids are of living objects
    found: list[set[int]] = []
    with tbhooks.watch(model, every=1):
        for _ in range(6):
            loss = model(torch.ones(4, 3)).sum()  # the graph of the last step lives until here
            found.append(
                {id(each) for each in gc.get_objects() if type(each) is EagerGradientHook} - set(map(id, others))
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found[2] == found[3] == found[4] == found[5]
    assert len(found[5]) <= 2 * len(model)


def living_hooks() -> int:
    for _ in range(3):  # a tensor that is part of a cycle takes more than one
        gc.collect()
    return sum(issubclass(type(one), EagerGradientHook | EagerHook) for one in gc.get_objects())


def test_nothing_outlives_its_step() -> None:
    before = living_hooks()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    outputs: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.register_forward_hook(lambda _m, _a, output: outputs.append(weakref.ref(output)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1):
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [ref() for ref in outputs] == [None] * len(outputs)
    gone = weakref.ref(model)
    del model, optimizer, layer
    gc.collect()
    assert gone() is None
    assert living_hooks() == before


def test_a_failure_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))

    def fails(*_: Any) -> None:
        raise LookupError("on purpose")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(4):
            if step == 2:
                lane = watching._session.observer._step.eager.lane
                assert lane is not None
                lane.is_neg = fails
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        watching.flush()
    assert watching.stats.errors > 0
    assert any("LookupError: on purpose" in message for message in watching.stats.messages)


def test_tensors_are_described_as_the_kernel_needs_them() -> None:
    whole = torch.randn(6, 4)
    freed = torch.randn(6)
    cut = freed[2:]
    freed.untyped_storage().resize_(0)
    tensors = [
        whole, whole[2:], nn.Parameter(whole.double()), whole.bfloat16(), whole.half(),
        whole.t(), whole.long(), whole.to_sparse(), whole[:, 1], whole[:0], freed, cut, whole.to("meta"),
        torch.view_as_complex(torch.randn(3, 2)).conj().imag, torch._efficientzerotensor((3,)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]  # fmt: skip
    described = describe_all(tensors)
    assert described is not None
    for tensor, row in zip(tensors, described, strict=True):
        if cpu.can_read(tensor) and tensor.numel():
            assert tuple(row) == cpu.described(tensor)
        else:
            assert row[2] == eager_hooks.UNREADABLE, tensor
    assert (described[:5, 2] >= 0).all()
    assert (described[5:, 2] == eager_hooks.UNREADABLE).all()


def test_tensors_of_torch_func_are_left_to_python() -> None:
    rows: list[Any] = []

    def look(x: Tensor) -> Tensor:
        described = describe_all([x])
        assert described is not None
        rows.append(described[0, 2])
        return x.sum()

    torch.func.vmap(look)(torch.ones(3, 4))
    torch.func.grad(look)(torch.ones(4))
    torch.func.functionalize(look)(torch.ones(4))
    assert rows == [eager_hooks.UNREADABLE] * 3


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(x))


def test_the_compiler_meets_no_hook_in_c() -> None:
    model = Wrapped()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        assert any(isinstance(hook, EagerHook) for hook in hooks_on(model))
        model.compile(backend="eager", fullgraph=True)
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(isinstance(hook, EagerHook) for hook in hooks_on(model))
        watching.flush()
        assert watching.latest["one", "activation"].count == 12
    assert watching.stats.errors == 0, watching.stats


class ClosesTheLane(nn.Sequential):
    """A model of which a hook in C asks something that runs Python, in which another thread could close the lane."""

    lane: eager_hooks.EagerLane | None = None
    asked = 0

    @property
    def training(self) -> bool:  # type: ignore[override]
        self.asked += 1
        if self.lane is not None and self.asked % 2:
            self.lane.close()
        return True

    @training.setter
    def training(self, mode: bool) -> None: ...


def test_a_lane_may_be_closed_while_a_hook_runs() -> None:
    model = ClosesTheLane(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1) as watching:
        model.lane = watching._session.observer._step.eager
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert model.asked > 4 * 6
    assert watching.stats.errors == 0, watching.stats.messages
    assert all(watching.latest[str(i), kind].count == 8 for i in range(6) for kind in ("activation", "gradient"))
