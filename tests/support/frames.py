"""What the delivery tests share: frames built from arrays, a small watched training, event files read back."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch import nn

from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.stats import BASE, WIDTH
from tbhooks.sinks.tensorboard import OUTCOME_TAG, TensorBoardSink
from tests.support import reference

SOME = {
    Site("0", "activation"): [-1.0, 0.0, 2.0, 3.5],
    Site("0", "gradient"): [1e-4, -2e-4, 3e-4],
    Site("0.weight", "weight"): [0.5, -0.25],
    Site("0.weight", "weight_gradient"): [3.0, 4.0],
    Site("0.weight", "update"): [0.03, 0.04],
}


def make_frame(
    step: int = 0,
    data: Mapping[Site, Any] | None = None,
    *,
    scalars: Mapping[str, float] | None = None,
    histograms: bool = True,
    findings: Sequence[Finding] = (),
) -> Frame:
    """The frame a step with these arrays at these sites would give; an update is measured against its weight."""
    data = SOME if data is None else data
    arrays = {site: np.asarray(array, dtype=np.float64).ravel() for site, array in data.items()}
    values = np.array([_row(array) for array in arrays.values()]).reshape(len(arrays), WIDTH)
    for i, site in enumerate(arrays):
        if site.kind == "update":
            values[i, BASE] = float(np.square(arrays[Site(site.path, "weight")]).sum())
    counts = [reference.bucket_counts(array) for array in arrays.values()] if histograms else []
    buckets = np.array(counts, dtype=np.int64).reshape(len(arrays), reference.BUCKETS if histograms else 0)
    return Frame(step, 1e9 + step, 0, tuple(arrays), values, buckets, tuple(findings), dict(scalars or {}))


def _row(array: NDArray[np.float64]) -> list[float]:
    finite = array[np.isfinite(array)]
    mean = math.fsum(finite) / max(len(finite), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        m2, m3, m4 = (float(((finite - mean) ** power).sum()) for power in (2, 3, 4))
    low, high = (finite.min(), finite.max()) if len(finite) else (math.inf, -math.inf)
    nans, infs = np.isnan(array).sum(), np.isinf(array).sum()
    return [len(array), mean, m2, low, high, (array == 0).sum(), nans, infs, 0.0, m3, m4]


def write_run(directory: Path, *frames: Frame, **options: Any) -> Path:
    """Writes the frames as a TensorBoard run, and returns its directory."""
    sink = TensorBoardSink(directory, **options)
    for frame in frames:
        sink.write(frame)
    sink.close()
    return directory


class Step:
    """A finished step as the worker takes it; its size is nothing unless the test says so."""

    def __init__(self, *frames: Frame, problem: Exception | None = None, nbytes: int = 0) -> None:
        self._frames, self._problem = frames, problem
        self.nbytes = nbytes

    def frames(self) -> Sequence[Frame]:
        if self._problem is not None:
            raise self._problem
        return self._frames

    def without_numbers(self) -> None:
        """Nobody waits for it."""


@contextlib.contextmanager
def full_disk(path: Path, room: int) -> Iterator[None]:
    """No file of this process may grow beyond what this one has and so many bytes more; a write that would is cut."""
    resource = pytest.importorskip("resource")
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or make_optimizer(model)
    for _ in range(steps):
        train_step(model, optimizer)


def event_files(directory: str | Path) -> list[Path]:
    return sorted(Path(directory).rglob("*tfevents*"))


def events(directory: str | Path) -> Iterator[Any]:
    """Every event of the one file there is, as TensorBoard's own loader reads it: checksums are checked."""
    (file,) = event_files(directory)
    yield from LegacyEventFileLoader(str(file)).Load()


def events_by_step(directory: str | Path) -> Counter[int]:
    """How many events each step has, without the one that says how the run ended."""
    summaries = [event for event in events(directory) if event.HasField("summary")]
    return Counter(each.step for each in summaries if [v.tag for v in each.summary.value] != [OUTCOME_TAG])


def tags(directory: str | Path) -> set[str]:
    return {value.tag for event in events(directory) for value in event.summary.value}


def histograms(directory: str | Path) -> dict[tuple[int, str], Any]:
    """HistogramProto by step and tag, as written."""
    return {
        (event.step, value.tag): value.histo
        for event in events(directory)
        for value in event.summary.value
        if value.HasField("histo")
    }


def accumulator(directory: str | Path) -> EventAccumulator:
    """TensorBoard's reader, keeping everything."""
    everything = {"scalars": 0, "histograms": 0, "tensors": 0, "compressedHistograms": 0}
    return EventAccumulator(str(directory), size_guidance=everything).Reload()


def scalar_series(directory: str | Path, tag: str) -> dict[int, float]:
    """Values by step; a scalar is written once a step."""
    series = [(point.step, point.value) for point in accumulator(directory).Scalars(tag)]
    assert len(dict(series)) == len(series)
    return dict(series)


def training_frame(step: int, scale: float = 1.0, loss: float | None = None, findings: Any = ()) -> Frame:
    """A frame of a small training: three modules and a weight, with random numbers of the given scale."""
    rng = np.random.default_rng(step)
    data: dict[Site, Any] = {Site(name, "activation"): rng.normal(size=50) * scale for name in ("b", "a", "c")}
    data |= {Site(name, "gradient"): rng.normal(size=50) * scale for name in ("c", "a", "b")}
    data |= {Site("a.weight", "weight"): np.ones(4), Site("a.weight", "weight_gradient"): np.ones(4) * scale}
    data[Site("a.weight", "update")] = np.full(4, 0.01)
    scalars = {"train/loss": 1.0 / (step + 1) if loss is None else loss, "train.lr/0": 0.1}
    return make_frame(step, data, scalars=scalars, findings=findings)
