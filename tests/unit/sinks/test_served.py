"""A real TensorBoard serves pictures, channels and points as they were made, with either of its loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tbhooks
from tbhooks import Frame, MemorySink
from tbhooks.data.artifacts import Channels, Embedding, Picture
from tbhooks.delivery import worker as pump_module
from tests.support import images
from tests.support.tensorboard_server import Server

pytestmark = pytest.mark.xdist_group("tensorboard_server")

STEPS = 5
HOSTILE = "a\tb\n<script>"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.encoder = nn.Conv2d(1, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.conv(x).mean((2, 3)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Frame]]:
    torch.manual_seed(0)
    directory, model, kept = tmp_path_factory.mktemp("logs") / "run", Net(), MemorySink()
    labels = [HOSTILE, *map(str, range(7))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pump_module, "QUEUE_STEPS", 1000)
        w = tbhooks.watch(model, [directory, kept], every=1)
        w.images().per_channel("conv", histograms=True).embeddings("encoder", labels=labels, thumbnails="x", every=2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.rand(8, 1, 8, 8)).square().mean().backward()
            optimizer.step()
        w.close()
    assert not w.stats.errors, w.stats.messages
    return directory, kept.frames


@pytest.fixture(scope="module", params=["true", "false"], ids=["load_fast", "load_slow"])
def server(
    request: pytest.FixtureRequest, run: tuple[Path, list[Frame]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("printed") / "log"
    with Server(run[0].parent, log, f"--load_fast={request.param}") as serving:
        serving.wait_for(lambda: serving.ask("runs").status == 200 and serving.newest().get("run") == STEPS - 1)
        yield serving


def shown(frames: list[Frame], kind: type) -> dict[int, list[Any]]:
    return {frame.step: [each for each in frame.artifacts if isinstance(each, kind)] for frame in frames}


def test_pictures_are_served_as_painted(server: Server, run: tuple[Path, list[Frame]]) -> None:
    tags = server.get("plugin/images/tags").json["run"]
    painted = shown(run[1], Picture)
    assert set(tags) == {picture.tag for picture in painted[0]}
    for tag, reported in tags.items():
        assert "0.5 to the 99.5 percentile" in reported["description"]
        served = server.get("plugin/images/images", run="run", tag=tag, sample=0).json
        assert [each["step"] for each in served] == list(range(STEPS))
        for each in served:
            (picture,) = (picture for picture in painted[each["step"]] if picture.tag == tag)
            reply = server.get(f"plugin/images/individualImage?{each['query']}")
            assert reply.headers["Content-Type"] == "image/png"
            np.testing.assert_array_equal(images.decoded(reply.content), picture.pixels)
            assert len(reply.content) < 20_000


def test_channels_are_a_map_in_the_tab(server: Server, run: tuple[Path, list[Frame]]) -> None:
    seen = shown(run[1], Channels)
    for kind, path in (("activation", "conv"), ("weight", "conv.weight")):
        header, values = server.ask("matrix", run="run", kind=f"channel.{kind}", stat="mean").matrix
        assert header["steps"] == list(range(STEPS))
        wanted = [next(each for each in seen[step] if each.kind == kind).values[:, 1] for step in range(STEPS)]
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
        served = server.get("plugin/histograms/histograms", run="run", tag=f"{kind}/{path}[3]").json
        assert [step for _, step, _ in served] == list(range(STEPS))
        for _, step, buckets in served:
            row = next(each for each in seen[step] if each.kind == kind).values[3]
            assert sum(count for *_, count in buckets) == pytest.approx(row[0])
            assert buckets[0][0] == pytest.approx(row[3], rel=1e-6)


def test_points_are_served_with_labels_and_thumbnails(server: Server, run: tuple[Path, list[Frame]]) -> None:
    assert server.get("plugin/projector/runs").json == ["run"]
    entries = server.get("plugin/projector/info", run="run").json["embeddings"]
    made = {f"encoder (step {step})": found[0] for step, found in shown(run[1], Embedding).items() if found}
    assert [entry["tensorName"] for entry in entries] == list(made) == [f"encoder (step {i})" for i in (0, 2, 4)]
    for entry in entries:
        asked = {"run": "run", "name": entry["tensorName"]}
        embedding = made[entry["tensorName"]]
        assert entry["tensorShape"] == list(embedding.points.shape)
        points = np.frombuffer(server.get("plugin/projector/tensor", **asked).content, "<f4")
        np.testing.assert_allclose(points.reshape(embedding.points.shape), embedding.points, rtol=1e-4, atol=1e-7)
        lines = server.get("plugin/projector/metadata", **asked).content.decode().split("\n")
        assert lines == [*embedding.labels, ""]
        assert "a b <script>" in lines
        sprite = images.decoded(server.get("plugin/projector/sprite_image", **asked).content)
        wide, tall = entry["sprite"]["singleImageDim"]
        np.testing.assert_array_equal(sprite[:tall, :wide], embedding.thumbnails[0])
        side = int(np.ceil(np.sqrt(len(embedding.points))))
        assert sprite.shape == (side * tall, side * wide, 3)
