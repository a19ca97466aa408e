"""Reads the outputs, inputs and operations that hooks are called with outside of compiled graphs.

Each tensor is reduced at once, detached, and not kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tbhooks.capture import sharded_tensors, tensor_tree
from tbhooks.capture.autograd import NO_BACKWARD, in_backward, running_backward, without_dispatch_modes
from tbhooks.capture.compile import dynamo
from tbhooks.capture.hooks.active_step import ActiveStep
from tbhooks.capture.hooks.dead_units import RECTIFIED
from tbhooks.capture.hooks.gradients import GradientReader
from tbhooks.capture.hooks.hook_types import ForwardHook, is_hooked
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recording.calls import Span
from tbhooks.capture.recording.recorder import NO_SITE, Recorder, can_be_one_of_many
from tbhooks.capture.scalars.metrics import PAIR, compared
from tbhooks.data.frame import Site
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import describe, has_no_data, is_ordinary


class OutputReader:
    """Reads what a hook is called with into the recorder of the forward that is running."""

    def __init__(self, step: ActiveStep, gradients: GradientReader, report: Report) -> None:
        self._step = step
        self._gradients = gradients
        self._report = report

    def read_evaluation(
        self, recorder: Recorder, hook: ForwardHook, output: object, args: tuple[Any, ...] = ()
    ) -> None:
        found, forward = tensor_tree.tensors(output), self._step.passes.current()
        for index, tensor in found if hook.reads_outputs else ():
            site = recorder.number(Site(hook.path, "activation", index))
            record_tensor(recorder, site, tensor, self._report, forward)
        if recorder.metrics is not None:
            self._read_metrics(recorder, forward, hook, found, args)

    def read_output(
        self, context: StepContext, forward: Pass, hook: ForwardHook, output: object, args: tuple[Any, ...] = ()
    ) -> bool:
        """Returns whether there is a DTensor in the output. `args` are the arguments of the module."""
        is_provisional = forward.evaluates and self._step.is_provisional(forward)
        (forward.paths if is_provisional else context.called).add(hook.path)
        found = [("", output)] if type(output) is Tensor else tensor_tree.tensors(output)
        if not found:
            self._report.mark_unseen(hook.path, f"its output ({type(output).__name__}) contains no tensor")
        is_hidden = self._step.gate.was_compiled and dynamo.with_gradients_inside(found)
        for index, tensor in found:
            self._read_tensor(context, forward, hook, index, tensor, is_hidden)
        if self._step.recorder.metrics is not None and not in_backward():
            self._read_metrics(self._step.recorder, forward, hook, found, args)
        return type(output) is not Tensor and any(sharded_tensors.is_dtensor(tensor) for _, tensor in found)

    def _read_tensor(
        self, context: StepContext, forward: Pass, hook: ForwardHook, index: str, tensor: Tensor, is_hidden: bool
    ) -> None:  # fmt: skip
        is_plain = can_be_one_of_many(tensor)
        if not is_plain and has_no_data(tensor):
            self._report.mark_unseen(hook.path + index, "the tensor holds no data, as in tracing and torch.func")
            return
        recorder, is_recomputed = self._step.recorder, running_backward() != NO_BACKWARD
        activation, gradient = hook.sites.get(index) or hook.site_numbers(index, tensor)
        span, gradient_hook = context.lookup(tensor)
        if activation != NO_SITE and not is_recomputed:
            if span is not None:
                recorder.share(activation, span, forward)
            else:
                span = _record(recorder, activation, tensor, forward, is_plain)
            if span is None or self._report.unseen:
                _mark(self._report, hook.path + index, tensor, span is not None)
        is_collected = (hook.has_units or hook.collects_outputs) and not is_recomputed
        if is_collected and not (forward.evaluates and self._step.is_provisional(forward)):
            self._collect_output(hook, index, tensor, forward)
        if is_hidden and gradient != NO_SITE:
            gradient = NO_SITE
            self._report.mark_unseen(f"gradient/{hook.path}{index}", dynamo.GRADIENTS_INSIDE)
        wanted = tensor.requires_grad and (gradient != NO_SITE or hook.ends_backward)
        # A recomputed block is called with tensors that are hooked already, not with copies of them.
        if wanted and not (is_recomputed and (tensor.is_leaf or is_hooked(tensor, context, gradient))):
            if gradient_hook is None:
                gradient_hook = self._gradients.hook(context, tensor)
            gradient_hook.passes.append(forward)
            forward.hooked = forward.hooked or not gradient_hook.is_view
            if gradient != NO_SITE:
                gradient_hook.sites.append(gradient)
        context.cache(tensor, span, gradient_hook)

    def _read_metrics(
        self, recorder: Recorder, forward: Pass | None, hook: ForwardHook, found: list[tuple[str, Tensor]],
        args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        for index, tensor in found:
            recorder.read_metrics("activation", hook.path, index, tensor, forward)
        if hook.reads_pairs and args and found:
            (index, output), given = found[0], args[0]
            # A module that returns its input has changed it in place: what it was before is gone.
            is_pair = isinstance(given, Tensor) and given is not output and given.shape == output.shape
            if is_pair and output.is_floating_point() and not has_no_data(output):
                recorder.read_metrics(PAIR, hook.path, index, compared(given, output), forward)

    def count_units(self, hook: ForwardHook, output: Tensor, forward: Pass) -> None:
        """Counts the dead units of a plain output, for hooks in C."""
        self._step.dead_units.add(f"activation/{hook.path}", output, forward)

    def _collect_output(self, hook: ForwardHook, index: str, tensor: Tensor, forward: Pass) -> None:
        local = sharded_tensors.local_tensor(tensor) if hook.has_units and hook.reads_outputs else None
        if local is not None:
            self._step.dead_units.add(f"activation/{hook.path}{index}", local, forward)
        if hook.collects_outputs:
            self.collect(hook.path, "activation", index, tensor, forward)

    def collect(self, path: str, kind: str, index: str, tensor: Tensor, forward: Pass) -> bool:
        """Calls the collectors with the part of a tensor that is on this rank. Returns whether there is any."""
        local = sharded_tensors.local_tensor(tensor)
        if local is None or has_no_data(local):
            return False
        self._step.collectors.on_tensor(path, kind, index, local, forward)
        return True

    def read_inputs(self, recorder: Recorder, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self._step.current_pass(recorder)
        with without_dispatch_modes():
            for index, tensor in tensor_tree.inputs(args, kwargs):
                if hook.reads_inputs:
                    site = recorder.number(Site(hook.path, "input", index))
                    record_tensor(recorder, site, tensor, self._report, forward)
                recorder.read_metrics("input", hook.path, index, tensor, forward)
                if hook.collects_inputs and recorder is self._step.recorder:
                    self.collect(hook.path, "input", index, tensor, forward)

    def read_operation(self, recorder: Recorder, hook: ForwardHook, path: str, index: str, tensor: Tensor) -> bool:
        """Returns whether a collector was called with the tensor."""
        step = self._step
        site = recorder.number(Site(path, "functional", index))
        forward = step.current_pass(recorder)
        record_tensor(recorder, site, tensor, self._report, forward)
        if path.endswith(RECTIFIED) and recorder is not step.evaluation:
            step.dead_units.add(f"functional/{path}{index}", tensor, forward)
        is_wanted = hook.collects_outputs and recorder is step.recorder
        return is_wanted and self.collect(path, "functional", index, tensor, forward)


def record_tensor(recorder: Recorder, site: int, tensor: Tensor, report: Report, owner: object) -> None:
    """Records a tensor if its site is wanted and it has data; reports a tensor without real numbers."""
    if site != NO_SITE and not has_no_data(tensor):
        _mark(report, str(recorder.sites[site]), tensor, _record(recorder, site, tensor, owner) is not None)


def _record(recorder: Recorder, site: int, tensor: Tensor, owner: object, is_plain: bool = False) -> Span | None:
    """Returns where the record is; None if the tensor holds no real numbers."""
    try:
        return recorder.record(site, tensor, None, owner, is_plain)
    except (RuntimeError, TypeError, NotImplementedError):
        if is_ordinary(tensor):
            raise
        return None  # a subclass that does not do what tensors do


def _mark(report: Report, name: str, tensor: Tensor, is_readable: bool) -> None:
    if not is_readable:
        report.mark_unseen(name, f"{describe(tensor)}: only real numbers have statistics")
    elif report.unseen:
        report.mark_seen(name)
