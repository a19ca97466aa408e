"""Evaluation passes, kept apart from training: all forwards between two training passes make one frame.

Its sites carry the prefix `eval.` before their kind. Nothing is read of gradients or parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import in_backward
from tbhooks.capture.dynamo import dynamo_skip
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.recorder import Recorder
from tbhooks.data.frame import EVALUATION
from tbhooks.data.self_report import Report

KINDS = ("activation", "input", "functional")


class ModelListener(Protocol):
    """What listens beside the statistics, with a hook on the whole model; not while the watch is paused."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Asides:
    """All of them that a watch has."""

    def __init__(self) -> None:
        self._all: list[ModelListener] = []

    def add(self, aside: ModelListener) -> None:
        if aside not in self._all:
            self._all.append(aside)

    def start(self) -> None:
        for aside in self._all:
            aside.start()

    def stop(self) -> None:
        for aside in self._all:
            aside.stop()


class Evaluation:
    """Collects one evaluation at a time and hands it over when training goes on."""

    def __init__(
        self, model: weakref.ref[nn.Module], observer: Observer, kinds: Iterable[str], with_buckets: bool,
        hand_over: Callable[[Recorder], None], report: Report,
    ) -> None:  # fmt: skip
        self._model = model
        self._observer = observer
        self._hand_over = hand_over
        self._report = report
        self._root: RemovableHandle | None = None
        self._recorder = Recorder([kind for kind in kinds if kind in KINDS], EVALUATION)
        self._recorder.begin(with_buckets)

    def start(self) -> None:
        self._observer.read_evaluations(self._recorder)
        if self._root is None:
            self._root = self._observer.watch_root(self._forward_begins, in_graph=True)

    def stop(self) -> None:
        """Takes the one hook off that is there between logged steps."""
        if self._root is not None:
            self._root.remove()
            self._root = None

    def finish(self) -> None:
        """Hands over what there is."""
        if self._recorder.overflowed:
            self._report.log_once("an evaluation made more calls than its buffer holds; the rest is not in its numbers")
        if self._recorder.has_something:
            self._hand_over(self._recorder)

    @dynamo_skip
    def _forward_begins(self) -> None:
        with self._report.guarded("before the model's forward"):
            model = self._model()
            if model is None or in_backward():
                return
            if not model.training:
                self._observer.placement.attach()
                return
            self.finish()
            if not self._observer.gate.open:
                self._observer.detach()
