"""A model as a table: its layers in execution order, their outputs and parameters, as text and markdown. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tbhooks.data.artifacts import Text
from tbhooks.data.display import mimebundle
from tbhooks.drawing.text import printable, shape

TAG = "tbhooks/summary"
# Longer tables are shortened in TensorBoard and notebooks: only this many rows at each end. As text they are complete.
MOST_ROWS, ENDS = 400, 200
_UNITS = ("kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own, or without submodules."""

    path: str
    module: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of its outputs in its first call; empty until it has run."""
    dtype: str = ""
    parameters: int = 0
    """Its own parameters, without those of submodules and those that an earlier layer has, too."""
    trainable: int = 0
    tied_to: str = ""
    """The parameter of an earlier layer that this layer shares."""
    calls: int = 0
    nbytes: int = 0
    """The size of its outputs in all calls of one pass."""


@dataclass(frozen=True)
class Layers:
    """All layers of a model."""

    model: str
    layers: tuple[Layer, ...]
    parameter_bytes: int = 0
    samples: int = 0
    """The batch size of the pass in which outputs were captured; 0 before it."""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable(self) -> int:
        return sum(layer.trainable for layer in self.layers)

    @property
    def bytes_per_sample(self) -> float:
        """The size of the outputs of all layers for one sample."""
        return sum(layer.nbytes for layer in self.layers) / max(self.samples, 1)


def _output(layer: Layer, _layers: Layers) -> str:
    sizes = ", ".join(map(shape, layer.shapes))
    return f"{sizes} ({layer.calls} calls)" if layer.calls > 1 else sizes


def _trainable(layer: Layer, _layers: Layers) -> str:
    if layer.tied_to:
        return f"tied to {layer.tied_to}"
    if not layer.parameters:
        return ""
    every, none = layer.trainable == layer.parameters, not layer.trainable
    return "yes" if every else "no" if none else f"{layer.trainable:,}"


def _share(layer: Layer, layers: Layers) -> str:
    return f"{layer.parameters / layers.parameters:.1%}" if layer.parameters else ""


def _bytes(layer: Layer, layers: Layers) -> str:
    return in_bytes(layer.nbytes / layers.samples) if layers.samples and layer.calls else ""


Cell = Callable[[Layer, Layers], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("<layer", lambda layer, _: layer.path),
    ("<class", lambda layer, _: layer.module),
    ("<output", _output),
    ("<dtype", lambda layer, _: layer.dtype),
    ("parameters", lambda layer, _: f"{layer.parameters:,}" if layer.parameters else ""),
    ("<trainable", _trainable),
    ("share", _share),
    ("bytes/sample", _bytes),
)
"""Heading, left-aligned if it begins with "<", and the function that makes a cell."""


def cells(layers: Layers) -> list[list[str]]:
    """One row per layer."""
    return [[cell(layer, layers) for _, cell in COLUMNS] for layer in layers.layers]


def totals(layers: Layers) -> list[str]:
    """The lines below the table: numbers of parameters, and the size of outputs."""
    frozen = layers.parameters - layers.trainable
    size = in_bytes(layers.parameter_bytes)
    outputs = "outputs are filled in by the next logged pass"
    if layers.samples:
        per_sample = in_bytes(layers.bytes_per_sample)
        outputs = f"outputs of these layers: {per_sample} a sample, in a pass of {layers.samples}"
    return [f"{layers.parameters:,} parameters ({size}): {layers.trainable:,} trainable, {frozen:,} not", outputs]


def in_bytes(count: float) -> str:
    """A size with its unit: `512 B`, `1.2 MB`."""
    if count < 1000:
        return f"{count:.0f} B" if count == int(count) else f"{count:.1f} B"
    unit = -1
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.3g} {_UNITS[unit]}"


def as_text(layers: Layers) -> str:
    """The complete table, for a terminal."""
    rows = [[title.removeprefix("<") for title, _ in COLUMNS], *([*map(printable, row)] for row in cells(layers))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if title.startswith("<") else cell.rjust(width)
            for cell, width, (title, _) in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([printable(layers.model), "", *lines, "", *totals(layers)])


def ends(rows: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]], int]:
    """The first and the last rows of a long table, and the number between. A short table has only first rows."""
    if len(rows) <= MOST_ROWS:
        return list(rows), [], 0
    return list(rows[:ENDS]), list(rows[-ENDS:]), len(rows) - 2 * ENDS


def as_artifact(layers: Layers) -> Text:
    """The table in markdown, for TensorBoard's TEXT tab."""
    first, last, between = ends(cells(layers))
    head = " | ".join(title.removeprefix("<") for title, _ in COLUMNS)
    rule = " | ".join(":--" if title.startswith("<") else "--:" for title, _ in COLUMNS)
    gap = [f"{between:,} more | {' | ' * (len(COLUMNS) - 2)}"] if between else []
    lines = [head, rule, *map(_markdown_row, first), *gap, *map(_markdown_row, last)]
    table = "\n".join(f"| {line} |" for line in lines)
    return Text(TAG, f"**{_markdown(layers.model)}**\n\n{table}\n\n" + "  \n".join(totals(layers)))


def _markdown_row(row: list[str]) -> str:
    return " | ".join(map(_markdown, row))


_PLAIN = {letter: f"\\{letter}" for letter in "\\`*_{}[]#|!~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def _markdown(words: str) -> str:
    """Escapes what markdown would interpret."""
    return "".join(_PLAIN.get(letter, letter) for letter in printable(words))


class LayerSource(Protocol):
    """Has the layers of a model, with outputs as soon as they have run."""

    @property
    def layers(self) -> Layers: ...


class Summary:
    """The layers of a model as a table, returned by `Watch.summary()`. It has outputs as soon as a pass was logged."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source

    @property
    def layers(self) -> Layers:
        """The contents of the table."""
        return self._source.layers

    def __str__(self) -> str:
        return as_text(self.layers)

    def __repr__(self) -> str:
        layers = self.layers
        return f"<Summary: {layers.model}, {len(layers.layers)} layers, {layers.parameters:,} parameters>"

    _repr_mimebundle_ = mimebundle("summary")
