"""A real TensorBoard serves what was written, with either of its loaders."""

from __future__ import annotations

import itertools
import json
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks import Frame, MemorySink
from tbhooks.delivery import worker as pump_module
from tests.support import frames
from tests.support.tensorboard_server import Server

# In one process: each would start servers of its own.
pytestmark = pytest.mark.xdist_group("tensorboard_server")

STEPS = 20

Ask = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Frame]]:
    """A watched training, beside scalars of the user's own in the same writer."""
    directory = tmp_path_factory.mktemp("run")
    model, kept = frames.make_model(), MemorySink()
    optimizer = frames.make_optimizer(model)
    with pytest.MonkeyPatch.context() as patch, SummaryWriter(str(directory)) as writer:
        patch.setattr(pump_module, "QUEUE_STEPS", 1000)
        with tbhooks.watch(model, [writer, kept], every=1) as w:
            for step in range(STEPS):
                loss = frames.train_step(model, optimizer)
                w.log({"loss": loss})
                writer.add_scalar("mine/loss", loss.item(), step)
                if step == 0:
                    writer.flush()
    return directory, kept.frames


@pytest.fixture(params=["true", "false"], ids=["load_fast", "load_slow"])
def ask(request: pytest.FixtureRequest, run: tuple[Path, list[Frame]], tmp_path: Path) -> Iterator[Ask]:
    """Asks a server on loopback, which is killed in the end, for a route's data of a tag."""
    with Server(run[0], tmp_path / "server.log", f"--load_fast={request.param}") as server:

        def fetch(route: str, tag: str) -> Any:
            query = urllib.parse.urlencode({"run": ".", "tag": tag})
            try:
                with server.opener.open(f"{server.address}/data/plugin/{route}?{query}", timeout=10) as answer:
                    return json.load(answer)
            except OSError:  # not served yet
                return []

        server.wait_for(lambda: len(fetch("scalars/scalars", "mine/loss")) == STEPS)
        yield fetch


def series(ask: Ask, tag: str) -> dict[int, float]:
    return {step: value for _, step, value in ask("scalars/scalars", tag)}


def test_scalars_and_histograms_are_served_as_written(ask: Ask, run: tuple[Path, list[Frame]]) -> None:
    _, written = run
    assert [frame.step for frame in written] == list(range(STEPS))
    some = (("0", "activation", "std"), ("0.weight", "update", "ratio"), ("(root)", "gradient", "norm"))
    for path, kind, stat in some:
        wanted = {frame.step: getattr(frame[path, kind], stat) for frame in written}
        assert series(ask, f"{kind}.{stat}/{path}") == pytest.approx(wanted, rel=1e-5)
    losses = {frame.step: frame.scalars["train/loss"] for frame in written}
    assert series(ask, "train/loss") == pytest.approx(losses, rel=1e-5)
    assert series(ask, "mine/loss") == pytest.approx(losses, rel=1e-5), "the user's own scalars, every one"

    for path, kind in (("0", "activation"), ("2", "gradient"), ("2.weight", "weight"), ("0.bias", "weight_gradient")):
        served = {step: buckets for _, step, buckets in ask("histograms/histograms", f"{kind}/{path}")}
        assert sorted(served) == list(range(STEPS))
        for frame in written:
            check_buckets(served[frame.step], frame[path, kind])


def check_buckets(buckets: list[list[float]], reading: Any) -> None:
    assert sum(count for _, _, count in buckets) == pytest.approx(reading.count)
    assert all(count >= 0 for _, _, count in buckets)
    assert all(left <= right for left, right, _ in buckets)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(buckets))
    assert buckets[0][0] == pytest.approx(reading.min, rel=1e-6)
    assert buckets[-1][1] == pytest.approx(reading.max, rel=1e-6)
