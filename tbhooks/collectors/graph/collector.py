"""The graph of a model as it was executed: of one training pass, and of one evaluation pass where those are read.

Hooks of its own are on the modules until a pass has gone through them, and then none. Nothing is run for it, and
nothing is traced.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import dynamo, tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.hooks.manager import hook_calls
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.packed_step import Read
from tbhooks.capture.recorder import Recorder
from tbhooks.collectors.graph.describe import is_called, shape_of, type_of
from tbhooks.collectors.graph.tracer import Pass, leaves
from tbhooks.data.artifacts import Artifact
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data

TRAINING, EVALUATION = "training", "evaluation"
ELSEWHERE = "of modules that run in another thread only that they ran is known"
COMPILED = "inside compiled code modules are seen, and neither operations nor what goes from one to another"


class GraphCollector:
    """Draws each kind of pass once."""

    def __init__(self, model: weakref.ref[nn.Module], observer: Observer, report: Report) -> None:
        self._model = model
        self._observer = observer
        self._report = report
        self._drawn: set[str] = set()
        self._waiting: list[tuple[str, Pass]] = []
        # Modules of which only outputs were shown, as compiled code does: their shapes and types.
        self._shown: dict[str, tuple[list[tuple[int, ...]], list[str]]] = {}
        self._modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._handles: list[RemovableHandle] = []
        self._pass: Pass | None = None
        self._into: Recorder | None = None
        self._phase = TRAINING
        self._thread = 0
        self._failed = False

    # As those who look on are asked.

    def wants(self, path: str, module: nn.Module) -> bool:
        """Outputs, for what no hook can follow."""
        return self._looks_at_outputs

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return False

    @property
    def _looks_at_outputs(self) -> bool:
        return not self._failed and TRAINING not in self._drawn

    def begin(self) -> None:
        self._shown = {}

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if self._looks_at_outputs and kind == "activation":
            shapes, types = self._shown.setdefault(path, ([], []))
            shapes.append(shape_of(tensor))
            types.append(type_of(tensor))

    def end(self, recorder: Recorder) -> None:
        """A step in which the model's own forward was not seen is drawn from what there is of it."""
        model = self._model()
        if model is not None and (self._pass is not None or self._shown) and not self._failed:
            if self._pass is None:
                self._into, self._phase = recorder, _phase(model)
            if self._phase not in self._drawn:
                self._finish(self._phase)
        for phase, followed in self._waiting:
            self._artifact(recorder, phase, followed)
        self._waiting = []

    def forget(self) -> None:
        """What was drawn stays: a step that did not count ran all the same."""
        self._drop()

    # Its own hooks, put on and taken off with the others.

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """On every module, if the next pass is to be drawn. What is compiled would be compiled anew for them."""
        model = self._model()
        if model is None or self._failed or not self._is_wanted(model):
            return
        self._modules = weakref.WeakValueDictionary(modules)
        if not self._handles and not self._observer.gate.was_compiled:
            self._handles = hook_calls(_python_runs_in(modules), self)

    def _is_wanted(self, model: nn.Module) -> bool:
        return TRAINING not in self._drawn or (not model.training and EVALUATION not in self._drawn)

    def detach(self) -> None:
        self._drop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _drop(self) -> None:
        """Leaves the pass that is being followed."""
        if self._pass is not None:
            self._pass.stop()
        self._pass = None

    # What they tell.

    def enters(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's forward begins."""
        if self._handles and not is_traced():
            with self._report.guarded(f"entering {path}"), self._kept_from_harm():
                if self._failed:
                    self.detach()
                elif not self._is_under_way():
                    self._begin_pass(path, args, kwargs)
                if self._pass is not None and threading.get_ident() == self._thread:
                    self._pass.enter(path, module, args, kwargs)

    def leaves(self, path: str, output: object) -> None:
        """It has ended, one way or another."""
        if self._pass is None or threading.get_ident() != self._thread or is_traced():
            return
        with self._report.guarded(f"leaving {path}"), self._kept_from_harm():
            if self._failed:
                self.detach()
                return
            self._pass.leave(path, output)
            if path == ROOT and not self._pass.is_running:
                if output is None and sys.exc_info()[0] is not None:
                    self._drop()
                else:
                    self._finish(self._phase)

    @contextlib.contextmanager
    def _kept_from_harm(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self._fail(problem)
            self.detach()

    def _fail(self, problem: Exception) -> None:
        """What cannot be drawn once is not tried again. In the middle of an operation the mode cannot be taken off:
        that is left to the next module that is entered or left.
        """
        if not self._failed:
            self._failed = True
            self._report.error("drawing the graph", problem)

    def _is_under_way(self) -> bool:
        """In any thread: those that run parts of a pass beside it are not drawn."""
        return self._pass is not None and (self._pass.is_running or threading.get_ident() != self._thread)

    def _begin_pass(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of the whole model; or of its parts, one after another, where its own forward is not what is called."""
        model, into = self._model(), self._observer.active_recorder()
        if model is None or into is None or in_backward() or _are_stand_ins(args, kwargs):
            self._drop()
            return
        phase = _phase(model)
        if dynamo.is_around():
            self._rest()
            return
        goes_on = self._pass is not None and path != ROOT and self._into is into and phase == self._phase
        if goes_on or phase in self._drawn:
            return
        self._drop()
        self._into, self._phase, self._thread = into, phase, threading.get_ident()
        self._pass = Pass(model, not self._is_compiled(model), self._report, self._fail)

    def _finish(self, phase: str) -> None:
        """A pass has gone through: it is drawn, with what compiled parts have shown of themselves."""
        model = self._model()
        if model is None:
            return
        followed = self._pass or Pass(model, False, self._report, self._fail)
        self._drop()
        shown, self._shown = self._shown, {}
        hidden = [path for path in leaves(list(shown)) if path not in followed.called and path in self._modules]
        for path in hidden:
            shapes, types = shown[path]
            followed.add_unconnected(path, self._modules[path], shapes, ", ".join(dict.fromkeys(types)))
        if hidden or not followed.sees_operations:
            self._report.mark_unseen(f"{phase} graph", ELSEWHERE if followed.sees_operations else COMPILED)
        self._drawn.add(phase)
        self._observer.collectors.change_subscription()
        if self._into is not None and self._into is self._observer.evaluation:
            self._artifact(self._into, phase, followed)
        else:
            self._waiting.append((phase, followed))
        if not self._is_wanted(model):
            self._rest()

    def _rest(self) -> None:
        """There is nothing to draw at present. Hooks that have been compiled do nothing, and stay until all go."""
        if not self._observer.gate.was_compiled:
            self.detach()

    def _artifact(self, recorder: Recorder, phase: str, followed: Pass) -> None:
        def make(_read: Read) -> Iterable[Artifact]:
            return [followed.graph(phase)]

        recorder.artifact(guarded(make, self._report, f"drawing the {phase} graph"))

    def _is_compiled(self, model: nn.Module) -> bool:
        """Whether compiled code runs in it, which would be compiled anew for a mode."""
        return self._observer.gate.was_compiled or any(map(dynamo.is_compiled, model.modules()))


def _python_runs_in(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those that are called, and not as part of something that is known to be compiled."""
    hidden = {
        name if path == ROOT else f"{path}.{name}"
        for path, module in modules.items()
        for name, part in module._modules.items()
        if part is not None and dynamo.is_compiled(part)
    }
    return {
        path: module
        for path, module in modules.items()
        if is_called(module) and not any(path == top or path.startswith(f"{top}.") for top in hidden)
    }


def _phase(model: nn.Module) -> str:
    return TRAINING if model.training else EVALUATION


def _are_stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(has_no_data(tensor) for _, tensor in tensor_tree.inputs(args, kwargs))
