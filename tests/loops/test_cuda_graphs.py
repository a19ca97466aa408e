"""CUDA graphs, on the simulated device: nothing of a watch runs while one is captured, and logged steps run without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tbhooks
from tests.support import fake_device, zoo

STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return fake_device.to_device(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))


class SimulatedGraph(TorchDispatchMode):
    """Records what runs on the simulated device, and runs it again into the same memory when it is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    if old is not new:
                        old.detach().copy_(new.detach())


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple | list) else (result,)) if isinstance(each, Tensor)]


def captured(watching: tbhooks.Watch, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the watch believe that a graph is being captured, as torch.cuda.is_current_stream_capturing() would."""

    def set_to(is_capturing: bool) -> None:
        monkeypatch.setattr(watching._session.observer.graph_capture, "is_capturing", lambda: is_capturing)

    return set_to


@pytest.fixture
def training() -> tuple[nn.Module, Callable[[], Tensor]]:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), capturable=False, foreach=False)
    batch = fake_device.put(torch.randn(4, 8))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = trained(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step()
    return trained, step


def everything(watching: tbhooks.Watch) -> None:
    watching.flight_recorder(steps=8).checksums().optimizer_state().noise_scale().progress().evaluation()
    watching.metric("largest", lambda tensor: tensor.abs().amax()).per_channel("*").on_nonfinite("replay")


@pytest.mark.parametrize("ask", [lambda _: None, everything], ids=["as it is", "with everything"])
def test_nothing_of_ours_runs_while_a_graph_is_captured(
    training: tuple[nn.Module, Callable[[], Tensor]], monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[tbhooks.Watch], None],
) -> None:  # fmt: skip
    trained, step = training
    values = fake_device.put(torch.randn(4))
    with fake_device.Log() as bare:
        step()
    with tbhooks.watch(trained, every=1) as watching:
        ask(watching)
        step()
        watching.samples(values)
        watching.flush()
        capturing = captured(watching, monkeypatch)
        capturing(True)
        with fake_device.Log() as log:
            watching.log({"loss": step()})
            watching.samples(values)
            watching.log({"loss": step()})
            watching.samples(values, ids=[1, 2, 3, 4])
        capturing(False)
        assert log.launches.total() == 2 * bare.launches.total()
        assert not log.copies
        step()
    assert [frame.step for frame in watching.history] == [0, 1]
    assert watching.stats.errors == 0


def test_what_is_captured_is_unseen_with_the_reason_and_what_to_do(
    training: tuple[nn.Module, Callable[[], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, step = training
    with tbhooks.watch(trained, every=1) as watching:
        captured(watching, monkeypatch)(True)
        step()
        why = watching.stats.unseen["(root)"]
    assert "CUDA graph" in why
    assert "without the graph" in why
    assert sum("CUDA graph" in message for message in watching.stats.messages) == 1


def test_a_forward_alone_can_be_captured(
    training: tuple[nn.Module, Callable[[], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, step = training
    batch = fake_device.put(torch.randn(4, 8))
    with torch.no_grad(), fake_device.Log() as bare:
        trained(batch)
    with tbhooks.watch(trained, every=1) as watching:
        step()
        watching.log({"loss": 1.0})
        captured(watching, monkeypatch)(True)
        with torch.no_grad(), fake_device.Log() as log:
            trained(batch)
        assert log.launches.total() == bare.launches.total()
        assert not log.copies


def test_operators_in_compiled_code_record_nothing_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that does not know which operators to keep out of CUDA graphs."""
    trained = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    compiled = torch.compile(trained, backend="eager")
    with tbhooks.watch(trained, every=1) as watching:
        for is_capturing in (False, True, False):
            captured(watching, monkeypatch)(is_capturing)
            compiled(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        watching.flush()
        assert [("0", "activation") in frame for frame in watching.history] == [True, True]
        assert "CUDA graph" in watching.stats.unseen["(root)"]
    assert watching.stats.errors == 0


def whole_step(watched: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, tbhooks.Watch | None]:
    """Training that replays a graph of the whole step, but for logged steps."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, foreach=False)
    batch = fake_device.put(torch.zeros(4, 8))
    generator = torch.Generator().manual_seed(1)

    def train_step() -> None:
        for parameter in trained.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        trained(batch).square().mean().backward()
        optimizer.step()

    train_step()  # warm-up
    watching = tbhooks.watch(trained, every=3, step="manual") if watched else None
    graph = SimulatedGraph()
    if watching is not None:
        captured(watching, monkeypatch)(True)
    with graph:
        train_step()
    if watching is not None:
        captured(watching, monkeypatch)(False)
    for step in range(STEPS):
        batch.copy_(fake_device.put(torch.randn(4, 8, generator=generator)))
        if step % 3 == 0:
            train_step()
        else:
            graph.replay()
        if watching is not None:
            watching.step()
    if watching is not None:
        watching.close()
    return zoo.raw(torch.cat([parameter.detach().cpu().flatten() for parameter in trained.parameters()])), watching


def test_logged_steps_without_the_graph_are_read_and_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that docs/cuda-graphs.md describes."""
    expected, _ = whole_step(False, monkeypatch)
    weights, watching = whole_step(True, monkeypatch)
    assert weights == expected
    assert watching is not None
    assert [frame.step for frame in watching.history] == [0, 3]
    for frame in watching.history:
        assert {site.kind for site in frame.sites} == {"activation", "gradient", "weight", "weight_gradient", "update"}
    assert watching.stats.errors == 0


def test_a_watched_module_is_accepted_by_make_graphed_callables_and_watched_afterwards() -> None:
    """Without a GPU it fails where it begins to capture; before that it refuses modules with hooks."""
    trained = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with tbhooks.watch(trained, every=1) as watching:
        assert trained._forward_hooks or trained._forward_pre_hooks
        with pytest.raises(Exception) as caught:  # noqa: PT011  whatever a torch without CUDA raises
            torch.cuda.make_graphed_callables(trained, (torch.randn(2, 4),))
        assert "must not have hooks" not in str(caught.value)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert watching.latest is not None
    assert ("0", "activation") in watching.latest


def test_modules_inside_of_a_graphed_one_are_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    with tbhooks.watch(trained, every=1) as watching:
        watching._session.observer.graph_capture.graphed((trained[0],))
        unseen = watching.stats.unseen
    assert set(unseen) == {"0.0", "0.1"}
    assert "make_graphed_callables" in unseen["0.0"]
