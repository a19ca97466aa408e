"""Running means of logged scalars (`Watch.log_every`), summed on the device of the values.

A value costs one small addition on its own device, without a sync. Values that are logged during an evaluation have
separate means, over that evaluation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tbhooks.capture.autograd import without_dispatch_modes
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.recording.packed_step import PackedStep
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.reduction import torch_rows

EVALUATION_PREFIX = "eval/"

Numbers = Mapping[str, Tensor | float]


class Mean:
    """The mean of one tag: a sum for each device that had values, and their number."""

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
            self._sums[value.device] = value.detach().reshape(()).to(torch_rows.row_type(value.device), copy=True)

    def mean(self) -> Tensor | float:
        """Returns the mean, on one of the devices that had values, or as a float if none had."""
        total: Tensor | float = self._on_host
        for sums in self._sums.values():
            total = sums + (total.to(sums.device) if isinstance(total, Tensor) else total)
        return total / self._count


class RunningMeans:
    """The means of any number of tags since `take` was called last."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def __bool__(self) -> bool:
        return bool(self._means)

    def add(self, tag: str, value: Tensor | float) -> None:
        # A sum that was created in inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            self._means.setdefault(tag, Mean()).add(value)

    def take(self, but: frozenset[str] = frozenset()) -> dict[str, Tensor | float]:
        """Returns the means and starts new ones, except for the tags in `but`."""
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            means = {tag: mean.mean() for tag, mean in self._means.items() if tag not in but}
        self._means = {tag: mean for tag, mean in self._means.items() if tag in but}
        return means


class MeansWriter:
    """The running means of one watch, which every n-th step writes (`Watch.log_every`)."""

    def __init__(
        self, model: weakref.ref[nn.Module], observer: Observer, context: RankContext,
        submit: Callable[[PackedStep], None],
    ) -> None:  # fmt: skip
        self.every: int | None = None
        """After how many steps means are written; None if the user has not asked for means."""
        self.is_due = False
        """Whether the step that has ended writes means. Until it does, values are added to them."""
        self.extra: dict[str, Tensor | float] = {}
        """Training metrics that are written with the means, in a step that is not a logged one."""
        self._model, self._observer, self._context = model, observer, context
        self._submit = submit
        self._training, self._evaluation = RunningMeans(), RunningMeans()
        # The means that were in the copy of the step that has ended.
        self._in_copy: frozenset[str] = frozenset()
        self._recorder = Recorder(())

    def writes(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def step_ends(self, step: int) -> None:
        self.is_due, self._in_copy = self.writes(step), frozenset()

    def add(self, tag: str, value: Tensor | float) -> None:
        model = self._model()
        in_evaluation = model is not None and not self._observer.is_training_pass(model)
        (self._evaluation if tag.startswith(EVALUATION_PREFIX) or in_evaluation else self._training).add(tag, value)

    def add_to_copy(self, recorder: Recorder) -> None:
        """Records the means that are due, so that they are part of the step's own copy."""
        if self.is_due:
            means = self._training.take()
            self._in_copy = frozenset(means)
            for tag, mean in means.items():
                recorder.scalar(tag, mean)

    def take(self) -> Numbers:
        """Returns the means that are due and were not in the step's copy. Nothing is due afterwards. A value of a tag
        that was in the copy is part of the next mean.
        """
        means = {**self.extra, **self._training.take(but=self._in_copy)}
        self.is_due, self.extra = False, {}
        return means

    def write(self, label: int, numbers: Numbers) -> None:
        """Submits numbers in a copy of their own. They are not merged over ranks: only rank 0 writes."""
        if numbers and self._context.rank == 0:
            for tag, number in numbers.items():
                self._recorder.scalar(tag, number)
            self._submit(self._recorder.pack(label, self._context.rank))

    def write_evaluation(self, label: int) -> None:
        """Writes the means of an evaluation, with the label of the training step that ended last."""
        if self._evaluation:
            self.write(label, self._evaluation.take())

    def write_rest(self, label: int) -> None:
        """Writes everything that was logged since the last write, when the watch closes."""
        self.write(label, self.take())
        self.write_evaluation(label)
