"""Artifacts: what a frame has in addition to statistics, such as texts, images, graphs, channels and embeddings.

They are immutable and in host memory, without torch and I/O. Each type is made by one collector, or by a method of
`Watch`. Sinks write the types they support and ignore the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.artifacts.flights import Flight
from tbhooks.data.stats import Counts, Floats

ENVIRONMENT = "tbhooks/environment"
"""The tag of the text about versions, devices and the model."""
Pixels = NDArray[np.uint8]
"""[height, width, 3], or [n, height, width, 3]."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text in markdown."""

    tag: str
    markdown: str


@dataclass(frozen=True, eq=False)
class Picture:
    """An image. The caption explains its colours."""

    tag: str
    pixels: Pixels
    caption: str = ""


@dataclass(frozen=True)
class Node:
    """A node of a graph. The name has slashes where nodes are nested; `inputs` are the names of the nodes before it."""

    name: str
    operation: str
    inputs: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """The graph of a model as it was executed."""

    name: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Channels:
    """Statistics and histograms with one row per channel or attention head, of outputs or of weights."""

    kind: str
    names: tuple[tuple[str, str], ...]
    """For each row the path of the module or parameter, and the channel, such as `[3]`."""
    values: Floats
    counts: Counts
    drawn: frozenset[str] = frozenset()
    """The paths whose histograms are also written as TensorBoard histograms."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """Embedding vectors, one per sample, with labels and thumbnails of the samples."""

    tag: str
    points: Floats
    labels: tuple[str, ...] = ()
    thumbnails: Pixels | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a run, and the tags of the metrics by which runs are compared."""

    values: Mapping[str, str | float | bool]
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEnded:
    """The end of a run that has hyperparameters."""

    failed: bool


@dataclass(frozen=True)
class FlightsLeftOut:
    """Dumps of the flight recorder that were not made, because there were too many: step and reason of each."""

    reasons: tuple[str, ...]


Artifact = Text | Picture | Graph | Channels | Embedding | Hyperparameters | RunEnded | Flight | FlightsLeftOut
