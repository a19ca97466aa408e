"""Finds the module in which NaN or infinite values began, by running the step again (`on_nonfinite("replay")`).

If gradients are not finite, the forwards and backwards of the step are repeated with hooks on every module, before the
optimizer changes the weights. Afterwards the model, its buffers and the random generators are restored
(preserve_state.py). This costs a sync in every step, and keeps the inputs and the module state of a step until it ends.
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
from tbhooks.capture.compile.dynamo import dynamo_disable
from tbhooks.capture.hooks.manager import hook_forward, hook_tensor
from tbhooks.capture.hooks.observer import Observer
from tbhooks.capture.preserve_state import Snapshot, preserved
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.selection import Selector
from tbhooks.data.frame import ROOT, Finding, Frame, Site
from tbhooks.data.self_report import Report
from tbhooks.data.stats import INFS, NANS

UNKNOWN = "the source is unknown"


@dataclass
class _Pass:
    """One forward of the model, with everything that is needed to run it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Snapshot
    autocast: list[tuple[str, torch.dtype]]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of its outputs, by output index."""
    finite: list[Tensor] = field(default_factory=list)
    """Whether each of its outputs was finite. These tensors are read only in a replay."""


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The site of the first value that was not finite, or None, and an explanation."""

    site: Site | None
    why: str


class Replay:
    """Keeps the passes of the running step, and runs them again if its gradients are not finite.

    Does nothing until it is enabled. `on_nonfinite` is called with the step and this object, before the optimizer's
    step.
    """

    def __init__(
        self, model: weakref.ref[nn.Module], observer: Observer, on_nonfinite: Callable[[int, Replay], None],
        report: Report,
    ) -> None:  # fmt: skip
        self._model = model
        self._observer = observer
        self._on_nonfinite = on_nonfinite
        self._was_nonfinite = False
        self._report = report
        self.passes: list[_Pass] = []
        self._handles: list[RemovableHandle] = []
        self._is_enabled = self._is_running = False

    def enable(self) -> None:
        self._is_enabled = True

    def start(self) -> None:
        """Adds the hooks on the model that keep its passes."""
        model = self._model()
        if self._is_enabled and model is not None and not self._handles:
            self._handles = hook_forward(model, self._forward_begins, self._forward_ended)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.passes = [], []

    def step_ended(self) -> None:
        self.passes = []

    def _is_kept(self, model: nn.Module) -> bool:
        """Whether it is a training forward; not one that is run again, nor one that a CUDA graph is captured from."""
        if not model.training or self._is_running or in_backward():
            return False
        return not self._observer.graph_capture.is_running()

    @dynamo_disable
    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_kept(model) and torch.is_grad_enabled():
            with self._report.guarded("keeping a forward to replay"), torch.no_grad():
                devices = {parameter.device.type for parameter in model.parameters()} | {"cpu"}
                autocast = [(d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d)]
                self.passes.append(_Pass(args, kwargs, Snapshot(model, hooks=False), autocast))

    @dynamo_disable
    def _forward_ended(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._is_kept(model) or not self.passes:
            return
        with self._report.guarded("keeping a backward to replay"):
            for index, tensor in tensor_tree.tensors(output):
                self.passes[-1].finite.append(tensor.detach().isfinite().all())
                if tensor.requires_grad and not tensor.is_leaf:
                    hook_tensor(tensor, partial(_keep_gradient, self.passes[-1].gradients, index))

    def check(self, optimizer: Optimizer, step: int) -> None:
        """Checks the gradients before an optimizer's step, which waits for the device. Of several steps in a row with
        nonfinite gradients only the first is reported.
        """
        is_nonfinite = self._is_enabled and _has_nonfinite_gradients(optimizer)
        if is_nonfinite and not self._was_nonfinite:
            self._on_nonfinite(step, self)
        self._was_nonfinite = is_nonfinite

    def finding(self, step: int, run_again: bool) -> Finding:
        """Returns the finding for a step whose gradients are not finite, after running it again if asked to."""
        origin = self._origin() if run_again else NonFiniteOrigin(None, f"the step was not run again: {UNKNOWN}")
        source = "" if origin.site is None else f" First in the {origin.site.kind} of {origin.site.name}:"
        message = (
            f"gradients are not finite at step {step}, before the optimizer used them.{source} {origin.why}. "
            "Inspect the batch; reduce the learning rate, clip gradients, or use a higher precision"
        )
        return Finding(step, origin.site, "non_finite", "error", message, {"replayed": run_again})

    def _origin(self) -> NonFiniteOrigin:
        """Runs the step again and returns the first site that is not finite."""
        model = self._model()
        if model is None or not self.passes:
            return NonFiniteOrigin(None, f"the step's inputs were not recorded: {UNKNOWN}")
        if sharded_tensors.needs_others_to_run(model):
            return NonFiniteOrigin(None, f"the model cannot run on one rank alone: {UNKNOWN}")
        self._is_running = True
        try:
            frames = self._run_again(model)
        except Exception as problem:
            self._report.error("replay", problem)
            return NonFiniteOrigin(None, f"the step could not be run again ({type(problem).__name__}): {UNKNOWN}")
        finally:
            self._is_running = False
        if not frames:
            return NonFiniteOrigin(None, f"no module was called when the step was run again: {UNKNOWN}")
        gradients = [gradient for each in self.passes for gradient in each.gradients.values()]
        origin = _first_nonfinite(frames[-1], from_the_loss=not all(g.isfinite().all() for g in gradients))
        was_finite = all(finite for each in self.passes for finite in each.finite)
        if not was_finite and (origin.site is None or origin.site.kind != "activation"):
            return NonFiniteOrigin(None, f"an output was not finite, but is when the step is run again: {UNKNOWN}")
        return origin

    def _run_again(self, model: nn.Module) -> Sequence[Frame]:
        inputs = [tensor for each in self.passes for _, tensor in tensor_tree.inputs(each.args, each.kwargs)]
        with (
            _without_hooks(self._observer),
            preserved(model, {}, more=inputs) as unrestored,
            run_eagerly(),
            _every_module_recorded(model) as recorder,
            sharded_tensors.alone(),
        ):
            for each in self.passes:
                _run_pass(model, each)
            frames = recorder.pack(0, 0).frames()
        for note in unrestored:
            self._report.log_once(f"replay: {note}")
        return frames


def _keep_gradient(kept: dict[str, Tensor], index: str, gradient: Tensor | None) -> None:
    if gradient is not None:
        kept[index] = gradient.detach().clone()


def _has_nonfinite_gradients(optimizer: Optimizer) -> bool:
    """Whether any gradient that the optimizer is about to use is not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, Tensor) and bool(found_inf > 0):
        return False  # a GradScaler has found it, and the fused optimizer will skip this step
    with torch.no_grad():
        gradients = [_values(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        sums = [gradient.sum(dtype=torch.float32).to(gradients[0].device) for gradient in gradients]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return False
        # A sum of large finite values overflows, too. So the values themselves are checked.
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _values(gradient: Tensor) -> Tensor:
    """Returns the values of a gradient in a form that can be summed and checked."""
    local = sharded_tensors.local_tensor(gradient)
    gradient = gradient if local is None else local
    gradient = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return gradient.float() if gradient.dtype.itemsize == 1 else gradient  # float8 has no isfinite


@contextlib.contextmanager
def _without_hooks(observer: Observer) -> Iterator[None]:
    was_open = observer.gate.open
    observer.remove()
    try:
        yield
    finally:
        if was_open or observer.gate.was_compiled:
            observer.placement.attach()
            observer.gate.open = was_open


@contextlib.contextmanager
def _every_module_recorded(model: nn.Module) -> Iterator[Recorder]:
    """Records activations and gradients of all modules, with hooks of its own."""
    recorder = Recorder(("activation", "gradient"))
    observer = Observer(model, Selector(model, None, None), recorder, None, Report())
    try:
        recorder.begin(with_buckets=False)
        observer.begin(attach=True)
        yield recorder
    finally:
        observer.abandon()


def run_eagerly() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled models eagerly: compiled code does not call hooks that were added after it was compiled."""
    if "torch._dynamo" in sys.modules:
        eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager
    return contextlib.nullcontext()


def _run_pass(model: nn.Module, kept: _Pass) -> None:
    """Runs a forward and its backward again."""
    kept.before.restore()
    with contextlib.ExitStack() as contexts:
        for device, dtype in kept.autocast:
            contexts.enter_context(torch.autocast(device, dtype))
        contexts.enter_context(torch.enable_grad())
        outputs = dict(tensor_tree.tensors(model(*kept.args, **kept.kwargs)))
    gradients = {index: gradient for index, gradient in kept.gradients.items() if index in outputs}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if gradients and weights:
        # Not `backward`, which would add to the `.grad` that the optimizer is about to use.
        torch.autograd.grad([outputs[i] for i in gradients], weights, list(gradients.values()), allow_unused=True)


def _first_nonfinite(frame: Frame, from_the_loss: bool) -> NonFiniteOrigin:
    """Returns the first site that is not finite, in the order of execution: forward, then backward. `from_the_loss`
    says whether the gradient of the model's output is not finite.
    """
    before: Site | None = None
    for site, row in zip(frame.sites, frame.values, strict=True):
        if not (row[NANS] or row[INFS]):
            before = site
        elif site.kind == "activation":
            return NonFiniteOrigin(site, "the first output in the forward pass that is not finite")
        elif from_the_loss:
            return NonFiniteOrigin(
                Site(ROOT, "gradient"), "all outputs are finite, but the gradient of the loss is not"
            )
        else:
            why = "all outputs are finite, and this is the first gradient that is not"
            if before is not None:
                why += f"; the {before.kind} of {before.name} just before it is: inspect the backward of {before.name}"
            return NonFiniteOrigin(site, why)
    return NonFiniteOrigin(None, f"everything was finite when the step was run again: {UNKNOWN}")
