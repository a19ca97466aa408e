"""Files for the PROJECTOR tab: complete, bounded, beside what others have listed."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from torch.utils.tensorboard import SummaryWriter

from tbhooks.data.artifacts import Embedding
from tbhooks.sinks.tensorboard import embeddings
from tests.support import images


def embedding(tag: str = "encoder", n: int = 5) -> Embedding:
    points = np.random.default_rng(0).normal(size=(n, 3))
    pixels = np.arange(n * 4 * 6 * 3, dtype=np.uint8).reshape(n, 4, 6, 3)
    return Embedding(tag, points, tuple(f"label {i}" for i in range(n)), pixels)


def write(directory: Path | str, step: int = 0, what: Embedding | None = None) -> None:
    embeddings.write(what or embedding(), None, SimpleNamespace(directory=str(directory), step=step))


def listed(directory: Path) -> ProjectorConfig:
    return text_format.Parse((directory / "projector_config.pbtxt").read_text(), ProjectorConfig())


def names(directory: Path) -> list[str]:
    return [info.tensor_name for info in listed(directory).embeddings]


def test_files_hold_points_labels_and_thumbnails(tmp_path: Path) -> None:
    write(tmp_path, 7)
    (info,) = listed(tmp_path).embeddings
    assert info.tensor_name == "encoder (step 7)"
    assert list(info.tensor_shape) == [5, 3]
    points = np.loadtxt(io.StringIO((tmp_path / info.tensor_path).read_text()), delimiter="\t")
    np.testing.assert_allclose(points, embedding().points, rtol=1e-5)
    assert (tmp_path / info.metadata_path).read_text().splitlines() == [f"label {i}" for i in range(5)]
    sprite = images.decoded((tmp_path / info.sprite.image_path).read_bytes())
    assert list(info.sprite.single_image_dim) == [6, 4]
    assert sprite.shape == (3 * 4, 3 * 6, 3)
    thumbnails = embedding().thumbnails
    assert thumbnails is not None
    np.testing.assert_array_equal(sprite[4:8, 6:12], thumbnails[4])


def test_nothing_unfinished_is_left(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_entries_of_other_layers_and_of_add_embedding_stay_listed(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_embedding(torch.randn(4, 2), metadata=list("abcd"), tag="mine")
        write(tmp_path, 0)
        write(tmp_path, 0, embedding("decoder"))
        assert names(tmp_path) == ["mine:00000", "decoder (step 0)", "encoder (step 0)"]
        writer.add_embedding(torch.randn(4, 2), tag="mine", global_step=1)  # which lists its own alone
        write(tmp_path, 5)
    assert names(tmp_path) == [
        "mine:00000", "mine:00001", "decoder (step 0)", "encoder (step 0)", "encoder (step 5)",
    ]  # fmt: skip


def test_a_step_that_is_written_again_replaces_itself(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 3, embedding(n=2))
    (info,) = listed(tmp_path).embeddings
    assert list(info.tensor_shape) == [2, 3]


def test_of_many_entries_the_first_and_the_newest_stay(tmp_path: Path) -> None:
    for step in range(30):
        write(tmp_path, step, embedding(n=1))
    steps = [0, *range(11, 30)]
    assert names(tmp_path) == [f"encoder (step {step})" for step in steps]
    assert len(list((tmp_path / "embeddings" / "encoder").iterdir())) == 20


@pytest.mark.parametrize("tag", ["../../etc", "..", "a/b", "слой", "x" * 400, "a\nb"])
def test_hostile_names_stay_inside_the_run(tag: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write(run, 0, embedding(tag))
    (info,) = listed(run).embeddings
    assert (run / info.tensor_path).resolve().is_relative_to(run.resolve())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert info.tensor_name == f"{tag} (step 0)"


def test_elsewhere_than_in_local_directories_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write("s3://bucket/run")
    assert not list(tmp_path.iterdir())


def test_a_list_that_does_not_read_is_left_alone_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "projector_config.pbtxt").write_text("{{{")
    with caplog.at_level(logging.WARNING):
        write(tmp_path)
    assert (tmp_path / "projector_config.pbtxt").read_text() == "{{{"
    assert "not in the PROJECTOR tab" in caplog.text
