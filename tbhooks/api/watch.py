"""`watch()`: checks its arguments, builds the parts of a watch, connects them and starts it. And `unwatch()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from tbhooks import rules as shipped_rules
from tbhooks.api import environment, lifecycle, validation, writers
from tbhooks.api.burst_file import BurstFile
from tbhooks.api.finding_actions import FindingActions
from tbhooks.api.handle import Watch
from tbhooks.api.lifecycle import Lifecycle
from tbhooks.api.quantizers import formats_in_use
from tbhooks.capture.rank_context import RankContext, this_rank
from tbhooks.capture.schedule import Bursts, Schedule
from tbhooks.capture.selection import Selector, is_keras, unwrap
from tbhooks.capture.session import CaptureSession
from tbhooks.capture.step.clock import MODES
from tbhooks.data.errors import check_integer, check_names, invalid_argument
from tbhooks.data.frame import ALL_KINDS, KINDS
from tbhooks.data.history import History
from tbhooks.data.self_report import Report
from tbhooks.delivery.worker import Worker
from tbhooks.distributed.handshake import describe
from tbhooks.distributed.topology import MERGE, RANKS, is_in_job, join, restarts
from tbhooks.reduction import cpu, triton
from tbhooks.sinks import HasSteps, Sink

__all__ = ["Watch", "unwatch", "watch"]

KERAS = (
    "this is a Keras model. If an optimizer of Keras trains it, updates are not captured, and a forward after a "
    "backward begins the next step"
)
OLD_KERNEL = (
    "the C kernel is not used, so torch operations, which are slower, reduce CPU tensors: {}. Build it again with "
    "`pip install --force-reinstall --no-deps tbhooks`, or `pip install --editable .` in a checkout"
)


def watch(
    model: nn.Module,
    writer: Any = None,
    every: int = 100,
    *,
    kinds: Any = KINDS,
    include: Any = None,
    exclude: Any = None,
    histograms: bool | int = True,
    scalars: Any = "auto",
    rules: Any = "default",
    step: str = "auto",
    ranks: str = "local",
) -> Watch:
    """Watches the training of a model: this is the one line that a script needs.

    Step k, counted from 0, is logged if `k % every == 0`. Raises an `ArgumentError` if an argument is not accepted.

    Args:
        model: the model that is trained, before or after it is wrapped or compiled.
        writer: a `SummaryWriter`, a directory, a run of wandb, mlflow, aim, trackio or swanlab, a function that takes a
            `Frame`, any `Sink`, or a list of those. `runs/` makes a new run in `runs`. None: memory only.
        every: how many steps there are from one logged step to the next.
        kinds: "activation", "gradient", "weight", "weight_gradient", "update" (the default), "input", "functional".
        include: modules to watch: a glob over paths, a class, a function of path and module, or a list of those.
        exclude: modules not to watch; takes the same.
        histograms: True: rarer and rarer in long runs. False: none. n: on every n-th logged step.
        scalars: statistics that are also TensorBoard scalars: "core", "all", a list of names, or (). "auto" is "core"
            if that makes up to 300 scalars; otherwise summaries by kind and by role instead of single layers.
        rules: which rules look for problems: "default", (), or a list of rules and their names.
        step: what ends a step: "optimizer", "forward", "manual" (only `Watch.step`), or "auto" to find out.
        ranks: "local" captures the first rank of a job only, "merge" merges the statistics of all ranks.

    Returns the `Watch`. It closes at exit, by `close()`, or at the end of a `with` block.

    Examples:
        >>> import torch, tbhooks
        >>> model = torch.nn.Linear(2, 1)
        >>> w = tbhooks.watch(model, every=1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(4, 2)).sum().backward(); optimizer.step()
        >>> w.latest["weight", "weight_gradient"].mean
        4.0
        >>> w.close()

    """
    _check_model(model)
    schedule = Schedule(check_integer("every", every), validation.histograms(histograms))
    kinds = _checked_kinds(kinds)
    check_names("step clock", (step,), MODES)
    check_names("value of ranks", (ranks,), RANKS)
    selector = Selector(model, include, exclude)
    chosen_rules = shipped_rules.choose(rules)
    make_sinks = partial(writers.make_sinks, scalars=scalars, model_name=environment.model_name(model))
    writers.check_writers(writer)
    sinks = make_sinks(writer) if this_rank() == 0 else ()
    context = RankContext(this_rank(), first_step=_first_step(sinks))
    if ranks == MERGE:
        context = join(describe(model, selector, kinds, schedule, step), context.first_step)
    return _start(model, selector, kinds, schedule, step, context, sinks, chosen_rules, make_sinks)


def _start(
    model: nn.Module, selector: Selector, kinds: tuple[str, ...], schedule: Schedule, step: str, context: RankContext,
    sinks: tuple[Sink, ...], rules: tuple[shipped_rules.Rule, ...], make_sinks: Callable[[Any], tuple[Sink, ...]],
) -> Watch:  # fmt: skip
    """Builds and connects the parts of a watch, and starts it."""
    report = Report(is_quiet=context.rank != 0)
    history = History(formats=formats_in_use(model))
    bursts = Bursts()
    burst_file = BurstFile(sinks, bursts.ask)
    actions = FindingActions(rules if context.rank == 0 else (), history, report, bursts)
    # A rank of a distributed job may be killed at any time: each step is flushed.
    poll = burst_file.poll if burst_file.files else None
    worker = Worker(sinks, actions.judge, report, flushes=is_in_job(), poll=poll)
    session = CaptureSession(
        model, selector, kinds, schedule, bursts, step, context, worker.submit, actions.nonfinite,
        actions.raise_if_asked, report,
    )  # fmt: skip
    life = Lifecycle(weakref.ref(unwrap(model)), session, worker, sinks, context, report)
    watching = Watch(session, worker, life, actions, history, kinds, make_sinks)
    if is_keras(model):
        report.log_once(KERAS)
    if cpu.failure:
        report.log_once(OLD_KERNEL.format(cpu.failure))
    if life.is_active:
        triton.prepare_for(model.parameters())
        session.host_memory.reserve()
        life.start()
    return watching


def unwatch(model: nn.Module) -> None:
    """Closes every watch on this model, as `Watch.close` does. Raises an `ArgumentError` if it is not a module."""
    _check_model(model)
    unwrapped = unwrap(model)
    lifecycle.close_together([life for life in lifecycle.open_watches if life.model() is unwrapped])


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise invalid_argument("model", "a torch.nn.Module", model)


def _checked_kinds(kinds: Any) -> tuple[str, ...]:
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple | set | frozenset) or not kinds:
        raise invalid_argument("kinds", f"a list of at least one of {', '.join(ALL_KINDS)}", kinds)
    check_names("kind", kinds, ALL_KINDS)
    return tuple(kinds)


def _first_step(sinks: Iterable[Sink]) -> int:
    """0, or the step after the last one that was written before torchrun restarted this job."""
    written = [sink.last_step() for sink in sinks if isinstance(sink, HasSteps)] if restarts() else []
    return max((step + 1 for step in written if step is not None), default=0)
