"""One pass of a model, followed from module to module and from operation to operation, and drawn as a graph.

Told by hooks when a module's call begins and ends, and by a mode what is computed in between. It looks at which
tensors these are, never at what is in them, and keeps none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tbhooks.capture import tensor_tree
from tbhooks.capture.hooks.function_mode import FUSED_IN_EVALUATION, Operation
from tbhooks.collectors.graph.builder import Box, Drawing, Origin, Scope
from tbhooks.collectors.graph.describe import about_module, shape_of, sizes, type_of
from tbhooks.collectors.graph.function_mode import JOIN, PASS_ON, Mode, name_of
from tbhooks.collectors.graph.provenance import Origins, version
from tbhooks.data.artifacts import Graph
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report

Failed = Callable[[Exception], None]
# More tensors than this of one output or input are a cache or a list of everything, and tell no more.
MOST_TENSORS = 64
NOT_FOLLOWED = "what went in is not known: it was compiled, or ran in another thread. The dotted arrow is the order"


@dataclass
class _Call:
    """A module whose forward is running."""

    path: str
    module: nn.Module
    scope: Scope
    given: list[tuple[int, int, Origin | str | None]]
    """The identity, version and origin of what it was called with."""
    is_blind: bool
    has_calls: bool = False


class Pass:
    """What one pass has shown so far."""

    def __init__(self, model: nn.Module, sees_operations: bool, report: Report, failed: Failed) -> None:
        self.called: set[str] = set()
        self._report = report
        self._failed = failed
        self._drawing = Drawing()
        self._origins = Origins()
        self._running: list[_Call] = []
        self._outputs: list[Box] = []
        self.sees_operations = sees_operations
        self._mode: Mode | None = None
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._origins.set(tensor, name)

    @property
    def is_running(self) -> bool:
        """Whether one of its modules is; not if an interrupt has ended them all."""
        return bool(self._running) and not (self._mode is not None and self._mode.is_left_behind)

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward of a module begins."""
        with torch._C.DisableTorchFunction():
            found = tensor_tree.inputs(args, kwargs)[:MOST_TENSORS]
            if not self._running:
                self._take_inputs(module, found)
            origins = [(id(tensor), version(tensor), self._origin(tensor)) for _, tensor in found]
            scope = self._scope(path)
            scope.about = scope.about or about_module(path, module)
            if self._running:
                self._running[-1].has_calls = True
            is_blind = (bool(self._running) and self._running[-1].is_blind) or (
                isinstance(module, FUSED_IN_EVALUATION) and not module.training
            )
            self._running.append(_Call(path, module, scope, origins, is_blind))
            self.called.add(path)
        if self._mode is None and self.sees_operations:
            self._mode = Mode(self, module)
        self._settle()

    def leave(self, path: str, output: object) -> None:
        """It has ended; ends what was entered inside and never left, too."""
        paths = [call.path for call in self._running]
        if path not in paths:
            return
        with torch._C.DisableTorchFunction():
            place = len(paths) - 1 - paths[::-1].index(path)
            call = self._running[place]
            del self._running[place:]
            found = tensor_tree.tensors(output)[:MOST_TENSORS]
            self._draw(call, [tensor for _, tensor in found])
            if not self._running and path == ROOT:
                self._give_outputs(found)
        self._settle()

    def stop(self) -> None:
        """Takes the mode off, wherever the pass is."""
        self._running = []
        self._settle()

    def _settle(self) -> None:
        if self._mode is not None:
            self._mode.set_active(bool(self._running) and not self._running[-1].is_blind)
            if not self._running:
                self._mode = None

    # Modules.

    def _scope(self, path: str) -> Scope:
        """Where a call is drawn: inside the nearest running module whose part it is."""
        if path == ROOT:
            return self._drawing.root
        for call in reversed(self._running):
            if call.path != ROOT and path.startswith(f"{call.path}."):
                return self._drawing.call(call.scope, path[len(call.path) + 1 :], path)
        return self._drawing.call(self._drawing.root, path, path)

    def _draw(self, call: _Call, found: list[Tensor]) -> None:
        """One box for a module that calls no others and is torch's own, or does but one thing; else what is in it."""
        scope = call.scope
        if call.has_calls:
            if not scope.is_empty or not scope.inside:
                return
            given = [self._origin(tensor) for tensor in found]  # all it did was to call modules from elsewhere
        elif is_of_torch(call.module) or sum(1 for _ in scope.operations()) <= 1:
            given = [origin for _, _, origin in call.given]
        else:
            return
        box = self._drawing.own_box(scope, type(call.module).__name__)
        _connect(box, given)
        box.attributes |= {**scope.about, **_types(found)}
        unchanged = {identity: before for identity, before, _ in call.given}
        if found and all(unchanged.get(id(tensor)) == version(tensor) for tensor in found):
            box.attributes["note"] = "passes on what it is given, as it is"
        self._came_out(box, found, unchanged)

    def _came_out(self, box: Box, found: list[Tensor], given: dict[int, int]) -> None:
        box.shapes = box.shapes or [shape_of(tensor) for tensor in found]
        for port, tensor in enumerate(found):
            if given.get(id(tensor), version(tensor)) != version(tensor):
                self._origins.changed(tensor, (box, port))
            else:
                self._origins.set(tensor, (box, port))

    def add_unconnected(self, path: str, module: nn.Module, shapes: list[tuple[int, ...]], types: str) -> None:
        """A module of which only its outputs were seen, after those that were added before it."""
        scope = self._scope(path)
        before = next((box for box in reversed(self._drawing.boxes) if not box.label), None)
        box = self._drawing.own_box(scope, type(module).__name__)
        if not box.shapes:
            box.shapes, box.after = shapes, before
            box.attributes = {**about_module(path, module), "dtype": types, "note": NOT_FOLLOWED}
        self.called.add(path)

    # What goes in and comes out of the whole.

    def _take_inputs(self, module: nn.Module, found: list[tuple[str, Tensor]]) -> None:
        names = argument_names(module)
        for index, tensor in found:
            if self._origins.of(tensor) is None:
                keys = re.findall(r"\[([^\]]*)\]", index) or ["0"]
                first = names[int(keys[0])] if keys[0].isdigit() and int(keys[0]) < len(names) else keys[0]
                box = self._drawing.box(self._drawing.root, "/".join(("input", first, *keys[1:])), "input")
                self._stays(box, tensor)
                self._origins.set(tensor, (box, 0))

    def _give_outputs(self, found: list[tuple[str, Tensor]]) -> None:
        for index, tensor in found:
            keys = re.findall(r"\[([^\]]*)\]", index)
            box = self._drawing.box(self._drawing.root, "/".join(("output", *keys)), "output")
            _connect(box, [self._origins.of(tensor)])
            self._stays(box, tensor)
            self._outputs.append(box)

    def _stays(self, box: Box, tensor: Tensor) -> None:
        box.stays, box.shapes = True, [shape_of(tensor)]
        box.attributes["dtype"] = type_of(tensor)

    def _origin(self, tensor: Tensor) -> Origin | str | None:
        """Where a tensor came from; one that came from nowhere was made by something that cannot be followed."""
        origin = self._origins.of(tensor)
        if origin is None and self._running and self.sees_operations:
            scope = self._running[-1].scope
            made_by = (
                re.sub(r"Backward\d*$", "", type(tensor.grad_fn).__name__) if tensor.grad_fn is not None else "tensor"
            )
            box = self._drawing.box(scope, made_by, made_by)
            box.shapes = [shape_of(tensor)]
            box.attributes |= {**_types([tensor]), "note": "made by something that shows no operation"}
            origin = (box, 0)
            self._origins.set(tensor, origin)
        return origin

    # Operations.

    @property
    def is_looking(self) -> bool:
        """Not where our own hooks compute something."""
        return not self._report.is_at_work

    def before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """An operation begins: where what it is given comes from has to be known before it changes anything."""
        try:
            with torch._C.DisableTorchFunction():
                return self._before(function, args, kwargs)
        except Exception as problem:
            self._failed(problem)
            return _nothing

    def _before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        given = [tensor for _, tensor in tensor_tree.inputs(args, kwargs)]
        # Most of what is asked of a tensor, such as its size, is no operation: whose origin is unknown is seen later.
        origins = [self._origins.of(tensor) for tensor in given]
        versions = {id(tensor): version(tensor) for tensor in given}

        def after(result: Any) -> None:
            try:
                with torch._C.DisableTorchFunction():
                    self._operated(function, args, kwargs, result, origins, versions)
            except Exception as problem:
                self._failed(problem)

        return after

    def _operated(
        self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: object,
        origins: list[Origin | str | None], versions: dict[int, int],
    ) -> None:  # fmt: skip
        name = name_of(function)
        found = [tensor for _, tensor in tensor_tree.tensors(args[0] if name == "setitem" else result)]
        found = [tensor for tensor in found if versions.get(id(tensor)) != version(tensor) or tensor.is_inference()]
        if not found or not self._running:
            return
        given = [tensor for _, tensor in tensor_tree.inputs(args, kwargs)]
        known = [
            origin if origin is not None else self._origin(tensor)
            for origin, tensor in zip(origins, given, strict=True)
        ]
        if name in JOIN:  # how caches begin: nothing, and something behind it
            known = [origin for origin, tensor in zip(known, given, strict=True) if tensor.numel()] or known
        if (
            (name in PASS_ON or (name in JOIN and len(known) == 1))
            and known
            and known[0] is not None
            and not _is_looked_up(name, args)
        ):
            for tensor in found:
                self._origins.set(tensor, known[0])
            return
        box = self._drawing.box(self._running[-1].scope, name, name)
        _connect(box, [] if name.startswith("new_") or name.endswith("_like") else known)  # which ask for a size
        box.attributes |= {**_types(found), **_inside(self._running[-1].scope)}
        self._came_out(box, found, versions)

    def graph(self, name: str) -> Graph:
        """What was followed, as a graph; the pass is not needed any more."""
        return self._drawing.graph(name, self._outputs)


def _nothing(_result: object) -> None: ...


def _is_looked_up(name: str, args: tuple[Any, ...]) -> bool:
    """Whether indices are tensors, so that what comes out is more than a part of what went in."""
    return name == "getitem" and any(True for _ in tensor_tree.tensors(args[1:]))


def is_of_torch(module: nn.Module) -> bool:
    """Whether what it does is torch's own."""
    return (getattr(type(module).forward, "__module__", None) or "").startswith("torch.nn.")


def _connect(box: Box, origins: list[Origin | str | None]) -> None:
    for origin in origins:
        if isinstance(origin, tuple):
            box.inputs[origin] = None
        elif origin is not None:
            used = box.attributes.get("uses")
            names = used.split(", ") if used else []
            if origin not in names:
                box.attributes["uses"] = ", ".join([*names, origin])


def _types(found: list[Tensor]) -> dict[str, str]:
    if not found:
        return {}
    return {"dtype": ", ".join(dict.fromkeys(map(type_of, found))), "output": ", ".join(map(sizes, found))}


def _inside(scope: Scope) -> dict[str, str]:
    """TensorBoard says nothing of what boxes are nested in: the boxes do."""
    if "module" not in scope.about:
        return {}
    count = scope.about.get("parameters")
    return {"inside": scope.about["module"] + (f", {count} parameters" if count else "")}


def argument_names(module: nn.Module) -> list[str]:
    """What its forward calls what it takes by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def leaves(paths: list[str]) -> Iterator[str]:
    """Of these modules those that have none of the others inside."""
    for path in dict.fromkeys(paths):
        if path != ROOT and not any(other.startswith(f"{path}.") for other in paths):
            yield path
