"""The handle `watch()` returns: wires capture to delivery, owns their lifetime, and is what users call and read."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from tbhooks import rules as judgement
from tbhooks.api import lifecycle, validation
from tbhooks.api.asking import WatchRequests
from tbhooks.api.finding_actions import Reactions
from tbhooks.capture.dynamo import dynamo_disable
from tbhooks.capture.rank_context import RankContext
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.selection import Selector, unwrap
from tbhooks.capture.session import CaptureSession
from tbhooks.capture.step import evaluation
from tbhooks.capture.step.nan_replay import Replay
from tbhooks.data.errors import ArgumentError, ClosedError, check_integer, check_names
from tbhooks.data.findings import Findings, once_each
from tbhooks.data.frame import Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Report, Stats
from tbhooks.delivery.frame_callback import Follower, Following, LiveView
from tbhooks.delivery.worker import DEADLINE_S, Worker
from tbhooks.distributed.topology import before_the_end, is_of_a_job
from tbhooks.reduction import cpu, triton
from tbhooks.sinks import Sink

# How long a reader waits for what other ranks saw; one that trains must not be kept from it by one that reads.
PATIENCE_S = 2.0
# What close() keeps of its time to write this rank's own numbers, if another rank does not come.
WRITING_S = 5.0

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Watch(WatchRequests):
    """A model being watched. Made by `watch()`; every method is safe in the middle of training."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, mode: str,
        place: RankContext, sinks: tuple[Sink, ...], rules: tuple[judgement.Rule, ...],
        sinks_of: Callable[[Any], tuple[Sink, ...]],
    ) -> None:  # fmt: skip
        self._report = Report(is_quiet=place.rank != 0)
        self._history = History()
        self._judge = judgement.RuleEngine(rules, self._history)
        self._reactions = Reactions(self._report)
        self._replayed: list[Finding] = []
        self._unwritten: list[Finding] = []
        # A rank of a job may be killed at any time: what is written is to be on disk.
        self._worker = Worker(sinks, self._judged, self._report, flushes=is_of_a_job())
        self._session = CaptureSession(
            model, selector, kinds, schedule, mode, place, self._worker.submit, self._reactions.raise_if_asked,
            self._report,
        )  # fmt: skip
        self._model = weakref.ref(unwrap(model))
        self._sinks = sinks
        self._sinks_of = sinks_of
        self._evaluation_sinks: tuple[Sink, ...] = ()
        self._kinds = kinds
        self._nonfinite: set[str] = set()
        self._closed = False
        self._has_stopped = False
        self._is_model_gone = False
        # Nothing to do any more, or ever: another rank, a forked child, a model that is gone.
        self._idle = place.is_idle
        self._place = place

    @dynamo_disable
    def step(self, n: int | None = None) -> None:
        """Ends the current step and labels it n, or with the watch's own count. From then on nothing else does."""
        self._check_usable()
        label = None if n is None else check_integer("n", n, least=0)
        if not self._idle:
            self._session.step(label)
            self._reactions.raise_if_asked()

    @dynamo_disable
    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Logs numbers with the step, as `train/<name>`; device tensors ride in its one copy, without a sync.

        Call it anywhere in the step, or right after the step has ended. On steps that are not logged it
        costs nothing and goes nowhere, unless `log_every` asks for means of all.
        """
        self._check_usable()
        numbers = {validation.tag(name): validation.number(name, value) for name, value in validation.items(values)}
        if not self._idle:
            self._session.log(numbers)

    def evaluation(self, writer: Any = None) -> Watch:
        """Reads evaluation passes too, apart from training: all between two training passes make one frame.

        It goes to `writer` (whatever `watch` takes for one), or with the rest under kinds such as `eval.activation`.
        """
        self._check_usable()
        if not set(evaluation.KINDS) & set(self._kinds):
            raise ArgumentError(f"an evaluation shows {', '.join(evaluation.KINDS)}; this watch has {self._kinds}")
        if not self._idle and self._place.rank == 0:  # ranks evaluate when they like, so nothing is merged
            if writer is not None:
                self._open_evaluation_sinks(self._sinks_of(writer))
            self._session.read_evaluations()
        return self

    def on_finding(self, reaction: Callable[[Finding], Any] | str) -> Watch:
        """What follows a finding: a call with it, "raise" (a `FindingError` at the next step), "stop" (`should_stop`).

        Callables are called from the background thread, for every finding that is told; the other two follow
        warnings and errors.
        """
        self._check_usable()
        self._reactions.add(reaction)
        return self

    def on_nonfinite(self, reaction: str) -> Watch:
        """Looks at all gradients before every optimizer step, which waits for the device, and if any is not finite
        runs the step once more to name the module it began in ("replay"), or raises before weights are touched
        ("raise"). Both can be asked for. The inputs of a step are kept until it ends.
        """
        self._check_usable()
        check_names("reaction", (reaction,), ("replay", "raise"))
        self._nonfinite.add(reaction)
        if not self._idle:
            self._session.check_gradients(self._went_nonfinite)
        return self

    @property
    def should_stop(self) -> bool:
        """Whether something was found, after `on_finding("stop")`."""
        return self._reactions.should_stop

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No reading inside, and no hooks but those that are compiled into the model; steps are still counted."""
        self._check_usable()
        self._session.pause()
        try:
            yield
        finally:
            if not self._idle:
                self._session.resume()

    def flush(self, timeout_s: float = DEADLINE_S) -> None:
        """Waits until every step that has ended is written and durable."""
        self._check_usable()
        self._flush(timeout_s)

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what there is, takes every hook off, closes what the watch opened. Can be called again."""
        self._closed = True
        if self in lifecycle.open_watches:
            self._begin_close()
            deadline = time.monotonic() + timeout_s
            if self._place.team is not None and not self._worker.wait(max(timeout_s / 2, timeout_s - WRITING_S)):
                self._place.team.give_up()
            self._worker.close(max(0.0, deadline - time.monotonic()))
            if self._is_model_gone:
                self._session.stop()
            if self._place.team is not None:
                before_the_end.discard(id(self))
                self._place.team.leave(is_idle=self._worker.is_done)
            lifecycle.open_watches.discard(self)  # last: whoever interrupts this closes it again
            lifecycle.tidy()

    def _begin_close(self) -> None:
        """The part of closing that waits for nothing; the pump then writes what there is."""
        self._closed = True
        if self._is_model_gone:  # then the pump is handing over what there is
            return
        if self in lifecycle.open_watches and not self._has_stopped:
            self._session.stop(is_failing=lifecycle.is_failing())
            self._tell_the_end(failed=lifecycle.is_failing())
            self._idle = True
            self._worker.finish()
            self._has_stopped = True  # last, as well

    @property
    def latest(self) -> Frame | None:
        """The newest frame, once the pump has made it."""
        return self.history.latest

    @property
    def history(self) -> History:
        """The last frames, up to and including the last step that has ended."""
        if not self._idle:
            self._session.settle()
        self._worker.wait(PATIENCE_S if self._place.team is not None else DEADLINE_S)
        return self._history

    @property
    def findings(self) -> Findings:
        """What the rules found so far, oldest first, once a rule and place."""
        self.history  # noqa: B018  reading it waits for the pump
        return Findings(once_each(sorted([*self._replayed, *self._judge.findings], key=lambda finding: finding.step)))

    @property
    def stats(self) -> Stats:
        """What the watch saw, could not see, got wrong and cost."""
        report, loop = self._report, self._session
        return Stats(
            steps=loop.clock.count, logged=loop.logged, hooks_fired=report.hooks_fired, unseen=dict(report.unseen),
            aliases=dict(loop.observer.placement.aliases), errors=report.errors, dropped=report.dropped,
            messages=tuple(report.messages), seconds_training=report.seconds_training,
            seconds_pump=report.seconds_pump, clock=loop.clock.mode, skipped=loop.scaler.skipped,
            seconds_views=report.seconds_views, kernel=cpu.name(), device_kernel=triton.name(),
        )  # fmt: skip

    def live(self, kind: str = "activation", stat: str = "std", *, interactive: bool | None = None) -> LiveView:
        """A view that follows the training in a notebook cell: a heat map of layers by steps, the loss, the findings.

        Drawn at most twice a second, in the background. `interactive` is the view with controls, which needs
        `tbhooks[jupyter]`; None takes it where it is there.
        """
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        self._check_usable()
        live: LiveView = display("live", self, kind, stat, interactive=interactive)
        return live

    def heatmap(self, kind: str = "activation", stat: str = "std", width: float = 7.0) -> Figure:
        """Layers by steps as a matplotlib figure. Needs `tbhooks[plot]`."""
        return self.history.figure(stat, kind, width)

    def _follow(self, follower: Follower) -> None:
        """It is shown every frame from now on, by the pump's thread, and told when the watch closes."""
        self._worker.add(Following(follower, self._report))

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        from tbhooks.views import display  # noqa: PLC0415  loaded only when something is shown

        bundle: dict[str, str] = display("watch", self, include, exclude)
        return bundle

    def __enter__(self) -> Watch:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "idle" if self._idle else f"step {self._session.clock.count}"
        return f"<Watch: {state}, {self._session.logged} steps logged, {len(once_each(self._judge.findings))} findings>"

    def _start(self) -> None:
        lifecycle.prepare(is_of_a_job())
        # A sink that hangs keeps nobody from watching another model; its watch is closed at exit.
        for gone in [watching for watching in open_watches() if watching._idle and watching._worker.is_done]:
            gone.close()
        self._prepare(self._sinks)
        lifecycle.open_watches.add(self)
        if self._place.team is not None:
            before_the_end.add(id(self), self._drain)
        model = self._model()
        if model is not None:
            weakref.finalize(model, _model_is_gone, weakref.ref(self)).atexit = False
        try:
            self._session.start()
        except BaseException:
            self.close()
            raise

    def _continue_from(self, step: int) -> None:
        """So many steps were made before, and count for `every`; the first one from here is logged in any case."""
        self._session.clock.count = step

    def _forget_open_step(self) -> None:
        """What was seen since the last step ended is of none."""
        self._session.abandon()

    @property
    def _optimizer_steps(self) -> int:
        return self._session.clock.optimizer_steps

    def _prepare(self, sinks: tuple[Sink, ...]) -> None:
        theirs = {destination for other in open_watches() if other is not self for destination in other._destinations()}
        for sink in sinks:
            if isinstance(sink, HasDestination):
                sink.drain_before_close(self._drain)
                if sink.destination in theirs:
                    self._report.log_once(
                        f"another open watch writes to {sink.destination} too: where names are the same, "
                        "their numbers mix"
                    )

    def _destinations(self) -> set[str]:
        sinks = (*self._sinks, *self._evaluation_sinks)
        return {sink.destination for sink in sinks if isinstance(sink, HasDestination)}

    def _run_directory(self) -> str | None:
        return next((sink.destination for sink in self._sinks if isinstance(sink, HasDestination)), None)

    def _open_evaluation_sinks(self, sinks: tuple[Sink, ...]) -> None:
        shared = self._destinations() & {sink.destination for sink in sinks if isinstance(sink, HasDestination)}
        if shared:
            raise ArgumentError(
                f"{shared.pop()} is where this watch writes already; evaluation() without a writer puts evaluations "
                "there too, under tags that begin with eval."
            )
        self._prepare(sinks)
        self._session.settle()
        self._worker.wait()
        self._evaluation_sinks += sinks
        self._worker.send_evaluations_to(self._evaluation_sinks)

    def _judged(self, frame: Frame) -> Frame:
        """In the pump's thread: what the rules find, and what was found meanwhile, goes with the frame."""
        known = len(self._judge.findings)
        frame = self._judge(frame)
        for finding in self._judge.findings[known:]:
            self._reactions.told(finding)
        found = [finding for finding in self._unwritten if finding.step <= frame.step] if frame.sites else []
        for finding in found:  # one by one: the training thread may be adding another
            self._unwritten.remove(finding)
        if found:
            frame = replace(frame, findings=(*found, *frame.findings))
            self._history.judged(frame)
        return frame

    def _went_nonfinite(self, step: int, replay: Replay) -> None:
        """In the training thread, before the optimizer touches anything."""
        finding = replay.finding(step, run_again="replay" in self._nonfinite)
        self._replayed.append(finding)
        self._unwritten.append(finding)
        self._report.log_once(finding.message, level=logging.ERROR)
        self._reactions.told(finding)
        if "raise" in self._nonfinite:
            self._reactions.raise_soon(finding)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this watch is closed; call watch() again")

    def _is_on(self, model: nn.Module) -> bool:
        return self._model() is unwrap(model)

    def _flush(self, timeout_s: float) -> None:
        if not self._idle:
            self._session.settle()
        if not self._worker.flush(timeout_s):
            self._report.log_once(f"flush() gave up after {timeout_s:g} s: a sink is slow, or another rank late")

    def _drain(self) -> None:
        with self._report.guarded("draining"):
            self._flush(DEADLINE_S)

    def _finish(self) -> None:
        """The model is gone. What has ended is handed over by the pump's thread: this one may be any, and may have
        been interrupted anywhere.
        """
        self._tell_the_end(failed=False)
        self._idle = self._is_model_gone = True
        self._worker.finish(partial(self._session.settle, for_good=True))

    def abandon(self) -> None:
        """Lets go of everything without a word: in a forked child, which has no pump to write with."""
        self._idle = True
        self._worker.abandon()
        self._report.forked()
        self._session.forked()
        self._session.abandon()
        self._session.disconnect()


@runtime_checkable
class HasDestination(Protocol):
    """A sink on something the user holds too: it can be named, and closed before the watch is."""

    @property
    def destination(self) -> str: ...

    def drain_before_close(self, drain: Callable[[], None]) -> None: ...


def open_watches() -> list[Watch]:
    """Those of this process, on any model."""
    return [watching for watching in lifecycle.open_watches if isinstance(watching, Watch)]


def _model_is_gone(reference: weakref.ref[Watch]) -> None:
    """Called by the garbage collector, at any moment: nothing may be waited for, and no table be changed."""
    watching = reference()
    if watching is not None and not watching._idle:
        watching._finish()
