"""A script run by `tbhooks run`, from before its first line to the summary at its end.

The session starts before torch is imported and patches constructors that the script will import. Child processes, and
all ranks but the first unless ranks are merged, run the script without monitoring.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbhooks.cli.run import console
from tbhooks.cli.run.console import Terminal
from tbhooks.cli.run.launcher import launch
from tbhooks.cli.run.options import Options, Target
from tbhooks.data.process.fork import in_forked_child
from tbhooks.data.process.patching import Wrapper, wrapping
from tbhooks.data.process.rank import rank_and_world
from tbhooks.data.self_report import logger

if TYPE_CHECKING:
    from torch import nn

    from tbhooks.api.handle import Watch
    from tbhooks.api.lifecycle import Lifecycle
    from tbhooks.cli.run.destinations import Destination, Destinations
    from tbhooks.cli.run.model_finder import Finder

# Of a script that tries many models one after the other, only so many are watched.
MOST_MODELS = 16
KERAS = (
    "the script trains with Keras, whose optimizers are not torch's. "
    "Call tbhooks.watch(model, writer) in the script instead: it captures a Keras model too, but for its updates"
)
WITHOUT_OPTIMIZER = "If it updates the weights itself, call tbhooks.watch(model, directory) in it"
# The hooks of these kinds must be attached before the model is called.
_BEFORE_THE_CALL = ("input", "functional")


def run(options: Options, target: Target) -> None:
    """Runs a script with monitoring. What it raises is not caught."""
    if rank_and_world()[0] == 0 or options.merges_ranks:
        Session(options, target).start()
    launch(target)


class Session:
    """The watches, patches and messages of one script."""

    def __init__(self, options: Options, target: Target) -> None:
        self.watched: list[tuple[Watch, Destination]] = []
        self._problems: list[str] = []
        """Why models that were found are not watched."""
        self._is_watched_by_script = False
        self.finder: Finder | None = None
        self.terminal = Terminal()
        self._options = options
        self._target = target
        self._patches = [
            wrapping(module, name, _then(function), "torch 2.10 to 2.15, tensorboardX 2.6")
            for module, name, function in (
                ("torch", "compile", self._compiled),
                ("torch.optim.optimizer", "Optimizer.__init__", self._made_optimizer),
                ("torch.utils.tensorboard.writer", "SummaryWriter.__init__", self._made_writer),
                ("tensorboardX.writer", "SummaryWriter.__init__", self._made_writer),
            )
        ]
        self._destinations: Destinations | None = None
        self._compiles = False
        self._process = os.getpid()
        self._start = Path.cwd()

    def start(self) -> None:
        """Patches the constructors, and registers the summary for the end of the process."""
        self.patch()
        self.terminal.start()
        in_forked_child(self._stop)
        # Registered before the script registers anything, so that it runs last.
        atexit.register(self._end)

    def patch(self) -> None:
        """Calls a method of the session after each optimizer and writer is made, and after each torch.compile."""
        for patch in self._patches:
            patch.acquire(self)

    def close(self) -> str:
        """Closes the watches, removes all patches and hooks, and returns the summary."""
        if self.watched:
            from tbhooks.api.lifecycle import close_together  # noqa: PLC0415  loads torch, which is imported by then

            close_together(self._lifecycles())
        self._stop()
        text = console.summary(self.watched, self._why_nothing())
        if self.terminal.left_out:
            text += f"\n{self.terminal.left_out} messages were left out while the script ran"
        return text

    def _end(self) -> None:
        if os.getpid() == self._process:
            self.terminal.write(self.close())

    def _stop(self) -> None:
        self._undo_patches()
        self.terminal.stop()
        if self.finder is not None:
            self.finder.stop()

    def _why_nothing(self) -> str:
        """The reason why there is no data: the first that applies."""
        finder = self.finder
        unwritten = [watching.stats.messages[0] for watching, _ in self.watched if watching.stats.dropped]
        problems = [*self._problems, *unwritten]
        reasons = (
            (self._is_watched_by_script, "the script watches its model itself"),
            (bool(problems), "; ".join(problems)),
            ("torch" not in sys.modules, "the script did not import torch"),
            (finder is None and "keras" in sys.modules, KERAS),
            (finder is None, f"the script made no torch optimizer in this process. {WITHOUT_OPTIMIZER}"),
            (bool(self.watched), "a model was found, but no step of it ended"),
            (finder is not None and finder.steps > 1, "the optimizer's parameters belong to no module"),
        )
        return next((why for applies, why in reasons if applies), "no model that the optimizer trains was called")

    # Called by the patches.

    def _made_optimizer(self, optimizer: Any, _made: Any) -> None:
        if self.finder is None:
            from tbhooks.cli.run.model_finder import Finder  # noqa: PLC0415  torch is imported by now

            at_once = self._compiles or not set(_BEFORE_THE_CALL).isdisjoint(self._options.kinds)
            self.finder = Finder(self._on_models, at_once)
        self.finder.add(optimizer)

    def _compiled(self, _instance: Any, _made: Any) -> None:
        self._compiles = True
        if self.finder is not None:
            self.finder.on_compile()

    def _made_writer(self, writer: Any, _made: Any) -> None:
        from tbhooks.cli.run.destinations import is_made_by_script  # noqa: PLC0415

        if is_made_by_script():
            self._get_destinations().add_writer(writer, self._drain)

    def _get_destinations(self) -> Destinations:
        if self._destinations is None:
            from tbhooks.cli.run.destinations import Destinations  # noqa: PLC0415  loads tensorboard

            self._destinations = Destinations(self._options.logdir, self._target, self._start)
        return self._destinations

    def _drain(self) -> None:
        for lifecycle in self._lifecycles():
            lifecycle.drain()

    def _lifecycles(self) -> list[Lifecycle]:
        from tbhooks.api.handle import lifecycle_of  # noqa: PLC0415  loads torch, which is imported by then

        return [lifecycle_of(watching) for watching, _ in self.watched]

    # Called by the finder.

    def _on_models(self, models: list[nn.Module]) -> list[Watch]:
        known = len(self.watched)
        models = [model for model in models if not self._is_watched(model) and not self._is_known(model)]
        names = _names(models) if len(models) + known > 1 else [""] * len(models)
        for model, name in zip(models, names, strict=True):
            if len(self.watched) == MOST_MODELS:
                self._stop_looking()
                break
            try:
                self._watch(model, self._unused(name))
            except Exception as problem:  # some modules, such as scripted ones, take no hooks
                self._problems.append(str(problem))
                logger.warning("%s is not watched: %s", type(model).__name__, problem)
        return [watching for watching, _ in self.watched[known:]]

    def _is_known(self, model: nn.Module) -> bool:
        """Whether this session watches it already, or a model that contains it."""
        from tbhooks.api.lifecycle import open_watches  # noqa: PLC0415

        mine = [lifecycle.model() for lifecycle in self._lifecycles() if lifecycle in open_watches]
        return any(part is model for whole in mine if whole is not None for part in whole.modules())

    def _stop_looking(self) -> None:
        logger.warning("%d models are watched; further models of the script are not", MOST_MODELS)
        self._undo_patches()

    def _undo_patches(self) -> None:
        for patch in self._patches:
            patch.release(self)

    def _unused(self, name: str) -> str:
        taken = {destination.name for _, destination in self.watched}
        numbers = (f"{name}-{number}" for number in range(2, len(taken) + 3))
        return name if name not in taken else next(other for other in numbers if other not in taken)

    def _watch(self, model: nn.Module, name: str) -> None:
        from tbhooks.api.watch import watch  # noqa: PLC0415
        from tbhooks.capture.sharded_tensors import is_sharded  # noqa: PLC0415
        from tbhooks.cli.run.destinations import Destination  # noqa: PLC0415

        reference = weakref.ref(model)
        destination = Destination(self._get_destinations(), name, lambda: self._is_watched(reference()))
        watching = watch(model, destination, **self._options.watch)
        self.watched.append((watching, destination))
        if "ranks" not in self._options.watch and any(map(is_sharded, model.parameters())):
            logger.warning(
                "the parameters of %s are sharded over the ranks of this job: only the first rank's shards of weights, "
                "gradients and updates are logged. Use tbhooks run --ranks merge to log all of them",
                type(model).__name__,
            )  # fmt: skip

    def _is_watched(self, model: nn.Module | None) -> bool:
        """Whether the script itself watches the model, a part of it, or a model that contains it."""
        from tbhooks.api.lifecycle import open_watches  # noqa: PLC0415

        theirs = [lifecycle.model() for lifecycle in open_watches - set(self._lifecycles())]
        if model is not None and any(_overlap(model, other) for other in theirs if other is not None):
            self._is_watched_by_script = True
            return True
        return False


def _then(function: Callable[[Any, Any], None]) -> Wrapper:
    """Wraps a function of the script's packages: it does what it did, and then `function` is called with the instance
    it was called on and with what it returned.
    """

    def around(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        try:
            function(instance, result)
        except Exception as problem:  # ours, and not the script's
            logger.error("%s: %s", type(problem).__name__, problem)
        return result

    return around


def _overlap(one: nn.Module, other: nn.Module) -> bool:
    return any(module is other for module in one.modules()) or any(module is one for module in other.modules())


def _names(models: list[nn.Module]) -> list[str]:
    """The names of the script's global variables for the models, or else their classes."""
    script = vars(sys.modules["__main__"])
    names: list[str] = []
    for model in models:
        known = [name for name, value in list(script.items()) if value is model and not name.startswith("_")]
        name = known[0] if known else type(model).__name__
        times = sum(other == name or other.startswith(f"{name}-") for other in names)
        names.append(f"{name}-{times + 1}" if times else name)
    return names
