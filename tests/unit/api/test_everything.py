"""Everything that can be asked of a watch, asked of one at once: training is the same, and all of it is served."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tests.support import fake_device, zoo
from tests.support.slow import slow
from tests.support.tensorboard_server import Server

STEPS, EVERY, MEANS, MICRO_BATCHES, EVALUATED = 12, 4, 3, 2, (5, 9)
ALL = ("activation", "gradient", "input", "functional", "weight", "weight_gradient", "update")


class Net(nn.Module):
    """A bit of all: convolution, norm, dropout, attention, operations that are no modules, a dict for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.2)
        self.relu = nn.ReLU(inplace=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.drop(self.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        attended, _ = self.attention(features, features, features)
        return {"logits": self.head((features + attended).mean(1)), "features": attended}


@dataclass
class Batch:
    """What the labels and thumbnails of embeddings are taken from."""

    x: Tensor = field(default_factory=lambda: torch.zeros(0))
    y: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class Trained:
    """What training came to, to the bit."""

    model: nn.Module
    losses: list[bytes] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    rng: list[Any] = field(default_factory=list)

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.losses, {name: zoo.raw(tensor) for name, tensor in self.model.state_dict().items()}, self.rng


def everything(w: tbhooks.Watch, batch: Batch) -> tbhooks.Watch:
    w.graph().images().images("*").per_channel("*", histograms=True)
    w.embeddings("*", labels=lambda: batch.y, thumbnails=lambda: batch.x)
    w.progress().log_every(MEANS).hparams({"lr": 0.01, "net": {"width": 8}}, metrics=["train/loss"])
    w.environment().profile((2, 4)).evaluation()
    w.summary()
    return w


Ask = Callable[[nn.Module, Batch], tbhooks.Watch]


def asked_for_everything(directory: Path, **options: Any) -> Ask:
    return lambda model, batch: everything(tbhooks.watch(model, str(directory), every=EVERY, **options), batch)


def train(
    ask: Ask | None,
    put: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    move: Callable[[nn.Module], nn.Module] = lambda model: model,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    after: Callable[[], None] = lambda: None,
) -> tuple[Trained, tbhooks.Watch | None]:
    """Micro-batches, and evaluations in between."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, batch = move(Net()), Batch()
    done, w = Trained(model), None if ask is None else ask(model, batch)
    optimizer, called = torch.optim.AdamW(model.parameters(), lr=0.01), wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            batch.x, batch.y = put(torch.randn(4, 3, 8, 8)), put(torch.randint(0, 5, (4,)))
            loss = F.cross_entropy(called(batch.x)["logits"], batch.y) / MICRO_BATCHES
            done.nodes.append(zoo.count_graph_nodes(loss))
            loss.backward()
            if w is not None:
                w.log({"loss": loss})
        optimizer.step()
        after()
        done.losses.append(b"" if loss.device.type != "cpu" else zoo.raw(loss))
        if step in EVALUATED:
            model.eval()
            with torch.no_grad():
                score = called(batch.x)["logits"].mean()
            model.train()
            if w is not None:
                w.log({"eval/score": score})
    done.rng = [zoo.raw(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes()]
    if w is not None:
        w.close()
        assert (w.stats.errors, w.stats.dropped) == (0, 0), w.stats.messages
        assert zoo.hook_count(model) == 0
    return done, w


@pytest.mark.parametrize("kinds", [ALL, ("functional",)], ids=["all", "functional"])
def test_training_is_the_same_to_the_bit_and_in_its_graph(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    bare, _ = train(None)
    watched, _ = train(asked_for_everything(tmp_path / "a rün", kinds=kinds))
    assert watched.bits == bare.bits
    assert watched.nodes == bare.nodes


@slow(
    "compiles with every option",
    covered_by="test_bits_are_those_of_the_unwatched_run_and_frames_those_of_the_eager_one",
)
def test_a_compiled_model_trains_the_same(tmp_path: Path) -> None:
    def wrap(model: nn.Module) -> Any:
        torch.compiler.reset()
        return torch.compile(model, backend="aot_eager")

    bare, _ = train(None, wrap=wrap)
    watched, _ = train(asked_for_everything(tmp_path), wrap=wrap)
    assert watched.bits == bare.bits


def test_two_watches_that_were_asked_for_everything_do_not_meet(tmp_path: Path) -> None:
    others: list[tbhooks.Watch] = []

    def ask(model: nn.Module, batch: Batch) -> tbhooks.Watch:
        others.append(everything(tbhooks.watch(model, str(tmp_path / "other"), every=EVERY - 1), batch))
        return asked_for_everything(tmp_path / "one", kinds=ALL)(model, batch)

    def close_other() -> None:
        if others[0].stats.steps == STEPS:
            others[0].close()

    bare, _ = train(None)
    watched, _ = train(ask, after=close_other)
    assert watched.bits == bare.bits
    assert others[0].stats.errors == 0, others[0].stats.messages


def test_on_a_device_each_written_step_is_copied_once_and_nothing_is_waited_for(tmp_path: Path) -> None:
    with fake_device.Log() as log:
        _, w = train(asked_for_everything(tmp_path), fake_device.put, fake_device.to_device)
        assert log.syncs == 0
        written = {step for step in range(STEPS) if step % EVERY == 0 or step % MEANS == 0}
        # An evaluation has a copy for what was read in it, and one for the means that were logged in it. In the end
        # there are means that have not been written yet.
        assert len(log.copies) == len(written) + 2 * len(EVALUATED) + 1
    assert w is not None
    assert w.stats.logged == STEPS // EVERY


@pytest.mark.xdist_group("tensorboard_server")
def test_every_tab_of_tensorboard_has_its_part(tmp_path: Path) -> None:
    train(asked_for_everything(tmp_path / "logs" / "run"))
    with Server(tmp_path / "logs", tmp_path / "printed", "--load_fast=true") as server:
        served = server.wait_for(lambda: _served(server))
    assert {"train/loss", "eval/score", "train.lr/0", "train.step_seconds", "train.grad_norm"} <= set(served["scalars"])
    assert {"images.input/(root)", "images.weight/conv.weight", "images.activation/head"} <= set(served["images"])
    assert {"activation/conv", "activation/conv[7]", "weight/head.weight[4]"} <= set(served["histograms"])
    assert {"tbhooks/environment/text_summary", "tbhooks/summary/text_summary"} <= set(served["text"])
    assert served["graphs"]["run_graph"]
    assert list(served["graphs"]["tags"]) == ["tbhooks/evaluation"]
    assert {"conv (step 0)", "head (step 4)", "attention[0] (step 8)"} <= served["projector"]
    assert served["hparams"]["net.width"] == 8.0
    assert (tmp_path / "logs" / "run" / "tbhooks-profile" / "steps-2-4.pt.trace.json.gz").stat().st_size > 1000


def _served(server: Server) -> dict[str, Any] | None:
    """What there is in each tab; None before all of the run was read."""
    routes = {tab: server.get(f"plugin/{tab}/tags") for tab in ("scalars", "images", "histograms", "text")}
    routes["graphs"] = server.get("plugin/graphs/info")
    if not all(reply.status == 200 and "run" in reply.json for reply in routes.values()):
        return None
    found: dict[str, Any] = {tab: reply.json["run"] for tab, reply in routes.items()}
    projector = server.get("plugin/projector/info", run="run")
    sessions = server.get("plugin/hparams/session_groups", request=ASKED)
    if server.newest().get("run") != EVALUATED[-1] or projector.status != 200 or sessions.status != 200:
        return None
    groups = sessions.json.get("sessionGroups", [])
    found["projector"] = {entry["tensorName"] for entry in projector.json["embeddings"]}
    found["hparams"] = groups[0]["hparams"] if groups else {}
    return found if groups and "eval/score" in found["scalars"] else None


ASKED = json.dumps({"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "sliceSize": 10, "startIndex": 0})


def test_names_and_values_of_any_kind_can_be_written(tmp_path: Path) -> None:
    model, half = nn.Sequential(), "half \ud800\t<b>|`x`"
    model.add_module(half, nn.Conv2d(1, 2, 1))
    w = tbhooks.watch(model, str(tmp_path), every=1).hparams({half: half}, metrics=[half])
    w.graph().images("*").per_channel("*", histograms=True).embeddings("*", labels=[half, "\n"]).environment().summary()
    model(torch.randn(2, 1, 3, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    w.close()
    assert (w.stats.errors, w.stats.dropped) == (0, 0), w.stats.messages
    assert len(list(tmp_path.glob("embeddings/*/*/tensors.tsv"))) == 2
