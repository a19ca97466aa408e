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

from tbhooks.api import environment, validation
from tbhooks.capture.hooks.collectors import Collector
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.scalars.training_metrics import PARTS
from tbhooks.capture.session import CaptureSession
from tbhooks.collectors import channels, embeddings, images
from tbhooks.collectors.graph.collector import GraphCollector
from tbhooks.collectors.model_summary import SummaryCollector
from tbhooks.collectors.profiler import Profile
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact, RunEnded
from tbhooks.data.errors import ArgumentError, check_integer, check_names
from tbhooks.data.frame import Frame
from tbhooks.data.self_report import Report
from tbhooks.delivery.worker import Worker
from tbhooks.drawing.model_table import Summary
from tbhooks.sinks import Sink


class WatchRequests:
    """The part of a watch that takes wishes."""

    _session: CaptureSession
    _model: weakref.ref[nn.Module]
    _worker: Worker
    _place: RankContext
    _report: Report
    _idle: bool
    _sinks: tuple[Sink, ...]
    _is_compared = False
    """Whether the run's hyperparameters were given, so that its end is to be told."""
    _summary: SummaryCollector | None = None

    def _check_usable(self) -> None:
        raise NotImplementedError

    def _run_directory(self) -> str | None:
        raise NotImplementedError

    def graph(self) -> Self:
        """Draws the model in TensorBoard's GRAPHS tab, as it runs in the next logged pass, with the real inputs.

        Modules are nested by path; arrows say which tensor went where. Evaluation passes get a graph of their own
        where `evaluation()` has them read. One pass of each is followed, and nothing stays on the model.
        """
        return self._add_collector(GraphCollector(self._model, self._session.observer, self._report))

    def summary(self) -> Summary:
        """The layers as a table: classes, outputs, parameters, shares. Prints as text, and is a table in notebooks.

        Outputs are those of the next logged pass, and blank before it; from then on the table is in TensorBoard's
        TEXT tab as well.
        """
        self._check_usable()
        if self._summary is None:
            self._summary = SummaryCollector(self._model, self._session.observer.collectors, self._report)
            self._add_collector(self._summary)
        return Summary(self._summary)

    def images(self, pattern: Any = None, *, every: int | None = None, most_bytes: int = images.MOST_BYTES) -> Self:
        """Pictures in TensorBoard's IMAGES tab: outputs of the modules that `pattern` means (whatever `include` takes),
        and filters of their convolutions over 1 or 3 channels. Without it, the input batch and the first convolution.

        Taken in each of the first 10 logged steps, then half as often with every doubling; `every` is a number of
        logged steps instead. At most `most_bytes` of numbers are taken of a step; `stats.unseen` says what is not.
        """
        self._check_usable()
        every = None if every is None else check_integer("every", every)
        most, model = check_integer("most_bytes", most_bytes), self._model()
        if model is None:
            return self
        return self._add_collector(images.of_model(model, pattern, self._report, every, most))

    def per_channel(self, pattern: Any, *, kinds: Sequence[str] = channels.KINDS, histograms: bool = False) -> Self:
        """Statistics and histograms of each output channel of convolutions, linear layers and norms, of each kernel
        of their weights, and of each head of attention, for the modules that `pattern` means.

        TensorBoard's TBHOOKS tab shows them as maps of channels by steps, `runs.read(...).channels` gives them
        back. `histograms` adds ordinary ones for the first 64 channels of a layer, under tags such as
        `activation/conv1[3]`, on steps that take histograms.
        """
        self._check_usable()
        asked = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        check_names("kind", asked, channels.KINDS)
        if not asked or not isinstance(histograms, bool):
            raise ArgumentError(f"per_channel takes kinds, and histograms=True or False, not {kinds!r}, {histograms!r}")
        model = self._model()
        if model is None:
            return self
        recorder = self._session.recorder
        return self._add_collector(channels.of_model(model, pattern, asked, histograms, recorder, self._report))

    def embeddings(
        self, pattern: Any, labels: Any = None, thumbnails: Any = None, every: int | None = None,
        most: int = embeddings.MOST,
    ) -> Self:  # fmt: skip
        """What the layers that `pattern` means make of each sample, as points in TensorBoard's PROJECTOR tab.

        `labels` and `thumbnails` (pictures of 1 or 3 channels) are a call without arguments that gives those of the
        current batch, an argument's name of the model's forward, or a tensor or list for a batch that is always the
        same. A point is a sample's mean over positions. At most 256 samples of a logged step are taken, and at most
        `most` of all since the last entry kept. An entry is made at the logged steps 0, 1, 2, 4, 8 and so on, or
        every so many; up to 20 a layer. Only for local directories.
        """
        self._check_usable()
        every = None if every is None else check_integer("every", every)
        most, model = check_integer("most", most), self._model()
        if model is None:
            return self
        self._note_where_files_go()
        given = labels, thumbnails
        return self._add_collector(embeddings.of_model(model, pattern, given, every, most, self._report))

    def _note_where_files_go(self) -> None:
        for sink in self._sinks:
            where = getattr(sink, "destination", "")
            if "://" in where:
                self._report.log_once(f"embeddings are files beside a run in a local directory: {where} gets none")

    def log_every(self, n: int) -> Self:
        """Writes what `log` is given as running means, every n-th step, whatever `every` is; then they begin anew.

        Each value is added up on its own device, at every step and in every micro-batch. What is logged in an
        evaluation (as `eval/...`, or while the model is in evaluation mode) is averaged over it, and written when
        training goes on. With `ranks="merge"` the means of logged steps are of all ranks, the others of the first.
        """
        self._check_usable()
        every = check_integer("n", n)
        if not self._idle:
            self._session.log_means(every)
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
            self._session.log_metrics(frozenset(parts or PARTS))
        return self

    def hparams(self, values: dict[str, Any], metrics: Sequence[str] = ()) -> Self:
        """Tells what the run was started with, so that TensorBoard's HPARAMS tab compares it with others by `metrics`:
        tags such as `train/loss`, `eval/accuracy` or `gradient.norm/fc`, of which it shows the last number.

        Dicts inside are flattened with dots; what is no text, number or bool becomes text. How the run ended is told
        when the watch closes.
        """
        self._check_usable()
        asked = validation.parse_hyperparameters(values, metrics)
        if self._is_compared:
            raise ArgumentError("hparams was called already, and TensorBoard takes one set a run: give all at once")
        self._is_compared = True
        return self._show([asked])

    def environment(self) -> Self:
        """Writes once what the run was made with, to the TEXT tab: versions, devices, dtypes, the size of the model,
        what this watch was asked for. Nothing of the machine's or the user's own: no names, no paths, no variables.
        """
        return self._show([environment.described(self._session, self._place, self._model())])

    def profile(self, steps: tuple[int, int]) -> Self:
        """Writes a trace of the steps from the first to the last of `steps`, both included, made by torch's profiler:
        `tbhooks-profile/steps-<first>-<last>.pt.trace.json.gz` in the run's directory. What tbhooks itself does is
        called `tbhooks::...` in it.
        """
        self._check_usable()
        first, last = validation.steps(steps)
        directory, now = self._run_directory(), self._session.clock.count
        if first < now:
            raise ArgumentError(f"steps={steps!r} begins before the step this watch is at, which is {now}")
        if not self._idle and self._place.rank == 0:
            if directory is None or "://" in directory:
                raise ArgumentError("profile() writes beside the run: give watch() a local directory or SummaryWriter")
            place, session = Path(directory) / "tbhooks-profile", self._session
            profile = Profile(
                first, last, place, session.forwards, session.observer.gate, self._worker.submit, self._report
            )
            self._session.profiles.append(profile)
            if first == now:
                profile.start()
        return self

    def _tell_the_end(self, failed: bool) -> None:
        if self._is_compared:
            self._is_compared = False
            self._show_now([RunEnded(failed)])

    def _add_collector(self, collector: Collector) -> Self:
        """It looks at logged steps from now on; on the first rank, which writes."""
        self._check_usable()
        if not self._idle and self._place.rank == 0:
            with self._report.guarded(type(collector).__name__):
                self._session.observer.add_collector(collector)
        return self

    def _show(self, artifacts: Sequence[Artifact], step: int = 0) -> Self:
        """Writes what is known already, without waiting for a logged step."""
        self._check_usable()
        self._show_now(artifacts, step)
        return self

    def _show_now(self, artifacts: Sequence[Artifact], step: int = 0) -> None:
        if not self._idle and self._place.rank == 0:
            self._worker.submit(Shown(tuple(artifacts), step))


@dataclass(frozen=True)
class Shown:
    """Exhibits of no step in particular, as the pump takes them."""

    artifacts: tuple[Artifact, ...]
    step: int
    nbytes: int = 0

    def without_numbers(self) -> Shown:
        """Shown once, and small: they are never dropped."""
        return self

    def frames(self) -> list[Frame]:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return [Frame(self.step, time.time(), 0, (), stats.empty_rows(0), nothing, artifacts=self.artifacts)]
