"""What can be asked of a watch besides its numbers. Each call chains, and is off unless it is made.

The watch is the only one who has these methods; they are here for the length of its file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import nn

from tbhooks import arguments, environment, hyperparameters, stats
from tbhooks.errors import ArgumentError, check_names
from tbhooks.exhibits import Ended, Exhibit
from tbhooks.frame import Frame
from tbhooks.loop import Loop
from tbhooks.onlookers import Onlooker
from tbhooks.profiling import Profile
from tbhooks.progress import PARTS
from tbhooks.pump import Pump
from tbhooks.ranks import Place
from tbhooks.report import Report


class Asking:
    """The part of a watch that takes wishes."""

    _loop: Loop
    _pump: Pump
    _place: Place
    _model: weakref.ref[nn.Module]
    _report: Report
    _idle: bool
    _is_compared = False
    """Whether the run's hyperparameters were given, so that its end is to be told."""

    def _check_usable(self) -> None:
        raise NotImplementedError

    def _run_directory(self) -> str | None:
        raise NotImplementedError

    def log_every(self, n: int) -> Self:
        """Writes what `log` is given as running means, every n-th step, whatever `every` is; then they begin anew.

        Each value is added up on its own device, at every step and in every micro-batch. What is logged in an
        evaluation (as `eval/...`, or while the model is in evaluation mode) is averaged over it, and written when
        training goes on. With `ranks="merge"` the means of logged steps are of all ranks, the others of the first.
        """
        self._check_usable()
        every = arguments.whole_number("n", n)
        if not self._idle:
            self._loop.average(every)
        return self

    def progress(self, *parts: str) -> Self:
        """Tells with every written step of the "optimizer" (learning rate, weight decay, momentum, betas of each
        parameter group), of "speed" (seconds a step, samples and tokens a second) and of "memory" (its peak); of all
        three unless some are named.

        Written are logged steps, and those of `log_every`. Speed is measured from one written step to the next by
        the host's clock, without the time that evaluations take. Samples are the length of the first tensor the model
        is given, tokens all elements of the first one of whole numbers, counted at every forward.
        """
        self._check_usable()
        check_names("part of the progress", parts, PARTS)
        if not self._idle:
            self._loop.log_progress(frozenset(parts or PARTS))
        return self

    def hparams(self, values: dict[str, Any], metrics: Sequence[str] = ()) -> Self:
        """Tells what the run was started with, so that TensorBoard's HPARAMS tab compares it with others by `metrics`:
        tags such as `train/loss`, `eval/accuracy` or `gradient.norm/fc`, of which it shows the last number.

        Dicts inside are flattened with dots; what is no text, number or bool becomes text. How the run ended is told
        when the watch closes.
        """
        self._check_usable()
        asked = hyperparameters.understood(values, metrics)
        if self._is_compared:
            raise ArgumentError("hparams was called already, and TensorBoard takes one set a run: give all at once")
        self._is_compared = True
        return self._show([asked])

    def environment(self) -> Self:
        """Writes once what the run was made with, to the TEXT tab: versions, devices, dtypes, the size of the model,
        what this watch was asked for. Nothing of the machine's or the user's own: no names, no paths, no variables.
        """
        return self._show([environment.described(self._loop, self._place, self._model())])

    def profile(self, steps: tuple[int, int]) -> Self:
        """Writes a trace of the steps from the first to the last of `steps`, both included, made by torch's profiler:
        `tbhooks-profile/steps-<first>-<last>.pt.trace.json.gz` in the run's directory. What tbhooks itself does is
        called `tbhooks::...` in it.
        """
        self._check_usable()
        first, last = arguments.steps(steps)
        directory, now = self._run_directory(), self._loop.clock.count
        if first < now:
            raise ArgumentError(f"steps={steps!r} begins before the step this watch is at, which is {now}")
        if not self._idle and self._place.rank == 0:
            if directory is None or "://" in directory:
                raise ArgumentError("profile() writes beside the run: give watch() a local directory or SummaryWriter")
            place, probe = Path(directory) / "tbhooks-profile", self._loop.probe
            profile = Profile(first, last, place, probe, self._pump.submit, self._report)
            self._loop.profiles.append(profile)
            if first == now:
                profile.start()
        return self

    def _tell_the_end(self, failed: bool) -> None:
        if self._is_compared:
            self._is_compared = False
            self._show_now([Ended(failed)])

    def _let_look_on(self, onlooker: Onlooker) -> Self:
        """It looks at logged steps from now on; on the first rank, which writes."""
        self._check_usable()
        if not self._idle and self._place.rank == 0:
            with self._report.guarded(type(onlooker).__name__):
                self._loop.probe.look_on(onlooker)
        return self

    def _show(self, exhibits: Sequence[Exhibit], step: int = 0) -> Self:
        """Writes what is known already, without waiting for a logged step."""
        self._check_usable()
        self._show_now(exhibits, step)
        return self

    def _show_now(self, exhibits: Sequence[Exhibit], step: int = 0) -> None:
        if not self._idle and self._place.rank == 0:
            self._pump.submit(Shown(tuple(exhibits), step))


@dataclass(frozen=True)
class Shown:
    """Exhibits of no step in particular, as the pump takes them."""

    exhibits: tuple[Exhibit, ...]
    step: int
    nbytes: int = 0

    def without_numbers(self) -> None:
        """Nothing is left if they are dropped."""

    def frames(self) -> list[Frame]:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return [Frame(self.step, time.time(), 0, (), stats.empty_rows(0), nothing, exhibits=self.exhibits)]
