"""The graph of a model as it was executed: of one training forward, and of one evaluation forward if recorded.

The collector has its own module hooks until one forward is complete. The model is not run for it, and torch.jit and
torch.export are not used.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced
from tbhooks.capture.compile import dynamo
from tbhooks.capture.hooks.collectors import guarded
from tbhooks.capture.hooks.manager import hook_calls
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.recording.packed_step import Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.retries import Retries
from tbhooks.collectors.graph.describe import is_called, shape_of, type_of
from tbhooks.collectors.graph.tracer import Tracer, leaves
from tbhooks.data.artifacts import Artifact
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.reduction.torch_rows import has_no_data

TRAINING, EVALUATION = "training", "evaluation"
TRACING = "tracing"
ELSEWHERE = "modules that run in another thread are shown without connections"
COMPILED = "inside compiled code only modules are shown, without operations and connections"


class GraphCollector:
    """Traces one forward of each phase."""

    def __init__(self, model: weakref.ref[nn.Module], observer: Observer, report: Report) -> None:
        self._model = model
        self._observer = observer
        self._report = report
        self._done: set[str] = set()
        self._finished: list[tuple[str, Tracer]] = []
        # The shapes and dtypes of outputs, for modules that the hooks do not see, as in compiled code.
        self._outputs: dict[str, tuple[list[tuple[int, ...]], list[str]]] = {}
        self._modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._handles: list[RemovableHandle] = []
        self._tracer: Tracer | None = None
        self._recorder: Recorder | None = None
        self._phase = TRAINING
        self._thread = 0
        self._failing: Retries[str] = Retries()

    # --- The Collector protocol ---

    def wants(self, path: str, module: nn.Module) -> bool:
        """Outputs, for modules that the hooks do not see."""
        return self._wants_outputs

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        return False

    @property
    def _wants_outputs(self) -> bool:
        return not self._failed and TRAINING not in self._done

    @property
    def _failed(self) -> bool:
        """Whether tracing has failed in this step, or was given up."""
        return not self._failing.may_try(TRACING)

    def begin(self) -> None:
        self._outputs = {}
        if self._failed:
            self._failing.next_step()
            self._observer.collectors.change_subscription()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if self._wants_outputs and kind == "activation":
            shapes, types = self._outputs.setdefault(path, ([], []))
            shapes.append(shape_of(tensor))
            types.append(type_of(tensor))

    def end(self, recorder: Recorder) -> None:
        """Finishes a step in which the model's own forward was not called, from the modules that ran."""
        model = self._model()
        if model is not None and (self._tracer is not None or self._outputs) and not self._failed:
            if self._tracer is None:
                self._recorder, self._phase = recorder, _phase(model)
            if self._phase not in self._done:
                self._finish(self._phase)
        for phase, tracer in self._finished:
            self._add_artifact(recorder, phase, tracer)
        self._finished = []

    def forget(self) -> None:
        """Finished graphs are kept: the forward of an abandoned step did run."""
        self._drop()

    # --- Its own hooks, attached and detached with those of the watch ---

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Hooks every module if the next forward is to be traced, except compiled ones, which would be recompiled."""
        model = self._model()
        if model is None or self._failed or not self._is_wanted(model):
            return
        self._modules = weakref.WeakValueDictionary(modules)
        if not self._handles and not self._observer.gate.was_compiled:
            self._handles = hook_calls(_uncompiled(modules), self)

    def _is_wanted(self, model: nn.Module) -> bool:
        return TRAINING not in self._done or (not model.training and EVALUATION not in self._done)

    def detach(self) -> None:
        self._drop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _drop(self) -> None:
        """Ends tracing of the current forward."""
        if self._tracer is not None:
            self._tracer.stop()
        self._tracer = None

    # --- Called by the hooks ---

    def enters(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's forward begins."""
        if self._handles and not is_traced():
            with self._report.guarded(f"entering {path}"), self._stopping_on_error():
                if self._failed:
                    self.detach()
                elif not self._is_tracing():
                    self._begin_pass(path, args, kwargs)
                if self._tracer is not None and threading.get_ident() == self._thread:
                    self._tracer.enter(path, module, args, kwargs)

    def leaves(self, path: str, output: object) -> None:
        """A module's forward has returned or raised."""
        if self._tracer is None or threading.get_ident() != self._thread or is_traced():
            return
        with self._report.guarded(f"leaving {path}"), self._stopping_on_error():
            if self._failed:
                self.detach()
                return
            self._tracer.leave(path, output)
            if path == ROOT and not self._tracer.is_running:
                if output is None and sys.exc_info()[0] is not None:
                    self._drop()
                else:
                    self._finish(self._phase)

    @contextlib.contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self._fail(problem)
            self.detach()

    def _fail(self, problem: Exception) -> None:
        """Reports an error; tracing is tried again on the next logged step, and given up after several in a row.

        The mode cannot be removed during an operation: that is left to the next hook.
        """
        if not self._failed:
            gives_up = self._failing.failed(TRACING)
            self._report.error("drawing the graph", problem)
            if gives_up:
                self._report.log_once(f"drawing the graph: {describe_exception(problem)}{gives_up}", logging.ERROR)

    def _is_tracing(self) -> bool:
        """Whether a forward is being traced, in any thread."""
        return self._tracer is not None and (self._tracer.is_running or threading.get_ident() != self._thread)

    def _begin_pass(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Starts tracing the model, or its parts one after another if the model's own forward is not called."""
        model, recorder = self._model(), self._observer.active_recorder()
        if model is None or recorder is None or in_backward() or _have_no_data(args, kwargs):
            self._drop()
            return
        phase = _phase(model)
        if dynamo.is_around():
            self._rest()
            return
        continues = self._tracer is not None and path != ROOT and self._recorder is recorder and phase == self._phase
        if continues or phase in self._done:
            return
        self._drop()
        self._recorder, self._phase, self._thread = recorder, phase, threading.get_ident()
        self._tracer = Tracer(model, not self._is_compiled(model), self._report, self._fail)

    def _finish(self, phase: str) -> None:
        """Completes the graph of a forward with the modules that the hooks did not see."""
        model = self._model()
        if model is None:
            return
        tracer = self._tracer or Tracer(model, False, self._report, self._fail)
        self._drop()
        outputs, self._outputs = self._outputs, {}
        hidden = [path for path in leaves(list(outputs)) if path not in tracer.called and path in self._modules]
        for path in hidden:
            shapes, types = outputs[path]
            tracer.add_unconnected(path, self._modules[path], shapes, ", ".join(dict.fromkeys(types)))
        if hidden or not tracer.sees_operations:
            self._report.mark_unseen(f"{phase} graph", ELSEWHERE if tracer.sees_operations else COMPILED)
        self._done.add(phase)
        self._observer.collectors.change_subscription()
        if self._recorder is not None and self._recorder is self._observer.evaluation:
            self._add_artifact(self._recorder, phase, tracer)
        else:
            self._finished.append((phase, tracer))
        if not self._is_wanted(model):
            self._rest()

    def _rest(self) -> None:
        """Detaches the hooks, unless they were compiled: then they do nothing and stay until the watch closes."""
        if not self._observer.gate.was_compiled:
            self.detach()

    def _add_artifact(self, recorder: Recorder, phase: str, tracer: Tracer) -> None:
        def make(_read: Read) -> Iterable[Artifact]:
            return [tracer.graph(phase)]

        recorder.artifact(guarded(make, self._report, f"drawing the {phase} graph"))

    def _is_compiled(self, model: nn.Module) -> bool:
        """Whether the model has compiled code, which would be recompiled for a TorchFunctionMode."""
        return self._observer.gate.was_compiled or any(map(dynamo.is_compiled, model.modules()))


def _uncompiled(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules with a forward that are not part of a compiled module."""
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


def _have_no_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(has_no_data(tensor) for _, tensor in tensor_tree.inputs(args, kwargs))
