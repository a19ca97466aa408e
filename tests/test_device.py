"""The device contract, counted on the simulated device: one copy a logged step, no sync, few launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tests import simulated, twin, zoo

CASES = ["mlp", "cnn", "inplace_relu", "shared_module", "dict_output", "tied_weights", "resnet", "bert", "checkpointed"]


def copies_by_step(
    case: zoo.Case, every: int, steps: int, log: Callable[[tbhooks.Watch, Tensor], None] | None = None, **options: Any
) -> tuple[list[int], int, tbhooks.Watch]:
    """Copies to the host in each step, syncs in all, and the watch."""
    on_device = zoo.moved(case, simulated.to_device, simulated.put)
    made: list[tbhooks.Watch] = []
    counts: list[int] = []
    with simulated.Log() as record:

        def before(model: nn.Module) -> nn.Module:
            made.append(tbhooks.watch(model, every=every, **options))
            return model

        def each_step(_: int, loss: Tensor) -> None:
            if log is not None:
                log(made[0], loss)
            counts.append(len(record.copies))

        # zoo.train itself copies tensors out to keep their bytes: a plain loop copies only what we copy.
        plain_loop(on_device, steps, before, each_step)
        syncs = record.syncs
    made[0].close()
    return [b - a for a, b in zip([0, *counts], counts, strict=False)], syncs, made[0]


def plain_loop(
    case: zoo.Case, steps: int, before: Callable[[nn.Module], Any], each_step: Callable[[int, Tensor], None]
) -> None:
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(model.parameters())
    before(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model, case.batch())
        loss.backward()
        optimizer.step()
        each_step(step, loss)


@pytest.mark.parametrize("name", CASES)
def test_one_copy_in_each_logged_step_none_in_others_and_never_a_sync(name: str) -> None:
    copies, syncs, _ = copies_by_step(zoo.ZOO[name], every=3, steps=7)
    assert copies == [1, 0, 0, 1, 0, 0, 1]
    assert syncs == 0


def test_scalars_logged_before_the_step_ends_ride_in_the_same_copy() -> None:
    case = zoo.ZOO["mlp"]
    made: list[tbhooks.Watch] = []

    def loss_logged_at_once(model: nn.Module, batch: Any) -> Tensor:
        loss = case.loss(model, batch)
        made[0].log({"loss": loss})
        return loss

    early = zoo.Case(case.name, case.build, case.batch, loss_logged_at_once, case.optimizer)
    on_device = zoo.moved(early, simulated.to_device, simulated.put)
    counts: list[int] = []
    with simulated.Log() as record:

        def before(model: nn.Module) -> None:
            made.append(tbhooks.watch(model, every=2))
            made.append(model)  # keeps it alive

        plain_loop(on_device, 5, before, lambda *_: counts.append(len(record.copies)))
        assert record.syncs == 0
    made[0].close()
    assert counts == [1, 1, 2, 2, 3]
    tags = ["train.grad_norm", "train.grad_norm_raw", "train.lr/0", "train/loss"]
    assert [sorted(frame.scalars) for frame in made[0].history] == [tags] * 3


def test_scalars_logged_after_the_optimizer_ride_in_the_same_copy_too() -> None:
    losses: list[float] = []

    def log(watching: tbhooks.Watch, loss: Tensor) -> None:
        watching.log({"loss": loss})

    kept = tbhooks.MemorySink()
    copies, syncs, watching = copies_by_step(zoo.ZOO["mlp"], every=2, steps=5, log=log, writer=kept)
    assert copies == [1, 0, 1, 0, 1]
    assert syncs == 0
    zoo.train(zoo.ZOO["mlp"], 5, each_step=lambda _, loss: losses.append(float(loss.detach())))
    steps, logged = watching.history.scalar("train/loss")
    assert steps == [0, 2, 4]
    assert logged.tolist() == pytest.approx([losses[0], losses[2], losses[4]], rel=1e-6)
    # Only the first time it is not known that something will come: later steps wait for it with their copy.
    assert [frame.step for frame in kept if not frame.sites] == [0]


@pytest.mark.parametrize("name", ["mlp", "cnn", "inplace_relu", "shared_module", "resnet"])
def test_numbers_from_the_device_are_right(name: str) -> None:
    expected = twin.observe(zoo.ZOO[name])
    on_device = zoo.moved(zoo.ZOO[name], simulated.to_device, simulated.put)
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1))
        return model

    zoo.train(on_device, 3, before=before)
    made[0].close()
    for frame, step in zip(made[0].history, expected, strict=True):
        twin.assert_frame_equals(frame, step)


def test_training_on_the_device_is_bit_identical() -> None:
    on_device = zoo.moved(zoo.ZOO["cnn"], simulated.to_device, simulated.put)
    made: list[Any] = []
    trace = zoo.train(on_device, before=lambda model: made.append(tbhooks.watch(model, every=1)))
    made[0].close()
    assert trace == zoo.train(on_device)


def test_an_unlogged_step_launches_one_small_sum_more_than_a_bare_one() -> None:
    on_device = zoo.moved(zoo.ZOO["cnn"], simulated.to_device, simulated.put)

    def launches(before: Callable[[nn.Module], Any]) -> list[int]:
        counts: list[int] = []
        kept: list[Any] = []
        with simulated.Log() as record:
            plain_loop(
                on_device, 4, lambda model: kept.append((model, before(model))),
                lambda *_: counts.append(sum(record.ops.values())),
            )  # fmt: skip
        return [b - a for a, b in itertools.pairwise(counts)]

    bare = launches(lambda _: None)
    assert launches(lambda model: tbhooks.watch(model, every=100)) == [n + 1 for n in bare]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_never_syncs_in_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with tbhooks.watch(model, every=2) as watching:
        for _ in range(3):  # the first steps may allocate
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                loss = model(torch.ones(8, 64, device="cuda")).sum()
                loss.backward()
                optimizer.step()
                watching.log({"loss": loss})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watching.stats.errors == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_works_with_deterministic_algorithms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.use_deterministic_algorithms(True)
    try:
        with tbhooks.watch(model, every=1) as watching:
            model(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert watching.stats.errors == 0
