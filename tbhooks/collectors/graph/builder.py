"""A graph in the making: calls of modules inside each other, and boxes inside them that are joined by arrows.

Plain objects that know no tensor. Names are given in the end, when it is known how often each thing was called.
What is called over and over, as in a recurrent loop, is drawn a few times, and then on top of the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tbhooks.data.artifacts import Graph, Node

# Calls of one module, and of one operation, inside one call of the module around them that have a box of their own.
MOST_CALLS = 8
MOST_OPERATIONS = 32
Shape = tuple[int, ...]


@dataclass(eq=False, repr=False)
class Box:
    """One operation, or one call of a module whose inside is not drawn."""

    scope: Scope
    label: str
    """What it is called, inside the scope; empty if it stands for the scope's own call."""
    operation: str
    order: int
    inputs: dict[tuple[Box, int], None] = field(default_factory=dict)
    after: Box | None = None
    """What ran before it, where arrows are not known."""
    shapes: list[Shape] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    repeats: int = 0
    """How many calls were drawn on top of it."""
    stays: bool = False
    """Whether it is drawn even if no arrow leaves it."""
    part_of: Box | None = None
    """The box it is drawn as."""

    @property
    def drawn(self) -> Box:
        box = self
        while box.part_of is not None:
            box = box.part_of
        return box


Origin = tuple[Box, int]
"""A box, and which of its outputs."""


@dataclass(eq=False, repr=False)
class Place:
    """Where a module is called inside a call of another."""

    calls: list[Scope] = field(default_factory=list)
    so_far: int = 0


@dataclass(eq=False, repr=False)
class Scope:
    """A call of a module; the outermost is a pass of the whole model."""

    path: str = ""
    around: Scope | None = None
    inside: str = ""
    """Its path from the module around it."""
    about: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    so_far: dict[str, int] = field(default_factory=dict)
    own: Box | None = None
    repeats: int = 0

    def restart(self) -> None:
        """It is called once more, and drawn on top of what is there."""
        self.so_far = {}
        for place in self.places.values():
            place.so_far = 0

    @property
    def is_empty(self) -> bool:
        return not self.places and not self.boxes

    def operations(self) -> Iterator[Box]:
        """What was computed in it, without what went in."""
        for boxes in self.boxes.values():
            yield from (box for box in boxes if not box.stays)


class Drawing:
    """Everything of one pass, in the order in which it ran."""

    def __init__(self) -> None:
        self.root = Scope()
        self.boxes: list[Box] = []

    def call(self, around: Scope, inside: str, path: str) -> Scope:
        """A module is called: its next call there, or the last one again if there were many."""
        place = around.places.setdefault(inside, Place())
        place.so_far += 1
        if place.so_far <= len(place.calls):
            scope = place.calls[place.so_far - 1]
        elif len(place.calls) < MOST_CALLS:
            place.calls.append(Scope(path, around, inside))
            return place.calls[-1]
        else:
            scope = place.calls[-1]
        scope.repeats += 1
        scope.restart()
        return scope

    def box(self, scope: Scope, label: str, operation: str) -> Box:
        """An operation is called, with the same rule."""
        known = scope.boxes.setdefault(label, [])
        number = scope.so_far[label] = scope.so_far.get(label, 0) + 1
        if number > len(known) and len(known) < MOST_OPERATIONS:
            known.append(self._new(scope, label, operation))
            return known[-1]
        box = known[min(number, len(known)) - 1]
        box.repeats += 1
        return box

    def own_box(self, scope: Scope, operation: str) -> Box:
        """What stands for a call itself; what is inside is drawn as part of it."""
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
        """The finished graph: the boxes that stay, under names that say what they are nested in."""
        shown = [box for box in self.boxes if box.part_of is None]
        if outputs:
            shown = _without_loose_ends(shown, outputs)
        names = _named(shown, _scope_names(self.root, ""))
        return Graph(name, tuple(_node(box, names) for box in shown))


def _sources(box: Box) -> list[Origin]:
    """Where its arrows come from. Calls drawn on top of earlier ones would make some of them point backwards."""
    found = ((source.drawn, port) for source, port in box.inputs)
    return list(dict.fromkeys((source, port) for source, port in found if source.order < box.order))


def _without_loose_ends(boxes: Iterable[Box], outputs: Sequence[Box]) -> list[Box]:
    """Less the operations from which no arrow leads anywhere: sizes, masks that were not used."""
    used = set(outputs)
    kept = []
    for box in reversed(list(boxes)):  # all arrows come from earlier boxes
        if box in used or box.stays:
            kept.append(box)
            used.update(source for source, _ in _sources(box))
    return kept[::-1]


def _scope_names(scope: Scope, name: str) -> dict[Scope, str]:
    """The first call of a module has its path for a name, and the others are beside it: nested, they would close
    loops where there are none.
    """
    names = {scope: name}
    for inside, place in scope.places.items():
        below = _joined(name, *inside.split("."))
        for number, call in enumerate(place.calls, start=1):
            names |= _scope_names(call, below if number == 1 else f"{below}.call_{number}")
    return names


def _joined(*parts: str) -> str:
    """What TensorBoard reads something into is replaced: outputs are counted with `:`, and `^` is an order."""
    return "/".join(re.sub(r"[:^\s\x00-\x1f]", "_", part) for part in parts if part)


def _named(boxes: Iterable[Box], scopes: dict[Scope, str]) -> dict[Box, str]:
    """A name for each: that of its module's call, or one inside it that neither a module nor another box has."""
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
    return [place for place, letter in enumerate(name) if letter == "/"] + [len(name)]


def _node(box: Box, names: dict[Box, str]) -> Node:
    inputs = [f"{names[source]}:{port}" if port else names[source] for source, port in _sources(box) if source in names]
    if box.after is not None and box.after.drawn in names:
        inputs.append(f"^{names[box.after.drawn]}")
    folded = {"calls": f"{box.repeats + 1}, drawn as one"} if box.repeats else {}
    return Node(names[box], box.operation, tuple(inputs), tuple(box.shapes), {**box.attributes, **folded})
