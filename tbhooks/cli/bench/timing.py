"""Times training steps of several variants in turns: bare, and watched with different options.

Turns are short and their order changes, so that other load affects all variants alike; a ratio compares a turn with the
bare turn of the same round. All variants may train the same model, each watching it in its own turns only: of two
copies of a model, one is always faster because of its place in memory. A turn ends when its data is written.
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
class Monitor:
    """What monitors a model while it trains; by default nothing."""

    finish: Callable[[], object] = _nothing
    """Waits until the logged data is written."""
    close: Callable[[], object] = _nothing
    watching: Watch | None = None


Observe = Callable[[nn.Module, torch.optim.Optimizer, Path], Monitor]


def bare(_model: nn.Module, _optimizer: torch.optim.Optimizer, _directory: Path) -> Monitor:
    """No monitoring."""
    return Monitor()


def watched(**options: Any) -> Observe:
    """A watch that writes to TensorBoard."""

    def observe(model: nn.Module, _optimizer: torch.optim.Optimizer, directory: Path) -> Monitor:
        watching = watch(model, directory, **options)
        return Monitor(watching.flush, watching.close, watching)

    return observe


class Timer(Protocol):
    """Measures the seconds from `start` to `stop`, including the work on the device."""

    def start(self) -> None: ...

    def stop(self) -> float: ...


class HostTimer:
    """For models on the CPU."""

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._started


_HOOKS: tuple[dict[int, Any], ...] = (
    getattr(torch_optimizer, "_global_optimizer_pre_hooks"),  # noqa: B009  torch has no public way to list them
    getattr(torch_optimizer, "_global_optimizer_post_hooks"),  # noqa: B009
)
"""A watch hooks all optimizers of the process. The hooks of other variants are removed during a turn."""


@dataclass
class Variant:
    """A model, how it is monitored, and the seconds per step of each round."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    observe: Observe
    directory: Path
    every_nth_round: int = 1
    """Takes part in every nth round only, if less precision is enough."""
    most_steps_a_turn: int = NEVER
    """The most steps of a turn."""
    shared: torch.optim.Optimizer | None = None
    """The optimizer of a model that all variants train; it is monitored in the variant's own turns only."""
    seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = self.shared or make_optimizer(self.model)
        self.watching: Watch | None = None
        self._monitor: Monitor | None = None
        self._own: list[dict[int, Any]] = []
        self._opened = 0
        if self.shared is None:
            self._open()

    def step(self) -> None:
        """One training step."""
        self.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int) -> None:
        """Runs steps and waits until their data is written, without the hooks of other variants."""
        with self.monitored():
            self._run(number)

    def turn(self, of_round: int, steps: int, timer: Timer) -> None:
        """Times some steps. The first step of a new watch, which is logged and allocates, is not timed."""
        steps = min(steps, self.most_steps_a_turn)
        with self.monitored():
            if self.shared is not None:
                self._run(1)
            timer.start()
            self._run(steps)
            self.seconds[of_round] = timer.stop() / steps

    @contextlib.contextmanager
    def monitored(self) -> Iterator[None]:
        """Monitors the model inside, if it is not monitored already."""
        if self._monitor is not None:
            yield
            return
        self._open()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _open(self) -> None:
        known = [set(hooks) for hooks in _HOOKS]
        where = self.directory if self.shared is None else self.directory / str(self._opened)
        self._opened += 1
        self._monitor = self.observe(self.model, self.optimizer, where)
        self.watching = self._monitor.watching
        self._own = [
            {key: hooks[key] for key in hooks if key not in old} for hooks, old in zip(_HOOKS, known, strict=True)
        ]
        self._remove_hooks()

    def _run(self, number: int) -> None:
        assert self._monitor is not None
        for hooks, own in zip(_HOOKS, self._own, strict=True):
            hooks.update(own)
        try:
            for _ in range(number):
                self.step()
            self._monitor.finish()
        finally:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hooks, own in zip(_HOOKS, self._own, strict=True):
            for key in own:
                hooks.pop(key, None)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all measurements."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def _no_progress(_done: int, _of: int) -> None:
    pass


def run_rounds(
    variants: Sequence[Variant], rounds: int, steps: int, timer: Timer, progress: Progress = _no_progress
) -> None:
    """Runs all rounds, each with one turn per variant."""
    for number in range(rounds):
        run_round(number, variants, steps, timer)
        progress(number + 1, rounds)


def run_round(number: int, variants: Sequence[Variant], steps: int, timer: Timer) -> None:
    """Runs one turn of each variant that takes part, starting with another one than the round before."""
    for i in range(len(variants)):
        variant = variants[(i + number) % len(variants)]
        if number % variant.every_nth_round == 0:
            variant.turn(number, steps, timer)


def seconds_a_step(variant: Variant, timer: Timer, steps: int = 2) -> float:
    """An estimate for the plan; the first steps, which allocate, are not counted."""
    variant.steps(2)
    variant.turn(-1, steps, timer)
    return variant.seconds.pop(-1)


@dataclass(frozen=True)
class Timing:
    """How long the steps of one variant took, relative to the bare ones of the same rounds."""

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


def compared(variant: Variant, base: Variant) -> Timing:
    """The timing of a variant relative to the bare one."""
    own = variant.seconds
    middle = statistics.median(own.values())
    ratios = [own[at] / (middle if variant is base else base.seconds[at]) for at in own]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    # Of the same rounds, because the minimum of more rounds is smaller.
    least = min(base.seconds[at] for at in own)
    return Timing(
        variant.name, 1e3 * middle, 1.0 if variant is base else statistics.median(ratios), lower, upper,
        min(own.values()) / least, len(own),
    )  # fmt: skip
