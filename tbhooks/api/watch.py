"""`watch()`, the one line a script needs: checks everything that was passed and makes the handle."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tbhooks import rules as judgement
from tbhooks.api import environment, lifecycle, validation
from tbhooks.api.handle import Watch, open_watches
from tbhooks.capture.rank_context import RankContext, this_rank
from tbhooks.capture.schedule import Schedule
from tbhooks.capture.selection import Selector
from tbhooks.capture.step.clock import MODES
from tbhooks.data import remote
from tbhooks.data.errors import ArgumentError, check_integer, check_names, quoted
from tbhooks.data.frame import ALL_KINDS, KINDS
from tbhooks.distributed.handshake import describe
from tbhooks.distributed.topology import MERGE, WAYS, join, restarts
from tbhooks.sinks import HasSteps, Sink
from tbhooks.sinks.memory import FunctionSink
from tbhooks.sinks.scalar_selection import scalar_table

__all__ = ["Watch", "make_sinks", "unwatch", "watch"]

OF_KERAS = (
    "this is a Keras model: its layers and optimizers are not torch's. Only the whole model and its parameters are "
    "read, without updates, and steps are counted by forwards"
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
    scalars: Any = "core",
    rules: Any = "default",
    step: str = "auto",
    ranks: str = "local",
) -> Watch:
    """Watches a model's training from now on; the one line a script needs.

    `writer` is a SummaryWriter, a directory, a run of wandb, mlflow or aim, a function that takes a frame, any
    `Sink`, a list of those, or None to keep frames in memory. A directory is the run's own; one that ends with a
    slash is a place for runs, and this one gets a name in it (`runs/` becomes `runs/<model>-<time>`). Steps count
    from 0 and every `every`-th is logged. Closed at exit, by `close()`, or by `with`.

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
        raise ArgumentError(f"model is a torch.nn.Module, not {quoted(model)}")
    schedule = Schedule(check_integer("every", every), validation.histograms(histograms))
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple | set | frozenset):
        raise ArgumentError(f"kinds is a list of {', '.join(ALL_KINDS)}, not {quoted(kinds)}")
    kinds = tuple(kinds)
    check_names("kind", kinds, ALL_KINDS)
    if not kinds:
        raise ArgumentError(f"kinds names at least one of {', '.join(ALL_KINDS)}")
    check_names("step clock", (step,), MODES)
    check_names("value of ranks", (ranks,), WAYS)
    selector = Selector(model, include, exclude)
    chosen = judgement.choose(rules)
    is_first = this_rank() == 0
    sinks_of = partial(make_sinks, scalars=scalars, named=environment.name_of(model))
    for one in _listed(writer):
        _check_writer(one)
    sinks = sinks_of(writer) if is_first else ()
    place = RankContext(this_rank(), first_step=_first_step(sinks))
    if ranks == MERGE:
        place = join(describe(model, selector, kinds, schedule, step), place.first_step)
    watching = Watch(model, selector, kinds, schedule, step, place, sinks, chosen if is_first else (), sinks_of)
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__):
        watching._report.log_once(OF_KERAS)
    if not place.is_idle:
        watching._start()
    return watching


def _first_step(sinks: Iterable[Sink]) -> int:
    """0, or where the workers were that torchrun has restarted: as far as was written."""
    found = [sink.last_step() for sink in sinks if isinstance(sink, HasSteps)] if restarts() else []
    return max((step + 1 for step in found if step is not None), default=0)


def unwatch(model: nn.Module) -> None:
    """Closes every watch on this model."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a torch.nn.Module, not {quoted(model)}")
    lifecycle.close_together(watching for watching in open_watches() if watching._is_on(model))


def make_sinks(writer: Any, scalars: Any, named: str) -> tuple[Sink, ...]:
    """What `writer=` stands for; `named` is what a run is called after if it is to have a name."""
    scalar_table(scalars)
    for one in _listed(writer):
        _check_writer(one)
    return tuple(_sink(environment.run_of(one, named), scalars) for one in _listed(writer))


def _listed(writer: Any) -> list[Any]:
    return list(writer) if isinstance(writer, list | tuple) else [] if writer is None else [writer]


def _sink(one: Any, scalars: Any) -> Sink:
    tracker = _tracker(one)
    name = "TensorBoardSink" if _is_for_tensorboard(one) else f"{tracker.capitalize()}Sink" if tracker else ""
    if name:  # imported by those who write there
        module = importlib.import_module(f"tbhooks.sinks.{tracker or 'tensorboard'}")
        made: Sink = getattr(module, name)(one, scalars)
        return made
    return one if isinstance(one, Sink) else FunctionSink(one)


def _is_for_tensorboard(one: Any) -> bool:
    return isinstance(one, str | Path) or (hasattr(one, "_get_file_writer") and not isinstance(one, type))


def _tracker(one: Any) -> str | None:
    """Whose run it is, or which module that has a current one: told by names, so that nothing has to be installed."""
    if isinstance(one, ModuleType):
        return one.__name__ if one.__name__ in ("wandb", "mlflow") else None
    packages = [base.__module__.partition(".")[0] for base in type(one).__mro__ if base.__name__ == "Run"]
    return next((package for package in packages if package in ("wandb", "mlflow", "aim")), None)


def _is_function(one: Any) -> bool:
    return callable(one) and not isinstance(one, type | nn.Module)


def _check_writer(one: Any) -> None:
    if isinstance(one, str | Path):
        remote.check(one)
    if _is_for_tensorboard(one) or _tracker(one) or _is_function(one):
        return
    if not isinstance(one, Sink) or isinstance(one, type | io.IOBase):
        raise ArgumentError(
            "writer is a SummaryWriter (torch or tensorboardX), a directory (str or Path), a run of wandb, mlflow or "
            "aim (or the module wandb or mlflow), a function that takes a frame, an object with write, flush and "
            f"close, a list of those, or None, not {quoted(one)}"
        )
