"""Every model of the zoo: right numbers, unchanged training, unchanged graph, nothing left behind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tests.support import float64_recorder, zoo
from tests.support.slow import cases

with_both_kernels = pytest.mark.usefixtures("both_kernels")
EVERY_MODEL = cases(list(zoo.ZOO), always=zoo.ALWAYS, reason="the same kinds of modules in larger models")


def watched(case: zoo.Case, steps: int = 3, **options: Any) -> tuple[zoo.Trace, tbhooks.Watch]:
    made: list[tbhooks.Watch] = []

    def before(model: nn.Module) -> nn.Module:
        made.append(tbhooks.watch(model, every=1, **options))
        return model

    trace = zoo.train(case, steps, before=before, each_step=lambda _, loss: made[0].log({"loss": loss}))
    made[0].close()
    return trace, made[0]


# Runs that several tests look at: by model, and of those that are watched by model and kernel.
@functools.cache
def bare(name: str) -> zoo.Trace:
    return zoo.train(zoo.ZOO[name], 3)


@functools.cache
def observed(name: str) -> list[float64_recorder.Step]:
    return float64_recorder.observe(zoo.ZOO[name])


@functools.cache
def watched_by(name: str, _kernel: str) -> tuple[zoo.Trace, tbhooks.Watch]:
    return watched(zoo.ZOO[name])


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_stat_of_every_kind_equals_float64(name: str, both_kernels: str) -> None:
    _, watching = watched_by(name, both_kernels)
    assert [frame.step for frame in watching.history] == [0, 1, 2]
    for frame, step in zip(watching.history, observed(name), strict=True):
        float64_recorder.assert_frame_equals(frame, step)


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_training_is_bit_identical(name: str, both_kernels: str) -> None:
    trace, watching = watched_by(name, both_kernels)
    assert trace == bare(name)
    assert watching.stats.errors == 0
    assert watching.stats.dropped == 0


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_the_graph_has_as_many_nodes(name: str) -> None:
    nodes: list[int] = []
    case = zoo.ZOO[name]

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = case.loss(model, batch)
        nodes.append(zoo.count_graph_nodes(loss))
        return loss

    counting = zoo.Case(case.name, case.build, case.batch, counted, case.optimizer)
    zoo.train(counting, 2)
    watched(counting, 2)
    assert nodes[:2] == nodes[2:]


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_unlogged_steps_have_no_hook_and_closing_leaves_none(name: str) -> None:
    bare: list[int] = []
    zoo.train(zoo.ZOO[name], 1, before=lambda model: bare.append(zoo.hook_count(model)))
    counts: list[int] = []
    model_of: list[nn.Module] = []

    def before(model: nn.Module) -> None:
        model_of.append(model)
        tbhooks.watch(model, every=3)

    zoo.train(
        zoo.ZOO[name], 7, before=before, each_step=lambda *_: counts.append(zoo.hook_count(model_of[0]) - bare[0])
    )
    assert [bool(count) for count in counts] == [False, False, True, False, False, True, False]
    tbhooks.unwatch(model_of[0])
    assert zoo.hook_count(model_of[0]) == bare[0]


@with_both_kernels
@pytest.mark.parametrize("kind", tbhooks.data.frame.KINDS)
def test_one_kind_alone_gives_the_same_numbers(kind: str) -> None:
    _, everything = watched(zoo.ZOO["multihead"])
    _, alone = watched(zoo.ZOO["multihead"], kinds=kind)
    assert {site.kind for site in alone.latest.sites} == {kind}
    for site in alone.latest.sites:
        assert repr(alone.latest[site.name, kind]) == repr(everything.latest[site.name, kind])
        if kind == "update":
            assert alone.latest[site.name, kind].ratio == everything.latest[site.name, kind].ratio


@with_both_kernels
def test_histograms_off_changes_nothing_else() -> None:
    _, with_buckets = watched(zoo.ZOO["cnn"])
    _, without = watched(zoo.ZOO["cnn"], histograms=False)
    assert without.latest.buckets.shape == (len(without.latest.sites), 0)
    assert (without.latest.values == with_buckets.latest.values).all()
