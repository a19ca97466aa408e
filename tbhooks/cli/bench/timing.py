"""Training steps timed in turns: bare, and watched in one way or another.

Turns are short and their order changes, so that a busy machine disturbs all alike; a ratio compares a turn with the
bare one of the same round. All may train the same model, each observing it in its own turns only: two copies of a
model lie differently in memory, and one of them is always the faster. A turn is timed until everything it logged is
written. What the numbers mean is said elsewhere.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from tbhooks.api.watch import Watch, watch

NEVER = 10**9
LEARNING_RATE = 1e-4

Progress = Callable[[int, int], None]


def _nothing() -> None:
    pass


@dataclass
class Observer:
    """What looks on while a model trains, if anything does."""

    finish: Callable[[], object] = _nothing
    """Waits until what it logged is written."""
    close: Callable[[], object] = _nothing
    watching: Watch | None = None


Observe = Callable[[nn.Module, torch.optim.Optimizer, Path], Observer]


def bare(_model: nn.Module, _optimizer: torch.optim.Optimizer, _directory: Path) -> Observer:
    """Nothing looks on."""
    return Observer()


def watched(**options: Any) -> Observe:
    """A watch that writes to TensorBoard."""

    def observe(model: nn.Module, _optimizer: torch.optim.Optimizer, directory: Path) -> Observer:
        watching = watch(model, directory, **options)
        return Observer(watching.flush, watching.close, watching)

    return observe


class Timer(Protocol):
    """Seconds from `start` to `stop`, with everything that was asked of the device in between."""

    def start(self) -> None: ...

    def stop(self) -> float: ...


class HostTimer:
    """For models on the CPU."""

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._started


_HOOKS: tuple[dict[int, Any], ...] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
"""A watch listens to every optimizer of the process: those of the others are put aside, or they would be timed too."""


@dataclass
class Trainee:
    """A model, how it is observed, and how long its steps took in each round."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    observe: Observe
    directory: Path
    every_nth_round: int = 1
    """What need not be known as precisely takes no part in the others."""
    most_steps_a_turn: int = NEVER
    """Nor makes as many steps."""
    shared: torch.optim.Optimizer | None = None
    """The optimizer of a model that others train as well: it is observed in its own turns only."""
    seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = self.shared or make_optimizer(self.model)
        self.watching: Watch | None = None
        self._observer: Observer | None = None
        self._own: list[dict[int, Any]] = []
        self._opened = 0
        if self.shared is None:
            self._open()

    def step(self) -> None:
        """One training step, as everybody writes it."""
        self.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int) -> None:
        """Some steps, and the wait for what they logged, with no other watch listening."""
        with self.observed():
            self._run(number)

    def turn(self, of_round: int, steps: int, timer: Timer) -> None:
        """Some timed steps. A watch that has just begun logs its first one and allocates: that is not timed."""
        steps = min(steps, self.most_steps_a_turn)
        with self.observed():
            if self.shared is not None:
                self._run(1)
            timer.start()
            self._run(steps)
            self.seconds[of_round] = timer.stop() / steps

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Has it observed, if it is not already."""
        if self._observer is not None:
            yield
            return
        self._open()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def _open(self) -> None:
        known = [set(hooks) for hooks in _HOOKS]
        where = self.directory if self.shared is None else self.directory / str(self._opened)
        self._opened += 1
        self._observer = self.observe(self.model, self.optimizer, where)
        self.watching = self._observer.watching
        self._own = [
            {key: hooks[key] for key in hooks if key not in old} for hooks, old in zip(_HOOKS, known, strict=True)
        ]
        self._put_aside()

    def _run(self, number: int) -> None:
        assert self._observer is not None
        for hooks, own in zip(_HOOKS, self._own, strict=True):
            hooks.update(own)
        try:
            for _ in range(number):
                self.step()
            self._observer.finish()
        finally:
            self._put_aside()

    def _put_aside(self) -> None:
        for hooks, own in zip(_HOOKS, self._own, strict=True):
            for key in own:
                hooks.pop(key, None)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The one everything is measured with."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def _no_progress(_done: int, _of: int) -> None:
    pass


def run_rounds(
    trainees: Sequence[Trainee], rounds: int, steps: int, timer: Timer, progress: Progress = _no_progress
) -> None:
    """Everybody's turn in every round."""
    for number in range(rounds):
        run_round(number, trainees, steps, timer)
        progress(number + 1, rounds)


def run_round(number: int, trainees: Sequence[Trainee], steps: int, timer: Timer) -> None:
    """A turn of each that takes part, with another one first than in the round before."""
    for i in range(len(trainees)):
        trainee = trainees[(i + number) % len(trainees)]
        if number % trainee.every_nth_round == 0:
            trainee.turn(number, steps, timer)


def seconds_a_step(trainee: Trainee, timer: Timer, steps: int = 2) -> float:
    """About, to plan with; the first steps, which allocate, are not counted."""
    trainee.steps(2)
    trainee.turn(-1, steps, timer)
    return trainee.seconds.pop(-1)


@dataclass(frozen=True)
class Timing:
    """How long the steps of one trainee took, beside the bare ones of the same rounds."""

    name: str
    milliseconds: float
    """The median of all rounds."""
    ratio: float
    """The median of the ratios to the bare turn of the same round."""
    lower: float
    """The lower quartile of those ratios; of a bare model, of its times over their median."""
    upper: float
    ratio_of_minima: float
    rounds: int

    @property
    def spread(self) -> float:
        """The interquartile range of the ratio."""
        return self.upper - self.lower

    @property
    def is_noise(self) -> bool:
        """Whether the ratio varies more from round to round than it differs from 1."""
        return self.spread >= abs(self.ratio - 1)


def compared(trainee: Trainee, base: Trainee) -> Timing:
    """A trainee beside the bare one."""
    own = trainee.seconds
    middle = statistics.median(own.values())
    ratios = [own[at] / (middle if trainee is base else base.seconds[at]) for at in own]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    # Of the same rounds: the least of many is smaller than the least of few.
    least = min(base.seconds[at] for at in own)
    return Timing(
        trainee.name, 1e3 * middle, 1.0 if trainee is base else statistics.median(ratios), lower, upper,
        min(own.values()) / least, len(own),
    )  # fmt: skip
