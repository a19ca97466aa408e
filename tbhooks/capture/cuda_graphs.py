"""CUDA graphs: while one is captured, nothing of a watch runs, and the watch reports why.

Operations that run during a capture have no results yet, and would run again with every replay; replays call no Python.
So hooks, clock and scalars do nothing during a capture. `torch.cuda.make_graphed_callables` refuses modules that have
hooks: watches are paused while it runs. What to do instead is in docs/cuda-graphs.md.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from tbhooks.capture.autograd import capture_check, never_captures
from tbhooks.data.frame import ROOT
from tbhooks.data.process.patching import wrapping
from tbhooks.data.self_report import Report

CAPTURED = (
    "it was captured into a CUDA graph: replays of a graph call no hooks, so its steps are not read. Run the steps "
    "that are to be logged without the graph, and call step() after each step (docs/cuda-graphs.md)"
)
GRAPHED = (
    "it runs inside a CUDA graph of torch.cuda.make_graphed_callables, which calls no hooks of the modules inside; the "
    "graphed module itself is read (docs/cuda-graphs.md)"
)


class GraphCapture:
    """Whether a CUDA graph is being captured in the current stream."""

    def __init__(self, model: weakref.ref[nn.Module], report: Report) -> None:
        self.is_capturing: Callable[[], bool] = capture_check()
        self._model = model
        self._report = report

    @property
    def is_possible(self) -> bool:
        """Whether one could be captured at all."""
        return self.is_capturing is not never_captures

    def is_running(self) -> bool:
        """Whether one is being captured; reported as the reason why the model is not read."""
        if not self.is_capturing():
            return False
        self._report.mark_unseen(ROOT, CAPTURED)
        self._report.log_unseen()
        return True

    def graphed(self, callables: Iterable[Any]) -> None:
        """Reports the modules inside of those that were made into graphs."""
        model = self._model()
        outer = [module for module in callables if isinstance(module, nn.Module)]
        inside = {id(module) for graphed in outer for module in graphed.modules()} - {id(module) for module in outer}
        for path, module in model.named_modules() if model is not None else ():
            if id(module) in inside:
                self._report.mark_unseen(path or ROOT, GRAPHED, replace=True)


class Pausable(Protocol):
    """What make_graphed_callables needs of a watch: the capture session implements it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


_sessions: weakref.WeakKeyDictionary[Pausable, GraphCapture] = weakref.WeakKeyDictionary()


def begin(session: Pausable, graph_capture: GraphCapture) -> None:
    """From now on the session is paused while modules are made into graphs."""
    _sessions[session] = graph_capture
    for patch in _PATCHES:
        patch.acquire(session)


def end(session: Pausable) -> None:
    """The session has ended."""
    _sessions.pop(session, None)
    for patch in _PATCHES:
        patch.release(session)


def _around_make(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps make_graphed_callables: it refuses modules with hooks, and its warm-up is no training."""
    sessions = dict(_sessions)
    with contextlib.ExitStack() as stack:
        for session in sessions:
            session.pause()
            stack.callback(session.resume)
        made = wrapped(*args, **kwargs)
    given = args[0] if args else kwargs.get("callables")
    for graph_capture in sessions.values():
        graph_capture.graphed(given if isinstance(given, tuple) else (given,))
    return made


_PATCHES = tuple(
    wrapping(module, "make_graphed_callables", _around_make, "torch 2.13, on a CPU only")
    for module in ("torch.cuda", "torch.cuda.graphs")
)
