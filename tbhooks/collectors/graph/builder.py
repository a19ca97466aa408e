"""Builds a graph: nested calls of modules (scopes), and boxes inside them that are connected by edges.

Plain objects without tensors. Names are assigned at the end, when the number of calls is known. Modules and operations
that are called many times, as in a recurrent loop, get a few boxes; further calls share the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tbhooks.data.artifacts import Graph, Node

# How many calls of one module, and of one operation, get their own box inside one call of the parent module.
MOST_CALLS = 8
MOST_OPERATIONS = 32
Shape = tuple[int, ...]


@dataclass(eq=False, repr=False)
class Box:
    """A node: one operation, or one call of a module that is shown as a single node."""

    scope: Scope
    label: str
    """Its name inside the scope; empty if it represents the scope's own call."""
    operation: str
    order: int
    inputs: dict[tuple[Box, int], None] = field(default_factory=dict)
    after: Box | None = None
    """The box that ran before it, where edges are not known."""
    shapes: list[Shape] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    repeats: int = 0
    """The number of further calls that share it."""
    stays: bool = False
    """Whether it is kept even if no edge leaves it."""
    part_of: Box | None = None
    """The box that represents it."""

    @property
    def drawn(self) -> Box:
        box = self
        while box.part_of is not None:
            box = box.part_of
        return box


Origin = tuple[Box, int]
"""A box, and the number of its output."""


@dataclass(eq=False, repr=False)
class CallSite:
    """The calls of one module inside a call of another."""

    calls: list[Scope] = field(default_factory=list)
    so_far: int = 0


@dataclass(eq=False, repr=False)
class Scope:
    """A call of a module; the outermost is the forward of the model."""

    path: str = ""
    around: Scope | None = None
    inside: str = ""
    """Its path relative to the module around it."""
    about: dict[str, str] = field(default_factory=dict)
    call_sites: dict[str, CallSite] = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    so_far: dict[str, int] = field(default_factory=dict)
    own: Box | None = None
    repeats: int = 0

    def restart(self) -> None:
        """Another call begins that shares the existing boxes."""
        self.so_far = {}
        for site in self.call_sites.values():
            site.so_far = 0

    @property
    def is_empty(self) -> bool:
        return not self.call_sites and not self.boxes

    def operations(self) -> Iterator[Box]:
        """Its operations, without inputs."""
        for boxes in self.boxes.values():
            yield from (box for box in boxes if not box.stays)


class GraphBuilder:
    """The scopes and boxes of one forward, in execution order."""

    def __init__(self) -> None:
        self.root = Scope()
        self.boxes: list[Box] = []

    def call(self, around: Scope, inside: str, path: str) -> Scope:
        """The scope of a module's next call; the last one again if there were many."""
        site = around.call_sites.setdefault(inside, CallSite())
        site.so_far += 1
        if site.so_far > len(site.calls) and len(site.calls) < MOST_CALLS:
            site.calls.append(Scope(path, around, inside))
            return site.calls[-1]
        scope = site.calls[min(site.so_far, len(site.calls)) - 1]
        scope.repeats += 1
        scope.restart()
        return scope

    def box(self, scope: Scope, label: str, operation: str) -> Box:
        """The box of an operation's next call; the last one again if there were many."""
        known = scope.boxes.setdefault(label, [])
        number = scope.so_far[label] = scope.so_far.get(label, 0) + 1
        if number > len(known) and len(known) < MOST_OPERATIONS:
            known.append(self._new(scope, label, operation))
            return known[-1]
        box = known[min(number, len(known)) - 1]
        box.repeats += 1
        return box

    def own_box(self, scope: Scope, operation: str) -> Box:
        """The box that represents a call itself, with everything inside it."""
        if scope.own is None:
            scope.own = self._new(scope, "", operation)
            scope.own.stays = True
        scope.own.repeats = scope.repeats
        for box in scope.operations():
            if box.part_of is None:
                box.part_of = scope.own
                scope.own.inputs.update(box.inputs)
        return scope.own

    def _new(self, scope: Scope, label: str, operation: str) -> Box:
        self.boxes.append(Box(scope, label, operation, len(self.boxes)))
        return self.boxes[-1]

    def graph(self, name: str, outputs: Sequence[Box]) -> Graph:
        """The finished graph, with names that contain the nesting."""
        shown = [box for box in self.boxes if box.part_of is None]
        if outputs:
            shown = _without_unused(shown, outputs)
        names = _named(shown, _scope_names(self.root, ""))
        return Graph(name, tuple(_node(box, names) for box in shown))


def _sources(box: Box) -> list[Origin]:
    """The origins of its edges, without those that would point backwards because calls share boxes."""
    origins = ((source.drawn, port) for source, port in box.inputs)
    return list(dict.fromkeys((source, port) for source, port in origins if source.order < box.order))


def _without_unused(boxes: Iterable[Box], outputs: Sequence[Box]) -> list[Box]:
    """Without operations whose result is not used, such as sizes and unused masks."""
    used = set(outputs)
    kept = []
    for box in reversed(list(boxes)):  # all edges come from earlier boxes
        if box in used or box.stays:
            kept.append(box)
            used.update(source for source, _ in _sources(box))
    return kept[::-1]


def _scope_names(scope: Scope, name: str) -> dict[Scope, str]:
    """The first call of a module is named by its path. Further calls are siblings: nested, they would form loops."""
    names = {scope: name}
    for inside, site in scope.call_sites.items():
        below = _joined(name, *inside.split("."))
        for number, call in enumerate(site.calls, start=1):
            names |= _scope_names(call, below if number == 1 else f"{below}.call_{number}")
    return names


def _joined(*parts: str) -> str:
    """A node name without characters that have a meaning in TensorBoard: `:` for outputs, `^` for control edges."""
    return "/".join(re.sub(r"[:^\s\x00-\x1f]", "_", part) for part in parts if part)


def _named(boxes: Iterable[Box], scopes: dict[Scope, str]) -> dict[Box, str]:
    """A unique name for each box: that of its module's call, or one inside it."""
    nested = {name[:end] for name in scopes.values() for end in _ends(name)}
    names: dict[Box, str] = {}
    used: set[str] = set()
    for box in boxes:
        scope = scopes[box.scope]
        is_call = bool(scope) and not box.label
        name = scope if is_call else _joined(scope, *(box.label or box.operation).split("/"))
        free, number = name, 0
        while free in used or (free in nested and not is_call):
            number += 1
            free = f"{name}_{number}"
        used.add(free)
        names[box] = free
    return names


def _ends(name: str) -> list[int]:
    return [i for i, letter in enumerate(name) if letter == "/"] + [len(name)]


def _node(box: Box, names: dict[Box, str]) -> Node:
    inputs = [f"{names[source]}:{port}" if port else names[source] for source, port in _sources(box) if source in names]
    if box.after is not None and box.after.drawn in names:
        inputs.append(f"^{names[box.after.drawn]}")
    folded = {"calls": f"{box.repeats + 1}, drawn as one"} if box.repeats else {}
    return Node(names[box], box.operation, tuple(inputs), tuple(box.shapes), {**box.attributes, **folded})
