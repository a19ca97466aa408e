"""A trace of some steps by torch.profiler, which is started and stopped at the ends of steps.

The trace is written in the background, beside the run. If another profiler is running, nothing is profiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tbhooks.capture.autograd import is_profiled
from tbhooks.capture.compile.dynamo import CompileGate
from tbhooks.capture.hooks.forward_event import ForwardEvent, Subscription
from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report

# The suffix by which viewers recognise torch's traces.
ENDING = ".pt.trace.json.gz"


@dataclass
class Trace:
    """A trace to be written, as the worker accepts it."""

    profiler: profile
    path: Path
    report: Report
    nbytes: int = 0

    def without_numbers(self) -> Trace:
        """A trace is never dropped."""
        return self

    def frames(self) -> list[Frame]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(self.path))
        self.report.log_once(
            f"the trace of the profiled steps is in {self.path}; open it at https://ui.perfetto.dev or chrome://tracing",
            level=logging.INFO,
        )
        return []


class Profile:
    """Profiles the steps from `first` to `last`, both included."""

    def __init__(
        self, first: int, last: int, directory: Path, forwards: ForwardEvent, gate: CompileGate,
        submit: Callable[[Trace], None], report: Report,
    ) -> None:  # fmt: skip
        self.first, self.last = first, last
        self._forwards, self._gate = forwards, gate
        self._directory = directory
        self._submit = submit
        self._report = report
        self._profiler: profile | None = None
        self._is_over = False
        self._next_forward: Subscription | None = None

    def step_ended(self, step: int) -> None:
        """Starts before the first of the steps, and stops after the last."""
        with self._report.guarded("profiling"):
            if step == self.last:
                self._stop_soon()
            elif step > self.last:
                self.stop(self.last)
            elif step + 1 >= self.first:
                self.start()

    def start(self) -> None:
        if self._is_over or self._profiler is not None:
            return
        if is_profiled():
            self._is_over = True
            self._report.log_once(
                f"steps {self.first} to {self.last} are not profiled: another profiler is already running"
            )
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profiler = profile(activities=activities)
        profiler.start()
        self._profiler = profiler

    def _stop_soon(self) -> None:
        """Stops at the next forward: inside the optimizer's step, stopping would count as part of the optimizer.

        A compiled model is not recompiled for that, and stops at once.
        """
        if self._profiler is not None and not self._gate.was_compiled:
            self._next_forward = self._forwards.subscribe(self._forward_begins, in_graph=False)
        else:
            self.stop(self.last)

    def _forward_begins(self, _model: object, _count: object) -> None:
        self.stop(self.last)

    def leave_model(self) -> None:
        """Stops without waiting for the next forward."""
        if self._next_forward is not None:
            self.stop(self.last)

    def stop(self, step: int) -> None:
        """Stops after a step, or when the watch closes, and writes the trace."""
        self._is_over = True
        if self._next_forward is not None:
            self._next_forward.cancel()
            self._next_forward = None
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            name = f"steps-{self.first}-{min(max(step, self.first), self.last)}{ENDING}"
            self._submit(Trace(profiler, self._directory / name, self._report))
