"""The step that has ended, on its way to the background thread: late scalars, its one copy to the host, its submission.

The states of a step are explained in step.py. The session decides when a step is packed and submitted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tbhooks.capture.autograd import profiler_label
from tbhooks.capture.hooks.forward_event import ForwardEvent, Subscription
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.step_samples import StepSamples
from tbhooks.capture.scalars.step_scalars import StepScalars
from tbhooks.capture.step.step import Step
from tbhooks.data.self_report import Report
from tbhooks.reduction import triton


class Packer:
    """Packs the step of one watch that has ended, and submits it. Says what may still be logged to it."""

    def __init__(
        self, model: weakref.ref[nn.Module], recorder: Recorder, observer: Observer, forwards: ForwardEvent,
        scalars: StepScalars, samples: StepSamples, context: RankContext, submit: Callable[[PackedStep], None],
        on_forward: Callable[[nn.Module, object], None], report: Report,
    ) -> None:  # fmt: skip
        self.logged = 0
        """How many steps were packed."""
        self.ended: Step | None = None
        """The step before the open one."""
        self._model = model
        self._recorder = recorder
        self._observer = observer
        self._forwards, self._on_forward = forwards, on_forward
        self._next_forward: Subscription | None = None
        self._scalars, self._samples = scalars, samples
        self._context, self._rank = context, context.rank
        self._submit = submit
        self._report = report

    def pack(self) -> None:
        """Packs the closed step, or abandons it if it is empty or cannot be copied. The recorder is free afterwards."""
        step = self.ended
        assert step is not None
        context, is_merged = self._context, self._context.rank_group is not None and not step.is_extra
        if context.was_made_too_early:
            self._report.log_once("ranks are not merged: call init_process_group() before watch()")
        try:
            with self._report.guarded("copying a step to the host"):
                if not context.rank_has_changed and (self._recorder.has_something or is_merged):
                    step.pack(self._copy(step.label, alone=step.is_extra))
                    self.logged += 1
        finally:
            if step.is_closed:  # the step is empty, or another rank writes it, or the copy failed
                self._recorder.restart()
                step.abandon()

    def submit(self) -> None:
        """Submits the step that has ended to the background thread, if it is packed."""
        ended = self.ended
        if ended is not None and ended.is_packed:
            # In this order, because a signal handler may raise in between. Then the step is written twice, not lost.
            self._submit(ended.packed)
            ended.submitted()

    def submit_late_scalars(self, label: int) -> None:
        """Makes a copy only for device scalars that were logged after the copy of their step."""
        if self._scalars.wait_for_a_copy and self._rank == 0:
            self._submit(replace(self._copy(label), merge=None))

    def _copy(self, label: int, alone: bool = False) -> PackedStep:
        """Starts the one copy to the host. Late scalars of earlier steps are in it, too.

        A step that the other ranks do not log is copied `alone`: the late scalars wait for one that they do.
        """
        is_merged = self._context.rank_group is not None
        self._scalars.add_to_copy(with_late=not (alone and is_merged))
        if triton.failure:
            self._report.log_once(f"Triton is installed but fails; torch operations are used: {triton.failure}")
        with profiler_label("copy"):
            packed = self._recorder.pack(label, self._rank)
        return packed if alone else self._context.shared(packed, self._model(), self._report)

    def other_ranks_wait(self, clock_mode: str) -> bool:
        """Whether other ranks wait for this step, to merge it. The first logged step may still get a label."""
        return self._context.rank_group is not None and (clock_mode == "manual" or self.logged > 1)

    # What is logged after the end of the step.

    @property
    def taking_late_scalars(self) -> Step | None:
        """Returns the step that has ended, as long as nothing of the next one has happened."""
        ended = self.ended
        return ended if ended is not None and ended.takes_late_scalars and not self._observer.called else None

    @property
    def may_get_late_scalars(self) -> bool:
        """Whether the copy of the step that has ended is delayed, for scalars that may still be logged to it."""
        return self._context.rank_group is None and (self._scalars.may_come_late or self._samples.come_late)

    def watch_next_forward(self) -> None:
        """Subscribes to the next forward. A compiled model takes no new hook: there the optimizer's step submits."""
        if self._next_forward is None and not self._observer.gate.was_compiled:
            self._next_forward = self._forwards.subscribe(self._on_forward, in_graph=False)

    def end_late_scalars(self) -> None:
        """Something of the next step has happened: what is logged from now on belongs to that one."""
        if self._next_forward is not None:
            self._next_forward.cancel()
            self._next_forward = None
        if self.ended is not None:
            self.ended.takes_late_scalars = False
