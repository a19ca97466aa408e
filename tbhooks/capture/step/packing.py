"""The way of a closed step to the background thread: its one copy to the host, and its submission.

The states of a step are explained in step.py. The session decides when a step is packed and submitted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tbhooks.capture.autograd import profiler_label
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.scalars.step_scalars import StepScalars
from tbhooks.capture.step.step import Step
from tbhooks.data.self_report import Report
from tbhooks.reduction import triton


class Packer:
    """Packs the closed steps of one watch, and submits them."""

    def __init__(
        self, model: weakref.ref[nn.Module], recorder: Recorder, scalars: StepScalars, context: RankContext,
        submit: Callable[[PackedStep], None], report: Report,
    ) -> None:  # fmt: skip
        self.logged = 0
        """How many steps were packed."""
        self._model = model
        self._recorder = recorder
        self._scalars = scalars
        self._context, self._rank = context, context.rank
        self._submit = submit
        self._report = report

    def pack(self, step: Step) -> None:
        """Packs a closed step, or abandons it if it is empty or cannot be copied. The recorder is free afterwards."""
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

    def submit(self, ended: Step | None) -> None:
        """Submits the step that has ended to the background thread, if it is packed."""
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
