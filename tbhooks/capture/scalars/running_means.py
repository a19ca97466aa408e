"""Running means of what is logged, kept where the values are: `log_every` writes them and starts anew.

A value costs one small addition on its own device, and is never waited for. What is logged in an evaluation is
averaged apart, over that evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import in_backward, without_dispatch_modes
from tbhooks.capture.dynamo import dynamo_skip
from tbhooks.capture.hooks.hook_types import RootHook
from tbhooks.capture.hooks.manager import hook_root
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.packed_step import PackedStep
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recorder import Recorder
from tbhooks.data.self_report import Report

OF_EVALUATION = "eval/"

Numbers = Mapping[str, Tensor | float]


class Mean:
    """Of one tag: a sum for each device its values were on, and how many there were."""

    __slots__ = ("_count", "_on_host", "_sums")

    def __init__(self) -> None:
        self._count = 0
        self._on_host = 0.0
        self._sums: dict[torch.device, Tensor] = {}

    def add(self, value: Tensor | float) -> None:
        self._count += 1
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            self._on_host += float(value.detach() if isinstance(value, Tensor) else value)
        elif value.device in self._sums:
            self._sums[value.device].add_(value.detach().reshape(()))
        else:
            # What devices have no float64 for stays float32, as their rows do.
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            self._sums[value.device] = value.detach().reshape(()).to(wide, copy=True)

    def mean(self) -> Tensor | float:
        """On the first device there was a value on; the host's own if there was none."""
        total: Tensor | float = self._on_host
        for there in self._sums.values():
            total = there + (total.to(there.device) if isinstance(total, Tensor) else total)
        return total / self._count


class RunningMeans:
    """Of any number of tags, since they were taken last."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def __bool__(self) -> bool:
        return bool(self._means)

    def add(self, tag: str, value: Tensor | float) -> None:
        # Sums made in inference mode could not be added to outside.
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            self._means.setdefault(tag, Mean()).add(value)

    def take(self, but: frozenset[str] = frozenset()) -> dict[str, Tensor | float]:
        """The means, which begin anew; but some stay."""
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            means = {tag: kept.mean() for tag, kept in self._means.items() if tag not in but}
        self._means = {tag: kept for tag, kept in self._means.items() if tag in but}
        return means


class Averages:
    """The means of one watch, and which of its steps write them."""

    def __init__(
        self, model: weakref.ref[nn.Module], observer: Observer, place: RankContext,
        submit: Callable[[PackedStep], None], training_goes_on: Callable[[], None], report: Report,
    ) -> None:  # fmt: skip
        self.every = 1
        self.is_due = False
        """Whether the step that has ended writes them, and may still get more."""
        self.extra: dict[str, Tensor | float] = {}
        """What else is to be written with the step."""
        self._model, self._observer, self._place = model, observer, place
        self._submit = submit
        self._training_goes_on = training_goes_on
        self._report = report
        self._training, self._evaluation = RunningMeans(), RunningMeans()
        # What was in the copy of the step that has ended.
        self._rode: frozenset[str] = frozenset()
        self._recorder = Recorder(())
        self._root: RemovableHandle | None = None

    def start(self) -> None:
        """One hook on the whole model: a value logged after its forward has begun is of the next step."""
        model = self._model()
        if self._root is None and model is not None:
            self._root = hook_root(model, RootHook(self._forward_begins, in_graph=True))

    def stop(self) -> None:
        if self._root is not None:
            self._root.remove()
            self._root = None

    def writes(self, step: int) -> bool:
        return step % self.every == 0

    def step_ends(self, step: int) -> None:
        self.is_due, self._rode = self.writes(step), frozenset()

    def add(self, tag: str, value: Tensor | float) -> None:
        model = self._model()
        is_evaluated = model is not None and not self._observer.is_training_pass(model)
        (self._evaluation if tag.startswith(OF_EVALUATION) or is_evaluated else self._training).add(tag, value)

    def ride(self, recorder: Recorder) -> None:
        """What is due goes along with the step's own copy."""
        if self.is_due:
            means = self._training.take()
            self._rode = frozenset(means)
            for tag, mean in means.items():
                recorder.scalar(tag, mean)

    def take(self) -> Numbers:
        """What is due and has not gone yet; nothing is due afterwards. What came after a copy waits for the next."""
        means = {**self.extra, **self._training.take(but=self._rode)}
        self.is_due, self.extra = False, {}
        return means

    def write(self, label: int, numbers: Numbers) -> None:
        """In a copy of their own. Ranks do not meet for it: the first writes what it has seen itself."""
        if numbers and self._place.rank == 0:
            for tag, number in numbers.items():
                self._recorder.scalar(tag, number)
            self._submit(self._recorder.pack(label, self._place.rank))

    def write_evaluation(self, label: int) -> None:
        """As of the training step that ended last."""
        if self._evaluation:
            self.write(label, self._evaluation.take())

    def write_rest(self, label: int) -> None:
        """What came since the last write: nothing is lost in the end."""
        self.write(label, self.take())
        self.write_evaluation(label)

    @dynamo_skip
    def _forward_begins(self) -> None:
        with self._report.guarded("before the model's forward"):
            model = self._model()
            if model is not None and self._observer.is_training_pass(model) and not in_backward():
                self._training_goes_on()
