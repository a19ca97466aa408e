"""One script being watched: from before its first line to the last thing that is said about it.

It starts before torch is there and patches what the script will import. Every process that is not the one that was
started, and every rank but the first, runs its script and nothing more.
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
from tbhooks.data.patching import Wrapper, wrapping
from tbhooks.data.process_rank import rank_and_world
from tbhooks.data.self_report import logger

if TYPE_CHECKING:
    from torch import nn

    from tbhooks.api.handle import Watch
    from tbhooks.api.lifecycle import Lifecycle
    from tbhooks.cli.run.destinations import Destination, Destinations
    from tbhooks.cli.run.model_finder import Finder

# A script that tries out many models one after the other is not followed to its end.
MOST_MODELS = 16
# A model is found by the optimizer that trains it.
KERAS = (
    "the script trains with Keras, whose optimizers are not torch's. "
    "tbhooks.watch(model, writer) in the script reads the whole Keras model and its parameters"
)
WITHOUT_OPTIMIZER = "If it updates weights itself, put tbhooks.watch(model, directory) into it"
# What of these kinds a module is given or does is seen by hooks that must be there before it is called.
_BEFORE_THE_CALL = ("input", "functional")


def run(options: Options, target: Target) -> None:
    """Runs a script to its end, watched; what it raises comes out of here."""
    if rank_and_world()[0] == 0 or options.merges_ranks:
        Session(options, target).start()
    launch(target)


class Session:
    """What is known about the script that runs."""

    def __init__(self, options: Options, target: Target) -> None:
        self.watched: list[tuple[Watch, Destination]] = []
        self._problems: list[str] = []
        """Why a model that was found is not watched."""
        self._is_watched_by_script = False
        self.finder: Finder | None = None
        self.terminal = Terminal()
        self._options = options
        self._target = target
        self._patches = [
            wrapping(module, name, _then(function), "torch 2.9 to 2.13, tensorboardX 2.6")
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
        """From here to the end of the process."""
        self.add_collector()
        self.terminal.start()
        os.register_at_fork(after_in_child=self._stop)
        # Before anything of the script's, so that it comes after everything of the script's.
        atexit.register(self._end)

    def add_collector(self) -> None:
        """Has itself told of what the script makes."""
        for patch in self._patches:
            patch.acquire(self)

    def close(self) -> str:
        """Leaves everything as it was; returns what there is to say."""
        if self.watched:
            from tbhooks.api.lifecycle import close_together  # noqa: PLC0415  loads torch, which is there by then

            close_together(self._lifecycles())
        self._stop()
        said = console.told(self.watched, self._why_nothing())
        if self.terminal.left_out:
            said += f"\n{self.terminal.left_out} more lines were left out while it ran"
        return said

    def _end(self) -> None:
        if os.getpid() == self._process:
            self.terminal.say(self.close())

    def _stop(self) -> None:
        """Nothing is looked for any more, and nothing patched."""
        self._undo_patches()
        self.terminal.stop()
        if self.finder is not None:
            self.finder.stop()

    def _why_nothing(self) -> str:
        """The first of these that is so."""
        finder = self.finder
        unwritten = [watching.stats.messages[0] for watching, _ in self.watched if watching.stats.dropped]
        problems = [*self._problems, *unwritten]
        reasons = (
            (self._is_watched_by_script, "the script watches its model itself"),
            (bool(problems), "; ".join(problems)),
            ("torch" not in sys.modules, "the script did not import torch"),
            (finder is None and "keras" in sys.modules, KERAS),
            (finder is None, f"the script made no torch optimizer in this process. {WITHOUT_OPTIMIZER}"),
            (bool(self.watched), "a model was found, but none of its steps came to an end"),
            (finder is not None and finder.steps > 1, "what the optimizer steps is in no module"),
        )
        return next((why for is_so, why in reasons if is_so), "nothing that the optimizer trains was called")

    # What the patches tell.

    def _made_optimizer(self, optimizer: Any, _made: Any) -> None:
        if self.finder is None:
            from tbhooks.cli.run.model_finder import Finder  # noqa: PLC0415  now torch is there

            at_once = self._compiles or not set(_BEFORE_THE_CALL).isdisjoint(self._options.kinds)
            self.finder = Finder(self._found, at_once)
        self.finder.made(optimizer)

    def _compiled(self, _instance: Any, _made: Any) -> None:
        self._compiles = True
        if self.finder is not None:
            self.finder.something_is_compiled()

    def _made_writer(self, writer: Any, _made: Any) -> None:
        from tbhooks.cli.run.destinations import is_made_by_script  # noqa: PLC0415

        if is_made_by_script():
            self._where().writer_made(writer, self._drain)

    def _where(self) -> Destinations:
        if self._destinations is None:
            from tbhooks.cli.run.destinations import Destinations  # noqa: PLC0415  loads tensorboard

            self._destinations = Destinations(self._options.logdir, self._target, self._start)
        return self._destinations

    def _drain(self) -> None:
        for lifecycle in self._lifecycles():
            lifecycle.drain()

    def _lifecycles(self) -> list[Lifecycle]:
        from tbhooks.api.handle import lifecycle_of  # noqa: PLC0415  loads torch, which is there by then

        return [lifecycle_of(watching) for watching, _ in self.watched]

    # What is found.

    def _found(self, models: list[nn.Module]) -> list[Watch]:
        known = len(self.watched)
        models = [model for model in models if not self._is_watched(model) and not self._is_known(model)]
        names = _names(models) if len(models) + known > 1 else [""] * len(models)
        for model, name in zip(models, names, strict=True):
            if len(self.watched) == MOST_MODELS:
                self._stop_looking()
                break
            try:
                self._watch(model, self._free(name))
            except Exception as problem:  # torch, too, has modules it puts no hook on
                self._problems.append(str(problem))
                logger.warning("%s is not watched: %s", type(model).__name__, problem)
        return [watching for watching, _ in self.watched[known:]]

    def _is_known(self, model: nn.Module) -> bool:
        """Whether it is watched already, by itself or as a part of another."""
        from tbhooks.api.lifecycle import open_watches  # noqa: PLC0415

        mine = [lifecycle.model() for lifecycle in self._lifecycles() if lifecycle in open_watches]
        return any(part is model for whole in mine if whole is not None for part in whole.modules())

    def _stop_looking(self) -> None:
        logger.warning("%d models are watched; the script goes on with others, which are not", MOST_MODELS)
        self._undo_patches()

    def _undo_patches(self) -> None:
        for patch in self._patches:
            patch.release(self)

    def _free(self, name: str) -> str:
        taken = {destination.name for _, destination in self.watched}
        numbers = (f"{name}-{number}" for number in range(2, len(taken) + 3))
        return name if name not in taken else next(other for other in numbers if other not in taken)

    def _watch(self, model: nn.Module, name: str) -> None:
        from tbhooks.api.watch import watch  # noqa: PLC0415
        from tbhooks.capture.sharded_tensors import is_sharded  # noqa: PLC0415
        from tbhooks.cli.run.destinations import Destination  # noqa: PLC0415

        reference = weakref.ref(model)
        destination = Destination(self._where(), name, lambda: self._is_watched(reference()))
        watching = watch(model, destination, **self._options.watch)
        self.watched.append((watching, destination))
        if "ranks" not in self._options.watch and any(map(is_sharded, model.parameters())):
            logger.warning(
                "the parameters of %s are sharded over the ranks of this job: what is logged of weights, gradients and "
                "updates is the first rank's part. tbhooks run --ranks merge shows the whole", type(model).__name__,
            )  # fmt: skip

    def _is_watched(self, model: nn.Module | None) -> bool:
        """Whether the script does that itself."""
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
    """What the script calls them, or else their classes."""
    script = vars(sys.modules["__main__"])
    names: list[str] = []
    for model in models:
        known = [name for name, value in list(script.items()) if value is model and not name.startswith("_")]
        name = known[0] if known else type(model).__name__
        times = sum(other == name or other.startswith(f"{name}-") for other in names)
        names.append(f"{name}-{times + 1}" if times else name)
    return names
