"""`watch()` and the handle it returns: checks what was passed, wires capture to delivery, owns lifetime."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tbhooks import arguments, evaluation, kernel, process, triton_rows
from tbhooks import rules as judgement
from tbhooks.clock import MODES
from tbhooks.compiled import never_compiled
from tbhooks.errors import ArgumentError, ClosedError, check_names
from tbhooks.frame import ALL_KINDS, KINDS, Finding, Frame
from tbhooks.history import History
from tbhooks.loop import Loop
from tbhooks.pump import DEADLINE_S, Pump
from tbhooks.reactions import Reactions
from tbhooks.replay import Replay
from tbhooks.report import Report, Stats
from tbhooks.schedule import Schedule
from tbhooks.select import Selector, unwrap
from tbhooks.sinks import Sink


def watch(
    model: nn.Module,
    writer: Any = None,
    every: int = 100,
    *,
    kinds: Any = KINDS,
    include: Any = None,
    exclude: Any = None,
    histograms: bool | int = True,
    scalars: Any = "core",
    rules: Any = "default",
    step: str = "auto",
    ranks: str = "local",
) -> Watch:
    """Watches a model's training from now on; the one line a script needs.

    `writer` is a SummaryWriter, a directory, any `Sink`, a list of those, or None to keep frames in
    memory. Steps count from 0 and every `every`-th is logged. Closed at exit, by `close()`, or by `with`.

    >>> import torch, tbhooks
    >>> model = torch.nn.Linear(2, 1)
    >>> w = tbhooks.watch(model, every=1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.ones(4, 2)).sum().backward(); optimizer.step()
    >>> w.latest["weight", "weight_gradient"].mean
    4.0
    >>> w.close()
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a torch.nn.Module, not {arguments.shown(model)}")
    schedule = Schedule(arguments.whole_number("every", every), arguments.histograms(histograms))
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple | set | frozenset):
        raise ArgumentError(f"kinds is a list of {', '.join(ALL_KINDS)}, not {arguments.shown(kinds)}")
    kinds = tuple(kinds)
    check_names("kind", kinds, ALL_KINDS)
    if not kinds:
        raise ArgumentError(f"kinds names at least one of {', '.join(ALL_KINDS)}")
    check_names("step clock", (step,), MODES)
    check_names("value of ranks", (ranks,), ("local",))
    selector = Selector(model, include, exclude)
    chosen = judgement.choose(rules)
    rank = _rank()
    sinks_of = partial(make_sinks, scalars=scalars)
    sinks = sinks_of(writer) if rank == 0 else ()
    watching = Watch(model, selector, kinds, schedule, step, rank, sinks, chosen, sinks_of)
    if rank == 0:
        watching._start()
    return watching


def unwatch(model: nn.Module) -> None:
    """Closes every watch on this model."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a torch.nn.Module, not {arguments.shown(model)}")
    for watching in _watches():
        if watching._is_on(model):
            watching.close()


class Watch:
    """A model being watched. Made by `watch()`; every method is safe in the middle of training."""

    def __init__(
        self, model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, mode: str,
        rank: int, sinks: tuple[Sink, ...], rules: tuple[judgement.Rule, ...],
        sinks_of: Callable[[Any], tuple[Sink, ...]],
    ) -> None:  # fmt: skip
        self._report = Report()
        self._history = History()
        self._judge = judgement.Judge(rules, self._history)
        self._reactions = Reactions(self._report)
        self._replayed: list[Finding] = []
        self._unwritten: list[Finding] = []
        self._pump = Pump(sinks, self._judged, self._report)
        self._loop = Loop(model, selector, kinds, schedule, mode, rank, self._pump.submit, self._report)
        self._loop.raises = self._reactions.raise_if_asked
        self._model = weakref.ref(unwrap(model))
        self._sinks = sinks
        self._sinks_of = sinks_of
        self._evaluation_sinks: tuple[Sink, ...] = ()
        self._kinds = kinds
        self._nonfinite: set[str] = set()
        self._closed = False
        # Nothing to do any more, or ever: another rank, a forked child, a model that is gone.
        self._idle = rank != 0

    @never_compiled
    def step(self, n: int | None = None) -> None:
        """Ends the current step and labels it n, or with the watch's own count. From then on nothing else does."""
        self._check_usable()
        label = None if n is None else arguments.whole_number("n", n, least=0)
        if not self._idle:
            self._loop.step(label)
            self._reactions.raise_if_asked()

    @never_compiled
    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Logs numbers with the step, as `train/<name>`; device tensors ride in its one copy, without a sync.

        Call it anywhere in the step, or right after the step has ended. On steps that are not logged it
        costs nothing and goes nowhere.
        """
        self._check_usable()
        numbers = {arguments.tag(name): arguments.number(name, value) for name, value in arguments.items(values)}
        if not self._idle:
            self._loop.log(numbers)

    def evaluation(self, writer: Any = None) -> Watch:
        """Reads evaluation passes too, apart from training: all between two training passes make one frame.

        It goes to `writer` (whatever `watch` takes for one), or with the rest under kinds such as `eval.activation`.
        """
        self._check_usable()
        if not set(evaluation.KINDS) & set(self._kinds):
            raise ArgumentError(f"an evaluation shows {', '.join(evaluation.KINDS)}; this watch has {self._kinds}")
        if not self._idle:
            if writer is not None:
                self._open_evaluation_sinks(self._sinks_of(writer))
            self._loop.read_evaluations()
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
            self._loop.replay_when(self._went_nonfinite)
        return self

    @property
    def should_stop(self) -> bool:
        """Whether something was found, after `on_finding("stop")`."""
        return self._reactions.should_stop

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No reading inside, and no hooks but those that are compiled into the model; steps are still counted."""
        self._check_usable()
        self._loop.pause()
        try:
            yield
        finally:
            if not self._idle:
                self._loop.resume()

    def flush(self, timeout_s: float = DEADLINE_S) -> None:
        """Waits until every step that has ended is written and durable."""
        self._check_usable()
        self._flush(timeout_s)

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what there is, takes every hook off, closes what the watch opened. Can be called again."""
        self._closed = True
        if self in process.open_watches:
            self._loop.stop()
            self._idle = True
            self._pump.close(timeout_s)
            process.open_watches.discard(self)  # last: whoever interrupts this closes it again
            process.tidy()

    @property
    def latest(self) -> Frame | None:
        """The newest frame, once the pump has made it."""
        return self.history.latest

    @property
    def history(self) -> History:
        """The last frames, up to and including the last step that has ended."""
        if not self._idle:
            self._loop.settle()
        self._pump.wait()
        return self._history

    @property
    def findings(self) -> list[Finding]:
        """What the rules found so far, oldest first, once a rule and place."""
        self.history  # noqa: B018  reading it waits for the pump
        return sorted([*self._replayed, *self._judge.findings], key=lambda finding: finding.step)

    @property
    def stats(self) -> Stats:
        """What the watch saw, could not see, got wrong and cost."""
        report, loop = self._report, self._loop
        return Stats(
            steps=loop.clock.count, logged=loop.logged, hooks_fired=report.hooks_fired, unseen=dict(report.unseen),
            aliases=dict(loop.probe.placement.aliases), errors=report.errors, dropped=report.dropped,
            messages=tuple(report.messages), seconds_training=report.seconds_training,
            seconds_pump=report.seconds_pump, clock=loop.clock.mode, skipped=loop.scaler.skipped,
            kernel=kernel.name(), device_kernel=triton_rows.name(),
        )  # fmt: skip

    def __enter__(self) -> Watch:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "idle" if self._idle else f"step {self._loop.clock.count}"
        return f"<Watch: {state}, {self._loop.logged} steps logged, {len(self._judge.findings)} findings>"

    def _start(self) -> None:
        process.prepare()
        for gone in [watching for watching in _watches() if watching._idle]:
            gone.close()
        self._prepare(self._sinks)
        process.open_watches.add(self)
        model = self._model()
        if model is not None:
            weakref.finalize(model, _model_is_gone, weakref.ref(self)).atexit = False
        try:
            self._loop.start()
        except BaseException:
            self.close()
            raise

    def _prepare(self, sinks: tuple[Sink, ...]) -> None:
        theirs = {destination for other in _watches() if other is not self for destination in other._destinations()}
        for sink in sinks:
            if isinstance(sink, HasDestination):
                sink.drain_before_close(self._drain)
                if sink.destination in theirs:
                    self._report.tell(
                        f"another open watch writes to {sink.destination} too: where names are the same, "
                        "their numbers mix"
                    )

    def _destinations(self) -> set[str]:
        sinks = (*self._sinks, *self._evaluation_sinks)
        return {sink.destination for sink in sinks if isinstance(sink, HasDestination)}

    def _open_evaluation_sinks(self, sinks: tuple[Sink, ...]) -> None:
        shared = self._destinations() & {sink.destination for sink in sinks if isinstance(sink, HasDestination)}
        if shared:
            raise ArgumentError(
                f"{shared.pop()} is where this watch writes already; evaluation() without a writer puts evaluations "
                "there too, under tags that begin with eval."
            )
        self._prepare(sinks)
        self._loop.settle()
        self._pump.wait()
        self._evaluation_sinks += sinks
        self._pump.send_evaluations_to(self._evaluation_sinks)

    def _judged(self, frame: Frame) -> Frame:
        """In the pump's thread: what the rules find, and what was found meanwhile, goes with the frame."""
        known = len(self._judge.findings)
        frame = self._judge(frame)
        for finding in self._judge.findings[known:]:
            self._reactions.told(finding)
        found = [finding for finding in self._unwritten if finding.step <= frame.step] if frame.sites else []
        if found:
            self._unwritten = [finding for finding in self._unwritten if finding.step > frame.step]
            frame = replace(frame, findings=(*found, *frame.findings))
            self._history.judged(frame)
        return frame

    def _went_nonfinite(self, step: int, replay: Replay) -> None:
        """In the training thread, before the optimizer touches anything."""
        finding = replay.finding(step, run_again="replay" in self._nonfinite)
        self._replayed.append(finding)
        self._unwritten.append(finding)
        self._report.tell(finding.message, level=logging.ERROR)
        self._reactions.told(finding)
        if "raise" in self._nonfinite:
            self._reactions.raise_soon(finding)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this watch is closed; call watch() again")

    def _is_on(self, model: nn.Module) -> bool:
        return self._model() is unwrap(model)

    def _flush(self, timeout_s: float) -> None:
        if self._idle:
            return
        self._loop.settle()
        if not self._pump.flush(timeout_s):
            self._report.tell(f"flush() gave up after {timeout_s:g} s: a sink is slow")

    def _drain(self) -> None:
        with self._report.guarded("draining"):
            self._flush(DEADLINE_S)

    def _finish(self) -> None:
        self._idle = True
        self._loop.settle()
        self._pump.finish()

    def abandon(self) -> None:
        """Lets go of everything without a word: in a forked child, which has no pump to write with."""
        self._idle = True
        self._pump.abandon()
        self._loop.abandon()
        self._loop.forget_everyone()


@runtime_checkable
class HasDestination(Protocol):
    """A sink on something the user holds too: it can be named, and closed before the watch is."""

    @property
    def destination(self) -> str: ...

    def drain_before_close(self, drain: Callable[[], None]) -> None: ...


def make_sinks(writer: Any, scalars: Any) -> tuple[Sink, ...]:
    """What `writer=` stands for."""
    from tbhooks.sinks.tensorboard import TensorBoardSink, scalar_table  # noqa: PLC0415  tensorboard is slow to import

    scalar_table(scalars)
    given = writer if isinstance(writer, list | tuple) else [] if writer is None else [writer]
    sinks: list[Sink] = []
    for one in given:
        if isinstance(one, str | Path) or (hasattr(one, "_get_file_writer") and not isinstance(one, type)):
            sinks.append(TensorBoardSink(one, scalars))
        elif isinstance(one, Sink) and not isinstance(one, type | io.IOBase):
            sinks.append(one)
        else:
            raise ArgumentError(
                "writer is a SummaryWriter (torch or tensorboardX), a directory (str or Path), an object with "
                f"write, flush and close, a list of those, or None, not {arguments.shown(one)}"
            )
    return tuple(sinks)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    # torchrun sets both before the process group exists; a stray RANK alone means nothing.
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else 0


def _watches() -> list[Watch]:
    return [watching for watching in process.open_watches if isinstance(watching, Watch)]


def _model_is_gone(reference: weakref.ref[Watch]) -> None:
    """Called by the garbage collector, at any moment: nothing may be waited for, and no table be changed."""
    watching = reference()
    if watching is not None and not watching._idle:
        watching._finish()
