"""Reads the gradients of outputs, and notices when a backward pass through the model begins and ends."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tbhooks.capture.autograd import (
    NO_BACKWARD,
    at_end_of_backward,
    backward_pass,
    in_backward,
    without_dispatch_modes,
)
from tbhooks.capture.compile.dynamo import dynamo_skip
from tbhooks.capture.hooks.active_step import ActiveStep, StepListener
from tbhooks.capture.hooks.eager_hooks import EagerGradientHook
from tbhooks.capture.hooks.hook_types import GradientHook, ScaledLossHook
from tbhooks.capture.hooks.manager import hook_tensor
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recording.recorder import can_be_one_of_many
from tbhooks.data.self_report import Report, describe_exception
from tbhooks.reduction.torch_rows import has_no_data


class GradientReader:
    """Registers gradient hooks on outputs and records the gradients they are called with."""

    def __init__(self, step: ActiveStep, listener: StepListener | None, report: Report) -> None:
        self._step = step
        self._listener = listener
        self._report = report

    def hook(self, context: StepContext, tensor: Tensor) -> GradientHook:
        """Registers a gradient hook on an output of the open step."""
        hook = GradientHook(self, context, tensor._is_view())
        if hook.is_view:
            # If the base of a view was changed in place, torch makes a new grad_fn when it is read. A hook that is
            # registered before that would never be called.
            tensor.grad_fn  # noqa: B018
        handle = hook_tensor(tensor, hook)
        if tensor.is_leaf:  # it outlives the step, and so would the hook
            context.leaf_handles.append(handle)
        context.gradient_hooks.append(hook)
        return hook

    def hook_loss(self, loss: Tensor, scale: Tensor) -> None:
        """Gradients of the backward pass that starts from this loss are divided by its scale."""
        context = self._step.context
        if context is not None and loss.requires_grad:
            hook_tensor(loss, ScaledLossHook(self, context, scale))

    def on_gradient(self, hook: GradientHook | EagerGradientHook, gradient: Tensor) -> None:
        context, recorder, report = self._step.context, self._step.recorder, self._report
        if context is None or hook.step is not context or self._is_captured():
            return
        started = report.enter()
        self._step.eager.close()
        try:
            hook.fired = True
            self._note_backward(context)
            self._mark_reached(context, hook.passes)
            if hook.sites:
                report.hooks_fired += 1
                self._record(context, hook.sites, gradient)
                if recorder.metrics is not None:
                    for site in map(recorder.sites.__getitem__, hook.sites):
                        recorder.read_metrics(
                            "gradient", site.path, site.index, gradient, context.running, context.scale
                        )
            self._step.open_eager_backward(context, hook.passes)
        except Exception as problem:
            hook.failure = f"its gradient hook failed: {describe_exception(problem)}"
            report.error("gradient hook", problem)
        finally:
            report.leave(started)

    def _is_captured(self) -> bool:
        capture = self._step.graph_capture
        return capture.is_capturing() and capture.is_running()

    def _record(self, context: StepContext, sites: list[int], gradient: Tensor) -> None:
        """Reduces a gradient for all sites whose output is its tensor."""
        recorder, span = self._step.recorder, None
        if context.scale is None and can_be_one_of_many(gradient):
            span = recorder.record(sites[0], gradient, None, context.running, True)
        elif has_no_data(gradient):
            self._report.mark_unseen(str(recorder.sites[sites[0]]), "the tensor holds no data, as in torch.func")
        else:
            with without_dispatch_modes():
                span = recorder.record(sites[0], gradient, context.scale, context.running)
        if span is not None:
            for other in sites[1:]:
                recorder.share(other, span, context.running)

    def on_scaled_loss(self, hook: ScaledLossHook) -> None:
        context = self._step.context
        if context is not None and hook.step is context and not self._step.graph_capture.is_running():
            with self._report.guarded("reading the loss scale"):
                self._step.eager.close()
                context.scale = hook.scale
                self._note_backward(context)

    def _mark_reached(self, context: StepContext, passes: list[Pass]) -> None:
        """A backward goes through these forwards: they are part of the step, whatever mode the model was in."""
        step = self._step
        step.admission.backpropagates = True
        for forward in passes:
            if context.running in forward.reached_by:
                continue
            if step.is_provisional(forward) and step.evaluation is not None:
                step.evaluation.drop({forward})
            forward.reached_by.add(context.running)
            context.called |= forward.paths

    def _note_backward(self, context: StepContext) -> None:
        """Once for each backward pass: passes inside passes (reentrant checkpoints) are part of it."""
        if context.backward != NO_BACKWARD or self._listener is None or not in_backward():
            return
        context.backward = backward_pass()
        context.running = self._step.passes.begin_backward()
        self._listener.backward_begins()
        at_end_of_backward(partial(self._end_backward, context))

    @dynamo_skip
    def _end_backward(self, context: StepContext) -> None:
        self._step.eager.close()
        context.backward, context.running.ended = NO_BACKWARD, True
        if self._step.context is context and self._listener is not None:
            with self._report.guarded("after backward"), without_dispatch_modes():
                self._listener.backward_ended(context.scale)
        context.scale = None
