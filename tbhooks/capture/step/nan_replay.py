"""Where NaN came from: before weights are touched, the step's passes are run once more with every hook on.

Only when asked for, because it looks at the gradients of every step, which waits for the device, and keeps the
inputs of a step, and what its modules held before it, until it ends. The model and everything else that a pass may
change is left as it was (untouched.py).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tbhooks.capture import sharded_tensors, tensor_tree
from tbhooks.capture.autograd import in_backward
from tbhooks.capture.dynamo import dynamo_disable
from tbhooks.capture.hooks.manager import hook_forward, hook_tensor
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.preserve_state import Snapshot, preserved
from tbhooks.capture.recorder import Recorder
from tbhooks.capture.selection import Selector
from tbhooks.data.frame import ROOT, Finding, Frame, Site
from tbhooks.data.self_report import Report
from tbhooks.data.stats import INFS, NANS

UNKNOWN = "it cannot be known where it began"


@dataclass
class _Pass:
    """One forward of the model, as it was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Snapshot
    autocast: list[tuple[str, torch.dtype]]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of its outputs, by index, as backward brought them."""
    finite: list[Tensor] = field(default_factory=list)
    """Whether each of its outputs was finite; looked at only if it comes to a replay."""


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first place where it was seen, or why there is none."""

    site: Site | None
    why: str


class Replay:
    """Keeps the passes of the running step, and runs them again when its gradients are not finite."""

    def __init__(
        self, model: weakref.ref[nn.Module], observer: Observer, sick: Callable[[int, Replay], None], report: Report
    ) -> None:
        self._model = model
        self._observer = observer
        self._sick = sick
        self._was_sick = False
        self._report = report
        self.passes: list[_Pass] = []
        self._handles: list[RemovableHandle] = []
        self._running = False

    def start(self) -> None:
        model = self._model()
        if model is not None and not self._handles:
            self._handles = hook_forward(model, self._before, self._after)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.passes = [], []

    def forget(self) -> None:
        """The step is over."""
        self.passes = []

    @dynamo_disable
    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and not self._running and not in_backward() and torch.is_grad_enabled():
            with self._report.guarded("keeping a forward to replay"), torch.no_grad():
                self.passes.append(_kept(model, args, kwargs))

    @dynamo_disable
    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if not model.training or self._running or in_backward() or not self.passes:
            return
        with self._report.guarded("keeping a backward to replay"):
            for index, tensor in tensor_tree.tensors(output):
                self.passes[-1].finite.append(tensor.detach().isfinite().all())
                if tensor.requires_grad and not tensor.is_leaf:
                    hook_tensor(tensor, partial(_keep_gradient, self.passes[-1].gradients, index))

    def look(self, optimizer: Optimizer, step: int) -> None:
        """To be called before each of the optimizer's steps; tells once while it lasts."""
        sick = self.is_sick(optimizer)
        if sick and not self._was_sick:
            self._sick(step, self)
        self._was_sick = sick

    def is_sick(self, optimizer: Optimizer) -> bool:
        """Whether any gradient about to be used is not finite. Waits for the device."""
        handled = getattr(optimizer, "found_inf", None)
        if isinstance(handled, Tensor) and bool(handled > 0):
            return False  # a scaler has noticed, and the optimizer will leave this step out
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            numbers = [_values(gradient) for gradient in gradients]
            sums = [each.sum(dtype=torch.float32).to(numbers[0].device) for each in numbers]
            if not sums or bool(torch.stack(sums).isfinite().all()):
                return False
            # Large finite numbers overflow a sum, too: only the numbers themselves decide.
            return not all(bool(each.isfinite().all()) for each in numbers)

    def finding(self, step: int, run_again: bool) -> Finding:
        """What is to be told of it."""
        culprit = self.culprit() if run_again else NonFiniteOrigin(None, f"nothing was run again: {UNKNOWN}")
        where = "" if culprit.site is None else f" It began in the {culprit.site.kind} of {culprit.site.name}:"
        message = (
            f"gradients are not finite at step {step}, before the optimizer used them.{where} {culprit.why}. "
            "Look at what goes in there; try a lower learning rate, clipping, or a higher precision"
        )
        return Finding(step, culprit.site, "non_finite", "error", message, {"replayed": run_again})

    def culprit(self) -> NonFiniteOrigin:
        """Runs the step again and looks."""
        model = self._model()
        if model is None or not self.passes:
            return NonFiniteOrigin(None, f"the step's inputs were not seen: {UNKNOWN}")
        if sharded_tensors.needs_others_to_run(model):
            return NonFiniteOrigin(None, f"it needs other ranks to run, and one cannot do it alone: {UNKNOWN}")
        self._running = True
        try:
            frames = self._run_all_again(model)
        except Exception as problem:
            self._report.error("replay", problem)
            return NonFiniteOrigin(None, f"it could not be run again ({type(problem).__name__}): {UNKNOWN}")
        finally:
            self._running = False
        if not frames:
            return NonFiniteOrigin(None, f"nothing was seen when run again: {UNKNOWN}")
        given = [gradient.isfinite().all() for kept in self.passes for gradient in kept.gradients.values()]
        culprit = _first(frames[-1], from_the_loss=not all(given))
        was_finite = all(finite for kept in self.passes for finite in kept.finite)
        if not was_finite and (culprit.site is None or culprit.site.kind != "activation"):
            return NonFiniteOrigin(None, f"an output was not finite, and is when run again: {UNKNOWN}")
        return culprit

    def _run_all_again(self, model: nn.Module) -> Sequence[Frame]:
        given = [tensor for kept in self.passes for _, tensor in tensor_tree.inputs(kept.args, kept.kwargs)]
        with (
            _without_hooks_of(self._observer),
            preserved(model, {}, more=given) as unrestored,
            run_eagerly(),
            _everything_read(model) as recorder,
            sharded_tensors.alone(),
        ):
            for kept in self.passes:
                _run_again(model, kept)
            frames = recorder.pack(0, 0).frames()
        for note in unrestored:
            self._report.log_once(f"replay: {note}")
        return frames


def _keep_gradient(kept: dict[str, Tensor], index: str, gradient: Tensor | None) -> None:
    if gradient is not None:
        kept[index] = gradient.detach().clone()


def _values(gradient: Tensor) -> Tensor:
    local = sharded_tensors.local_tensor(gradient)
    gradient = gradient if local is None else local
    gradient = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return gradient.float() if gradient.dtype.itemsize == 1 else gradient  # float8 knows no isfinite


def _kept(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass:
    devices = {parameter.device.type for parameter in model.parameters()} | {"cpu"}
    autocast = [(d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d)]
    return _Pass(args, kwargs, Snapshot(model, hooks=False), autocast)


@contextlib.contextmanager
def _without_hooks_of(usual: Observer) -> Iterator[None]:
    was_open = usual.gate.open
    usual.remove()
    try:
        yield
    finally:
        if was_open or usual.gate.was_compiled:
            usual.placement.attach()
            usual.gate.open = was_open


@contextlib.contextmanager
def _everything_read(model: nn.Module) -> Iterator[Recorder]:
    """Hooks of its own on every module."""
    recorder = Recorder(("activation", "gradient"))
    observer = Observer(model, Selector(model, None, None), recorder, None, Report())
    try:
        recorder.begin(with_buckets=False)
        observer.begin(attach=True)
        yield recorder
    finally:
        observer.abandon()


def run_eagerly() -> contextlib.AbstractContextManager[Any]:
    """Compiled code would not notice hooks that were not there when it was compiled."""
    if "torch._dynamo" in sys.modules:
        eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager
    return contextlib.nullcontext()


def _run_again(model: nn.Module, kept: _Pass) -> None:
    kept.before.restore()
    with contextlib.ExitStack() as around:
        for device, dtype in kept.autocast:
            around.enter_context(torch.autocast(device, dtype))
        around.enter_context(torch.enable_grad())
        found = dict(tensor_tree.tensors(model(*kept.args, **kept.kwargs)))
    reached = {index: gradient for index, gradient in kept.gradients.items() if index in found}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if reached and weights:
        # Not into `.grad`, which the optimizer is about to use.
        torch.autograd.grad([found[index] for index in reached], weights, list(reached.values()), allow_unused=True)


def _first(frame: Frame, from_the_loss: bool) -> NonFiniteOrigin:
    """In the order things happened: forward, then backward."""
    before: Site | None = None
    for site, row in zip(frame.sites, frame.values, strict=True):
        if not (row[NANS] or row[INFS]):
            before = site
        elif site.kind == "activation":
            return NonFiniteOrigin(site, "the first output in the forward pass that is not finite")
        elif from_the_loss:
            return NonFiniteOrigin(
                Site(ROOT, "gradient"), "outputs are finite, the gradient that comes from the loss is not"
            )
        else:
            last = "" if before is None else f"; that of {before.name} was finite just before, so look at its backward"
            return NonFiniteOrigin(site, f"outputs are finite, and it is the first gradient that is not{last}")
    return NonFiniteOrigin(None, f"when run again everything was finite: {UNKNOWN}")
