"""An Engine of ignite: its iterations are the labels, and whatever ends a run ends the watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn
from torch.nn import functional as F

import tbhooks
from tbhooks.integrations.ignite import attach
from tests.support import zoo
from tests.support.digits_training import (
    ACCUMULATED,
    STEPS,
    assert_same_numbers,
    loader,
    make_net,
    make_optimizer,
    same_bits,
    train,
    weights,
)
from tests.support.frames import scalar_series


def make_trainer(net: nn.Module) -> Engine:
    return create_supervised_trainer(net, make_optimizer(net), F.cross_entropy, gradient_accumulation_steps=ACCUMULATED)


def test_accumulated_the_numbers_are_those_of_a_plain_loop_under_the_iterations_of_the_engine(tmp_path: Path) -> None:
    plain, net, bare, sink = make_net(), make_net(), make_net(), tbhooks.MemorySink()
    frames = train(plain, clip=None)
    trainer = make_trainer(net)
    attach(trainer, net, [sink, tmp_path], every=1)
    trainer.run(loader())
    assert_same_numbers(sink.frames, frames)
    iterations = [ACCUMULATED * (step + 1) for step in range(STEPS)]
    assert [frame.step for frame in sink.frames] == iterations
    assert list(scalar_series(tmp_path, "update.ratio/0.weight")) == iterations
    make_trainer(bare).run(loader())
    assert same_bits(weights(net), weights(plain))
    assert same_bits(weights(net), weights(bare))


def test_the_first_iteration_is_number_1() -> None:
    net, sink = make_net(), tbhooks.MemorySink()
    trainer = create_supervised_trainer(net, make_optimizer(net), F.cross_entropy)
    attach(trainer, net, sink, every=5)
    trainer.run(loader(11))
    assert [frame.step for frame in sink.frames] == [1, 6, 11]


def test_every_run_of_the_engine_is_watched_and_closed_at_its_end() -> None:
    net, sink = make_net(), tbhooks.MemorySink()
    trainer = make_trainer(net)
    watching = attach(trainer, net, sink, every=1, kinds=("weight",))
    trainer.run(loader(4), max_epochs=1)
    assert zoo.hook_count(net) == 0
    with pytest.raises(tbhooks.ClosedError):
        watching.flush()
    trainer.run(loader(4), max_epochs=2)
    assert [frame.step for frame in sink.frames] == [2, 4, 6, 8]


class Mine(Exception):
    pass


def failing(engine: Any) -> None:
    if engine.state.iteration == 4:
        raise Mine


@pytest.mark.parametrize("heard", [False, True])
def test_an_exception_closes_it_and_is_raised_only_where_ignite_would(heard: bool) -> None:
    net, sink, raised = make_net(), tbhooks.MemorySink(), []
    trainer = make_trainer(net)
    if heard:
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _, problem: raised.append(type(problem)))
    watching = attach(trainer, net, sink, every=1)
    trainer.add_event_handler(Events.ITERATION_STARTED, failing)
    if heard:
        trainer.run(loader())
        assert raised == [Mine]
    else:
        with pytest.raises(Mine):
            trainer.run(loader())
    assert zoo.hook_count(net) == 0
    with pytest.raises(tbhooks.ClosedError):
        watching.flush()
    assert sink.frames[0].step == 2
