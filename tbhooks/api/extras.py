"""What a watch writes in addition to statistics, each part off until it is asked for: graph, images, embeddings, ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tbhooks.api import environment, validation
from tbhooks.api.lifecycle import HasDestination, Lifecycle
from tbhooks.capture.hooks.collectors import Collector
from tbhooks.capture.scalars import metrics
from tbhooks.capture.scalars.checksums import StepChecksums
from tbhooks.capture.scalars.noise_scale import NoiseScale
from tbhooks.capture.scalars.norm_gradients import NormGradients
from tbhooks.capture.scalars.training_metrics import PARTS
from tbhooks.capture.selection import unwrap
from tbhooks.capture.session import CaptureSession
from tbhooks.capture.step import evaluation
from tbhooks.collectors import channels, embeddings, experts, images
from tbhooks.collectors.graph.collector import GraphCollector
from tbhooks.collectors.model_summary import SummaryCollector
from tbhooks.collectors.profiler import Profile
from tbhooks.data import stats
from tbhooks.data.artifacts import Artifact, RunEnded
from tbhooks.data.errors import ArgumentError, check_integer, check_names, invalid_argument
from tbhooks.data.frame import OPTIMIZER_KINDS, OPTIMIZER_PARTS, Frame, Sites
from tbhooks.data.process.remote import is_remote
from tbhooks.data.self_report import Stats
from tbhooks.delivery.worker import Worker
from tbhooks.drawing.model_table import Summary
from tbhooks.reduction import cpu, triton
from tbhooks.reduction.metrics import READY
from tbhooks.sinks import Sink

# Two sums of eight bytes for each record of a module; a parameter with optimizer state has twice as many.
CHECKSUM_BYTES = 2 * 8 * 4


class Extras:
    """Adds collectors to the session and submits artifacts. Ranks that do not write only check the arguments.

    The methods are those of `Watch` with the same names, which document them.
    """

    def __init__(
        self, session: CaptureSession, worker: Worker, lifecycle: Lifecycle, kinds: tuple[str, ...],
        make_sinks: Callable[[Any], tuple[Sink, ...]],
    ) -> None:  # fmt: skip
        self._session = session
        self._worker = worker
        self._lifecycle = lifecycle
        self._kinds, self._make_sinks = kinds, make_sinks
        self._report = lifecycle.report
        self._model = lifecycle.model
        self._has_hparams = self._has_experts = False
        self._summary: SummaryCollector | None = None

    def evaluation(self, writer: Any) -> None:
        if not set(evaluation.KINDS) & set(self._kinds):
            kinds = ", ".join(evaluation.KINDS)
            raise ArgumentError(f"evaluation passes have {kinds}; this watch captures {self._kinds}")
        if self._lifecycle.is_writing:  # ranks evaluate at different times, so their evaluations are not merged
            if writer is not None:
                self._lifecycle.send_evaluations_to(self._make_sinks(writer))
            self._session.evaluation.enable()

    def graph(self) -> None:
        self._collect(GraphCollector(self._model, self._session.observer, self._report))

    def summary(self) -> Summary:
        if self._summary is None:
            observer = self._session.observer
            self._summary = SummaryCollector(self._model, observer.collectors, observer.placement.hooks, self._report)
            self._collect(self._summary)
        return Summary(self._summary)

    def images(self, pattern: Any, every: int | None, most_bytes: int) -> None:
        every = None if every is None else check_integer("every", every)
        most, model = check_integer("most_bytes", most_bytes), self._model()
        if model is not None:
            self._collect(images.of_model(model, pattern, self._report, every, most))

    def per_channel(self, pattern: Any, kinds: Sequence[str], histograms: bool) -> None:
        chosen = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        check_names("kind", chosen, channels.KINDS)
        if not chosen or not isinstance(histograms, bool):
            raise ArgumentError(f"per_channel takes kinds, and histograms=True or False, got {kinds!r}, {histograms!r}")
        model = self._model()
        if model is not None:
            recorder = self._session.recorder
            self._collect(channels.of_model(model, pattern, chosen, histograms, recorder, self._report))

    def experts(self, pattern: Any, top_k: int | None) -> None:
        top_k = None if top_k is None else check_integer("top_k", top_k)
        if self._has_experts:
            raise ArgumentError("experts() was called before: give all patterns at once, as a list")
        model = self._model()
        if model is not None:
            collector = experts.of_model(unwrap(model), pattern, top_k, self._report)
            self._has_experts = True
            if self._lifecycle.is_active:  # of every rank: their counts are merged
                rank_group = self._lifecycle.context.rank_group
                if rank_group is not None:
                    rank_group.reserve(collector.rows)
                self._session.host_memory.add(beside=16 * collector.rows)
                with self._report.guarded("experts"):
                    self._session.observer.add_collector(collector)

    def embeddings(self, pattern: Any, labels: Any, thumbnails: Any, every: int | None, most: int) -> None:
        every = None if every is None else check_integer("every", every)
        most, model = check_integer("most", most), self._model()
        if model is None:
            return
        for sink in self._lifecycle.sinks:
            if isinstance(sink, HasDestination) and is_remote(sink.destination):
                self._report.log_once(f"embeddings need a run in a local directory: {sink.destination} gets none")
        self._collect(embeddings.of_model(model, pattern, (labels, thumbnails), every, most, self._report))

    def metric(self, name: Any, function: Any, pattern: Any, kind: Any, reduce: Any) -> None:
        made, model = self._checked_metric(name, function, kind, reduce), self._model()
        if model is None:
            return
        made = replace(made, matches=metrics.matcher(pattern, unwrap(model)))
        recorder = self._session.recorder
        if recorder.metrics is None:
            recorder.metrics = metrics.StepMetrics(self._report)
            self._session.evaluation.recorder.metrics = recorder.metrics.of_evaluations()
        if made.name in recorder.metrics.names:
            raise ArgumentError(f"there is a metric named {made.name!r} already: choose another name")
        recorder.metrics.add(made)
        self._session.host_memory.add(of_module=8 * metrics.MOST_NUMBERS, of_parameter=8 * metrics.MOST_NUMBERS)
        if self._lifecycle.is_active:
            with self._report.guarded("metric"):
                self._session.observer.add_collector(metrics.MetricHooks(recorder.metrics))

    def _checked_metric(self, name: Any, function: Any, kind: Any, reduce: Any) -> metrics.Metric:
        if not isinstance(name, str) or not name or "/" in name:
            raise invalid_argument("the name of a metric", "a non-empty string without slashes", name)
        check_names("kind of a metric", (kind,), metrics.KINDS)
        check_names("reduce", (reduce,), metrics.REDUCTIONS)
        if kind in ("gradient", "weight", "weight_gradient") and not self._session.recorder.wants(kind):
            raise ArgumentError(f"this watch does not capture the kind {kind!r}: add it to kinds of watch()")
        if function is None and name == metrics.PAIR:
            tag = f"activation.{name}"
            return metrics.Metric(name, lambda ratio: ratio, metrics.PAIR, reduce, lambda _: True, tag)
        if function is None:
            check_names("ready metric", (name,), (*READY, metrics.PAIR))
            function = READY[name]
        if not callable(function):
            raise invalid_argument("function", "a function from a tensor to a number, or to a few", function)
        return metrics.Metric(name, function, kind, reduce, lambda _: True)

    def optimizer_state(self) -> None:
        model = self._model()
        if model is not None and self._lifecycle.is_active:
            rank_group, records = self._lifecycle.context.rank_group, len((*OPTIMIZER_KINDS, *OPTIMIZER_PARTS))
            if rank_group is not None:
                rank_group.reserve(records * len(list(model.parameters())))
            self._session.host_memory.add(records=records)
            self._session.parameters.read_optimizer_state()

    def noise_scale(self) -> None:
        session = self._session
        if self._lifecycle.is_active and session.parameters.noise is None:
            norms = NormGradients(self._report)
            session.observer.add_collector(norms)
            session.parameters.noise = NoiseScale(
                session.recorder, session.forwards, session.parameters.watched, session.is_logging, norms, self._report
            )

    def log_every(self, n: int) -> None:
        every = check_integer("n", n)
        if self._lifecycle.is_active:
            self._session.log_means(every)

    def progress(self, parts: Sequence[str]) -> None:
        check_names("part of the progress", parts, PARTS)
        if self._lifecycle.is_active:
            self._session.metrics.add_parts(frozenset(parts or PARTS))

    def hparams(self, values: dict[str, Any], metrics: Sequence[str]) -> None:
        hyperparameters = validation.parse_hyperparameters(values, metrics)
        if self._has_hparams:
            raise ArgumentError("hparams() was called before, and TensorBoard takes one set per run: give all at once")
        self._has_hparams = True
        self._submit(hyperparameters)
        self._lifecycle.at_end(lambda failed: self._submit(RunEnded(failed)))

    def environment(self) -> None:
        self._submit(environment.describe_run(self._session, self._lifecycle.context, self._model()))

    def checksums(self) -> None:
        model = self._model()
        if model is None or not self._lifecycle.is_active:
            return
        for parameter in {parameter.device: parameter for parameter in model.parameters()}.values():
            triton.prepare_words(parameter)
        for recorder in (self._session.recorder, self._session.evaluation.recorder):
            recorder.checksums = recorder.checksums or StepChecksums(self._report)
        self._session.host_memory.add(of_module=CHECKSUM_BYTES, of_parameter=2 * CHECKSUM_BYTES)
        self.environment()

    def profile(self, steps: tuple[int, int]) -> None:
        first, last = validation.steps(steps)
        directory, now = self._lifecycle.run_directory, self._session.clock.count
        if first < now:
            raise ArgumentError(f"steps={steps!r} begins before the current step of this watch, {now}")
        if not self._lifecycle.is_writing:
            return
        if directory is None or is_remote(directory):
            raise ArgumentError("profile() writes into the run: give watch() a local directory or a SummaryWriter")
        traces, session = Path(directory) / "tbhooks-profile", self._session
        profile = Profile(
            first, last, traces, session.forwards, session.observer.gate, self._worker.submit, self._report
        )
        session.profiles.add(profile)
        if first == now:
            profile.start()

    def stats(self) -> Stats:
        report, session = self._report, self._session
        return Stats(
            steps=session.clock.count, logged=session.logged, hooks_fired=report.hooks_fired,
            unseen=dict(report.unseen), aliases=dict(session.observer.placement.aliases), errors=report.errors,
            dropped=report.dropped, messages=tuple(report.messages), seconds_training=report.seconds_training,
            seconds_pump=report.seconds_pump, clock=session.clock.mode, skipped=session.scaler.skipped,
            seconds_views=report.seconds_views, kernel=cpu.name(), device_kernel=triton.name(),
        )  # fmt: skip

    def _collect(self, collector: Collector) -> None:
        if self._lifecycle.is_writing:
            with self._report.guarded(type(collector).__name__):
                self._session.observer.add_collector(collector)

    def _submit(self, artifact: Artifact) -> None:
        if self._lifecycle.is_writing:
            self._worker.submit(ArtifactStep((artifact,)))


@dataclass(frozen=True)
class ArtifactStep:
    """Artifacts that are written at once, without a logged step. Implements the `Step` of the background thread."""

    artifacts: tuple[Artifact, ...]
    step: int = 0
    nbytes: int = 0

    def without_numbers(self) -> ArtifactStep:
        """Itself: it is small and never dropped."""
        return self

    def frames(self) -> list[Frame]:
        return [frame_of_artifacts(self.artifacts, self.step, time.time(), rank=0)]


def frame_of_artifacts(artifacts: tuple[Artifact, ...], step: int, when: float, rank: int) -> Frame:
    """A frame without statistics."""
    return Frame(step, when, rank, Sites(), stats.empty_rows(0), np.zeros((0, 0), dtype=np.int64), artifacts=artifacts)
