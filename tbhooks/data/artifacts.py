"""What goes along with a frame besides its numbers: texts, pictures, graphs, maps, points.

Vocabulary: immutable, on the CPU, no torch and no I/O. Each kind is made by one onlooker, or by a call on the
watch, and written by the sinks that have a place for it; others pass it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tbhooks.data.stats import Counts, Floats

Pixels = NDArray[np.uint8]
"""[height, width, 3], or several of them."""


@dataclass(frozen=True, eq=False)
class Text:
    """Something to read, in markdown."""

    tag: str
    markdown: str


@dataclass(frozen=True, eq=False)
class Picture:
    """Something to look at; the caption says what its colours mean."""

    tag: str
    pixels: Pixels
    caption: str = ""


@dataclass(frozen=True)
class Node:
    """A box of a graph: its slashed name says what it is nested in, `inputs` which boxes its arrows come from."""

    name: str
    operation: str
    inputs: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A model as it was executed."""

    name: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Channels:
    """One row and one histogram a channel, or a head, of modules' outputs or of weights."""

    kind: str
    names: tuple[tuple[str, str], ...]
    """A module's or parameter's path, and the channel such as `[3]`."""
    values: Floats
    counts: Counts
    drawn: frozenset[str] = frozenset()
    """The paths whose histograms are also for readers, and not only for tools."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """Points in many dimensions, with what is known of each."""

    tag: str
    points: Floats
    labels: tuple[str, ...] = ()
    thumbnails: Pixels | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """What a run was started with, and the tags by which runs are compared."""

    values: Mapping[str, str | float | bool]
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEnded:
    """A run whose hyperparameters were told is over."""

    failed: bool


Artifact = Text | Picture | Graph | Channels | Embedding | Hyperparameters | RunEnded
