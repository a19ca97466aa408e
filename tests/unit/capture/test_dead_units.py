"""Dead units are those that were zero for every sample of a step, and only those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tbhooks.capture.hooks import dead_units
from tests.support import fake_device
from tests.support.loops import mlp, sgd, train
from tests.support.slow import cases


def share_of_dead(outputs: list[Tensor], unit_dimension: int) -> float:
    """Of whole tensors in NumPy."""
    arrays: list[NDArray[np.float64]] = [np.moveaxis(o.detach().double().numpy(), unit_dimension, -1) for o in outputs]
    everything = np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays])
    return float((everything == 0).all(axis=0).mean())


SHAPES = {
    "vectors": (nn.Linear(6, 40), (40, 6), -1),
    "images": (nn.Conv2d(3, 12, 3), (4, 3, 9, 9), 1),
    "volumes": (nn.Conv3d(2, 6, 2), (3, 2, 4, 4, 4), 1),
    "sequences_of_vectors": (nn.Linear(6, 20), (4, 11, 6), -1),
    "channels_of_sequences": (nn.Conv1d(2, 10, 3), (5, 2, 30), 1),
}


@pytest.mark.parametrize("rectifier", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6()], ids=["relu", "inplace", "relu6"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_share_is_that_of_whole_tensors(name: str, rectifier: nn.Module) -> None:
    assert_share(name, rectifier, compiled=False)


@pytest.mark.parametrize("name", cases([*SHAPES], always={"vectors", "images"}, reason="compiles; eager in make test"))
def test_the_share_is_the_same_in_a_compiled_graph(name: str) -> None:
    assert_share(name, nn.ReLU(), compiled=True)


def assert_share(name: str, rectifier: nn.Module, compiled: bool) -> None:
    layer, shape, unit_dimension = SHAPES[name]
    torch.manual_seed(0)
    with torch.no_grad():
        layer.reset_parameters()
        layer.bias[::3] = -100.0
    model = nn.Sequential(layer, rectifier)
    seen: list[Tensor] = []
    with tbhooks.watch(model, every=1, step="manual") as watching:
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        seen += [run(torch.randn(shape)) for _ in range(3)]
        watching.step()
    expected = share_of_dead(seen, unit_dimension)
    assert 0 < expected < 1
    assert watching.latest["1", "activation"].dead_fraction == pytest.approx(expected)
    assert watching.latest.scalars["activation.dead_fraction/1"] == pytest.approx(expected)
    assert np.isnan(watching.latest["0", "activation"].dead_fraction)


def test_a_unit_that_fired_in_one_micro_batch_is_not_dead() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with tbhooks.watch(model, every=1, step="manual") as watching:
        model(torch.full((64, 4), -1.0))
        model(torch.tensor([[1.0, -1.0, -1.0, float("nan")]]))
        watching.step()
        model(torch.full((64, 4), -1.0))
        watching.step()
    shares = [frame["1", "activation"].dead_fraction for frame in watching.history]
    assert shares == [0.5, 1.0]


def test_few_samples_say_nothing_about_units() -> None:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 2)  # 16 samples a step
        train(model, 1, accumulate=2)
    assert [np.isnan(frame["1", "activation"].dead_fraction) for frame in watching.history] == [True, True, False]


def test_functional_rectifiers_have_units_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.layer.bias[:2] = -100.0
    with tbhooks.watch(model, every=1, kinds=("functional",), step="manual") as watching:
        model(torch.randn(64, 4))
        watching.step()
    assert watching.latest["(root):relu", "functional"].dead_fraction == 0.25


def test_nothing_is_waited_for_and_everything_rides_in_the_one_copy() -> None:
    model = fake_device.to_device(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = sgd(model)
    with fake_device.Log() as record, tbhooks.watch(model, every=1) as watching:
        for _ in range(2):
            model(fake_device.put(torch.randn(64, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert record.syncs == 0
        assert len(record.copies) == 2
    assert watching.stats.errors == 0
    assert 0 <= watching.latest["1", "activation"].dead_fraction < 1


def test_units_of_another_device_or_width_start_anew() -> None:
    known = torch.zeros(3)
    assert dead_units._has_same_units(known, 3, torch.device("cpu"))
    assert not dead_units._has_same_units(known, 4, torch.device("cpu"))
    assert not dead_units._has_same_units(known, 3, torch.device("meta"))
