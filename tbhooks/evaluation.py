"""Evaluation passes, kept apart from training: all forwards between two training passes make one frame.

Its sites carry the prefix `eval.` before their kind. Nothing is read of gradients or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tbhooks.buffer import Recorder
from tbhooks.pending import Pending

KINDS = ("activation", "input", "functional")
PREFIX = "eval."


class Evaluation:
    """Collects one evaluation at a time and hands it over when training goes on."""

    def __init__(self, kinds: Iterable[str], rank: int, submit: Callable[[Pending], None]) -> None:
        self.recorder = Recorder([kind for kind in kinds if kind in KINDS], PREFIX)
        self._rank = rank
        self._submit = submit
        self.begin()

    def begin(self) -> None:
        self.recorder.begin(with_buckets=True)

    def finish(self, label: int) -> None:
        """Hands over what there is, as of the training step that ended last."""
        if self.recorder.calls:
            self._submit(self.recorder.pack(label, self._rank))
