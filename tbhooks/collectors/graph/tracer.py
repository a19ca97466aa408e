"""Traces one forward of a model, module by module and operation by operation, into a graph.

Hooks report when the call of a module begins and ends, and a TorchFunctionMode reports the operations in between. The
tracer compares identities of tensors, never reads their values, and keeps none alive.
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
from tbhooks.capture.functional.function_mode import FUSED_IN_EVALUATION, Operation
from tbhooks.collectors.graph.builder import Box, GraphBuilder, Origin, Scope
from tbhooks.collectors.graph.describe import about_module, shape_of, sizes, type_of
from tbhooks.collectors.graph.function_mode import JOIN, PASS_ON, TracingMode, name_of
from tbhooks.collectors.graph.provenance import Origins, version
from tbhooks.data.artifacts import Graph
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report

Failed = Callable[[Exception], None]
# Inputs and outputs with more tensors are caches or lists of all activations: the rest is ignored.
MOST_TENSORS = 64
NOT_FOLLOWED = "what went in is not known: it was compiled, or ran in another thread. The dotted arrow is the order"


@dataclass
class _Call:
    """A module whose forward is running."""

    path: str
    module: nn.Module
    scope: Scope
    given: list[tuple[int, int, Origin | str | None]]
    """The id, version and origin of each of its inputs."""
    is_blind: bool
    has_calls: bool = False


class Tracer:
    """The graph of one forward so far."""

    def __init__(self, model: nn.Module, sees_operations: bool, report: Report, failed: Failed) -> None:
        self.called: set[str] = set()
        self._report = report
        self._failed = failed
        self._builder = GraphBuilder()
        self._origins = Origins()
        self._running: list[_Call] = []
        self._outputs: list[Box] = []
        self.sees_operations = sees_operations
        self._mode: TracingMode | None = None
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._origins.set(tensor, name)

    @property
    def is_running(self) -> bool:
        """Whether a module is running; False after an interrupt."""
        return bool(self._running) and not (self._mode is not None and self._mode.was_interrupted)

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward of a module begins."""
        with torch._C.DisableTorchFunction():
            found = tensor_tree.inputs(args, kwargs)[:MOST_TENSORS]
            if not self._running:
                self._add_inputs(module, found)
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
            self._mode = TracingMode(self, module)
        self._update_mode()

    def leave(self, path: str, output: object) -> None:
        """The forward of a module has ended, and with it all calls inside that were not left."""
        paths = [call.path for call in self._running]
        if path not in paths:
            return
        with torch._C.DisableTorchFunction():
            depth = len(paths) - 1 - paths[::-1].index(path)
            call = self._running[depth]
            del self._running[depth:]
            found = tensor_tree.tensors(output)[:MOST_TENSORS]
            self._add_call(call, [tensor for _, tensor in found])
            if not self._running and path == ROOT:
                self._add_outputs(found)
        self._update_mode()

    def stop(self) -> None:
        """Ends tracing and removes the mode."""
        self._running = []
        self._update_mode()

    def _update_mode(self) -> None:
        if self._mode is not None:
            self._mode.set_active(bool(self._running) and not self._running[-1].is_blind)
            if not self._running:
                self._mode = None

    # --- Modules ---

    def _scope(self, path: str) -> Scope:
        """The scope of a call, inside the nearest running module that contains it."""
        if path == ROOT:
            return self._builder.root
        for call in reversed(self._running):
            if call.path != ROOT and path.startswith(f"{call.path}."):
                return self._builder.call(call.scope, path[len(call.path) + 1 :], path)
        return self._builder.call(self._builder.root, path, path)

    def _add_call(self, call: _Call, found: list[Tensor]) -> None:
        """Adds one box for a torch module without submodule calls, or one with a single operation.

        All other modules are represented by what is inside.
        """
        scope = call.scope
        if call.has_calls:
            if not scope.is_empty or not scope.inside:
                return
            given = [self._origin(tensor) for tensor in found]  # it only called modules from elsewhere
        elif is_of_torch(call.module) or sum(1 for _ in scope.operations()) <= 1:
            given = [origin for _, _, origin in call.given]
        else:
            return
        box = self._builder.own_box(scope, type(call.module).__name__)
        _connect(box, given)
        box.attributes |= {**scope.about, **_types(found)}
        unchanged = {identity: before for identity, before, _ in call.given}
        if found and all(unchanged.get(id(tensor)) == version(tensor) for tensor in found):
            box.attributes["note"] = "passes on what it is given, as it is"
        self._set_origins(box, found, unchanged)

    def _set_origins(self, box: Box, found: list[Tensor], given: dict[int, int]) -> None:
        box.shapes = box.shapes or [shape_of(tensor) for tensor in found]
        for port, tensor in enumerate(found):
            if given.get(id(tensor), version(tensor)) != version(tensor):
                self._origins.changed(tensor, (box, port))
            else:
                self._origins.set(tensor, (box, port))

    def add_unconnected(self, path: str, module: nn.Module, shapes: list[tuple[int, ...]], types: str) -> None:
        """Adds a module of which only the outputs are known, after the last box."""
        scope = self._scope(path)
        before = next((box for box in reversed(self._builder.boxes) if not box.label), None)
        box = self._builder.own_box(scope, type(module).__name__)
        if not box.shapes:
            box.shapes, box.after = shapes, before
            box.attributes = {**about_module(path, module), "dtype": types, "note": NOT_FOLLOWED}
        self.called.add(path)

    # --- Inputs and outputs of the model ---

    def _add_inputs(self, module: nn.Module, found: list[tuple[str, Tensor]]) -> None:
        names = argument_names(module)
        for index, tensor in found:
            if self._origins.of(tensor) is None:
                keys = re.findall(r"\[([^\]]*)\]", index) or ["0"]
                first = names[int(keys[0])] if keys[0].isdigit() and int(keys[0]) < len(names) else keys[0]
                box = self._builder.box(self._builder.root, "/".join(("input", first, *keys[1:])), "input")
                self._keep(box, tensor)
                self._origins.set(tensor, (box, 0))

    def _add_outputs(self, found: list[tuple[str, Tensor]]) -> None:
        for index, tensor in found:
            keys = re.findall(r"\[([^\]]*)\]", index)
            box = self._builder.box(self._builder.root, "/".join(("output", *keys)), "output")
            _connect(box, [self._origins.of(tensor)])
            self._keep(box, tensor)
            self._outputs.append(box)

    def _keep(self, box: Box, tensor: Tensor) -> None:
        box.stays, box.shapes = True, [shape_of(tensor)]
        box.attributes["dtype"] = type_of(tensor)

    def _origin(self, tensor: Tensor) -> Origin | str | None:
        """The origin of a tensor; a tensor of unknown origin gets a box for the operation that made it."""
        origin = self._origins.of(tensor)
        if origin is None and self._running and self.sees_operations:
            scope = self._running[-1].scope
            made_by = (
                re.sub(r"Backward\d*$", "", type(tensor.grad_fn).__name__) if tensor.grad_fn is not None else "tensor"
            )
            box = self._builder.box(scope, made_by, made_by)
            box.shapes = [shape_of(tensor)]
            box.attributes |= {**_types([tensor]), "note": "made by something that shows no operation"}
            origin = (box, 0)
            self._origins.set(tensor, origin)
        return origin

    # --- Operations ---

    @property
    def is_observing(self) -> bool:
        """False while our own hooks compute something."""
        return not self._report.is_at_work

    def before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """An operation begins. The origins of its inputs are looked up before it may change them."""
        try:
            with torch._C.DisableTorchFunction():
                return self._before(function, args, kwargs)
        except Exception as problem:
            self._failed(problem)
            return _nothing

    def _before(self, function: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        given = [tensor for _, tensor in tensor_tree.inputs(args, kwargs)]
        # Unknown origins are resolved later: most calls, such as size(), are not operations.
        origins = [self._origins.of(tensor) for tensor in given]
        versions = {id(tensor): version(tensor) for tensor in given}

        def after(result: Any) -> None:
            try:
                with torch._C.DisableTorchFunction():
                    self._add_operation(function, args, kwargs, result, origins, versions)
            except Exception as problem:
                self._failed(problem)

        return after

    def _add_operation(
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
        if name in JOIN:  # a cache starts with an empty tensor
            known = [origin for origin, tensor in zip(known, given, strict=True) if tensor.numel()] or known
        if (
            (name in PASS_ON or (name in JOIN and len(known) == 1))
            and known
            and known[0] is not None
            and not _has_tensor_indices(name, args)
        ):
            for tensor in found:
                self._origins.set(tensor, known[0])
            return
        box = self._builder.box(self._running[-1].scope, name, name)
        _connect(box, [] if name.startswith("new_") or name.endswith("_like") else known)  # they only use its size
        box.attributes |= {**_types(found), **_inside(self._running[-1].scope)}
        self._set_origins(box, found, versions)

    def graph(self, name: str) -> Graph:
        """The finished graph."""
        return self._builder.graph(name, self._outputs)


def _nothing(_result: object) -> None: ...


def _has_tensor_indices(name: str, args: tuple[Any, ...]) -> bool:
    """Whether indices are tensors, so that the result is not a view."""
    return name == "getitem" and any(True for _ in tensor_tree.tensors(args[1:]))


def is_of_torch(module: nn.Module) -> bool:
    """Whether the forward of a module is defined in torch.nn."""
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
    """An attribute with the module around a box, which TensorBoard does not show."""
    if "module" not in scope.about:
        return {}
    count = scope.about.get("parameters")
    return {"inside": scope.about["module"] + (f", {count} parameters" if count else "")}


def argument_names(module: nn.Module) -> list[str]:
    """The names of the positional arguments of a module's forward."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def leaves(paths: list[str]) -> Iterator[str]:
    """The modules among these that contain none of the others."""
    for path in dict.fromkeys(paths):
        if path != ROOT and not any(other.startswith(f"{path}.") for other in paths):
            yield path
