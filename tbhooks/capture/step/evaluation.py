"""Evaluation passes, which are recorded separately: all forwards between two training forwards make one frame.

The kinds of its sites begin with `eval.`. Gradients and parameters are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from tbhooks.capture.hooks.forward_event import ForwardEvent
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.data.frame import EVALUATION
from tbhooks.data.self_report import Report

KINDS = ("activation", "input", "functional")


class Evaluation:
    """Reads one evaluation at a time into a recorder of its own. The next training forward submits it.

    Does nothing until it is enabled.
    """

    def __init__(
        self, observer: Observer, forwards: ForwardEvent, kinds: Iterable[str], with_buckets: bool,
        submit: Callable[[Recorder], None], report: Report,
    ) -> None:  # fmt: skip
        self._observer, self._forwards = observer, forwards
        self._is_enabled = False
        self._submit = submit
        self._report = report
        self.recorder = Recorder([kind for kind in kinds if kind in KINDS], EVALUATION)
        self.recorder.begin(with_buckets)

    def enable(self) -> None:
        """From now on evaluation passes are recorded, separately from training."""
        if not self._is_enabled:
            self._is_enabled = True
            self._observer.read_evaluations(self.recorder)
            self._forwards.subscribe(self._forward_begins, in_graph=True)

    def finish(self) -> None:
        """Submits everything that was read since the last training forward."""
        if not self._is_enabled:
            return
        if self.recorder.overflowed:
            self._report.log_once("an evaluation made more calls than its buffer holds; the last ones are left out")
        if self.recorder.has_something:
            self._submit(self.recorder)

    def _forward_begins(self, model: nn.Module, _count: object) -> None:
        if not model.training:
            self._observer.placement.attach()
            return
        self.finish()
        if not self._observer.gate.open:
            self._observer.detach()
